"""Correlations that account for replicates and for the training accuracy."""

from pathlib import Path

import numpy as np
import pytest

from ed.analysis.correlation import (
    RESAMPLES,
    _resamples,
    correlations,
    partial,
    pearson,
    replicate_groups,
)
from ed.analysis.render import to_markdown
from ed.analysis.spec import Table
from ed.figures.correlation import draw
from tests.helpers.correlation import METRICS, POOL, STUDY, rows_of, write_pool

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
