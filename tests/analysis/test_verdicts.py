"""Verdicts on the paper's numbers and claims, and findings generated from results."""

import itertools
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from ed.analysis.collect import Row
from ed.analysis.outline import CLAIMS, MISSING, PARTS
from ed.analysis.spec import EXPERIMENTS, PROBES, Paper
from ed.analysis.stats import Ours
from ed.analysis.tables import load_table, table_names
from ed.analysis.verdicts import (
    Experiment,
    Verdict,
    counts,
    gpu_hours,
    headline,
    judge,
    load_experiments,
    numbers,
)
from ed.runtime.runs import Record, Status
from tests.helpers.tables import experiment, write_table

MINUS = "\N{MINUS SIGN}"


def single(mean: float) -> Ours:
    return Ours(mean, None, 1)


# --- verdict on one number


@pytest.mark.parametrize(
    ("ours", "paper", "verdict"),
    [
        (single(89.0), Paper(90.0, 0.6), Verdict.REPRODUCED),  # within two standard deviations
        # the difference of 1 exceeds 2 sqrt(0.37 / 3)
        (Ours(89.0, 0.1, 3), Paper(90.0, 0.6), Verdict.CONTRADICTED),
        (Ours(89.5, 0.1, 3), Paper(90.0, 0.6), Verdict.REPRODUCED),
        (single(109.0), Paper(100.0), Verdict.REPRODUCED),  # without a std, the tolerance is 10 %
        (single(111.0), Paper(100.0), Verdict.CONTRADICTED),
    ],
)
def test_a_number_is_reproduced_if_it_lies_within_the_tolerance(ours, paper, verdict):
    assert judge(ours, paper, paper_count=3) == verdict


@pytest.mark.parametrize(
    ("ours", "paper", "reproduced"),
    [(90.6, 99.9, False), (99.0, 99.9, True), (49.9, 48.0, True), (83.0, 86.0, False)],
)
def test_accuracies_near_100_must_agree_within_a_point(ours, paper, reproduced):
    found = judge(single(ours), Paper(paper), paper_count=None, percent=True)
    assert (found == Verdict.REPRODUCED) == reproduced


@pytest.mark.parametrize(
    ("reference", "verdict"), [(85.0, "direction only"), (89.5, "contradicted")]
)
def test_the_direction_is_judged_against_the_reference(reference, verdict):
    """The paper goes from 87 to 90.18; we go from `reference` to 89.23."""
    both = (single(reference), Paper(87.0, 1.0))
    assert judge(single(89.23), Paper(90.18, 0.14), paper_count=3, reference=both) == verdict


def test_the_reference_has_the_same_task():
    """On MRPC the paper gains 0.92 points with ED; RTE, the first task, plays no part."""
    values = {"rte": [50.0], "mrpc": [80.0], "mrpc_ed": [79.0]}
    (found,) = [n for n in experiment("glue", values).numbers if n.ours.mean == 79.0]
    assert found.verdict == Verdict.CONTRADICTED


def test_a_cell_with_a_task_of_its_own_is_judged_against_the_first_cell():
    """The paper has 87.80 for the baseline and 88.92 for paths in embedding space."""
    values = {"baseline": [80.0], "input": [89.0], "embedding": [85.0]}
    found = experiment("feature_space", values).numbers
    assert found[2].verdict == Verdict.DIRECTION


def test_a_number_without_runs_is_not_run():
    assert {n.verdict for n in Experiment(load_table("table1"), []).numbers} == {Verdict.NOT_RUN}


# --- each number counts once


def test_a_number_compared_with_two_metrics_counts_once():
    """Each of the nine GLUE numbers is compared with both the last and the best epoch."""
    glue = Experiment(load_table("glue"), [])
    assert len(glue.numbers) == 18
    assert [number.verdict for number in numbers([glue])] == [Verdict.NOT_RUNNABLE] * 9


def test_a_number_in_several_tables_counts_once():
    """90.18 ± 0.14 appears in table1, resolution and basis, which share these runs."""
    tables = [Experiment(load_table(name), []) for name in ("table1", "resolution", "basis")]
    found = numbers(tables)
    assert sum(number.paper == Paper(90.18, 0.14) for number in found) == 1
    assert {number.table.name for number in found} == {"table1", "basis"}


def test_two_interpretations_of_a_row_count_once():
    """The row without label anchoring has two interpretations; the one with runs is used."""
    runs = {"ed_without_anchors_performance": [90.1]}
    (number,) = [n for n in numbers([experiment("table1", runs)]) if n.paper == Paper(90.0, 0.6)]
    assert number.cell.name == "ed_without_anchors_performance"
    assert number.verdict == Verdict.REPRODUCED


def test_equal_numbers_in_different_rows_count_separately():
    """The polynomial networks of tasks 3 and 6 have the same ED_norm."""
    found = numbers([Experiment(load_table("pnn"), [])])
    assert len(found) == 30


def test_stand_in_experiments_are_not_counted():
    assert numbers([Experiment(load_table("glue_minilm"), [])]) == []


def test_counts_cover_every_number():
    found = numbers(load_experiments())
    assert sum(counts(found).values()) == len(found)
    homes = Counter((n.cell.home, n.metric, n.paper) for n in found)
    assert max(homes.values()) == 1


# --- outline and claims


def test_an_experiment_begins_with_its_first_run():
    rows = [Row("table1", "ed", seed, status=status) for seed, status in enumerate(Status)]
    assert Experiment(load_table("table1"), rows).begun
    assert not Experiment(load_table("table1"), [rows[list(Status).index(Status.PENDING)]]).begun


def test_the_outline_lists_every_experiment_once():
    listed = [name for names in PARTS.values() for name in names]
    assert sorted(listed) == table_names()
    assert set(MISSING) <= set(listed)


def test_experiments_are_in_the_papers_order_before_others_and_probes(tmp_path):
    first, *_, last = (name for names in PARTS.values() for name in names)
    for name in ("zeta", last, "alpha", first):
        write_table(tmp_path, name)
    (tmp_path / PROBES).mkdir()
    write_table(tmp_path / PROBES, "aside")
    names = [found.table.path.stem for found in load_experiments(tmp_path)]
    assert names == [first, last, "alpha", "zeta", "aside"]


def test_claims_refer_to_existing_cells_and_metrics():
    for claim in CLAIMS:
        table = load_table(claim.table)
        assert {claim.reference, *claim.treated} - {None} <= set(table.cells)
        assert claim.metric is None or claim.metric in table.metrics
        assert claim.stand_in is None or not load_table(claim.stand_in).comparable


def test_a_headline_compares_reference_and_treatment():
    runs = {"baseline": [87.0, 88.0, 87.5], "ed": [90.8, 90.9, 90.7]}
    rows = headline([experiment("table1", runs)])
    assert [row.claim for row in rows] == [c.text for c in CLAIMS if c.table == "table1"]
    assert rows[0].paper == "87.80 ± 1.17 → 90.82 ± 0.11"
    assert rows[0].ours == "87.50 ± 0.50 → 90.80 ± 0.10 (n = 3, performance configuration)"
    assert rows[0].verdict == Verdict.REPRODUCED
    assert rows[0].command == "python scripts/launch.py table1"
    assert rows[1].verdict == Verdict.NOT_RUN


def test_the_effect_of_a_headline_is_paired_by_seed():
    """Gains of 1.9, 2.0 and 2.1 are clear, although the seeds themselves differ by 4 points."""
    runs = {"baseline": [80.0, 82.0, 84.0], "ed": [81.9, 84.0, 86.1]}
    assert headline([experiment("table1", runs)])[0].verdict == Verdict.DIRECTION


def test_a_headline_with_missing_seeds_is_not_reproduced_yet():
    runs = {"baseline": [87.4, 87.5], "ed": [90.8, 90.9]}
    row = headline([experiment("table1", runs)])[0]
    assert row.verdict == Verdict.DIRECTION
    assert "(n = 2 of 3, " in row.ours


def test_a_headline_without_an_improvement_is_contradicted():
    runs = {"baseline": [90.0, 90.1, 90.2], "ed": [80.0, 80.1, 80.2]}
    assert headline([experiment("table1", runs)])[0].verdict == Verdict.CONTRADICTED


@pytest.mark.parametrize(
    ("spread", "verdict"), [(1.0, Verdict.UNCLEAR), (0.01, Verdict.CONTRADICTED)]
)
def test_a_reversed_effect_is_not_reproduced_even_if_both_numbers_agree(spread, verdict):
    """The effect is -0.1; with the larger spread, its interval includes zero."""
    runs = {
        "rte": [70.0 + spread, 70.0 - spread] * 4 + [70.0],
        "rte_ed": [69.9 - spread, 69.9 + spread] * 4 + [69.9],
    }
    found = experiment("glue", runs)
    assert [n.verdict for n in found.numbers if n.ours.count] == [Verdict.REPRODUCED] * 2
    (row,) = (row for row in headline([found]) if row.ours)
    assert row.verdict == verdict


@pytest.mark.parametrize(
    ("slope", "shown", "verdict"),
    [(1, "+1.00", Verdict.DIRECTION), (-1, f"{MINUS}1.00", Verdict.CONTRADICTED)],
)
def test_a_correlation_is_judged_by_the_sign_of_r(slope, shown, verdict, monkeypatch):
    monkeypatch.setattr("ed.analysis.correlation.RESAMPLES", 50)
    name = next(claim.table for claim in CLAIMS if load_table(claim.table).correlation)
    table = load_table(name)
    study, networks = table.correlation, len(table.cells)
    rows = []
    for number, cell in enumerate(table.cells.values()):
        known = {study.against: float(slope * number), study.train: 100.0 - number % 2}
        last = dict.fromkeys(itertools.chain(*study.measures.values()), float(number)) | known
        rows += [Row(*cell.home, seed, status="done", last=last) for seed in table.seeds]
    (row,) = headline([Experiment(table, rows)])
    fitted = (networks + 1) // 2  # the others have an accuracy of 99 %
    assert row.ours == (
        f"r = {shown} ({shown} to {shown}), {networks} networks; {shown} among the {fitted} fitted"
    )
    assert row.verdict == verdict


def test_a_correlation_whose_interval_includes_zero_is_unclear():
    """Two pairs of settings rise and two fall, so some resamples have either sign."""
    table = load_table(next(claim.table for claim in CLAIMS if load_table(claim.table).correlation))
    study, rows = table.correlation, []
    for number, cell in enumerate(table.cells.values()):
        group = number // 3  # weight decays of one setting are resampled together
        known = {study.against: float(group % 2 + group / 10), study.train: 100.0}
        last = dict.fromkeys(itertools.chain(*study.measures.values()), float(group)) | known
        rows += [Row(*cell.home, seed, status="done", last=last) for seed in table.seeds]
    (row,) = headline([Experiment(table, rows)])
    assert row.verdict == Verdict.UNCLEAR


def test_a_pool_becomes_a_headline_once_every_network_has_a_seed(monkeypatch):
    monkeypatch.setattr("ed.analysis.correlation.RESAMPLES", 50)
    table = load_table("correlation_resnet18")
    study, rows = table.correlation, []
    for number, cell in enumerate(table.cells.values()):
        known = {study.against: float(number), study.train: 100.0}
        last = dict.fromkeys(itertools.chain(*study.measures.values()), float(number)) | known
        rows.append(Row(*cell.home, 0, status="done", last=last))
    (row,) = headline([Experiment(table, rows)])
    assert f"{len(table.cells)} networks (n = 1 of 3)" in row.ours
    (row,) = headline([Experiment(table, rows[1:])])
    assert row.verdict == Verdict.NOT_RUN


def grokking(*runs: tuple[float, int, int]) -> Experiment:
    """Returns runs of x / y, 50 %, from (last accuracy, step of ED's peak, step of the loss's)."""
    table, rows = load_table("grokking_search"), []
    for seed, (accuracy, top, worst) in enumerate(runs):
        history = [
            {"step": s, "eval/acc": accuracy * s / 4, "eval/loss": float(s == worst)}
            | {"measure/ed_validation": float(s == top)}
            for s in (1, 2, 3, 4)
        ]
        record = Record("", {}, {}, {}, "", lambda history=history: history)
        last = {"eval/acc": accuracy}
        home = table.cells["division_half"].home
        rows.append(Row(*home, seed, status="done", last=last, record=record))
    return Experiment(table, rows)


@pytest.mark.parametrize(
    ("runs", "text", "verdict"),
    [
        (((99.0, 2, 2), (98.0, 4, 3)), "ED peaks at steps 2 and 4, the loss at 2 and 3",
         Verdict.DIRECTION),
        (((99.0, 2, 2), (98.0, 1, 3)), "ED peaks at steps 2 and 1, the loss at 2 and 3",
         Verdict.CONTRADICTED),
        (((99.0, 2, 2), (9.0, 2, 2)), "no transition: 9.0 %", Verdict.CONTRADICTED),
        (((1.5, 2, 2),), "no transition: 1.5 % validation accuracy (x / y, 50 %, n = 1 of 2)",
         Verdict.CONTRADICTED),
    ],
)  # fmt: skip
def test_grokking_is_judged_by_the_peaks_of_all_runs(runs, text, verdict):
    (row,) = headline([grokking(*runs)])
    assert text in row.ours
    assert row.verdict == verdict


def test_a_grokking_headline_shows_that_seeds_are_missing():
    (row,) = headline([grokking((99.0, 2, 2))])
    assert "(x / y, 50 %, n = 1 of 2)" in row.ours


def test_a_grokking_headline_requires_the_logged_values_of_all_runs():
    found = grokking((99.0, 2, 2), (98.0, 1, 3))
    rows = [found.rows[0], replace(found.rows[1], record=None)]
    (row,) = headline([Experiment(found.table, rows)])
    assert "logged values" in row.ours
    assert row.verdict == Verdict.NOT_RUN


def test_a_headline_without_results_is_not_marked_as_shortened():
    (row,) = headline([Experiment(load_table(name), []) for name in ("procgen", "procgen_short")])
    assert row.ours == ""
    assert row.verdict == Verdict.NOT_RUN


def test_headlines_show_experiments_that_cannot_run():
    rows = headline([Experiment(load_table("imagenet_scratch"), [])])
    assert [row.verdict for row in rows] == [Verdict.NOT_RUNNABLE]


@pytest.mark.parametrize(
    ("comment", "hours"),
    [
        ("# python x\n# 27 runs, about 9 GPU hours on one H200", 9.0),
        ("# 21 runs, about 150 GPU\n# minutes on one H200", 2.5),
        ("# 18 runs, one to 4 minutes each on one CPU core.", None),
        ("# 81 runs of another table.", None),
    ],
)
def test_gpu_hours_come_from_the_header_comment(tmp_path, comment, hours):
    text = (EXPERIMENTS / "basis.yaml").read_text()
    body = text[text.index("title:") :].replace("same_as: resolution/efficiency", "overrides: []")
    path = Path(tmp_path / "basis.yaml")
    path.write_text(f"{comment}\n{body}")
    assert gpu_hours(load_table(str(path))) == hours
