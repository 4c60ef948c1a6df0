"""The launcher: resuming killed launches, failures, queues and GPUs."""

import contextlib
import json
import os
import signal
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from ed.analysis.spec import expand
from ed.analysis.tables import load_table
from scripts import launch, local
from tests.helpers.commands import finish, run_command, start_command
from tests.helpers.launching import (
    SPEC,
    fake,
    finishing,
    logged,
    one_run,
    rendered,
    stand_in,
    steps_of,
    wait_for,
    write_table,
)

ROOT = Path(__file__).parents[2]
STEPS = 20


def training(launcher: int) -> list[int]:
    """Returns the process ids of the runs that a launcher has started."""
    found = []
    with contextlib.suppress(OSError):
        for pid in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
            if Path(f"/proc/{pid}/cmdline").read_text().split("\0")[1:2] == ["train.py"]:
                found.append(int(pid))
    return found


def paused_in_step_four(folder: Path) -> dict[str, str]:
    """Returns an environment in which a run pauses while it saves its fourth step.

    Python imports `sitecustomize` when it starts.
    """
    code = (
        "import os, signal, sys\n"
        "saved = []\n"
        "def hook(event, given):\n"
        "    if event == 'os.rename' and str(given[1]).endswith('last.pt'):\n"
        "        saved.append(given)\n"
        "        if len(saved) == 4:\n"
        "            os.kill(os.getpid(), signal.SIGSTOP)\n"
        "sys.addaudithook(hook)\n"
    )
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(code)
    paths = filter(None, (str(folder), os.environ.get("PYTHONPATH")))
    return {"PYTHONPATH": os.pathsep.join(paths)}


def train_undisturbed(runs) -> None:
    from ed.engine.compose import compose_config
    from ed.engine.main import run as train

    for run in runs:
        train(compose_config([*run.overrides, f"system.run_dir={run.folder}"]), ["six"])


@pytest.mark.skipif(
    not Path("/proc/thread-self/children").exists(), reason="needs /proc to find processes"
)
def test_a_killed_launcher_and_its_runs_can_be_resumed(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # fixes the order of summation
    path, root = write_table(tmp_path, seeds=[0]), tmp_path / "runs"
    table = load_table(path)
    runs = expand(table, root=root)
    arguments = [path, "--runs", str(root), "--jobs", "1"]
    pause = paused_in_step_four(tmp_path / "pause")  # else it could end before it is killed
    first = start_command(["scripts/launch.py", *arguments], env=pause)
    (active,) = wait_for(lambda: training(first), "a run to start")
    os.kill(first, signal.SIGKILL)
    finish(first)
    try:
        # the run continues without its launcher and counts as running before it locks its folder
        assert launch.main([path, "--runs", str(root), "--status"]) == 75
        assert "2 runs: 1 running, 1 pending" in capsys.readouterr().out
        wait_for(lambda: steps_of(runs[0]) >= 2, "the run to train")
    finally:
        os.kill(active, signal.SIGKILL)
    wait_for(lambda: not launch.is_busy(runs[0].folder), "the run to end")

    arguments += ["--cells", runs[0].cell]
    assert run_command(["scripts/launch.py", *arguments]).returncode == 0
    capsys.readouterr()
    assert launch.main(arguments) == 0  # nothing is left to do
    output = capsys.readouterr().out
    assert "1 done" in output
    assert "start" not in output
    assert len(json.loads((runs[0].folder / "meta.json").read_text())["sessions"]) == 2
    assert logged(runs[0].folder) == list(range(1, STEPS + 1))  # no row is missing or repeated

    train_undisturbed(expand(table, root=tmp_path / "undisturbed")[:1])
    assert rendered(table, root) == rendered(table, tmp_path / "undisturbed")


def test_measures_added_to_a_table_are_taken_from_finished_runs(tmp_path, capsys, monkeypatch):
    def train_here(run, *_):
        print("start")
        train_undisturbed([run])
        return SimpleNamespace(poll=lambda: 0, returncode=0)

    monkeypatch.setattr(local, "start", train_here)
    root, how = tmp_path / "runs", {"seeds": [0], "cells": {"none": SPEC["cells"]["none"]}}
    train_undisturbed(expand(load_table(write_table(tmp_path, **how)), root=root))
    measures = ["measures=[norm,ed]", "measures.ed.pairs=2", "measures.ed.resolution=50"]
    path = write_table(tmp_path, **how, fixed=[*SPEC["fixed"], *measures])
    arguments, folder = [path, "--runs", str(root)], root / "six/none/seed0"

    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for command, printed in (("sinfo", "ci"), ("sbatch", "42"), ("squeue", "42_0")):
        fake(tmp_path, command, f"echo {printed}")
    for expected in ("job 42: 1 run", "nothing to submit"):
        assert launch.main([*arguments, "--where", "slurm"]) == 0
        assert expected in capsys.readouterr().out
    (folder / "slurm.json").unlink()

    for sessions in (1, 0):
        assert launch.main([*arguments, "--where", "print"]) == 0
        assert capsys.readouterr().out.count("train.py") == sessions
        assert launch.main(arguments) == 0
        output = capsys.readouterr().out
        assert output.count("start") == sessions
        assert "six: 1 run: 1 done" in output
        last = json.loads((folder / "DONE").read_text())["last"]
        assert {"measure/norm", "measure/ed"} <= last.keys()
        assert logged(folder) == list(range(1, STEPS + 1))


# --- the launcher alone, with short commands instead of training


def test_failed_runs_show_their_last_line_and_rerun_only_on_request(tmp_path, capsys, monkeypatch):
    arguments = one_run(tmp_path)
    code = "import os, sys; sys.exit('error: too bad in ' + os.getcwd())"
    monkeypatch.setattr(launch, "command", stand_in(code))
    monkeypatch.chdir(tmp_path)  # a folder without train.py
    assert launch.main(arguments) == 1
    assert f"seed 0  failed   exit 1: error: too bad in {ROOT}" in capsys.readouterr().out
    monkeypatch.setattr(launch, "command", finishing)
    assert launch.main(arguments) == 1
    output = capsys.readouterr().out
    assert "start" not in output
    assert "--rerun-failed runs them again" in output
    assert launch.main([*arguments, "--rerun-failed"]) == 0
    assert "ed  seed 0  done     1\n" in capsys.readouterr().out  # the accuracy is 1
    assert not (tmp_path / "six/ed/seed0/FAILED").exists()


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import os; os._exit(3)", "exit 3: no output"),
        ("import os; os.write(1, b'\\xff bad\\n \\n'); os._exit(1)", "exit 1: \ufffd bad"),
    ],
)
def test_failures_without_valid_output_are_reported(tmp_path, monkeypatch, code, expected):
    monkeypatch.setattr(launch, "command", stand_in(code))
    assert launch.main(one_run(tmp_path)) == 1
    assert (tmp_path / "six/ed/seed0/FAILED").read_text() == f"{expected}\n"


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("raise SystemExit(75)", "pending"),
        ("raise SystemExit(130)", "pending"),  # Ctrl-C during start-up
        ("import os; os.kill(os.getpid(), 9)", "pending"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGHUP)", "pending"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGUSR2)", "pending"),
        (
            "import sys; open(sys.argv[1] + '/metrics.jsonl', 'w').write('{\"step\": 3}\\n')\n"
            "raise SystemExit(75)",
            "stopped",
        ),
    ],
)
def test_interrupted_runs_do_not_count_as_failed(tmp_path, capsys, monkeypatch, code, status):
    arguments = one_run(tmp_path)
    monkeypatch.setattr(launch, "command", stand_in(code))
    for _ in range(2):  # the same command starts the run again
        assert launch.main(arguments) == 75
        output = capsys.readouterr().out
        assert "start   six/ed/seed0" in output
        assert ("3 of ? steps" in output) == (status == "stopped")
        assert f"1 run: 1 {status}" in output


@pytest.mark.parametrize("asked", [signal.SIGTERM, signal.SIGINT])
def test_runs_save_when_the_launcher_is_stopped(tmp_path, capsys, monkeypatch, asked):
    code = (
        "import pathlib, signal, sys, time\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "def save(*_):\n"
        "    (folder / 'saved').touch()\n"
        "    sys.exit(75)\n"
        "signal.signal(signal.SIGTERM, save)\n"
        "(folder / 'ready').touch()\n"
        "time.sleep(60)"
    )
    monkeypatch.setattr(launch, "command", stand_in(code))
    ready = tmp_path / "six/ed/seed0/ready"

    def stop():
        wait_for(ready.exists, "the run to start")
        os.kill(os.getpid(), asked)

    threading.Thread(target=stop).start()
    arguments = [write_table(tmp_path), "--runs", str(tmp_path), "--jobs", "1"]
    assert launch.main(arguments) == 75
    output = capsys.readouterr().out
    assert "stopped six/ed/seed0" in output
    assert ready.with_name("saved").exists()
    assert output.count("start") == 1
    assert "6 runs: 6 pending" in output


def test_several_tables_share_one_queue(tmp_path, capsys, monkeypatch):
    """The second table borrows one run from the first, which runs only once."""
    monkeypatch.setattr(launch, "command", finishing)
    six, more = write_table(tmp_path), tmp_path / "more.yaml"
    sam = {"overrides": ["regularizer=sam", "regularizer.rho=0.05"], "paper": None}
    cells = {"ed": {"same_as": "six/ed", "paper": None}, "sam": sam}
    more.write_text(yaml.safe_dump(SPEC | {"cells": cells}, sort_keys=False))
    arguments = [str(more), six, "--runs", str(tmp_path / "runs"), "--seeds", "0"]
    assert launch.main([*arguments, "--cells", "sma"]) == 1
    assert "--cells sma: not in more, six; did you mean sam" in capsys.readouterr().err
    assert launch.main([*arguments, "--cells", "none"]) == 0
    output = capsys.readouterr().out
    assert "start   six/none/seed0" in output
    assert "more" not in output  # the other table does not have this cell
    assert launch.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    started = [line.split()[-1] for line in lines if line.startswith("start")]
    assert started == ["six/ed/seed0", "more/sam/seed0"]
    assert "more: 2 runs: 2 done" in lines
    assert "six: 2 runs: 2 done" in lines
    assert launch.main([*arguments, "--where", "print"]) == 0
    assert capsys.readouterr().out == "\n"


@pytest.mark.parametrize(
    ("ended", "active", "waiting", "expected"),
    [(1, 0, 3, "1 of 4, eta 0:15:00"), (2, 2, 6, "2 of 10, eta 0:11:40"), (4, 0, 0, "4 of 4")],
)
def test_the_queue_shows_its_progress(ended, active, waiting, expected):
    assert expected in local.progress(ended, active, waiting, seconds=300)


def test_a_run_that_prints_nothing_for_long_is_reported_once(tmp_path, capsys, monkeypatch):
    seen = tmp_path / "seen"

    def long_ago(folder: Path) -> float:
        seen.touch()
        return local.QUIET_SECONDS + 1

    code = f"import pathlib, time\nwhile not pathlib.Path({str(seen)!r}).exists(): time.sleep(0.02)"
    monkeypatch.setattr(launch, "command", stand_in(code + "\ntime.sleep(1)"))
    monkeypatch.setattr(local, "silence", long_ago)
    launch.main(one_run(tmp_path))
    (hint,) = [line for line in capsys.readouterr().err.splitlines() if "nothing for" in line]
    assert hint.startswith("hint: six/ed/seed0 has printed nothing for 0:15:01; kill -USR1 ")


def test_a_resumed_run_is_not_silent_since_its_last_session(tmp_path):
    table = load_table(write_table(tmp_path))
    run = expand(table, cells=["ed"], seeds=[0], root=tmp_path)[0]
    run.folder.mkdir(parents=True)
    with local.claimed(run, rerun_failed=False) as claim:
        output = run.folder / "output.log"
        output.touch()
        os.utime(output, (0, 0))  # in 1970
        assert local.quiet_note(run)
        local.start(run, [sys.executable, "-c", ""], None, claim).wait()
        assert not local.quiet_note(run)
        os.utime(output, (0, 0))
        (run.folder / "meta.json").touch()  # written when training starts
        assert not local.quiet_note(run)


@pytest.mark.parametrize(("codes", "expected"), [([0, 0], 0), ([0, 75], 75), ([75, 1], 1)])
def test_the_exit_code_is_that_of_the_worst_table(codes, expected):
    assert launch.worst(codes) == expected


def gathering(count: int) -> str:
    """Returns code that records its GPU and waits until `count` runs of its cell have started."""
    return (
        "import os, pathlib, sys, time\n"
        "own = pathlib.Path(sys.argv[1])\n"
        "(own / 'gpu').write_text(os.environ['CUDA_VISIBLE_DEVICES'])\n"
        "end = time.monotonic() + 60\n"
        f"while len(list(own.parent.glob('*/gpu'))) < {count} and time.monotonic() < end:\n"
        "    time.sleep(0.02)\n"
        "(own / 'saw').write_text(str(len(list(own.parent.glob('*/gpu')))))"
    )


def test_each_run_gets_its_own_gpu(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    monkeypatch.setattr(launch, "command", stand_in(gathering(2)))
    arguments = [write_table(tmp_path), "--runs", str(tmp_path), "--cells", "ed"]
    launch.main([*arguments, "--seeds", "0", "1"])
    assert [(tmp_path / f"six/ed/seed{k}/gpu").read_text() for k in (0, 1)] == ["3", "5"]


def test_several_runs_share_one_gpu_at_the_same_time(tmp_path, monkeypatch):
    """Each run waits until all three have started."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setattr(launch, "command", stand_in(gathering(3)))
    launch.main([write_table(tmp_path), "--runs", str(tmp_path), "--cells", "ed", "--jobs", "3"])
    folders = [tmp_path / f"six/ed/seed{k}" for k in (0, 1, 2)]
    assert [(folder / "gpu").read_text() for folder in folders] == ["3"] * 3
    assert [(folder / "saw").read_text() for folder in folders] == ["3"] * 3
    frozen = [yaml.safe_load((folder / "config.yaml").read_text()) for folder in folders]
    assert [config["seed"] for config in frozen] == [0, 1, 2]  # each run has its own seed
    assert [config["system"]["run_dir"] for config in frozen] == [str(f) for f in folders]


@pytest.mark.parametrize(
    ("jobs", "gpus", "has_mps", "expected"),
    [
        (3, 1, False, "3 runs share 1 GPU; nvidia-cuda-mps-control -d"),
        (8, 2, False, "8 runs share 2 GPUs; nvidia-cuda-mps-control -d"),
        (3, 1, True, None),
        (2, 2, False, None),
        (3, 0, False, None),  # no hint without a GPU
    ],
)
def test_the_hint_suggests_mps_if_runs_share_a_gpu(jobs, gpus, has_mps, expected):
    hint = local.sharing_hint(jobs, gpus, has_mps=has_mps)
    assert hint is None if expected is None else expected in hint


def test_the_hint_counts_pending_runs_and_disappears_with_mps(tmp_path, capsys, monkeypatch):
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


def test_gpus_come_from_the_environment_or_nvidia_smi(tmp_path, monkeypatch):
    fake(tmp_path, "nvidia-smi", "printf 'GPU 0: A100\\n  MIG 1g.5gb\\nGPU 1: A100\\n'")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for given, seen in (("3,5", ["3", "5"]), ("", []), ("-1", []), (None, ["0", "1"])):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if given is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
        assert local.visible_gpus() == seen
    fake(tmp_path, "nvidia-smi", "echo NVIDIA-SMI has failed; exit 9")
    assert local.visible_gpus() == []
    monkeypatch.setenv("PATH", "")
    assert local.visible_gpus() == []
