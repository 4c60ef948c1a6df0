"""Runs may be stopped at any time; the same command resumes them bit for bit."""

import contextlib
import errno
import fcntl
import io
import itertools
import json
import os
import signal
import subprocess
from pathlib import Path
from pickle import UnpicklingError
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hydra.utils import instantiate
from safetensors.torch import load_file

import ed
from ed.engine.checkpoint import SaveError, load_checkpoint, save_checkpoint
from ed.engine.loop import Interrupted
from ed.engine.main import load_run
from ed.engine.metrics import Metrics
from ed.engine.run import RunFolder, changed_files
from ed.runtime.files import read_rows, seal, write_atomic
from ed.runtime.runs import RunError
from tests.helpers.commands import die_at_row, finish, start_command
from tests.helpers.launching import wait_for
from tests.helpers.small import SMALL, SMALL_GROKKING, small_config, small_run, weights

ROOT = Path(__file__).parents[2]
REGULARIZERS = ["none", "ed", "mixup", "sam", "asam", "jacobian"]


def rows_without_time(folder: Path) -> list[dict]:
    return [
        {key: value for key, value in row.items() if not key.startswith("time/")}
        for row in read_rows(folder / "metrics.jsonl")
    ]


def assert_same_run(first: Path, second: Path) -> None:
    ours, theirs = weights(first), weights(second)
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name
    assert rows_without_time(first) == rows_without_time(second)


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


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.parametrize("damage", ["truncated", "flipped bit", "empty", "foreign"])
def test_damaged_checkpoint_falls_back_to_the_previous_one(tmp_path, damage, monkeypatch):
    for step in (1, 2):
        save_checkpoint(tmp_path, {"step": step, "weights": torch.arange(1000)})
    last = tmp_path / "last.pt"
    content = bytearray(last.read_bytes())
    if damage == "truncated":
        content = content[: len(content) // 2]
    elif damage == "flipped bit":
        content[-2000] ^= 1
    else:
        content = b"" if damage == "empty" else b"PK not ours"
    last.write_bytes(content)
    warnings = []
    monkeypatch.setattr("ed.engine.checkpoint.logger.warning", warnings.append)
    assert load_checkpoint(tmp_path)["step"] == 1
    assert "last.pt" in warnings[0]


def test_kill_during_save_after_a_damaged_checkpoint_loses_nothing(tmp_path, monkeypatch):
    """Saving first replaces the intact previous.pt with the damaged last.pt."""
    for step in (1, 2):
        save_checkpoint(tmp_path, {"step": step})
    (tmp_path / "last.pt").write_bytes(b"damaged")
    rename = os.replace

    def killed(source, target):
        if Path(source).suffix == ".tmp":
            raise KeyboardInterrupt
        rename(source, target)

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path, {"step": 3})
    assert load_checkpoint(tmp_path) == {"step": 3}


def test_unreadable_checkpoint_is_not_treated_as_damaged(tmp_path, monkeypatch):
    """The run would otherwise resume from an older checkpoint and overwrite the newer one."""
    save_checkpoint(tmp_path, {"step": 1})

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(PermissionError, match=r"last\.pt"):
        load_checkpoint(tmp_path)


def test_checkpoints_are_plain_torch_files(tmp_path):
    state = {"step": 3, "weights": torch.arange(1000)}
    save_checkpoint(tmp_path, state)
    for mapped in (False, True):
        opened = torch.load(tmp_path / "last.pt", weights_only=True, mmap=mapped)
        assert opened["step"] == 3
        assert torch.equal(opened["weights"], state["weights"])


def test_run_can_be_loaded_with_torch_safetensors_and_load_run(tmp_path):
    small_run(tmp_path)
    trained = ed.load_run(tmp_path, "cpu")
    assert not trained.model.training
    assert trained.config.task.batch_size == trained.task.batch_size == 200
    state = torch.load(tmp_path / "last.pt", weights_only=True)["training"]["model"]
    plain = instantiate(trained.config.model).eval()
    x = trained.task.examples(torch.arange(4))["x"]
    expected = trained.model(x)
    for found in (state, load_file(tmp_path / "model.safetensors")):
        plain.load_state_dict(found)
        assert torch.equal(plain(x), expected)
    (tmp_path / "last.pt").unlink()  # shared runs may lack last.pt
    shared = ed.load_run(tmp_path, "cpu", data=False)
    assert torch.equal(shared.model(x), expected)
    assert not hasattr(shared.task, "train")


def test_loading_an_unfinished_run_warns(tmp_path, monkeypatch):
    small_run(tmp_path)
    warnings = []
    monkeypatch.setattr("ed.engine.main.logger.warning", lambda *words: warnings.append(words[0]))
    ed.load_run(tmp_path, "cpu", data=False)
    assert not warnings
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "DONE").unlink()
    ed.load_run(tmp_path, "cpu", data=False)
    assert [text for text in warnings if "has not finished" in text] == warnings != []


def test_loading_checkpoints_executes_no_code(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.system, ("touch should_not_exist",)

    buffer = io.BytesIO()
    torch.save({"step": Evil()}, buffer)
    content = buffer.getbuffer()
    digest = seal(content)
    (tmp_path / "last.pt").write_bytes(bytes(content) + digest)
    with pytest.raises(UnpicklingError, match=r"posix\.system"):
        load_checkpoint(tmp_path)
    assert not Path("should_not_exist").exists()


def test_state_that_cannot_be_loaded_is_not_saved(tmp_path):
    """Such a checkpoint would be treated as damaged, and the run would start over."""
    save_checkpoint(tmp_path, {"step": 1})
    with pytest.raises(SaveError, match=r"numpy.*scalar"):
        save_checkpoint(tmp_path, {"step": 2, "task": {"mean": np.float64(0.5)}})
    assert load_checkpoint(tmp_path) == {"step": 1}


def test_full_disk_keeps_the_last_good_checkpoint(tmp_path, monkeypatch):
    save_checkpoint(tmp_path, {"step": 1})

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(SaveError, match="No space left"):
        save_checkpoint(tmp_path, {"step": 2})
    with pytest.raises(OSError, match="No space left"):
        write_atomic(tmp_path / "DONE", "{}")
    monkeypatch.undo()
    assert load_checkpoint(tmp_path)["step"] == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["last.pt"]


def test_folder_with_a_different_config_is_rejected(tmp_path):
    small_run(tmp_path / "run")
    before = {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir() if p.name != "train.log"}
    with pytest.raises(RunError, match=r"optimizer\.lr is 0\.002 there, 0\.001 here"):
        small_run(tmp_path / "run", "optimizer.lr=0.001")
    with pytest.raises(RunError, match="seed is 0 there, 1 here"):
        small_run(tmp_path / "run", "seed=1")
    after = {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir() if p.name != "train.log"}
    assert before == after
    for name in ("config.yaml", "DONE"):
        (tmp_path / "run" / name).unlink()
    with pytest.raises(RunError, match=r"optimizer\.lr is 0\.002 there, 0\.001 here"):
        small_run(tmp_path / "run", "optimizer.lr=0.001")  # the checkpoint also stores the config


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


def test_file_system_without_locks_raises(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(RunError, match=r"system\.run_dir.*Operation not supported: .*\.lock"):
        RunFolder(tmp_path, small_config(tmp_path))


def test_locked_folder_is_rejected(tmp_path):
    (tmp_path / "run").mkdir()
    with open(tmp_path / "run" / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(RunError, match="another process"):
            small_run(tmp_path / "run")


def test_folder_locked_for_a_moment_is_opened(tmp_path, monkeypatch):
    """`launch.py --status` briefly takes the lock to check whether a run is active."""
    with open(tmp_path / ".lock", "w") as look:
        fcntl.flock(look, fcntl.LOCK_EX)
        pause = SimpleNamespace(sleep=lambda _: fcntl.flock(look, fcntl.LOCK_UN))
        monkeypatch.setattr("ed.runtime.files.time", pause)
        RunFolder(tmp_path, small_config(tmp_path)).close()
    assert (tmp_path / "config.yaml").exists()


def write_and_die(path: Path) -> None:
    """Writes a file in a child process that is killed before the final rename."""
    child = os.fork()
    if not child:
        try:
            os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
            write_atomic(path, "half")
        finally:
            os._exit(1)
    assert finish(child) == -signal.SIGKILL


def test_locking_a_folder_removes_leftover_temporary_files(tmp_path):
    ours = ["config.yaml", "metrics.jsonl", "meta.json", "DONE", "wandb_id"]
    for name in (*ours, "FAILED", "slurm.json"):
        write_and_die(tmp_path / name)
    before = sorted(tmp_path.glob("*.tmp"))
    assert len(before) == 7
    with open(tmp_path / ".lock", "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(RunError):
            RunFolder(tmp_path, small_config(tmp_path))
        # another process may still be writing these files
        assert sorted(tmp_path.glob("*.tmp")) == before
    RunFolder(tmp_path, small_config(tmp_path)).close()
    left = {path.name.split(".")[0] for path in tmp_path.glob("*.tmp")}
    assert left == {"FAILED", "slurm"}  # the launcher writes these without a lock


def test_non_finite_loss_stops_the_run_without_saving(tmp_path):
    with pytest.raises(FloatingPointError, match=r"train/loss = nan between steps 1 and \d+"):
        small_run(tmp_path / "run", "optimizer.lr=1e30", "task.epochs=3", "system.log_every=5")
    assert not (tmp_path / "run" / "last.pt").exists()
    # the previous row was finite
    with pytest.raises(FloatingPointError, match="between steps 2 and 2 of"):
        small_run(tmp_path / "rows", "optimizer.lr=1e30")


def test_checkpoint_between_rows_contains_only_finite_values(tmp_path):
    """Losses are also checked before saving, not only when a row is logged."""
    often = ["optimizer.lr=1e30", "system.log_every=5", "system.save_seconds=0"]
    with pytest.raises(FloatingPointError, match=r"loss = nan.* between steps 1 and \d+ of"):
        small_run(tmp_path, *often)
    state = load_checkpoint(tmp_path)
    assert state["step"] < 5
    assert all(value.isfinite() for value in state["training"]["sums"].values())


def test_weights_that_diverge_at_the_last_step_are_not_saved(tmp_path):
    """There is no later loss to check, but the final evaluation is not finite."""
    whole = ["task.batch_size=2000", "optimizer=sgd", "optimizer.lr=1e38"]  # a single step
    with pytest.raises(FloatingPointError, match=r"eval/loss = nan between steps 1 and 1 of .*run"):
        small_run(tmp_path / "run", *whole)
    assert not (tmp_path / "run" / "last.pt").exists()
    assert not (tmp_path / "run" / "DONE").exists()


def test_changed_files_since_the_commit(tmp_path, monkeypatch):
    def git(*arguments: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=b", "-c", "commit.gpgsign=false"]
        command = ["git", "-C", tmp_path, *who, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    code = tmp_path / "code.py"
    monkeypatch.setattr("ed.engine.run.__file__", str(code))
    for name in ("ED_COMMIT", "ED_CHANGED", "GIT_DIR", "GIT_INDEX_FILE"):  # git sets two for hooks
        monkeypatch.delenv(name, raising=False)
    git("init")
    for text in ("first", "second"):
        code.write_text(text)
        git("add", "code.py")
        git("commit", "-m", text)
    assert changed_files() == []
    monkeypatch.setenv("ED_COMMIT", git("rev-parse", "HEAD~1"))
    assert changed_files() == ["code.py"]  # relative to the given commit
    monkeypatch.setenv("ED_COMMIT", "0123456789abcdef")  # not in this repository
    assert changed_files() is None
    for listed, files in (("", []), ("a.py b.py", ["a.py", "b.py"])):
        monkeypatch.setenv("ED_CHANGED", listed)
        assert changed_files() == files


def test_every_session_records_changed_files(tmp_path, monkeypatch):
    with contextlib.closing(RunFolder(tmp_path, small_config(tmp_path))) as folder:
        for changed in ([], ["code.py"], None):  # None if unknown
            monkeypatch.setattr("ed.engine.run.changed_files", lambda changed=changed: changed)
            folder.open_session("cpu", 10)
    sessions = json.loads((tmp_path / "meta.json").read_text())["sessions"]
    noted = [(session["dirty"], session["changed"]) for session in sessions]
    assert noted == [(False, []), (True, ["code.py"]), (None, None)]
