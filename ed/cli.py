"""Console scripts: ed-train runs train.py, ed-measure runs scripts/measure.py, and so on."""

import runpy
import sys

from ed.runtime.extras import missing_package


def train() -> None:
    _run("train.py")


def measure() -> None:
    _run("scripts/measure.py")


def launch() -> None:
    _run("scripts/launch.py")


def table() -> None:
    _run("scripts/table.py")


def report() -> None:
    _run("scripts/report.py")


def _run(name: str) -> None:
    try:
        from ed.runtime.files import APP  # requires an extra

        sys.argv[0] = str(APP / name)
        runpy.run_path(sys.argv[0], run_name="__main__")
    except ModuleNotFoundError as error:
        if (reason := missing_package(error)) is None:
            raise
        sys.exit(f"error: {reason}")
