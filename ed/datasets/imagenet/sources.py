"""Opens and checks image sources: class folders, parquet files or a hub data set.

Nothing is skipped silently: missing or unknown folders and damaged images raise an error that names
them, and files that are not images are counted.
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
from PIL import Image, ImageOps

from ed.datasets.imagenet.classes import NUM_CLASSES, folder_labels, synsets
from ed.datasets.images import load_table, read_labels

SUFFIXES = (".jpeg", ".jpg", ".png")
TRAINING_IMAGES, VALIDATION_IMAGES = 1_281_167, 50_000
FOLDER_OF = {"train": "train", "validation": "val"}
TABLES = ("*.parquet", "*/*.parquet", "*/*/*.parquet")  # the hub converts to default/train/
REMEDY = (
    "a folder with train/ and val/ (one folder per synset), a folder with parquet files, or a "
    "reachable hub id such as ILSVRC/imagenet-1k"
)


class ImageError(ValueError):
    """Raised for an image that cannot be read or decoded."""


class Source:
    """A set of labelled images.

    Attributes:
        place: their location, for error messages.
        labels: (N,) int64.
        border: pixels to crop from each side.
        remarks: warnings to log when a run starts.
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

    def image(self, index: int) -> Image.Image:
        """Decodes image `index` to RGB and crops its border."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # damaged EXIF data causes warnings
                image = Image.open(io.BytesIO(self.read(index))).convert("RGB")
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise ImageError(
                f"{self.name(index)} cannot be decoded ({error}); download it again, and run "
                "scripts/check_imagenet.py --decode to find others"
            ) from error
        if self.border:
            image = ImageOps.crop(image, self.border)
        return image


class Folders(Source):
    """Images stored in one folder per class."""

    def __init__(self, root: Path, listing: "Listing", border: int = 0):
        self.place, self.border = str(root), border
        self.folders = list(listing.files)
        # a single array, because a list of a million strings would be copied to every worker
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
    """Encoded images from a hub data set or parquet files."""

    def __init__(self, table, place: str):
        from datasets import Image as Encoded

        self.place = place
        self.column = "image" if "image" in table.column_names else "img"
        missing = {self.column, "label"} - set(table.column_names)
        if missing:
            raise ValueError(
                f"{place} has columns {', '.join(table.column_names)}; it needs 'image' and "
                "'label', like the hub's ILSVRC/imagenet-1k"
            )
        self.names = getattr(table.features["label"], "names", None)
        self.labels = read_labels(table, place)
        self.table = table.cast_column(self.column, Encoded(decode=False))

    def name(self, index: int) -> str:
        return f"{self.place}, row {index}"

    def read(self, index: int) -> bytes:
        value = self.table[int(index)][self.column] or {"bytes": None, "path": None}
        if value["bytes"] is None and value["path"] is None:
            raise ValueError("the image is missing")
        return Path(value["path"]).read_bytes() if value["bytes"] is None else value["bytes"]


@dataclass
class Listing:
    """The contents of a folder of class folders.

    Attributes:
        labels: the label of each expected class folder.
        files: the images of each class folder; folders and images are sorted by name.
        missing, empty, unknown: names of class folders with this problem.
        others: number of files without an image suffix.
        loose: number of images outside class folders.
    """

    labels: Mapping[str, int]
    files: dict[str, list[str]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    empty: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    others: int = 0
    loose: int = 0

    def problems(self) -> list[str]:
        """Describes each problem with the folder in one phrase."""
        wanted = len(self.labels)
        found = [
            (self.missing, f"{len(self.missing)} of {wanted} class folders are missing"),
            (self.empty, f"{len(self.empty)} of {wanted} class folders have no images"),
            (self.unknown, f"{len(self.unknown)} folders match no class"),
        ]
        phrases = [f"{text} ({_some(names)})" for names, text in found if names]
        if self.loose:
            phrases.append(
                f"{self.loose} images are outside class folders (the official validation archive "
                "is flat: move each image into the folder of its synset)"
            )
        return phrases


def list_folders(root: Path, labels: Mapping[str, int], *, ignored: Iterable[str] = ()) -> Listing:
    """Lists the class folders in `root`; the keys of `labels` are the expected ones."""
    if not root.is_dir():
        raise FileNotFoundError(f"{root}: no such folder")
    listing, skip = Listing(labels), set(ignored)
    with os.scandir(root) as entries:
        entries = sorted((entry.name, entry.is_dir()) for entry in entries)
    listing.loose = sum(not is_dir and _is_image(name) for name, is_dir in entries)
    present = {name for name, is_dir in entries if is_dir and not name.startswith(".")}
    listing.missing = sorted(labels.keys() - present)
    listing.unknown = sorted(present - labels.keys() - skip)
    folders = sorted(labels.keys() & present)
    with ThreadPoolExecutor(16) as pool:  # hides the latency of network file systems
        contents = pool.map(_names, [root / folder for folder in folders])
        for folder, names in zip(folders, contents, strict=True):
            images = [name for name in names if _is_image(name)]
            listing.others += len(names) - len(images)
            listing.files[folder] = images
            if not images:
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
    """Opens class folders; raises an error that starts with `what` if there are problems."""
    try:
        listing = list_folders(root, labels, ignored=ignored)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{what}: {error}") from None
    problems = listing.problems()
    if problems:
        raise ValueError(f"{what}: in {root}, {'; '.join(problems)}")
    source = Folders(root, listing, border)
    if listing.others:
        source.remarks += (f"{root}: skipped {listing.others} files that are not images",)
    return source


def open_split(data: str, split: str, *, key: str = "task.data") -> Source:
    """Opens the "train" or "validation" split of ImageNet-1k.

    Args:
        data: a folder with train/ and val/, a folder with parquet files, or a hub id. `embedded`
            is the CIFAR-10 subset that ships with ed, for trying out the pipeline.
    """
    root = Path(data).expanduser()
    if has_class_folders(root):
        folder = root / FOLDER_OF.get(split, split)
        return open_folders(folder, folder_labels(), what=f"{key}={data}")
    if data == "embedded":
        part = "train" if split == "train" else "test"
        return Table(load_table(data, part, key), f"{key}=embedded, split {part!r}")
    if root.is_dir():
        check_tables(root, f"{key}={data}")
    source = Table(load_table(data, split, key, REMEDY), f"{key}={data}, split {split!r}")
    check_labels(source)
    return source


def has_class_folders(root: Path) -> bool:
    """Returns whether train/ and val/ contain class folders rather than parquet files."""
    folders = [root / name for name in FOLDER_OF.values() if (root / name).is_dir()]
    return bool(folders) and not any(any(folder.glob("*.parquet")) for folder in folders)


def check_tables(root: Path, what: str) -> None:
    """Raises unless the folder has parquet files, as `datasets` would index images for hours."""
    problem = None
    if any((root / synset).is_dir() for synset in synsets()):
        problem = "it has class folders but no train/ and val/"
    elif not any(any(root.glob(pattern)) for pattern in TABLES):
        problem = "it has neither train/ and val/ nor parquet files"
    if problem:
        raise FileNotFoundError(f"{what}: {problem}; use {REMEDY}")


def open_training(data: str, *, validation: str = "validation") -> tuple[Source, Source]:
    """Opens the training split and the evaluation split, which is called `validation`."""
    train = open_split(data, "train")
    try:
        held_out = open_split(data, validation)
    except (ValueError, FileNotFoundError) as error:
        if (Path(data).expanduser() / FOLDER_OF.get(validation, validation)).is_dir():
            raise  # the split exists but has problems
        hint = "is the split to evaluate on; use train if there is no other"
        raise type(error)(f"{error}; task.validation={validation} {hint}") from error
    expect(train, TRAINING_IMAGES, "ImageNet (train)")
    expect(held_out, VALIDATION_IMAGES, "ImageNet (validation)")
    return train, held_out


def expect(source: Source, count: int, title: str) -> None:
    """Adds a remark if the number of images differs from the published `count`."""
    if len(source) != count:
        source.remarks += (
            f"{source.place}: {len(source):,} images instead of the {count:,} of {title}; "
            "results are not comparable",
        )


def check_labels(source: Table) -> None:
    """Raises unless all 1,000 classes are present and, if they are named by synset, sorted."""
    low, high, present = source.labels.min(), source.labels.max(), len(np.unique(source.labels))
    if low < 0 or high >= NUM_CLASSES or present != NUM_CLASSES:
        raise ValueError(
            f"{source.place} has {present} classes, with labels from {low} to {high}; "
            f"ImageNet has {NUM_CLASSES}, from 0 to {NUM_CLASSES - 1}. Is a shard missing?"
        )
    names = source.names or ()
    if all(re.fullmatch(r"n\d{8}", name) for name in names) and names:
        wrong = [i for i, name in enumerate(names) if name != synsets()[i]]
        if wrong:
            raise ValueError(
                f"{source.place}: class {wrong[0]} is {names[wrong[0]]} instead of "
                f"{synsets()[wrong[0]]}; sort the classes by synset"
            )


def _names(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries)


def _is_image(name: str) -> bool:
    return name.lower().endswith(SUFFIXES) and not name.startswith(".")


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
