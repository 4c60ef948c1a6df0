"""Accuracy in against out of distribution on the line from zero-shot to fine-tuned weights."""

import re
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

from ed.analysis.collect import Row
from ed.analysis.spec import Table

KEY = re.compile(r"measure/ensembling/alpha([\d.e-]+)/(acc|acc_ood)")
PENALISED = "_ed"  # cells NAME and NAME_ed share a panel
NAMED = (0.0, 0.5, 1.0)  # alphas that are written beside the curve
STYLES = {False: ("C0", "o"), True: ("C3", "s")}  # penalised or not: colour, marker


def draw(table: Table, rows: Sequence[Row]) -> Figure | None:
    """One panel per model; a curve is the mean of a cell's seeds, which lie faintly behind it."""
    panels = defaultdict(dict)
    for name, cell in table.cells.items():
        curves = [curve(row) for row in rows if (row.table, row.cell) == cell.home]
        curves = [values for values in curves if len(values)]
        if curves:
            panels[name.removesuffix(PENALISED)][name] = _stacked(name, curves)
    if not panels:
        return None
    figure = Figure(figsize=(4.4 * len(panels), 3.8))
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, cells in zip(axes, panels.values(), strict=True):
        for name, curves in cells.items():
            _draw_cell(axis, curves, table.cells[name].label, name.endswith(PENALISED))
            # the zero-shot model is the same for both, and so is its point
            named = NAMED if name == next(iter(cells)) else NAMED[1:]
            _name_alphas(axis, curves.mean(0), named, name.endswith(PENALISED))
        axis.set_xlabel(f"{table.metrics['eval/acc']} (in distribution), accuracy (%)")
        axis.legend(loc="lower center", bbox_to_anchor=(0.5, 1), fontsize=8)  # off the curves
        axis.margins(0.12)
    figure.axes[0].set_ylabel("mean of the shifts, accuracy (%)")
    return figure


def curve(row: Row) -> np.ndarray:
    """(alphas, 3): alpha, accuracy in and out of distribution; empty where a run has none."""
    points: dict[float, dict[str, float]] = defaultdict(dict)
    for values in row.history():
        for key, value in values.items():
            if found := KEY.fullmatch(key):
                points[float(found[1])][found[2]] = value
    both = [a for a in sorted(points) if len(points[a]) == 2]  # without shifts there is one
    return np.array([[a, points[a]["acc"], points[a]["acc_ood"]] for a in both])


def _stacked(cell: str, curves: list[np.ndarray]) -> np.ndarray:
    """(seeds, alphas, 3). Measures are no part of a run, so its seeds may differ in them."""
    grids = {tuple(values[:, 0]) for values in curves}
    if len(grids) > 1:
        raise ValueError(
            f"the seeds of {cell} were measured at different measures.ensembling.alphas, and have "
            "no mean curve: measure them at the same"
        )
    return np.stack(curves)


def _draw_cell(axis, curves: np.ndarray, label: str, penalised: bool) -> None:
    """Curves (seeds, alphas, 3)."""
    color, marker = STYLES[penalised]
    for _, x, y in curves.transpose(0, 2, 1):
        axis.plot(x, y, color=color, alpha=0.25, linewidth=0.8)
    _, x, y = curves.mean(0).T
    seeds = f"{len(curves)} seed{'s' if len(curves) > 1 else ''}"
    axis.plot(x, y, color=color, marker=marker, markersize=4, label=f"{label}, {seeds}")


def _name_alphas(axis, points: np.ndarray, named: Sequence[float], penalised: bool) -> None:
    """Writes alphas beside points (alphas, 3): right of ED's curve, which tends to lie further
    out, and left of the other; in white outlines, as curves of few pictures run anywhere."""
    side, across, up = (5, "left", "bottom") if penalised else (-5, "right", "top")
    for alpha, *point in points:
        if alpha in named:
            axis.annotate(
                rf"$\alpha$={alpha:g}",
                point,
                xytext=(side, side / 2),
                textcoords="offset points",
                ha=across,
                va=up,
                fontsize=7,
                color=STYLES[penalised][0],
                path_effects=[withStroke(linewidth=2, foreground="white")],
            )
