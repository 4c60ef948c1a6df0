"""Plots measures against the generalization gap, one panel each, as in the paper's figures."""

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ed.analysis.collect import Row
from ed.analysis.correlation import (
    FITTED,
    Correlation,
    Estimate,
    correlations,
    line_and_band,
)
from ed.analysis.spec import Table
from ed.figures.style import BAND, BASELINE, ED, INK, MEAN, SERIES, WIDTH

ROOM = 0.2  # above and below the points, relative to their range
COLOURED_BY = "optimizer.lr"  # points with the same value share a colour
COLOURS = tuple(colour for colour in SERIES if colour != "#e69f00")  # too similar to ED's colour
MARKERS = "os^Dv"
DOT = {"s": 20, "linewidth": 1}
COLUMNS = 3


def draw(table: Table, rows: Sequence[Row]) -> Figure | None:
    """Plots each measure's selected variant with a line and 95 % band; None for too few points."""
    chosen = [found for found in correlations(table, rows) if found.selected]
    if not chosen:
        return None
    columns = min(COLUMNS, len(chosen))
    lines = math.ceil(len(chosen) / columns)
    figure = Figure(figsize=(max(2.4 * columns, WIDTH / 2), 2.5 * lines + 0.6))
    axes = []
    for place, found in enumerate(chosen, start=1):
        axes.append(figure.add_subplot(lines, columns, place, sharey=axes[0] if axes else None))
        _panel(axes[-1], table, found)
    heights = np.concatenate([found.y for found in chosen])
    room = ROOM * np.ptp(heights)
    axes[0].set_ylim(heights.min() - room, heights.max() + room)  # bands may be cut off
    for axis in axes[::columns]:
        axis.set_ylabel(f"{table.metrics[table.correlation.against]} (points)")
    handles, _ = axes[0].get_legend_handles_labels()
    handles.append(Patch(color=BASELINE, label="band, brackets: 95 % interval", **BAND))
    figure.legend(handles=handles, loc="outside lower center", ncols=min(COLUMNS, len(handles)))
    return figure


def _panel(axis, table: Table, found: Correlation) -> None:
    places = np.linspace(found.x.min(), found.x.max(), 100)
    line, low, high = line_and_band(found.x, found.y, places, found.groups)
    own = ED if found.metric.startswith("measure/ed") else BASELINE
    axis.fill_between(places, low, high, color=own, **BAND)
    axis.plot(places, line, color=own, **MEAN)
    looks = zip(_groups(table, found.cells), COLOURS, MARKERS, strict=False)
    for (label, group), colour, marker in looks:
        fill = ["none" if hollow else colour for hollow in found.underfitted[group]]
        look = DOT | {"edgecolors": colour, "marker": marker}
        axis.scatter(found.x[group], found.y[group], facecolors=fill, **look)
        axis.scatter([], [], facecolors=colour, label=label, **look)  # the legend's marker
    if found.underfitted.any():
        hollow = f"hollow: training accuracy up to {FITTED:g} %"
        axis.scatter([], [], facecolors="none", edgecolors=INK, label=hollow, **DOT)
    axis.set_title("\n".join([found.measure, *_statistics(found)]), fontsize=8)
    axis.set_xlabel(table.metrics[found.metric])
    axis.margins(0.06)
    axis.locator_params(axis="x", nbins=4)


def _statistics(found: Correlation) -> list[str]:
    """Formats r and its interval over all points, and over fitted ones if some are underfitted."""
    lines = [_statistic("r =", found.whole)]
    if found.underfitted.any() and found.fitted.r is not None:
        lines.append(_statistic(f"fitted (n = {found.fitted.points}):", found.fitted))
    return lines


def _statistic(name: str, estimate: Estimate) -> str:
    return f"{name} {estimate.r:.2f} [{estimate.low:.2f}, {estimate.high:.2f}]"


def _groups(table: Table, cells: Sequence[str]) -> list[tuple[str | None, list[int]]]:
    """Returns (legend label, indices of its points) for each value of COLOURED_BY."""
    values = [table.cells[cell].settings.get(COLOURED_BY) for cell in cells]
    if None in values or not 1 < len(set(values)) <= len(COLOURS):
        return [(None, list(range(len(cells))))]
    return [
        (f"learning rate {value}", [i for i, own in enumerate(values) if own == value])
        for value in dict.fromkeys(values)
    ]
