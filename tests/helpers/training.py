"""Runs train.py as a command."""

import os
import subprocess
import sys
from pathlib import Path

from tests.helpers.commands import ROOT, run_command
from tests.helpers.small import SMALL

SHORT = [*SMALL, "task.batch_size=1000"]  # two steps


def train(*arguments: str, cwd: Path = ROOT, **environment) -> subprocess.CompletedProcess:
    words, env = [str(ROOT / "train.py"), *arguments], {"OMP_NUM_THREADS": "1"} | environment
    return run_command(words, cwd=cwd, env=env)


def train_afresh(*arguments: str, **environment) -> subprocess.CompletedProcess:
    """Runs train.py in a new process."""
    words = [sys.executable, str(ROOT / "train.py"), *arguments]
    env = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, env=env)
