"""Step times by cell, as measured by `python scripts/benchmark.py --tables TABLE ...`."""

import csv
import math
from pathlib import Path

from ed.analysis.spec import EXPERIMENTS, SpecError

RATIO = "x plain"  # column of the step time relative to a plain step
COLUMNS = ("table", "cell", "ms", RATIO, "device", "torch", "commit")
FILE = Path("results", "speed", "steps.csv")  # beside the experiment files
STEPS = EXPERIMENTS / FILE


def read_steps(path: Path) -> dict[tuple[str, str], dict[str, str]]:
    """Returns the measured steps, by the (table, cell) that owns the runs; raises if invalid."""
    if not path.exists():
        return {}
    with path.open(encoding="utf-8", newline="") as file:
        header, *lines = list(csv.reader(file)) or [[]]
    if tuple(header) != COLUMNS or any(len(line) != len(COLUMNS) for line in lines):
        raise SpecError(f"{path}: lines must have the fields {','.join(COLUMNS)}; restore the file")
    rows = [dict(zip(COLUMNS, line, strict=True)) for line in lines]
    for row in rows:
        if not _is_positive(row[RATIO]):
            raise SpecError(
                f"{path}: {row['table']}/{row['cell']}: {RATIO!r} is {row[RATIO]!r}, not a "
                "positive number; run python scripts/benchmark.py --tables again"
            )
    return {(row["table"], row["cell"]): row for row in rows}


def _is_positive(text: str) -> bool:
    try:
        return 0 < float(text) < math.inf
    except ValueError:
        return False
