"""Splits a model at the space in which paths run."""

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from ed.core.validate import choice

SPACES = ("input", "embedding", "block1")


def split(model: nn.Module, space: str) -> tuple[Callable[[Tensor], Tensor], ...]:
    """Returns two functions: from inputs to features of `space`, and from features to outputs."""
    choice("task.space", space, SPACES)
    if not hasattr(model, "to_space"):
        raise ValueError(
            f"task.space={space}: not supported by {type(model).__name__}; set task.space=input"
        )
    return partial(model.to_space, space=space), partial(model.from_space, space=space)
