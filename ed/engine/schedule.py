"""Learning-rate schedules as pure functions of the step, so that resuming cannot reset them."""

import math
from collections.abc import Sequence

SCHEDULES = ("cosine", "linear", "multistep", "constant")


def learning_rate_factor(
    step: int,
    total: int,
    *,
    warmup: int = 0,
    schedule: str = "cosine",
    milestones: Sequence[float] = (),
    gamma: float = 0.1,
) -> float:
    """Factor on the base learning rate at `step` of `total`: linear warm-up, then the schedule.

    Args:
        warmup: steps from 0 up to the full rate.
        milestones: fractions of training at which `multistep` multiplies by `gamma`.
    """
    if step < warmup:
        return (step + 1) / warmup  # the first step already moves
    if schedule == "multistep":
        return gamma ** sum(step >= fraction * total for fraction in milestones)
    if schedule == "constant":
        return 1.0
    rest = (step - warmup) / max(1, total - warmup)
    return (1 + math.cos(math.pi * rest)) / 2 if schedule == "cosine" else 1 - rest
