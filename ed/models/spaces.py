"""Splits a model into the part before and the part after the space of the paths."""

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from ed.core.validate import choice

SPACES = ("input", "embedding", "block1")


def split(model: nn.Module, space: str) -> tuple[Callable[[Tensor], Tensor], ...]:
    """Two functions: inputs -> features of `space`, and features -> outputs."""
    choice("task.space", space, SPACES)
    if not hasattr(model, "to_space"):
        raise ValueError(
            f"task.space={space}: {type(model).__name__} has no inner spaces; set task.space=input"
        )
    return partial(model.to_space, space=space), partial(model.from_space, space=space)
