"""Findings that the report generates from results."""

import math
from dataclasses import replace

import pytest

from ed.analysis.collect import Row
from ed.analysis.findings import finding, gain, pairs, top_findings
from ed.analysis.render import Line
from ed.analysis.tables import load_table
from ed.analysis.verdicts import Experiment, minus
from tests.helpers.tables import experiment

MINUS = "\N{MINUS SIGN}"


def test_pairs_differ_only_in_ed():
    runs = {"rte": [60.0], "rte_mixup": [59.0], "rte_ed": [61.0], "cola_ed": [50.0]}
    glue = experiment("glue", runs)
    assert [(a.ours.mean, b.ours.mean) for a, b in pairs(glue)] == [(60.0, 61.0)]


def test_pairs_compare_one_metric():
    other = "eval/acc_mnist_randomized"
    plain, ed = {"eval/acc": 99.0, other: 48.0}, {other: 50.0}
    table = load_table("mnist_cifar")
    rows = [
        Row(*table.cells[cell].home, 0, status="done", last=last)
        for cell, last in (("baseline", plain), ("ed", ed))
    ]
    found = pairs(Experiment(table, rows))
    assert [(a.ours.mean, b.ours.mean) for a, b in found] == [(48.0, 50.0)]
    without = [rows[0], replace(rows[1], last={})]
    assert pairs(Experiment(table, without)) == []


def test_a_finding_compares_only_cells_of_the_same_task():
    search = {"product": [24.0], "division": [2.0], "division_half": [99.0]}
    assert "against" not in finding(experiment("grokking_search", search))
    rates = {"baseline": [80.0], "rate": [81.0], "mean": [82.0]}
    assert "82.00 against 80.00 for as in" in finding(experiment("baseline_gap", rates))


def both_lines(before: list[float], after: list[float]) -> tuple[Line, Line]:
    return pairs(experiment("table1", {"baseline": before, "ed": after}))[0]


def test_gains_are_paired_by_seed():
    """The 97.5 % quantile of Student's t is 4.303 with 2 degrees of freedom."""
    apart, half = gain(*both_lines([83.0, 84.0, 85.0], [86.0, 87.1, 87.9]))
    assert apart == pytest.approx(3.0)
    assert half == pytest.approx(4.303 * 0.1 / math.sqrt(3), rel=1e-3)


def test_gains_of_different_seeds_have_welchs_interval():
    before, after = both_lines([82.8, 83.0, 83.2], [85.8, 86.0, 86.2])
    moved = replace(after, by_seed={seed + 7: x for seed, x in after.by_seed.items()})
    # equal stds give 4 degrees of freedom, with a 97.5 % quantile of 2.776
    assert gain(before, moved)[1] == pytest.approx(2.776 * 0.2 * math.sqrt(2 / 3), rel=1e-3)


def test_a_gain_without_spread_has_no_interval():
    assert gain(*both_lines([83.0], [86.0])) == (3.0, None)
    assert gain(*both_lines([83.0], [86.0, 86.2]))[1] is None
    assert gain(*both_lines([83.0, 83.2], [86.0, 86.2]))[1] is None  # the same gain twice


def test_findings_contain_numbers_and_seeds():
    text = finding(experiment("table1", {"baseline": [87.0], "ed": [86.5]}))
    for part in ("86.50", "87.00", f"{MINUS}0.50", "n = 1"):
        assert part in text
    assert finding(Experiment(load_table("table1"), [])) == ""


def test_a_finding_keeps_the_case_of_symbols():
    text = finding(experiment("grokking_search", {"product": [24.0]}))
    assert text.startswith("x * y")


def test_a_finding_about_small_numbers_shows_their_difference():
    text = finding(experiment("table1", {"baseline": [0.012, 0.014], "ed": [0.015, 0.021]}))
    assert f"(+0.005, n = 2, 95 % interval {MINUS}0.020 to +0.030)" in text


def test_a_finding_lists_the_numbers_of_runs_in_the_order_of_the_values():
    text = finding(experiment("table1", {"baseline": [87.0], "ed": [86.5, 86.7]}))
    assert "n = 2 and 1" in text


def test_the_top_finding_uses_the_table_with_more_seeds():
    short = experiment("table1_100", {"baseline": [83.0, 83.2, 83.4], "ed": [86.0, 86.2, 86.4]})
    full = experiment("table1", {"baseline": [87.0], "ed": [90.0]})
    found = top_findings([full, short])
    assert found[0].value == "+3.00 points"
    assert found[0].table.name == "table1_100"


def test_hyphens_before_numbers_become_minus_signs():
    assert minus("r = -0.58 (-0.94 to -0.05), ViT-B/16, 1e-5") == (
        f"r = {MINUS}0.58 ({MINUS}0.94 to {MINUS}0.05), ViT-B/16, 1e-5"
    )
