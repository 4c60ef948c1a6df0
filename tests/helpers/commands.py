"""Runs the project's commands in a forked child, where torch is already loaded.

Like a new process, a child has its own memory, output, signals and exit code, but it starts in
milliseconds instead of seconds. Tests of startup (imports, duration) and of torchrun use
`subprocess` instead.
"""

import ctypes
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import torch
import torch._dynamo
from hydra.core.global_hydra import GlobalHydra

from ed.engine.metrics import Metrics

ROOT = Path(__file__).parents[2]


def run_command(
    words: Sequence[str], *, cwd: Path = ROOT, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess:
    """Runs `python WORDS` and returns its output and exit code."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        code = finish(start_command(words, cwd=cwd, env=env, outputs=(out.fileno(), err.fileno())))
        printed = []
        for file in (out, err):
            file.seek(0)
            printed.append(file.read().decode())
    return subprocess.CompletedProcess(words, code, *printed)


def run_together(words: Sequence[str], *, seconds: int = 400) -> subprocess.CompletedProcess:
    """Runs `python WORDS` in two processes with the variables that torchrun would set.

    The exit code is the first nonzero one, or 0. Both processes are killed after `seconds`.
    """
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    place |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    with tempfile.TemporaryFile() as log:
        how = {"outputs": (log.fileno(),) * 2, "prepare": lambda: signal.alarm(seconds)}
        ranks = [place | {"RANK": rank, "LOCAL_RANK": rank} for rank in ("0", "1")]
        children = [start_command(words, env=rank, **how) for rank in ranks]
        codes = [finish(child) for child in children]
        log.seek(0)
        printed = log.read().decode()
    return subprocess.CompletedProcess(words, codes[0] or codes[1], printed, "")


def start_command(
    words: Sequence[str],
    *,
    cwd: Path = ROOT,
    env: Mapping[str, str] | None = None,
    outputs: tuple[int, int] | None = None,
    prepare: Callable[[], None] = lambda: None,
) -> int:
    """Starts `python WORDS` and returns its process id, for `finish`.

    Args:
        outputs: file descriptors for stdout and stderr; None discards both.
        prepare: called first in the child.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    end_threads()
    child = os.fork()
    if child:
        return child
    try:
        prepare()
        _become(words, cwd, env, outputs or (os.open(os.devnull, os.O_WRONLY),) * 2)
    finally:
        os._exit(70)  # not reached


def end_threads() -> None:
    """Ends the idle threads of GNU OpenMP, for which a forked child would wait forever."""
    maps = Path("/proc/self/maps")
    for line in maps.read_text().splitlines() if maps.exists() else ():
        if "libgomp" in line:
            library = ctypes.CDLL(line.split()[-1])
            if hasattr(library, "omp_pause_resource_all"):  # older scikit-learn has OpenMP 4.5
                library.omp_pause_resource_all(2)  # 2: omp_pause_hard


def die_at_row(count: int) -> Callable[[], None]:
    """Returns a `prepare` function that kills the process once it has logged `count` rows.

    The process kills itself, because a signal from outside might arrive too late.
    """

    def prepare() -> None:
        log = Metrics.log

        def log_and_die(self, *given):
            log(self, *given)
            if len(self.rows) == count:
                os.kill(os.getpid(), signal.SIGKILL)

        Metrics.log = log_and_die

    return prepare


def finish(child: int) -> int:
    """Waits for a child; returns its exit code, or -n if signal n ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _become(words: Sequence[str], cwd: Path, env, outputs: tuple[int, int]) -> NoReturn:
    """Runs a script in this process as `python` would, then exits."""
    code = 0
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update(env or {})
    os.chdir(cwd)
    for here, there in enumerate(outputs, start=1):
        os.dup2(there, here)
    # closefd=False: pytest's capture still uses these descriptors
    sys.stdin = open(os.devnull)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", closefd=False)  # noqa: SIM115
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    GlobalHydra.instance().clear()
    script, *arguments = words
    sys.argv = [script, *arguments]
    own = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [str((cwd / script).resolve().parent), *filter(None, own)]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
