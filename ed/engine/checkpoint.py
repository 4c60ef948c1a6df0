"""Checkpoints that survive a kill: written to a temporary file, renamed, the previous one kept.

`last.pt` is the newest, `previous.pt` the one before it; `last.pt.tmp`, where a kill left it whole
between the renames, is newer than both. Each is a plain torch file that ends with a digest of its
contents: `torch.load(path, weights_only=True)` opens it, and we notice any damage and use another.
"""

import io
import os
import re
from pathlib import Path
from pickle import UnpicklingError  # raised by torch.load for what is not plain data

import torch
from torch import Tensor, nn

from ed.runtime.files import check_seal, seal, write_atomic
from ed.runtime.runs import CHECKPOINTS, LAST, PREVIOUS, UNNAMED, WEIGHTS, RunError


class SaveError(RuntimeError):
    """A checkpoint could not be written; the ones on disk are untouched."""


def save_checkpoint(folder: Path, state: dict) -> None:
    """Writes `last.pt` atomically; the old one becomes `previous.pt`."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    _check_plain(buffer)
    last, temporary = folder / LAST, folder / UNNAMED
    content = buffer.getbuffer()
    digest = seal(content)
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.write(digest)
            file.flush()
            os.fsync(file.fileno())
        if last.exists():
            os.replace(last, folder / PREVIOUS)
        os.replace(temporary, last)
    except OSError as error:
        if not folder.is_dir():
            raise SaveError(
                f"could not save a checkpoint: {folder} is gone, so someone removed or renamed it "
                "during the run; restore it and run the same command again, or begin anew"
            ) from error
        temporary.unlink(missing_ok=True)
        raise _cannot_save("a checkpoint", folder, error) from error


def save_weights(folder: Path, model: nn.Module) -> None:
    """Writes `model.safetensors`, the weights and buffers of a trained model."""
    from safetensors.torch import save

    # copies: safetensors rejects tensors that share memory, such as tied embeddings
    state = {
        name: value.detach().clone(memory_format=torch.contiguous_format).cpu()
        for name, value in model.state_dict().items()
    }
    try:
        write_atomic(folder / WEIGHTS, save(state))
    except OSError as error:
        raise _cannot_save(WEIGHTS, folder, error) from error


def trained_weights(folder: Path, warn) -> dict[str, Tensor] | None:
    """The model's state dict in a run folder: of the newest good checkpoint, or the weights file.

    The weights file alone serves where somebody shares a model without its training state.
    """
    state = load_checkpoint(folder, warn, _without_model)
    if state is not None:
        return state["training"]["model"]
    if not (folder / WEIGHTS).exists():
        return None
    from safetensors.torch import load_file

    return load_file(folder / WEIGHTS)


def load_checkpoint(folder: Path, warn, misfit=None) -> dict | None:
    """The newest good checkpoint, or None where there is none. `warn` is called for damaged ones.

    `misfit` returns why a checkpoint is not one of this run, or None. Such a one is skipped where
    an older one fits, and otherwise an error: going on would overwrite it.

    One that cannot be read (no permission, a disk that does not answer) is no damaged one: OSError,
    as going on from an older one would overwrite it.
    """
    foreign = None
    for name in CHECKPOINTS:
        path = folder / name
        if not path.exists():
            continue
        try:
            state = _read(path)
            reason = misfit(state) if misfit else None
            if reason is None:
                return state
            foreign = f"{path} is not a checkpoint of this run: {reason}"
            warn(f"{foreign}; looking for an older one")
        except (ValueError, RuntimeError, EOFError) as error:
            reason = str(error).splitlines()[0]
            warn(f"{path} is damaged ({reason}): falling back to an older one, or to the start")
    if foreign:
        raise RunError(f"{foreign}. Give the stored values or another system.run_dir")
    return None


def remove_checkpoints(folder: Path) -> None:
    for name in (*CHECKPOINTS, WEIGHTS):
        (folder / name).unlink(missing_ok=True)


def _cannot_save(what: str, folder: Path, error: OSError) -> SaveError:
    return SaveError(
        f"could not save {what} in {folder} ({error.strerror}): free some space and run the same "
        "command again; it goes on from the last good checkpoint"
    )


def _check_plain(buffer: io.BytesIO) -> None:
    """Refuses what could be written but not be loaded again: a run would lose all its work."""
    buffer.seek(0)
    try:
        torch.load(buffer, map_location="meta", weights_only=True)
    except UnpicklingError as error:
        kind = re.search(r"GLOBAL (\S+)", str(error))
        raise SaveError(
            f"no checkpoint can hold {kind.group(1) if kind else 'this state'}: the state_dict of "
            "a task or model may have tensors, and Python's own numbers, text, lists and dicts; "
            "convert it there, e.g. by float(...) or torch.as_tensor(...)"
        ) from None


def _read(path: Path) -> dict:
    content = path.read_bytes()
    check_seal(content)
    state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    if not isinstance(state, dict):
        raise ValueError(f"it holds a {type(state).__name__}, not the state of a run")
    return state


def _without_model(state: dict) -> str | None:
    """Why no model can be read from a checkpoint."""
    training = state.get("training")
    has_model = isinstance(training, dict) and isinstance(training.get("model"), dict)
    return None if has_model else "it holds no model"
