"""Tests of the figure of accuracy against step time."""

import itertools

import matplotlib
import pytest
from matplotlib.text import Text

from ed.analysis.collect import Row
from ed.analysis.spec import SpecError
from ed.analysis.steps import COLUMNS
from ed.figures.cost import BELOW, CHEAP, PENDING, draw
from ed.figures.ranking import OURS, SINGLE
from ed.figures.style import BASELINE, ED, METHODS, STYLE
from tests.helpers.tables import write_table

STEPS = {"baseline": 1.0, "mixup": 1.01, "ed": 1.64, "fast": 1.19, "every": 1.18, "sam": 14.0}
FINALS = {"baseline": 83.0, "mixup": 84.0, "ed": 86.5, "fast": 85.5, "every": 85.25, "sam": 86.0}


@pytest.fixture
def table(tmp_path):
    methods = {"baseline": "none", "fast": "ed_fast", "every": "ed"}
    cells = {
        name: {
            "overrides": [f"regularizer={methods.get(name, name)}", f"regularizer.weight={place}"],
            "label": f"{name}, a label of some length",
        }
        for place, name in enumerate(STEPS)
    }
    about = {"cost": {"baseline": "baseline", "full": "ed"}, "figure": "ed.figures.cost:draw"}
    return write_table(tmp_path, seeds=[0, 1, 2], cells=cells, tuning=None, **about)


@pytest.fixture
def measured(table):
    folder = table.path.parent / "results" / "speed"
    folder.mkdir(parents=True)
    lines = [f"mini,{name},1.0,{ratio},H200,2.0,abcdef0123" for name, ratio in STEPS.items()]
    (folder / "steps.csv").write_text("\n".join([",".join(COLUMNS), *lines]) + "\n")
    return table


def runs(*cells: str, seeds=(0, 1, 2), finals=FINALS) -> list[Row]:
    return [
        Row("mini", cell, seed, status="done", last={"eval/acc": finals[cell] + seed - 1})
        for cell, seed in itertools.product(cells or STEPS, seeds)
    ]


def marks(axis, look: dict) -> list[tuple[str, float, float]]:
    """Returns the colour and position of each marker in the style `look`."""
    return [
        (line.get_color(), line.get_xdata()[0], line.get_ydata()[0])
        for line in axis.lines
        if (line.get_marker(), line.get_markersize()) == (look["marker"], look["markersize"])
    ]


def test_points_are_at_their_step_time_and_mean_accuracy(measured):
    figure = draw(measured, runs("baseline", "mixup", "fast"))
    axis = figure.axes[0]
    assert axis.get_xscale() == "log"
    assert marks(axis, OURS) == [
        (BASELINE, 1.0, 83.0),
        (METHODS["mixup"], 1.01, 84.0),
        (ED, 1.19, 85.5),
    ]
    assert (ED, 1.19, 84.5) in marks(axis, SINGLE)
    dashed = [line for line in axis.lines if line.get_linestyle() == "--"]
    assert [line.get_ydata()[0] for line in dashed] == [83.0]
    dotted = [line for line in axis.lines if line.get_linestyle() == ":"]
    assert [line.get_xdata()[0] for line in dotted] == [CHEAP]
    assert "1.25 x" in [text.get_text() for text in axis.texts]
    ticks = [label.get_text() for label in axis.get_xticklabels()]
    assert ticks[0] == "1"


def test_no_step_times_or_no_runs_give_no_figure(table):
    assert draw(table, runs()) is None


def test_cells_without_a_run_are_rings_on_the_axis(measured):
    assert draw(measured, []) is None
    figure = draw(measured, runs("ed"))
    axis = figure.axes[0]
    assert [x for _, x, _ in marks(axis, OURS)] == [STEPS["ed"]]
    assert sorted(x for _, x, _ in marks(axis, PENDING)) == sorted(
        step for name, step in STEPS.items() if name != "ed"
    )
    assert {y for _, _, y in marks(axis, PENDING)} == {axis.get_ylim()[0]}
    assert {f"{name}, a label of some length" for name in STEPS} <= {
        text.get_text() for text in axis.texts
    }
    assert "pending" in [text.get_text() for text in figure.legends[0].get_texts()]


def test_cells_without_a_step_are_left_out(measured):
    path = measured.path.parent / "results" / "speed" / "steps.csv"
    path.write_text("".join(line for line in path.open() if ",sam," not in line))
    axis = draw(measured, runs()).axes[0]
    assert {x for _, x, _ in marks(axis, OURS)} == {x for n, x in STEPS.items() if n != "sam"}


def test_labels_of_points_in_one_place_stay_beside_them(measured):
    path = measured.path.parent / "results" / "speed" / "steps.csv"
    path.write_text(path.read_text().replace(f",{STEPS['every']},", f",{STEPS['fast']},"))
    axis = draw(measured, runs(seeds=(1,), finals=FINALS | {"every": FINALS["fast"]})).axes[0]
    found = [text for text in axis.texts if text.get_text().startswith(("every", "fast"))]
    assert len(found) == 2
    assert all(text.arrow_patch is None for text in found)  # no line to a distant label


def test_a_table_without_cost_raises(tmp_path):
    with pytest.raises(SpecError, match="cost: "):
        draw(write_table(tmp_path, "plain"), [])


def test_a_cell_far_below_is_shown_with_its_number(measured):
    axis = draw(measured, runs(seeds=(1,), finals=FINALS | {"every": 60.0})).axes[0]
    assert [x for _, x, _ in marks(axis, BELOW)] == [STEPS["every"]]
    assert axis.get_ylim()[0] > 70
    assert "every, a label of some length: 60.00" in [text.get_text() for text in axis.texts]


@pytest.mark.parametrize("seeds", [(1,), (0, 1, 2)])
def test_labels_overlap_neither_each_other_nor_the_points(measured, seeds):
    with matplotlib.rc_context(STYLE):  # so that text has its final size
        figure = draw(measured, runs(seeds=seeds))
        figure.draw_without_rendering()
        axis = figure.axes[0]
        names = [text for text in axis.texts if "label" in text.get_text()]
        boxes = [Text.get_window_extent(text) for text in names]  # without lines to the dots
    assert len(names) == len(STEPS)
    for one, other in itertools.combinations(boxes, 2):
        assert not one.overlaps(other)
    dots = axis.transData.transform([(STEPS[name], FINALS[name]) for name in STEPS])
    for box in boxes:
        assert not any(box.contains(*dot) for dot in dots)
        assert 0 <= box.x0 < box.x1 <= figure.bbox.width
