"""Update the headline table of README.md: python scripts/readme.py [--check]

The rows come from the committed results. Claims that cannot run here appear only in the report.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works without installing ed

from ed.analysis.markdown import plain_table
from ed.analysis.verdicts import Headline, Verdict, headline
from ed.engine.errors import or_explain
from ed.runtime.files import APP, write_atomic

README = APP / "README.md"
MARKERS = "<!-- headline: python scripts/readme.py -->\n", "<!-- end of headline -->"


def as_markdown(rows: Sequence[Headline]) -> str:
    body = []
    for row in rows:
        if row.verdict is not Verdict.NOT_RUNNABLE:
            link = f"[{row.claim}](experiments/results/{row.table}/README.md)"
            run = f"`{row.command.removeprefix('python scripts/')}`"
            hours = "-" if row.gpu_hours is None else f"{row.gpu_hours:.2g}"
            body.append((link, row.paper, row.ours, row.verdict.value, run, hours))
    return plain_table(("Claim", "Paper", "Ours", "Verdict", "Command", "GPU h"), body) + "\n"


def updated(text: str, table: str) -> str:
    """Returns the text with a new table between its markers."""
    start, end = MARKERS
    pattern = re.compile(f"(?<={re.escape(start)}).*?(?={re.escape(end)})", re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"{README}: the markers {start.strip()} and {end} are missing")
    return pattern.sub(lambda _: table, text)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="only check whether it is up to date")
    options = parser.parse_args(arguments)
    text = README.read_text("utf-8")
    new = updated(text, as_markdown(headline()))
    if options.check and new != text:
        sys.exit("README.md: the headline table is out of date; run python scripts/readme.py")
    if new != text:
        write_atomic(README, new)
    print("README.md: the headline table is up to date")


if __name__ == "__main__":
    or_explain(main)
