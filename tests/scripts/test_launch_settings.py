"""The launcher's settings: frozen configs, one-line errors, paths and printed commands."""

import errno
import json
import os
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from ed.analysis.collect import collect
from ed.analysis.spec import SpecError, expand
from ed.analysis.tables import load_table
from scripts import launch, places
from tests.helpers.launching import SPEC, fake, finishing, one_run, stand_in, write_table
from tests.helpers.tables import fabricate

ROOT = Path(__file__).parents[2]


def folders(root: Path, *names: str) -> list[str]:
    for name in names:
        (root / name).mkdir()
    return [str(root / name) for name in names]


def test_configs_are_frozen_at_launch_and_later_changes_rejected(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(launch, "command", stand_in("raise SystemExit(75)"))
    arguments = ["--runs", str(tmp_path / "runs")]
    launch.main([write_table(tmp_path), *arguments])
    runs = tmp_path / "runs/six"
    frozen = runs / "ed/seed0/config.yaml"
    assert yaml.safe_load(frozen.read_text())["regularizer"]["weight"] == 7
    before = frozen.read_bytes()
    cells = {"ed": {"overrides": ["regularizer=ed", "regularizer.degree=2"], "paper": None}}
    edited = write_table(tmp_path, cells=cells)
    # the error suggests moving the largest folder in which no run has started
    for begun, moved in (
        ("a note", f"{runs}, where no run has started,"),
        ("none/seed0/meta.json", f"{runs}/ed, where no run has started,"),
        ("ed/seed1/meta.json", f"{runs}/ed/seed0"),
        ("ed/seed1/metrics.jsonl", f"{runs}/ed/seed0"),
        ("ed/seed1/DONE", f"{runs}/ed/seed0"),
    ):
        (runs / begun).touch()
        assert launch.main([edited, *arguments]) == 1
        error = capsys.readouterr().err
        assert error.startswith(
            f"error: {frozen} has regularizer.degree=3, but the table has 2: it is another run; "
            f"move {moved} away and launch again; likewise "
        )
        assert error.count("\n") == 1
        (runs / begun).unlink()
    cells = {"ed": {"overrides": ["regularizer=none"], "paper": None}}
    assert launch.main([write_table(tmp_path, cells=cells), *arguments, "--seeds", "0"]) == 1
    built = "regularizer._target_=ed.regularizers.ed.EDRegularizer"
    assert built in capsys.readouterr().err
    # the setting is missing from the table
    cells = {"ed": {"overrides": ["regularizer=ed"], "paper": None}}
    assert launch.main([write_table(tmp_path, cells=cells), *arguments, "--seeds", "0"]) == 1
    assert "regularizer.pairs=50" in capsys.readouterr().err
    assert frozen.read_bytes() == before


def test_seeds_with_different_settings_are_reported_before_they_run(tmp_path, capsys, monkeypatch):
    """The seeds differ in precision, which the table does not set."""
    monkeypatch.setattr(launch, "command", finishing)
    arguments = [write_table(tmp_path), "--runs", str(tmp_path / "runs"), "--cells", "ed"]
    launch.main([*arguments, "--seeds", "0"])
    assert "warning" not in capsys.readouterr().err
    path = tmp_path / "runs/six/ed/seed0/config.yaml"
    config = yaml.safe_load(path.read_text())
    config["precision"] = "float32"
    path.write_text(yaml.safe_dump(config))
    launch.main([*arguments, "--seeds", "0", "1"])
    warning = "warning: six/ed: seeds differ in precision: float32 (seed 0), "
    assert capsys.readouterr().err.startswith(warning)


@pytest.mark.parametrize("more", [[], ["--status"], ["--where", "print"]])
def test_a_file_instead_of_the_runs_folder_is_rejected(tmp_path, capsys, more):
    (tmp_path / "file").touch()
    arguments = [write_table(tmp_path), "--runs", str(tmp_path / "file"), *more]
    assert launch.main(arguments) == 1
    assert capsys.readouterr().err == f"error: --runs {tmp_path}/file: not a folder\n"
    (run, *_) = expand(load_table(arguments[0]), root=tmp_path / "file")
    assert not launch.is_busy(run.folder)


def test_a_run_that_failed_during_training_keeps_its_config_and_log(tmp_path, capsys, monkeypatch):
    begun = "import pathlib, sys; pathlib.Path(sys.argv[1], 'meta.json').write_text('{}'); "
    monkeypatch.setattr(launch, "command", stand_in(begun + "sys.exit('error: too bad')"))
    here, elsewhere = folders(tmp_path, "here", "elsewhere")
    arguments = one_run(tmp_path)
    for again in ([], ["--rerun-failed"]):
        assert launch.main([*arguments, "--data", here, *again]) == 1
    assert capsys.readouterr().err == ""
    folder = tmp_path / "six/ed/seed0"
    assert (folder / "output.log").read_text() == "error: too bad\n" * 2
    before = (folder / "config.yaml").read_bytes()
    assert launch.main([*arguments, "--data", elsewhere, "--rerun-failed"]) == 1
    assert "holds a run with another config" in capsys.readouterr().err
    assert (folder / "config.yaml").read_bytes() == before


def test_data_may_move_between_launches(tmp_path, capsys, monkeypatch):
    """The data path may change before a run starts and after it has finished."""
    wrong, here, there = folders(tmp_path, "wrong", "here", "there")
    arguments = one_run(tmp_path)
    monkeypatch.setattr(launch, "command", stand_in("raise SystemExit('error: no such folder')"))
    assert launch.main([*arguments, "--data", wrong]) == 1
    assert launch.main([*arguments, "--data", here]) == 1  # not rerun without --rerun-failed
    monkeypatch.setattr(launch, "command", finishing)
    assert launch.main([*arguments, "--data", here, "--rerun-failed"]) == 0
    config = (tmp_path / "six/ed/seed0/config.yaml").read_text()
    assert yaml.safe_load(config)["task"]["data"] == here
    assert launch.main([*arguments, "--data", f"{tmp_path}/missing"]) == 0
    # the config was frozen, but the launcher stopped before starting the run
    other = [*arguments[:-1], "1"]
    monkeypatch.setattr(launch, "run_all", lambda *_, **__: None)
    assert launch.main([*other, "--data", here]) == launch.main([*other, "--data", there])
    config = (tmp_path / "six/ed/seed1/config.yaml").read_text()
    assert yaml.safe_load(config)["task"]["data"] == there
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("text", ["/no/such/place", "task.mnist=../no/such/place"])
def test_missing_data_is_reported_once_before_any_run(tmp_path, capsys, monkeypatch, text):
    monkeypatch.setattr(launch, "command", finishing)
    arguments = [write_table(tmp_path), "--runs", str(tmp_path / "runs")]
    assert launch.main([*arguments, "--data", text]) == 1
    assert capsys.readouterr().err.startswith(f"error: --data {text}: ")
    assert not (tmp_path / "runs").exists()
    assert launch.main([*arguments, "--data", text, "--where", "print"]) == 0  # for elsewhere


def test_an_error_in_the_table_can_be_fixed(tmp_path, capsys, monkeypatch):
    """A run that failed before training does not keep its frozen config."""
    arguments = ["--runs", str(tmp_path), "--cells", "ed", "--seeds", "0"]
    wrong, right = (
        {"ed": {"overrides": ["regularizer=ed", f"regularizer.weight={weight}"], "paper": None}}
        for weight in ("seven", 7)
    )
    monkeypatch.setattr(launch, "command", stand_in("raise SystemExit('error: weight=seven')"))
    assert launch.main([write_table(tmp_path, cells=wrong), *arguments]) == 1
    corrected = write_table(tmp_path, cells=right)
    assert launch.main([corrected, *arguments]) == 1  # not rerun without --rerun-failed
    assert "failed   exit 1: error: weight=seven" in capsys.readouterr().out
    monkeypatch.setattr(launch, "command", finishing)
    assert launch.main([corrected, *arguments, "--rerun-failed"]) == 0
    config = yaml.safe_load((tmp_path / "six/ed/seed0/config.yaml").read_text())
    assert config["regularizer"]["weight"] == 7
    assert capsys.readouterr().err == ""


def test_a_table_may_use_your_own_configs(tmp_path, capsys, monkeypatch):
    (tmp_path / "my configs/regularizer").mkdir(parents=True)
    leaf = "_target_: ed.regularizers.mixup.Mixup\nalpha: 1\nper_example: true\n"
    (tmp_path / "my configs/regularizer/own.yaml").write_text(leaf)
    fixed = [f"hydra.searchpath=['file://{tmp_path}/my configs']", *SPEC["fixed"]]
    arguments = ["--runs", str(tmp_path), "--seeds", "0"]
    monkeypatch.setattr(launch, "command", finishing)
    for overrides, message in {
        ("regularizer=owm",): "regularizer=owm: no such choice; did you mean own? ",
        ("regularizer=own", "regularizer.alpa=2"): "did you mean regularizer.alpha",
    }.items():
        cells = {"own": {"overrides": list(overrides), "paper": None}}
        assert launch.main([write_table(tmp_path, fixed=fixed, cells=cells), *arguments]) == 1
        assert message in capsys.readouterr().err
    cells = {"own": {"overrides": ["regularizer=own", "regularizer.alpha=2"], "paper": None}}
    assert launch.main([write_table(tmp_path, fixed=fixed, cells=cells), *arguments]) == 0
    config = yaml.safe_load((tmp_path / "six/own/seed0/config.yaml").read_text())
    assert config["regularizer"]["alpha"] == 2
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("value", ["1e3", "null", "[1,2]", "text"])
def test_invalid_search_paths_are_reported_in_one_line(value, tmp_path, capsys):
    own = write_table(tmp_path, fixed=[f"hydra.searchpath={value}", *SPEC["fixed"]])
    assert launch.main([own, "--runs", str(tmp_path), "--seeds", "0"]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_reduced_runs_have_a_separate_folder_with_their_deviations(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "command", stand_in("raise SystemExit(75)"))
    arguments = one_run(tmp_path)
    launch.main([*arguments, "--set", "task.epochs=1", "system.log_every=2"])
    (note,) = tmp_path.glob("six@*/deviations.json")
    assert json.loads(note.read_text()) == ["task.epochs=1"]
    assert (note.parent / "ed/seed0/config.yaml").exists()
    assert not (tmp_path / "six").exists()
    cells = {"same": {"same_as": "six/ed", "paper": None}}
    (tmp_path / "other.yaml").write_text(yaml.safe_dump(SPEC | {"cells": cells}))
    launch.main([str(tmp_path / "other.yaml"), *arguments[1:3], "--set", "task.epochs=2"])
    noted = {path.parent.name.split("@")[0] for path in tmp_path.glob("*@epochs2*/deviations.json")}
    assert noted == {"six", "other"}  # both tables find the runs


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["tabel1"], "'tabel1'; did you mean table1"),
        (["table1", "--cells", "basline"], "--cells basline"),
        (
            ["basis", "--set", "task.epoch=1"],
            "cell efficiency does not compose: unknown key 'task.epoch'; did you mean task.epochs",
        ),
        (
            ["basis", "--set", "++task.epochs=1"],
            "--set ++task.epochs=1: write key=value, without +",
        ),
        (
            ["basis", "--set", "~optimizer.max_grad_norm"],
            "--set ~optimizer.max_grad_norm: write key=value, without ~",
        ),
        (["basis", "--data", "embedded"], "--data embedded: "),
        (
            ["clip_standin", "--data", "model.weights=random"],
            "--data model.weights=random: ",
        ),
        (["basis", "--where", "slurm"], "--where slurm: "),
    ],
)
def test_invalid_arguments_print_one_line_and_write_nothing(
    tmp_path, capsys, monkeypatch, arguments, complaint
):
    monkeypatch.setenv("PATH", str(tmp_path))
    root = tmp_path / "runs"
    assert launch.main([*arguments, "--runs", str(root)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert complaint in error
    assert not root.exists()


def test_print_shows_commands_and_runs_nothing(tmp_path, capsys):
    cells = ["sam-0.02", "sam-0.05", "sam-0.1"]
    sam = ["table1_tuning", "--where", "print", "--cells", *cells]
    assert launch.main([*sam, "--runs", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert "train.py experiment=cifar10_vit_tiny" in lines[0]
    assert "seed=0 logger.group=table1_tuning/sam-0.02 " in lines[0]  # wandb groups runs by cell
    assert lines[0].endswith(f"system.run_dir={tmp_path}/table1_tuning/sam-0.02/seed0")
    assert not list(tmp_path.iterdir())


def test_print_omits_finished_runs_and_rejects_other_runs(tmp_path, capsys, monkeypatch):
    arguments = [write_table(tmp_path), "--where", "print", "--cells", "ed", "--runs"]
    launch.main([*arguments, str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    run = expand(load_table(arguments[0]), cells=["ed"], root=tmp_path)[0]
    fabricate(run)
    monkeypatch.chdir(tmp_path.parent)  # relative paths still refer to the working folder
    assert launch.main([*arguments, tmp_path.name]) == 0
    assert capsys.readouterr().out.splitlines() == lines[1:]
    fabricate(replace(run, overrides=(*run.overrides, "regularizer.weight=5")))
    assert launch.main([*arguments, tmp_path.name]) == 1
    assert "regularizer.weight=5.0, but the table has 7: " in capsys.readouterr().err


PLAIN = ["/a/b c/d_e-1.5", "uoft-cs/cifar10", "./here", "x@y:z"]
SPECIAL = [
    "/tmp/été (1)",
    "/a,b=c",
    "~/data",
    "/it's",
    "/back\\slash",
    "/end\\",
    "/\\'",
    " /a ",
    "",
]


@pytest.mark.parametrize("value", [*PLAIN, *SPECIAL])
def test_quoted_paths_survive_hydras_parser(value):
    from hydra.core.override_parser.overrides_parser import OverridesParser

    override = OverridesParser.create().parse_override(f"key={places.quoted(value)}")
    assert override.value() == value
    assert (places.quoted(value) == value) == (value in PLAIN)


def test_special_characters_in_paths_are_passed_to_the_run(tmp_path, capsys, monkeypatch):
    from ed.engine.compose import compose_config

    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    fake(tmp_path, "sinfo", "echo ci")
    fake(tmp_path, "sbatch", "echo 42")
    fake(tmp_path, "srun", """printf '%s\\0' "$@" > "$(dirname "$0")/given" """)
    odd = tmp_path / "l'été (1), $x"
    odd.mkdir()
    arguments = [*one_run(tmp_path), "--runs", str(odd), "--data", str(odd)]
    assert launch.main([*arguments, "--where", "print"]) == 0
    printed = capsys.readouterr().out
    assert launch.main([*arguments, "--where", "slurm"]) == 0
    (script,) = odd.glob(".slurm/*/array.sh")
    task = os.environ | {"SLURM_ARRAY_TASK_ID": "0", "SLURM_JOB_ID": "43"}
    assert subprocess.run(["bash", script], env=task, check=False).returncode == 0
    submitted = (tmp_path / "given").read_text().split("\0")[:-1]
    assert submitted == shlex.split(printed)
    config = compose_config(submitted[2:])
    assert config.system.run_dir == str(odd / "six/ed/seed0")
    assert config.task.data == str(odd)


def test_data_paths_are_relative_to_the_working_folder(tmp_path, monkeypatch):
    (tmp_path / "pics").mkdir()
    monkeypatch.chdir(tmp_path)
    assert places.located("./pics") == f"task.data={tmp_path}/pics"
    assert places.located("task.mnist=pics") == f"task.mnist={tmp_path}/pics"
    assert places.located("uoft-cs/cifar10") == "task.data=uoft-cs/cifar10"  # a data set on the hub
    assert places.located("task.data=") == "task.data=''"
    places.require_places(["./pics", "task.mnist=./pics", "./tests", "uoft-cs/cifar10"])
    with pytest.raises(SpecError, match=r"--data \./nowhere"):
        places.require_places(["./pics", "./nowhere"])
    monkeypatch.chdir(ROOT)  # here the path stays relative, so that old runs can resume
    assert places.located("./tests") == "task.data=./tests"


def test_reduced_runs_of_printed_commands_are_collected(tmp_path, capsys):
    arguments = [*one_run(tmp_path), "--where", "print", "--set", "task.epochs=1"]
    assert launch.main(arguments) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert "train.py task=cifar10" in line
    table = load_table(arguments[0])
    (run,) = expand(table, cells=["ed"], seeds=[0], sets=["task.epochs=1"], root=tmp_path)
    assert not run.folder.exists()
    fabricate(run, 80.0)  # stands in for running the command
    (row,) = (row for row in collect(table, [tmp_path], warn=pytest.fail) if row.status == "done")
    assert row.deviations == "task.epochs=1"


def test_commands_are_printed_even_if_the_folder_cannot_be_created(tmp_path, capsys, monkeypatch):
    def mkdir(self, **_):
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    arguments = [*one_run(tmp_path), "--where", "print", "--set", "task.epochs=1"]
    monkeypatch.setattr(Path, "mkdir", mkdir)
    assert launch.main(arguments) == 0
    output = capsys.readouterr()
    assert len(output.out.splitlines()) == 1
    assert output.err.startswith(f"hint: {tmp_path}/six@epochs1-")
    assert output.err.count("\n") == 1
