"""Rendering tables: means, verdicts, Markdown and LaTeX."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import ttest_ind_from_stats

from ed.analysis.collect import Row
from ed.analysis.numbers import mean_and_std, signed
from ed.analysis.provenance import remarks
from ed.analysis.render import table_lines, to_latex, to_markdown
from ed.analysis.spec import EXPERIMENTS, PROBES, Paper
from ed.analysis.stats import Ours, half_width, summarise, tolerance, verdict
from ed.analysis.store import to_csv
from ed.analysis.tables import load_table, table_names
from ed.engine.metrics import check_finite
from ed.runtime.runs import Status
from tests.helpers.tables import SPEC, full_rows, write_table


def test_mean_and_std_agree_with_numpy():
    values = list(np.random.default_rng(0).normal(87, 1.2, size=9))
    ours = summarise(values)
    assert ours.count == 9
    assert ours.mean == pytest.approx(np.mean(values), rel=1e-14)
    assert ours.std == pytest.approx(np.std(values, ddof=1), rel=1e-13)
    assert summarise([3.0]) == Ours(3.0, None, 1)
    assert summarise([]) == Ours(None, None, 0)


def test_verdict_requires_a_std_and_uses_two_standard_errors():
    both = tolerance(Ours(0.0, 3.0, 9), Paper(0.0, 2.0), 4)
    assert both == pytest.approx(2 * np.sqrt(9 / 9 + 4 / 4))
    assert tolerance(Ours(0.0, None, 1), Paper(0.0, 2.0), 4) == 4.0
    done = {"paper_count": 4, "done": 9, "planned": 9}
    for side in (1, -1):  # large differences in either direction count
        near, far = (Paper(10.0 + side * both * part, 2.0) for part in (0.999, 1.001))
        assert verdict(Ours(10.0, 3.0, 9), near, **done) == "match"
        assert verdict(Ours(10.0, 3.0, 9), far, **done) == "differs"
    assert verdict(Ours(10.3, 0.001, 3), Paper(10.0), **done) == "no std: +3 %"
    assert verdict(Ours(-12.0, None, 1), Paper(-10.0), **done) == "no std: -20 %"
    assert verdict(Ours(9.96, None, 1), Paper(10.0), **done) == "no std: -0.4 %"
    assert verdict(Ours(99.98, None, 1), Paper(100.0), **done) == "no std: -0.02 %"
    assert verdict(Ours(0.5, None, 1), Paper(0.0), **done) == "no std"
    assert verdict(Ours(1.0, None, 1), Paper(), **done) == "not in paper"
    assert verdict(Ours(9.0, 1.0, 2), Paper(9.0), **done, comparable=False) == "reference only"
    assert verdict(Ours(9.0, 1.0, 2), Paper(9.0), **done | {"done": 2}) == "pending 2 of 9"


def test_seeds_with_the_same_error_share_a_remark():
    failed = {"status": Status.FAILED, "error": "exit 1: no data"}
    rows = [Row("t", "c", seed, **failed) for seed in (0, 1)]
    rows.append(replace(rows[0], seed=2, error="exit 2: no [model](a)"))
    shared, other = remarks(rows)
    assert shared == "seed 0, 1 failed: exit 1: no data"
    assert other.startswith("seed 2 failed: exit 2: ")


def test_the_interval_of_a_difference_is_where_welchs_test_has_p_above_5_percent():
    for one, other in (
        (Ours(86.82, 0.71, 3), Ours(87.8, 1.17, 3)),
        (Ours(1.0, 0.2, 9), Ours(3.0, 2.0, 2)),
        (Ours(5.0, 0.0, 3), Ours(6.0, 0.1, 5)),
    ):
        half = half_width(one, other)
        assert half == pytest.approx(half_width(other, one))
        end = (one.mean, one.std, one.count, one.mean + half, other.std, other.count)
        assert ttest_ind_from_stats(*end, equal_var=False).pvalue == pytest.approx(0.05)


def test_a_difference_without_both_stds_has_no_interval(tmp_path):
    one = Ours(5.0, 1.0, 3)
    for other in (Ours(6.0, None, 1), Ours(6.0, None, 3), Ours(6.0, 1.0, 1)):
        assert half_width(one, other) is None
    assert half_width(Ours(5.0, 0.0, 3), Ours(6.0, 0.0, 3)) is None
    table = write_table(tmp_path, cells={"ed": SPEC["cells"]["ed"]}, tuning=None)
    text = to_markdown(table, [row for row in full_rows(table) if row.cell == "ed"])
    assert "| difference |" in text
    assert "| -4.95 |" in text


@pytest.mark.parametrize(
    ("stds", "shown"),
    [
        ((1.0, 1.0), "-0.50 [-2.8, +1.8]"),
        ((0.1, 0.1), "-0.50 [-0.73, -0.27]"),
        ((0.001, 0.001), "-0.50 [-0.50, -0.50]"),  # no more decimals than the difference
        ((20.0, 20.0), "-0.50 [-46, +45]"),
    ],
)
def test_intervals_have_two_digits_of_their_half_width(tmp_path, stds, shown):
    cells = {"ed": {"overrides": [], "paper": {"mean": 80.0, "std": stds[0]}}}
    table = write_table(tmp_path, seeds=[0, 1, 2], cells=cells, tuning=None)
    values = [79.5 - stds[1], 79.5, 79.5 + stds[1]]
    rows = [
        Row("mini", "ed", seed, status="done", last={"eval/acc": value})
        for seed, value in enumerate(values)
    ]
    assert f"| {shown} |" in to_markdown(table, rows)


def test_markdown_shows_numbers_verdicts_and_footnotes(table):
    text = to_markdown(table, full_rows(table))
    assert "| difference [95 % interval] |" in text
    assert "| 80.00 ± 1.00 | 79.80 ± 0.42 (2) | -0.20 [-2.3, +1.9] | match | [^1] |" in text
    assert r"| ed | 90.00 | 85.05 ± 0.07 (2) | -4.95 | no std: -6 % |  |" in text
    assert "| sam | - | 6.00 ± 1.41 (2) |  | not in paper | [^2] |" in text
    assert "[^1]: a | note\n[^2]: rho-0.5: the best of 2 of 2 grid points" in text
    assert "8 runs in 4.00 hours" in text
    latex = to_latex(table, full_rows(table))
    assert r"baseline & $80.00 \pm 1.00$ & $79.80 \pm 0.42$ & 2 & match \\" in latex
    assert r"& 2 & no std: -6 \% \\" in latex  # an unescaped % would start a comment


def test_the_latex_of_a_probe_names_a_command_that_finds_it():
    name = f"{PROBES}/{table_names(EXPERIMENTS / PROBES)[0]}"
    assert f"(python scripts/table.py {name} --latex)\n" in to_latex(load_table(name), [])


def test_the_footer_says_how_single_runs_are_judged(table):
    rows = [row for row in full_rows(table) if row.seed == table.seeds[0]]
    one = replace(table, seeds=table.seeds[:1])
    assert "Match: at most two standard errors" not in to_markdown(one, rows)
    assert "standard deviations" in to_markdown(one, rows)


def test_the_footer_counts_runs_with_unknown_code_state(table):
    about = {"device": "cpu", "torch": "2.0", "commit": "abcdef0123", "dirty": False}
    rows = [replace(row, **about) for row in full_rows(table)]
    assert "commit abcdef01. Match: at most two standard errors" in to_markdown(table, rows)
    rows[0] = replace(rows[0], dirty=None)
    assert "not recorded for 1 run." in to_markdown(table, rows)
    rows[1] = replace(rows[1], commit="", dirty=None)
    text = to_markdown(table, rows)
    assert "commit abcdef01, unknown." in text
    assert "not recorded for 2 runs." in text
    rows[1] = replace(rows[1], dirty=True)  # modified code counts as recorded
    assert "not recorded for 1 run." in to_markdown(table, rows)


def test_the_footer_lists_all_commits_and_devices_of_a_resumed_run(table):
    resumed = {"device": "a + b", "torch": "2.0 + 2.1", "commit": "abcdef0123 + 9876543210"}
    rows = [replace(row, device="b", torch="2.0", commit="abcdef0123") for row in full_rows(table)]
    rows[0] = replace(rows[0], **resumed)
    text = to_markdown(table, rows)
    assert "hours on a, b, torch 2.0, 2.1, commit 98765432, abcdef01." in text


def test_the_table_sets_the_number_of_decimals(tmp_path):
    table = write_table(tmp_path, digits=1)
    text = to_markdown(table, full_rows(table))
    assert "| baseline | 80.0 ± 1.0 | 79.8 ± 0.4 (2) | -0.2 [-2.3, +1.9] |" in text


def test_several_metrics_start_with_an_overview(tmp_path):
    cells = {
        "plain": {
            "overrides": [],
            "paper": {"eval/acc": {"mean": 80.0}, "eval/ood": {"mean": None}},
        },
        "ed": {"overrides": ["regularizer=ed"], "paper": None},
        "sam": {"overrides": ["regularizer=sam"], "paper": {"mean": 70.0}},  # for the first metric
    }
    metrics = {"eval/acc": "accuracy", "eval/ood": "shifted"}
    how = {"metric": None, "tuning": None, "cells": cells}
    table = write_table(tmp_path, **how, metrics=metrics)
    rows = [
        Row("mini", "plain", seed, status="done", last={"eval/acc": 79.0 + seed, "eval/ood": 8.5})
        for seed in (0, 1)
    ]
    grid, line_by_line = to_markdown(table, rows).split("## Number by number")
    assert "| ours [paper] | accuracy | shifted |" in grid
    assert "| plain | 79.50 ± 0.71 [80.00] | 8.50 ± 0.00 |\n| ed | - | - |" in grid
    assert table.cells["sam"].paper == {"eval/acc": Paper(70.0)}
    assert "| plain, accuracy | 80.00 | 79.50 ± 0.71 (2) |" in line_by_line
    assert "Number by number" not in to_markdown(table, [])  # there are no numbers yet


def test_numbers_that_are_not_in_the_paper_stand_alone(tmp_path):
    cells = {name: {"overrides": [f"regularizer={name}"], "paper": None} for name in ("ed", "sam")}
    cells["sam"]["note"] = "by hand"
    done = {"eval/acc": 79.0, "eval/ood": 8.5}
    rows = [Row("mini", "ed", seed, status="done", last=done) for seed in (0, 1)]
    table = write_table(tmp_path, cells=cells, tuning=None)
    text = to_markdown(table, rows)
    assert "|  | ours | runs | notes |" in text
    assert "| ed | 79.00 ± 0.00 | 2 |  |\n| sam | - | 0 of 2 | [^1] |\n\n" in text
    metrics = {"eval/acc": "accuracy", "eval/ood": "shifted"}
    table = write_table(tmp_path, "wide", cells=cells, tuning=None, metric=None, metrics=metrics)
    text = to_markdown(table, [replace(row, table="wide") for row in rows])
    assert "|  | accuracy | shifted | runs | notes |" in text
    assert "| ed | 79.00 ± 0.00 | 8.50 ± 0.00 | 2 |  |" in text
    assert "Number by number" not in text


@pytest.mark.parametrize(
    ("mean", "std", "shown"),
    [
        (87.8, 1.17, "87.80 ± 1.17"),
        (0.58, 0.114, "0.58 ± 0.11"),
        (0.0, None, "0.00"),
        (-0.0, 0.0, "0.00 ± 0.00"),
        (0.0123, None, "0.012"),
        (3.04e-4, 1.2e-4, "0.00030 ± 0.00012"),
        (-0.0996, 0.2, "-0.100 ± 0.200"),
        (0.6712, 0.0031, "0.671 ± 0.003"),
        (1.34, 0.0051, "1.34 ± 0.01"),
        (84.74, 1.4e-14, "84.74 ± 0.00"),  # three equal numbers; the std is rounding error
        (3.04e-8, 1.2e-8, "3.0e-08 ± 1.2e-08"),
        (math.nan, math.nan, "nan ± nan"),
    ],
)
def test_small_numbers_get_more_decimals(mean, std, shown):
    assert mean_and_std(mean, std, 2) == shown


def test_differences_have_the_decimals_of_the_paper():
    assert signed(-3.061, Paper(87.8), 2) == "-3.06"
    assert signed(0.0021, Paper(0.012), 2) == "+0.002"
    assert signed(-0.0021, Paper(1.34), 2) == "+0.00"


def test_latex_escapes_labels(tmp_path):
    cells = {"square": {"label": "x^2 ~ {50 %}, $_#&\\", "overrides": []}}
    latex = to_latex(write_table(tmp_path, cells=cells, tuning=None), [])
    assert r"x\^{}2 \~{} \{50 \%\}, \$\_\#\&\textbackslash{} & -- & --" in latex


def test_latex_uses_scientific_notation(table):
    rows = [replace(r, last={"eval/acc": 1e-10 * r.last["eval/acc"]}) for r in full_rows(table)]
    assert r"$8.0 \cdot 10^{-9} \pm 4.2 \cdot 10^{-11}$" in to_latex(table, rows)


def test_the_best_loss_is_the_lowest(tmp_path):
    rho = SPEC["tuning"]["rho"] | {"lower_is_better": True}
    table = write_table(tmp_path, metric="eval/loss", tuning={"rho": rho})
    rows = [replace(row, last={"eval/loss": row.last["eval/acc"]}) for row in full_rows(table)]
    line = table_lines(table, rows)[-1]
    assert line.ours.mean == 2.0
    assert line.remarks == ["rho-0.1: the best of 2 of 2 grid points, by the lowest eval/loss"]


def test_a_grid_is_pending_until_all_points_are_done(table):
    *rows, last = full_rows(table)
    # values of unfinished runs do not count
    for under_way in ([], [replace(last, status=Status.STOPPED)]):
        line = table_lines(table, [*rows, *under_way])[-1]
        assert line.verdict == "pending 3 of 4"
        assert line.ours.mean == 2.0
        assert line.remarks == ["rho-0.1: the best of 1 of 2 grid points"]


def test_a_grid_skips_diverged_points(table, tmp_path):
    *rows, last = full_rows(table)
    with pytest.raises(FloatingPointError) as error:
        check_finite({"train/loss": math.nan}, 0, 1, tmp_path)
    failed = replace(last, status=Status.DIVERGED, last={}, error=f"exit 1: error: {error.value}")
    line = table_lines(table, [*rows, failed])[-1]
    assert not line.verdict.startswith("pending")
    assert line.ours.mean == 2.0
    assert line.remarks == ["rho-0.1: the best of 1 of 2 grid points (rho-0.5 diverged)"]
    accident = replace(failed, status=Status.FAILED, error="exit 1: error: no such folder")
    assert table_lines(table, [*rows, accident])[-1].verdict == "pending 3 of 4"
    nothing = [replace(failed, cell=row.cell, seed=row.seed) for row in full_rows(table)[4:]]
    assert table_lines(table, nothing)[-1].verdict == "pending 0 of 4"


def test_reduced_runs_are_shown_separately_without_a_verdict(table):
    rows = [Row(**vars(r) | {"deviations": "task.epochs=2"}) for r in full_rows(table)]
    text = to_markdown(table, rows)
    assert "| baseline | 80.00 ± 1.00 | - |  | pending 0 of 2 | [^1] |" in text
    reduced = text.split("## Reduced: task.epochs=2")[1]
    assert "| 79.80 ± 0.42 (2) | -0.20 [-2.3, +1.9] | reference only | [^1] |" in reduced


def test_a_table_with_different_settings_has_no_verdicts(tmp_path):
    table = write_table(tmp_path, comparable=False)
    judged = {line.label: line.verdict for line in table_lines(table, full_rows(table))}
    assert judged == {"baseline": "reference only", "ed": "reference only", "sam": "not in paper"}


def test_the_text_does_not_depend_on_the_order_of_rows(table):
    rows = full_rows(table)
    assert to_csv(table, rows) == to_csv(table, rows[::-1])
    assert to_markdown(table, rows) == to_markdown(table, rows[::-1])
