"""Loads small labelled images from the hub or a folder; decodes them once and caches them."""

import contextlib
import hashlib
import io
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor

from ed.core.validate import brief
from ed.runtime.console import track
from ed.runtime.files import sweep, write_atomic
from ed.runtime.hub import hub_or_cache

FORMATS = {".csv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}
DEEP = ("I", "F", "I;16", "I;16L", "I;16B", "I;16N")  # Pillow's modes of more than 8 bits
EMBEDDED = Path(__file__).parent / "embedded" / "cifar10_mini"
IMAGES_REMEDY = (
    "a folder with parquet files, a reachable hub id (like uoft-cs/cifar10), or "
    "`embedded`, the CIFAR-10 subset that ships with ed"
)


@dataclass(frozen=True)
class Images:
    pixels: Tensor  # (N, 3, H, W) uint8
    labels: Tensor  # (N,) int64

    def to(self, device) -> "Images":
        return Images(self.pixels.to(device), self.labels.to(device))

    def __len__(self) -> int:
        return len(self.labels)


def load_images(
    source: str,
    split: str,
    *,
    classes: int,
    size: tuple[int, int],
    key: str = "task.data",
    remedy: str = IMAGES_REMEDY,
    resize: bool = False,
) -> Images:
    """Loads one split as RGB images; raises if any size differs, unless `resize` is true."""
    table = load_table(source, split, key, remedy)
    names = set(table.column_names)
    image = next((name for name in ("img", "image") if name in names), None)
    if image is None or "label" not in names:
        raise ValueError(
            f"{key}={source}: split {split!r} has columns {sorted(names)}; "
            "it needs 'img' (or 'image') and 'label', like the hub's uoft-cs/cifar10"
        )
    identity = f"{table._fingerprint}/{source}/{split}/{len(table)}/{size}"
    identity += "/resized" if resize else ""
    decode_table = partial(_decode_table, table, image, size, f"{key}={source}", resize)
    pixels, labels = decoded_once(identity, decode_table, (len(table), 3, *size))
    if labels.min() < 0 or labels.max() >= classes:
        raise ValueError(
            f"{key}={source}: labels of split {split!r} range from {labels.min()} to "
            f"{labels.max()}, but {classes} classes are expected; change the data or task.classes"
        )
    return Images(torch.from_numpy(pixels), torch.from_numpy(labels))


def decoded_once(
    identity: str, decode: Callable, shape: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """Returns pixels (of `shape`) and labels from `decode()`, cached on disk under `identity`."""
    folder = Path(os.environ.get("ED_CACHE") or Path.home() / ".cache" / "ed")
    cached = folder / f"images-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.npz"
    arrays = _read_cache(cached, shape)
    if arrays is None:
        arrays = decode()
        _write_cache(cached, arrays)
    return arrays


def load_table(source: str, split: str, key: str, remedy: str = IMAGES_REMEDY):
    """Loads one split of a hub data set, a folder, or a file in one of `FORMATS`.

    `embedded` is the small CIFAR-10 subset that ships with the package. Error messages show `key`,
    the config key of `source`, and `remedy`, a list of its valid values.
    """
    import datasets  # slow to import

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()

    path = _local(source, key, remedy)
    try:
        if path is not None and path.is_file():
            data_format = FORMATS[path.suffix.lower()]
            return datasets.load_dataset(data_format, data_files=str(path), split=split)
        with hub_or_cache(str(path or source)):
            return datasets.load_dataset(str(path or source), split=split)
    except Exception as error:  # datasets raises many types: offline, unknown id, bad files
        raise unreadable(f"{key}={source}: split {split!r}", error, remedy) from error


def split_names(source: str, key: str, remedy: str = IMAGES_REMEDY) -> list[str]:
    """Returns the names of the splits; a single file has only "train"."""
    import datasets

    path = _local(source, key, remedy)
    if path is not None and path.is_file():
        return ["train"]
    try:
        with hub_or_cache(str(path or source)):
            return datasets.get_dataset_split_names(str(path or source))
    except Exception as error:
        raise unreadable(f"{key}={source}", error, remedy) from error


def unreadable(what: str, error: BaseException, remedy: str) -> ValueError:
    """Returns the one-line error for data that another library could not read."""
    if type(error).__name__ == "DatasetGenerationError":  # only its cause says what is wrong
        error = error.__cause__ or error
    return ValueError(f"{what} could not be read ({brief(error)}); use {remedy}")


def _local(source: str, key: str, remedy: str) -> Path | None:
    """Returns the path of a local `source`, or None for a hub id."""
    if source == "embedded":
        return EMBEDDED
    if not source:
        raise ValueError(f"{key}: empty; use {remedy}")
    path = Path(source).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix.lower() in FORMATS):
        return path
    if path.is_file():
        raise ValueError(f"{key}={source}: not a {', '.join(FORMATS)} file; use {remedy}")
    local = source.startswith((".", "/", "~")) or source.count("/") > 1
    if local or path.suffix.lower() in FORMATS:
        raise FileNotFoundError(f"{key}={source}: no such file or folder; use {remedy}")
    return None


def as_rgb(image):
    """Converts an image of Pillow to RGB; raises ValueError for more than 8 bits per channel."""
    if image.mode in DEEP:  # Pillow would clip them: all values above 255 become white
        raise ValueError(f"it has mode {image.mode}; save it with 8 bits per channel")
    return image.convert("RGB")


def decode(
    images: Iterator, names: Sequence, size: tuple[int, int], *, what: str, resize: bool
) -> np.ndarray:
    """Decodes images to uint8 RGB (N, 3, H, W), resized and centre-cropped if `resize` is true."""
    from PIL import ImageOps
    from PIL.Image import DecompressionBombError

    pixels = np.empty((len(names), 3, *size), dtype=np.uint8)
    for index, name in enumerate(track(names, f"decoding {what}")):
        try:
            image = as_rgb(next(images))
            image = np.asarray(ImageOps.fit(image, size[::-1]) if resize else image)
        except (OSError, SyntaxError, ValueError, DecompressionBombError) as error:
            raise ValueError(f"{what}: {name} cannot be read: {error}") from error
        except (AttributeError, TypeError):  # the value is null
            raise ValueError(f"{what}: {name} is missing; remove its row") from None
        if image.shape[:2] != tuple(size):
            raise ValueError(
                f"{what}: {name} is {image.shape[0]}x{image.shape[1]}, but {size[0]}x{size[1]} is "
                "expected; change the data or task.image_size"
            )
        pixels[index] = image.transpose(2, 0, 1)
    return pixels


def _decode_table(
    table, column: str, size: tuple[int, int], what: str, resize: bool
) -> tuple[np.ndarray, np.ndarray]:
    from datasets import Image

    table = table.cast_column(column, Image())  # files may lack the hub's metadata
    names = [f"image {index}" for index in range(len(table))]
    images = (row[column] for row in table)
    return decode(images, names, size, what=what, resize=resize), read_labels(table, what)


def read_labels(table, what: str) -> np.ndarray:
    """Returns column `label` (N,) as int64; raises unless all values are integers."""
    labels = table["label"][:]
    check_column(labels, int, f"{what}: labels")
    return np.asarray(labels, dtype=np.int64)


def count_classes(labels: Sequence[int], what: str) -> int:
    """Returns the number of classes C; raises unless labels are 0 to C - 1, with C > 1."""
    found = sorted(set(labels))
    if len(found) < 2:
        raise ValueError(f"{what}: all labels are the same; a classifier needs two classes")
    if (found[0], found[-1]) != (0, len(found) - 1):
        raise ValueError(
            f"{what}: labels have {len(found)} values from {found[0]} to {found[-1]}; number them "
            "from 0 without gaps, or set task.classes"
        )
    return len(found)


def check_column(values: Sequence, kind: type, what: str) -> None:
    """Raises unless there are values, none is missing, and all are of type `kind`."""
    # first, because one empty cell turns the integers of a CSV file into floats
    empty = [index for index, value in enumerate(values) if value is None]
    if empty:
        raise ValueError(
            f"{what}: no value in {len(empty)} of {len(values)} rows, first in row {empty[0]} "
            "(counted from 0); fill or remove these rows"
        )
    wrong = [index for index, value in enumerate(values) if not isinstance(value, kind)]
    if not values:
        raise ValueError(f"{what} are missing, as there are no rows; change the data")
    if wrong:
        found = f"{len(wrong)} of {len(values)} are not (row {wrong[0]}: {values[wrong[0]]!r:.60})"
        raise ValueError(f"{what} must be of type {kind.__name__}, but {found}; change the data")


def _read_cache(path: Path, shape: tuple[int, ...]):
    try:
        with np.load(path, allow_pickle=False) as file:
            pixels, labels = file["pixels"], file["labels"]
        types = (pixels.dtype, labels.dtype) == (np.uint8, np.int64)
        valid = types and (pixels.shape, labels.shape) == (shape, shape[:1])
        return (pixels, labels) if valid else None
    except (OSError, ValueError, KeyError, EOFError, BadZipFile):
        return None  # missing or damaged, so decode again


def _write_cache(path: Path, arrays) -> None:
    """Writes the cache; on failure, e.g. a full disk, the next run decodes again."""
    file = io.BytesIO()
    np.savez(file, pixels=arrays[0], labels=arrays[1])
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, file.getvalue())
        sweep(path)  # remove temporary files left by killed processes
