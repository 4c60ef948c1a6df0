"""Plots a table as a ranking: a dot and an interval per cell, the paper's above ours.

Small dots are seeds. A cross marks a seed that collapsed during training, which its final number
may hide; the curves of its cell are drawn beside the row. Arrows mark cells far below the others.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from matplotlib.figure import Figure

from ed.analysis.collect import Row, series
from ed.analysis.numbers import mean_and_std
from ed.analysis.render import runs_of
from ed.analysis.spec import Cell, Paper, Table
from ed.analysis.stats import Ours, summarise
from ed.figures.style import BASELINE, FAINT, WIDTH, legend_handles, method_colour

TEST, TRAIN = "eval/acc", "train/acc"
FALL = 25.0  # a collapse is a drop in accuracy of more than this many points
FAR, LEAST = 1.5, 5.0  # axis break: minimum gap relative to the range above it, and in points
PAPER = {"marker": "D", "markersize": 4.5, "markerfacecolor": "white", "linewidth": 1}
OURS = {"marker": "o", "markersize": 6, "linewidth": 2}
SINGLE = {"marker": "o", "markersize": 3.5, "linestyle": "none", "alpha": 0.45}
COLLAPSED = {"marker": "x", "markersize": 5, "linestyle": "none"}
BELOW = {"marker": "<", "markersize": 6, "linestyle": "none"}
REFERENCE = {"color": BASELINE, "linewidth": 0.9, "linestyle": (0, (4, 3))}


@dataclass(frozen=True)
class Entry:
    """One metric of a cell.

    Attributes:
        group: entries with the same task settings are ranked together.
        rows: the runs that have a value.
    """

    cell: Cell
    metric: str
    label: str
    group: tuple
    rows: tuple[Row, ...]

    @property
    def paper(self) -> Paper:
        return self.cell.paper.get(self.metric, Paper())

    @property
    def values(self) -> list[float]:
        return [row.last[self.metric] for row in self.rows]

    @property
    def ours(self) -> Ours:
        return summarise(self.values)

    @property
    def colour(self) -> str:
        return method_colour(self.cell.settings.get("regularizer", ""))


def draw(table: Table, rows: Sequence[Row]) -> Figure | None:
    """Draws the ranking; None if no run has a value yet."""
    found = entries(table, rows)
    if not any(entry.rows for entry in found):
        return None
    places = _places(found)
    printed = any(entry.paper.mean is not None for entry in found)
    fallen = [e.metric == TEST and any(map(collapsed, e.rows)) for e in found]
    figure = Figure(figsize=(WIDTH, (0.32 if printed else 0.26) * (places[-1] + 1) + 1.0))
    ratios = [4, 1] if any(fallen) else [1]
    axis, *side = figure.subplots(1, 1 + any(fallen), squeeze=False, width_ratios=ratios)[0]
    one = len(table.metrics) == 1  # several metrics share one axis, which must show them all
    edge = break_below([e.ours.mean for e in found if e.rows]) if one else None
    reference = next((e.ours.mean for e in found if one and e.cell.name == "baseline"), None)
    if reference is not None:
        axis.axvline(reference, zorder=0, **REFERENCE)
    for place, entry in zip(places, found, strict=True):
        _draw_paper(axis, entry, place - 0.17)
        height = place + 0.17 if printed else place
        _draw_ours(axis, entry, height, table.digits, outside=_outside(entry, edge))
    _finish(axis, places, found, edge)
    axis.set_xlabel(primary_title(table) if one else "accuracy (%)")
    for column in side:
        _draw_sparklines(column, axis, zip(places, found, fallen, strict=True))
    used = [line.get_marker() for line in axis.lines]
    _legend(figure, found, used, reference=reference is not None)
    return figure


def primary_title(table: Table) -> str:
    """Returns the axis title for the table's first metric."""
    return "test accuracy (%)" if table.primary == TEST else table.metrics[table.primary]


def entries(table: Table, rows: Sequence[Row]) -> list[Entry]:
    """Returns the cells with a number, best first.

    They are ranked by the paper's numbers if every cell has one, otherwise by ours. A table with
    several metrics keeps its order.
    """
    found = []
    for metric, name in table.metrics.items():
        for cell in table.cells.values():
            point = table.first_point(cell)  # the points of a grid share task and method
            cell = replace(cell, overrides=point.overrides)
            own = tuple(row for row in runs_of(table, cell, rows)[0] if metric in row.last)
            label = cell.label if len(table.metrics) == 1 else f"{cell.label}, {name}"
            group = (metric, *sorted(cell.task.items()))
            found.append(Entry(cell, metric, label, group, own))
    found = [entry for entry in found if entry.rows or entry.paper.mean is not None]
    if len(table.metrics) > 1:
        return found
    sizes = Counter(entry.group for entry in found)
    if sum(size > 1 for size in sizes.values()) < 2:  # nothing to compare within groups
        found = [replace(entry, group=()) for entry in found]
    groups = list(dict.fromkeys(entry.group for entry in found))
    printed = all(entry.paper.mean is not None for entry in found)

    def rank(entry: Entry) -> tuple[int, float]:
        mean = entry.paper.mean if printed else entry.ours.mean
        return groups.index(entry.group), -(mean or 0)

    return sorted(found, key=rank)


def break_below(means: Sequence[float]) -> float | None:
    """Returns the lowest mean above a gap too wide to plot, or None if there is no such gap.

    At most 30 % of the means may lie below the gap.
    """
    ranked = sorted(means, reverse=True)
    for above in range(max(2, -(-7 * len(ranked) // 10)), len(ranked)):
        extent, gap = ranked[0] - ranked[above - 1], ranked[above - 1] - ranked[above]
        if gap > max(FAR * extent, LEAST):
            return ranked[above - 1]
    return None


def collapsed(row: Row) -> bool:
    """Whether training or test accuracy ever fell by more than FALL points."""
    history = row.history()
    for metric in (TEST, TRAIN):
        values = np.array(series(history, metric)[1])
        if len(values) and (np.maximum.accumulate(values) - values).max() > FALL:
            return True
    return False


def _outside(entry: Entry, edge: float | None) -> bool:
    return bool(entry.rows) and edge is not None and entry.ours.mean < edge


def _places(found: Sequence[Entry]) -> list[float]:
    """Returns the vertical positions from the top, with a gap between groups."""
    places, height = [], 0.0
    for place, entry in enumerate(found):
        new = place > 0 and entry.group != found[place - 1].group
        height += (place > 0) + 0.5 * new
        places.append(height)
    return places


def _draw_paper(axis, entry: Entry, height: float) -> None:
    if entry.paper.mean is not None:
        spread = entry.paper.std or 0
        ends = (entry.paper.mean - spread, entry.paper.mean + spread)
        axis.plot(ends, (height, height), color=entry.colour, linewidth=PAPER["linewidth"])
        axis.plot(entry.paper.mean, height, color=entry.colour, **PAPER)


def _draw_ours(axis, entry: Entry, height: float, digits: int, *, outside: bool) -> None:
    """Draws the mean, its interval and the seeds, or an arrow, with the number on the right."""
    ours, colour = entry.ours, entry.colour
    right = axis.get_yaxis_transform()
    if not entry.rows:
        axis.text(1.02, height, "not run", transform=right, va="center", fontsize=8, color=FAINT)
        return
    number = f"{mean_and_std(ours.mean, ours.std, digits)}  (n = {ours.count})"
    axis.text(1.02, height, number, transform=right, va="center", fontsize=8)
    if outside:
        axis.plot(0.015, height, color=colour, transform=right, **BELOW)
        return
    if ours.std is not None:
        ends = (ours.mean - ours.std, ours.mean + ours.std)
        axis.plot(ends, (height, height), color=colour, linewidth=OURS["linewidth"])
        for row, value in zip(entry.rows, entry.values, strict=True):
            axis.plot(value, height, color=colour, **(COLLAPSED if collapsed(row) else SINGLE))
    axis.plot(ours.mean, height, color=colour, **OURS)


def _finish(axis, places: Sequence[float], found: Sequence[Entry], edge: float | None) -> None:
    shown = [e for e in found if e.rows and not _outside(e, edge)]
    seeds = [value for entry in shown for value in entry.values]
    values = [*seeds]
    for spread in [e.ours for e in shown] + [e.paper for e in found if e.paper.mean is not None]:
        values += [spread.mean - (spread.std or 0), spread.mean + (spread.std or 0)]
    margin = 0.06 * (max(values) - min(values) or 1)
    high = max(values) + margin
    axis.set_xlim(min(values) - margin, min(high, 101) if max(seeds) <= 100 else high)
    if edge is not None:  # mark the broken axis
        cut = {"marker": [(-1, -2), (1, 2)], "markersize": 8, "color": FAINT, "clip_on": False}
        axis.plot([0.01, 0.025], [0, 0], transform=axis.transAxes, linestyle="none", **cut)
    axis.set_yticks(places, [entry.label for entry in found])
    axis.set_ylim(places[-1] + 0.6, -0.6)
    axis.tick_params(axis="y", length=0)
    axis.spines["left"].set_visible(False)
    axis.grid(axis="x", color="0.92", linewidth=0.6)
    axis.set_axisbelow(True)


def _draw_sparklines(column, axis, entries: Iterable[tuple[float, Entry, bool]]) -> None:
    """Draws accuracy over training for the cells with a collapse, each beside its row."""
    column.axis("off")
    title = "collapsed runs:\naccuracy over training"
    column.set_title(title, loc="right", fontsize=8, color=FAINT)
    bottom, top = axis.get_ylim()
    for place, entry, fallen in entries:
        if not fallen:
            continue
        low, height = (bottom - place - 0.43) / (bottom - top), 0.86 / (bottom - top)
        small = column.inset_axes((0, low, 1, height))
        for row in entry.rows:
            for metric, width in ((TRAIN, 0.4), (TEST, 1.0)):
                steps, values = series(row.history(), metric)
                total = row.total_steps or max(steps, default=1)
                small.plot(np.array(steps) / total, values, color=entry.colour, lw=width)
        small.set(xlim=(0, 1), ylim=(0, 100), xticks=[], yticks=[])


def _legend(figure: Figure, found: Sequence[Entry], used: list, *, reference: bool) -> None:
    several = any(len(entry.rows) > 1 for entry in found)
    looks = {}
    if any(entry.paper.mean is not None for entry in found):
        known = any(entry.paper.std is not None for entry in found)
        looks["paper, mean ± std" if known else "paper"] = PAPER
    looks |= {"ours, mean ± std": OURS} if several else {"ours": OURS | {"linestyle": "none"}}
    if several:
        looks["one seed"] = SINGLE
    if COLLAPSED["marker"] in used:
        looks[f"seed that fell by over {FALL:g} points"] = COLLAPSED
    if BELOW["marker"] in used:
        looks["off the scale"] = BELOW
    if reference:
        looks["our baseline"] = REFERENCE
    tight = {"ncols": len(looks), "columnspacing": 1.2, "handletextpad": 0.5}
    figure.legend(handles=legend_handles(looks), loc="outside lower center", **tight)
