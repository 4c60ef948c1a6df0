"""Merges rows that describe the same run: from run folders, committed CSV files and records.

The key of a row is (table, cell, seed, deviations). Two finished runs with the same key but
different numbers raise an error, unless a new run replaces a committed one; `layered` then
reports the replaced row.
"""

import math
from collections.abc import Iterable
from dataclasses import replace

from ed.analysis.collect import CollectError, Row
from ed.runtime.runs import Status


def merge(rows: Iterable[Row]) -> list[Row]:
    """Returns one row per key: the finished run if there is one, else the last row."""
    kept: dict[tuple, Row] = {}
    for row in rows:
        before = kept.setdefault(row.key, row)
        if before is row:
            continue
        if before.status == row.status == Status.DONE:
            kept[row.key] = _joined(before, row)
        elif before.status != Status.DONE and row.status != Status.PENDING:
            same = row.record is None and before.steps == row.steps
            kept[row.key] = replace(row, record=before.record) if same else row
    return list(kept.values())


def _joined(before: Row, row: Row) -> Row:
    """Joins two rows of a finished run; raises if their numbers differ."""
    if not _agree(before, row):
        raise CollectError(
            f"two runs of the same cell {row.table}/{row.cell}/seed{row.seed}"
            f"{' (' + row.deviations + ')' if row.deviations else ''}: {before.source} has "
            f"{_numbers(before)}, {row.source} has {_numbers(row)}; remove the wrong one"
        )
    more = row.last.keys() - before.last.keys()  # e.g. a measure added later
    records = (row.record, before.record) if more else (before.record, row.record)
    best = row.best if before.best is None else before.best
    return replace(before, last=row.last | before.last, best=best, record=records[0] or records[1])


def layered(*layers: Iterable[Row]) -> tuple[list[Row], list[tuple[Row, Row]]]:
    """Merges layers, given in order of precedence, and returns (kept, replaced) finished runs."""
    known: dict[tuple, Row] = {}
    kept, replaced = [], []
    for layer in layers:
        rows = []
        for row in layer:
            stronger = known.get(row.key) if row.status == Status.DONE else None
            if stronger is None or _agree(stronger, row):
                rows.append(row)
            else:
                replaced.append((stronger, row))
        known = {row.key: row for row in rows if row.status == Status.DONE} | known
        kept = [*rows, *kept]  # `merge` prefers later rows
    return merge(kept), replaced


def _agree(one: Row, other: Row) -> bool:
    """Whether shared values agree, up to floating-point differences between machines."""
    shared = [(one.last[key], other.last[key]) for key in one.last.keys() & other.last.keys()]
    if None not in (one.best, other.best):
        shared.append((one.best, other.best))
    return one.steps == other.steps and all(math.isclose(*pair, rel_tol=1e-9) for pair in shared)


def _numbers(row: Row) -> tuple:
    return row.steps, row.last, row.best
