"""Helpers for launcher tests: a table of six small runs, fake programs, and result checks."""

import json
import re
import sys
import time
from pathlib import Path

import pytest
import yaml

from ed.analysis.collect import collect
from ed.analysis.merging import merge
from ed.analysis.render import to_markdown
from ed.analysis.store import columns, to_csv

SPEC = {
    "title": "Six small runs",
    "place": "A test",
    "metric": "eval/acc",
    "seeds": [0, 1, 2],
    "fixed": [
        "task=cifar10_mini",
        "debug=tiny",
        "task.batch_size=100",
        "model=vit_micro",
        "model.width=16",
        "model.depth=1",
        "system.log_every=1",
        "system.save_seconds=0",
    ],
    "cells": {
        "ed": {
            "overrides": ["regularizer=ed", "regularizer.weight=7", "regularizer.pairs=50"],
            "paper": None,
        },
        "none": {"overrides": ["regularizer=none"], "paper": None},
    },
}


def write_table(folder: Path, **changes) -> str:
    path = folder / "six.yaml"
    path.write_text(yaml.safe_dump(SPEC | changes, sort_keys=False))
    return str(path)


def one_run(folder: Path) -> list[str]:
    """Returns the launcher's arguments for the first run of the table."""
    return [write_table(folder), "--runs", str(folder), "--cells", "ed", "--seeds", "0"]


def wait_for(condition, what: str, seconds: float = 240.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.02)
    raise AssertionError(f"waited {seconds} s for {what}")


def logged(folder: Path) -> list[int]:
    """Returns the steps whose training metrics were logged."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [row["step"] for row in map(json.loads, lines) if "train/loss" in row]


def steps_of(run) -> int:
    return len(logged(run.folder))


def rendered(table, root: Path) -> tuple[str, list[str]]:
    """Returns the table and its CSV lines without the runs' durations."""
    rows = merge(collect(table, [root], warn=pytest.fail))
    text = re.sub(r"[\d.]+ hours", "some hours", to_markdown(table, rows))
    lines = to_csv(table, rows).splitlines()
    place = columns(table).index("seconds")
    fields = [line.split(",") for line in lines]
    return text, [",".join(f[:place] + f[place + 1 :]) for f in fields]


def stand_in(code: str):
    return lambda run: [sys.executable, "-c", code, str(run.folder)]


def finishing(run) -> list[str]:
    code = "import sys, pathlib; pathlib.Path(sys.argv[1], 'DONE').write_text(sys.argv[2])"
    summary = {"last": {"eval/acc": 1.0}, "best": {"eval/acc": 1.0}, "steps": 1, "seconds": 1.0}
    return [*stand_in(code)(run), json.dumps(summary)]


def fake(folder: Path, name: str, body: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)
