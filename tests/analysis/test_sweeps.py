"""scripts/runs.py: settings that differ within a sweep, and results aggregated over seeds."""

import csv
import io
import shutil
from pathlib import Path

import pytest
import yaml

from ed.runtime.runs import write_done
from scripts.runs import main

ED = {"_target_": "ed.regularizers.ed.EDRegularizer", "weight": 7.0, "degree": 3}
ED |= {"sampler": {"_target_": "ed.core.nodes.RandomizedCosine"}}
NONE = {"_target_": "ed.regularizers.base.Regularizer"}


def write_run(folder: Path, seed: int, regularizer: dict, last: dict | None, **system) -> None:
    config = {"seed": seed, "regularizer": regularizer, "system": system}
    config |= {"task": {"_target_": "a.Task", "epochs": 2}}
    config |= {"sampler": regularizer.get("sampler", {"_target_": "b.Cosine"})}
    config |= {"logger": {"group": str(folder)}, "measures": {"ed": {"pairs": seed}}}
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    if last is not None:
        write_done(folder, {"last": last, "best": {}, "steps": 5, "seconds": 1.0})


@pytest.fixture
def runs(tmp_path) -> Path:
    for seed, accuracy in enumerate((80.0, 82.0, 84.0)):
        write_run(tmp_path / f"none/seed{seed}", seed, NONE, {"eval/acc": accuracy}, device=seed)
    values = {"eval/acc": 85.123456, "measure/ed": 0.25, "measure/ed_se": 0.01}
    write_run(tmp_path / "ed/seed0", 0, ED, values)
    write_run(tmp_path / "ed/seed1", 1, ED, None)
    write_run(tmp_path / "strong/seed0", 0, ED | {"weight": 9.0}, {"eval/acc": 86.0})
    return tmp_path


def test_each_line_shows_the_settings_that_differ(runs, capsys):
    """Seeds, devices and settings that do not vary are not listed."""
    assert main([str(runs)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == [
        "regularizer",
        "regularizer.weight",
        "runs",
        "eval/acc",
        "measure/ed",
    ]
    assert [line.split() for line in lines[1:]] == [
        ["ed", "7.0", "1", "of", "2", "85.12", "0.25"],
        ["none", "3", "82", "±", "2"],
        ["ed", "9.0", "1", "86"],
    ]
    assert lines[2].index("82") == lines[0].index("eval/acc")


def test_runs_with_different_measure_settings_are_not_averaged(runs, capsys):
    for seed, accuracy in enumerate((80.0, 81.0)):  # write_run varies the measure's pairs by seed
        last = {"eval/acc": accuracy, "measure/ed": 0.2}
        write_run(runs / f"more/seed{seed}", seed, ED | {"weight": 5.0}, last)
    assert main([str(runs / "more")]) == 0
    line = capsys.readouterr().out.splitlines()[1]
    assert line.split() == ["2", "80.5", "±", "0.71", "measured", "differently"]


def test_the_default_is_the_working_folder(runs, tmp_path, capsys, monkeypatch):
    """Lists the runs in runs/adhoc, where train.py writes them."""
    (tmp_path / "runs").mkdir()
    (runs / "none").rename(tmp_path / "runs/adhoc")
    monkeypatch.chdir(tmp_path)
    assert main([]) == 0
    assert capsys.readouterr().out.splitlines() == ["runs  eval/acc", "3     82 ± 2"]


def test_a_sampler_is_listed_under_its_regularizer(tmp_path, capsys):
    for name in ("RandomizedCosine", "ChebyshevNodes"):
        sampler = {"sampler": {"_target_": f"ed.core.nodes.{name}"}}
        write_run(tmp_path / name, 0, ED | sampler, {"eval/acc": 80.0})
    assert main([str(tmp_path)]) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split() == ["regularizer.sampler", "runs", "eval/acc"]
    assert [line.split()[0] for line in lines] == ["chebyshev", "cosine"]


def counts(capsys, *folders: Path) -> list[str]:
    """Returns the "runs" column of the printed table."""
    assert main([*map(str, folders), "--metrics", "eval/acc"]) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    start, end = header.index("runs"), header.index("eval/acc")
    return [line[start:end].strip() for line in lines]


def test_a_run_reached_by_several_paths_counts_once(runs, capsys, monkeypatch):
    (runs / "ed/back").symlink_to(runs)  # creates a cycle
    monkeypatch.chdir(runs)
    assert counts(capsys, runs) == ["1 of 2", "3", "1"]
    same = [runs / "none/seed0", runs, Path("none"), runs / "ed/../none"]
    assert sorted(counts(capsys, *same)) == ["1", "1 of 2", "3"]


def test_runs_behind_symbolic_links_are_found(runs, tmp_path_factory, capsys):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (runs / "none").rename(elsewhere / "none")
    (runs / "ed/seed0").rename(elsewhere / "seed0")
    (runs / "none").symlink_to(elsewhere / "none")
    (runs / "ed/seed0").symlink_to(elsewhere / "seed0")
    assert counts(capsys, runs) == ["1 of 2", "3", "1"]


def test_a_wandb_config_is_not_a_run(runs, capsys):
    own = runs / "ed/seed0/wandb/offline-run-1/files"
    own.mkdir(parents=True)
    (own / "config.yaml").write_text("wandb_version: 1\n")
    (runs / "none").rename(runs / "wandb")  # a run folder may also be called wandb
    assert sorted(counts(capsys, runs)) == ["1", "1 of 2", "3"]


def test_a_seed_that_occurs_twice_is_reported(runs, capsys):
    shutil.copytree(runs / "none/seed1", runs / "none/seed1_backup")
    shutil.copytree(runs / "ed", runs / "ed_backup")
    shutil.copytree(runs / "ed/seed0", runs / "old")
    assert counts(capsys, runs) == [
        "3 of 5 (seed 0 3 times, seed 1 twice)",
        "4 (seed 1 twice)",
        "1",
    ]


def test_csv_lists_finished_runs_with_full_precision(runs, capsys):
    assert main([str(runs), "--csv", "--metrics", "eval/acc"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [(row["seed"], row["eval/acc"]) for row in rows] == [
        ("0", "85.123456"), ("0", "80.0"), ("1", "82.0"), ("2", "84.0"), ("0", "86.0"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["RUNS/nowhere"], "RUNS/nowhere"),
        (["RUNS", "--metrics", "eval/ac"], "--metrics eval/ac"),
    ],
)
def test_errors_name_the_invalid_argument(runs, capsys, arguments, message):
    assert main([word.replace("RUNS", str(runs)) for word in arguments]) == 1
    assert message.replace("RUNS", str(runs)) in capsys.readouterr().err


def test_runs_without_a_finished_one_are_counted(tmp_path, capsys):
    write_run(tmp_path / "seed0", 0, ED, None)
    assert main([str(tmp_path), "--metrics", "eval/acc"]) == 0
    assert capsys.readouterr().out.splitlines() == ["runs    eval/acc", "0 of 1"]


def test_a_damaged_record_is_reported(runs, capsys):
    (runs / "ed" / "seed0" / "DONE").write_text("{")
    assert main([str(runs)]) == 1
    assert "seed0/DONE" in capsys.readouterr().err


DAMAGED_CONFIGS = ["seed: [", "", "weight: 3", "seed: [1]", "seed: 0\nmeasures: [1]"]
DAMAGED_CONFIGS += ["seed: 0\ntask: {_target_: [a]}", "seed: 0\ntask: {_target_: null}"]


@pytest.mark.parametrize("text", DAMAGED_CONFIGS)
def test_a_damaged_config_is_reported(runs, capsys, text):
    (runs / "ed" / "seed0" / "config.yaml").write_text(text)
    assert main([str(runs)]) == 1
    assert "seed0/config.yaml" in capsys.readouterr().err


def test_a_metric_missing_in_some_runs_shows_its_count(runs, capsys):
    last = {"eval/acc": 82.0, "measure/ed": 0.5}
    write_done(runs / "none/seed1", {"last": last, "best": {}, "steps": 5, "seconds": 1.0})
    main([str(runs)])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["none", "3", "82", "±", "2", "0.5", "(1)"] in lines
