"""Pearson correlation between measures and a metric, over the cells of a table.

Each point is the mean of a cell over `common_seeds`, so all points average equally many runs.
Intervals come from a percentile bootstrap over the points, with a fixed seed. Points that differ
only in the study's `replicates` can be near copies, so they are drawn together. Drawn one by one,
they would make the intervals too narrow. Networks that have not fitted the training set can have a
small gap whatever their complexity. Each variant is therefore also correlated over fitted networks
only, and with the training accuracy as a control.

scipy.stats.bootstrap is not used: it returns no interval if a resample repeats a single point.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ed.analysis.collect import Row, finished
from ed.analysis.spec import Table
from ed.analysis.stats import summarise
from ed.runtime.runs import BROKEN, Status

RESAMPLES = 10_000
LEAST_POINTS = 4  # with three independent points or fewer, r is meaningless
FITTED = 99.0  # a training accuracy (%) above this counts as fitted
ROUNDING = 1e-12  # a smaller fraction of the variance is rounding error
SEED = 0


@dataclass(frozen=True)
class Estimate:
    """A correlation coefficient with its 95 % interval.

    Attributes:
        r: None if there are too few points or one variable is constant.
        points: number of points.
    """

    r: float | None = None
    low: float | None = None
    high: float | None = None
    points: int = 0


@dataclass(frozen=True, eq=False)  # arrays cannot be compared with ==
class Correlation:
    """The correlation of one variant of a measure with the metric of the study.

    Attributes:
        measure, metric: the measure's name, and the metric of this variant.
        cells: names of the points.
        x, y: values of the measure and of the metric, one per cell.
        train: training accuracies in percent; nan if unknown.
        groups: a number per cell; cells with the same number are drawn together.
        whole: Pearson's r over all points.
        fitted: the same over the points with a training accuracy above FITTED.
        partial: the partial correlation given the training accuracy.
        selected: whether this variant has the largest |r| of its measure.
        largest: whether this variant has the largest signed r of its measure.
    """

    measure: str
    metric: str
    cells: tuple[str, ...]
    x: np.ndarray
    y: np.ndarray
    train: np.ndarray
    groups: np.ndarray
    whole: Estimate
    fitted: Estimate
    partial: Estimate
    selected: bool = False
    largest: bool = False

    @property
    def underfitted(self) -> np.ndarray:
        """Returns a mask of the points with a training accuracy of at most FITTED."""
        return self.train <= FITTED


def correlations(table: Table, rows: Sequence[Row]) -> list[Correlation]:
    """Correlates every variant of every measure in the table's study, in order."""
    study = table.correlation
    against = cell_means(table, rows, study.against)
    train = cell_means(table, rows, study.train) if study.train else {}
    groups = replicate_groups(table)
    found = []
    for measure, variants in study.measures.items():
        values = {metric: cell_means(table, rows, metric) for metric in variants}
        own = [
            _correlate(measure, metric, values[metric], against, train, groups)
            for metric in variants
        ]
        known = [variant for variant in own if variant.whole.r is not None]
        best = max(known, key=lambda variant: abs(variant.whole.r), default=None)
        top = max(known, key=lambda variant: variant.whole.r, default=None)
        found += [replace(v, selected=v is best, largest=v is top) for v in own]
    return found


def train_alone(table: Table, rows: Sequence[Row]) -> Estimate:
    """Correlates the training accuracy itself with the metric of the study."""
    study = table.correlation
    if study.train is None:
        return Estimate()
    train, against = (cell_means(table, rows, metric) for metric in (study.train, study.against))
    return _correlate("", study.train, train, against, {}, replicate_groups(table)).whole


def replicate_groups(table: Table) -> dict[str, int]:
    """Numbers the cells; those that differ only in the study's `replicates` get the same number."""
    key = table.correlation.replicates
    if key is None:
        return {name: number for number, name in enumerate(table.cells)}
    others = {
        name: frozenset(item for item in cell.settings.items() if item[0] != key)
        for name, cell in table.cells.items()
    }
    numbers = {settings: number for number, settings in enumerate(dict.fromkeys(others.values()))}
    return {name: numbers[settings] for name, settings in others.items()}


def common_seeds(table: Table, rows: Sequence[Row]) -> list[int]:
    """Returns the seeds whose runs have ended in all cells in which any run has.

    Failed runs have ended: their cells are left out, but other cells keep the seed.
    """
    ended = {(row.home, row.seed) for row in rows if row.status in (Status.DONE, *BROKEN)}
    begun = {home for home, _ in ended} & {cell.home for cell in table.cells.values()}
    return [seed for seed in table.seeds if begun and all((home, seed) in ended for home in begun)]


def cell_means(table: Table, rows: Sequence[Row], metric: str) -> dict[str, float]:
    """Returns each cell's mean over `common_seeds`, without cells that lack a value."""
    seeds, means = common_seeds(table, rows), {}
    for name, cell in table.cells.items():
        own = (row for row in rows if row.home == cell.home and row.seed in seeds)
        values = finished(own, metric)
        if values and len(values) == len(seeds):
            means[name] = summarise(values).mean
    return means


def pearson(x: np.ndarray, y: np.ndarray, times: np.ndarray | float = 1.0) -> np.ndarray:
    """Pearson's r along the last axis, with each point counted `times`; nan if x or y is constant.

    8x faster than scipy.
    """
    varies = _varies(x, times) & _varies(y, times)
    x, y = (side - _mean(side, times) for side in (x, y))
    with np.errstate(invalid="ignore", divide="ignore"):
        r = (times * x * y).sum(-1) / np.sqrt((times * x**2).sum(-1) * (times * y**2).sum(-1))
    return np.where(varies, np.clip(r, -1, 1), np.nan)


def line_and_band(
    x: np.ndarray, y: np.ndarray, at: np.ndarray, groups: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the least-squares line and its 95 % band: (line, low, high)."""
    lines = _lines(x, y, at, _resamples(groups))
    lines = lines[np.isfinite(lines).all(-1)]  # no line fits a resample that repeats a single point
    low, high = np.quantile(lines, (0.025, 0.975), axis=0)
    return _lines(x, y, at, np.ones((1, len(x))))[0], low, high


def partial(
    x: np.ndarray, y: np.ndarray, z: np.ndarray, times: np.ndarray | float = 1.0
) -> np.ndarray:
    """Partial correlation of x and y given z, along the last axis; see `pearson` for `times`.

    This is Pearson's r of the residuals of linear fits on z. It is nan if x or y is constant or
    fully explained by z.
    """
    xy, xz, yz = pearson(x, y, times), pearson(x, z, times), pearson(y, z, times)
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
    groups: dict[str, int],
) -> Correlation:
    cells = tuple(name for name in values if name in against)
    x, y = (np.array([side[name] for name in cells]) for side in (values, against))
    accuracies = np.array([train.get(name, np.nan) for name in cells])
    numbers = np.array([groups[name] for name in cells], dtype=int)
    known, fitted = np.isfinite(accuracies), accuracies > FITTED
    sides = (x[known], y[known], accuracies[known])
    return Correlation(
        measure,
        metric,
        cells,
        x,
        y,
        accuracies,
        numbers,
        whole=_estimate(pearson, x, y, groups=numbers),
        fitted=_estimate(pearson, x[fitted], y[fitted], groups=numbers[fitted]),
        # one more for the control
        partial=_estimate(partial, *sides, groups=numbers[known], least=LEAST_POINTS + 1),
    )


def _estimate(
    statistic: Callable, *sides: np.ndarray, groups: np.ndarray, least: int = LEAST_POINTS
) -> Estimate:
    """Returns a statistic with its bootstrap interval; `sides` has one array per coordinate."""
    points = len(groups)
    if len(np.unique(groups)) < least or not all(np.ptp(side) for side in sides):
        return Estimate(points=points)
    r = float(statistic(*sides))
    if not np.isfinite(r):
        return Estimate(points=points)
    resampled = statistic(*sides, _resamples(groups))
    low, high = np.quantile(resampled[np.isfinite(resampled)], (0.025, 0.975))
    return Estimate(r, float(low), float(high), points)


def _resamples(groups: np.ndarray) -> np.ndarray:
    """Returns how often each resample contains each point: (RESAMPLES, points).

    Whole groups are drawn. The draws are the same for all variants, for paired comparisons.
    """
    names, own = np.unique(groups, return_inverse=True)
    count = len(names)
    draws = np.random.default_rng(SEED).integers(count, size=(RESAMPLES, count))
    times = (draws[:, :, None] == np.arange(count)).sum(1)
    return times[:, own]


def _mean(values: np.ndarray, times: np.ndarray | float) -> np.ndarray:
    total = (times * np.ones_like(values)).sum(-1, keepdims=True)
    return (times * values).sum(-1, keepdims=True) / total


def _varies(values: np.ndarray, times: np.ndarray | float) -> np.ndarray:
    """Whether a resample has two different values."""
    drawn = times * np.ones_like(values) > 0
    return np.where(drawn, values, -np.inf).max(-1) > np.where(drawn, values, np.inf).min(-1)


def _lines(x: np.ndarray, y: np.ndarray, at: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Fits a line to n points, counted `times` (B, n), and evaluates it at m positions: (B, m)."""
    middle, height = _mean(x, times), _mean(y, times)
    with np.errstate(invalid="ignore", divide="ignore"):
        slope = (times * (x - middle) * (y - height)).sum(-1, keepdims=True)
        slope = slope / (times * (x - middle) ** 2).sum(-1, keepdims=True)
    return height + slope * (at - middle)
