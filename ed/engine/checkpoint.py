"""Checkpoints that survive a kill: written to a temporary file, then renamed.

`last.pt` is the newest and `previous.pt` the one before. A complete `last.pt.tmp`, left by a kill
between the two renames, is newer than both. Each is a plain torch file, which
`torch.load(path, weights_only=True)` opens, with a digest at its end that reveals damage.
"""

import io
import os
import re
from pathlib import Path
from pickle import UnpicklingError  # raised by torch.load for anything but plain data

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
                f"{folder} is gone: it was removed or renamed during the run; restore it and run "
                "the same command again, or start over"
            ) from error
        temporary.unlink(missing_ok=True)
        raise _cannot_save("a checkpoint", folder, error) from error


def save_weights(folder: Path, model: nn.Module) -> None:
    """Writes the weights and buffers of a trained model to `model.safetensors`."""
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
    """The model's state dict from the newest good checkpoint, else from `model.safetensors`."""
    state = load_checkpoint(folder, warn, _without_model)
    if state is not None:
        return state["training"]["model"]
    if not (folder / WEIGHTS).exists():
        return None
    from safetensors.torch import load_file

    return load_file(folder / WEIGHTS)


def load_checkpoint(folder: Path, warn, misfit=None) -> dict | None:
    """The newest good checkpoint; None if there is none. Calls `warn` for each damaged one.

    A checkpoint of another run is skipped if an older one fits; otherwise it is an error, because
    the run would overwrite it. So is a file that cannot be read (OSError), which may be intact.

    Args:
        misfit: returns why a state does not belong to this run, or None if it does.
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
        raise RunError(f"{foreign}. Use the stored values or another system.run_dir")
    return None


def warn_if_damaged(folder: Path, warn) -> None:
    """Calls `warn` if the last checkpoint of a finished run is damaged."""
    path = folder / LAST
    if not path.exists():
        return
    try:
        check_seal(path.read_bytes())
    except ValueError as error:
        warn(f"{path} is damaged ({error}): the run's results are not affected, but do not use it")


def _cannot_save(what: str, folder: Path, error: OSError) -> SaveError:
    return SaveError(
        f"could not save {what} in {folder} ({error.strerror}): free some space and run the same "
        "command again; it resumes from the last good checkpoint"
    )


def _check_plain(buffer: io.BytesIO) -> None:
    """Rejects a state that could be written but not loaded again."""
    buffer.seek(0)
    try:
        torch.load(buffer, map_location="meta", weights_only=True)
    except UnpicklingError as error:
        kind = re.search(r"GLOBAL (\S+)", str(error))
        raise SaveError(
            f"a checkpoint cannot hold {kind.group(1) if kind else 'this state'}: the state_dict "
            "of a task or model may contain tensors, numbers, strings, lists and dicts; convert "
            "other values, e.g. with float(...) or torch.as_tensor(...)"
        ) from None


def _read(path: Path) -> dict:
    content = path.read_bytes()
    check_seal(content)
    state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    if not isinstance(state, dict):
        raise ValueError(f"it contains a {type(state).__name__}, not the state of a run")
    return state


def _without_model(state: dict) -> str | None:
    """Why no model can be read from a checkpoint."""
    training = state.get("training")
    has_model = isinstance(training, dict) and isinstance(training.get("model"), dict)
    return None if has_model else "it contains no model"
