"""List words that CONTRIBUTING.md asks to avoid: python scripts/check_words.py [FILE ...]

Without arguments, it checks the text files in ed, scripts, configs and docs, the README, train.py
and the Makefile. The exit code is 1 if any word is found.
"""

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLACES = ("ed", "scripts", "configs", "docs", "README.md", "train.py", "Makefile")
EXEMPT = ("scripts/check_words.py", "ed/models/prompts.py")  # this list, and CLIP's templates
SUFFIXES = {".py", ".sh", ".md", ".yaml", ".yml", ""}
AVOID = {
    r"mend(s|ed|ing)?": "fix",
    r"told": "reported",
    r"heed(s|ed|ing)?": "check",
    r"hinder(s|ed|ing)?": "prevent",
    r"farewells?": "shutdown",
    r"aloud": "printed",
    r"pictures?": "image",
    r"(network|model|function)s? says?": "the output",
    r"of what": "rephrase",
    r"that of": "rephrase",
    r"so many": "rephrase",
    r"stands there": "rephrase",
    r"no other than": "rephrase",
}
PATTERN = re.compile(rf"\b({'|'.join(AVOID)})\b", re.IGNORECASE)


def offenders(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the line number and text of each word to avoid."""
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        for found in PATTERN.finditer(line):
            yield number, found[0]


def remedy(word: str) -> str:
    return next(use for avoid, use in AVOID.items() if re.fullmatch(avoid, word, re.IGNORECASE))


def files() -> list[Path]:
    """Returns tracked and new files, except those in `EXEMPT`."""
    list_them = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *PLACES]
    listed = subprocess.run(list_them, cwd=ROOT, capture_output=True, text=True, check=True)
    paths = [ROOT / name for name in listed.stdout.splitlines() if name not in EXEMPT]
    return [path for path in paths if path.suffix in SUFFIXES and path.is_file()]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    count = 0
    for path in parser.parse_args(arguments).files or files():
        for number, word in offenders(path):
            name = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
            print(f"{name}:{number}: {word} ({remedy(word)})")
            count += 1
    print(f"{count} words to avoid" if count else "no words to avoid")
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main())
