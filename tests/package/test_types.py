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


@needs_mypy
def test_the_core_is_clean_and_types_of_the_api_resolve():
    """Expected errors have a `type: ignore`; mypy reports each one that is not needed."""
    checked = [FOLDER / "uses_api.py", ROOT / "ed" / "core", ROOT / "ed" / "__init__.py"]
    command = [*CHECK, *map(str, checked)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
