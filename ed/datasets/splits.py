"""Splits of a user's own data: the ones it comes with, or a seeded part of the training set."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ed.runtime.streams import generator

EVALUATION = ("val", "validation", "valid", "dev", "test")  # the first one found is used


def evaluation_split(names: Sequence[str], wanted: str | None, data: str) -> str | None:
    """Which split to evaluate on; None: the data have none besides the training set.

    Args:
        names: of the splits in the data.
        wanted: task.split; None: the first of `EVALUATION` that is there.
        data: task.data, for messages.
    """
    if wanted is None:
        return next((name for name in EVALUATION if name in names), None)
    if wanted not in names:
        raise ValueError(
            f"task.split={wanted}: task.data={data} has no such split, only {', '.join(names)}"
        )
    return wanted


def held_out(count: int, part: float, seed: int) -> tuple[Tensor, Tensor]:
    """Indices of `count` examples to train on and to evaluate on, both in their order."""
    evaluated = round(part * count)
    if not 0 < evaluated < count:
        raise ValueError(
            f"task.holdout={part}: of {count} examples that leaves {count - evaluated} to train on "
            f"and {evaluated} to evaluate on; use another part, or more data"
        )
    order = torch.randperm(count, generator=generator(seed, "holdout"))
    return order[evaluated:].sort().values, order[:evaluated].sort().values
