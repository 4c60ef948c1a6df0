"""Evaluation splits of a user's own data: its own split, or a seeded part of the training set."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ed.runtime.streams import generator

EVALUATION = ("val", "validation", "valid", "dev", "test")  # in order of preference


def evaluation_split(names: Sequence[str], wanted: str | None, data: str) -> str | None:
    """Returns the split to evaluate on; None if there is only a training set.

    Args:
        names: the splits of the data.
        wanted: task.split; None picks the first of `EVALUATION` that exists.
        data: task.data, for messages.
    """
    if wanted is None:
        return next((name for name in EVALUATION if name in names), None)
    if wanted not in names:
        raise ValueError(f"task.split={wanted}: task.data={data} has only {', '.join(names)}")
    return wanted


def held_out(count: int, part: float, seed: int) -> tuple[Tensor, Tensor]:
    """Splits `count` examples into sorted training and evaluation indices."""
    evaluated = round(part * count)
    if not 0 < evaluated < count:
        raise ValueError(
            f"task.holdout={part}: splits {count} examples into {count - evaluated} for training "
            f"and {evaluated} for evaluation; change it, or add data"
        )
    order = torch.randperm(count, generator=generator(seed, "holdout"))
    return order[evaluated:].sort().values, order[:evaluated].sort().values
