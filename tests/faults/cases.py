"""Fault cases, each run in a forked child process.

Each case must match an undisturbed run bit for bit or end with a one-line error. Anything else
(a traceback, execution of untrusted code, different weights) is a bug.
"""

import contextlib
import functools
import io
import json
import os
import resource
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch._dynamo  # otherwise imported on first use, which takes seconds
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf

from ed.engine.checkpoint import load_checkpoint
from ed.engine.compose import compose_config
from ed.engine.errors import explain
from ed.engine.main import load_run, run
from ed.engine.trust import targets
from ed.runtime.files import read_rows
from ed.runtime.runs import WEIGHTS
from ed.runtime.signals import STOP_SIGNALS
from ed.tasks import procgen
from tests.helpers.commands import end_threads, finish
from tests.helpers.games import Bandit

EQUAL, ONE_LINE = "bit-equal", "one-line error"


@dataclass(frozen=True)
class Setup:
    """The overrides of a small run and the folder of its undisturbed reference run."""

    name: str
    overrides: tuple[str, ...]
    whole: Path

    def train(self, folder: Path, *more: str) -> None:
        if self.name.startswith("procgen"):
            play_bandit()
        cfg = composed(self.overrides).copy()
        cfg.merge_with_dotlist([f"system.run_dir={folder}", *more])
        run(cfg, ["fault"])


@functools.cache
def composed(overrides: tuple[str, ...]) -> DictConfig:
    """Composes a config and imports its modules once, before forking."""
    cfg = compose_config(list(overrides))
    for target in targets(OmegaConf.to_container(cfg)):
        get_object(target)
    return cfg


def play_bandit() -> None:
    """Replaces Procgen with a toy game for the rest of this process."""
    procgen.engine_version = "{} 1.0".format
    procgen.ProcgenPPO.make_games = lambda task, side, count, _: Bandit(count, task.levels[side][0])


def in_child(work: Callable[[], object], log: Path, limit: int | None = None) -> int:
    """Runs `work` in a forked child, which logs errors to `log`; returns its process id.

    Args:
        limit: maximum file size in bytes, which simulates a full disk.
    """
    end_threads()
    # a Ctrl-C outside `try` would let the child return and run the remaining tests
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    child = os.fork()
    if child:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return child
    code = 1
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if limit is not None:
            # makes writes fail instead of killing the process
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        printed = io.StringIO()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(printed):
            try:
                work()
                code = 0
            except Exception as error:
                code = explain(error, show=True)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        log.write_text(printed.getvalue())
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    finally:
        os._exit(code)


def attempt(work: Callable[[], object], log: Path, limit: int | None = None) -> tuple[int, str]:
    code = finish(in_child(work, log, limit))
    return code, log.read_text() if log.exists() else ""


def judged(code: int, printed: str, equal: Callable[[], bool]) -> str:
    """Returns how a case ended."""
    if code == 0:
        return EQUAL if equal() else "SILENT DIFFERENCE"
    if "Traceback" in printed or printed.count("\n") != 1:
        return "TRACEBACK" if "Traceback" in printed else f"CODE {code}, {printed[-200:]!r}"
    return ONE_LINE


def same_run(first: Path, second: Path) -> bool:
    """Returns whether two finished runs agree bit for bit, apart from times."""
    ours, theirs = (load_checkpoint(folder) for folder in (first, second))
    if ours is None or theirs is None:
        return False
    ours, theirs = ours["training"]["model"], theirs["training"]["model"]
    if not same_tensors(ours, theirs):
        return False
    rows = [[_timeless(row) for row in read_rows(f / "metrics.jsonl")] for f in (first, second)]
    done = [json.loads((folder / "DONE").read_text()) for folder in (first, second)]
    return rows[0] == rows[1] and all(done[0][key] == done[1][key] for key in ("last", "best"))


def same_tensors(ours: dict, theirs: dict) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)


def _timeless(row: dict) -> dict:
    return {key: value for key, value in row.items() if not key.startswith("time/")}


def spread(work: dict[str, Callable[[], object]], folder: Path) -> dict[str, object]:
    """Runs all functions in `work` in up to two forked processes; returns results by name."""
    workers = min(2, os.cpu_count() or 1)
    children = []
    for worker in range(workers):
        names = list(work)[worker::workers]
        answer = folder / f"answers{worker}.json"
        answer.unlink(missing_ok=True)

        def part(names=names, answer=answer):
            answer.write_text(json.dumps({name: work[name]() for name in names}))

        log = folder / f"worker{worker}.log"
        children.append((in_child(part, log), answer, log))
    found = {}
    for child, answer, log in children:
        code = finish(child)
        assert code == 0, log.read_text()
        found |= json.loads(answer.read_text())
    return found


def undisturbed(setup: Setup) -> float:
    """Trains without faults and returns the time in seconds."""
    began = time.monotonic()
    code, printed = attempt(lambda: setup.train(setup.whole), setup.whole.with_suffix(".log"))
    assert code == 0, f"{setup.name}: {printed}"
    return time.monotonic() - began


def begun(setup: Setup, folder: Path) -> Path:
    """Stops a run twice, so that it has last.pt and previous.pt; returns its folder."""
    for _ in range(2):
        attempt(lambda: setup.train(folder, "system.max_minutes=0"), folder.with_suffix(".log"))
    assert not (folder / "DONE").exists(), f"{setup.name}: too short to be stopped twice"
    return folder


def killed(setup: Setup, folder: Path, number: int, delay: float) -> str:
    """Sends a signal to a run after `delay` seconds, then resumes it to the end."""
    child = in_child(lambda: setup.train(folder), folder.with_suffix(".log"))
    time.sleep(delay)
    os.kill(child, number)  # the process id stays valid until finish() reaps the child
    finish(child)
    return trained_on(setup, folder)


def disk_full(setup: Setup, folder: Path, limit: int) -> str:
    """Trains with files limited to `limit` bytes, then resumes without the limit."""
    code, printed = attempt(lambda: setup.train(folder), folder.with_suffix(".log"), limit)
    first = judged(code, printed, lambda: same_run(setup.whole, folder))
    return trained_on(setup, folder) if first in (EQUAL, ONE_LINE) else first


def damaged(setup: Setup, source: Path, folder: Path, name: str, damage) -> str:
    """Copies a run, damages one of its files, and resumes the run or loads its weights."""
    shutil.copytree(source, folder)
    path = folder / name
    path.write_bytes(damage(path.read_bytes()))
    return loaded(setup, folder) if name == WEIGHTS else trained_on(setup, folder)


def loaded(setup: Setup, folder: Path) -> str:
    """Loads a run from its model.safetensors and returns how that ended."""
    for path in folder.glob("*.pt"):
        path.unlink()

    def load() -> dict:
        return load_run(folder, "cpu", data=False).model.state_dict()

    expected = load_checkpoint(setup.whole)["training"]["model"]
    result = attempt(load, folder.with_suffix(".log"))
    return judged(*result, lambda: same_tensors(load(), expected))


def trained_on(setup: Setup, folder: Path) -> str:
    """Resumes a run after a fault and returns how it ended."""
    code, printed = attempt(lambda: setup.train(folder), folder.with_suffix(".log"))
    end = judged(code, printed, lambda: same_run(setup.whole, folder))
    if end in (EQUAL, ONE_LINE):
        shutil.rmtree(folder)  # otherwise a full campaign would fill the disk
    return end
