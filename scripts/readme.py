"""Update the headline table of README.md: python scripts/readme.py [--check]

The rows come from the committed tables, experiments/results/TABLE/README.md.
"""

import argparse
import re
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
RESULTS = ROOT / "experiments" / "results"
MARKERS = "<!-- headline: python scripts/readme.py -->\n", "<!-- end of headline -->"
# claim, table, row
CLAIMS = (
    ("CIFAR-10, ViT-Tiny: baseline accuracy (%)", "table1", "Baseline"),
    ("with ED", "table1", "ED (efficiency configuration)"),
    ("with ED, without label anchors", "table1", "ED w/o LA (efficiency configuration)"),
    ("ED of a learnt map of degree 1", "pnn", "Task 1 (degree 1), ED (Chebyshev)"),
    ("of degree 2", "pnn", "Task 2 (degree 2), ED (Chebyshev)"),
    ("of degree 5", "pnn", "Task 3 (degree 5), ED (Chebyshev)"),
    ("of degree 5, doubled", "pnn", "Task 6 (degree 5), ED (Chebyshev)"),
    ("Failure case, digits shuffled: accuracy (%)", "mnist_cifar", "Baseline, MNIST randomized"),
    ("with ED", "mnist_cifar", "ED, MNIST randomized"),
    ("with ED, digits intact", "mnist_cifar", "ED, test"),
)


class Headline(NamedTuple):
    claim: str
    paper: str
    ours: str
    verdict: str
    table: str


def headline(results: Path = RESULTS) -> list[Headline]:
    """The paper's headline numbers beside ours."""
    return [Headline(claim, *_numbers(results / table, row), table) for claim, table, row in CLAIMS]


def _numbers(folder: Path, row: str) -> tuple[str, str, str]:
    """Paper, ours and verdict in the row of a committed table."""
    for line in (folder / "README.md").read_text().splitlines():
        label, *fields = (field.strip() for field in line.strip("| ").split("|"))
        if label == row and len(fields) >= 4:
            paper, ours, _, verdict, *_ = fields
            return paper, ours, verdict
    raise ValueError(f"{folder / 'README.md'}: no row {row!r}; update CLAIMS in scripts/readme.py")


def as_markdown(rows: list[Headline]) -> str:
    lines = ["| Claim | Paper | Ours (seeds) | Verdict |", "| --- | --- | --- | --- |"]
    for row in rows:
        link = f"[{row.claim}](experiments/results/{row.table}/README.md)"
        lines.append(f"| {link} | {row.paper} | {row.ours} | {row.verdict} |")
    return "\n".join(lines) + "\n"


def updated(text: str, table: str) -> str:
    """The text with the table between its markers."""
    start, end = MARKERS
    pattern = re.compile(f"(?<={re.escape(start)}).*?(?={re.escape(end)})", re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"{README}: the markers {start.strip()} and {end} are missing")
    return pattern.sub(lambda _: table, text)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only check that it is up to date")
    options = parser.parse_args(arguments)
    text = README.read_text()
    new = updated(text, as_markdown(headline()))
    if options.check and new != text:
        sys.exit("README.md: the headline table is out of date; run python scripts/readme.py")
    if new != text:
        README.write_text(new)
    print("README.md: the headline table is up to date")


if __name__ == "__main__":
    main()
