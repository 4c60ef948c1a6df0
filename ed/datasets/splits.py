"""Chooses evaluation data: an existing split, or a random part of the training set."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ed.runtime.streams import generator

EVALUATION = ("val", "validation", "valid", "dev", "test")  # in order of preference


def evaluation_split(names: Sequence[str], wanted: str | None, data: str) -> str | None:
    """Returns the split to evaluate on, or None if there is only a training set.

    Args:
        names: the splits that the data has.
        wanted: task.split; None picks the first of `EVALUATION` that exists.
        data: task.data, for error messages.
    """
    if wanted is None:
        return next((name for name in EVALUATION if name in names), None)
    if wanted not in names:
        known = f"use {', '.join(names)}" if names else "it has none; use task.split=null"
        raise ValueError(f"task.split={wanted}: not a split of task.data={data}; {known}")
    return wanted


def held_out(count: int, part: float, seed: int) -> tuple[Tensor, Tensor]:
    """Randomly splits `count` examples; returns sorted training and evaluation indices."""
    evaluated = round(part * count)
    if not 0 < evaluated < count:
        raise ValueError(
            f"task.holdout={part}: splits {count} examples into {count - evaluated} for training "
            f"and {evaluated} for evaluation; change task.holdout or add data"
        )
    order = torch.randperm(count, generator=generator(seed, "holdout"))
    return order[evaluated:].sort().values, order[:evaluated].sort().values
