"""Step times by cell, as measured by `python scripts/benchmark.py --tables TABLE ...`."""

import csv
from pathlib import Path

from ed.analysis.spec import EXPERIMENTS, SpecError

COLUMNS = ("table", "cell", "ms", "x plain", "device", "torch", "commit")
STEPS = EXPERIMENTS / "results" / "speed" / "steps.csv"


def read_steps(path: Path = STEPS) -> dict[tuple[str, str], dict[str, str]]:
    """Returns the measured steps, by the (table, cell) that owns the runs."""
    if not path.exists():
        return {}
    with path.open(encoding="utf-8", newline="") as file:
        header, *lines = list(csv.reader(file)) or [[]]
    if tuple(header) != COLUMNS or any(len(line) != len(COLUMNS) for line in lines):
        raise SpecError(f"{path}: lines must have the fields {','.join(COLUMNS)}; restore the file")
    rows = [dict(zip(COLUMNS, line, strict=True)) for line in lines]
    return {(row["table"], row["cell"]): row for row in rows}
