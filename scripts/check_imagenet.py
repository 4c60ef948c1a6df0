"""Checks that ImageNet and its shifted test sets are complete; exits with code 1 if not.

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
from ed.datasets.imagenet.classes import NUM_CLASSES, folder_labels
from ed.datasets.imagenet.evaluation import locate
from ed.datasets.imagenet.sources import (
    FOLDER_OF,
    TRAINING_IMAGES,
    VALIDATION_IMAGES,
    Folders,
    has_class_folders,
    list_folders,
)
from ed.engine.errors import or_explain
from ed.runtime.console import track
from ed.runtime.streams import generator

SPLITS = {"train": TRAINING_IMAGES, "validation": VALIDATION_IMAGES}


@dataclass
class Report:
    """Expected and actual contents of one data set; `source` is None if it cannot be read."""

    name: str
    images: int
    classes: int
    problems: list[str] = field(default_factory=list)
    source: Source | None = None

    @property
    def found_images(self) -> int:
        return 0 if self.source is None else len(self.source)

    @property
    def found_classes(self) -> int:
        return 0 if self.source is None else len(np.unique(self.source.labels))

    def read(self, open_source: Callable[[], Source]) -> "Report":
        """Opens the data set and records its problems."""
        try:
            self.source = open_source()
        except (ValueError, FileNotFoundError) as error:
            self.problems.append(str(error))
        if not self.problems and self.found_images != self.images:
            self.problems.append(f"{self.found_images - self.images:+,} images")
        return self


def check_split(data: str, split: str) -> Report:
    report, root = Report(split, SPLITS[split], NUM_CLASSES), Path(data).expanduser()
    if has_class_folders(root):
        return check_folders(report, lambda: root / FOLDER_OF[split], folder_labels())
    return report.read(lambda: open_split(data, split, key="--data"))


def check_shift(name: str, root: Path) -> Report:
    shift = shifts()[name]
    report = Report(shift.title, shift.images, len(shift.labels))
    return check_folders(
        report, lambda: locate(root, name), shift.labels, shift.ignored, shift.border
    )


def check_folders(
    report: Report, find: Callable[[], Path], labels: dict, ignored=(), border: int = 0
) -> Report:
    def open_source() -> Folders:
        folder = find()
        listing = list_folders(folder, labels, ignored=ignored)
        report.problems += listing.problems()
        if listing.others:
            report.problems.append(f"{listing.others} files are not images")
        return Folders(folder, listing, border)

    return report.read(open_source)


def damaged(source: Source, count: int) -> list[str]:
    """Decodes up to `count` random images and returns their errors, one line each."""
    chosen = torch.randperm(len(source), generator=generator(0, "check"))[:count].tolist()
    found = []
    for index in track(chosen, f"decoding {source.place}"):
        try:
            source.image(index)
        except ImageError as error:
            found.append(str(error))
    return found


def table(reports: list[Report]) -> str:
    rows = [("set", "classes", "of", "images", "of", "", "where")]
    for report in reports:
        verdict = "incomplete" if report.problems else "ok"
        place = "-" if report.source is None else report.source.place
        counts = (report.found_classes, report.classes, report.found_images, report.images)
        rows.append((report.name, *(f"{count:,}" for count in counts), verdict, place))
    return aligned(rows, "<>>>><<")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", help="folder with train/ and val/, or hub id, as in task.data")
    parser.add_argument("--shifts", type=Path, help="folder with the extracted shifted test sets")
    parser.add_argument(
        "--decode", type=int, default=0, help="number of random images to decode in each set"
    )
    options = parser.parse_args(arguments)
    if options.decode < 0:
        parser.error(f"--decode {options.decode}: at least 0")
    if not options.data and not options.shifts:
        parser.error("use --data, --shifts or both")
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
