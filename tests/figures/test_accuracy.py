"""The figure of accuracies over the course of training."""

import itertools
from dataclasses import replace

import matplotlib
import pytest

from ed.analysis.collect import Row
from ed.analysis.tables import load_table
from ed.figures import files
from ed.figures.accuracy import REFERENCE, draw


class Run(Row):
    """A run as scripts/table.py hands it over: 40 % half way, 80 % at the end, less for seed 1,
    and 10 % more for the Jacobian."""

    def history(self):
        more = 10 if self.cell == "jacobian" else 0
        rows = []
        for step, accuracy in ((500, 40.0 + more), (1000, 80.0 + more - self.seed)):
            rows.append({"step": step, "train/acc": accuracy + 5})
            rows.append({"step": step, "eval/acc": accuracy, "eval/loss": 1.0})
        return rows


def runs(*cells: tuple[str, str], seeds=(0, 1), kind=Run) -> list[Run]:
    return [
        kind(*cell, seed, "", "done", 1000, 1000) for cell, seed in itertools.product(cells, seeds)
    ]


def lines(axis) -> list[tuple[str, str, list[tuple[float, float]]]]:
    """Colour, style and points of each line that has any."""
    found = [line for line in axis.lines if len(line.get_xdata())]
    return [
        (line.get_color(), line.get_linestyle(), list(zip(*line.get_data(), strict=True)))
        for line in found
    ]


def test_a_panel_per_cell_with_each_seed_and_the_first_cell_behind():
    table = load_table("table1_100")
    figure = draw(table, runs(("table1_100", "baseline"), ("table1_100", "jacobian")))
    first, second = figure.axes
    assert (first.get_title(), second.get_title()) == ("Baseline", "Jacobian reg.")
    test = [("C0", "-", [(50, 40), (100, 80)]), ("C1", "-", [(50, 40), (100, 79)])]
    train = [("C0", "--", [(50, 45), (100, 85)]), ("C1", "--", [(50, 45), (100, 84)])]
    own = sorted(test + train)
    assert sorted(lines(first)) == own
    higher = [(color, style, [(x, y + 10) for x, y in points]) for color, style, points in own]
    behind = [(REFERENCE["color"], style, points) for _, style, points in test]
    assert sorted(lines(second)) == sorted(behind + higher)
    assert first.get_xlim() == second.get_ylim() == (0, 100)
    (legend,) = figure.legends
    words = [text.get_text() for text in legend.get_texts()]
    assert words == ["seed 0", "seed 1", "test", "training", "Baseline, test"]
    *seeds, solid, dashed, grey = legend.get_lines()
    assert [line.get_color() for line in (*seeds, grey)] == ["C0", "C1", REFERENCE["color"]]
    assert [line.get_linestyle() for line in (solid, dashed)] == ["-", "--"]
    assert (first.get_ylabel(), second.get_ylabel()) == ("accuracy (%)", "")
    grey, *colored = sorted(second.lines, key=lambda line: line.zorder)  # drawn in this order
    assert grey.get_color() == REFERENCE["color"] != colored[-1].get_color()


def test_runs_under_way_are_drawn_as_far_as_they_are():
    class Begun(Run):
        def history(self):
            return [] if self.seed else super().history()[:2]

    table = load_table("table1_100")
    begun = runs(("table1_100", "baseline"), kind=Begun)
    figure = draw(table, begun)
    (axis,) = figure.axes
    assert lines(axis) == [("C0", "-", [(50, 40)]), ("C0", "--", [(50, 45)])]
    (axis,) = draw(table, [replace(run, total_steps=None) for run in begun]).axes  # not noted
    assert lines(axis) == [("C0", "-", [(100, 40)]), ("C0", "--", [(100, 45)])]
    (legend,) = figure.legends  # one cell has no other to be compared with
    assert "Baseline, test" not in [text.get_text() for text in legend.get_texts()]


def test_runs_of_another_table_have_this_ones_label():
    table = load_table("ablations_100")
    cells = [("table1_100", "baseline"), ("table1_100", "ed"), ("ablations_100", "r4_uniform")]
    figure = draw(table, [*runs(*cells, seeds=[0]), *runs(cells[1], seeds=[2])])
    (legend,) = figure.legends  # names seeds that the first cell does not have
    assert [text.get_text() for text in legend.get_texts()][:2] == ["seed 0", "seed 2"]
    titles = [axis.get_title() for axis in figure.axes]
    assert titles == ["Baseline", "ED, efficiency configuration", "Sampling: uniform"]
    long = draw(load_table("baseline_gap"), runs(("baseline_gap", "matrices"), seeds=[0]))
    assert long.axes[0].get_title() == "no decay on biases, norms,\ntokens, positions"


@pytest.mark.parametrize(("cells", "shown"), [(3, 3), (4, 4), (5, 5), (8, 8)])
def test_empty_places_of_the_grid_are_not_drawn(cells, shown):
    table = load_table("ablations_100")
    homes = [cell.home for cell in table.cells.values()][:cells]
    figure = draw(table, runs(*homes, seeds=[0]))
    assert sum(axis.axison for axis in figure.axes) == shown
    named = [bool(axis.get_xlabel()) for axis in figure.axes[:shown]]
    assert named == [False] * max(0, shown - 4) + [True] * min(4, shown)  # the lowest of a column


@pytest.mark.parametrize("cells", [1, 2, 3, 4])
def test_words_stay_inside_a_narrow_figure(cells, monkeypatch):
    table = load_table("ablations_100")
    homes = [("ablations_100", name) for name in table.cells if name.startswith("r15")][:cells]
    deviations = "model=vit_micro regularizer.pairs=64 task.epochs=5 task.warmup_epochs=1"
    drawn = []
    monkeypatch.setattr(files, "_bytes", lambda figure, _: drawn.append(figure))
    rows = [replace(run, deviations=deviations) for run in runs(*homes, seeds=(0, 1, 2))]
    with matplotlib.rc_context(files.STYLE):  # the letters are measured, so as large as drawn
        files.figure_files(table, rows, deviations)
        figure = drawn[0]
        figure.draw_without_rendering()
        for words in (*figure.texts, *figure.legends):
            box = words.get_window_extent()
            assert 0 <= box.x0 < box.x1 <= figure.bbox.width


def test_nothing_to_draw():
    class Silent(Run):
        def history(self):
            return [{"step": 1, "train/loss": 2.0}]

    table = load_table("table1_100")
    assert draw(table, []) is None
    assert draw(table, runs(("table1_100", "baseline"), kind=Silent)) is None
