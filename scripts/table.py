# ruff: noqa: E402, imports follow the line that lets a plain checkout find ed
"""Collect a table's runs: python scripts/table.py TABLE [--latex] [--out DIR] [--commit] [--check]

Prints the paper's numbers beside ours. --out DIR writes TABLE.md, TABLE.csv (one line per run) and
figures there; --commit writes them to results/ beside the table's file, where the repository keeps
its own. Rows in the committed CSV file stay: runs done on another machine arrive as its lines
(--add), or as copied run folders (--runs). Two runs that claim one cell with different numbers are
an error.

A data figure of the paper is a table whose file says `figure: ed.figures.NAME:draw`. Once runs are
done, draw(table, rows) -> matplotlib Figure (None while too few are) gives TABLE.png and TABLE.pdf:
    table       ed.analysis.spec.Table: cells, labels, metrics, paper's numbers
    rows        ed.analysis.collect.Row, the finished ones without deviations, in the table's order
    row.last    the final value of each of the table's metrics
    row.history()   all that the run logged: [{"step": 50, "train/loss": ...}, ...]; it needs the
                run's folder, under --runs or committed under experiments/results/runs; where one is
                missing, the figure stays as it is (--available draws the others, and runs under way
                of cells that have none finished, and says so)
The function is pure and loads no torch; size and layout are its own, fonts and files are not.
Rows with deviations (launch.py --set) are drawn apart, as TABLE@..., and marked as reduced.
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from ed.analysis.collect import NoHistory, Row, collect, seed_differences
from ed.analysis.experiments import load_table, table_names
from ed.analysis.merging import layered, merge
from ed.analysis.render import to_latex, to_markdown
from ed.analysis.spec import SpecError, Table, reduced_name
from ed.analysis.store import committed, read_results, records, result_path, to_csv
from ed.runtime.files import HOME, write_atomic
from ed.runtime.runs import UNDER_WAY, Status


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    try:
        names = table_names() if options.tables == ["all"] else options.tables
        stale = [name for name in names if not handle(load_table(name), options)]
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for name in stale:
        print(
            f"error: the results of {name} are not what its CSV file gives: run "
            f"python scripts/table.py {name} --commit",
            file=sys.stderr,
        )
    return 1 if stale else 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tables", nargs="+", metavar="TABLE", help="names, files, or all")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write the table's files there")
    commit = "write them to results/ beside the table's file, over the committed ones"
    parser.add_argument("--commit", action="store_true", help=commit)
    parser.add_argument("--latex", action="store_true", help="print the table as LaTeX as well")
    parser.add_argument("--check", action="store_true", help="only see that .md follows from .csv")
    parser.add_argument("--runs", nargs="+", type=Path, default=[HOME / "runs"], metavar="DIR")
    available = "draw figures of what is here: not all that is done, or runs under way"
    parser.add_argument("--available", action="store_true", help=available)
    parser.add_argument("--add", nargs="+", type=Path, default=[], metavar="CSV")
    return parser.parse_args(arguments)


def handle(table: Table, options: argparse.Namespace) -> bool:
    """Prints the table and writes its files, or tells whether the committed ones are up to date."""
    csv_path, markdown_path = (result_path(table, suffix) for suffix in ("csv", "md"))
    if options.check:
        return up_to_date(table, csv_path, markdown_path)
    missing = [path for path in options.add if not path.exists()]
    if missing:
        raise SpecError(f"--add {missing[0]}: no such file")
    added = [row for path in options.add for row in read_results(path, table)]
    theirs = merge([*committed(table), *added])
    rows, replaced = layered(merge(collect(table, options.runs, warn=warn_of_damage)), theirs)
    for new, old in replaced:
        told = [f"{row.source} ({row.last.get(table.primary)})" for row in (new, old)]
        print(f"warning: {told[0]} takes the place of {told[1]}", file=sys.stderr)
    for difference in seed_differences(rows, table):
        print(f"warning: {difference}; their mean is shown all the same", file=sys.stderr)
    print(to_markdown(table, rows))
    folders = [csv_path.parent] if options.commit else []
    for folder in [*folders, *([options.out] if options.out else [])]:
        write(table, rows, folder, available=options.available)
    if options.latex:
        print(to_latex(table, rows))
    return True


def warn_of_damage(reason: str) -> None:
    print(f"warning: left out: {reason}", file=sys.stderr)


def write(table: Table, rows: list[Row], folder: Path, *, available: bool) -> None:
    """TABLE.csv, TABLE.md and the figures, in one folder."""
    folder.mkdir(parents=True, exist_ok=True)
    markdown_path = folder / f"{table.name}.md"
    write_atomic(folder / f"{table.name}.csv", to_csv(table, rows))
    draw(table, rows, folder, available=available)
    figures = figures_beside(table, rows, folder)
    write_atomic(markdown_path, to_markdown(table, rows, figures=figures))
    done = sum(row.status == Status.DONE for row in rows)
    print(f"{markdown_path}: {done} of {len(rows)} runs done")


def draw(table: Table, rows: list[Row], folder: Path, *, available: bool) -> None:
    """Writes the table's figures, where it has any: of its own runs, and of each reduction."""
    if table.figure is None:
        return
    from ed.figures.files import figure_files  # matplotlib: only where something is drawn

    drawable = (Status.DONE, *UNDER_WAY) if available else (Status.DONE,)
    for deviations in dict.fromkeys(row.deviations for row in rows if row.status in drawable):
        try:
            files = figure_files(table, rows, deviations, available=available)
        except NoHistory as missing:
            done = [r for r in rows if (r.status, r.deviations) == (Status.DONE, deviations)]
            here = sum(row.record is not None for row in done)
            print(
                f"no figure of {reduced_name(table.name, deviations.split())} is drawn: of "
                f"{len(done)} finished runs {here} have their folders here ({missing} has not); "
                "give the others by --runs, or draw these alone with --available",
                file=sys.stderr,
            )
            continue
        for name, content in files.items():
            write_atomic(folder / name, content)
            print(folder / name)


def figures_beside(table: Table, rows: list[Row], folder: Path) -> dict[str, str]:
    """Its image and those of its reductions, where they have been drawn, by deviations."""
    if table.figure is None:
        return {}
    names = {
        d: f"{reduced_name(table.name, d.split())}.png" for d in {row.deviations for row in rows}
    }
    return {d: name for d, name in sorted(names.items()) if (folder / name).exists()}


def up_to_date(table: Table, csv_path: Path, markdown_path: Path) -> bool:
    if not csv_path.exists() and not markdown_path.exists():
        return True  # nothing is claimed, so nothing is wrong
    if not (csv_path.exists() and markdown_path.exists()):
        return False
    rows = merge(read_results(csv_path, table))
    merge([*rows, *collect(table, [records(table)])])  # they must agree
    same_csv = csv_path.read_text("utf-8") == to_csv(table, rows)
    return same_csv and markdown_path.read_text("utf-8") == to_markdown(
        table, rows, figures=figures_beside(table, rows, csv_path.parent)
    )


if __name__ == "__main__":
    sys.exit(main())
