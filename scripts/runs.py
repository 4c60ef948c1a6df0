"""Summarise a sweep: python scripts/runs.py [FOLDER ...] [--metrics eval/acc ...] [--csv]

Prints one line per setting: the keys that differ between runs, and the mean and standard deviation
over seeds of each metric at the last step. The default folder is runs/adhoc, where `train.py` and
`train.py -m` save runs that are started in the current folder. For tables of the paper, use
scripts/table.py.
"""

import argparse
import csv
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works without installing ed

from ed.analysis.sweeps import aligned, read_runs, run_rows, summary_rows
from ed.engine.errors import explain, or_explain
from ed.runtime.console import interactive, print_table
from ed.runtime.files import csv_text


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    folders = "folders with runs, at any depth"
    default = [Path("runs/adhoc")]
    add("folders", nargs="*", type=Path, default=default, metavar="FOLDER", help=folders)
    add("--metrics", nargs="+", default=[], metavar="KEY", help="e.g. eval/acc measure/ed")
    add("--csv", action="store_true", help="print one line per run as CSV")
    options = parser.parse_args(arguments)
    try:
        summarise = run_rows if options.csv else summary_rows
        rows = summarise(read_runs(options.folders), options.metrics)
    except (ValueError, OSError) as error:
        return explain(error)
    if options.csv:
        csv.writer(sys.stdout).writerows([csv_text(field) for field in row] for row in rows)
    elif interactive():
        print_table(rows)
    else:
        print(aligned(rows))
    return 0


if __name__ == "__main__":
    sys.exit(or_explain(main))
