"""One fault, one process: a child forked from a warm parent runs a case and is judged from outside.

A case ends in one of two ways: bit-equal to an undisturbed run, or with one line of error. All else
(a traceback, a marker that foreign code has left, other weights) is a finding.
"""

import contextlib
import io
import json
import os
import resource
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import torch

from ed.engine.checkpoint import load_checkpoint
from ed.engine.compose import compose_config
from ed.engine.errors import explain
from ed.engine.main import run
from ed.runtime.files import read_rows
from tests.helpers.small import SMALL, SMALL_GROKKING

EQUAL, ONE_LINE = "bit-equal", "one-line error"
TINY = [*SMALL, "task.batch_size=500", "system.device=cpu", "system.save_seconds=0"]  # 4 steps
GROKKING = [*SMALL_GROKKING, "measures=norm", "system.save_seconds=0"]
PNN = ["task=pnn", "task.steps=6", "task.warmup_steps=0", "task.examples=20", "model=pnn"]
PNN += ["model.width=4", "system.device=cpu", "system.log_every=1", "system.save_seconds=0"]
SETUPS = {
    f"grokking {name}": [*GROKKING, f"regularizer={name}"] for name in ("none", "sam", "asam")
}
SETUPS |= {"pnn": PNN}
SETUPS |= {
    f"cifar10 {name}": [*TINY, f"regularizer={name}"]
    for name in ("none", "mixup", "sam", "asam", "jacobian", "ed")
}


def train(folder: Path, setup: str) -> None:
    run(compose_config([*SETUPS[setup], f"system.run_dir={folder}"]), ["fault"])


def in_child(work: Callable[[], object], log: Path, limit: int | None = None) -> int:
    """Forks a child that does `work`; its process id. The child's output and code go to `log`.

    Args:
        limit: bytes that any file of the child may have, as if the disk were full beyond it.
    """
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        if limit is not None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # an error of the write instead
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        printed = io.StringIO()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(printed):
            try:
                work()
                code = 0
            except Exception as error:
                code = explain(error, aloud=True)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        log.write_text(printed.getvalue())
    finally:
        os._exit(code)


def finish(child: int) -> int:
    """The exit code of a child; negative: the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def attempt(work: Callable[[], object], log: Path, limit: int | None = None) -> tuple[int, str]:
    code = finish(in_child(work, log, limit))
    return code, log.read_text() if log.exists() else ""


def judged(code: int, printed: str, equal: Callable[[], bool]) -> str:
    """How a case ended."""
    if code == 0:
        return EQUAL if equal() else "SILENT DIFFERENCE"
    if "Traceback" in printed or printed.count("\n") != 1:
        return "TRACEBACK" if "Traceback" in printed else f"CODE {code}, {printed[-200:]!r}"
    return ONE_LINE


def same_run(first: Path, second: Path) -> bool:
    """Whether two finished runs agree in every bit but the clock's."""
    ours, theirs = (load_checkpoint(folder, print) for folder in (first, second))
    if ours is None or theirs is None:
        return False
    ours, theirs = ours["training"]["model"], theirs["training"]["model"]
    if ours.keys() != theirs.keys() or not all(torch.equal(ours[k], theirs[k]) for k in ours):
        return False
    rows = [[_timeless(row) for row in read_rows(f / "metrics.jsonl")] for f in (first, second)]
    done = [json.loads((folder / "DONE").read_text()) for folder in (first, second)]
    return rows[0] == rows[1] and all(done[0][key] == done[1][key] for key in ("last", "best"))


def _timeless(row: dict) -> dict:
    return {key: value for key, value in row.items() if not key.startswith("time/")}


def killed(whole: Path, folder: Path, setup: str, number: int, delay: float) -> str:
    """Signals a run after `delay` seconds, then runs the same command to its end."""
    child = in_child(lambda: train(folder, setup), folder.with_suffix(".log"))
    time.sleep(delay)
    os.kill(child, number)  # ours, and not waited for yet, so the id is still its own
    finish(child)
    code, printed = attempt(lambda: train(folder, setup), folder.with_suffix(".log"))
    return judged(code, printed, lambda: same_run(whole, folder))


def disk_full(whole: Path, folder: Path, setup: str, limit: int) -> str:
    """Runs with files of at most `limit` bytes, which must not end silently; then without."""
    log = folder.with_suffix(".log")
    code, printed = attempt(lambda: train(folder, setup), log, limit)
    first = judged(code, printed, lambda: same_run(whole, folder))
    if first not in (EQUAL, ONE_LINE):
        return first
    code, printed = attempt(lambda: train(folder, setup), log)
    return judged(code, printed, lambda: same_run(whole, folder))


def damaged(whole: Path, begun: Path, folder: Path, setup: str, name: str, damage) -> str:
    """Copies a begun run, damages one of its files and runs the same command to its end."""
    shutil.copytree(begun, folder)
    path = folder / name
    path.write_bytes(damage(path.read_bytes()))
    code, printed = attempt(lambda: train(folder, setup), folder.with_suffix(".log"))
    return judged(code, printed, lambda: same_run(whole, folder))
