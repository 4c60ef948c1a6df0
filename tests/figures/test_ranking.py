"""Tests of the ranking figure: order, numbers, comparison with the paper, collapsed runs."""

import itertools
from dataclasses import replace

import matplotlib
import numpy as np
import pytest

from ed.analysis.collect import Row
from ed.analysis.tables import load_table
from ed.figures import files
from ed.figures.ranking import COLLAPSED, OURS, PAPER, SINGLE, break_below, collapsed, draw, entries
from ed.figures.style import BASELINE, ED, METHODS, STYLE
from tests.helpers.tables import write_table

FINALS = {"baseline": 84.0, "mixup": 85.0, "jacobian": 80.0, "ed": 86.0, "ed_without_anchors": 83.0}


class Run(Row):
    """A run whose accuracy increases, except that Jacobian seed 1 drops to 10 % midway."""

    def history(self):
        falls = self.cell == "jacobian" and self.seed == 1
        middle = 10.0 if falls else 70.0
        values = zip((250, 500, 1000), (60.0, middle, self.last["eval/acc"]), strict=True)
        return [{"step": step, "eval/acc": value, "train/acc": value} for step, value in values]


def runs(*cells: tuple[str, str], seeds=(0, 1), finals=FINALS) -> list[Run]:
    return [
        Run(*cell, seed, "", "done", 1000, 1000, {"eval/acc": finals.get(cell[1], 80.0) - seed})
        for cell, seed in itertools.product(cells, seeds)
    ]


def marks(axis, look: dict) -> list[tuple[str, float]]:
    """Returns the colour and x position of each marker in the style `look`."""
    keys = ("marker", "markersize")
    return [
        (line.get_color(), line.get_xdata()[0])
        for line in axis.lines
        if all(getattr(line, f"get_{key}")() == look[key] for key in keys)
        and len(line.get_xdata()) == 1
    ]


def labels(axis) -> list[str]:
    return [text.get_text() for text in axis.get_yticklabels()]


def test_ranked_cells_and_their_seeds_have_the_colour_of_the_method():
    names = ("baseline", "mixup", "jacobian", "ed")
    figure = draw(load_table("table1_100"), runs(*(("table1_100", name) for name in names)))
    axis = figure.axes[0]
    assert labels(axis) == ["ED", "Mixup", "Baseline", "Jacobian reg."]
    means = [(ED, 85.5), (METHODS["mixup"], 84.5), (BASELINE, 83.5), (METHODS["jacobian"], 79.5)]
    assert marks(axis, OURS) == means
    assert (ED, 85.0) in marks(axis, SINGLE)
    assert next(text.get_text() for text in axis.texts) == "85.50 ± 0.71  (n = 2)"


def test_the_baseline_is_the_reference_in_any_position():
    homes = [("table1_100", "ed"), ("table1_100", "baseline")]
    (line,) = dashed(draw(load_table("table1_100"), runs(*homes)).axes[0])
    assert line.get_xdata()[0] == 83.5
    assert dashed(draw(load_table("table1_100"), runs(homes[0])).axes[0]) == []
    crops = load_table("crop")  # has one baseline per crop, so no reference
    assert dashed(draw(crops, runs(crops.cells["pad_baseline"].home)).axes[0]) == []


def dashed(axis) -> list:
    return [line for line in axis.lines if line.get_linestyle() == "--"]


def test_the_papers_results_are_shown_and_order_the_cells():
    table = load_table("table1")
    axis = draw(table, runs(("table1", "baseline"), seeds=(0,))).axes[0]
    printed = [cell.paper["eval/acc"].mean for cell in table.cells.values()]
    assert [place for _, place in marks(axis, PAPER)] == sorted(printed, reverse=True)
    assert marks(axis, OURS) == [(BASELINE, 84)]
    words = [text.get_text() for text in axis.texts]
    assert words[-1] == "84.00  (n = 1)"
    assert words.count("not run") == len(table.cells) - 1


def test_a_collapsed_seed_is_a_cross_and_its_curves_are_shown():
    homes = [("table1_100", "jacobian"), ("table1_100", "baseline")]
    rows = runs(*homes)
    assert [collapsed(row) for row in rows] == [False, True, False, False]
    figure = draw(load_table("table1_100"), rows)
    axis, side = figure.axes[:2]
    assert marks(axis, COLLAPSED) == [(METHODS["jacobian"], 79)]
    (curves,) = side.child_axes
    assert len(curves.lines) == 4  # training and test curves of both seeds
    (legend,) = figure.legends
    assert any("fell by over" in text.get_text() for text in legend.get_texts())
    assert len(draw(load_table("table1_100"), runs(homes[1])).axes) == 1


def test_the_axis_is_cut_above_cells_far_below_the_others():
    assert break_below([87, 86, 85.5, 84, 83, 21, 39]) == 83
    assert break_below([50, 49, 45, 42, 38, 33, 28, 21]) is None  # no gap
    assert break_below([99, 98, 50, 50]) is None  # half of the cells cannot be outliers
    assert break_below([86, 85, 84, 80]) is None  # the gap is small
    assert break_below([90.0]) is None
    finals = FINALS | {"ed_without_anchors": 20.0}
    names = (*FINALS, "sam")
    rows = runs(*(("table1_100", name) for name in names), finals=finals)
    axis = draw(load_table("table1_100"), rows).axes[0]
    arrows = [line.get_color() for line in axis.lines if line.get_marker() == "<"]
    assert arrows == [ED]
    assert axis.get_xlim()[0] > 70


def test_cells_are_ranked_within_their_task():
    table = load_table("crop_300")
    names = ("pad_baseline", "pad_ed", "reflect_baseline", "reflect_ed")
    finals = dict(zip(names, (84.0, 89.0, 87.0, 90.0), strict=True))
    rows = runs(*(("crop_300", name) for name in names), finals=finals)
    assert [e.cell.name for e in entries(table, rows)] == [names[1], names[0], names[3], names[2]]
    places = draw(table, rows).axes[0].get_yticks()
    assert list(np.diff(places)) == [1, 1.5, 1]


def test_a_tuned_cell_shows_the_best_point_of_its_grid(tmp_path):
    table = write_table(tmp_path)
    finals = {"baseline": 80.0, "ed": 85.0, "rho-0.1": 82.0, "rho-0.5": 83.0}
    rows = runs(*(("mini", name) for name in finals), finals=finals)
    axis = draw(table, rows).axes[0]
    shown = dict(zip(labels(axis), marks(axis, OURS), strict=True))
    assert shown["sam"] == (METHODS["sam"], 82.5)


def test_several_metrics_share_an_axis_in_the_order_of_the_table():
    table = load_table("mnist_cifar")
    last = dict(zip(table.metrics, (99.0, 50.0, 98.0), strict=True))
    rows = [replace(row, last=last) for row in runs(("mnist_cifar", "ed"), seeds=(0,))]
    axis = draw(table, rows).axes[0]
    assert labels(axis)[1::2] == ["ED, test", "ED, MNIST randomized", "ED, CIFAR randomized"]
    assert [place for _, place in marks(axis, OURS)] == [99, 50, 98]
    low, high = axis.get_xlim()
    assert low < 48
    assert 99.9 < high <= 101


@pytest.mark.parametrize("cells", [1, 4])
def test_text_stays_inside_the_figure(cells, monkeypatch):
    table = load_table("probes/ablations_5_epochs")
    homes = [(table.name, name) for name in table.cells if name.startswith("r15")][:cells]
    deviations = "model=vit_micro regularizer.pairs=64 task.epochs=5 task.warmup_epochs=1"
    drawn = []
    monkeypatch.setattr(files, "_bytes", lambda figure, _: drawn.append(figure))
    rows = [replace(run, deviations=deviations) for run in runs(*homes, seeds=(0, 1, 2))]
    with matplotlib.rc_context(STYLE):  # so that text has its final size
        files.figure_files(table, rows, deviations)
        figure = drawn[0]
        figure.draw_without_rendering()
        axis = figure.axes[0]
        for text in (*figure.texts, *figure.legends, *axis.texts, *axis.get_yticklabels()):
            box = text.get_window_extent()
            assert 0 <= box.x0 < box.x1 <= figure.bbox.width + 1
    assert figure.get_suptitle().startswith("Reduced runs: model vit_micro, pairs 64")
    assert "=" not in figure.get_suptitle()


def test_no_results_give_no_figure():
    table = load_table("table1_100")
    assert draw(table, []) is None
    (row,) = runs(("table1_100", "baseline"), seeds=(0,))
    assert draw(table, [replace(row, last={})]) is None
