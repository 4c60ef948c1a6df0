"""The results store: experiments/results/<table>/, one folder per table.

    README.md        the table, its figure and notes; generated, never edited
    runs.csv         one line per run: final numbers, device, versions, commit
    curves.parquet   every logged value of every run, with its config (see ed.analysis.curves)
    figure.png       present if the experiment file names a figure
    notes.md         optional, written by hand; appended to the README

Curves of runs shared with `same_as` stay in the folder of the table that owns them. The results
of probes (experiments/probes/) are in experiments/probes/results/.
"""

import csv
import io
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ed.analysis.collect import CollectError, Row, other_run, row_of
from ed.analysis.curves import read_curves, write_curves
from ed.analysis.merging import layered, merge
from ed.analysis.render import to_markdown
from ed.analysis.spec import Table, expand, reduced_name
from ed.analysis.tables import load_table
from ed.runtime.files import csv_text, from_csv_text, write_atomic
from ed.runtime.runs import Status

README, CSV, CURVES, NOTES, FIGURE = "README.md", "runs.csv", "curves.parquet", "notes.md", "figure"
COLUMNS = ("table", "cell", "seed", "deviations", "status", "steps", "total_steps")
PROVENANCE = ("seconds", "device", "torch", "commit", "dirty", "error")


def results_folder(table: Table, name: str | None = None) -> Path:
    """Returns the results folder of a table, or of its sibling table `name`."""
    return table.path.parent / "results" / (name or table.name)


def committed(table: Table, *, fresh: Collection[tuple] = ()) -> list[Row]:
    """Returns the committed rows of a table, from its CSV file, its records and other tables.

    Rows of other tables take precedence, as they may have a newer run of a shared cell.

    Args:
        fresh: keys of finished runs that replace committed ones.
    """
    own = read_results(results_folder(table) / CSV, table)
    return layered(borrowed(table), own, stored(table, fresh=fresh))[0]


def stored(table: Table, *, fresh: Collection[tuple] = ()) -> list[Row]:
    """Returns the rows of all runs with a record; raises if a record does not match its run."""
    rows, records = [], {}
    for run in expand(table):
        if run.table not in records:
            records[run.table] = read_curves(results_folder(table, run.table) / CURVES)
        record = records[run.table].get((run.cell, run.seed))
        if record is None:
            continue
        other = other_run(run, table, record)
        if other is None:
            rows.append(row_of(run, table, record, record.status))
        elif (run.table, run.cell, run.seed, "") not in fresh:
            raise CollectError(
                f"{record.source} has {other}; launch it again, or restore {table.path}"
            )
    return rows


def borrowed(table: Table) -> list[Row]:
    """Returns the committed rows that this table shares with others."""
    homes = {cell.home for cell in table.points.values() if cell.home[0] != table.name}
    rows = []
    for name in sorted({home[0] for home in homes}):
        other = load_table(str(table.path.with_name(f"{name}.yaml")))
        read = read_results(results_folder(other) / CSV, other)
        shared = [row for row in read if row.home in homes and not row.deviations]
        rows += [_seen_by(table, row, other) for row in shared if row.seed in table.seeds]
    return rows


def _seen_by(table: Table, row: Row, other: Table) -> Row:
    """Restricts a row of another table to the metrics of this one."""
    last = {metric: row.last[metric] for metric in table.metrics if metric in row.last}
    return replace(row, last=last, best=row.best if table.primary == other.primary else None)


def write_results(
    table: Table, rows: Sequence[Row], folder: Path, figures: Mapping[str, bytes]
) -> None:
    """Writes the results folder of a table; `figures` maps file names to new figures."""
    folder.mkdir(parents=True, exist_ok=True)
    stopped = {Status.RUNNING: Status.STOPPED}  # committed results are never "running"
    rows = [replace(row, status=stopped.get(row.status, row.status)) for row in rows]
    write_atomic(folder / CSV, to_csv(table, rows))
    write_curves(folder / CURVES, _own_records(table, rows))
    for name, content in figures.items():
        write_atomic(folder / name, content)
    write_atomic(folder / README, readme(table, rows, folder))


def _own_records(table: Table, rows: Sequence[Row]) -> dict:
    """Returns the records of the table's own started runs, in order, except reduced runs."""
    own = {
        (row.cell, row.seed): row.record
        for row in rows
        if row.table == table.name and not row.deviations and row.status != Status.PENDING
    }
    order = [cell.home[1] for cell in table.points.values()]
    keys = sorted(own, key=lambda key: (order.index(key[0]), key[1]))
    return {key: own[key] for key in keys if own[key] is not None}


def readme(table: Table, rows: Sequence[Row], folder: Path) -> str:
    """Renders the README of a results folder, with its figures and notes."""
    names = {d: f"{figure_stem(d)}.png" for d in sorted({row.deviations for row in rows})}
    drawn = {d: name for d, name in names.items() if (folder / name).exists()}
    notes = folder / NOTES
    written = notes.read_text("utf-8") if notes.exists() else ""
    return to_markdown(table, rows, figures=drawn if table.figure else {}, notes=written)


def figure_stem(deviations: str) -> str:
    """Returns the file stem of a figure; reduced runs have their own figures."""
    return reduced_name(FIGURE, deviations.split())


def is_current(table: Table) -> bool:
    """Whether the CSV file and the README have the table's committed runs, shared ones included."""
    folder = results_folder(table)
    there = [(folder / name).exists() for name in (CSV, README)]
    if not all(there):
        return not any(there)  # a table without results is up to date
    own = read_results(folder / CSV, table)
    merge([*own, *stored(table)])  # raises if the CSV file and the records disagree
    rows = committed(table)
    same_csv = (folder / CSV).read_text("utf-8") == to_csv(table, rows)
    return same_csv and (folder / README).read_text("utf-8") == readme(table, rows, folder)


def columns(table: Table) -> list[str]:
    """Returns the header of the table's CSV file."""
    values = [f"last:{metric}" for metric in table.metrics]
    return [*COLUMNS, *values, f"best:{table.primary}", *PROVENANCE]


def to_csv(table: Table, rows: Sequence[Row]) -> str:
    """Renders one line per started run, in the table's order."""
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
    """Reads a committed CSV file; errors name the invalid line."""
    if not path.exists():
        return []
    text = path.read_text("utf-8")
    reader = csv.reader(io.StringIO(text, newline=""))
    header = next(reader, [])
    if header != columns(table):
        wrong = sorted(set(header) ^ set(columns(table))) or header
        raise CollectError(
            f"{path}, line 1: not the header of table {table.name} ({', '.join(wrong)}); "
            f"expected {','.join(columns(table))}"
        )
    rows = [_csv_row(values, table, f"{path}, line {reader.line_num}") for values in reader]
    if not text.endswith("\n"):
        raise CollectError(f"{path}, line {reader.line_num}: truncated; restore the file")
    return rows


def _csv_row(values: list[str], table: Table, where: str) -> Row:
    if len(values) != len(columns(table)):
        raise CollectError(
            f"{where}: {len(values)} fields instead of {len(columns(table))}; restore the file"
        )
    raw = dict(zip(columns(table), map(from_csv_text, values), strict=True))
    homes = {cell.home for cell in table.points.values()}
    if (raw["table"], raw["cell"]) not in homes:
        raise CollectError(f"{where}: table {table.name} has no cell {raw['table']}/{raw['cell']}")
    if raw["seed"] not in map(str, table.seeds):
        raise CollectError(f"{where}: table {table.name} has no seed {raw['seed']}")
    if raw["status"] not in list(Status) or raw["dirty"] not in ("", "yes", "no"):
        raise CollectError(f"{where}: invalid status {raw['status']!r} or dirty {raw['dirty']!r}")
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
