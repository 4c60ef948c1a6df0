"""Pearson correlation between measures and a metric, over the cells of a table.

A point is a cell: the means over its seeds, once all of them are done. Intervals are percentile
bootstrap over points, with a generator of their own, so that the same rows give the same numbers.
Networks that have not fitted the training set have a small gap whatever their complexity, so each
variant is also correlated among the fitted ones alone, and given the training accuracy.

scipy.stats.bootstrap draws the same, but gives no interval once a resample has a single point.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ed.analysis.collect import Row
from ed.analysis.spec import Table
from ed.analysis.stats import summarise
from ed.runtime.runs import Status

RESAMPLES = 10_000
LEAST_POINTS = 4  # three points and a line: r says nothing
FITTED = 99.0  # a training accuracy (%) above this counts as fitted
ROUNDING = 1e-12  # less than this of a variance is rounding error
SEED = 0


@dataclass(frozen=True)
class Estimate:
    """A correlation coefficient with its 95 % interval.

    Attributes:
        r: None for too few points, or where one side does not vary.
        points: how many it is computed from.
    """

    r: float | None = None
    low: float | None = None
    high: float | None = None
    points: int = 0


@dataclass(frozen=True, eq=False)  # arrays have no single truth
class Correlation:
    """One variant of a measure against the metric of the study.

    Attributes:
        measure, metric: the measure's name, and the metric that is this variant of it.
        cells: names of the points, with their values x (the measure) and y.
        train: their training accuracies in percent; nan where unknown.
        whole: Pearson's r over all points.
        fitted: the same over the points with a training accuracy above FITTED.
        partial: the partial correlation given the training accuracy.
        selected: the variant with the largest |r| of its measure over all points.
        largest: the variant with the largest signed r.
    """

    measure: str
    metric: str
    cells: tuple[str, ...]
    x: np.ndarray
    y: np.ndarray
    train: np.ndarray
    whole: Estimate
    fitted: Estimate
    partial: Estimate
    selected: bool = False
    largest: bool = False

    @property
    def underfitted(self) -> np.ndarray:
        """Which points have a training accuracy of at most FITTED."""
        return self.train <= FITTED


def correlations(table: Table, rows: Sequence[Row]) -> list[Correlation]:
    """Every variant of every measure of the table's study, in its order."""
    study = table.correlation
    against = cell_means(table, rows, study.against)
    train = cell_means(table, rows, study.train) if study.train else {}
    found = []
    for measure, variants in study.measures.items():
        values = {metric: cell_means(table, rows, metric) for metric in variants}
        own = [_correlate(measure, metric, values[metric], against, train) for metric in variants]
        known = [variant for variant in own if variant.whole.r is not None]
        best = max(known, key=lambda variant: abs(variant.whole.r), default=None)
        top = max(known, key=lambda variant: variant.whole.r, default=None)
        found += [replace(v, selected=v is best, largest=v is top) for v in own]
    return found


def train_alone(table: Table, rows: Sequence[Row]) -> Estimate:
    """The training accuracy itself against the metric of the study."""
    study = table.correlation
    if study.train is None:
        return Estimate()
    train, against = (cell_means(table, rows, metric) for metric in (study.train, study.against))
    return _correlate("", study.train, train, against, {}).whole


def cell_means(table: Table, rows: Sequence[Row], metric: str) -> dict[str, float]:
    """Mean over the seeds of each cell that has all of them."""
    means = {}
    for name, cell in table.cells.items():
        own = [row for row in rows if row.home == cell.home and row.status == Status.DONE]
        values = [row.last[metric] for row in own if metric in row.last]
        if len(values) == len(table.seeds):
            means[name] = summarise(values).mean
    return means


def pearson(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Pearson's r along the last axis; nan where one side does not vary.

    scipy.stats.pearsonr takes eight times as long for 10,000 resamples.
    """
    varies = (np.ptp(x, axis=-1) > 0) & (np.ptp(y, axis=-1) > 0)
    x, y = (side - side.mean(-1, keepdims=True) for side in (x, y))
    with np.errstate(invalid="ignore", divide="ignore"):
        r = (x * y).sum(-1) / np.sqrt((x**2).sum(-1) * (y**2).sum(-1))
    return np.where(varies, np.clip(r, -1, 1), np.nan)


def line_and_band(
    x: np.ndarray, y: np.ndarray, at: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Least-squares line through the points, and the 95 % band of such lines: (line, low, high)."""
    draws = _resamples(len(x))
    lines = _lines(x[draws], y[draws], at)
    lines = lines[np.isfinite(lines).all(-1)]  # a draw of one point only has no line
    low, high = np.quantile(lines, (0.025, 0.975), axis=0)
    return _lines(x[None], y[None], at)[0], low, high


def partial(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """Correlation of x and y given z: Pearson's r of what linear fits on z leave of both.

    Along the last axis; nan where a side does not vary, or where z leaves nothing of it.
    """
    xy, xz, yz = pearson(x, y), pearson(x, z), pearson(y, z)
    left = (1 - xz**2) * (1 - yz**2)
    with np.errstate(invalid="ignore", divide="ignore"):
        r = (xy - xz * yz) / np.sqrt(np.where(left > ROUNDING, left, np.nan))
    return np.clip(r, -1, 1)


def _correlate(
    measure: str,
    metric: str,
    values: dict[str, float],
    against: dict[str, float],
    train: dict[str, float],
) -> Correlation:
    cells = tuple(name for name in values if name in against)
    x, y = (np.array([side[name] for name in cells]) for side in (values, against))
    accuracies = np.array([train.get(name, np.nan) for name in cells])
    known, fitted = np.isfinite(accuracies), accuracies > FITTED
    sides = (x[known], y[known], accuracies[known])
    return Correlation(
        measure,
        metric,
        cells,
        x,
        y,
        accuracies,
        whole=_estimate(pearson, x, y),
        fitted=_estimate(pearson, x[fitted], y[fitted]),
        partial=_estimate(partial, *sides, least=LEAST_POINTS + 1),  # z takes one more parameter
    )


def _estimate(statistic: Callable, *sides: np.ndarray, least: int = LEAST_POINTS) -> Estimate:
    """A statistic of points (one array per coordinate), with its bootstrap interval."""
    points = len(sides[0])
    if points < least or not all(np.ptp(side) for side in sides):
        return Estimate(points=points)
    r = float(statistic(*sides))
    if not np.isfinite(r):
        return Estimate(points=points)
    draws = _resamples(points)
    resampled = statistic(*(side[draws] for side in sides))
    low, high = np.quantile(resampled[np.isfinite(resampled)], (0.025, 0.975))
    return Estimate(r, float(low), float(high), points)


def _resamples(count: int) -> np.ndarray:
    """(RESAMPLES, count) indices, the same for every variant: their r are compared pairwise."""
    return np.random.default_rng(SEED).integers(count, size=(RESAMPLES, count))


def _lines(x: np.ndarray, y: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Lines fitted to (B, n) points, at (m,) places: (B, m)."""
    middle, height = x.mean(-1, keepdims=True), y.mean(-1, keepdims=True)
    with np.errstate(invalid="ignore", divide="ignore"):
        slope = ((x - middle) * (y - height)).sum(-1, keepdims=True)
        slope = slope / ((x - middle) ** 2).sum(-1, keepdims=True)
    return height + slope * (at - middle)
