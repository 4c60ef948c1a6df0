"""The launcher: a table killed in the middle ends like an undisturbed one; nothing runs twice."""

import contextlib
import errno
import fcntl
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml

from ed.analysis.collect import collect, columns, merge
from ed.analysis.experiments import load_table
from ed.analysis.render import to_csv, to_markdown
from ed.analysis.spec import expand
from scripts import launch
from tests.tables import fabricate

ROOT = Path(__file__).parents[1]
STEPS = 20
SPEC = {
    "title": "Six small runs",
    "place": "A test",
    "metric": "eval/acc",
    "seeds": [0, 1, 2],
    "fixed": [
        "task=cifar10_mini",
        "debug=tiny",
        "task.batch_size=100",
        "model=vit_micro",
        "model.width=16",
        "model.depth=1",
        "system.log_every=1",
        "system.save_seconds=0",
    ],
    "cells": {
        "ed": {
            "overrides": ["regularizer=ed", "regularizer.weight=7", "regularizer.pairs=50"],
            "paper": None,
        },
        "none": {"overrides": ["regularizer=none"], "paper": None},
    },
}


def write_table(folder: Path, **changes) -> str:
    path = folder / "six.yaml"
    path.write_text(yaml.safe_dump(SPEC | changes, sort_keys=False))
    return str(path)


def one_run(folder: Path) -> list[str]:
    """Arguments of the launcher for the first run of the table."""
    return [write_table(folder), "--runs", str(folder), "--cells", "ed", "--seeds", "0"]


def wait_for(condition, what: str, seconds: float = 240.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.02)
    raise AssertionError(f"waited {seconds} s for {what}")


def children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def logged(folder: Path) -> list[int]:
    """Steps whose training metrics were logged."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [row["step"] for row in map(json.loads, lines) if "train/loss" in row]


def steps_of(run) -> int:
    return len(logged(run.folder))


def train_undisturbed(runs) -> None:
    from ed.engine.compose import compose_config
    from ed.engine.main import run as train

    for run in runs:
        train(compose_config([*run.overrides, f"system.run_dir={run.folder}"]), ["six"])


def rendered(table, root: Path) -> tuple[str, list[str]]:
    """The table and its CSV lines, but for the time that the runs took."""
    rows = merge(collect(table, [root]))
    text = re.sub(r"[\d.]+ hours", "some hours", to_markdown(table, rows))
    lines = to_csv(table, rows).splitlines()
    place = columns(table).index("seconds")
    fields = [line.split(",") for line in lines]
    return text, [",".join(f[:place] + f[place + 1 :]) for f in fields]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds processes through /proc")
def test_killed_launcher_and_runs_end_like_undisturbed_ones(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # the same sums in the same order
    path, root = write_table(tmp_path, seeds=[0, 1]), tmp_path / "runs"
    table = load_table(path)
    runs = expand(table, root=root)
    arguments = [path, "--runs", str(root), "--jobs", "2"]
    first = subprocess.Popen([sys.executable, "scripts/launch.py", *arguments], cwd=ROOT)
    active = wait_for(lambda: c if len(c := children(first.pid)) == 2 else None, "two runs")
    first.kill()
    first.wait()
    # the two go on without their launcher, and are not started again, though they hold no lock of
    # the engine's yet
    assert launch.main([path, "--runs", str(root), "--status"]) == 75
    assert "4 runs: 2 running, 2 pending" in capsys.readouterr().out
    wait_for(lambda: any(steps_of(run) >= 2 for run in runs), "a run in the middle")
    for pid in active:
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not any(launch.is_locked(run, launch.CLAIM) for run in runs), "their end")
    assert not all(map(launch.is_done, runs[:2])), "killed too late to show anything"

    second = subprocess.run(
        [sys.executable, "scripts/launch.py", *arguments], cwd=ROOT, check=False
    )
    assert second.returncode == 0
    capsys.readouterr()
    assert launch.main(arguments) == 0  # a third time there is nothing to do
    output = capsys.readouterr().out
    assert "4 runs: 4 done" in output
    assert "start" not in output
    for index, run in enumerate(runs):
        sessions = json.loads((run.folder / "meta.json").read_text())["sessions"]
        assert len(sessions) <= (2 if index < 2 else 1)
        assert logged(run.folder) == list(range(1, STEPS + 1))  # none missing, none twice

    train_undisturbed(expand(table, root=tmp_path / "undisturbed"))
    assert rendered(table, root) == rendered(table, tmp_path / "undisturbed")


# --- with stand-ins for the training, so that the launcher alone is tested


def stand_in(code: str):
    return lambda run: [sys.executable, "-c", code, str(run.folder)]


def finishing(run) -> list[str]:
    code = "import sys, pathlib; pathlib.Path(sys.argv[1], 'DONE').write_text(sys.argv[2])"
    summary = {"last": {"eval/acc": 1.0}, "best": {"eval/acc": 1.0}, "steps": 1, "seconds": 1.0}
    return [*stand_in(code)(run), json.dumps(summary)]


def test_failures_keep_their_last_line_and_run_again_only_when_asked(tmp_path, capsys, monkeypatch):
    arguments = one_run(tmp_path)
    code = "import os, sys; sys.exit('error: too bad in ' + os.getcwd())"
    monkeypatch.setattr(launch, "command", stand_in(code))
    monkeypatch.chdir(tmp_path)  # where train.py is not
    assert launch.main(arguments) == 1
    assert f"seed 0  failed   exit 1: error: too bad in {ROOT}" in capsys.readouterr().out
    monkeypatch.setattr(launch, "command", finishing)
    assert launch.main(arguments) == 1
    output = capsys.readouterr().out
    assert "start" not in output
    assert "--rerun-failed runs them again" in output
    assert launch.main([*arguments, "--rerun-failed"]) == 0
    assert "ed  seed 0  done     1\n" in capsys.readouterr().out  # its accuracy
    assert not (tmp_path / "six/ed/seed0/FAILED").exists()


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("import os; os._exit(3)", "exit 3: no output"),
        ("import os; os.write(1, b'\\xff bad\\n \\n'); os._exit(1)", "exit 1: \ufffd bad"),
    ],
)
def test_failures_are_told_whatever_the_run_has_said(tmp_path, monkeypatch, code, told):
    monkeypatch.setattr(launch, "command", stand_in(code))
    assert launch.main(one_run(tmp_path)) == 1
    assert (tmp_path / "six/ed/seed0/FAILED").read_text() == f"{told}\n"


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("raise SystemExit(75)", "pending"),
        ("import os; os.kill(os.getpid(), 9)", "pending"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGHUP)", "pending"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGUSR2)", "pending"),
        (
            "import sys; open(sys.argv[1] + '/metrics.jsonl', 'w').write('{\"step\": 3}\\n')\n"
            "raise SystemExit(75)",
            "partial",
        ),
    ],
)
def test_interrupted_runs_are_not_failures(tmp_path, capsys, monkeypatch, code, status):
    arguments = one_run(tmp_path)
    monkeypatch.setattr(launch, "command", stand_in(code))
    for _ in range(2):  # and are started again by the same command
        assert launch.main(arguments) == 75
        output = capsys.readouterr().out
        assert "start   six/ed/seed0" in output
        assert ("3 of ? steps" in output) == (status == "partial")
        assert f"1 runs: 1 {status}" in output


def test_a_run_is_claimed_until_it_has_ended(tmp_path, monkeypatch):
    """From the start, before it has a lock of its own, and by itself: launchers may be killed."""
    monkeypatch.setattr(launch, "command", stand_in("import time; time.sleep(60)"))
    (run, *_) = expand(load_table(write_table(tmp_path)), root=tmp_path)
    run.folder.mkdir(parents=True)
    with launch.claimed(run, rerun_failed=False) as claim:
        process = launch.start(run, None, claim)
    assert launch.is_busy(run)
    assert launch.claimed(run, rerun_failed=False) is None
    process.kill()
    process.wait()
    assert not launch.is_busy(run)


def test_a_run_that_failed_under_another_launcher_meanwhile_is_not_run_again(
    tmp_path, capsys, monkeypatch
):
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


def test_a_run_stays_claimed_until_its_failure_is_written_down(tmp_path, monkeypatch):
    """Else another launcher could take it between its end and the mark."""
    monkeypatch.setattr(launch, "command", stand_in("raise SystemExit('error: too bad')"))
    finish, seen = launch.finish, []

    def finish_late(run, code):
        seen.append(launch.is_busy(run))
        finish(run, code)

    monkeypatch.setattr(launch, "finish", finish_late)
    arguments = one_run(tmp_path)
    assert launch.main(arguments) == 1
    assert seen == [True]
    (run,) = expand(load_table(arguments[0]), cells=["ed"], seeds=[0], root=tmp_path)
    assert not launch.is_busy(run)


@pytest.mark.parametrize("asked", [signal.SIGTERM, signal.SIGINT])
def test_stopping_the_launcher_lets_its_runs_save(tmp_path, capsys, monkeypatch, asked):
    code = (
        "import signal, sys, time, pathlib\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n"
        "pathlib.Path(sys.argv[1], 'ready').touch()\n"
        "try: time.sleep(60)\n"
        "finally: pathlib.Path(sys.argv[1], 'saved').touch()"
    )
    monkeypatch.setattr(launch, "command", stand_in(code))
    ready = tmp_path / "six/ed/seed0/ready"

    def stop():
        wait_for(ready.exists, "the run")
        os.kill(os.getpid(), asked)

    threading.Thread(target=stop).start()
    code = None
    # a shell's script lets what it starts in the background ignore SIGINT: these tests, perhaps
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt):  # which would end all tests
        code = launch.main([write_table(tmp_path), "--runs", str(tmp_path), "--jobs", "1"])
    signal.signal(signal.SIGINT, before)
    assert code == 75
    output = capsys.readouterr().out
    assert "stopped six/ed/seed0" in output
    assert ready.with_name("saved").exists()
    assert output.count("start") == 1
    assert "6 runs: 6 pending" in output


def test_one_gpu_each_where_there_are_several(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    code = (
        "import os, sys; open(sys.argv[1] + '/gpu', 'w').write(os.environ['CUDA_VISIBLE_DEVICES'])"
    )
    monkeypatch.setattr(launch, "command", stand_in(code + "; import time; time.sleep(0.5)"))
    arguments = [write_table(tmp_path), "--runs", str(tmp_path), "--cells", "ed"]
    launch.main([*arguments, "--seeds", "0", "1"])
    assert [(tmp_path / f"six/ed/seed{k}/gpu").read_text() for k in (0, 1)] == ["3", "5"]


def test_several_runs_share_one_gpu_at_the_same_time(tmp_path, monkeypatch):
    """Each waits until all three are there, which only runs at the same time can see."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    code = (
        "import os, pathlib, sys, time\n"
        "own = pathlib.Path(sys.argv[1])\n"
        "(own / 'gpu').write_text(os.environ['CUDA_VISIBLE_DEVICES'])\n"
        "end = time.monotonic() + 30\n"
        "while len(list(own.parent.glob('*/gpu'))) < 3 and time.monotonic() < end:\n"
        "    time.sleep(0.02)\n"
        "(own / 'saw').write_text(str(len(list(own.parent.glob('*/gpu')))))"
    )
    monkeypatch.setattr(launch, "command", stand_in(code))
    launch.main([write_table(tmp_path), "--runs", str(tmp_path), "--cells", "ed", "--jobs", "3"])
    folders = [tmp_path / f"six/ed/seed{k}" for k in (0, 1, 2)]
    assert [(folder / "gpu").read_text() for folder in folders] == ["3"] * 3
    assert [(folder / "saw").read_text() for folder in folders] == ["3"] * 3
    frozen = [yaml.safe_load((folder / "config.yaml").read_text()) for folder in folders]
    assert [config["seed"] for config in frozen] == [0, 1, 2]  # composed once, each its own
    assert [config["system"]["run_dir"] for config in frozen] == [str(f) for f in folders]


@pytest.mark.parametrize(
    ("jobs", "gpus", "has_mps", "told"),
    [
        (3, 1, False, "3 runs share 1 GPU; nvidia-cuda-mps-control -d"),
        (8, 2, False, "8 runs share 2 GPUs; nvidia-cuda-mps-control -d"),
        (3, 1, True, None),
        (2, 2, False, None),
        (3, 0, False, None),  # no GPU: they share cores
    ],
)
def test_runs_that_share_a_gpu_get_a_hint_of_mps(jobs, gpus, has_mps, told):
    hint = launch.sharing_hint(jobs, gpus, has_mps=has_mps)
    assert hint is None if told is None else told in hint


def test_the_hint_counts_the_runs_that_are_due_and_ends_with_mps(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path / "mps"))
    monkeypatch.setattr(launch, "command", stand_in("raise SystemExit(75)"))
    arguments = [write_table(tmp_path), "--runs", str(tmp_path), "--cells", "ed", "--jobs", "8"]
    launch.main(arguments)
    (hint,) = capsys.readouterr().err.splitlines()
    assert hint.startswith("hint: 3 runs share 1 GPU; ")
    launch.main([*arguments, "--seeds", "0"])
    assert capsys.readouterr().err == ""
    (tmp_path / "mps").mkdir()
    (tmp_path / "mps/control").touch()
    launch.main(arguments)
    assert capsys.readouterr().err == ""


def test_gpus_are_those_of_the_environment_or_all_of_the_machine(tmp_path, monkeypatch):
    fake(tmp_path, "nvidia-smi", "printf 'GPU 0: A100\\n  MIG 1g.5gb\\nGPU 1: A100\\n'")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for given, seen in (("3,5", ["3", "5"]), ("", []), (None, ["0", "1"])):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if given is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
        assert launch.visible_gpus() == seen
    fake(tmp_path, "nvidia-smi", "echo NVIDIA-SMI has failed; exit 9")
    assert launch.visible_gpus() == []
    monkeypatch.setenv("PATH", "")
    assert launch.visible_gpus() == []


def test_configs_are_frozen_at_launch_and_disagreement_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(launch, "command", stand_in("raise SystemExit(75)"))
    arguments = ["--runs", str(tmp_path / "runs")]
    launch.main([write_table(tmp_path), *arguments])
    runs = tmp_path / "runs/six"
    frozen = runs / "ed/seed0/config.yaml"
    assert yaml.safe_load(frozen.read_text())["regularizer"]["weight"] == 7
    before = frozen.read_bytes()
    cells = {"ed": {"overrides": ["regularizer=ed", "regularizer.degree=2"], "paper": None}}
    edited = write_table(tmp_path, cells=cells)
    # what is to be moved away: all that was launched, but nothing that has begun
    for begun, moved in (
        ("a note", f"{runs}, where no run has begun,"),
        ("none/seed0/meta.json", f"{runs}/ed, where no run has begun,"),
        ("ed/seed1/meta.json", f"{runs}/ed/seed0"),
        ("ed/seed1/metrics.jsonl", f"{runs}/ed/seed0"),
        ("ed/seed1/DONE", f"{runs}/ed/seed0"),
    ):
        (runs / begun).touch()
        assert launch.main([edited, *arguments]) == 1
        assert capsys.readouterr().err == (
            f"error: {frozen} has regularizer.degree=3, but the table says 2: it is another run; "
            f"move {moved} away and launch again\n"
        )
        (runs / begun).unlink()
    cells = {"ed": {"overrides": ["regularizer=none"], "paper": None}}
    assert launch.main([write_table(tmp_path, cells=cells), *arguments, "--seeds", "0"]) == 1
    built = "has regularizer._target_=ed.regularizers.ed.EffectiveDegree, but the table says"
    assert built in capsys.readouterr().err
    cells = {"ed": {"overrides": ["regularizer=ed"], "paper": None}}  # without what it had named
    assert launch.main([write_table(tmp_path, cells=cells), *arguments, "--seeds", "0"]) == 1
    refused = capsys.readouterr().err
    assert "holds a run with another config" in refused
    assert refused.endswith(", or move that folder away\n")  # the table decides system.run_dir
    assert frozen.read_bytes() == before


def test_seeds_that_would_differ_are_told_before_they_run(tmp_path, capsys, monkeypatch):
    """A choice that builds the same class with other settings, as a model of another depth."""
    monkeypatch.setattr(launch, "command", finishing)
    arguments = [write_table(tmp_path), "--runs", str(tmp_path / "runs"), "--cells", "ed"]
    launch.main([*arguments, "--seeds", "0"])
    assert "warning" not in capsys.readouterr().err
    path = tmp_path / "runs/six/ed/seed0/config.yaml"
    config = yaml.safe_load(path.read_text())
    config["model"]["heads"] = 7
    path.write_text(yaml.safe_dump(config))
    launch.main([*arguments, "--seeds", "0", "1"])
    warning = "warning: six/ed: seeds differ in model.heads: 7 (seed 0), "
    assert capsys.readouterr().err.startswith(warning)


def test_a_run_that_another_launcher_has_begun_meanwhile_is_left_alone(
    tmp_path, capsys, monkeypatch
):
    arguments = one_run(tmp_path)
    monkeypatch.setattr(launch, "command", stand_in("raise SystemExit(75)"))
    monkeypatch.setattr(launch, "is_due", lambda *_: True)  # what it was a moment before
    launch.main(arguments)
    capsys.readouterr()
    folder = tmp_path / "six/ed/seed0"
    with open(folder / launch.CLAIM) as claim, open(folder / ".lock") as engine:
        assert launch.lock(claim)
        assert launch.lock(engine)
        assert launch.main(arguments) == 75
    output = capsys.readouterr()
    assert output.err == ""
    assert "start" not in output.out
    assert "1 runs: 1 running" in output.out
    with open(folder / ".lock") as engine:  # begun by train.py alone
        assert launch.lock(engine)
        assert launch.main([*arguments, "--status"]) == 75
    assert "1 runs: 1 running" in capsys.readouterr().out
    (folder / "DONE").touch()  # or ended meanwhile
    (run,) = expand(load_table(arguments[0]), cells=["ed"], seeds=[0], root=tmp_path)
    assert launch.claimed(run, rerun_failed=False) is None


def test_an_interrupted_run_does_not_look_running_on_nfs(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(launch, "command", stand_in("raise SystemExit(75)"))
    arguments = one_run(tmp_path)
    launch.main(arguments)
    plain = fcntl.flock

    def flock(file, operation):
        """There an exclusive lock is one of all bytes, for which the file must be writable."""
        if operation & fcntl.LOCK_EX and not file.writable():
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        plain(file, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    capsys.readouterr()
    assert launch.main([*arguments, "--status"]) == 75
    assert "1 runs: 1 pending" in capsys.readouterr().out


@pytest.mark.parametrize("number", [errno.EACCES, errno.ENOLCK])
def test_a_lock_that_cannot_be_read_is_an_error_of_one_line(tmp_path, capsys, monkeypatch, number):
    monkeypatch.setattr(launch, "command", stand_in("raise SystemExit(75)"))
    arguments = one_run(tmp_path)
    launch.main(arguments)

    def flock(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    capsys.readouterr()
    assert launch.main([*arguments, "--status"]) == 1
    path = tmp_path / "six/ed/seed0" / launch.CLAIM
    assert capsys.readouterr().err == (
        f"error: {path}: {os.strerror(number)}, so whether this run is running is unknown\n"
    )


@pytest.mark.parametrize("more", [[], ["--status"], ["--where", "print"]])
def test_a_file_in_place_of_the_runs_is_refused(tmp_path, capsys, more):
    (tmp_path / "file").touch()
    arguments = [write_table(tmp_path), "--runs", str(tmp_path / "file"), *more]
    assert launch.main(arguments) == 1
    assert capsys.readouterr().err == f"error: --runs {tmp_path}/file: not a folder\n"
    (run, *_) = expand(load_table(arguments[0]), root=tmp_path / "file")
    assert not launch.is_locked(run, ".lock")


def test_a_run_that_began_before_it_failed_keeps_its_settings_and_its_log(
    tmp_path, capsys, monkeypatch
):
    begun = "import pathlib, sys; pathlib.Path(sys.argv[1], 'meta.json').write_text('{}'); "
    monkeypatch.setattr(launch, "command", stand_in(begun + "sys.exit('error: too bad')"))
    arguments = one_run(tmp_path)
    for again in ([], ["--rerun-failed"]):
        assert launch.main([*arguments, "--data", "./here", *again]) == 1
    assert capsys.readouterr().err == ""
    folder = tmp_path / "six/ed/seed0"
    assert (folder / "output.log").read_text() == "error: too bad\n" * 2
    before = (folder / "config.yaml").read_bytes()
    assert launch.main([*arguments, "--data", "./elsewhere", "--rerun-failed"]) == 1
    assert "holds a run with another config" in capsys.readouterr().err
    assert (folder / "config.yaml").read_bytes() == before


def test_data_may_lie_elsewhere_once_they_are_found(tmp_path, capsys, monkeypatch):
    """A run that never began holds no one to its settings; a finished one is as good as any."""
    arguments = one_run(tmp_path)
    monkeypatch.setattr(launch, "command", stand_in("raise SystemExit('error: no such folder')"))
    assert launch.main([*arguments, "--data", "./nowhere"]) == 1
    assert launch.main([*arguments, "--data", "./here"]) == 1  # failed is failed
    monkeypatch.setattr(launch, "command", finishing)
    assert launch.main([*arguments, "--data", "./here", "--rerun-failed"]) == 0
    config = (tmp_path / "six/ed/seed0/config.yaml").read_text()
    assert yaml.safe_load(config)["task"]["data"] == "./here"
    assert launch.main([*arguments, "--data", "./elsewhere"]) == 0
    assert capsys.readouterr().err == ""


def test_a_mistake_in_the_table_is_mended_there(tmp_path, capsys, monkeypatch):
    """What such a run was to be before it failed at once is nobody's concern."""
    arguments = ["--runs", str(tmp_path), "--cells", "ed", "--seeds", "0"]
    wrong, right = (
        {"ed": {"overrides": ["regularizer=ed", f"regularizer.weight={weight}"], "paper": None}}
        for weight in ("seven", 7)
    )
    monkeypatch.setattr(launch, "command", stand_in("raise SystemExit('error: weight=seven')"))
    assert launch.main([write_table(tmp_path, cells=wrong), *arguments]) == 1
    mended = write_table(tmp_path, cells=right)
    assert launch.main([mended, *arguments]) == 1  # failed is failed
    assert "failed   exit 1: error: weight=seven" in capsys.readouterr().out
    monkeypatch.setattr(launch, "command", finishing)
    assert launch.main([mended, *arguments, "--rerun-failed"]) == 0
    config = yaml.safe_load((tmp_path / "six/ed/seed0/config.yaml").read_text())
    assert config["regularizer"]["weight"] == 7
    assert capsys.readouterr().err == ""


def test_a_table_may_choose_parts_of_ones_own(tmp_path, capsys, monkeypatch):
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


def test_reduced_runs_go_to_their_own_folder_and_say_so(tmp_path, monkeypatch):
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
    assert noted == {"six", "other"}  # both find the runs


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["tabel1"], "unknown table 'tabel1'; did you mean table1"),
        (["table1", "--cells", "basline"], "table1 has no cell 'basline'; did you mean baseline"),
        (
            ["basis", "--set", "task.epoch=1"],
            "cell efficiency does not compose: unknown key 'task.epoch'; did you mean task.epochs",
        ),
        (
            ["basis", "--set", "++task.epochs=1"],
            "--set ++task.epochs=1: write key=value, without +",
        ),
        (
            ["basis", "--set", "~optimizer.clip"],
            "--set ~optimizer.clip: write key=value, without ~",
        ),
        (["basis", "--data", "embedded"], "--data embedded: that is a small part of the set"),
        (["basis", "--where", "slurm"], "no sbatch on this machine"),
    ],
)
def test_mistakes_get_one_line_and_leave_nothing(
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


def test_print_shows_commands_and_runs_nothing(tmp_path, capsys, monkeypatch):
    assert (
        launch.main(["table1", "--where", "print", "--cells", "sam", "--runs", str(tmp_path)]) == 0
    )
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 18
    assert "train.py task=cifar10" in lines[0]
    assert "seed=0 logger.group=table1/sam_rho-0.01 " in lines[0]  # how wandb groups them
    assert lines[0].endswith(f"system.run_dir={tmp_path}/table1/sam_rho-0.01/seed0")
    assert not list(tmp_path.iterdir())
    done = tmp_path / "table1/sam_rho-0.01/seed0"
    done.mkdir(parents=True)
    (done / "DONE").touch()
    monkeypatch.chdir(tmp_path.parent)  # runs start in another folder than the launcher's
    launch.main(["table1", "--where", "print", "--cells", "sam", "--runs", tmp_path.name])
    assert capsys.readouterr().out.splitlines() == lines[1:]


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
def test_hydra_reads_any_path_as_it_is(value):
    from hydra.core.override_parser.overrides_parser import OverridesParser

    override = OverridesParser.create().parse_override(f"key={launch.quoted(value)}")
    assert override.value() == value
    assert (launch.quoted(value) == value) == (value in PLAIN)


def test_a_path_with_special_characters_reaches_the_run(tmp_path, capsys, monkeypatch):
    from ed.engine.compose import compose_config

    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
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


def test_data_are_looked_up_where_the_user_stands(tmp_path, monkeypatch):
    (tmp_path / "pics").mkdir()
    monkeypatch.chdir(tmp_path)
    assert launch.located("./pics") == f"task.data={tmp_path}/pics"
    assert launch.located("task.mnist=pics") == f"task.mnist={tmp_path}/pics"
    assert launch.located("uoft-cs/cifar10") == "task.data=uoft-cs/cifar10"  # of the hub
    assert launch.located("task.data=") == "task.data=''"
    monkeypatch.chdir(ROOT)  # as ever, so that runs that began so go on
    assert launch.located("./tests") == "task.data=./tests"


def test_reduced_runs_of_printed_commands_are_found_as_well(tmp_path, capsys):
    arguments = [*one_run(tmp_path), "--where", "print", "--set", "task.epochs=1"]
    assert launch.main(arguments) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert "train.py task=cifar10" in line
    table = load_table(arguments[0])
    (run,) = expand(table, cells=["ed"], seeds=[0], sets=["task.epochs=1"], root=tmp_path)
    assert not run.folder.exists()
    fabricate(run, 80.0)  # as the command would
    (row,) = (row for row in collect(table, [tmp_path]) if row.status == "done")
    assert row.deviations == "task.epochs=1"


def test_commands_for_another_machine_are_printed_with_a_hint(tmp_path, capsys, monkeypatch):
    def mkdir(self, **_):
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    arguments = [*one_run(tmp_path), "--where", "print", "--set", "task.epochs=1"]
    monkeypatch.setattr(Path, "mkdir", mkdir)
    assert launch.main(arguments) == 0
    output = capsys.readouterr()
    assert len(output.out.splitlines()) == 1
    assert output.err.startswith(f"hint: {tmp_path}/six@epochs1-")
    assert output.err.count("\n") == 1


# --- SLURM's commands replaced by small scripts; the real one has its own test


def fake(folder: Path, name: str, body: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)


def test_an_array_is_submitted_once_and_its_tasks_do_their_lines(tmp_path, capsys, monkeypatch):
    binaries = tmp_path / "bin"
    binaries.mkdir()
    monkeypatch.setenv("PATH", f"{binaries}:{os.environ['PATH']}")
    fake(binaries, "sinfo", "echo ci")
    fake(binaries, "sbatch", "echo '42;cluster'")  # as where there are several
    fake(binaries, "squeue", "printf '42_%s\\n' {0..5}")
    monkeypatch.setattr(launch, "command", stand_in("raise SystemExit(75)"))
    arguments = [write_table(tmp_path), "--runs", str(tmp_path / "runs"), "--where", "slurm"]
    assert launch.main([*arguments, "--jobs", "3", "--partition", "ci"]) == 0
    assert "job 42: 6 runs" in capsys.readouterr().out
    (folder,) = (tmp_path / "runs/.slurm").iterdir()
    script = (folder / "array.sh").read_text()
    assert "--array=0-5%3" in script
    assert "#SBATCH --partition=ci" in script
    assert len((folder / "jobs.txt").read_text().splitlines()) == 6
    assert launch.main(arguments) == 0  # all are queued: nothing is submitted again
    assert "nothing to submit" in capsys.readouterr().out
    assert launch.main([*arguments[:3], "--status"]) == 75
    assert "6 runs: 6 queued" in capsys.readouterr().out

    fake(binaries, "srun", 'exec "$@"')
    fake(binaries, "scontrol", f'echo "$@" > {tmp_path}/requeued')
    task = os.environ | {"SLURM_ARRAY_TASK_ID": "1", "SLURM_JOB_ID": "43"}
    assert subprocess.run(["bash", folder / "array.sh"], env=task, check=False).returncode == 75
    assert (tmp_path / "requeued").read_text() == "requeue 43\n"
    (tmp_path / "requeued").unlink()
    mark = tmp_path / "runs/six/ed/seed1/FAILED"
    fake(binaries, "srun", "exit 140")  # USR2 while Python was importing
    for restarts, requeued in (("9", True), ("10", False)):
        early = task | {"SLURM_RESTART_COUNT": restarts}
        assert (
            subprocess.run(["bash", folder / "array.sh"], env=early, check=False).returncode == 140
        )
        assert (tmp_path / "requeued").exists() == requeued == (not mark.exists())
        (tmp_path / "requeued").unlink(missing_ok=True)
    assert mark.read_text() == "exit 140 (USR2): no output\n"
    fake(binaries, "srun", 'exec "$@"')
    jobs = folder / "jobs.txt"
    jobs.write_text(
        jobs.read_text().replace("raise SystemExit(75)", 'raise SystemExit("error: x")')
    )
    assert subprocess.run(["bash", folder / "array.sh"], env=task, check=False).returncode == 1
    assert mark.read_text() == "exit 1: error: x\n"


@pytest.mark.parametrize(
    ("srun", "code", "mark"),
    [
        ("echo step 7; exit 139", 139, "exit 139 (SEGV): step 7\n"),
        ("echo step 7; exit 137", 137, "exit 137 (KILL): step 7\n"),  # as for memory
        ("exit 143", 143, None),  # TERM while Python was importing
        (
            # one of two processes fails, and the other, which srun ends, has the higher code
            "printf 'error: x\\nframe #0: main\\n\\n'; "
            "echo srun: error: n1: task 0: Exited with exit code 1 >&2; exit 143",
            1,
            "exit 1: error: x\n",
        ),
        ("echo srun: error: n1: tasks 0-1: Exited with exit code 75 >&2; exit 75", 75, None),
        (
            # one is told to stop before it can save, and the other loses its partner
            "echo srun: error: n1: task 0: User defined signal 2 >&2; "
            "echo srun: error: n1: task 1: Exited with exit code 1 >&2; exit 140",
            140,
            None,
        ),
    ],
)
def test_a_task_that_crashes_is_marked_and_not_requeued(tmp_path, monkeypatch, srun, code, mark):
    from scripts.slurm import submit

    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    fake(tmp_path, "sbatch", "echo 42")
    fake(tmp_path, "scontrol", f"touch {tmp_path}/requeued")
    fake(tmp_path, "srun", srun)
    run = tmp_path / "a run"
    run.mkdir()
    earlier = "error: y\nsrun: error: n1: task 0: Exited with exit code 2\n"
    (run / "output.log").write_text(earlier)
    (run / "FAILED").write_text("exit 2: error: y\n")
    submit(tmp_path, "six", {run: ["true"]}, root=tmp_path, parallel=1, settings={})
    (script,) = tmp_path.glob(".slurm/*/array.sh")
    environment = os.environ | {"SLURM_ARRAY_TASK_ID": "0", "SLURM_JOB_ID": "43"}
    task = subprocess.run(["bash", script], env=environment, check=False)
    assert task.returncode == code
    assert ((run / "FAILED").read_text() if (run / "FAILED").exists() else None) == mark
    assert (tmp_path / "requeued").exists() == (mark is None)


def test_an_unknown_partition_is_refused_before_anything_is_written(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    fake(tmp_path, "sinfo", "printf 'ci\\nlong\\n'")
    fake(tmp_path, "sbatch", f"touch {tmp_path}/submitted")
    arguments = [write_table(tmp_path), "--runs", str(tmp_path / "runs"), "--where", "slurm"]
    assert launch.main([*arguments, "--partition", "gpu"]) == 1
    error = capsys.readouterr().err
    assert error == "error: --partition gpu: no such partition; there are ci, long\n"
    assert not (tmp_path / "runs").exists()
    assert not (tmp_path / "submitted").exists()


@pytest.mark.parametrize("gres", ["gpu:4", "gpu:h100:4"])
def test_several_gpus_are_a_process_each(tmp_path, capsys, monkeypatch, gres):
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name, answer in (("sinfo", "ci"), ("sbatch", "42"), ("squeue", "")):
        fake(tmp_path, name, f"echo {answer}")
    arguments = [write_table(tmp_path), "--runs", str(tmp_path / "runs")]
    asked = ["--where", "slurm", "--gpus", "4", "--nodes", "2", "--cpus", "16"]
    asked += ["--time", "02:00:00"]
    asked += [] if gres == "gpu:4" else ["--gres", gres]
    assert launch.main([*arguments, *asked]) == 0
    (folder,) = (tmp_path / "runs/.slurm").iterdir()
    lines = (folder / "array.sh").read_text().splitlines()
    assert "#SBATCH --array=0-5%8" in lines  # unless --jobs says otherwise
    wanted = ["#SBATCH --nodes=2", "#SBATCH --ntasks-per-node=4", f"#SBATCH --gres={gres}"]
    wanted += ["#SBATCH --cpus-per-task=16", "#SBATCH --time=02:00:00"]
    assert set(wanted) <= set(lines)
    for option in ("--gpus", "--jobs"):
        with pytest.raises(SystemExit):
            launch.main([*arguments, "--where", "slurm", option, "0"])
        assert f"{option} 0: at least 1" in capsys.readouterr().err


@pytest.mark.parametrize("where", [[], ["--where", "local"], ["--where", "print"], ["--status"]])
@pytest.mark.parametrize(
    "setting",
    [
        "--partition long",
        "--time 02:00:00",
        "--gres gpu:1",
        "--gpus 4",
        "--nodes 2",
        "--cpus 8",
    ],
)
def test_what_only_slurm_heeds_is_refused_elsewhere(setting, where, capsys):
    with pytest.raises(SystemExit) as ended:
        launch.main(["table1", *where, *setting.split()])
    assert ended.value.code == 2
    assert f"error: {setting}: only with --where slurm" in capsys.readouterr().err


def test_what_slurm_says_is_shown_in_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    fake(tmp_path, "sinfo", "echo ci")
    fake(
        tmp_path,
        "sbatch",
        "printf 'sbatch: error: too long\\nsbatch: error: failed\\n' >&2; exit 1",
    )
    arguments = [write_table(tmp_path), "--runs", str(tmp_path / "runs"), "--where", "slurm"]
    assert launch.main([*arguments, "--partition", "ci"]) == 1
    assert capsys.readouterr().err == "error: sbatch: too long; failed\n"
    assert not list((tmp_path / "runs/.slurm").iterdir())


def test_a_run_counts_as_free_only_if_slurm_says_so(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    arguments = [write_table(tmp_path), "--runs", str(tmp_path), "--status", "--cells", "ed"]
    folder = tmp_path / "six/ed/seed0"
    folder.mkdir(parents=True)
    (folder / "slurm.json").write_text('{"job": "42", "task": 0}')
    fake(tmp_path, "squeue", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    assert launch.main(arguments) == 75
    assert "3 runs: 3 pending" in capsys.readouterr().out
    fake(tmp_path, "squeue", "echo 'slurm_load_jobs error: Unable to contact' >&2; exit 1")
    assert launch.main(arguments) == 1
    assert capsys.readouterr().err == "error: squeue: slurm_load_jobs error: Unable to contact\n"


def test_slurm_is_asked_once_for_all_runs(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    arguments = [write_table(tmp_path), "--runs", str(tmp_path), "--status", "--cells", "ed"]
    fake(tmp_path, "squeue", f"echo \"$@\" >> {tmp_path}/asked; printf '42_1\\n42_12\\n43_0\\n'")
    assert launch.main(arguments) == 75
    assert not (tmp_path / "asked").exists()  # nothing was ever submitted
    for seed, (job, task) in enumerate([("42", 1), ("42", 2), ("43", 0)]):
        folder = tmp_path / f"six/ed/seed{seed}"
        folder.mkdir(parents=True)
        (folder / "slurm.json").write_text(json.dumps({"job": job, "task": task}))
    capsys.readouterr()
    assert launch.main(arguments) == 75
    assert "3 runs: 2 queued, 1 pending" in capsys.readouterr().out
    (asked,) = (tmp_path / "asked").read_text().splitlines()
    assert asked.endswith("--jobs=42,43")
