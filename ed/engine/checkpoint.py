"""Crash-safe checkpoints, written to a temporary file and then renamed.

`last.pt` is the newest checkpoint and `previous.pt` the one before it. A kill between the two
renames leaves a complete `last.pt.tmp`, which is newer than both. Checkpoints are plain torch files
that `torch.load(path, weights_only=True)` can read. A digest at the end detects damage.
"""

import io
import logging
import os
import re
from pathlib import Path
from pickle import UnpicklingError  # raised by torch.load for anything but plain data

import torch
from torch import Tensor, nn

from ed.models.weights import read_state
from ed.runtime.files import BLANK, STAMP, check_seal, create, read_bytes, seal, stamp, write_atomic
from ed.runtime.runs import (
    CHECKPOINTS,
    LAST,
    PLACES,
    PREVIOUS,
    UNNAMED,
    WEIGHTS,
    RunError,
    differences,
    flat,
)

logger = logging.getLogger("ed")


class SaveError(RuntimeError):
    """Raised if a checkpoint cannot be written; those on disk remain intact."""


def save_checkpoint(folder: Path, state: dict) -> None:
    """Writes `last.pt` atomically and renames the old one to `previous.pt`."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    _check_plain(buffer)
    last, temporary = folder / LAST, folder / UNNAMED
    content = buffer.getbuffer()
    digest = seal(content)
    try:
        with create(temporary) as file:
            file.write(content)
            file.write(digest)
            file.flush()
            os.fsync(file.fileno())
        if last.exists():
            os.replace(last, folder / PREVIOUS)
        os.replace(temporary, last)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise _cannot_save("a checkpoint", folder, error) from error


def save_weights(folder: Path, model: nn.Module) -> None:
    """Writes the weights and buffers of a trained model to `model.safetensors`."""
    from safetensors.torch import save

    # clone, because safetensors rejects tensors that share memory, such as tied embeddings
    state = {
        name: value.detach().clone(memory_format=torch.contiguous_format).cpu()
        for name, value in model.state_dict().items()
    }
    try:
        write_atomic(folder / WEIGHTS, stamp(save(state, {STAMP: BLANK.decode()})))
    except OSError as error:
        raise _cannot_save(WEIGHTS, folder, error) from error


def trained_weights(folder: Path, config: dict) -> dict[str, Tensor] | None:
    """Loads the state dict from the newest intact checkpoint, else from `model.safetensors`.

    A checkpoint of a run with other settings than `config` raises RunError. Locations, classes and
    settings that only one of the two has are not compared.
    """

    def misfit(state: dict) -> str | None:
        return _without_model(state) or other_config(state, config, shared=True)

    state = load_checkpoint(folder, misfit)
    if state is not None:
        return state["training"]["model"]
    path = folder / WEIGHTS
    return read_state(path, str(path)) if path.exists() else None


def load_checkpoint(folder: Path, misfit=None) -> dict | None:
    """Loads the newest intact checkpoint, or returns None if there is none.

    Damaged checkpoints are skipped with a warning. A checkpoint of another run is skipped if there
    is an older one of this run, and raises RunError otherwise, because training would overwrite it.
    A file that cannot be read raises OSError, because it may be intact.

    Args:
        misfit: returns the reason a state does not belong to this run, or None if it does.
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
            logger.warning(f"{foreign}; trying an older one")
        except (ValueError, RuntimeError, EOFError) as error:
            reason = str(error).splitlines()[0]
            logger.warning(f"{path} is damaged ({reason}): trying an older one, if there is any")
    if foreign:
        raise RunError(f"{foreign}. Move it, use its values, or use another system.run_dir")
    return None


def warn_if_damaged(folder: Path) -> None:
    """Warns if the last checkpoint of a finished run is damaged."""
    path = folder / LAST
    if not path.exists():
        return
    try:
        check_seal(read_bytes(path))
    except ValueError as error:
        effect = "the run's results are not affected, but do not use it"
        logger.warning(f"{path} is damaged ({error}): {effect}")


def check_exists(folder: Path) -> None:
    """Raises SaveError if a run folder was removed during the run."""
    if not folder.is_dir():
        raise SaveError(
            f"{folder} is gone: it was removed or renamed during the run; restore it and run the "
            "same command again, or start over"
        )


def _cannot_save(what: str, folder: Path, error: OSError) -> SaveError:
    check_exists(folder)
    return SaveError(
        f"could not save {what} in {folder} ({error.strerror}): free some space and run the same "
        "command again; it resumes from the last good checkpoint"
    )


def _check_plain(buffer: io.BytesIO) -> None:
    """Raises SaveError if the state has more than plain data, which torch.load would reject."""
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
    content = read_bytes(path)
    check_seal(content)
    state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    if not isinstance(state, dict):
        raise ValueError(f"it contains a {type(state).__name__}, not the state of a run")
    return state


def other_config(state: dict, config: dict, *, shared: bool = False) -> str | None:
    """Returns how a checkpoint's config differs from the identity `config`, or None.

    Args:
        shared: compare only settings that both have, without locations and classes.
    """
    stored = state.get("config", config)  # older versions did not store it
    if not isinstance(stored, dict):
        return "its config is not a mapping"
    if shared:
        stored, config = _shared(stored, config), _shared(config, stored)
    found = "; ".join(differences(stored, config))
    return f"it has another config: {found}" if found else None


def _shared(config: dict, other: dict) -> dict:
    kept = flat(other).keys() - PLACES
    return {
        key: value
        for key, value in flat(config).items()
        if key in kept and not key.endswith("_target_")
    }


def _without_model(state: dict) -> str | None:
    """Returns a reason if a checkpoint contains no model, else None."""
    training = state.get("training")
    has_model = isinstance(training, dict) and isinstance(training.get("model"), dict)
    return None if has_model else "it contains no model"
