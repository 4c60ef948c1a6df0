"""Weights from files of any usual kind, read as plain data: never as code."""

import io
import re
from pathlib import Path

import torch
from torch import Tensor, nn

from ed.runtime.files import check_seal, is_sealed

WRAPPERS = ("training", "state_dict", "model")  # keys under which files keep their state dict
PREFIXES = re.compile(r"^((module|_orig_mod)\.)+")  # of DataParallel and of torch.compile


def read_weights(path: Path, given: str) -> dict[str, Tensor]:
    """The state dict in a checkpoint of ours (last.pt), a torch file or a safetensors file.

    `given` is the option as it was given, for messages.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{given}: no such file")
    try:
        state = _read(path)
    except Exception as error:  # torch and safetensors raise a dozen kinds
        if kind := re.search(r"Unsupported global: GLOBAL (\S+)", str(error)):
            raise ValueError(
                f"{given}: holds a {kind[1]}, and to read that would run code from the file. Save "
                "the weights alone: torch.save(model.state_dict(), FILE)"
            ) from error
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise ValueError(
            f"{given}: not a whole file of weights ({reason}). Copy or train it again; a "
            "TorchScript archive must be saved as a plain state dict first"
        ) from error
    while wrapped := [name for name in WRAPPERS if isinstance(state.get(name), dict)]:
        state = state[wrapped[0]]
    return {PREFIXES.sub("", name): value for name, value in state.items()}


def load_weights(
    model: nn.Module, state: dict[str, Tensor], given: str, *, into: str = "model.architecture"
) -> nn.Module:
    """The model with these weights; what does not fit into what is told in one line."""
    try:
        model.load_state_dict(state)
        return model
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{given}: does not fit {into} ({reason} ...)") from error


def _read(path: Path) -> dict:
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    content = path.read_bytes()
    if is_sealed(content):  # a checkpoint of ours
        check_seal(content)
    state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    if not isinstance(state, dict):
        raise ValueError(f"it holds a {type(state).__name__}, not a state dict")
    return state
