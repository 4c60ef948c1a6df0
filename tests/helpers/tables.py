"""A small table and run folders like the engine's, created without training or torch."""

import json
from pathlib import Path

import yaml

from ed.analysis.collect import Row
from ed.analysis.recipes import target_of
from ed.analysis.spec import Table
from ed.analysis.tables import load_table
from ed.analysis.verdicts import Experiment
from scripts import table as script

SPEC = {
    "title": "A table",
    "place": "Nowhere",
    "metric": "eval/acc",
    "seeds": [0, 1],
    "paper_seeds": 3,
    "fixed": ["task=cifar10", "task.epochs=300"],
    "cells": {
        "baseline": {
            "overrides": ["regularizer=none"],
            "paper": {"mean": 80.0, "std": 1.0},
            "note": "a | note",
        },
        "ed": {"overrides": ["regularizer=ed", "regularizer.weight=1e-2"], "paper": {"mean": 90.0}},
        "sam": {"best_of": "rho", "paper": None},
    },
    "tuning": {
        "rho": {
            "overrides": ["regularizer=sam"],
            "grid": {"regularizer.rho": [0.1, 0.5]},
            "rule": "best",
        }
    },
}


def write_table(folder: Path, name: str = "mini", **changes) -> Table:
    path = folder / f"{name}.yaml"
    spec = {key: value for key, value in (SPEC | changes).items() if value is not None}
    path.write_text(yaml.safe_dump(spec, sort_keys=False))
    return load_table(str(path))


def fabricate(run, accuracy: float = 80.0, *, done: bool = True, tail: str = "") -> None:
    """Writes a run folder like the engine's."""
    run.folder.mkdir(parents=True, exist_ok=True)
    config: dict = {"seed": run.seed}
    for override in run.overrides:
        key, value = override.split("=")
        if "." in key:
            group, name = key.split(".")
            config.setdefault(group, {})[name] = float(value)
        elif key != "seed":
            config.setdefault(key, {})["_target_"] = target_of(key, value)
    (run.folder / "config.yaml").write_text(yaml.safe_dump(config))
    rows = [{"step": 5, "train/loss": 2.0}, {"step": 10, "eval/acc": accuracy}]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (run.folder / "metrics.jsonl").write_text(text + tail)
    session = {
        "device": "cpu",
        "commit": "abcdef0123",
        "dirty": False,
        "steps": 20,
        "versions": {"torch": "2.0"},
    }
    (run.folder / "meta.json").write_text(json.dumps({"sessions": [session, session]}))
    if done:
        summary = {"last": {"eval/acc": accuracy}, "best": {"eval/acc": accuracy + 1}}
        (run.folder / "DONE").write_text(json.dumps(summary | {"steps": 20, "seconds": 3.5}))


def full_rows(table: Table) -> list[Row]:
    values = {
        "baseline": (79.5, 80.1),
        "ed": (85.0, 85.1),
        "rho-0.1": (1.0, 3.0),
        "rho-0.5": (5, 7),
    }
    return [
        Row("mini", cell, seed, status="done", last={"eval/acc": value}, steps=1, seconds=1800.0)
        for cell, pair in values.items()
        for seed, value in enumerate(pair)
    ]


def main(arguments: list[str]) -> int:
    """Runs scripts/table.py with --commit."""
    return script.main([*arguments, "--commit"])


def experiment(name: str, values: dict[str, list[float]], metric: str = "eval/acc") -> Experiment:
    """Returns an experiment with made-up results; `values` maps cells to one value per seed."""
    table = load_table(name)
    rows = [
        Row(*table.cells[cell].home, seed, status="done", last={metric: value})
        for cell, own in values.items()
        for seed, value in zip(table.seeds, own, strict=False)
    ]
    return Experiment(table, rows)
