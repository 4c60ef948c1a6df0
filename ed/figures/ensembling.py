"""Plots accuracy in and out of distribution between zero-shot and fine-tuned weights."""

import re
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from ed.analysis.collect import Row
from ed.analysis.spec import Table
from ed.figures.style import BASELINE, ED, INK, MEAN, SEED
from ed.runtime.runs import Status

KEY = re.compile(r"measure/ensembling/alpha([\d.e-]+)/(acc|acc_ood)")
PENALISED = "_ed"  # cells NAME and NAME_ed share a panel


def draw(table: Table, rows: Sequence[Row]) -> Figure | None:
    """Draws one panel per model: the mean curve of each cell, with its seeds as thin lines."""
    panels = defaultdict(dict)
    for name, cell in table.cells.items():
        done = [r for r in rows if r.home == cell.home and r.status == Status.DONE]
        curves = [curve(row) for row in done]
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
        if any(len(curves) > 1 for curves in cells.values()):
            axis.plot([], [], color=BASELINE, label="one seed", **SEED)
        _mark_ends(axis, [curves.mean(0) for curves in cells.values()])
        axis.set_xlabel(f"{table.metrics['eval/acc']} (in distribution), accuracy (%)")
        above = {"loc": "lower center", "bbox_to_anchor": (0.5, 1)}  # clear of the curves
        axis.legend(**above, fontsize=7, frameon=False, ncols=2, columnspacing=1)
        axis.margins(0.12)
    figure.axes[0].set_ylabel("mean of the shifts, accuracy (%)")
    return figure


def curve(row: Row) -> np.ndarray:
    """Returns (alphas, 3): alpha, accuracy in and out of distribution; empty if not measured."""
    points: dict[float, dict[str, float]] = defaultdict(dict)
    for values in row.history():
        for key, value in values.items():
            if found := KEY.fullmatch(key):
                points[float(found[1])][found[2]] = value
    both = [a for a in sorted(points) if len(points[a]) == 2]  # without shifts, only `acc`
    return np.array([[a, points[a]["acc"], points[a]["acc_ood"]] for a in both])


def _stacked(cell: str, curves: list[np.ndarray]) -> np.ndarray:
    """Stacks curves to (seeds, alphas, 3); raises if seeds were measured at different alphas."""
    grids = {tuple(values[:, 0]) for values in curves}
    if len(grids) > 1:
        raise ValueError(
            f"the seeds of {cell} were measured at different measures.ensembling.alphas, so they "
            "have no mean curve; measure all of them at the same alphas"
        )
    return np.stack(curves)


def _draw_cell(axis, curves: np.ndarray, label: str, penalised: bool) -> None:
    """Draws the curves (seeds, alphas, 3) of a cell and their mean."""
    color, marker = (ED, "s") if penalised else (BASELINE, "o")
    for _, x, y in curves.transpose(0, 2, 1):
        axis.plot(x, y, color=color, **SEED)
    _, x, y = curves.mean(0).T
    seeds = f"mean of {len(curves)} seeds" if len(curves) > 1 else "1 seed"
    axis.plot(x, y, color=color, marker=marker, markersize=4, **MEAN, label=f"{label}, {seeds}")


def _mark_ends(axis, means: list[np.ndarray]) -> None:
    """Marks both ends with symbols, as text would overlap the curves."""
    marks = {"linestyle": "none", "color": INK, "zorder": 3}
    for alpha, name, look in (
        (0, r"$\alpha = 0$, zero-shot", {"marker": "D", "markersize": 6}),
        (1, r"$\alpha = 1$, fine-tuned", {"marker": "o", "markersize": 9, "fillstyle": "none"}),
    ):
        found = np.array(
            [points[points[:, 0] == alpha][0] for points in means if alpha in points[:, 0]]
        )
        if len(found):
            axis.plot(found[:, 1], found[:, 2], label=name, **look, **marks)
