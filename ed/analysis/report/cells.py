"""Prepares one cell for the templates: settings, runs, learning curves, versions."""

import math
from collections.abc import Mapping, Sequence

import yaml

from ed.analysis.collect import JOINT, Row, evaluation, series
from ed.analysis.report.grids import Grid, grid, number
from ed.analysis.spec import Cell, Table
from ed.runtime.runs import ENVIRONMENT, Status

DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)  # faster, if installed
MOST_POINTS = 60  # per curve; the chart is 320 pixels wide


def anchor(home: tuple[str, str]) -> str:
    return "--".join(home)


def common_settings(cells: Sequence[Cell]) -> dict[str, str]:
    """Returns the settings that several cells share; {} for a single cell."""
    if len(cells) < 2:
        return {}
    shared = set.intersection(*(set(cell.settings.items()) for cell in cells))
    return {key: value for key, value in cells[0].settings.items() if (key, value) in shared}


def cell_view(table: Table, cell: Cell, rows: Sequence[Row], common: Mapping[str, str]) -> dict:
    """Returns the template data of a cell, without the settings in `common`.

    `rows` are its runs, including reduced runs.
    """
    begun = [row for row in rows if row.status != Status.PENDING]
    recorded = [row for row in begun if row.record is not None]
    return {
        "id": anchor(cell.home),
        "label": cell.label,
        "done": sum(row.status == Status.DONE and not row.deviations for row in begun),
        "planned": len(table.seeds),
        "command": f"python scripts/launch.py {table.argument} --cells {cell.name}",
        "settings": {k: v for k, v in cell.settings.items() if k not in common},
        "runs": _runs(table, begun) if begun else None,
        "curves": _curves(table, recorded),
        "record": _record(recorded[0]) if recorded else None,
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
    """Returns the charts that the page draws when the cell is opened, with one line per run."""
    histories = {_name(row): row.history() for row in rows}
    primary = evaluation(table.primary)
    evaluated = primary if primary.startswith("eval/") else "eval/acc"
    charts = []
    for metric, log in (("train/loss", True), (evaluated, False), ("train/penalty", False)):
        lines = {name: thinned(history, metric) for name, history in histories.items()}
        lines = {name: points for name, points in lines.items() if len(points) > 1}
        values = [y for points in lines.values() for _, y in points]
        if lines:
            charts.append({"title": metric, "log": log and min(values) > 0, "lines": lines})
    return charts


def thinned(history: Sequence[dict], metric: str) -> list[tuple[int, float]]:
    """Returns every n-th finite point and the last, up to about MOST_POINTS."""
    pairs = zip(*series(history, metric), strict=True)
    points = [(step, float(f"{y:.4g}")) for step, y in pairs if math.isfinite(y)]
    kept = points[:: math.ceil(len(points) / MOST_POINTS) or 1]
    return kept if not points or kept[-1] == points[-1] else [*kept, points[-1]]


def _name(row: Row) -> str:
    return f"seed {row.seed}" + (f" ({row.deviations})" if row.deviations else "")


def _record(row: Row) -> dict:
    """Returns the versions and the settings of one run, without those that never affect results.

    Other seeds differ only in the seed.
    """
    config = {key: value for key, value in row.record.config.items() if key not in ENVIRONMENT}
    config = yaml.dump(config, Dumper=DUMPER, sort_keys=False, allow_unicode=True)
    sessions = [_session(session) for session in row.record.sessions]
    return {"name": _name(row), "config": config, "sessions": sessions}


def _session(session: dict) -> dict[str, str]:
    shown = {name: session.get(name) for name in ("start", "device", "host", "python", "commit")}
    shown |= {"changed since": {True: "yes", False: "no"}.get(session.get("dirty"), "not known")}
    shown |= session.get("versions") or {}
    shown |= {"command": session.get("command")}
    return {name: str(text) for name, text in shown.items() if text}
