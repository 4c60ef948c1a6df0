"""Run folders: their config, locks and temporary files, and the changed files they record."""

import contextlib
import errno
import fcntl
import json
import os
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from ed.engine.run import RunFolder, changed_files
from ed.runtime.files import write_atomic
from ed.runtime.runs import RunError
from tests.helpers.commands import finish
from tests.helpers.small import small_config, small_run


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


def test_a_file_on_a_read_only_disk_is_reported_by_its_own_name(tmp_path, monkeypatch):
    def refuse(path, **_):  # even if there is nothing to remove
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(OSError, match="Read-only") as error:
        write_atomic(tmp_path / "page.html", "")
    assert error.value.filename == str(tmp_path / "page.html")


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
