"""Grokking, like the paper's figure: what moves when validation accuracy at last does."""

from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ed.analysis.collect import Row, series
from ed.analysis.spec import Table

MEASURES = {  # panels below that of the loss
    "measure/ed": "ED",
    "measure/sharpness_0.05": "sharpness",
    "measure/adaptive_sharpness_0.05": "adaptive\nsharpness",
    "measure/norm": "parameter\nnorm",
}
TRANSITION = 50.0  # the validation accuracy (%) that counts as such
LOSSES = {"eval/loss": "-", "eval/train_loss": "--"}
MARK = {"linewidth": 5, "alpha": 0.2}  # of the transition
LEGEND = (
    Line2D([], [], color="0.3", linestyle="-", label="validation loss"),
    Line2D([], [], color="0.3", linestyle="--", label="training loss"),
    Line2D([], [], color="0.3", linestyle=":", label="validation accuracy"),
    Line2D([], [], color="0.3", **MARK, label="transition (50 %)"),
)


def draw(table: Table, rows: Sequence[Row]) -> Figure | None:
    """One column of five panels per cell, one colour per seed, steps on a log axis."""
    runs = [(row, row.history()) for row in rows]
    runs = [(row, history) for row, history in runs if history]
    cells = list(dict.fromkeys(row.home for row, _ in runs))
    labels = {cell.home: cell.label for cell in table.cells.values()}
    if not cells:
        return None
    figure = Figure(figsize=(0.6 + 4.4 * len(cells), 7.2))
    ratios = [1.5] + [1] * len(MEASURES)
    axes = figure.subplots(
        1 + len(MEASURES), len(cells), sharex="col", squeeze=False, height_ratios=ratios
    )
    for column, cell in zip(axes.T, cells, strict=True):
        accuracy = column[0].twinx()
        for row, history in runs:
            if row.home == cell:
                _draw_run(column, accuracy, history, color=f"C{row.seed}", label=f"seed {row.seed}")
        _finish_column(column, accuracy, title=labels[cell])
    figure.legend(handles=LEGEND, loc="outside lower center", ncols=2 * len(cells), fontsize=8)
    return figure


def transition(history: Sequence[dict]) -> int | None:
    """The first step with a validation accuracy above one half; None where there is none."""
    steps, values = series(history, "eval/acc")
    return next((s for s, v in zip(steps, values, strict=True) if v > TRANSITION), None)


def _draw_run(axes, accuracy, history: Sequence[dict], *, color: str, label: str) -> None:
    for key, style in LOSSES.items():
        axes[0].plot(*series(history, key), style, color=color, linewidth=1.2)
    accuracy.plot(*series(history, "eval/acc"), ":", color=color, linewidth=1.2)
    for axis, key in zip(axes[1:], MEASURES, strict=True):
        axis.plot(*series(history, key), color=color, linewidth=1.2, label=label)
    step = transition(history)
    for axis in axes if step is not None else ():
        axis.axvline(step, color=color, **MARK, zorder=0)


def _finish_column(axes, accuracy, *, title: str) -> None:
    accuracy.spines["right"].set_visible(True)
    accuracy.set_ylim(0, 102)
    accuracy.set_ylabel("accuracy (%)")
    axes[0].set_title(title)
    axes[0].set_ylabel("loss")
    for axis, name in zip(axes[1:], MEASURES.values(), strict=True):
        axis.set_ylabel(name)
        if "sharpness" in name:
            axis.set_yscale("log")  # it follows the training loss through many decades
    axes[1].legend(fontsize=7)
    axes[-1].set_xscale("log")
    axes[-1].margins(x=0.02)
    axes[-1].set_xlabel("optimizer steps")
    axes[0].figure.align_ylabels(list(axes))
