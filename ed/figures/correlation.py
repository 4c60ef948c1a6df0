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
    axes, labels = [], _labels(table, chosen)
    for place, found in enumerate(chosen, start=1):
        axes.append(figure.add_subplot(lines, columns, place, sharey=axes[0] if axes else None))
        _panel(axes[-1], table, found, labels)
    heights = np.concatenate([found.y for found in chosen])
    room = ROOM * np.ptp(heights)
    axes[0].set_ylim(heights.min() - room, heights.max() + room)  # bands may be cut off
    for axis in axes[::columns]:
        axis.set_ylabel(f"{table.metrics[table.correlation.against]} (points)")
    shown = [handle for axis in axes for handle in axis.get_legend_handles_labels()[0]]
    handles = list({handle.get_label(): handle for handle in shown}.values())
    handles.append(Patch(color=BASELINE, label="band, brackets: 95 % interval", **BAND))
    figure.legend(handles=handles, loc="outside lower center", ncols=min(COLUMNS, len(handles)))
    return figure


def _panel(axis, table: Table, found: Correlation, labels: dict[str, str | None]) -> None:
    places = np.linspace(found.x.min(), found.x.max(), 100)
    line, low, high = line_and_band(found.x, found.y, places, found.groups)
    own = ED if found.metric.startswith("measure/ed") else BASELINE
    axis.fill_between(places, low, high, color=own, **BAND)
    axis.plot(places, line, color=own, **MEAN)
    looks = zip(dict.fromkeys(labels.values()), COLOURS, MARKERS, strict=False)
    for label, colour, marker in looks:
        group = [i for i, name in enumerate(found.cells) if labels[name] == label]
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


def _labels(table: Table, chosen: Sequence[Correlation]) -> dict[str, str | None]:
    """Returns the legend label of each point's cell, its value of COLOURED_BY, in all panels."""
    drawn = {name for found in chosen for name in found.cells}
    cells = {name: cell for name, cell in table.cells.items() if name in drawn}
    values = {name: cell.settings.get(COLOURED_BY) for name, cell in cells.items()}
    if None in values.values() or not 1 < len(set(values.values())) <= len(COLOURS):
        return dict.fromkeys(values)
    return {name: f"learning rate {value}" for name, value in values.items()}
