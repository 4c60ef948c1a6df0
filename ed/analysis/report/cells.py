"""What stands behind a cell: its settings, its runs, their learning curves and surroundings."""

from collections.abc import Sequence

import yaml

from ed.analysis.collect import Row, series
from ed.analysis.report.charts import key, line_chart
from ed.analysis.report.markup import Html, code, join, plural, tag
from ed.analysis.report.sortable import Field, sortable
from ed.analysis.spec import Cell, Table
from ed.runtime.runs import Status

SIGNIFICANT = 6


def anchor(home: tuple[str, str]) -> str:
    return "--".join(home)


def cell_details(table: Table, cell: Cell, rows: Sequence[Row]) -> Html:
    """A fold with everything about one cell; `rows` are its own runs, reduced ones included."""
    begun = [row for row in rows if row.status != Status.PENDING]
    done = sum(row.status == Status.DONE and not row.deviations for row in begun)
    count = f"{done} of {plural(len(table.seeds), 'run')} done"
    parts = [tag("summary", cell.label, " ", tag("span", count, class_="quiet"))]
    parts.append(_settings(table, cell))
    if begun:
        parts += [_runs_table(table, begun), *_recorded(table, begun)]
    return tag("details", *parts, class_="cell", id=anchor(cell.home))


def _settings(table: Table, cell: Cell) -> Html:
    listed = [tag("li", code(override)) for override in cell.overrides]
    command = f"python scripts/launch.py {table.argument} --cells {cell.name}"
    return join(
        tag("p", "Settings on top of the defaults (", code(command), "):", class_="quiet"),
        tag("ul", *listed, class_="settings"),
    )


def _runs_table(table: Table, rows: Sequence[Row]) -> Html:
    metrics = [metric for metric in table.metrics if any(metric in row.last for row in rows)]
    labels = [table.metrics[metric] for metric in metrics]
    header = ["seed", "status", *labels, f"best {table.metrics[table.primary]}", "steps"]
    header += ["seconds", "device", "torch", "commit", "changed settings", "error"]
    body = [_run_fields(row, metrics) for row in rows]
    kept = [i for i in range(len(header)) if i < 2 or any(fields[i][0] for fields in body)]
    return sortable([header[i] for i in kept], [[fields[i] for i in kept] for fields in body])


def _run_fields(row: Row, metrics: Sequence[str]) -> list[Field]:
    steps = "" if row.steps is None else f"{row.steps:,}"
    if row.status != Status.DONE and row.total_steps:
        steps += f" of {row.total_steps:,}"
    named = code(row.commit[:8]) if row.commit else "commit unknown"
    commit = join(named, f", {row.code_state}" if row.code_state else "")
    return [
        (str(row.seed), row.seed),
        (row.status, row.status),
        *((_value(row.last.get(metric)), row.last.get(metric)) for metric in metrics),
        (_value(row.best), row.best),
        (steps, row.steps),
        (_value(row.seconds), row.seconds),
        (row.device, row.device),
        (row.torch, row.torch),
        (commit, row.commit),
        (row.deviations, row.deviations),
        (row.error, row.error),
    ]


def _value(value: float | None) -> str:
    return "" if value is None else f"{value:.{SIGNIFICANT}g}"


def _recorded(table: Table, rows: Sequence[Row]) -> list[Html]:
    """Curves of all recorded runs together, then each run's complete settings and versions."""
    recorded = {_name(row): row for row in rows if row.record is not None}
    histories = {name: row.history() for name, row in recorded.items()}
    if not recorded:
        return [tag("p", "No learning curves were kept for these runs.", class_="quiet")]
    charts = [
        line_chart(metric, {n: _points(h, metric) for n, h in histories.items()}, log=log)
        for metric, log in _charted(table)
    ]
    drawn = [chart for chart in charts if chart is not None]
    parts = [tag("div", *drawn, class_="charts")] if drawn else []
    if drawn and len(recorded) > 1:
        parts.append(key(list(recorded)))
    return parts + [_surroundings(name, row) for name, row in recorded.items()]


def _points(history: Sequence[dict], metric: str) -> list[tuple[float, float]]:
    return list(zip(*series(history, metric), strict=True))


def _charted(table: Table) -> list[tuple[str, bool]]:
    """Metrics worth a chart, and whether on a log scale."""
    evaluated = table.primary if table.primary.startswith("eval/") else "eval/acc"
    return [("train/loss", True), (evaluated, False), ("train/penalty", False)]


def _name(row: Row) -> str:
    return f"seed {row.seed}" + (f" ({row.deviations})" if row.deviations else "")


def _surroundings(name: str, row: Row) -> Html:
    sessions = [_session(session) for session in row.record.sessions]
    config = yaml.safe_dump(row.record.config, sort_keys=False, allow_unicode=True)
    summary = tag("summary", f"{name}: complete settings, hardware, versions")
    return tag("details", summary, *sessions, tag("pre", config, tabindex="0"))


def _session(session: dict) -> Html:
    shown = {name: session.get(name) for name in ("start", "device", "host", "python", "commit")}
    shown |= {"changed since": {True: "yes", False: "no"}.get(session.get("dirty"), "not known")}
    shown |= session.get("versions") or {}
    shown |= {"command": session.get("command")}
    pairs = [join(tag("dt", name), tag("dd", str(value))) for name, value in shown.items() if value]
    return tag("dl", *pairs, class_="session")
