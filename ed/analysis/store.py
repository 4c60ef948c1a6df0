"""The results of a table that the repository holds."""

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ed.analysis.collect import CollectError, Row, collect
from ed.analysis.experiments import load_table
from ed.analysis.merging import layered
from ed.analysis.spec import Table
from ed.runtime.files import csv_text, from_csv_text
from ed.runtime.runs import Status

COLUMNS = ("table", "cell", "seed", "deviations", "status", "steps", "total_steps")
PROVENANCE = ("seconds", "device", "torch", "commit", "dirty", "error")


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


def columns(table: Table) -> list[str]:
    """Header of the table's CSV file."""
    values = [f"last:{metric}" for metric in table.metrics]
    return [*COLUMNS, *values, f"best:{table.primary}", *PROVENANCE]


def to_csv(table: Table, rows: Sequence[Row]) -> str:
    """One line per run, in the table's order; runs that have not begun are left out."""
    order = {cell.home: place for place, cell in enumerate(table.points.values())}
    begun = [row for row in rows if row.status != Status.PENDING]
    begun.sort(key=lambda row: (row.deviations, order[row.home], row.seed))
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns(table))
    for row in begun:
        writer.writerow([_csv_field(row, name) for name in columns(table)])
    return text.getvalue()


def _csv_field(row: Row, name: str) -> str:
    kind, _, metric = name.partition(":")
    value = row.last.get(metric) if kind == "last" else getattr(row, kind)
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return repr(value) if isinstance(value, float) else csv_text(str(value))


def read_results(path: Path, table: Table) -> list[Row]:
    """Rows of a committed CSV file; a line that is not one of ours is an error with its number."""
    if not path.exists():
        return []
    text = path.read_text("utf-8")
    reader = csv.reader(io.StringIO(text, newline=""))
    header = next(reader, [])
    if header != columns(table):
        wrong = sorted(set(header) ^ set(columns(table))) or header
        raise CollectError(
            f"{path}, line 1: not the header of table {table.name} ({', '.join(wrong)}); "
            f"needed is {','.join(columns(table))}"
        )
    rows = [_csv_row(values, table, f"{path}, line {reader.line_num}") for values in reader]
    if not text.endswith("\n"):
        raise CollectError(f"{path}, line {reader.line_num}: cut short; restore the file")
    return rows


def _csv_row(values: list[str], table: Table, where: str) -> Row:
    if len(values) != len(columns(table)):
        raise CollectError(
            f"{where}: {len(values)} fields instead of {len(columns(table))}; the line is cut "
            "short or foreign"
        )
    raw = dict(zip(columns(table), map(from_csv_text, values), strict=True))
    homes = {cell.home for cell in table.points.values()}
    if (raw["table"], raw["cell"]) not in homes:
        raise CollectError(f"{where}: table {table.name} has no cell {raw['table']}/{raw['cell']}")
    if raw["seed"] not in map(str, table.seeds):
        raise CollectError(f"{where}: table {table.name} has no seed {raw['seed']}")
    if raw["status"] not in list(Status) or raw["dirty"] not in ("", "yes", "no"):
        raise CollectError(
            f"{where}: status {raw['status']!r}, dirty {raw['dirty']!r} make no sense"
        )
    try:
        return Row(
            table=raw["table"],
            cell=raw["cell"],
            seed=int(raw["seed"]),
            deviations=raw["deviations"],
            status=Status(raw["status"]),
            steps=_number(raw["steps"], int),
            total_steps=_number(raw["total_steps"], int),
            last={m: _number(raw[f"last:{m}"]) for m in table.metrics if raw[f"last:{m}"]},
            best=_number(raw[f"best:{table.primary}"]),
            seconds=_number(raw["seconds"]),
            dirty=None if raw["dirty"] == "" else raw["dirty"] == "yes",
            source=where,
            **{name: raw[name] for name in ("device", "torch", "commit", "error")},
        )
    except ValueError as error:
        raise CollectError(f"{where}: {error}") from None


def _number(text: str, kind: type = float):
    if text == "":
        return None
    value = kind(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a finite number")
    return value
