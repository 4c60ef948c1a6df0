"""Correlations over a pool of cells, compared with numpy and slow references."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from scipy.stats import pearsonr

from ed.analysis.collect import Row
from ed.analysis.correlation import (
    RESAMPLES,
    _resamples,
    correlations,
    line_and_band,
    partial,
    pearson,
    replicate_groups,
)
from ed.analysis.findings import finding
from ed.analysis.render import to_markdown
from ed.analysis.spec import SpecError, Table, expand
from ed.analysis.tables import load_table
from ed.analysis.verdicts import Experiment
from ed.figures.correlation import draw
from ed.figures.files import figure_files

METRICS = {"measure/gap": "gap", "measure/a": "first", "measure/b": "second", "measure/c": "third"}
STUDY = {
    "against": "measure/gap",
    "measures": {"Pair": ["measure/a", "measure/b"], "Single": ["measure/c"]},
}
POOL = {
    "pool": {
        "overrides": [],
        "grid": {"optimizer.lr": [0.1, 0.01], "optimizer.weight_decay": [0, 1, 2, 3]},
        "paper": None,
    }
}


SPEC = {
    "title": "A pool",
    "place": "Nowhere",
    "metrics": METRICS,
    "figure": "ed.figures.correlation:draw",
    "correlation": STUDY,
    "seeds": [0, 1],
    "fixed": ["task=cifar10"],
    "cells": POOL,
}


def write_pool(folder: Path, name: str = "pool", **changes) -> Table:
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(SPEC | changes, sort_keys=False))
    return load_table(str(path))


@pytest.fixture
def table(tmp_path) -> Table:
    return write_pool(tmp_path)


def rows_of(table: Table, values: dict[str, np.ndarray]) -> list[Row]:
    """Returns rows for two seeds per cell, with values symmetric about the given means."""
    return [
        Row(
            *cell.home,
            seed,
            status="done",
            last={m: float(value[i]) + (0.25 if seed else -0.25) for m, value in values.items()},
        )
        for i, cell in enumerate(table.cells.values())
        for seed in table.seeds
    ]


@pytest.fixture
def values() -> dict[str, np.ndarray]:
    noise = np.random.default_rng(0).normal(size=(3, 8))
    gap = np.arange(8.0)
    return {
        "measure/gap": gap,
        "measure/a": gap + noise[0],
        "measure/b": -2 * gap + 0.1 * noise[1],
        "measure/c": noise[2],
    }


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


def test_the_interval_agrees_with_fishers_for_normal_data():
    """Fisher's z = artanh r has a standard error of 1 / sqrt(n - 3)."""
    draw_points, count = np.random.default_rng(5), 400
    x = draw_points.normal(size=count)
    y = 0.6 * x + 0.8 * draw_points.normal(size=count)
    times = _resamples(np.arange(count))
    low, high = np.quantile(pearson(x, y, times), (0.025, 0.975))
    centre, half = np.arctanh(pearson(x, y)), 1.96 / np.sqrt(count - 3)
    np.testing.assert_allclose([low, high], np.tanh([centre - half, centre + half]), atol=0.015)


REPLICATED = STUDY | {"replicates": "optimizer.weight_decay"}
SETTINGS = {"optimizer.lr": [1, 2, 3, 4, 5], "optimizer.weight_decay": [0, 1]}


def replicated(folder: Path) -> Table:
    """Writes a pool of five settings with two near copies each."""
    return write_pool(
        folder, correlation=REPLICATED, cells={"pool": POOL["pool"] | {"grid": SETTINGS}}
    )


def test_replicates_are_drawn_together(tmp_path):
    table, noise = replicated(tmp_path), np.random.default_rng(4)
    x, y = (np.repeat(noise.normal(size=5), 2) + 0.1 * noise.normal(size=10) for _ in range(2))
    rows = rows_of(table, {"measure/gap": y, "measure/a": x, "measure/b": x, "measure/c": x})
    found = correlations(table, rows)[0]
    assert found.groups.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    seen = []
    for drawn in np.random.default_rng(0).integers(5, size=(RESAMPLES, 5)):
        points = [2 * setting + copy for setting in drawn for copy in (0, 1)]
        seen.append(np.corrcoef(x[points], y[points])[0, 1])
    ends = [found.whole.low, found.whole.high]
    np.testing.assert_allclose(ends, np.quantile(seen, (0.025, 0.975)), atol=1e-9)
    assert "bootstrap over the 5 settings without optimizer.weight_decay" in to_markdown(
        table, rows
    )


def test_replicates_may_list_their_settings_in_any_order(tmp_path):
    settings = ["optimizer.lr=1", "optimizer.eps=2", "optimizer.weight_decay=0"]
    changed = ["optimizer.lr=3", *settings[::-1], "optimizer.weight_decay=1"]
    other = ["optimizer.lr=3", *settings[1:]]
    cells = {str(i): {"overrides": each} for i, each in enumerate((settings, changed, other))}
    table = write_pool(tmp_path, correlation=REPLICATED, cells=cells)
    assert replicate_groups(table) == {"0": 0, "1": 0, "2": 1}


def test_copies_of_points_do_not_narrow_the_interval(tmp_path):
    """Two exact copies of five points have the interval of the five points."""
    noise = np.random.default_rng(4).normal(size=(2, 5))
    twice = replicated(tmp_path)
    one = write_pool(
        tmp_path, "one", cells={"pool": POOL["pool"] | {"grid": {"optimizer.lr": [1, 2, 3, 4, 5]}}}
    )
    ends = []
    for table, copies in ((one, 1), (twice, 2)):
        x, y = (np.repeat(side, copies) for side in noise)
        values = {"measure/gap": y, "measure/a": x, "measure/b": x, "measure/c": x}
        found = correlations(table, rows_of(table, values))[0].whole
        ends.append((found.r, found.low, found.high))
    np.testing.assert_allclose(*ends, atol=1e-9)


def controlled(folder: Path, **changes) -> Table:
    """Writes a pool whose study controls for the training accuracy."""
    metrics = METRICS | {"measure/gap_train": "train accuracy"}
    study = STUDY | {"train": "measure/gap_train"}
    return write_pool(folder, metrics=metrics, correlation=study, **changes)


def residuals(values, given):
    """Returns the residuals of a linear regression on `given`."""
    return values - np.polyval(np.polyfit(given, values, 1), given)


def test_the_partial_correlation_is_the_correlation_of_residuals(tmp_path, values):
    accuracy = 90 + np.random.default_rng(3).uniform(0, 8, size=8)
    table = controlled(tmp_path)
    found = correlations(table, rows_of(table, values | {"measure/gap_train": accuracy}))
    for one in found:
        expected = pearson(residuals(one.x, accuracy), residuals(one.y, accuracy))
        assert one.partial.r == pytest.approx(expected, abs=1e-10)
        assert one.partial.points == 8
        seen = []
        for times in _resamples(np.arange(8))[:200]:
            sides = [np.repeat(side, times) for side in (one.x, one.y, accuracy)]
            left = [residuals(side, sides[2]) for side in sides[:2]]
            if (times > 0).sum() > 3:  # fewer points leave only rounding error
                seen.append((pearson(*left), partial(one.x, one.y, accuracy, times)))
        np.testing.assert_allclose(*zip(*seen, strict=True), atol=1e-6)
        assert one.partial.low <= one.partial.high


def test_partial_correlation_removes_the_training_accuracy():
    draw_points = np.random.default_rng(7)
    given = draw_points.normal(size=2000)
    x, y = (given + 0.5 * draw_points.normal(size=2000) for _ in range(2))
    assert pearson(x, y) > 0.7
    assert abs(partial(x, y, given)) < 4 / np.sqrt(2000)  # four standard errors
    assert np.isnan(partial(x, given, given))
    assert np.isnan(partial(x, y, np.ones(2000)))


def test_correlation_of_fitted_networks_is_separate(tmp_path, values):
    """In this example, two underfitted networks flip the sign of r."""
    table = controlled(tmp_path)
    accuracy = np.array([60.0, 98.0, 99.4, 99.5, 99.6, 99.7, 99.8, 99.9])
    measure = -values["measure/gap"].copy()
    measure[:2] = (-90, -80)
    rows = rows_of(table, values | {"measure/gap_train": accuracy, "measure/a": measure})
    found = correlations(table, rows)[0]
    assert found.whole.r > 0.5
    assert (found.fitted.r, found.fitted.points) == (pytest.approx(-1), 6)
    assert found.underfitted.tolist() == [True, True, *[False] * 6]
    text = to_markdown(table, rows)
    assert "| Pair | first | -1.00 | -1.00 to -1.00 | 6 |" in text
    assert f"alone has r = {pearson(accuracy, values['measure/gap']):+.2f}" in text


def test_too_few_fitted_networks_have_no_correlation(tmp_path, values):
    table = controlled(tmp_path)
    accuracy = np.linspace(60, 98, 8)
    accuracy[-3:] = 99.9
    found = correlations(table, rows_of(table, values | {"measure/gap_train": accuracy}))[0]
    assert (found.fitted.r, found.fitted.points) == (None, 3)
    assert found.whole.r is not None
    bare = correlations(table, rows_of(table, values))[0]  # the accuracy was not measured
    assert (bare.partial.r, bare.partial.points, bare.fitted.points) == (None, 0, 0)
    assert not bare.underfitted.any()


def test_incomplete_cells_are_excluded(table, values):
    rows = rows_of(table, values)
    rows = rows[1:]  # the first cell lacks a seed
    del rows[2].last["measure/a"]  # rows do not store non-finite values
    del rows[-1].last["measure/gap"]
    first, second, _ = correlations(table, rows)
    assert len(first.cells) == 5
    assert len(second.cells) == 6
    few = correlations(table, rows[:7])
    assert [c.whole.r for c in few] == [None, None, None]
    assert not any(c.selected for c in few)
    least = correlations(table, rows[:9])[1]  # some resamples repeat a single point
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


def test_underfitted_networks_are_hollow_in_the_figure(tmp_path, values):
    table = controlled(tmp_path)
    accuracy = np.array([60.0, 99.8, 99.9, 99.9, 99.9, 99.9, 99.9, 99.9])
    axis = draw(table, rows_of(table, values | {"measure/gap_train": accuracy})).axes[0]
    drawn = [dots for dots in axis.collections[1:] if len(dots.get_offsets())]
    fills = np.concatenate([dots.get_facecolors()[:, 3] for dots in drawn])
    assert (fills == 0).tolist() == [True, *[False] * 7]
    assert "fitted (n = 7)" in axis.get_title()
    labels = axis.get_legend_handles_labels()[1]
    assert labels[-1].startswith("hollow")


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
