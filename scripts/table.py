"""Collect a table's runs: python scripts/table.py TABLE [--latex] [--out DIR] [--commit] [--check]

Prints the paper's numbers beside ours, as Markdown if the output is not a terminal. Our numbers
come from run folders (--runs) and from the committed results; new runs take precedence. --commit
updates the table's folder under results/: README.md, runs.csv (one line per run), curves.parquet
(every logged value) and figure.png. --out DIR writes the same files to DIR/TABLE, and figure.pdf.
To add runs from another machine, copy their folders (--runs) or use lines of a CSV file (--add).
Two runs of the same cell and seed with different numbers are an error.

A figure of the paper is a table whose file has `figure: ed.figures.NAME:draw`. When runs are done,
draw(table, rows) returns a matplotlib Figure, or None for too few runs:
    table       ed.analysis.spec.Table: cells, labels, metrics, paper's numbers
    rows        list of ed.analysis.collect.Row: finished runs without deviations, in table order
    row.last    the final value of each of the table's metrics
    row.history()   all logged values: [{"step": 50, "train/loss": ...}, ...]. If a run lacks them,
                the figure is not updated; --available draws the other runs, and unfinished
                runs in cells without a finished one, and notes this in the figure
The function must be pure and not import torch. It sets size and layout, but not fonts or files.
ed.figures.cost:draw also reads step times from results/speed/steps.csv, which scripts/benchmark.py
--tables TABLE writes; without them there is no figure.
Reduced runs (launch.py --set) are shown and drawn separately. They are never committed with the
table; to commit them, make them a probe, experiments/probes/NAME.yaml.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works without installing ed

from ed.analysis.collect import (
    NoHistory,
    Row,
    collect,
    likewise,
    missing_metrics,
    seed_differences,
)
from ed.analysis.merging import layered, merge
from ed.analysis.render import to_latex, to_markdown
from ed.analysis.spec import EXPERIMENTS, PROBES, SpecError, Table, reduced_name
from ed.analysis.store import (
    README,
    committed,
    is_current,
    read_results,
    results_folder,
    write_results,
)
from ed.analysis.tables import load_table, table_names
from ed.engine.errors import explain, or_explain
from ed.runtime.console import interactive, print_markdown
from ed.runtime.files import HOME
from ed.runtime.runs import UNDER_WAY, Status

RUNS = HOME / "runs"


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    try:
        require(options)
        names = all_names() if options.tables == ["all"] else options.tables
        if options.check:
            return check(names)
        for name in names:
            handle(load_table(name), options)
    except Exception as error:
        return explain(error)
    return 0


def check(names: Sequence[str]) -> int:
    """Returns 0 if the committed results of all tables are up to date, otherwise 1."""
    stale = [name for name in names if not is_current(load_table(name))]
    for name in stale:
        print(
            f"error: the results of {name} are out of date; run "
            f"python scripts/table.py {name} --commit",
            file=sys.stderr,
        )
    return int(bool(stale))


def require(options: argparse.Namespace) -> None:
    """Raises unless the given folders and files exist; the default run folder may be missing."""
    for name, paths in (("--runs", options.runs), ("--add", options.add)):
        missing = [path for path in paths if not path.exists() and path != RUNS]
        if missing:
            raise SpecError(f"{name} {missing[0]}: no such file or folder")


def all_names() -> list[str]:
    """Returns the names of all tables, then of all probes."""
    return table_names() + [f"{PROBES}/{name}" for name in table_names(EXPERIMENTS / PROBES)]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tables", nargs="+", metavar="TABLE", help="names, files, or all")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="write the table's files to DIR/TABLE"
    )
    commit = "update the committed files of the table under results/"
    parser.add_argument("--commit", action="store_true", help=commit)
    parser.add_argument("--latex", action="store_true", help="also print the table as LaTeX")
    check = "only check that the committed files are up to date"
    parser.add_argument("--check", action="store_true", help=check)
    runs = "folders with runs (default: runs)"
    parser.add_argument("--runs", nargs="+", type=Path, default=[RUNS], metavar="DIR", help=runs)
    available = "draw only runs with logged values, finished or not"
    parser.add_argument("--available", action="store_true", help=available)
    added = "also use runs from these files, in the format of runs.csv"
    parser.add_argument("--add", nargs="+", type=Path, default=[], metavar="CSV", help=added)
    return parser.parse_args(arguments)


def handle(table: Table, options: argparse.Namespace) -> None:
    """Prints the table and writes its files."""
    added = [row for path in options.add for row in read_results(path, table)]
    ours = merge(collect(table, options.runs, warn=warn_of_damage))
    fresh = {row.key for row in ours if row.status == Status.DONE}
    rows, replaced = layered(ours, merge([*committed(table, fresh=fresh), *added]))
    if replaced:
        names = [f"{row.source} ({row.last.get(table.primary)})" for row in replaced[0]]
        swap = f"{names[0]} takes the place of {names[1]}"
        print(f"warning: {likewise(swap, [new for new, _ in replaced])}", file=sys.stderr)
    for difference in seed_differences(rows, table):
        print(f"warning: {difference}; the mean is shown anyway", file=sys.stderr)
    if missing := missing_metrics(rows, table):
        print(
            f"warning: no finished run has {', '.join(missing)}: fix the name in "
            f"{table.path.name}, or launch again to take new measures",
            file=sys.stderr,
        )
    show(table, rows)
    if options.commit and any(row.status != Status.PENDING for row in rows):
        own = without_reduced(rows)
        write(table, own, results_folder(table), ("png",), available=options.available)
    if options.out:
        write(table, rows, options.out / table.name, ("png", "pdf"), available=options.available)
    if options.latex:
        print(to_latex(table, rows))


def show(table: Table, rows: list[Row]) -> None:
    """Prints the table: without notes on a terminal, otherwise as complete Markdown."""
    if interactive():
        print_markdown(to_markdown(replace(table, notes=()), rows))
    else:
        print(to_markdown(table, rows))


def warn_of_damage(reason: str) -> None:
    print(f"warning: left out: {reason}", file=sys.stderr)


def without_reduced(rows: list[Row]) -> list[Row]:
    """Returns the rows to commit: all except reduced runs."""
    reduced = sorted({row.deviations for row in rows} - {""})
    if reduced:
        print(
            f"note: --commit leaves out reduced runs ({'; '.join(reduced)}); make them a probe, "
            f"experiments/{PROBES}/NAME.yaml, to commit them",
            file=sys.stderr,
        )
    return [row for row in rows if not row.deviations]


def write(
    table: Table, rows: list[Row], folder: Path, kinds: Sequence[str], *, available: bool
) -> None:
    """Writes the table's folder, with separate figures for reduced runs, in these formats."""
    figures = {} if table.figure is None else draw(table, rows, kinds, available=available)
    write_results(table, rows, folder, figures)
    for name in figures:
        print(folder / name)
    done = sum(row.status == Status.DONE for row in rows)
    print(f"{folder / README}: {done} of {len(rows)} runs done")


def draw(
    table: Table, rows: list[Row], kinds: Sequence[str], *, available: bool
) -> dict[str, bytes]:
    """Returns the files of all figures that can be drawn."""
    from ed.figures.files import figure_files  # imports matplotlib

    drawable = (Status.DONE, *UNDER_WAY) if available else (Status.DONE,)
    files = {}
    for deviations in dict.fromkeys(row.deviations for row in rows if row.status in drawable):
        try:
            files |= figure_files(table, rows, deviations, available=available, kinds=kinds)
        except NoHistory as missing:
            done = [r for r in rows if (r.status, r.deviations) == (Status.DONE, deviations)]
            here = sum(row.record is not None for row in done)
            print(
                f"no figure of {reduced_name(table.name, deviations.split())} is drawn: {here} of "
                f"{len(done)} finished runs have logged values here ({missing} has not); "
                "add the missing folders with --runs, or draw the others with --available",
                file=sys.stderr,
            )
    return files


if __name__ == "__main__":
    sys.exit(or_explain(main))
