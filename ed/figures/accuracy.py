"""Accuracy over the course of training: a panel per cell, a line per seed, the first cell in grey.

Solid: test accuracy; dashed: that of the training batches, as augmented and penalised. A run that
fell on the way and climbed again ends with a number like any other: this shows it.
"""

import math
import textwrap
from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ed.analysis.collect import Row, series
from ed.analysis.spec import Table

TEST, TRAIN = "eval/acc", "train/acc"
STYLES = {TEST: {"linewidth": 1.3}, TRAIN: {"linewidth": 0.7, "linestyle": (0, (4, 2))}}
REFERENCE = {"color": "0.72", "linewidth": 2.5, "zorder": 0}
COLUMNS = 4
LETTERS = 28  # of a label, above a panel


class Curves(NamedTuple):
    """What a run logged: for each metric the parts of training (%), and its values there."""

    seed: int
    curves: dict[str, tuple[list[float], list[float]]]


def draw(table: Table, rows: Sequence[Row]) -> Figure | None:
    """None while no run has curves."""
    cells: dict[tuple[str, str], list[Curves]] = {}
    for row in rows:
        cells.setdefault(row.home, []).append(_curves(row))
    cells = {home: own for home, own in cells.items() if any(run.curves[TEST][0] for run in own)}
    if not cells:
        return None
    columns = min(COLUMNS, len(cells))
    lines = math.ceil(len(cells) / columns)
    figure = Figure(figsize=(2.2 * columns + 0.4, 1.7 * lines + 0.9))
    axes = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False)
    labels = {cell.home: cell.label for cell in table.points.values()}
    first, *_ = cells
    for place, (axis, (home, own)) in enumerate(zip(axes.flat, cells.items(), strict=False)):
        for run in cells[first] if home != first else ():
            axis.plot(*run.curves[TEST], **REFERENCE)
        for run in own:
            for metric, style in STYLES.items():
                axis.plot(*run.curves[metric], color=f"C{run.seed}", **style)
        axis.set_title(textwrap.fill(labels[home], LETTERS))
        if place + columns >= len(cells):  # nothing below it
            axis.set_xlabel("% of training")
            axis.tick_params(labelbottom=True)
    for axis in axes.flat[len(cells) :]:
        axis.set_axis_off()
    axes[0, 0].set(xlim=(0, 100), ylim=(0, 100))
    for axis in axes[:, 0]:
        axis.set_ylabel("accuracy (%)")
    seeds = sorted({run.seed for own in cells.values() for run in own})
    handles = _legend(seeds, labels[first] if len(cells) > 1 else None)
    figure.legend(handles=handles, loc="outside lower center", ncols=max(2, 2 * columns - 2))
    return figure


def _curves(row: Row) -> Curves:
    history = row.history()
    curves = {metric: series(history, metric) for metric in STYLES}
    total = row.total_steps or max((max(steps) for steps, _ in curves.values() if steps), default=1)
    parts = {m: ([100 * step / total for step in steps], v) for m, (steps, v) in curves.items()}
    return Curves(row.seed, parts)


def _legend(seeds: Sequence[int], reference: str | None) -> list[Line2D]:
    handles = [Line2D([], [], color=f"C{seed}", label=f"seed {seed}") for seed in seeds]
    handles.append(Line2D([], [], color="0.3", label="test", **STYLES[TEST]))
    handles.append(Line2D([], [], color="0.3", label="training", **STYLES[TRAIN]))
    if reference is not None:
        handles.append(Line2D([], [], label=f"{reference}, test", **REFERENCE))
    return handles
