"""Runs a queue of runs on this machine, for `launch.py --where local`."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from ed.analysis.spec import Run
from ed.engine.errors import INTERRUPTED
from ed.runtime.console import duration
from ed.runtime.files import APP, lock, open_in_run, read_bytes
from ed.runtime.runs import CLAIM, FAILED, OUTPUT, Status, is_done, silence, write_failure
from ed.runtime.signals import stop_requests

POLL_SECONDS = 0.2
QUIET_SECONDS = 15 * 60  # measures of large models take minutes without printing
CTRL_C = 128 + signal.SIGINT  # exit code of a run stopped before it can save
ENDED_BY_SOMEONE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2)


def run_all(
    commands: Mapping[Run, list[str]], jobs: int | None, *, rerun_failed: bool = False
) -> None:
    """Runs the commands in order, `jobs` at a time, distributed over the GPUs.

    Ctrl-C or SIGTERM stops all runs, which save first.
    """
    gpus = visible_gpus()
    slots = list(range(jobs or max(1, len(gpus))))
    hint = sharing_hint(min(len(slots), len(commands)), len(gpus), has_mps=mps_runs())
    if hint is not None:
        print(hint, file=sys.stderr)
    unmeasured = {run for run in commands if is_done(run.folder)}
    waiting, active, ended, began = list(commands), {}, 0, time.monotonic()
    quiet = set()
    with stop_requests() as stop:
        while (waiting or active) and not stop:
            while waiting and len(active) < len(slots):
                slot = next(slot for slot in slots if slot not in active)
                gpu = gpus[slot % len(gpus)] if len(gpus) > 1 else None
                run = waiting.pop(0)
                claim = claimed(run, rerun_failed=rerun_failed, again=run in unmeasured)
                if claim is not None:
                    active[slot] = (run, claim, start(run, commands[run], gpu, claim))
            time.sleep(POLL_SECONDS)
            for slot, (run, claim, process) in list(active.items()):
                if process.poll() is not None:
                    del active[slot]
                    ended += 1
                    seconds = time.monotonic() - began
                    with claim:
                        note = progress(ended, len(active), len(waiting), seconds)
                        finish(run, process.returncode, note)
                elif run not in quiet and (note := quiet_note(run, pid=str(process.pid))):
                    quiet.add(run)
                    print(note, file=sys.stderr, flush=True)
        for _, _, process in active.values():
            process.terminate()  # they save, and the same command resumes them
        for run, claim, process in active.values():
            with claim:
                finish(run, process.wait())


def claimed(run: Run, *, rerun_failed: bool, again: bool = False) -> IO | None:
    """Claims a run for this launcher; None if another launcher has claimed or finished it.

    `again` also claims a finished run, to measure it.

    The claim is a lock on an open file. The run inherits the lock, so it survives if the launcher
    is killed. The launcher also holds it until it has recorded how the run ended.
    """
    claim = open_in_run(run.folder / CLAIM, "a")  # kept open until the run ends
    failed = run.folder / FAILED
    if (
        not lock(claim)
        or (is_done(run.folder) and not again)
        or (failed.exists() and not rerun_failed)
    ):
        claim.close()
        return None
    failed.unlink(missing_ok=True)
    return claim


def start(run: Run, command: list[str], gpu: str | None, claim: IO) -> subprocess.Popen:
    environment = os.environ | ({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu})
    print(f"start   {run.table}/{run.cell}/seed{run.seed}", flush=True)
    with open_in_run(run.folder / OUTPUT, "ab") as log:
        os.utime(log.fileno())  # for `silence`, as the last line of a resumed run may be old
        return subprocess.Popen(
            command,
            cwd=APP,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=[claim.fileno()],
        )


def progress(ended: int, active: int, waiting: int, seconds: float) -> str:
    """Returns how many runs have ended, and an estimate of the time until all have."""
    done = ended + active / 2  # on average, active runs are half done
    eta = duration(seconds / done * (active / 2 + waiting))
    return f"  {ended} of {ended + active + waiting}, eta {eta}"


def quiet_note(run: Run, pid: str = "PID") -> str | None:
    """Returns a hint about a running run that may hang, because it has not printed for long."""
    seconds = silence(run.folder)
    if seconds <= QUIET_SECONDS:
        return None
    return (
        f"hint: {run.table}/{run.cell}/seed{run.seed} has printed nothing for {duration(seconds)}; "
        f"kill -USR1 {pid} adds the stacks of its threads to its output"
    )


def finish(run: Run, code: int, note: str = "") -> None:
    interrupted = code in (INTERRUPTED, CTRL_C) or -code in ENDED_BY_SOMEONE
    done = code == 0 or is_done(run.folder)  # a signal may arrive after the run is complete
    how = Status.DONE if done else Status.STOPPED if interrupted else Status.FAILED
    if how == Status.FAILED:
        write_failure(run.folder, f"exit {code}: {last_line(run.folder / OUTPUT)}")
    print(f"{how:7} {run.table}/{run.cell}/seed{run.seed}{note}", flush=True)


def last_line(path: Path) -> str:
    text = read_bytes(path).decode(errors="replace")
    lines = [line.strip() for line in text.splitlines()]
    return next((line for line in reversed(lines) if line), "no output")


def visible_gpus() -> list[str]:
    """Returns the GPUs available to this process, without importing torch."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return [name for name in given.split(",") if name not in ("", "-1")]
    if shutil.which("nvidia-smi") is None:
        return []
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return re.findall(r"^GPU (\d+):", listed.stdout, re.MULTILINE)  # skips MIG lines


def mps_runs() -> bool:
    """Whether NVIDIA's Multi-Process Service (MPS) is running; its daemon creates this pipe."""
    pipes = os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps"
    return (Path(pipes) / "control").exists()


def sharing_hint(jobs: int, gpus: int, *, has_mps: bool) -> str | None:
    """Suggests MPS if several runs share a GPU without it; otherwise None."""
    if has_mps or not 0 < gpus < jobs:
        return None
    return (
        f"hint: {jobs} runs share {gpus} GPU{'s' * (gpus > 1)}; nvidia-cuda-mps-control -d lets "
        "them compute in parallel (on an H200, three ViT-Tiny runs without our kernels took 0.86 "
        "times as long as in sequence, and 1.05 times without MPS)"
    )
