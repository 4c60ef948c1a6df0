"""Runs may be stopped at any time; the same command resumes them bit for bit."""

import itertools
import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from ed.engine.checkpoint import load_checkpoint, save_checkpoint
from ed.engine.loop import Interrupted
from ed.engine.main import load_run
from ed.engine.metrics import Metrics
from ed.runtime.files import read_rows
from ed.runtime.runs import RunError
from tests.helpers.commands import die_at_row, finish, start_command
from tests.helpers.launching import wait_for
from tests.helpers.small import SMALL, SMALL_GROKKING, assert_same_run, rows_without_time, small_run

REGULARIZERS = ["none", "ed", "mixup", "sam", "asam", "jacobian"]


# short runs with dropout (which uses the global random stream) or with measures during training
FEW_STEPS = {
    # gives 3 steps
    name: [*SMALL, f"regularizer={name}", "model.dropout=0.1", "task.batch_size=650"]
    for name in REGULARIZERS
}
FEW_STEPS["ed_without_anchors"] = [*FEW_STEPS["ed"], "regularizer.anchored=false"]
FEW_STEPS["ed_every_3"] = [*FEW_STEPS["ed"], "regularizer.every=3", "system.log_every=2"]
FEW_STEPS["ed_every_3"] += ["task.batch_size=400"]  # gives 5 steps
FEW_STEPS["grokking"] = [*SMALL_GROKKING, "measures=norm", "system.measure_every=2"]
FEW_STEPS["grokking"] += ["system.log_every=3"]  # each row averages over several sessions


@pytest.mark.parametrize("kind", FEW_STEPS)
def test_interrupted_equals_uninterrupted(kind, tmp_path):
    base = FEW_STEPS[kind]
    whole = small_run(tmp_path / "whole", base=base)
    assert whole["steps"] == {"grokking": 10, "ed_every_3": 5}.get(kind, 3)
    for _ in range(whole["steps"] - 1):  # stop after every step
        with pytest.raises(Interrupted, match="step"):
            small_run(tmp_path / "pieces", "system.max_minutes=0", base=base)
    summary = small_run(tmp_path / "pieces", "system.max_minutes=0", base=base)
    assert summary["steps"] == whole["steps"]
    assert_same_run(tmp_path / "whole", tmp_path / "pieces")
    steps = [r["step"] for r in rows_without_time(tmp_path / "pieces") if "train/loss" in r]
    rows = {"grokking": [3, 6, 9, 10], "ed_every_3": [2, 4, 5]}
    assert steps == rows.get(kind, [1, 2, 3])  # no row is missing or repeated


def test_regularizer_changes_neither_initial_weights_nor_batches(tmp_path):
    """With weight 0, an ED run equals a plain run, so comparisons are paired."""
    small_run(tmp_path / "none", "regularizer=none")
    small_run(tmp_path / "ed", "regularizer=ed", "regularizer.weight=0")
    ours, theirs = (rows_without_time(tmp_path / name) for name in ("none", "ed"))
    for plain, penalised in zip(ours, theirs, strict=True):
        # rounding differs because one forward pass covers batch and paths
        for key in plain:
            assert penalised[key] == pytest.approx(plain[key], rel=1e-3), key


def test_finished_run_is_not_repeated(tmp_path, capsys):
    first = small_run(tmp_path / "run")
    before = (tmp_path / "run" / "last.pt").stat().st_mtime_ns
    assert small_run(tmp_path / "run") == first
    assert "already done" in capsys.readouterr().out
    assert (tmp_path / "run" / "last.pt").stat().st_mtime_ns == before


def test_damaged_checkpoint_of_a_finished_run_is_reported(tmp_path, capsys):
    first = small_run(tmp_path / "run")
    checkpoint = tmp_path / "run" / "last.pt"
    content = bytearray(checkpoint.read_bytes())
    content[len(content) // 2] ^= 1
    checkpoint.write_bytes(content)
    assert small_run(tmp_path / "run") == first
    assert f"{checkpoint} is damaged" in capsys.readouterr().out


def test_finished_run_without_metrics_is_evaluated_again(tmp_path):
    summary = small_run(tmp_path)
    (tmp_path / "DONE").write_text("")
    with pytest.raises(RunError, match="DONE"):
        small_run(tmp_path)
    for name in ("DONE", "metrics.jsonl"):
        (tmp_path / name).unlink()
    assert small_run(tmp_path)["last"] == summary["last"]


def test_run_killed_before_done_does_not_log_its_measures_twice(tmp_path):
    summary = small_run(tmp_path, "measures=norm")
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert "measure/norm" in rows[-1]
    (tmp_path / "DONE").unlink()  # as if killed after the last row
    assert small_run(tmp_path, "measures=norm")["last"] == summary["last"]
    assert read_rows(tmp_path / "metrics.jsonl") == rows


def test_finished_run_may_delete_its_checkpoint(tmp_path):
    """Even without a checkpoint, the run counts as finished and is not trained again."""
    often = "system.save_seconds=0"  # also creates previous.pt
    summary = small_run(tmp_path / "run", "system.keep_checkpoint=false", often)
    assert not [*(tmp_path / "run").glob("*.pt"), *(tmp_path / "run").glob("*.safetensors")]
    assert small_run(tmp_path / "run") == summary
    with pytest.raises(FileNotFoundError, match=r"system\.keep_checkpoint=true"):
        load_run(tmp_path / "run")
    (tmp_path / "run" / "DONE").unlink()  # as if it had diverged before its first save
    with pytest.raises(FileNotFoundError, match="finish its training"):
        load_run(tmp_path / "run")


# the seven methods of Table 1
METHODS = {name: [f"regularizer={name}"] for name in ("none", "mixup", "sam", "asam", "jacobian")}
METHODS |= {"ed_without_anchors": ["regularizer=ed", "regularizer.anchored=false"]}
METHODS |= {"ed": ["regularizer=ed"]}


@pytest.mark.parametrize("method", METHODS)
def test_sigkill_loses_only_the_steps_after_the_last_checkpoint(method, tmp_path):
    folder = tmp_path / "killed"
    extra = ["task.batch_size=1000", "task.epochs=2", *METHODS[method]]  # four steps
    words = ["train.py", *SMALL, f"system.run_dir={folder}", *extra, "system.save_seconds=0"]
    assert finish(start_command(words, prepare=die_at_row(4))) == -signal.SIGKILL
    assert not (folder / "DONE").exists()
    assert load_checkpoint(folder)["step"] >= 2  # at most the fourth row is lost
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 99')  # as if killed in the middle of a line
    small_run(folder, *extra)
    small_run(tmp_path / "whole", *extra)
    assert_same_run(tmp_path / "whole", folder)
    assert len(json.loads((folder / "meta.json").read_text())["sessions"]) == 2


def test_sigterm_saves_and_exits_with_75(tmp_path):
    folder, extra = tmp_path / "stopped", ["task.epochs=200"]
    child = start_command(["train.py", *SMALL, f"system.run_dir={folder}", *extra])
    wait_for(lambda: _lines(folder / "metrics.jsonl"), "the first row")
    os.kill(child, signal.SIGTERM)
    assert finish(child) == 75
    step = load_checkpoint(folder)["step"]
    assert step == rows_without_time(folder)[-1]["step"]


def test_signal_stops_the_run_after_the_current_step(tmp_path, monkeypatch):
    """The exception stores the signal, because SIGUSR2 means that the run should be requeued."""
    monkeypatch.setattr(Metrics, "advance", lambda *_: signal.raise_signal(signal.SIGUSR2))
    with pytest.raises(Interrupted, match="step 1 of 10") as stopped:
        small_run(tmp_path)
    assert stopped.value.signals == (signal.SIGUSR2,)


def test_a_second_ctrl_c_is_logged(tmp_path, monkeypatch):
    twice = [signal.SIGINT] * 2
    monkeypatch.setattr(Metrics, "advance", lambda *_: [*map(signal.raise_signal, twice)])
    with pytest.raises(KeyboardInterrupt):
        small_run(tmp_path)
    assert "stopped: KeyboardInterrupt" in (tmp_path / "train.log").read_text()


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def test_settings_that_do_not_affect_results_may_change(tmp_path):
    with pytest.raises(Interrupted):
        small_run(tmp_path / "run", "system.max_minutes=0")
    others = ["system.log_every=4", "logger.project=another"]
    assert small_run(tmp_path / "run", *others)["steps"] == 10
    rows = [row["step"] for row in rows_without_time(tmp_path / "run") if "train/loss" in row]
    assert rows == [1, 4, 8, 10]  # including the last step


def test_training_time_of_all_sessions_adds_up(tmp_path):
    with pytest.raises(Interrupted):
        small_run(tmp_path, "system.max_minutes=0")
    state = load_checkpoint(tmp_path)
    save_checkpoint(tmp_path, state | {"seconds": state["seconds"] + 5000})
    with pytest.raises(Interrupted):
        small_run(tmp_path, "system.max_minutes=0")
    assert 5000 < small_run(tmp_path)["seconds"] < 6000


def test_checkpoints_and_the_time_limit_follow_the_clock(tmp_path, monkeypatch):
    """The fake clock advances by one second per step."""
    clock, saved = itertools.count(), []
    loop = "ed.engine.loop"
    monkeypatch.setattr(f"{loop}.time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(f"{loop}.save_checkpoint", lambda _, state: saved.append(state["step"]))
    small_run(tmp_path / "saved", "system.save_seconds=4")
    assert saved == [4, 8, 10]
    with pytest.raises(Interrupted, match="step 6 of 10"):
        small_run(tmp_path / "stopped", "system.max_minutes=0.1")
