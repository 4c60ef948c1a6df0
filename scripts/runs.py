"""What came out of a sweep: python scripts/runs.py [FOLDER ...] [--metrics eval/acc ...] [--csv]

One line per setting, in columns only what differs between the runs, the mean and standard deviation
over seeds of each number at the last step. The folders default to runs/adhoc, where `train.py` and
`train.py -m`, started in this same folder, leave their runs. (Tables of the paper:
scripts/table.py.)
"""

import argparse
import csv
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a plain checkout finds ed

from ed.analysis.sweeps import aligned, read_runs, run_rows, summary_rows
from ed.engine.errors import explain, or_explain
from ed.runtime.console import interactive, print_table
from ed.runtime.files import csv_text


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("folders", nargs="*", type=Path, default=[Path("runs/adhoc")], metavar="FOLDER")
    add("--metrics", nargs="+", default=[], metavar="KEY", help="e.g. eval/acc measure/ed")
    add("--csv", action="store_true", help="one line per run, comma-separated")
    options = parser.parse_args(arguments)
    try:
        rows = (run_rows if options.csv else summary_rows)(
            read_runs(options.folders), options.metrics
        )
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
