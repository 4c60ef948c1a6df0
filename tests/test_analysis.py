"""From experiment files and run folders to tables, on fabricated folders: no training, no torch."""

import json
import math
import os
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from ed.analysis.collect import (
    CollectError,
    Row,
    collect,
    collect_run,
    committed,
    merge,
    read_metrics,
    read_results,
)
from ed.analysis.experiments import load_table
from ed.analysis.render import (
    grid_lines,
    mean_and_std,
    signed,
    table_lines,
    to_csv,
    to_latex,
    to_markdown,
)
from ed.analysis.spec import EXPERIMENTS, Paper, SpecError, Table, expand
from ed.analysis.stats import Ours, summarise, tolerance, verdict
from ed.engine.metrics import check_finite
from scripts.table import main

SPEC = {
    "title": "A table",
    "place": "Nowhere",
    "metric": "eval/acc",
    "seeds": [0, 1],
    "paper_seeds": 3,
    "fixed": ["task=cifar10", "task.epochs=300"],
    "cells": {
        "baseline": {
            "overrides": ["regularizer=none"],
            "paper": {"mean": 80.0, "std": 1.0},
            "note": "a | note",
        },
        "ed": {"overrides": ["regularizer=ed", "regularizer.weight=1e-2"], "paper": {"mean": 90.0}},
        "sam": {"best_of": "rho", "paper": None},
    },
    "tuning": {
        "rho": {
            "overrides": ["regularizer=sam"],
            "grid": {"regularizer.rho": [0.1, 0.5]},
            "rule": "best",
        }
    },
}


def write_table(folder: Path, name: str = "mini", **changes) -> Table:
    path = folder / f"{name}.yaml"
    spec = {key: value for key, value in (SPEC | changes).items() if value is not None}
    path.write_text(yaml.safe_dump(spec, sort_keys=False))
    return load_table(str(path))


@pytest.fixture
def table(tmp_path) -> Table:
    return write_table(tmp_path)


def fabricate(run, accuracy: float = 80.0, *, done: bool = True, tail: str = "") -> None:
    """A run folder as the engine leaves it."""
    run.folder.mkdir(parents=True, exist_ok=True)
    config: dict = {"seed": run.seed}
    for override in run.overrides:
        key, value = override.split("=")
        if "." in key:
            group, name = key.split(".")
            config.setdefault(group, {})[name] = float(value)
    (run.folder / "config.yaml").write_text(yaml.safe_dump(config))
    rows = [{"step": 5, "train/loss": 2.0}, {"step": 10, "eval/acc": accuracy}]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (run.folder / "metrics.jsonl").write_text(text + tail)
    session = {
        "device": "cpu",
        "commit": "abcdef0123",
        "dirty": False,
        "steps": 20,
        "versions": {"torch": "2.0"},
    }
    (run.folder / "meta.json").write_text(json.dumps({"sessions": [session, session]}))
    if done:
        summary = {"last": {"eval/acc": accuracy}, "best": {"eval/acc": accuracy + 1}}
        (run.folder / "DONE").write_text(json.dumps(summary | {"steps": 20, "seconds": 3.5}))


# --- experiment files


def test_expansion_lists_every_cell_seed_and_grid_point(table):
    runs = expand(table, root=Path("runs"))
    assert [(run.cell, run.seed) for run in runs] == [
        (cell, seed) for cell in ("baseline", "ed", "rho-0.1", "rho-0.5") for seed in (0, 1)
    ]
    assert runs[2].folder == Path("runs/mini/ed/seed0")
    assert runs[2].overrides == (
        "task=cifar10",
        "task.epochs=300",
        "regularizer=ed",
        "regularizer.weight=1e-2",
        "seed=0",
    )
    assert runs[4].overrides[2:4] == ("regularizer=sam", "regularizer.rho=0.1")


def test_choosing_cells_and_seeds_keeps_folders_but_settings_move_them(table):
    whole = {run.folder: run for run in expand(table)}
    chosen = expand(table, cells=["baseline", "sam", "ed"], seeds=[1])
    assert [run.cell for run in chosen] == ["baseline", "rho-0.1", "rho-0.5", "ed"]
    assert all(whole[run.folder] == run for run in chosen)
    one, other = (expand(table, sets=[f"task.epochs={n}"]) for n in (1, 2))
    folders = {run.folder for run in [*one, *other, *whole.values()]}
    assert len(folders) == 3 * len(whole)
    assert one[0].deviations == ("task.epochs=1",)
    assert dict(o.split("=") for o in one[0].overrides)["task.epochs"] == "1"  # it comes last
    assert one[0].folder.parts[1].startswith("mini@")
    alike = {expand(table, sets=[f"{part}.width=1"])[0].folder for part in ("task", "model")}
    assert len(alike) == 2
    several = ["task.epochs=1", "optimizer.lr=1"]
    assert expand(table, sets=several)[0].folder == expand(table, sets=several[::-1])[0].folder
    assert expand(table, cells=["ed", "ed"], seeds=[1, 1]) == expand(table, cells=["ed"], seeds=[1])


def test_settings_that_cannot_change_a_result_are_no_deviations(table):
    (run, *_) = expand(table, sets=["system.log_every=5", "logger=wandb"], data=["/else"])
    assert run.deviations == ()
    assert run.folder == Path("runs/mini/baseline/seed0")
    assert {"system.log_every=5", "logger=wandb", "task.data=/else"} <= set(run.overrides)


def test_every_set_of_a_table_may_lie_elsewhere_but_none_may_be_another(table):
    (run, *_) = expand(table, data=["/a=b/cifar10", "task.mnist=/mnist"])
    assert run.deviations == ()
    assert {"task.data=/a=b/cifar10", "task.mnist=/mnist"} <= set(run.overrides)
    with pytest.raises(SpecError, match=r"--data embedded: .* --set task.data=embedded they are"):
        expand(table, data=["embedded"])
    with pytest.raises(SpecError, match=r"--data task.epochs=1: use task.data, task.mnist"):
        expand(table, data=["task.epochs=1"])


def test_settings_of_measures_deviate_where_a_measure_is_the_result(table, tmp_path):
    sets = ["measures.ed.pairs=10"]
    assert expand(table, sets=sets)[0].deviations == ()
    metrics = {"eval/acc": "accuracy", "measure/ed": "ED"}
    pool = write_table(tmp_path, "pool", metric=None, metrics=metrics)
    assert expand(pool, sets=sets)[0].deviations == tuple(sets)


def test_a_cell_may_be_the_runs_of_another_table(tmp_path):
    write_table(tmp_path)
    cells = {"same": {"same_as": "mini/ed", "paper": None}}
    borrower = write_table(tmp_path, "other", cells=cells, tuning={}, fixed=["task=glue"])
    (run, _) = expand(borrower)
    assert (run.table, run.cell) == ("mini", "ed")
    assert run.folder == Path("runs/mini/ed/seed0")
    assert "task=cifar10" in run.overrides


def test_a_cell_may_be_a_whole_grid_of_another_table(tmp_path):
    pool = {"overrides": [], "grid": {"optimizer.lr": [1, 2]}, "paper": None}
    write_table(tmp_path, cells={"pool": pool}, tuning={})
    cells = {"same": {"same_as": "mini/pool", "paper": None}}
    borrower = write_table(tmp_path, "other", cells=cells, tuning={})
    assert list(borrower.cells) == ["same-1", "same-2"]
    runs = expand(borrower, seeds=[0])
    assert [run.folder for run in runs] == [Path(f"runs/mini/pool-{lr}/seed0") for lr in (1, 2)]
    assert [run.overrides[-2] for run in runs] == ["optimizer.lr=1", "optimizer.lr=2"]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"seeds": []}, "seeds"),
        ({"seeds": [0, 0]}, "seeds"),
        ({"seeds": [-1]}, "seeds: [-1]; whole numbers from 0 on"),
        ({"cells": {}}, "cells"),
        ({"metrics": {"eval/acc": "a"}}, "either metric"),
        ({"titel": "x"}, "unknown key 'titel'; did you mean title"),
        ({"cells": {"a": {"paper": None}}}, "cell a: give one of overrides, same_as, best_of"),
        ({"cells": {"a": {"overrides": []}}}, "cell a: the key 'paper' is missing"),
        ({"cells": {"a b": {"overrides": [], "paper": None}}}, "letters, digits"),
        ({"cells": {"a": {"overrides": ["x"], "paper": None}}}, "key=value is needed, not 'x'"),
        ({"cells": {"a": {"best_of": "b", "paper": None}}, "tuning": {}}, "; there are none there"),
        ({"cells": {"a": {"same_as": "no/a", "paper": None}}}, "same_as: no/a"),
        ({"cells": {"a": {"overrides": [], "paper": {"eval/x": {"mean": 1}}}}}, "paper: eval/x"),
        (
            {"cells": {n: {"overrides": ["x=1"], "paper": None} for n in "ab"}},
            "cells a and b have the same overrides",
        ),
        ({"paper_seeds": None}, "paper_seeds: needed"),
        (
            {"cells": SPEC["cells"] | {"rho-0.1": {"overrides": ["x=1"], "paper": None}}},
            "rho-0.1 stands twice",
        ),
        (
            {
                "tuning": {
                    n: SPEC["tuning"]["rho"] | {"overrides": [f"x={n}"]} for n in ("rho", "ed")
                }
            },
            "ed stands twice",
        ),
        (
            {
                "cells": {
                    "a": {"overrides": ["x=1"], "grid": {"y": [2]}, "paper": None},
                    "a-2": {"overrides": ["x=3"], "paper": None},
                }
            },
            "cell a-2 stands there twice",
        ),
        ({"seeds": [[0]]}, "seeds: [[0]]; whole numbers from 0 on are needed"),
        ({"seeds": [True]}, "seeds: [True]; whole numbers"),
        ({"fixed": "task=pnn"}, "fixed: a list of key=value is needed, not 'task=pnn'"),
        ({"metric": ["eval/acc"]}, "metric: ['eval/acc']; text is needed"),
        ({"metric": None, "metrics": ["eval/acc"]}, "metrics: ['eval/acc']; a mapping is needed"),
        ({"metric": None, "metrics": {"eval/acc": 3}}, "metrics: 3; text is needed"),
        ({"digits": "two"}, "digits: two; a whole number is needed"),
        ({"digits": True}, "digits: True; a whole number is needed"),
        ({"notes": "a remark"}, "notes: a remark; a list is needed"),
        ({"notes": [3]}, "notes: 3; text is needed"),
        ({"comparable": "no"}, "comparable: no; true or false is needed"),
        ({"tuning": ["rho"]}, "tuning: ['rho']; a mapping is needed"),
        (
            {"cells": {"a": {"overrides": [], "paper": None, "label": 3}}},
            "cell a: label: 3; text is needed",
        ),
        ({"cells": {"a": {"best_of": ["b"], "paper": None}}}, "best_of: ['b']; text is needed"),
        (
            {"cells": {"a": {"overrides": [], "paper": {"mean": "87,8"}}}},
            "cell a, paper: mean: 87,8; a number is needed",
        ),
        (
            {"cells": {"a": {"overrides": [], "grid": {"task.data": ["/x/y"]}, "paper": None}}},
            "cell a: grid: task.data=/x/y: letters, digits",
        ),
        (
            {"cells": {"a": {"overrides": [], "grid": {"task.epochs": []}, "paper": None}}},
            "cell a: grid: key: [value, ...] is needed",
        ),
    ],
)
def test_errors_in_experiment_files_name_the_place(tmp_path, changes, complaint):
    with pytest.raises(SpecError, match=r"mini\.yaml") as error:
        write_table(tmp_path, **changes)
    assert complaint in str(error.value)


def test_a_file_elsewhere_is_told_to_scripts_as_a_file(table):
    assert "Made by `python scripts/table.py mini.yaml` from mini.csv" in to_markdown(table, [])
    for name in ("pnn", os.path.relpath(EXPERIMENTS / "pnn.yaml")):
        assert "Made by `python scripts/table.py pnn` from" in to_markdown(load_table(name), [])


def test_nothing_on_a_grid_is_null_as_hydra_writes_it(tmp_path):
    cells = {"a": {"overrides": [], "grid": {"regularizer.components": [None, 3]}, "paper": None}}
    runs = expand(write_table(tmp_path, cells=cells, tuning=None), seeds=[0])
    assert [run.overrides[-2] for run in runs] == [
        "regularizer.components=null",
        "regularizer.components=3",
    ]


def test_a_missing_key_and_a_cell_given_twice_are_errors(tmp_path):
    path = tmp_path / "t.yaml"
    text = yaml.safe_dump(SPEC, sort_keys=False)
    path.write_text(text.replace("title: A table\n", ""))
    with pytest.raises(SpecError, match="the key 'title' is missing"):
        load_table(str(path))
    path.write_text(text.replace("  ed:\n", "  baseline:\n"))
    with pytest.raises(SpecError, match=r"line 1[0-9]: 'baseline' stands there twice"):
        load_table(str(path))


def test_unknown_names_list_the_nearest(table):
    with pytest.raises(SpecError, match="did you mean baseline"):
        expand(table, cells=["basline"])
    with pytest.raises(SpecError, match="did you mean mini"):
        load_table("minni", table.path.parent)
    with pytest.raises(SpecError, match="has seeds 0, 1"):
        expand(table, seeds=[7])
    with pytest.raises(SpecError, match="key=value"):
        expand(table, sets=["task.epochs"])
    for text in ("seed=1", "system.run_dir=/else"):
        with pytest.raises(SpecError, match=f"--set {text}: the table decides this"):
            expand(table, sets=[text])
    with pytest.raises(SpecError, match="given twice"):
        expand(table, sets=["task.epochs=1", "task.epochs=2"])


def test_a_grid_is_decided_by_the_metric_of_its_cell(tmp_path):
    """Accuracy is the table's first metric; the cell is judged by Matthews, so this decides."""
    table = write_table(
        tmp_path,
        metric=None,
        cells={"sam": {"best_of": "rho", "paper": {"eval/matthews": {"mean": None}}}},
        metrics={"eval/acc": "accuracy", "eval/matthews": "Matthews", "best/matthews": "best"},
    )
    runs = expand(table, root=tmp_path)
    for run, accuracy, matthews in zip(runs, (90, 90, 70, 70), (10, 10, 30, 34), strict=True):
        fabricate(run, accuracy)
        done = {"last": {"eval/acc": accuracy, "eval/matthews": matthews}, "steps": 1, "seconds": 1}
        done["best"] = {"eval/matthews": matthews + 5}
        (run.folder / "DONE").write_text(json.dumps(done))
    rows = merge(collect(table, [tmp_path]))
    (line,) = table_lines(table, rows)
    assert (line.metric, line.ours.mean) == ("eval/matthews", 32)
    assert line.remarks == ["rho-0.5: the best of 2 of 2 grid points"]
    assert [(line.metric, line.ours.mean) for line in grid_lines(table, rows)] == [
        ("eval/matthews", 10),
        ("eval/matthews", 32),
    ]
    assert rows[0].last["best/matthews"] == 15
    assert "and beside it the best evaluation" in to_markdown(table, rows)


# --- run folders


def test_rows_tell_done_partial_failed_and_pending_runs_apart(table, tmp_path):
    runs = expand(table, root=tmp_path)
    fabricate(runs[0])
    (runs[0].folder / "FAILED").write_text("exit 1: error: before that\n")  # finished by hand
    tail = '{"step": 12, "eval/acc": NaN}\n{"step": 15, "eval/a'  # cut short by a kill
    fabricate(runs[1], done=False, tail=tail)
    fabricate(runs[2], done=False)
    (runs[2].folder / "FAILED").write_text("exit 1: error: too bad\n")
    done, partial, failed, pending, *_ = (collect_run(run, table) for run in runs)
    assert (done.status, done.last, done.best) == ("done", {"eval/acc": 80.0}, 81.0)
    assert (done.steps, done.seconds, done.device, done.torch) == (20, 3.5, "cpu", "2.0")
    assert (done.commit, done.dirty) == ("abcdef0123", False)
    session = {"device": "cpu", "commit": "abcdef0123", "dirty": None}  # a copy without history
    (runs[0].folder / "meta.json").write_text(json.dumps({"sessions": [session]}))
    copied = collect_run(runs[0], table)
    assert (copied.dirty, copied.total_steps) == (None, 20)  # as many as its summary says
    assert copied.torch == ""
    (runs[0].folder / "meta.json").unlink()
    assert collect_run(runs[0], table).dirty is None  # nobody knows
    assert (partial.status, partial.steps, partial.total_steps) == ("partial", 12, 20)
    assert partial.last == {"eval/acc": 80.0}  # a results file could not be read with a nan in it
    assert (failed.status, failed.error) == ("failed", "exit 1: error: too bad")
    assert pending.status == "pending"


def test_a_run_that_went_on_elsewhere_names_every_place_and_its_latest_length(table, tmp_path):
    run = expand(table, root=tmp_path)[0]
    fabricate(run, done=False)
    first = {"device": "cpu", "commit": "a", "dirty": True, "steps": 15, "versions": {"torch": "2"}}
    second = first | {"device": "gpu", "commit": "b", "dirty": False, "steps": 20}
    (run.folder / "meta.json").write_text(json.dumps({"sessions": [first, second, second]}))
    row = collect_run(run, table)
    assert (row.device, row.torch, row.commit) == ("cpu + gpu", "2", "a + b")
    assert (row.dirty, row.total_steps) == (True, 20)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("hello", "line 2 is not JSON"),
        ("[1]", "line 2 is not a row of metrics"),
        ('{"loss": 1}', "line 2 is not a row of metrics"),
        ('{"step": 9, "loss": "low"}', "line 2 is not a row of metrics"),
        ('{"step": 2}', "line 2: step 2 after step 5"),
    ],
)
def test_a_foreign_line_is_an_error_with_file_and_line(tmp_path, line, complaint):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 5}}\n{line}\n{{"step": 10}}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl") as error:
        read_metrics(path)
    assert complaint in str(error.value)


def test_only_a_last_line_without_its_end_counts_as_cut_short(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 5}\n{"step": 1')
    assert read_metrics(path) == [{"step": 5}]
    path.write_text('{"step": 5}\n{"step": 5}')  # all of it but the end of the line
    assert read_metrics(path) == [{"step": 5}, {"step": 5}]
    path.write_text('{"step": 5}\n{"step": 1\n')
    with pytest.raises(ValueError, match="line 2"):
        read_metrics(path)


def test_a_folder_with_another_run_is_refused(table, tmp_path):
    run = expand(table, cells=["ed"], root=tmp_path)[0]
    fabricate(run)
    config = yaml.safe_load((run.folder / "config.yaml").read_text())
    (run.folder / "config.yaml").write_text(yaml.safe_dump(config | {"seed": 5}))
    with pytest.raises(CollectError, match="has seed=5, but the table says 0: it is another run"):
        collect_run(run, table)
    config["task"]["epochs"] = 20
    (run.folder / "config.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(CollectError, match=r"task\.epochs=20, but the table says 300") as error:
        collect_run(run, table)
    assert str(error.value).endswith(f"; move {run.folder} away and launch again")
    del config["task"]
    (run.folder / "config.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(CollectError, match=r"has no task\.epochs, but the table says 300.*; move "):
        collect_run(run, table)


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("config.yaml", "seed: [", "is not YAML (while parsing"),
        ("DONE", "", "is not JSON ("),
        ("DONE", "[]", "does not hold a dict"),
        ("DONE", '{"last": {}, "best": {}}', "is not the summary of a run ('steps' is missing)"),
        ("meta.json", "[]", "does not hold a dict"),
    ],
)
def test_a_damaged_file_of_a_run_is_named_in_one_line(table, tmp_path, name, text, complaint):
    run = expand(table, root=tmp_path)[0]
    fabricate(run)
    (run.folder / name).write_text(text)
    with pytest.raises(CollectError) as error:
        collect_run(run, table)
    assert str(error.value).startswith(f"{run.folder / name} {complaint}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("last", "complaint"),
    [
        ({"eval/acc": math.nan}, "DONE: eval/acc is nan; move the folder away"),
        ({"eval/loss": 1.0}, "has none of the table's metrics eval/acc, only eval/loss"),
    ],
)
def test_a_summary_without_the_tables_numbers_is_refused(table, tmp_path, last, complaint):
    run = expand(table, cells=["ed"], root=tmp_path)[0]
    fabricate(run)
    summary = json.loads((run.folder / "DONE").read_text())
    (run.folder / "DONE").write_text(json.dumps(summary | {"last": last}))
    with pytest.raises(CollectError, match=complaint):
        collect_run(run, table)


def test_two_runs_claiming_the_same_cell_are_an_error_that_names_both(table, tmp_path):
    for root, accuracy in (("a", 80.0), ("b", 81.0)):
        fabricate(expand(table, root=tmp_path / root)[0], accuracy)
    with pytest.raises(CollectError, match="two runs claiming the same cell") as error:
        merge(collect(table, [tmp_path / "a", tmp_path / "b"]))
    assert all(str(tmp_path / root / "mini/baseline/seed0") in str(error.value) for root in "ab")


def test_merging_prefers_done_then_the_later_source():
    def row(status, steps=None, **more):
        return Row("t", "c", 0, status=status, steps=steps, **more)

    assert merge([row("partial", 5), row("done", 9)]) == [row("done", 9)]
    assert merge([row("done", 9), row("failed", 3)]) == [row("done", 9)]
    assert merge([row("partial", 5), row("partial", 7), row("pending")]) == [row("partial", 7)]
    assert merge([row("done", 9, device="a"), row("done", 9)]) == [row("done", 9, device="a")]
    for ours, theirs in ({"steps": 9}, {"steps": 8}), ({"best": 1.0}, {"best": 2.0}):
        with pytest.raises(CollectError):
            merge([row("done", **ours), row("done", **theirs)])


# --- statistics


def test_mean_and_std_agree_with_numpy():
    values = list(np.random.default_rng(0).normal(87, 1.2, size=9))
    ours = summarise(values)
    assert ours.count == 9
    assert ours.mean == pytest.approx(np.mean(values), rel=1e-14)
    assert ours.std == pytest.approx(np.std(values, ddof=1), rel=1e-13)
    assert summarise([3.0]) == Ours(3.0, None, 1)
    assert summarise([]) == Ours(None, None, 0)


def test_verdict_uses_two_standard_errors_and_judges_nothing_without_the_papers_std():
    both = tolerance(Ours(0.0, 3.0, 9), Paper(0.0, 2.0), 4)
    assert both == pytest.approx(2 * np.sqrt(9 / 9 + 4 / 4))
    assert tolerance(Ours(0.0, None, 1), Paper(0.0, 2.0), 4) == 4.0
    done = {"paper_count": 4, "done": 9, "planned": 9}
    assert verdict(Ours(10.0, 3.0, 9), Paper(10.0 + both * 0.999, 2.0), **done) == "match"
    assert verdict(Ours(10.0, 3.0, 9), Paper(10.0 - both * 1.001, 2.0), **done) == "differs"
    assert verdict(Ours(10.3, 0.001, 3), Paper(10.0), **done) == "no std: +3 %"
    assert verdict(Ours(-12.0, None, 1), Paper(-10.0), **done) == "no std: -20 %"
    assert verdict(Ours(9.96, None, 1), Paper(10.0), **done) == "no std: -0.4 %"
    assert verdict(Ours(0.5, None, 1), Paper(0.0), **done) == "no std"
    assert verdict(Ours(1.0, None, 1), Paper(), **done) == "not in paper"
    assert verdict(Ours(9.0, 1.0, 2), Paper(9.0), **done, comparable=False) == "reference only"
    assert verdict(Ours(9.0, 1.0, 2), Paper(9.0), **done | {"done": 2}) == "pending 2 of 9"


# --- rendering


def full_rows(table: Table) -> list[Row]:
    values = {
        "baseline": (79.5, 80.1),
        "ed": (85.0, 85.1),
        "rho-0.1": (1.0, 3.0),
        "rho-0.5": (5, 7),
    }
    return [
        Row("mini", cell, seed, status="done", last={"eval/acc": value}, steps=1, seconds=1800.0)
        for cell, pair in values.items()
        for seed, value in enumerate(pair)
    ]


def test_markdown_shows_both_numbers_difference_verdict_and_footnotes(table):
    text = to_markdown(table, full_rows(table))
    assert r"| baseline | 80.00 ± 1.00 | 79.80 ± 0.42 (2) | -0.20 | match | [^1] |" in text
    assert r"| ed | 90.00 | 85.05 ± 0.07 (2) | -4.95 | no std: -6 % |  |" in text
    assert "| sam | - | 6.00 ± 1.41 (2) |  | not in paper | [^2] |" in text
    assert "[^1]: a | note\n[^2]: rho-0.5: the best of 2 of 2 grid points" in text
    assert "8 runs are done, 4.00 hours in all" in text
    latex = to_latex(table, full_rows(table))
    assert r"baseline & $80.00 \pm 1.00$ & $79.80 \pm 0.42$ & 2 & match \\" in latex
    assert r"& 2 & no std: -6 \% \\" in latex  # a bare % would swallow the end of the line


def test_numbers_have_the_decimals_that_their_file_asks_for(tmp_path):
    table = write_table(tmp_path, digits=1)
    text = to_markdown(table, full_rows(table))
    assert "| baseline | 80.0 ± 1.0 | 79.8 ± 0.4 (2) | -0.2 |" in text


def test_several_metrics_begin_with_a_table_of_cells_by_metrics(tmp_path):
    cells = {
        "plain": {
            "overrides": [],
            "paper": {"eval/acc": {"mean": 80.0}, "eval/ood": {"mean": None}},
        },
        "ed": {"overrides": ["regularizer=ed"], "paper": None},
        "sam": {"overrides": ["regularizer=sam"], "paper": {"mean": 70.0}},  # of the first metric
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
    assert "Number by number" not in to_markdown(table, [])  # nothing to look at yet


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
        (84.74, 1.4e-14, "84.74 ± 0.00"),  # three equal numbers, whose mean is one bit off
        (3.04e-8, 1.2e-8, "3.0e-08 ± 1.2e-08"),
        (math.nan, math.nan, "nan ± nan"),
    ],
)
def test_small_numbers_keep_their_digits_and_others_are_as_ever(mean, std, shown):
    assert mean_and_std(mean, std, 2) == shown


def test_a_difference_has_the_decimals_that_the_paper_prints():
    assert signed(-3.061, Paper(87.8), 2) == "-3.06"
    assert signed(0.0021, Paper(0.012), 2) == "+0.002"
    assert signed(-0.0021, Paper(1.34), 2) == "+0.00"


def test_latex_writes_powers_of_ten(table):
    rows = [replace(r, last={"eval/acc": 1e-10 * r.last["eval/acc"]}) for r in full_rows(table)]
    assert r"$8.0 \cdot 10^{-9} \pm 4.2 \cdot 10^{-11}$" in to_latex(table, rows)


def test_a_grid_is_pending_until_all_its_points_are_done(table):
    *rows, last = full_rows(table)
    for under_way in ([], [replace(last, status="partial")]):  # whatever that has shown so far
        line = table_lines(table, [*rows, *under_way])[-1]
        assert line.verdict == "pending 3 of 4"
        assert line.ours.mean == 2.0
        assert line.remarks == ["rho-0.1: the best of 1 of 2 grid points"]


def test_a_grid_does_not_wait_for_what_diverged(table, tmp_path):
    *rows, last = full_rows(table)
    with pytest.raises(FloatingPointError) as error:
        check_finite({"train/loss": math.nan}, 0, 1, tmp_path)
    failed = replace(last, status="failed", last={}, error=f"exit 1: error: {error.value}")
    line = table_lines(table, [*rows, failed])[-1]
    assert not line.verdict.startswith("pending")
    assert line.ours.mean == 2.0
    assert line.remarks == ["rho-0.1: the best of 1 of 2 grid points (rho-0.5 diverged)"]
    accident = replace(failed, error="exit 1: error: no such folder")
    assert table_lines(table, [*rows, accident])[-1].verdict == "pending 3 of 4"
    nothing = [replace(failed, cell=row.cell, seed=row.seed) for row in full_rows(table)[4:]]
    assert table_lines(table, nothing)[-1].verdict == "pending 0 of 4"


def test_reduced_runs_are_shown_apart_and_never_judged(table):
    rows = [Row(**vars(r) | {"deviations": "task.epochs=2"}) for r in full_rows(table)]
    text = to_markdown(table, rows)
    assert "| baseline | 80.00 ± 1.00 | - |  | pending 0 of 2 | [^1] |" in text
    reduced = text.split("## Reduced: task.epochs=2")[1]
    assert (
        "| baseline | 80.00 ± 1.00 | 79.80 ± 0.42 (2) | -0.20 | reference only | [^1] |" in reduced
    )


def test_a_table_of_other_settings_is_never_judged(tmp_path):
    table = write_table(tmp_path, comparable=False)
    judged = {line.label: line.verdict for line in table_lines(table, full_rows(table))}
    assert judged == {"baseline": "reference only", "ed": "reference only", "sam": "not in paper"}


def test_the_same_rows_in_any_order_give_the_same_text(table):
    rows = full_rows(table)
    assert to_csv(table, rows) == to_csv(table, rows[::-1])
    assert to_markdown(table, rows) == to_markdown(table, rows[::-1])


# --- scripts/table.py


def test_results_come_from_folders_and_from_committed_lines(table, tmp_path, capsys):
    runs, results = expand(table, root=tmp_path / "runs"), tmp_path / "results"
    fabricate(runs[0], 79.0)
    here = [str(table.path), "--runs", str(tmp_path / "runs")]
    assert main(here) == 0
    assert main([*here, "--check"]) == 0
    # the folder is gone, another run has come: both stay in the table
    (tmp_path / "runs").rename(tmp_path / "elsewhere")
    fabricate(runs[1], 81.0)
    assert main(here) == 0
    assert main([*here, "--check"]) == 0
    text = (results / "mini.md").read_text()
    assert "80.00 ± 1.41 (2)" in text
    before = (results / "mini.csv").read_bytes(), text
    assert main([*here, str(tmp_path / "elsewhere")]) == 0
    assert before == ((results / "mini.csv").read_bytes(), (results / "mini.md").read_text())
    # the same cell with other numbers: refused, nothing written
    fabricate(runs[0], 70.0)
    assert main(here) == 1
    assert "two runs claiming the same cell mini/baseline/seed0" in capsys.readouterr().err
    assert before == ((results / "mini.csv").read_bytes(), (results / "mini.md").read_text())


def test_reduced_runs_are_found_by_what_the_launcher_noted(table, tmp_path, capsys):
    run = expand(table, sets=["task.epochs=2"], root=tmp_path / "runs")[0]
    fabricate(run, 60.0)
    (run.folder.parents[1] / "deviations.json").write_text('["task.epochs=2"]')
    assert main([str(table.path), "--runs", str(tmp_path / "runs")]) == 0
    assert "mini.md: 1 of 9 runs done" in capsys.readouterr().out  # 8, and the one that was begun
    text = (tmp_path / "results" / "mini.md").read_text()
    assert "## Reduced: task.epochs=2" in text
    assert "60.00 (1)" in text
    assert "| ed |" not in text.split("## Reduced")[1]  # only what was begun


def test_rows_of_another_tables_file_are_shown_with_the_metrics_of_this_one(tmp_path):
    """Its own seeds alone, none that were reduced, and no best of what another table looks at."""
    metrics = {"eval/acc": "accuracy", "eval/loss": "loss"}
    home = write_table(tmp_path, metric=None, metrics=metrics)
    rows = [
        replace(row, last=row.last | {"eval/loss": 0.5}, best=99.0)
        for row in full_rows(home)
        if row.cell in ("baseline", "ed")
    ]
    rows += [replace(row, deviations="task.epochs=2") for row in rows]
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "mini.csv").write_text(to_csv(home, rows))
    shown = {"cells": {"same": {"same_as": "mini/ed", "paper": None}}, "tuning": None, "seeds": [1]}
    (row,) = committed(write_table(tmp_path, "one", **shown))
    assert (row.home, row.seed, row.deviations) == (("mini", "ed"), 1, "")
    assert (row.last, row.best) == ({"eval/acc": 85.1}, 99.0)
    (row,) = committed(write_table(tmp_path, "two", **shown, metric="eval/loss"))
    assert (row.last, row.best) == ({"eval/loss": 0.5}, None)


def test_a_results_file_holds_all_that_is_known_of_a_run(table, tmp_path):
    about = {"device": "cpu", "torch": "2.0", "commit": "abc"}
    score = {"last": {"eval/acc": 79.5}, "best": 80.25, "seconds": 3.5}
    rows = [
        Row("mini", "baseline", 0, "", "done", 20, 20, **score, **about, dirty=False),
        Row("mini", "baseline", 1, "", "failed", 5, 20, **about, dirty=True, error="exit 1: a, b"),
        Row("mini", "ed", 0, "task.epochs=2", "partial", 5),
    ]
    (tmp_path / "mini.csv").write_text(to_csv(table, rows))
    assert read_results(tmp_path / "mini.csv", table) == rows


def test_lines_of_another_file_are_added(table, tmp_path):
    fabricate(expand(table, root=tmp_path / "far")[0], 79.0)
    main([str(table.path), "--runs", str(tmp_path / "far")])
    far = tmp_path / "far.csv"
    (tmp_path / "results" / "mini.csv").rename(far)
    assert main([str(table.path), "--runs", str(tmp_path / "none"), "--add", str(far)]) == 0
    assert (tmp_path / "results" / "mini.csv").read_text() == far.read_text()


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda text: text[:-4], "line 2"),
        (lambda text: text[:-1], "line 2: cut short"),
        (lambda text: text + "hello\n", "line 3: 1 fields"),
        (lambda text: text.replace("mini,baseline", "mini,foreign"), "no cell mini/foreign"),
        (
            lambda text: text.replace("mini,baseline,0", "mini,baseline,7"),
            "2: table mini has no seed 7",
        ),
        (lambda text: text.replace(",79.0,", ",high,"), "line 2: could not convert"),
        (lambda text: text.replace(",79.0,", ",nan,"), "line 2: nan is not a finite number"),
        (lambda text: text.replace("done", "great"), "line 2: status 'great'"),
        (lambda text: text.replace(",no,", ",maybe,"), "line 2: status 'done', dirty 'maybe' make"),
        (lambda text: "a" + text, "line 1: not the header of table mini (atable, table); needed"),
        (
            lambda text: text.replace("table,cell", "cell,table", 1),
            "line 1: not the header of table mini (cell, table, seed",
        ),
        (lambda text: text + text.splitlines()[1].replace("79.0", "12.0") + "\n", "two runs"),
    ],
)
def test_a_damaged_results_file_is_an_error_and_stays(table, tmp_path, damage, complaint, capsys):
    fabricate(expand(table, root=tmp_path / "runs")[0], 79.0)
    here = [str(table.path), "--runs", str(tmp_path / "runs")]
    main(here)
    path = tmp_path / "results" / "mini.csv"
    path.write_text(damage(path.read_text()))
    before = path.read_bytes()
    assert main(here) == 1
    assert main([*here, "--check"]) == 1
    errors = capsys.readouterr().err
    assert complaint in errors
    assert "mini.csv" in errors
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["tabel1"], "unknown table 'tabel1'; did you mean table1"),
        (["table1", "--add", "nowhere.csv"], "--add nowhere.csv: no such file"),
    ],
)
def test_mistakes_of_the_command_are_one_line(arguments, complaint, capsys):
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert complaint in error


def test_check_notices_an_edited_table(table, tmp_path, capsys):
    fabricate(expand(table, root=tmp_path / "runs")[0], 79.0)
    main([str(table.path), "--runs", str(tmp_path / "runs")])
    path = tmp_path / "results" / "mini.md"
    whole = path.read_text()
    path.write_text(whole.replace("79.00", "89.00"))
    assert main([str(table.path), "--check"]) == 1
    assert "run python scripts/table.py" in capsys.readouterr().err
    path.unlink()
    assert main([str(table.path), "--check"]) == 1
    path.write_text(whole)
    assert main([str(table.path), "--check"]) == 0
    lines = path.with_suffix(".csv").read_text().splitlines(keepends=True)
    path.with_suffix(".csv").write_text("".join([*lines, lines[-1]]))  # the same run once more
    assert main([str(table.path), "--check"]) == 1


def test_committed_tables_equal_regenerated_ones():
    assert main(["all", "--check"]) == 0


# --- figures


FIGURE = """
from matplotlib.figure import Figure

def draw(table, rows):
    global latest
    if len(rows) < 2:
        return None
    figure = latest = Figure(figsize=(2, 1))
    axis = figure.add_subplot()
    for row in rows:
        history = [(h["step"], h["eval/acc"]) for h in row.history() if "eval/acc" in h]
        axis.plot(*zip(*history), "o", label=f"{row.cell} {row.seed}")
    axis.legend()
    return figure
"""


@pytest.fixture
def drawn(tmp_path, monkeypatch) -> Table:
    (tmp_path / "little_figure.py").write_text(FIGURE)
    monkeypatch.syspath_prepend(tmp_path)
    return write_table(tmp_path, figure="little_figure:draw")


def test_a_figure_is_drawn_once_runs_are_done_the_same_every_time(drawn, tmp_path):
    results = tmp_path / "results"
    runs = expand(drawn, root=tmp_path / "runs")
    here = [str(drawn.path), "--runs", str(tmp_path / "runs")]
    fabricate(runs[0])
    fabricate(runs[1], done=False)
    assert main(here) == 0
    assert not (results / "mini.png").exists()  # one finished run is too few for this figure
    assert "(mini.png)" not in (results / "mini.md").read_text()
    fabricate(runs[1])
    assert main(here) == 0
    assert f"\n\n![{drawn.title}](mini.png)\n\n" in (results / "mini.md").read_text()
    assert main([*here, "--check"]) == 0
    first = [(results / f"mini.{kind}").read_bytes() for kind in ("png", "pdf")]
    assert [content[:4] for content in first] == [b"\x89PNG", b"%PDF"]
    assert not any(word in first[1] for word in (b"CreationDate", b"Producer"))
    # the folders are gone, their records are committed: the same files
    (results / "runs").mkdir()
    (tmp_path / "runs" / "mini").rename(results / "runs" / "mini")
    for kind in ("png", "pdf"):
        (results / f"mini.{kind}").unlink()
    assert main(here) == 0
    assert first == [(results / f"mini.{kind}").read_bytes() for kind in ("png", "pdf")]


def test_a_figure_is_not_replaced_by_one_of_fewer_runs_unless_asked(drawn, tmp_path, capsys):
    """The CSV file knows four runs; the folder of one of them is on another machine."""
    import little_figure

    picture = tmp_path / "results" / "mini.png"
    here = [str(drawn.path), "--runs", str(tmp_path / "runs")]
    for run in expand(drawn, cells=["baseline", "ed"], root=tmp_path / "runs"):
        fabricate(run)
    assert main(here) == 0
    before = picture.read_bytes()
    run.folder.rename(tmp_path / "elsewhere")
    capsys.readouterr()
    assert main(here) == 0
    complaint = capsys.readouterr().err
    assert "no figure of mini is drawn: of 4 finished runs 3 have their folders here" in complaint
    assert f"(mini/ed/seed{run.seed} has not)" in complaint
    assert picture.read_bytes() == before
    assert main([*here, "--available"]) == 0
    assert capsys.readouterr().err == ""
    assert little_figure.latest.get_suptitle() == "3 of 4 finished runs"
    assert picture.read_bytes() != before
    (tmp_path / "elsewhere").rename(run.folder)
    assert main(here) == 0
    assert little_figure.latest.get_suptitle() == ""
    assert picture.read_bytes() == before


def test_runs_under_way_are_drawn_when_asked_where_none_is_done(drawn, tmp_path):
    """A mean over a finished run and one that has just begun would end with the latter."""
    import little_figure

    picture = tmp_path / "results" / "mini.png"
    here = [str(drawn.path), "--runs", str(tmp_path / "runs")]
    for run in expand(drawn, cells=["baseline", "ed"], root=tmp_path / "runs"):
        fabricate(run, done=False)
    assert main(here) == 0
    assert not picture.exists()
    assert main([*here, "--available"]) == 0
    assert little_figure.latest.get_suptitle() == "4 of these 4 runs are not finished"
    fabricate(run)  # one seed of ed
    assert main([*here, "--available"]) == 0
    assert little_figure.latest.get_suptitle() == "2 of these 3 runs are not finished"
    (legend,) = [axis.get_legend() for axis in little_figure.latest.axes]
    names = [text.get_text() for text in legend.get_texts()]
    assert names == ["baseline 0", "baseline 1", f"ed {run.seed}"]


def test_reduced_runs_are_drawn_apart(drawn, tmp_path):
    sets = ["optimizer.clip=1.5", "task.epochs=2"]
    for run in expand(drawn, sets=sets, cells=["ed"], root=tmp_path / "runs"):
        fabricate(run)
    (run.folder.parents[1] / "deviations.json").write_text(json.dumps(sets))
    here = [str(drawn.path), "--runs", str(tmp_path / "runs")]
    assert main(here) == 0
    (picture,) = (tmp_path / "results").glob("*.png")
    assert picture.stem == run.folder.parents[1].name
    assert picture.stem.startswith("mini@clip1.5-epochs2-")
    markdown = tmp_path / "results" / "mini.md"
    assert re.findall(r"!\[.*\]\((.*)\)", markdown.read_text()) == [picture.name]
    assert main([*here, "--check"]) == 0
    for run in expand(drawn, cells=["ed"], root=tmp_path / "runs"):
        fabricate(run)
    assert main(here) == 0
    shown = re.findall(r"!\[.*\]\((.*)\)", markdown.read_text())
    assert shown == ["mini.png", picture.name]


@pytest.mark.parametrize("name", ["nothing", "no.such.module:draw", "little_figure:paint"])
def test_a_figure_that_cannot_be_found_is_one_line(drawn, tmp_path, name, capsys):
    for run in expand(drawn, cells=["ed"], root=tmp_path / "runs"):
        fabricate(run)
    text = drawn.path.read_text().replace("little_figure:draw", name)
    drawn.path.write_text(text)
    assert main([str(drawn.path), "--runs", str(tmp_path / "runs")]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"figure: {name}" in error
