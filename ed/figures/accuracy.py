"""Accuracy over the course of training: a panel per cell, a line per seed, the first cell in grey.

Solid: test accuracy; dashed: that of the training batches, as augmented and penalised. A run that
fell on the way and climbed again ends with a number like any other: this shows it.
"""

import math
from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ed.analysis.collect import Row, series
from ed.analysis.spec import Table

TEST, TRAIN = "eval/acc", "train/acc"
STYLES = {TEST: {"linewidth": 1.3}, TRAIN: {"linewidth": 0.7, "linestyle": (0, (4, 2))}}
REFERENCE = {"color": "0.72", "linewidth": 2.5, "zorder": 0}
COLUMNS = 4


def draw(table: Table, rows: Sequence[Row]) -> Figure | None:
    """None while no run has curves."""
    cells: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        cells.setdefault(row.home, []).append(row)
    cells = {home: own for home, own in cells.items() if any(_curve(row, TEST)[0] for row in own)}
    if not cells:
        return None
    columns = min(COLUMNS, len(cells))
    lines = math.ceil(len(cells) / columns)
    figure = Figure(figsize=(2.2 * columns + 0.4, 1.7 * lines + 0.9))
    axes = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False)
    labels = {cell.home: cell.label for cell in table.points.values()}
    first, *_ = cells
    for axis, (home, own) in zip(axes.flat, cells.items(), strict=False):
        for row in cells[first] if home != first else ():
            axis.plot(*_curve(row, TEST), **REFERENCE)
        for row in own:
            for metric, style in STYLES.items():
                axis.plot(*_curve(row, metric), color=f"C{row.seed}", **style)
        axis.set_title(labels[home])
    for axis in axes.flat[len(cells) :]:
        axis.set_axis_off()
    axes[0, 0].set(xlim=(0, 100), ylim=(0, 100))
    for axis in axes[-1]:
        axis.set_xlabel("% of training")
    for axis in axes[:, 0]:
        axis.set_ylabel("accuracy (%)")
    seeds = sorted({row.seed for own in cells.values() for row in own})
    handles = _legend(seeds, labels[first] if len(cells) > 1 else None)
    figure.legend(handles=handles, loc="outside lower center", ncols=2 * columns)
    return figure


def _curve(row: Row, metric: str) -> tuple[list[float], list[float]]:
    steps, values = series(row.history(), metric)
    total = row.total_steps or max(steps, default=1)
    return [100 * step / total for step in steps], values


def _legend(seeds: Sequence[int], reference: str | None) -> list[Line2D]:
    handles = [Line2D([], [], color=f"C{seed}", label=f"seed {seed}") for seed in seeds]
    handles.append(Line2D([], [], color="0.3", label="test", **STYLES[TEST]))
    handles.append(Line2D([], [], color="0.3", label="training", **STYLES[TRAIN]))
    if reference is not None:
        handles.append(Line2D([], [], label=f"{reference}, test", **REFERENCE))
    return handles
