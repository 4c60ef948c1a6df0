"""Finds the step at which a network starts to generalize, and what peaks there."""

from collections.abc import Iterable

from ed.analysis.collect import series

GENERALIZES = 50.0  # a validation accuracy (%) above this is a transition


def transition(history: Iterable[dict]) -> int | None:
    """Returns the first step whose validation accuracy is above GENERALIZES, or None."""
    steps, values = series(history, "eval/acc")
    return next((s for s, v in zip(steps, values, strict=True) if v > GENERALIZES), None)


def highest(history: Iterable[dict], key: str) -> tuple[int, float] | None:
    """Returns the step and value of a metric's maximum; None if it was not logged."""
    points = zip(*series(history, key), strict=True)
    return max(points, key=lambda point: point[1], default=None)
