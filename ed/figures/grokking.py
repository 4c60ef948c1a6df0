"""Plots grokking as in the paper's figure: the losses and the measures over the steps.

The coloured curves show the first cell that reaches the transition; other cells are grey, darker if
they reach it too. Thin lines are seeds, and thick lines are their mean (geometric on log axes).
"""

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from ed.analysis.collect import Row, series
from ed.analysis.grokking import GENERALIZES, highest, transition
from ed.analysis.spec import Table
from ed.figures.style import BASELINE, ED, INK, SEED, SERIES, WIDTH, legend_handles

TRAINING, VALIDATION = (0, (3, 1.5)), (0, (1, 1))  # line styles: training loss, ED on validation
THIN = 0.8  # width of the lines beside the main one
COLUMNS = 2


@dataclass(frozen=True)
class Panel:
    """One axis of the figure.

    Attributes:
        others: metrics drawn with thinner lines, if they were logged.
        peaks: whether `others` get a mark at their peak too.
    """

    label: str
    main: str
    others: tuple[str, ...] = ()
    colour: str = SERIES[0]
    style: str | tuple = "-"
    peaks: bool = False
    linear: bool = False


def _degree(label: str, name: str, *, linear: bool = True) -> Panel:
    validation = f"measure/ed_validation{name}"
    return Panel(label, f"measure/ed{name}", (validation,), ED, VALIDATION, True, linear)


def _radii(label: str, name: str, *others: float) -> Panel:
    return Panel(label, f"measure/{name}_0.05", tuple(f"measure/{name}_{r:g}" for r in others))


PANELS = (  # in rows; a panel without logged values is left out
    Panel("loss", "eval/loss", ("eval/train_loss",), INK, TRAINING),
    _degree("ED", ""),
    _radii("sharpness", "sharpness", 0.01, 0.1),
    _degree("ED of logits", "_logits", linear=False),
    _radii("adaptive\nsharpness", "adaptive_sharpness", 0.01, 0.1, 0.5, 1.0),
    _degree("ED_norm", "_norm"),
    Panel("parameter\nnorm", "measure/norm"),
    _degree("ED_norm of\nprobabilities", "_softmax_norm"),
)
ROOM = 20  # log axes extend beyond the main cell by at most this factor
MARK = {"color": INK, "linewidth": 0.9, "linestyle": (0, (1, 1.5)), "zorder": 0}
PEAK = {"marker": "v", "markersize": 6, "linestyle": "none", "markeredgecolor": "white"}
OTHERS = {"color": BASELINE, "linewidth": 0.6, "alpha": 0.5, "zorder": 1}
ALSO = OTHERS | {"color": INK}  # other cells that reach the transition
LEGEND_WIDTH = 58  # characters per line

History = Sequence[dict]


def draw(table: Table, rows: Sequence[Row]) -> Figure | None:
    """Draws the panels over optimizer steps (log axis); None if no run has curves yet."""
    labels = {cell.home: cell.label for cell in table.cells.values()}
    cells: dict[tuple, list[History]] = {}
    for row in (row for row in rows if row.home in labels):  # without the points of tuning grids
        history = row.history()
        if _logged("eval/loss", [history]):
            cells.setdefault(row.home, []).append(history)
    if not cells:
        return None
    reach = {cell: any(map(transition, runs)) for cell, runs in cells.items()}
    shown = next((cell for cell in cells if reach[cell]), next(iter(cells)))
    others = [
        (history, ALSO if reach[cell] else OTHERS)
        for cell, runs in cells.items()
        if cell != shown
        for history in runs
    ]
    panels = [panel for panel in PANELS if _logged(panel.main, cells[shown])]
    lines = math.ceil(len(panels) / COLUMNS)
    figure = Figure(figsize=(WIDTH, 1.5 * lines + 1.4))
    axes = []
    for place, panel in enumerate(panels, start=1):
        axis = figure.add_subplot(lines, COLUMNS, place, sharex=axes[0] if axes else None)
        axes.append(axis)
        _draw_panel(axis, panel, cells[shown], others)
        is_last = place > len(panels) - COLUMNS  # of its column
        axis.tick_params(labelbottom=is_last)
        axis.set(xscale="log", xlabel="optimizer steps" if is_last else "")
    figure.align_ylabels(axes)
    axes[0].set_title(f"{labels[shown]} (n = {len(cells[shown])})", loc="left")
    names = {labels[cell]: reached for cell, reached in reach.items() if cell != shown}
    _legend(figure, panels, cells[shown], names)
    return figure


def peak(history: History, key: str) -> tuple[int, float] | None:
    """Returns the step and value of the maximum up to the transition.

    None if there is no transition, or if the first value is the maximum.
    """
    end = transition(history) or -1
    points = [row for row in history if row["step"] <= end and key in row]
    top = highest(points, key)
    return None if top is None or top[0] == points[0]["step"] else top


def _logged(key: str, runs: Sequence[History]) -> bool:
    return any(key in row for history in runs for row in history)


def _draw_panel(
    axis, panel: Panel, runs: Sequence[History], others: Sequence[tuple[History, dict]]
) -> None:
    """Draws a panel's metrics for the main cell, and its main metric for the other cells."""
    axis.set(ylabel=panel.label, yscale="linear" if panel.linear else "log")
    for history in runs if len(runs) > 1 else ():
        axis.plot(*series(history, panel.main), color=panel.colour, **SEED)
    _draw_mean(axis, panel, panel.main, runs, linewidth=1.4)
    for key in panel.others:
        _draw_mean(axis, panel, key, runs, linewidth=THIN, linestyle=panel.style)
    for key in (panel.main, *(panel.others if panel.peaks else ())):
        for top in filter(None, (peak(history, key) for history in runs)):
            axis.plot(*top, color=panel.colour, **PEAK)
    low, high = axis.get_ylim()
    for history, look in others:
        axis.plot(*series(history, panel.main), **look)
    if not panel.linear:  # other cells may span many decades, so let them leave the panel
        widest = axis.get_ylim()
        axis.set_ylim(max(widest[0], low / ROOM), min(widest[1], high * ROOM))
        _label_decades(axis)
    for step in filter(None, map(transition, runs)):
        axis.axvline(step, **MARK)


def _draw_mean(axis, panel: Panel, key: str, runs: Sequence[History], **look) -> None:
    """Draws the mean over runs, if all have logged this metric at the same steps."""
    curves = [series(history, key) for history in runs]
    steps = curves[0][0]
    if not steps or any(own != steps for own, _ in curves):
        return
    values = np.array([values for _, values in curves])
    with np.errstate(divide="ignore", invalid="ignore"):  # sharpness may be negative
        mean = values.mean(0) if panel.linear else np.exp(np.log(values).mean(0))
    axis.plot(steps, mean, color=panel.colour, **look)


def _label_decades(axis) -> None:
    """Labels 1, 2 and 5 times a power of ten if the log axis spans less than two decades."""
    low, high = axis.get_ylim()
    if high < 100 * low:
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter(NullFormatter())


def _legend(
    figure: Figure, panels: Sequence[Panel], runs: Sequence[History], others: dict[str, bool]
) -> None:
    """Draws the legend; `others` are the other cells, and whether they reach the transition."""
    looks = {
        "validation loss": {},
        "training loss": {"linestyle": TRAINING, "linewidth": THIN},
    }
    extra = {key for panel in panels for key in panel.others if _logged(key, runs)}
    if any(key.startswith("measure/ed_validation") for key in extra):
        looks["ED on training equations"] = {"color": ED}
        looks["ED on validation equations"] = {
            "color": ED, "linestyle": VALIDATION, "linewidth": THIN
        }  # fmt: skip
    if radii := sorted({float(key.split("_")[-1]) for key in extra if "sharpness_" in key}):
        looks["sharpness, radius 0.05"] = {"color": SERIES[0]}
        label = f"other radii: {', '.join(f'{radius:g}' for radius in radii)}"
        looks[label] = {"color": SERIES[0], "linewidth": THIN}
    if any(map(transition, runs)):
        looks[f"validation accuracy passes {GENERALIZES:.0f} %"] = MARK
        looks["highest before that"] = PEAK
    for how, wanted, look in (("no transition", False, OTHERS), ("other transitions", True, ALSO)):
        if names := [name for name, has in others.items() if has == wanted]:
            looks[textwrap.fill(f"{how}: {'; '.join(names)}", LEGEND_WIDTH)] = look
    figure.legend(handles=legend_handles(looks), loc="outside lower left", ncols=2)
