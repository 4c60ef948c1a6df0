"""A table with a correlation study over a pool of eight cells, and rows for its runs."""

from pathlib import Path

import numpy as np
import yaml

from ed.analysis.collect import Row
from ed.analysis.spec import Table
from ed.analysis.tables import load_table

METRICS = {"measure/gap": "gap", "measure/a": "first", "measure/b": "second", "measure/c": "third"}
STUDY = {
    "against": "measure/gap",
    "measures": {"Pair": ["measure/a", "measure/b"], "Single": ["measure/c"]},
}
POOL = {
    "pool": {
        "overrides": [],
        "grid": {"optimizer.lr": [0.1, 0.01], "optimizer.weight_decay": [0, 1, 2, 3]},
        "paper": None,
    }
}


SPEC = {
    "title": "A pool",
    "place": "Nowhere",
    "metrics": METRICS,
    "figure": "ed.figures.correlation:draw",
    "correlation": STUDY,
    "seeds": [0, 1],
    "fixed": ["task=cifar10"],
    "cells": POOL,
}


def write_pool(folder: Path, name: str = "pool", **changes) -> Table:
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(SPEC | changes, sort_keys=False))
    return load_table(str(path))


def rows_of(table: Table, values: dict[str, np.ndarray]) -> list[Row]:
    """Returns rows for two seeds per cell, with values symmetric about the given means."""
    return [
        Row(
            *cell.home,
            seed,
            status="done",
            last={m: float(value[i]) + (0.25 if seed else -0.25) for m, value in values.items()},
        )
        for i, cell in enumerate(table.cells.values())
        for seed in table.seeds
    ]
