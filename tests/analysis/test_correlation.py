"""Correlations over a pool of cells: values, intervals, Markdown, figure and errors."""

from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import pearsonr

from ed.analysis.correlation import (
    RESAMPLES,
    _resamples,
    common_seeds,
    correlations,
    line_and_band,
    pearson,
)
from ed.analysis.findings import finding
from ed.analysis.render import to_markdown
from ed.analysis.spec import SpecError, Table, expand
from ed.analysis.tables import load_table
from ed.analysis.verdicts import Experiment
from ed.figures.correlation import draw
from ed.figures.files import figure_files
from tests.helpers.correlation import STUDY, rows_of, write_pool


@pytest.fixture
def table(tmp_path) -> Table:
    return write_pool(tmp_path)


def test_r_is_the_pearson_correlation_of_means_over_seeds(table, values):
    found = {c.metric: c for c in correlations(table, rows_of(table, values))}
    for metric in ("measure/a", "measure/b", "measure/c"):
        expected = np.corrcoef(values[metric], values["measure/gap"])[0, 1]
        assert found[metric].whole.r == pytest.approx(expected, abs=1e-12)
        np.testing.assert_allclose(found[metric].x, values[metric], atol=1e-12)
    line = np.arange(5.0)
    assert pearson(line, 3 - 2 * line) == pytest.approx(-1)
    assert np.isnan(pearson(line, np.full(5, 0.1)))  # constant up to rounding
    many = np.random.default_rng(2).normal(size=(2, 50, 9))
    np.testing.assert_allclose(pearson(*many), pearsonr(*many, axis=-1).statistic, atol=1e-12)


def test_the_variant_with_the_largest_absolute_r_is_selected(table, values):
    found = correlations(table, rows_of(table, values))
    assert [(c.measure, c.metric) for c in found] == [
        ("Pair", "measure/a"),
        ("Pair", "measure/b"),
        ("Single", "measure/c"),
    ]
    assert [c.selected for c in found] == [False, True, True]  # b has r near -1
    assert [c.largest for c in found] == [True, False, True]  # `largest` uses the signed r
    assert found[1].whole.r < -0.99


def test_the_interval_equals_a_reference_bootstrap(table, values):
    found = correlations(table, rows_of(table, values))[0]
    draw_points, seen = np.random.default_rng(0), []
    for points in draw_points.integers(8, size=(RESAMPLES, 8)):
        if len(set(points)) > 1:
            seen.append(np.corrcoef(found.x[points], found.y[points])[0, 1])
    np.testing.assert_allclose(
        [found.whole.low, found.whole.high], np.quantile(seen, (0.025, 0.975))
    )
    again = correlations(table, rows_of(table, values)[::-1])[0]
    assert (again.whole.low, again.whole.high) == (found.whole.low, found.whole.high)


def test_the_interval_agrees_with_fishers_for_normal_data(monkeypatch):
    """Fisher's z = artanh r has a standard error of 1 / sqrt(n - 3)."""
    monkeypatch.setattr("ed.analysis.correlation.RESAMPLES", 2000)
    draw_points, count = np.random.default_rng(5), 400
    x = draw_points.normal(size=count)
    y = 0.6 * x + 0.8 * draw_points.normal(size=count)
    times = _resamples(np.arange(count))
    low, high = np.quantile(pearson(x, y, times), (0.025, 0.975))
    centre, half = np.arctanh(pearson(x, y)), 1.96 / np.sqrt(count - 3)
    np.testing.assert_allclose([low, high], np.tanh([centre - half, centre + half]), atol=0.015)


def test_points_average_the_seeds_that_have_ended_in_all_begun_cells(table, values):
    """In `rows_of`, seed 1 is 0.25 above the mean."""
    rows = rows_of(table, values)
    assert common_seeds(table, rows) == [0, 1]
    lacking = rows[1:]  # seed 0 of the first cell
    assert common_seeds(table, lacking) == [1]
    found = correlations(table, lacking)[0]
    np.testing.assert_allclose(found.x, values["measure/a"] + 0.25, atol=1e-12)
    assert "mean of a cell over 1 of 2 seeds" in to_markdown(table, lacking)
    failed = [replace(rows[0], status="failed"), *lacking]
    assert common_seeds(table, failed) == [0, 1]
    assert len(correlations(table, failed)[0].cells) == 7
    others = [row for row in rows if row.cell != rows[0].cell]
    assert len(correlations(table, others)[0].cells) == 7  # a cell without runs is left out
    assert common_seeds(table, []) == []


def test_incomplete_cells_are_excluded(table, values):
    rows = rows_of(table, values)[2:]  # the first cell has no runs
    del rows[2].last["measure/a"]  # rows do not store non-finite values
    del rows[-1].last["measure/gap"]
    first, second, _ = correlations(table, rows)
    assert len(first.cells) == 5
    assert len(second.cells) == 6
    few = correlations(table, rows[:6])
    assert [c.whole.r for c in few] == [None, None, None]
    assert not any(c.selected for c in few)
    least = correlations(table, rows[:8])[1]  # some resamples repeat a single point
    assert least.whole.low < least.whole.r < least.whole.high < 0


def test_the_line_is_least_squares_with_a_bootstrap_band(monkeypatch):
    monkeypatch.setattr("ed.analysis.correlation.RESAMPLES", 300)
    draw_points = np.random.default_rng(1)
    x, at = draw_points.normal(size=30), np.linspace(-2, 2, 7)
    y = 1 - x + draw_points.normal(size=30)
    line, low, high = line_and_band(x, y, at, np.arange(30))
    np.testing.assert_allclose(line, np.polyval(np.polyfit(x, y, 1), at), atol=1e-12)
    draws = [np.repeat(np.arange(30), times) for times in _resamples(np.arange(30))]
    lines = [np.polyval(np.polyfit(x[draw], y[draw], 1), at) for draw in draws]
    np.testing.assert_allclose([low, high], np.quantile(lines, (0.025, 0.975), axis=0), atol=1e-9)
    # even if a resample repeats a single point
    assert np.isfinite(line_and_band(x[:4], y[:4], at, np.arange(4))).all()


def test_markdown_lists_all_variants_and_points(table, values):
    text = to_markdown(table, rows_of(table, values))
    assert "## Correlation with the gap" in text
    assert "| Pair | second | -1.00 | -1.00 to -1.00 | 8 of 8 | selected |" in text
    (*_, third) = correlations(table, rows_of(table, values))
    numbers = f"{third.whole.r:+.2f} | {third.whole.low:+.2f} to {third.whole.high:+.2f}"
    assert f"| Single | third | {numbers} | 8 of 8 | selected, largest r |" in text
    points = text.split("## Points")[1]
    assert "| cell | seeds | gap | first | second | third |" in points
    assert points.count("| 2 of 2 |") == 8
    assert "| - | - | 0 of 8 |" in to_markdown(table, [])


def test_reduced_runs_are_correlated_separately(table, values):
    rows = rows_of(table, values)
    noise = rows_of(table, values | {"measure/b": values["measure/c"]})
    reduced = [replace(row, deviations="task.epochs=2") for row in noise]
    own, apart = to_markdown(table, rows + reduced).split("## Reduced: task.epochs=2")
    assert "| Pair | second | -1.00 | -1.00 to -1.00 | 8 of 8 | selected |" in own
    assert "| Pair | second | -1.00 |" not in apart
    assert own.count("| 2 of 2 |") == apart.count("| 2 of 2 |") == 8


def test_markdown_lists_failed_runs(table, values):
    rows = rows_of(table, values)
    rows[0], rows[2] = (replace(rows[i], status="failed", error="loss = nan") for i in (0, 2))
    text = to_markdown(table, rows)
    assert "- seed 0 failed: loss = nan (pool-0.1-0, pool-0.1-1)\n" in text
    assert "| 6 of 8 | selected |" in text
    assert [text.count(f"| {n} of 2 |") for n in (1, 2)] == [2, 6]


def test_the_figure_has_a_panel_for_each_measure(table, values):
    figure = draw(table, rows_of(table, values))
    assert [axis.get_title().split("\n")[0] for axis in figure.axes] == ["Pair", "Single"]
    assert [axis.get_xlabel() for axis in figure.axes] == ["second", "third"]
    assert "r = -1.00" in figure.axes[0].get_title()
    assert sum(len(dots.get_offsets()) for dots in figure.axes[0].collections[1:]) == 8
    assert len(figure.axes[0].lines) == 1
    words = [text.get_text() for text in figure.legends[0].get_texts()]
    assert words[:2] == ["learning rate 0.1", "learning rate 0.01"]
    assert "95 % interval" in words[2]
    assert draw(table, []) is None


def test_a_finding_does_not_rank_ed_first_if_another_measure_is_stronger(tmp_path, values):
    metrics = {"measure/gap": "gap", "measure/ed": "ED", "measure/b": "sharpness"}
    study = {"against": "measure/gap", "measures": {"ED": ["measure/ed"], "S": ["measure/b"]}}
    table = write_pool(tmp_path, metrics=metrics, correlation=study)
    known = {"measure/gap": values["measure/gap"], "measure/b": values["measure/b"]}
    rows = rows_of(table, known | {"measure/ed": values["measure/c"]})
    text = finding(Experiment(table, rows))
    assert "networks: ED r" in text
    assert "the strongest other measure is sharpness r" in text


def test_learning_rates_have_the_same_colour_in_all_panels(table, values):
    rows = rows_of(table, values)
    for row in rows:
        if "0.1" in row.cell:  # panel "Single" has only the points of the other learning rate
            del row.last["measure/c"]
    (first, second), (only,) = (
        [
            dots.get_facecolors()[0].tolist()
            for dots in axis.collections[1:]
            if len(dots.get_offsets())
        ]
        for axis in draw(table, rows).axes
    )
    assert only == second != first


def test_the_figure_does_not_depend_on_the_order_of_rows(table, values):
    rows = rows_of(table, values)
    kinds = ("png", "pdf")
    files = figure_files(table, rows, kinds=kinds)
    assert set(files) == {"figure.png", "figure.pdf"}
    assert files == figure_files(table, rows[::-1], kinds=kinds)


def test_a_table_may_reuse_the_grid_of_another_table(table, tmp_path):
    cells = {"again": {"same_as": "pool/pool", "paper": None}}
    borrower = write_pool(tmp_path, "borrower", cells=cells, fixed=[])
    assert expand(borrower) == expand(table)
    assert list(borrower.cells)[:2] == ["again-0.1-0", "again-0.1-1"]


def test_the_random_pixel_figure_uses_the_runs_of_the_pool():
    pixels, pool = (load_table(f"correlation_{name}") for name in ("random_pixels", "resnet18"))
    assert expand(pixels) == expand(pool)
    assert set(pixels.metrics) <= set(pool.metrics)  # otherwise the CSV file would lack them


@pytest.mark.parametrize(
    ("study", "complaint"),
    [
        ({"against": "measure/gap"}, r"correlation\.measures: "),
        ({"against": "gap", "measures": {}}, "correlation: gap; .*measure/gap"),
        ({"against": "measure/gap", "measures": {"A": "measure/a"}}, r"correlation\.measures\.A: "),
        ({"against": "measure/gap", "measures": {"A": ["x"]}}, "correlation: x; "),
        (STUDY | {"train": "accuracy"}, "correlation: accuracy; "),
        (STUDY | {"replicates": "weight_decay"}, "replicates: weight_decay; .*optimizer.weight_"),
    ],
)
def test_errors_in_a_study_name_the_key(tmp_path, study, complaint):
    with pytest.raises(SpecError, match=complaint):
        write_pool(tmp_path, correlation=study)
