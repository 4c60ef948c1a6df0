"""Tests of the public API's types: signatures, results and wrong arguments."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tests" / "package" / "typing"
CHECK = [sys.executable, "-m", "mypy", "--config-file", str(FOLDER / "mypy.ini")]

needs_mypy = pytest.mark.skipif(
    importlib.util.find_spec("mypy") is None, reason="needs mypy: pip install '.[dev]'"
)


def mypy(*paths: Path) -> subprocess.CompletedProcess:
    return subprocess.run([*CHECK, *map(str, paths)], cwd=ROOT, capture_output=True, text=True)


@needs_mypy
def test_the_core_is_clean():
    run = mypy(ROOT / "ed" / "core", ROOT / "ed" / "__init__.py")
    assert run.returncode == 0, run.stdout + run.stderr


@needs_mypy
def test_types_resolve_and_wrong_arguments_are_errors():
    """Expected errors have a `type: ignore` comment; mypy reports unused ones."""
    run = mypy(FOLDER / "uses_api.py")
    assert run.returncode == 0, run.stdout + run.stderr
