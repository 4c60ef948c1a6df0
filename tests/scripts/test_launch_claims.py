"""The launcher's claims on runs: a run that another process trains is not started again."""

import errno
import fcntl
import os
import signal

import pytest

from ed.analysis.spec import expand
from ed.analysis.tables import load_table
from scripts import launch, local
from tests.helpers.launching import finishing, one_run, stand_in, write_table


def test_a_run_stays_claimed_until_it_ends(tmp_path):
    """The run itself holds the claim, since its launcher may be killed."""
    (run, *_) = expand(load_table(write_table(tmp_path)), root=tmp_path)
    run.folder.mkdir(parents=True)
    command = stand_in("import time; time.sleep(60)")(run)
    with local.claimed(run, rerun_failed=False) as claim:
        process = local.start(run, command, None, claim)
    assert launch.is_busy(run.folder)
    assert local.claimed(run, rerun_failed=False) is None
    process.kill()
    process.wait()
    assert not launch.is_busy(run.folder)


def test_a_run_that_failed_under_another_launcher_is_not_rerun(tmp_path, capsys, monkeypatch):
    arguments = one_run(tmp_path)
    folder = tmp_path / "six/ed/seed0"
    freeze = launch.freeze

    def frozen_while_another_ran(*given):
        freeze(*given)
        (folder / "FAILED").write_text("exit 1: error: too bad\n")

    monkeypatch.setattr(launch, "freeze", frozen_while_another_ran)
    monkeypatch.setattr(launch, "command", finishing)
    assert launch.main(arguments) == 1
    output = capsys.readouterr().out
    assert "start" not in output
    assert "seed 0  failed   exit 1: error: too bad" in output
    assert launch.main([*arguments, "--rerun-failed"]) == 0


def test_a_run_stays_claimed_until_its_failure_is_recorded(tmp_path, monkeypatch):
    """Without the claim, another launcher could start it before FAILED is written."""
    monkeypatch.setattr(launch, "command", stand_in("raise SystemExit('error: too bad')"))
    finish, seen = local.finish, []

    def finish_late(run, *rest):
        seen.append(launch.is_busy(run.folder))
        finish(run, *rest)

    monkeypatch.setattr(local, "finish", finish_late)
    arguments = one_run(tmp_path)
    assert launch.main(arguments) == 1
    assert seen == [True]
    (run,) = expand(load_table(arguments[0]), cells=["ed"], seeds=[0], root=tmp_path)
    assert not launch.is_busy(run.folder)


def test_a_signal_after_the_run_is_complete_does_not_make_it_stopped(tmp_path, capsys):
    (run, *_) = expand(load_table(write_table(tmp_path)), root=tmp_path)
    run.folder.mkdir(parents=True)
    local.finish(run, -signal.SIGTERM)
    (run.folder / "DONE").touch()
    local.finish(run, -signal.SIGTERM)
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["stopped", "done"]


def test_a_run_claimed_by_another_launcher_is_skipped(tmp_path, capsys, monkeypatch):
    arguments = one_run(tmp_path)
    monkeypatch.setattr(launch, "command", stand_in("raise SystemExit(75)"))
    # as if another launcher had just claimed it
    monkeypatch.setattr(launch, "is_due", lambda *_: True)
    launch.main(arguments)
    capsys.readouterr()
    folder = tmp_path / "six/ed/seed0"
    with open(folder / local.CLAIM) as claim, open(folder / ".lock") as engine:
        assert local.lock(claim)
        assert local.lock(engine)
        assert launch.main(arguments) == 75
    output = capsys.readouterr()
    assert output.err == ""
    assert "start" not in output.out
    assert "1 run: 1 running" in output.out
    with open(folder / ".lock") as engine:  # started by train.py without a launcher
        assert local.lock(engine)
        assert launch.main([*arguments, "--status"]) == 75
    assert "1 run: 1 running" in capsys.readouterr().out
    (folder / "DONE").touch()  # finished in the meantime
    (run,) = expand(load_table(arguments[0]), cells=["ed"], seeds=[0], root=tmp_path)
    assert local.claimed(run, rerun_failed=False) is None


def test_an_interrupted_run_does_not_count_as_running_on_nfs(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(launch, "command", stand_in("raise SystemExit(75)"))
    arguments = one_run(tmp_path)
    launch.main(arguments)
    plain = fcntl.flock

    def flock(file, operation):
        """Acts like NFS, where an exclusive lock requires a writable file."""
        if operation & fcntl.LOCK_EX and not file.writable():
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        plain(file, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    capsys.readouterr()
    assert launch.main([*arguments, "--status"]) == 75
    assert "1 run: 1 pending" in capsys.readouterr().out


@pytest.mark.parametrize("number", [errno.EACCES, errno.ENOLCK])
def test_an_inaccessible_lock_is_a_one_line_error(tmp_path, capsys, monkeypatch, number):
    monkeypatch.setattr(launch, "command", stand_in("raise SystemExit(75)"))
    arguments = one_run(tmp_path)
    launch.main(arguments)

    def flock(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    capsys.readouterr()
    assert launch.main([*arguments, "--status"]) == 1
    path = tmp_path / "six/ed/seed0" / local.CLAIM
    assert f"{path}: {os.strerror(number)}" in capsys.readouterr().out
    assert launch.main(arguments) == 1  # not started, since it may be running
    assert capsys.readouterr().err.startswith(f"error: {path}: {os.strerror(number)}")
