"""Build the report page: python scripts/report.py [--out report/index.html]

The report is one self-contained HTML file with verdicts on the paper's numbers, every table and run
in experiments/, the benchmarks, and an explorer for effective degree.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works without installing ed

from ed.analysis.report.page import build_page
from ed.analysis.spec import EXPERIMENTS
from ed.engine.errors import explain, or_explain
from ed.runtime.files import HOME, write_atomic


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    out = "file to write (default: report/index.html)"
    page = HOME / "report" / "index.html"
    parser.add_argument("--out", type=Path, default=page, metavar="FILE", help=out)
    parser.add_argument(
        "--experiments", type=Path, default=EXPERIMENTS, metavar="DIR", help="another folder"
    )
    options = parser.parse_args(arguments)
    if not any(options.experiments.glob("*.yaml")):  # an empty page would replace a full one
        parser.error(f"--experiments {options.experiments}: no experiment files (*.yaml) there")
    try:
        page = build_page(options.experiments)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(options.out, page)
    except Exception as error:
        return explain(error)
    print(f"{options.out}: {len(page.encode()) / 1024:,.0f} KiB")
    return 0


if __name__ == "__main__":
    sys.exit(or_explain(main))
