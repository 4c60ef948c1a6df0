"""Pearson correlation between measures and a metric, over the cells of a table.

A point is a cell: the means over its seeds, once all of them are done. Intervals are percentile
bootstrap over points, with a generator of their own, so that the same rows give the same numbers.
scipy.stats.bootstrap draws the same, but gives no interval once a resample has a single point.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ed.analysis.collect import Row
from ed.analysis.spec import Table
from ed.analysis.stats import summarise
from ed.runtime.runs import Status

RESAMPLES = 10_000
LEAST_POINTS = 4  # three points and a line: r says nothing
SEED = 0


@dataclass(frozen=True, eq=False)  # arrays have no single truth
class Correlation:
    """One variant of a measure against the metric of the study.

    Attributes:
        measure, metric: the measure's name, and the metric that is this variant of it.
        cells: names of the points, with their values x (the measure) and y.
        r: Pearson's; None for too few points, or where one side does not vary.
        low, high: 95 % interval of r.
        selected: the variant with the largest |r| of its measure.
    """

    measure: str
    metric: str
    cells: tuple[str, ...]
    x: np.ndarray
    y: np.ndarray
    r: float | None = None
    low: float | None = None
    high: float | None = None
    selected: bool = False


def correlations(table: Table, rows: Sequence[Row]) -> list[Correlation]:
    """Every variant of every measure of the table's study, in its order."""
    study = table.correlation
    against = cell_means(table, rows, study.against)
    found = []
    for measure, variants in study.measures.items():
        own = [_correlate(table, rows, measure, metric, against) for metric in variants]
        known = [variant for variant in own if variant.r is not None]
        best = max(known, key=lambda variant: abs(variant.r), default=None)
        found += [replace(variant, selected=variant is best) for variant in own]
    return found


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
    """Pearson's r along the last axis; nan where one side does not vary."""
    from scipy.stats import pearsonr  # takes a second to import

    with warnings.catch_warnings(action="ignore"):  # about such a side, which nan shows
        return pearsonr(x, y, axis=-1).statistic


def line_and_band(
    x: np.ndarray, y: np.ndarray, at: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Least-squares line through the points, and the 95 % band of such lines: (line, low, high)."""
    draws = _resamples(len(x))
    lines = _lines(x[draws], y[draws], at)
    lines = lines[np.isfinite(lines).all(-1)]  # a draw of one point only has no line
    low, high = np.quantile(lines, (0.025, 0.975), axis=0)
    return _lines(x[None], y[None], at)[0], low, high


def _correlate(
    table: Table, rows: Sequence[Row], measure: str, metric: str, against: dict[str, float]
) -> Correlation:
    values = cell_means(table, rows, metric)
    cells = tuple(name for name in values if name in against)
    x, y = (np.array([side[name] for name in cells]) for side in (values, against))
    found = {"measure": measure, "metric": metric, "cells": cells, "x": x, "y": y}
    if len(cells) < LEAST_POINTS or not np.ptp(x) or not np.ptp(y):
        return Correlation(**found)
    draws = _resamples(len(x))
    resampled = pearson(x[draws], y[draws])
    low, high = np.quantile(resampled[np.isfinite(resampled)], (0.025, 0.975))
    return Correlation(**found, r=float(pearson(x, y)), low=float(low), high=float(high))


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
