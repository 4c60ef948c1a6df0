"""Warnings about the line that called this package."""

import inspect
import traceback
import warnings

import torch

# packages between that line and the warning
BETWEEN = (__name__.partition(".")[0], "dataclasses", "functools")


def warn(message: str) -> None:
    # torch.compile cannot trace a walk over the stack
    warnings.warn(message, stacklevel=1 if torch.compiler.is_compiling() else _level())


def _level() -> int:
    """Returns the stack level of the caller's line, seen from the caller of this function."""
    frames = traceback.walk_stack(inspect.currentframe())
    packages = (frame.f_globals.get("__name__", "").partition(".")[0] for frame, _ in frames)
    return next((level for level, name in enumerate(packages) if name not in BETWEEN), 1)
