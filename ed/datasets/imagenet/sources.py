"""Where pictures lie: class folders, or tables of a hub data set; and what is wrong there.

A source answers for picture i: its label, its encoded bytes, and its name for messages. Nothing is
skipped in silence: what is missing, unknown or undecodable is an error that names it, and files
that are no pictures are counted.
"""

import io
import os
import re
import warnings
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image

from ed.datasets.imagenet.classes import NUM_CLASSES, synsets
from ed.datasets.images import load_table

SUFFIXES = (".jpeg", ".jpg", ".png")
TRAINING_PICTURES, VALIDATION_PICTURES = 1_281_167, 50_000
FOLDER_OF = {"train": "train", "validation": "val"}


class ImageError(ValueError):
    """A picture that cannot be read or decoded."""


class Source:
    """Labelled pictures.

    Attributes:
        place: where they are, for messages.
        labels: (N,) int64.
        border: pixels to cut off each side, which are no part of the picture.
        remarks: what a run on them should say in its log.
    """

    place: str
    labels: np.ndarray
    border: int = 0
    remarks: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int) -> bytes:
        raise NotImplementedError

    def name(self, index: int) -> str:
        raise NotImplementedError

    def picture(self, index: int) -> Image.Image:
        """Picture `index`, decoded, as RGB without its border."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # damaged EXIF data, which is not looked at
                picture = Image.open(io.BytesIO(self.read(index))).convert("RGB")
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise ImageError(
                f"{self.name(index)} cannot be decoded ({error}): fetch this file again; "
                "scripts/check_imagenet.py --decode looks for others"
            ) from error
        if self.border:
            width, height = picture.size
            picture = picture.crop(
                (self.border, self.border, width - self.border, height - self.border)
            )
        return picture


class Folders(Source):
    """Images in one folder per class."""

    def __init__(self, root: Path, listing: "Listing", border: int = 0):
        self.place, self.border = str(root), border
        self.folders = list(listing.files)
        # one array of bytes: a list of a million strings would be copied into every worker
        self.files = np.array([os.fsencode(f) for files in listing.files.values() for f in files])
        counts = np.array([len(files) for files in listing.files.values()], dtype=np.int64)
        labels = np.array([listing.labels[folder] for folder in self.folders], dtype=np.int64)
        self.folder_index = np.repeat(np.arange(len(counts)), counts)
        self.labels = np.repeat(labels, counts)

    def name(self, index: int) -> str:
        folder = self.folders[self.folder_index[index]]
        return os.path.join(self.place, folder, os.fsdecode(self.files[index]))

    def read(self, index: int) -> bytes:
        return Path(self.name(index)).read_bytes()


class Table(Source):
    """Images of a hub data set or of parquet files, still encoded."""

    def __init__(self, table, place: str):
        from datasets import Image as Encoded

        self.place = place
        self.column = "image" if "image" in table.column_names else "img"
        missing = {self.column, "label"} - set(table.column_names)
        if missing:
            raise ValueError(
                f"{place} has columns {', '.join(table.column_names)}; needed are 'image' and "
                "'label', as in the hub's ILSVRC/imagenet-1k"
            )
        self.names = getattr(table.features["label"], "names", None)
        # not as numpy: with that, datasets may import what torchvision no longer has
        labels = table.select_columns("label").with_format("arrow")[:]
        self.labels = labels["label"].to_numpy().astype(np.int64)
        self.table = table.cast_column(self.column, Encoded(decode=False))

    def name(self, index: int) -> str:
        return f"{self.place}, row {index}"

    def read(self, index: int) -> bytes:
        value = self.table[int(index)][self.column]
        return Path(value["path"]).read_bytes() if value["bytes"] is None else value["bytes"]


@dataclass
class Listing:
    """What lies in a folder of class folders.

    Attributes:
        labels: the label of each class folder that should be there.
        files: the pictures of each class folder, both sorted by name.
        missing, empty, unknown: names of folders.
        others: files that are no pictures, by their suffix.
        loose: pictures outside any class folder.
    """

    labels: Mapping[str, int]
    files: dict[str, list[str]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    empty: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    others: int = 0
    loose: int = 0

    def problems(self) -> list[str]:
        """What keeps this from being the set it should be, one phrase each."""
        wanted = len(self.labels)
        found = [
            (self.missing, f"{len(self.missing)} of {wanted} class folders are missing"),
            (self.empty, f"{len(self.empty)} of {wanted} class folders hold no pictures"),
            (self.unknown, f"{len(self.unknown)} folders are of no known class"),
        ]
        phrases = [f"{text} ({_some(names)})" for names, text in found if names]
        if self.loose:
            phrases.append(
                f"{self.loose} pictures lie outside class folders (the validation pictures come "
                "unsorted: move each into the folder of its synset)"
            )
        return phrases


def list_folders(root: Path, labels: Mapping[str, int], *, ignored: Iterable[str] = ()) -> Listing:
    """Looks into every class folder of `root`; `labels` says which there should be."""
    if not root.is_dir():
        raise FileNotFoundError(f"{root}: no such folder")
    listing, skip = Listing(labels), set(ignored)
    with os.scandir(root) as entries:
        entries = sorted((entry.name, entry.is_dir()) for entry in entries)
    listing.loose = sum(not is_dir and _is_picture(name) for name, is_dir in entries)
    present = {name for name, is_dir in entries if is_dir and not name.startswith(".")}
    listing.missing = sorted(labels.keys() - present)
    listing.unknown = sorted(present - labels.keys() - skip)
    folders = sorted(labels.keys() & present)
    with ThreadPoolExecutor(16) as pool:  # network file systems answer slowly, but many at once
        contents = pool.map(_names, [root / folder for folder in folders])
        for folder, names in zip(folders, contents, strict=True):
            pictures = [name for name in names if _is_picture(name)]
            listing.others += len(names) - len(pictures)
            listing.files[folder] = pictures
            if not pictures:
                listing.empty.append(folder)
    return listing


def open_folders(
    root: Path,
    labels: Mapping[str, int],
    *,
    what: str,
    ignored: Iterable[str] = (),
    border: int = 0,
) -> Folders:
    """The pictures of class folders; an error that says all that is wrong. `what`: key=value."""
    try:
        listing = list_folders(root, labels, ignored=ignored)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{what}: {error}") from None
    problems = listing.problems()
    if problems:
        raise ValueError(f"{what}: in {root}, {'; '.join(problems)}")
    source = Folders(root, listing, border)
    if listing.others:
        source.remarks += (f"{root}: {listing.others} files that are no pictures are left out",)
    return source


def open_split(data: str, split: str, *, key: str = "task.data") -> Source:
    """The "train" or "validation" pictures of ImageNet-1k, all 1,000 classes of them.

    Args:
        data: a folder with train/ and val/, a folder with parquet files, or a hub id. `embedded`
            names the CIFAR-10 pictures that ship with ed, for trying the pipeline.
    """
    root = Path(data).expanduser()
    if has_class_folders(root):
        folder = root / FOLDER_OF.get(split, split)
        labels = {synset: index for index, synset in enumerate(synsets())}
        return open_folders(folder, labels, what=f"{key}={data}")
    if data == "embedded":
        part = "train" if split == "train" else "test"
        return Table(load_table(data, part, key), f"{key}=embedded, split {part!r}")
    remedy = (
        "a folder with train/ and val/ (one folder per synset), a folder with parquet files, or a "
        "reachable hub id such as ILSVRC/imagenet-1k"
    )
    source = Table(load_table(data, split, key, remedy), f"{key}={data}, split {split!r}")
    check_labels(source)
    return source


def has_class_folders(root: Path) -> bool:
    """Whether train/ and val/ are folders of pictures; a table may have such folders as well."""
    folders = [root / name for name in FOLDER_OF.values() if (root / name).is_dir()]
    return bool(folders) and not any(any(folder.glob("*.parquet")) for folder in folders)


def open_training(data: str, *, validation: str = "validation") -> tuple[Source, Source]:
    """(training, validation) pictures; `validation` names the split that is evaluated on."""
    train = open_split(data, "train")
    try:
        held_out = open_split(data, validation)
    except (ValueError, FileNotFoundError) as error:
        if (Path(data).expanduser() / FOLDER_OF.get(validation, validation)).is_dir():
            raise  # it is there, and the error says what is wrong in it
        hint = "(the split to evaluate on; a small sample that has no other takes train)"
        raise type(error)(f"{error}; task.validation={validation} {hint}") from error
    expect(train, TRAINING_PICTURES, "ImageNet (train)")
    expect(held_out, VALIDATION_PICTURES, "ImageNet (validation)")
    return train, held_out


def expect(source: Source, count: int, title: str) -> None:
    """Remarks on a set that has fewer or more pictures than it is known to have."""
    if len(source) != count:
        source.remarks += (
            f"{source.place}: {len(source):,} pictures instead of the {count:,} of {title}: "
            "results are not comparable",
        )


def check_labels(source: Table) -> None:
    """All 1,000 classes, in the usual order where the table says their synsets."""
    low, high, present = source.labels.min(), source.labels.max(), len(np.unique(source.labels))
    if low < 0 or high >= NUM_CLASSES or present != NUM_CLASSES:
        raise ValueError(
            f"{source.place} has pictures of {present} classes, with labels from {low} to {high}; "
            f"ImageNet has {NUM_CLASSES}, from 0 to {NUM_CLASSES - 1}: is a shard missing?"
        )
    names = source.names or ()
    if all(re.fullmatch(r"n\d{8}", name) for name in names) and names:
        wrong = [i for i, name in enumerate(names) if name != synsets()[i]]
        if wrong:
            raise ValueError(
                f"{source.place} calls class {wrong[0]} {names[wrong[0]]}, which is usually "
                f"{synsets()[wrong[0]]}: its labels are in another order"
            )


def _names(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries)


def _is_picture(name: str) -> bool:
    return name.lower().endswith(SUFFIXES) and not name.startswith(".")


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
