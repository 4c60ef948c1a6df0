"""Prepares one cell for the templates: settings, runs, learning curves, versions."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from ed.analysis.collect import JOINT, Row, evaluation, series
from ed.analysis.report.grids import Grid, grid, number
from ed.analysis.spec import Cell, Table
from ed.runtime.runs import ENVIRONMENT, Status, flat

DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)  # faster, if installed
MOST_POINTS = 60  # per curve; the chart is 320 pixels wide


def anchor(home: tuple[str, str]) -> str:
    return "--".join(home)


def in_common(configs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the settings that all configs share; {} for fewer than two."""
    if len(configs) < 2:
        return {}
    first, *others = configs
    return {
        key: value
        for key, value in first.items()
        if all(key in other and other[key] == value for other in others)
    }


def recorded(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row.status != Status.PENDING and row.record is not None]


def cell_view(
    table: Table,
    cell: Cell,
    rows: Sequence[Row],
    common: Mapping[str, str],
    config: Mapping[str, Any],
) -> dict:
    """Returns the template data of a cell.

    Args:
        rows: its runs, including reduced ones.
        common: the settings that all cells share.
        config: what the full configs of all cells share.
    """
    begun = [row for row in rows if row.status != Status.PENDING]
    stored = recorded(rows)
    return {
        "id": anchor(cell.home),
        "label": cell.label,
        "done": sum(row.status == Status.DONE and not row.deviations for row in begun),
        "planned": len(table.seeds),
        "command": f"python scripts/launch.py {table.argument} --cells {cell.name}",
        "settings": {k: v for k, v in cell.settings.items() if k not in common},
        "runs": _runs(table, begun) if begun else None,
        "curves": _curves(table, stored),
        "record": _record(stored[0], config) if stored else None,
    }


def _runs(table: Table, rows: Sequence[Row]) -> Grid:
    header = ["seed", "status", *table.metrics.values(), f"best {table.metrics[table.primary]}"]
    header += ["steps", "seconds", "device", "torch", "commit", "changed settings", "error"]
    return grid(header, [_run_fields(row, list(table.metrics)) for row in rows])


def _run_fields(row: Row, metrics: Sequence[str]) -> list[str]:
    steps = "" if row.steps is None else f"{row.steps:,}"
    if row.status != Status.DONE and row.total_steps:
        steps += f" of {row.total_steps:,}"
    values = [number(row.last.get(metric)) for metric in metrics]
    found = [str(row.seed), row.status, *values, number(row.best), steps, number(row.seconds)]
    return [*found, row.device, row.torch, commit_text(row), row.deviations, row.error]


def commit_text(row: Row) -> str:
    state = f", {row.code_state}" if row.code_state else ""
    commits = JOINT.join(name[:8] for name in row.commit.split(JOINT))
    return (commits or "commit unknown") + state


def _curves(table: Table, rows: Sequence[Row]) -> list[dict]:
    """Returns the charts that the page draws when the cell is opened, with one line per run.

    The lines of a chart share its steps, which keeps the page small; a missing value is None.
    """
    histories = {_name(row): row.history() for row in rows}
    primary = evaluation(table.primary)
    evaluated = primary if primary.startswith("eval/") else "eval/acc"
    charts = []
    for metric, log in (("train/loss", True), (evaluated, False), ("train/penalty", False)):
        found = {name: dict(thinned(history, metric)) for name, history in histories.items()}
        found = {name: points for name, points in found.items() if len(points) > 1}
        if not found:
            continue
        lowest = min(min(points.values()) for points in found.values())
        steps = sorted(set().union(*found.values()))
        lines = {name: [points.get(step) for step in steps] for name, points in found.items()}
        chart = {"title": metric, "log": log and lowest > 0, "steps": steps, "lines": lines}
        charts.append(chart)
    return charts


def thinned(history: Sequence[dict], metric: str) -> list[tuple[int, float]]:
    """Returns every n-th finite point and the last, up to about MOST_POINTS."""
    pairs = zip(*series(history, metric), strict=True)
    points = [(step, float(f"{y:.4g}")) for step, y in pairs if math.isfinite(y)]
    kept = points[:: math.ceil(len(points) / MOST_POINTS) or 1]
    return kept if not points or kept[-1] == points[-1] else [*kept, points[-1]]


def _name(row: Row) -> str:
    return f"seed {row.seed}" + (f" ({row.deviations})" if row.deviations else "")


def _record(row: Row, common: Mapping[str, Any]) -> dict:
    """Returns the versions of one run and its config without `common`.

    Other seeds differ only in the seed.
    """
    own = {key: value for key, value in full_config(row).items() if key not in common}
    sessions = [_session(session) for session in row.record.sessions]
    return {"name": _name(row), "config": as_yaml(own), "sessions": sessions}


def full_config(row: Row) -> dict[str, Any]:
    """Returns the config with dotted keys, without the seed and what never affects results."""
    hidden = ("seed", *ENVIRONMENT)
    return flat({key: value for key, value in row.record.config.items() if key not in hidden})


def as_yaml(config: Mapping[str, Any]) -> str:
    if not config:
        return ""
    return yaml.dump(dict(config), Dumper=DUMPER, sort_keys=False, allow_unicode=True)


def _session(session: dict) -> dict[str, str]:
    shown = {name: session.get(name) for name in ("start", "device", "host", "python", "commit")}
    shown |= {"changed since": {True: "yes", False: "no"}.get(session.get("dirty"), "not known")}
    shown |= session.get("versions") or {}
    shown |= {"command": session.get("command")}
    return {name: str(text) for name, text in shown.items() if text}
