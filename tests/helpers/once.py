"""Shares slow results between the workers of pytest-xdist."""

import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest


def shared_folder(factory: pytest.TempPathFactory, name: str) -> Path:
    """Returns a folder that all workers use."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    folder.mkdir(exist_ok=True)
    return folder


def once(folder: Path, name: str, work: Callable[[], object]):
    """Returns the result of `work`, computed by the first worker that asks and kept as JSON."""
    made = folder / f"{name}.json"
    with open(folder / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            made.write_text(json.dumps(work()))
    return json.loads(made.read_text())
