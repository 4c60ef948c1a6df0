"""One row per run, from all that is known of it: its folder, committed lines and records.

Rows are merged by (table, cell, seed, deviations). Two finished runs that claim one key with
different numbers are an error, never a choice, unless one of them is a fresh run of what is
committed: then `layered` says which it takes the place of.
"""

import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from ed.analysis.collect import CollectError, Row, collect, read_results
from ed.analysis.spec import Table
from ed.analysis.tables import load_table


def merge(rows: Iterable[Row]) -> list[Row]:
    """One row per key. Finished runs win; among others the later source knows better."""
    kept: dict[tuple, Row] = {}
    for row in rows:
        before = kept.get(row.key)
        if before is None or before.status != "done":
            if before is None or row.status != "pending":
                kept[row.key] = row
        elif row.status == "done" and not _agree(before, row):
            raise CollectError(
                f"two runs claiming the same cell {row.table}/{row.cell}/seed{row.seed}"
                f"{' (' + row.deviations + ')' if row.deviations else ''}: {before.source} has "
                f"{_numbers(before)}, {row.source} has {_numbers(row)}; remove the wrong one"
            )
        elif row.status == "done":
            known = {"last": row.last | before.last, "folder": before.folder or row.folder}
            best = row.best if before.best is None else before.best
            kept[row.key] = replace(before, best=best, **known)
    return list(kept.values())


def layered(*layers: Iterable[Row]) -> tuple[list[Row], list[tuple[Row, Row]]]:
    """Merged layers, the strongest first, and (kept, left out) where finished runs disagree."""
    known: dict[tuple, Row] = {}
    kept, replaced = [], []
    for layer in layers:
        rows = []
        for row in layer:
            stronger = known.get(row.key) if row.status == "done" else None
            if stronger is None or _agree(stronger, row):
                rows.append(row)
            else:
                replaced.append((stronger, row))
        known = {row.key: row for row in rows if row.status == "done"} | known
        kept = [*rows, *kept]  # merging, the later knows better
    return merge(kept), replaced


def result_path(table: Table, suffix: str) -> Path:
    return table.path.parent / "results" / f"{table.name}.{suffix}"


def committed(table: Table) -> list[Row]:
    """What the repository knows of a table: its CSV file, other tables' and committed records.

    Where they disagree, somebody has run anew what is committed, and that table's file has it.
    """
    own = read_results(result_path(table, "csv"), table)
    return layered(borrowed(table), own, collect(table, [records(table)]))[0]


def records(table: Table) -> Path:
    """Folders of committed runs, without their checkpoints."""
    return table.path.parent / "results" / "runs"


def borrowed(table: Table) -> list[Row]:
    """Committed rows of other tables whose runs this one shows, too."""
    homes = {cell.home for cell in table.points.values() if cell.home[0] != table.name}
    rows = []
    for name in sorted({home[0] for home in homes}):
        other = load_table(str(table.path.with_name(f"{name}.yaml")))
        read = read_results(result_path(other, "csv"), other)
        shared = [row for row in read if row.home in homes and not row.deviations]
        rows += [_seen_by(table, row, other) for row in shared if row.seed in table.seeds]
    return rows


def _seen_by(table: Table, row: Row, other: Table) -> Row:
    """A row of another table with this table's metrics alone, as a folder of the run would give."""
    last = {metric: row.last[metric] for metric in table.metrics if metric in row.last}
    return replace(row, last=last, best=row.best if table.primary == other.primary else None)


def _agree(one: Row, other: Row) -> bool:
    """Whether what both know is the same; another machine may sum in another order."""
    shared = [(one.last[key], other.last[key]) for key in one.last.keys() & other.last.keys()]
    if None not in (one.best, other.best):
        shared.append((one.best, other.best))
    return one.steps == other.steps and all(math.isclose(*pair, rel_tol=1e-9) for pair in shared)


def _numbers(row: Row) -> tuple:
    return row.steps, row.last, row.best
