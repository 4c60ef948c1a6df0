"""Are ImageNet and its shifts complete? Look before a long run: exit code 1 where something lacks.

python scripts/check_imagenet.py --data /data/imagenet --shifts /data/shifts --decode 500
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from ed.analysis.sweeps import aligned
from ed.datasets.imagenet import ImageError, Source, open_split, shifts
from ed.datasets.imagenet.classes import NUM_CLASSES, synsets
from ed.datasets.imagenet.evaluation import locate
from ed.datasets.imagenet.sources import (
    FOLDER_OF,
    TRAINING_PICTURES,
    VALIDATION_PICTURES,
    Folders,
    Listing,
    has_class_folders,
    list_folders,
)
from ed.engine.errors import or_explain
from ed.runtime.console import track
from ed.runtime.streams import generator

SPLITS = {"train": TRAINING_PICTURES, "validation": VALIDATION_PICTURES}


@dataclass
class Report:
    """What one set should have and has; `source` where its pictures can be read."""

    name: str
    pictures: int
    classes: int
    found_pictures: int = 0
    found_classes: int = 0
    place: str = "-"
    problems: list[str] = field(default_factory=list)
    source: Source | None = None

    def take(self, source: Source) -> None:
        self.source, self.place = source, source.place
        self.found_pictures, self.found_classes = len(source), len(np.unique(source.labels))

    def conclude(self) -> "Report":
        if not self.problems and self.found_pictures != self.pictures:
            self.problems.append(f"{self.found_pictures - self.pictures:+,} pictures")
        return self


def check_split(data: str, split: str) -> Report:
    report = Report(split, SPLITS[split], NUM_CLASSES)
    root = Path(data).expanduser()
    if has_class_folders(root):
        labels = {synset: index for index, synset in enumerate(synsets())}
        folder = root / FOLDER_OF[split]
        return check_folders(report, lambda: folder, labels)
    try:
        report.take(open_split(data, split, key="--data"))
    except (ValueError, FileNotFoundError) as error:
        report.problems.append(str(error))
    return report.conclude()


def check_shift(name: str, root: Path) -> Report:
    shift = shifts()[name]
    report = Report(shift.title, shift.pictures, len(shift.labels))
    return check_folders(
        report, lambda: locate(root, name), shift.labels, shift.ignored, shift.border
    )


def check_folders(
    report: Report, find: Callable[[], Path], labels: dict, ignored=(), border: int = 0
) -> Report:
    try:
        folder = find()
        listing: Listing = list_folders(folder, labels, ignored=ignored)
    except FileNotFoundError as error:
        report.problems.append(str(error))
        return report
    report.take(Folders(folder, listing, border))
    report.problems += listing.problems()
    if listing.others:
        report.problems.append(f"{listing.others} files are no pictures")
    return report.conclude()


def damaged(source: Source, count: int) -> list[str]:
    """What is wrong with `count` random pictures (all, where there are fewer), one line each."""
    chosen = torch.randperm(len(source), generator=generator(0, "check"))[:count].tolist()
    found = []
    for index in track(chosen, f"decoding {source.place}"):
        try:
            source.picture(index)
        except ImageError as error:
            found.append(str(error))
    return found


def table(reports: list[Report]) -> str:
    rows = [("set", "classes", "of", "pictures", "of", "", "where")]
    for report in reports:
        verdict = "incomplete" if report.problems else "ok"
        counts = (report.found_classes, report.classes, report.found_pictures, report.pictures)
        rows.append((report.name, *(f"{count:,}" for count in counts), verdict, report.place))
    return aligned(rows, "<>>>><<")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", help="as task.data: folder with train/ and val/, or hub id")
    parser.add_argument("--shifts", type=Path, help="folder with the unpacked shifted sets")
    parser.add_argument("--decode", type=int, default=0, help="random pictures to try in each set")
    options = parser.parse_args(arguments)
    if options.decode < 0:
        parser.error(f"--decode {options.decode}: at least 0")
    if not options.data and not options.shifts:
        parser.error("give --data, --shifts or both")
    reports = [check_split(options.data, split) for split in SPLITS] if options.data else []
    if options.shifts:
        reports += [check_shift(name, options.shifts.expanduser()) for name in shifts()]
    for report in reports if options.decode else ():
        if report.source is not None:
            report.problems += damaged(report.source, options.decode)
    print(table(reports))
    for report in reports:
        for problem in report.problems:
            print(f"{report.name}: {problem}")
    return int(any(report.problems for report in reports))


if __name__ == "__main__":
    sys.exit(or_explain(main))
