"""Reports the status of a table's runs, for `launch.py --status`."""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from ed.analysis.collect import DAMAGED, Row, by_error, likewise, row_or_damage
from ed.analysis.markdown import plural
from ed.analysis.spec import Run, Table
from ed.analysis.store import CSV, borrowed, read_results, results_folder
from ed.engine.errors import INTERRUPTED
from ed.runtime.console import interactive, print_line, print_table, terminal
from ed.runtime.runs import BROKEN, UNDER_WAY, Status, is_done
from scripts.slurm import queued_among

QUEUED = "queued"  # a run that SLURM has not started yet
COMMITTED = "committed"  # a run with committed results but no local folder


def standings(runs: Sequence[Run], table: Table) -> list[Row]:
    """Returns the status of every run, from its folder and from SLURM's queue."""
    # query SLURM first: a task that has left the queue has recorded its result in the folder
    queued, notes = queued_among(run.folder for run in runs if not is_done(run.folder))
    rows = [standing(run, table, run.folder in queued) for run in runs]
    for index, run in enumerate(runs):
        if run.folder in notes:
            rows[index] = replace(rows[index], status=DAMAGED, error=notes[run.folder])
    return rows


def standing(run: Run, table: Table, is_queued: bool) -> Row:
    row = row_or_damage(run, table)
    if is_queued and row.status not in (Status.DONE, Status.RUNNING, DAMAGED):
        return replace(row, status=QUEUED, error="")
    return row


def with_committed(rows: Sequence[Row], table: Table) -> list[Row]:
    """Marks runs without a local folder as COMMITTED if their results are committed."""
    known = [*borrowed(table), *read_results(results_folder(table) / CSV, table)]
    done = {row.key: row for row in known if row.status == Status.DONE}
    return [
        replace(done[row.key], status=COMMITTED)
        if row.status == Status.PENDING and row.key in done
        else row
        for row in rows
    ]


def report(table: Table, rows: Sequence[Row]) -> int:
    """Prints the status of every run, totals first; returns the exit code (0 if all are done)."""
    print(f"{table.name}: {totals(rows)}")
    if interactive():
        print_grid(table, rows)
    else:
        print_rows(table, rows)
    counts = Counter(row.status for row in rows)
    broken = sum(counts[status] for status in BROKEN)
    if counts[Status.FAILED]:  # diverged runs would only diverge again
        print("hint: failed runs are skipped; --rerun-failed runs them again")
    if counts[Status.DONE] + counts[COMMITTED] == len(rows):
        return 0
    return 1 if broken or counts[DAMAGED] else INTERRUPTED


def totals(rows: Sequence[Row]) -> str:
    """Returns text such as `9 runs: 7 done (5 committed), 1 running, 1 pending`."""
    counts = Counter(Status.DONE if row.status == COMMITTED else row.status for row in rows)
    committed = sum(row.status == COMMITTED for row in rows)
    remarks = {Status.DONE: f" ({committed} committed)"} if committed else {}
    words = [f"{count} {status}{remarks.get(status, '')}" for status, count in counts.items()]
    return f"{plural(len(rows), 'run')}: {', '.join(words)}"


def print_rows(table: Table, rows: Sequence[Row]) -> None:
    """Prints one line per run, for output that is not a terminal."""
    names = [_name(row, table) for row in rows]
    width = max(map(len, names))
    for name, row in zip(names, rows, strict=True):
        about = f"{row.last[table.primary]:.4g}" if table.primary in row.last else ""
        if row.status in UNDER_WAY:
            about = f"{row.steps or 0} of {row.total_steps or '?'} steps  {about}"
        print(f"{name:{width}}  seed {row.seed}  {row.status:8} {row.error or about}".rstrip())


def print_grid(table: Table, rows: Sequence[Row]) -> None:
    """Prints a grid of cells by seeds, then the errors, for terminals."""
    by_cell: dict[str, dict[int, Row]] = {}
    for row in rows:
        by_cell.setdefault(_name(row, table), {})[row.seed] = row
    seeds = sorted({row.seed for row in rows})
    widest = 3 + max(map(len, by_cell)) + len(seeds) * (len("✓ committed") + 2)
    short = widest > terminal().width
    header = ["", *(f"{seed}" if short else f"seed {seed}" for seed in seeds)]
    body = [
        [name, *(mark(own[s], short=short) if s in own else "" for s in seeds)]
        for name, own in by_cell.items()
    ]
    print_table([header, *body])
    if short:
        print("  ✓ done   ✓c committed   % running   ✗ failed   · pending")
    for same in by_error(row for row in rows if row.error):
        first = f"{_name(same[0], table)} seed {same[0].seed}: {same[0].error}"
        print_line(f"✗ {likewise(first, same)}", logging.ERROR)


def _name(row: Row, table: Table) -> str:
    """Returns the cell of a run, with its table if that is another one."""
    return row.cell if row.table == table.name else f"{row.table}/{row.cell}"


def mark(row: Row, *, short: bool) -> tuple[str, str]:
    """Returns the status of a run as a short text, and its style."""
    share = f"{(row.steps or 0) / row.total_steps:.0%}" if row.total_steps else "?"
    sign, style, brief = {
        COMMITTED: ("✓ committed", "cyan", "✓c"),
        Status.DONE: ("✓ done", "green", "✓"),
        Status.RUNNING: (f"running {share}", "yellow", share),
        Status.STOPPED: (f"stopped {share}", "magenta", share),
        Status.PENDING: ("· pending", "dim", "·"),
        QUEUED: ("· queued", "yellow", "q"),
    }.get(row.status, (f"✗ {row.status}", "bold red", "✗"))
    return (brief if short else sign), style
