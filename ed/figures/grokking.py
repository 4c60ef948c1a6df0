"""Plots grokking as in the paper's figure: one column, with the losses above four measures.

The coloured curves show the first cell that reaches the transition; other cells are grey. Thin
lines are seeds, and thick lines are their mean (geometric on log axes).
"""

import itertools
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter

from ed.analysis.collect import Row, series
from ed.analysis.spec import Table
from ed.figures.style import BASELINE, ED, INK, SEED, SERIES, WIDTH

MEASURES = {  # panels below the losses
    "measure/ed": "ED",
    "measure/sharpness_0.05": "sharpness",
    "measure/adaptive_sharpness_0.05": "adaptive\nsharpness",
    "measure/norm": "parameter\nnorm",
}
LOSSES = {"eval/loss": "-", "eval/train_loss": (0, (3, 1.5))}
ROOM = 20  # log axes extend beyond the main cell by at most this factor
LINEAR = ("measure/ed",)  # all other panels have a log axis
TRANSITION = 50.0  # validation accuracy (%)
MARK = {"color": INK, "linewidth": 0.9, "linestyle": (0, (1, 1.5)), "zorder": 0}
PEAK = {"marker": "v", "markersize": 6, "linestyle": "none", "markeredgecolor": "white"}
OTHERS = {"color": BASELINE, "linewidth": 0.6, "alpha": 0.55, "zorder": 1}

History = Sequence[dict]


def draw(table: Table, rows: Sequence[Row]) -> Figure | None:
    """Draws five panels over optimizer steps (log axis); None if no run has curves yet."""
    cells: dict[tuple, list[History]] = {}
    for row in rows:
        if history := row.history():
            cells.setdefault(row.home, []).append(history)
    if not cells:
        return None
    shown = next((c for c, runs in cells.items() if any(map(transition, runs))), next(iter(cells)))
    figure = Figure(figsize=(0.68 * WIDTH, 7.4))
    axes = figure.subplots(1 + len(MEASURES), sharex=True, height_ratios=[1.5] + [1] * 4)
    grey = [history for cell, runs in cells.items() if cell != shown for history in runs]
    panels = [tuple(LOSSES), *((key,) for key in MEASURES)]
    for axis, keys, name in zip(axes, panels, ("loss", *MEASURES.values()), strict=True):
        linear = set(keys) <= set(LINEAR)
        axis.set(ylabel=name, yscale="linear" if linear else "log")
        for key in keys:
            _draw_metric(axis, key, cells[shown])
        low, high = axis.get_ylim()
        for history, key in itertools.product(grey, keys):
            axis.plot(*series(history, key), linestyle=LOSSES.get(key, "-"), **OTHERS)
        if not linear:  # other cells may span many decades, so let them leave the panel
            widest = axis.get_ylim()
            axis.set_ylim(max(widest[0], low / ROOM), min(widest[1], high * ROOM))
            _label_decades(axis)
        for step in filter(None, map(transition, cells[shown])):
            axis.axvline(step, **MARK)
    labels = {cell.home: cell.label for cell in table.cells.values()}
    axes[0].set_title(f"{labels[shown]} (n = {len(cells[shown])})")
    axes[-1].set(xscale="log", xlabel="optimizer steps")
    figure.align_ylabels(list(axes))
    others = {labels[c]: any(map(transition, runs)) for c, runs in cells.items() if c != shown}
    _legend(figure, others, marked=any(map(transition, cells[shown])))
    return figure


def transition(history: History) -> int | None:
    """Returns the first step with a validation accuracy above TRANSITION, or None."""
    steps, values = series(history, "eval/acc")
    return next((s for s, v in zip(steps, values, strict=True) if v > TRANSITION), None)


def peak(history: History, key: str) -> tuple[int, float] | None:
    """Returns the step and value of the maximum up to the transition.

    None if there is no transition, or if the first value is the maximum.
    """
    end = transition(history)
    points = [(s, v) for s, v in zip(*series(history, key), strict=True) if end and s <= end]
    top = max(points, key=lambda point: point[1], default=None)
    return None if top is None or top == points[0] else top


def _draw_metric(axis, key: str, runs: Sequence[History]) -> None:
    colour = ED if key == "measure/ed" else INK if key in LOSSES else SERIES[0]
    style = LOSSES.get(key, "-")
    curves = [series(history, key) for history in runs]
    for curve in curves if len(curves) > 1 else ():
        axis.plot(*curve, color=colour, linestyle=style, **SEED)
    if all(steps == curves[0][0] for steps, _ in curves):
        values = np.array([values for _, values in curves])
        with np.errstate(divide="ignore", invalid="ignore"):  # sharpness may be negative
            mean = values.mean(0) if key in LINEAR else np.exp(np.log(values).mean(0))
        axis.plot(curves[0][0], mean, color=colour, linestyle=style, linewidth=1.4)
    for top in filter(None, (peak(history, key) for history in runs)):
        axis.plot(*top, color=colour, **PEAK)


def _label_decades(axis) -> None:
    """Labels 1, 2 and 5 times a power of ten if the log axis spans less than two decades."""
    low, high = axis.get_ylim()
    if high < 100 * low:
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter(NullFormatter())


def _legend(figure: Figure, others: dict[str, bool], *, marked: bool) -> None:
    """Draws the legend.

    Args:
        others: the grey cells, and whether they reach the transition.
        marked: whether the figure marks a transition.
    """
    looks = {
        "validation loss": {"color": INK, "linestyle": LOSSES["eval/loss"]},
        "training loss": {"color": INK, "linestyle": LOSSES["eval/train_loss"]},
    }
    if marked:
        looks["validation accuracy passes 50 %"] = MARK
        looks["highest before that"] = {"color": INK} | PEAK
    for how, wanted in (("no transition", False), ("other transitions", True)):
        names = [name for name, has in others.items() if has == wanted]
        looks |= {f"{how}: {'; '.join(names)}": OTHERS} if names else {}
    handles = [Line2D([], [], label=label, **look) for label, look in looks.items()]
    figure.legend(handles=handles, loc="outside lower left")
