"""The figure of accuracies over the course of training."""

import itertools

import pytest

from ed.analysis.collect import Row
from ed.analysis.experiments import load_table
from ed.figures.accuracy import REFERENCE, draw


class Run(Row):
    """A run as scripts/table.py hands it over: 40 % half way, 80 % at the end, less for seed 1."""

    def history(self):
        for step, accuracy in ((500, 40.0), (1000, 80.0 - self.seed)):
            yield {"step": step, "train/acc": accuracy + 5}
            yield {"step": step, "eval/acc": accuracy, "eval/loss": 1.0}


def runs(*cells: tuple[str, str], seeds=(0, 1), kind=Run) -> list[Run]:
    return [
        kind(*cell, seed, "", "done", 1000, 1000) for cell, seed in itertools.product(cells, seeds)
    ]


def lines(axis, reference: bool) -> list[list[tuple[float, float]]]:
    found = [line for line in axis.lines if (line.get_color() == REFERENCE["color"]) == reference]
    return [list(zip(*line.get_data(), strict=True)) for line in found]


def test_a_panel_per_cell_with_each_seed_and_the_first_cell_behind():
    table = load_table("table1_100")
    figure = draw(table, runs(("table1_100", "baseline"), ("table1_100", "jacobian")))
    first, second = figure.axes
    assert (first.get_title(), second.get_title()) == ("Baseline", "Jacobian reg.")
    test = [[(50, 40), (100, 80)], [(50, 40), (100, 79)]]
    train = [[(x, y + 5) for x, y in line] for line in test]
    for axis in (first, second):
        assert sorted(lines(axis, reference=False)) == sorted(test + train)
    assert lines(first, reference=True) == []
    assert lines(second, reference=True) == test
    (legend,) = figure.legends
    words = [text.get_text() for text in legend.get_texts()]
    assert words == ["seed 0", "seed 1", "test", "training", "Baseline, test"]


def test_runs_of_another_table_have_this_ones_label():
    table = load_table("ablations_100")
    cells = [("table1_100", "baseline"), ("table1_100", "ed"), ("ablations_100", "r4_uniform")]
    figure = draw(table, runs(*cells, seeds=[0]))
    titles = [axis.get_title() for axis in figure.axes]
    assert titles == ["Baseline", "ED, efficiency configuration", "Sampling: uniform"]


@pytest.mark.parametrize(("cells", "shown"), [(3, 3), (4, 4), (5, 5), (8, 8)])
def test_empty_places_of_the_grid_are_not_drawn(cells, shown):
    table = load_table("ablations_100")
    homes = [cell.home for cell in table.cells.values()][:cells]
    figure = draw(table, runs(*homes, seeds=[0]))
    assert sum(axis.axison for axis in figure.axes) == shown


def test_nothing_to_draw():
    class Silent(Run):
        def history(self):
            return [{"step": 1, "train/loss": 2.0}]

    table = load_table("table1_100")
    assert draw(table, []) is None
    assert draw(table, runs(("table1_100", "baseline"), kind=Silent)) is None
