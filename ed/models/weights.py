"""Reads weights from common file formats without executing code from the file."""

import io
import re
from pathlib import Path

import torch
from torch import Tensor, nn

from ed.core.validate import brief
from ed.runtime.files import STAMP, check_seal, check_stamp, is_sealed

WRAPPERS = ("training", "state_dict", "model")  # keys that may contain the state dict
PREFIXES = re.compile(r"^((module|_orig_mod)\.)+")  # added by DataParallel and torch.compile


def read_weights(path: Path, given: str) -> dict[str, Tensor]:
    """Reads the state dict of a last.pt, torch or safetensors file.

    `given` is the config key and value that error messages start with.
    """
    state = read_state(path, given)
    while wrapped := [name for name in WRAPPERS if isinstance(state.get(name), dict)]:
        state = state[wrapped[0]]
    return {PREFIXES.sub("", str(name)): value for name, value in state.items()}


def read_state(path: Path, given: str) -> dict:
    """Reads a torch or safetensors file as it is; see `read_weights`."""
    if not path.is_file():
        raise FileNotFoundError(f"{given}: no such file")
    try:
        return _read(path)
    except Exception as error:  # torch and safetensors raise many types
        if kind := re.search(r"Unsupported global: GLOBAL (\S+)", str(error)):
            raise ValueError(
                f"{given}: contains a {kind[1]}, which could run code from the file; save only the "
                "weights with torch.save(model.state_dict(), FILE)"
            ) from error
        raise ValueError(
            f"{given}: damaged, or not a weights file ({brief(error)}); copy it again. Convert "
            "TorchScript archives to a state dict first"
        ) from error


def load_weights(
    model: nn.Module, state: dict[str, Tensor], given: str, *, into: str = "model.architecture"
) -> nn.Module:
    """Loads the weights and returns the model; mismatches raise a one-line error."""
    try:
        model.load_state_dict(state)
        return model
    except (RuntimeError, AttributeError, TypeError) as error:  # the last two: odd keys
        raise ValueError(f"{given}: does not match {into} ({brief(error)} ...)") from error


def _read(path: Path) -> dict:
    if path.suffix == ".safetensors":
        from safetensors import safe_open
        from safetensors.torch import load_file

        with safe_open(path, "pt") as file:
            digest = (file.metadata() or {}).get(STAMP)
        if digest is not None:  # written by this project
            check_stamp(path.read_bytes(), digest)
        return load_file(path)
    content = path.read_bytes()
    if is_sealed(content):  # a checkpoint of this project
        check_seal(content)
    state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    if not isinstance(state, dict):
        raise ValueError(f"it contains a {type(state).__name__}, not a state dict")
    return state
