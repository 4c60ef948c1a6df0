"""Cutting a model in two: up to the space in which paths run, and the rest."""

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from ed.core.validate import choice

SPACES = ("input", "embedding", "block1")


def split(model: nn.Module, space: str) -> tuple[Callable[[Tensor], Tensor], ...]:
    """(inputs -> features of `space`, features -> outputs) for models that can be cut there."""
    choice("task.space", space, SPACES)
    if not hasattr(model, "to_space"):
        raise ValueError(
            f"task.space={space}: {type(model).__name__} has no inner spaces; set task.space=input"
        )
    return partial(model.to_space, space=space), partial(model.from_space, space=space)
