"""Where the numbers of a table come from: unfinished runs, hardware, versions, commits."""

from collections.abc import Sequence

from ed.analysis.collect import UNKNOWN_CODE, Row
from ed.analysis.spec import Table
from ed.runtime.runs import BROKEN, UNDER_WAY, Status


def remarks(rows: Sequence[Row]) -> list[str]:
    """Runs that have not finished, and finished ones whose code had uncommitted changes."""
    found = []
    for row in rows:
        if row.status in UNDER_WAY:
            found.append(f"seed {row.seed} is at step {row.steps} of {row.total_steps or '?'}")
        elif row.status in BROKEN:
            found.append(f"seed {row.seed} failed: {row.error}")
    seeds = [str(row.seed) for row in rows if row.status == Status.DONE and row.dirty]
    if seeds:
        found.append(f"uncommitted changes in the code of seed {', '.join(seeds)}")
    return found


def footer(table: Table, rows: Sequence[Row]) -> str:
    """How many runs are done, with which hardware, versions and code."""
    done = [row for row in rows if row.status == Status.DONE]
    made = f"Made by `python scripts/table.py {table.argument} --commit`; do not edit."
    if not done:
        return f"No run is done yet. {made}"
    hours = sum(row.seconds or 0 for row in done) / 3600
    devices, versions = _distinct(row.device for row in done), _distinct(row.torch for row in done)
    commits = _distinct(row.commit[:8] for row in done)
    best = any(metric.startswith("best/") for metric in table.metrics)
    reported = "The last step is reported" + (", and beside it the best evaluation" if best else "")
    return (
        f"{_runs(len(done))} {'is' if len(done) == 1 else 'are'} done, {hours:.2f} hours in all, "
        f"on {devices} with torch {versions}, commit {commits}. {_unknown_code(done)}"
        f"{reported}. {made}"
    )


def _distinct(values) -> str:
    """The values in order, `unknown` for those that are empty."""
    found = set(values)
    return ", ".join(sorted(found - {""}) + ["unknown"] * ("" in found))


def _unknown_code(done: Sequence[Row]) -> str:
    count = sum(row.code_state == UNKNOWN_CODE for row in done)
    if not count:
        return ""
    return (
        f"Code state unknown: {_runs(count)} (no record of whether the code had uncommitted "
        "changes). "
    )


def _runs(count: int) -> str:
    return "1 run" if count == 1 else f"{count} runs"
