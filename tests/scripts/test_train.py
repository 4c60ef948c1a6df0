"""train.py on the command line: help, sweeps and loggers."""

import csv
import re
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import OmegaConf

from ed.analysis.spec import expand
from ed.analysis.tables import load_table
from ed.engine.compose import compose_config
from ed.engine.errors import explain
from ed.engine.loop import Interrupted
from ed.engine.main import load_run, start_tracker
from ed.runtime.files import read_rows
from scripts.launch import command
from tests.helpers.commands import die_at_row, finish, start_command
from tests.helpers.small import SMALL, small_run
from tests.helpers.training import SHORT, train, train_afresh


@pytest.mark.parametrize("argument", [("--cfg", "job"), ("--help",)], ids=lambda a: a[0])
def test_help_and_config_do_not_import_torch(argument):
    """Importing torch would take seconds."""
    result = train_afresh(*argument, PYTHONPROFILEIMPORTTIME="1")
    assert result.returncode == 0
    assert "regularizer" in result.stdout
    loaded = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert "hydra" in loaded
    assert not loaded & {"torch", "numpy", "datasets", "matplotlib"}


def test_a_sweep_gives_every_run_its_own_folder(tmp_path):
    """A small version of the sweep in the README."""
    result = train(
        "-m", *SHORT, "seed=0,1", "regularizer=none,ed", f"system.runs={tmp_path}"
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    done = sorted(path.parent for path in tmp_path.rglob("DONE"))
    assert len(done) == 4
    assert {path.name for path in done} == {"seed0", "seed1"}
    assert len({path.parent for path in done}) == 2
    again = train("-m", *SHORT, "seed=0,1", "regularizer=none,ed", f"system.runs={tmp_path}")
    assert again.stdout.count("already done") == 4


def test_a_sweep_continues_after_a_failed_run(tmp_path):
    """Failures are printed immediately, and the last line lists all of them."""
    words = ["-m", *SMALL, f"system.runs={tmp_path}", "optimizer.lr=1e30,0,0.001"]
    result = train(*words)
    assert result.returncode == 1
    assert [path.parent.name for path in tmp_path.rglob("DONE")] == ["seed0"]
    diverged, rejected, last = result.stderr.splitlines()  # no traceback
    assert re.match("error: .*(diverged|not finite)", diverged)
    assert rejected.startswith("error: optimizer.lr=0: ")
    assert re.match("error: 2 .*optimizer.lr=1e\\+30; optimizer.lr=0", last)
    again = train(*words)
    assert again.returncode == 1
    assert again.stdout.count("already done") == 1


def test_a_stopped_sweep_starts_no_more_runs(tmp_path):
    words = ["-m", *SMALL, f"system.runs={tmp_path}", "seed=0,1", "system.max_minutes=1e-9"]
    result = train(*words)
    assert result.returncode == 75
    assert [path.parent.name for path in tmp_path.rglob("config.yaml")] == ["seed0"]
    assert result.stderr.count("\n") == 1


def test_a_resumed_run_keeps_its_wandb_id(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB__SERVICE_WAIT", "300")
    extra = ["logger=wandb", "logger.mode=offline"]
    with pytest.raises(Interrupted):
        small_run(tmp_path / "run", *extra, "system.max_minutes=0")
    identifier = (tmp_path / "run" / "wandb_id").read_text()
    assert small_run(tmp_path / "run", *extra)["steps"] == 10
    folders = list((tmp_path / "run" / "wandb").glob("offline-run-*"))
    assert len(folders) == 2
    assert all(identifier in folder.name for folder in folders)  # "-1" follows in the same second


def test_wandb_groups_a_tables_runs_by_cell_and_names_them_by_seed(tmp_path, monkeypatch):
    """Starts the tracker as the launcher's commands do, and twice for the first run."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB__SERVICE_WAIT", "300")
    runs = expand(load_table("table1"), cells=["ed"], seeds=[0, 1], root=tmp_path)
    seen = []
    for run in (*runs, runs[0]):  # resumes the first run
        run.folder.mkdir(parents=True, exist_ok=True)
        cfg = compose_config([*command(run)[2:], "logger=wandb", "logger.mode=offline"])
        tracker = start_tracker(cfg, run.folder)
        seen.append((tracker.run.group, tracker.run.name, tracker.run.id))
        tracker.close()
    assert [(group, name) for group, name, _ in seen] == [
        ("table1/ed", "table1/ed/seed0"),
        ("table1/ed", "table1/ed/seed1"),
        ("table1/ed", "table1/ed/seed0"),
    ]
    assert seen[0] == seen[2]
    assert seen[0][2] != seen[1][2]


def test_wandb_logs_every_row_and_resumes(tmp_path, monkeypatch):
    started, logged = [], []
    run = SimpleNamespace(
        log=lambda values, step: logged.append({"step": step, **values}), finish=lambda: None
    )
    wandb = SimpleNamespace(init=lambda **how: started.append(how) or run)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    small_run(tmp_path, "logger=wandb")
    assert logged == read_rows(tmp_path / "metrics.jsonl")
    assert [how["resume"] for how in started] == ["allow"]  # "never" would fail when a run resumes


def test_a_requested_stop_is_reported_once_without_an_error(tmp_path):
    result = train(*SMALL, f"system.run_dir={tmp_path / 'run'}", "system.max_minutes=1e-9")
    assert result.returncode == 75
    stopped = [line for line in (result.stdout + result.stderr).splitlines() if "stopped" in line]
    assert len(stopped) == 1
    assert re.match(r"stopped and saved at step 1 of \d+", stopped[0])
    assert "stopped" in (tmp_path / "run" / "train.log").read_text()


def test_old_runs_use_the_default_of_a_new_setting(tmp_path):
    small_run(tmp_path)
    config = tmp_path / "config.yaml"
    lines = config.read_text().splitlines(keepends=True)
    config.write_text("".join(line for line in lines if "  space:" not in line))
    assert load_run(tmp_path, "cpu").task.space == "input"


def test_a_missing_setting_without_a_default_is_reported(capsys):
    leaf = {"_target_": "ed.models.clip.Towers", "architecture": "ViT-B-32"}
    with pytest.raises(InstantiationException) as error:
        instantiate(OmegaConf.create({"model": leaf}).model)
    assert explain(error.value) == 1
    printed = capsys.readouterr().err
    assert printed.startswith("error: ")
    assert "prompts" in printed
    assert printed.count("\n") == 1


def test_hydras_own_run_folder_is_rejected(tmp_path):
    result = train(*SMALL, f"hydra.run.dir={tmp_path}/mine")
    assert result.returncode == 1
    assert f"use system.run_dir={tmp_path}/mine" in result.stderr
    assert not (tmp_path / "mine").exists()


def test_csv_has_every_value_once_and_resumes(tmp_path):
    often = ["logger=csv", "system.save_seconds=0"]
    with pytest.raises(Interrupted):
        small_run(tmp_path, *often, "system.max_minutes=0")
    small_run(tmp_path, *often)
    with open(tmp_path / "metrics.csv", newline="") as file:
        found = list(csv.DictReader(file))
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert [int(row["step"]) for row in found] == [row["step"] for row in rows]
    for line, row in zip(found, rows, strict=True):
        assert {k: float(v) for k, v in line.items() if v} == pytest.approx(row)


def tensorboard_values(folder: Path) -> dict[str, list]:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"), {"scalars": 0}).Reload()
    found = {name: events.Scalars(name) for name in events.Tags()["scalars"]}
    return {name: [(e.step, pytest.approx(e.value)) for e in all] for name, all in found.items()}


def logged_values(folder: Path) -> dict[str, list]:
    values: dict[str, list] = {}
    for row in read_rows(folder / "metrics.jsonl"):
        for name, value in row.items():
            if name != "step":
                values.setdefault(name, []).append((row["step"], value))
    return values


def test_tensorboard_has_every_value_once_and_resumes(tmp_path):
    """Also after kills, with another logger before, and with measures of a finished run."""
    often = ["logger=tensorboard", "system.save_seconds=0"]
    with pytest.raises(Interrupted):
        small_run(tmp_path, "system.max_minutes=0")
    words = ["train.py", *SMALL, *often, f"system.run_dir={tmp_path}"]
    for row in (5, 11):  # the last is the evaluation
        assert finish(start_command(words, prepare=die_at_row(row))) == -signal.SIGKILL
        assert tensorboard_values(tmp_path) == logged_values(tmp_path)
    small_run(tmp_path, *often)
    assert tensorboard_values(tmp_path) == logged_values(tmp_path)
    small_run(tmp_path, *often, "measures=norm")
    assert tensorboard_values(tmp_path) == logged_values(tmp_path)
    (tmp_path / "DONE").unlink()  # as if killed after the last row
    small_run(tmp_path, *often, "measures=norm")
    assert tensorboard_values(tmp_path) == logged_values(tmp_path)


def test_a_missing_logger_package_is_reported(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ValueError, match=r"^logger=tensorboard: "):
        small_run(tmp_path, "logger=tensorboard")
