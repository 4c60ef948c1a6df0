"""Measures against the generalization gap: one panel per measure, as in the paper's figures."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from ed.analysis.collect import Row
from ed.analysis.correlation import (
    FITTED,
    Correlation,
    Estimate,
    correlations,
    line_and_band,
)
from ed.analysis.spec import Table

COLOURED_BY = "optimizer.lr"  # the setting that groups points
COLOURS = ("#1b6ca8", "#e08e1b", "#3a9d5d", "#8c5ab0", "#7a7a7a")
LINE = "#c0392b"
ALPHA = 0.85  # of a fill; as alpha of the points it would turn "none" into black
DOT = {"s": 22, "linewidth": 1}


def draw(table: Table, rows: Sequence[Row]) -> Figure | None:
    """The selected variant of every measure, with line and 95 % band; None for too few points."""
    chosen = [found for found in correlations(table, rows) if found.selected]
    if not chosen:
        return None
    figure = Figure(figsize=(2.7 * len(chosen) + 0.4, 3.4))
    axes = figure.subplots(1, len(chosen), squeeze=False, sharey=True)[0]
    for axis, found in zip(axes, chosen, strict=True):
        _panel(axis, table, found)
    axes[0].set_ylabel(f"{table.metrics[table.correlation.against]} (points)")
    handles, labels = axes[0].get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=len(handles))
    return figure


def _panel(axis, table: Table, found: Correlation) -> None:
    places = np.linspace(found.x.min(), found.x.max(), 100)
    line, low, high = line_and_band(found.x, found.y, places)
    axis.fill_between(places, low, high, color=LINE, alpha=0.15, linewidth=0)
    axis.plot(places, line, color=LINE, linewidth=1.5)
    for (label, group), colour in zip(_groups(table, found.cells), COLOURS, strict=False):
        fill = ["none" if hollow else (colour, ALPHA) for hollow in found.underfitted[group]]
        axis.scatter(found.x[group], found.y[group], facecolors=fill, edgecolors=colour, **DOT)
        axis.scatter([], [], color=colour, label=label, **DOT)  # the legend shows a filled dot
    if found.underfitted.any():
        hollow = f"hollow: training accuracy up to {FITTED:g} %"
        axis.scatter([], [], facecolors="none", edgecolors="0.3", label=hollow, **DOT)
    axis.set_title("\n".join([found.measure, *_statistics(found)]))
    axis.set_xlabel(table.metrics[found.metric])
    axis.margins(0.06)
    axis.locator_params(axis="x", nbins=5)


def _statistics(found: Correlation) -> list[str]:
    """r with its interval over all points, and over the fitted ones where others are shown."""
    lines = [_statistic("r", found.whole)]
    if found.underfitted.any() and found.fitted.r is not None:
        lines.append(_statistic(f"fitted (n = {found.fitted.points}): r", found.fitted))
    return lines


def _statistic(name: str, estimate: Estimate) -> str:
    return f"{name} = {estimate.r:.2f}  [{estimate.low:.2f}, {estimate.high:.2f}]"


def _groups(table: Table, cells: Sequence[str]) -> list[tuple[str | None, list[int]]]:
    """(legend, places of its points) for each value of the setting that groups them."""
    settings = [dict(s.split("=", 1) for s in table.cells[cell].overrides) for cell in cells]
    values = [own.get(COLOURED_BY) for own in settings]
    if None in values or not 1 < len(set(values)) <= len(COLOURS):
        return [(None, list(range(len(cells))))]
    return [
        (f"learning rate {value}", [i for i, own in enumerate(values) if own == value])
        for value in dict.fromkeys(values)
    ]
