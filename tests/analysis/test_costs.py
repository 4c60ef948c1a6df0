"""Cost and gain of methods: Fieller's interval, seeds paired with the baseline, step times."""

import math

import numpy as np
import pytest
from scipy.stats import ttest_1samp

from ed.analysis.collect import Row
from ed.analysis.costs import Share, _share, cost_fields, fieller, gains
from ed.analysis.render import to_markdown
from ed.analysis.report.sections import section
from ed.analysis.spec import Cost, SpecError
from ed.analysis.steps import COLUMNS, read_steps
from ed.analysis.verdicts import Experiment
from tests.helpers.tables import write_table

CELLS = {
    "baseline": {"overrides": ["regularizer=none"]},
    "ed": {"overrides": ["regularizer=ed"], "label": "ED"},
    "fast": {"overrides": ["regularizer=ed_fast"]},
    "sam": {"overrides": ["regularizer=sam"]},
}
BASELINE, FULL = (80.0, 81.0, 80.4), (83.0, 84.3, 83.3)
FAST = (82.4, 83.6, 82.9)


@pytest.fixture
def table(tmp_path):
    cost = {"baseline": "baseline", "full": "ed"}
    return write_table(tmp_path, seeds=[0, 1, 2], cells=CELLS, tuning=None, cost=cost)


def rows(**values) -> list[Row]:
    return [
        Row("mini", cell, seed, status="done", last={"eval/acc": value})
        for cell, own in values.items()
        for seed, value in enumerate(own)
        if value is not None
    ]


def write_steps(table, **ratios) -> None:
    path = table.path.parent / "results" / "speed" / "steps.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [f"mini,{cell},1.0,{ratio},H200,2.0,abcdef0123" for cell, ratio in ratios.items()]
    path.write_text("\n".join([",".join(COLUMNS), *lines]) + "\n")


def by_cell(table, runs) -> dict:
    return {one.cell.name: one for one in gains(table, runs)}


def test_the_ends_of_the_interval_are_the_ratios_with_p_of_5_percent():
    rng = np.random.default_rng(0)
    for count in (3, 5, 20):
        full = rng.normal(3, 0.5, count)
        gain = 0.7 * full + rng.normal(0, 0.4, count)
        low, high = fieller(gain, full)
        assert low < gain.mean() / full.mean() < high
        for ratio in (low, high):
            assert ttest_1samp(gain - ratio * full, 0).pvalue == pytest.approx(0.05)


def test_the_interval_covers_the_true_ratio_in_95_percent_of_cases():
    rng, cases = np.random.default_rng(1), 2000
    full = rng.normal(3, 0.6, (cases, 4))
    gain = full * 0.8 + rng.normal(0, 0.5, (cases, 4))  # correlated, as the baseline is shared
    found = [fieller(*pair) for pair in zip(gain, full, strict=True)]
    bounded = [ends for ends in found if ends is not None]
    assert len(bounded) > 0.98 * cases
    covered = np.mean([low <= 0.8 <= high for low, high in bounded])
    assert covered == pytest.approx(0.95, abs=4 * math.sqrt(0.95 * 0.05 / cases))


def test_the_interval_is_unbounded_if_the_full_gain_is_not_significant():
    gain, full = [1.0, 1.5, 0.8], np.array([1.0, 4.0, 0.6])
    assert ttest_1samp(full, 0).pvalue > 0.05
    assert fieller(gain, full) is None
    assert ttest_1samp(full + 20, 0).pvalue < 0.05
    assert fieller(gain, full + 20) is not None


def test_a_full_gain_of_rounding_error_gives_no_share():
    whole = [85.70 - 86.55, 84.11 - 85.08, 85.98 - 84.16]
    assert 0 < math.fsum(whole) < 1e-12
    assert _share([0.1, 0.2, 0.3], whole) is None


def test_gains_and_shares_use_the_seeds_in_common(table):
    found = by_cell(table, rows(baseline=BASELINE, ed=FULL, fast=FAST, sam=(None, 81.5)))
    assert list(found) == ["baseline", "ed", "fast", "sam"]
    assert (found["baseline"].gain, found["baseline"].share) == (None, None)
    assert found["ed"].share == Share(1.0)
    gained, whole = np.subtract(FAST, BASELINE), np.subtract(FULL, BASELINE)
    fast = found["fast"]
    assert (fast.seeds, fast.gain) == (3, pytest.approx(gained.mean()))
    assert fast.share.value == pytest.approx(gained.mean() / whole.mean())
    assert fast.share.interval == pytest.approx(fieller(gained, whole))
    sam = found["sam"]  # has only the second seed
    assert (sam.seeds, sam.gain) == (1, pytest.approx(0.5))
    assert sam.share.value == pytest.approx(0.5 / 3.3)
    assert (sam.share.interval, sam.share.bounded) == (None, True)


def test_a_cell_without_a_common_seed_has_no_gain(table):
    found = by_cell(table, rows(baseline=BASELINE, ed=FULL[:1], fast=(None, *FAST[1:])))
    fast = found["fast"]
    assert (fast.ours.count, fast.seeds, fast.gain, fast.share) == (2, 0, None, None)


def test_reduced_and_unfinished_runs_do_not_count(table):
    runs = rows(baseline=BASELINE, ed=FULL)
    for change in ({"deviations": "task.epochs=2"}, {"status": "stopped"}):
        others = [Row(**vars(row) | {"cell": "fast"} | change) for row in runs[:3]]
        assert "fast" not in by_cell(table, [*runs, *others])


def test_fields_show_intervals_or_why_there_are_none(table):
    write_steps(table, baseline=1.0, ed=1.641, sam=2.0)
    runs = rows(baseline=BASELINE, ed=FULL, fast=FAST)
    shown = {name: tuple(fields) for name, *fields in cost_fields(table, runs)}
    assert shown["baseline"] == ("1.00", "80.47 ± 0.50 (3)", "-", "-", "3")
    assert shown["ED"][0::2] == ("1.64", "+3.07", "3")
    assert shown["ED"][3] == "100"
    assert shown["fast"][::4] == ("-", "3")
    assert shown["fast"][3].startswith("82 [")
    assert shown["sam"] == ("2.00", "-", "-", "-", "-")
    noisy = rows(baseline=BASELINE, ed=(80.1, 84.0, 80.5), fast=FAST)
    assert {n: f for n, *f in cost_fields(table, noisy)}["fast"][3].endswith("[unbounded]")
    worse = rows(baseline=BASELINE, ed=np.subtract(BASELINE, 1), fast=FAST)
    assert {n: f for n, *f in cost_fields(table, worse)}["fast"][3] == "-"


def test_the_section_follows_the_table_and_names_the_machine(table):
    runs = rows(baseline=BASELINE, ed=FULL)
    text = to_markdown(table, runs)
    assert "No step is measured yet." in text.split("## Cost and gain")[1]
    write_steps(table, ed=1.6)
    text = to_markdown(table, runs)
    assert '"ED"' in text
    assert "H200, torch 2.0, commit abcdef01." in text
    assert "## Cost and gain" not in to_markdown(write_table(table.path.parent, "none"), [])


def test_the_report_shows_the_section(table):
    view = section(Experiment(table, rows(baseline=BASELINE, ed=FULL)), {})
    assert view["cost"]["title"] == "Cost and gain"
    assert [fields[0].text for fields in view["cost"]["grid"].rows] == ["baseline", "ED"]


def test_a_table_has_no_section_before_its_first_result(table):
    assert table.cost == Cost("baseline", "ed")
    assert cost_fields(table, []) == []
    assert "Cost and gain" not in to_markdown(table, [])


@pytest.mark.parametrize("ratio", ["", "fast", "nan", "0", "-1"])
def test_an_invalid_step_time_raises(table, ratio):
    write_steps(table, ed=ratio)
    with pytest.raises(SpecError, match=r"steps\.csv: mini/ed: 'x plain'"):
        gains(table, [])


@pytest.mark.parametrize("text", ["", "table,cell\nmini,ed\n", ",".join(COLUMNS) + "\nmini,ed\n"])
def test_a_damaged_steps_file_raises(tmp_path, text):
    (tmp_path / "steps.csv").write_text(text)
    with pytest.raises(SpecError, match=r"steps\.csv"):
        read_steps(tmp_path / "steps.csv")
