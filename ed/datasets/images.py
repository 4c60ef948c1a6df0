"""Small pictures with their labels: read from the hub or a folder, decoded once and kept."""

import contextlib
import hashlib
import io
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor

from ed.runtime.console import track
from ed.runtime.files import sweep, write_atomic
from ed.runtime.hub import hub_or_cache

FORMATS = {".csv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}
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
    """One split of a hub data set or of a local folder with the same columns, decoded once.

    The arguments are those of `load_table`. Grey pictures become RGB. Other sizes are an error
    unless they may be resized.
    """
    table = load_table(source, split, key, remedy)
    names = set(table.column_names)
    image = next((name for name in ("img", "image") if name in names), None)
    if image is None or "label" not in names:
        raise ValueError(
            f"{key}={source}: split {split!r} has columns {sorted(names)}; "
            "needed are 'img' (or 'image') and 'label', as in the hub's uoft-cs/cifar10"
        )
    identity = f"{table._fingerprint}/{source}/{split}/{len(table)}/{size}"
    identity += "/resized" if resize else ""
    decode = partial(_decode, table, image, size, f"{key}={source}", resize)
    pixels, labels = decoded_once(identity, decode, (len(table), 3, *size))
    if labels.min() < 0 or labels.max() >= classes:
        raise ValueError(
            f"{key}={source}: labels of split {split!r} run from {labels.min()} to "
            f"{labels.max()}, but {classes} classes are expected: give other pictures, or the "
            "matching task.classes"
        )
    return Images(torch.from_numpy(pixels), torch.from_numpy(labels))


def decoded_once(
    identity: str, decode: Callable, shape: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """Pixels of `shape` and labels of `decode()`, cached for data that were decoded before."""
    content = hashlib.sha256(identity.encode())
    cached = _cache_folder() / f"pictures-{content.hexdigest()[:16]}.npz"
    arrays = _read_cache(cached, shape)
    if arrays is None:
        arrays = decode()
        _write_cache(cached, arrays)
    return arrays


def load_table(source: str, split: str, key: str, remedy: str = IMAGES_REMEDY):
    """One split of a hub data set, of a folder, or of a file of `FORMATS`, as `datasets` has it.

    `embedded` names the small CIFAR-10 subset that ships with the package. `key` is the config key
    that gave `source`, `remedy` what it may be instead, for messages.
    """
    import datasets  # heavy: only where pictures are read

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()

    path = _local(source, key, remedy)
    try:
        if path is not None and path.is_file():
            data_format = FORMATS[path.suffix.lower()]
            return datasets.load_dataset(data_format, data_files=str(path), split=split)
        with hub_or_cache(str(path or source)):
            return datasets.load_dataset(str(path or source), split=split)
    except Exception as error:  # datasets raises a dozen kinds: offline, unknown id, bad files
        raise ValueError(
            f"{key}={source}: split {split!r} could not be read "
            f"({type(error).__name__}: {str(error).splitlines()[0]}). Give {remedy}"
        ) from error


def split_names(source: str, key: str, remedy: str = IMAGES_REMEDY) -> list[str]:
    """The splits that `load_table` can load; those of a single file are one, train."""
    import datasets

    path = _local(source, key, remedy)
    if path is not None and path.is_file():
        return ["train"]
    try:
        with hub_or_cache(str(path or source)):
            return datasets.get_dataset_split_names(str(path or source))
    except Exception as error:
        raise ValueError(
            f"{key}={source}: could not be read "
            f"({type(error).__name__}: {str(error).splitlines()[0]}). Give {remedy}"
        ) from error


def _local(source: str, key: str, remedy: str) -> Path | None:
    """The folder or file that `source` names; None for a hub id."""
    if source == "embedded":
        return EMBEDDED
    path = Path(source).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix.lower() in FORMATS):
        return path
    if path.is_file():
        raise ValueError(f"{key}={source}: files may be {', '.join(FORMATS)}. Give {remedy}")
    if source.startswith((".", "/", "~")) or source.count("/") > 1:
        raise FileNotFoundError(f"{key}={source}: no such folder. Give {remedy}")
    return None


def _decode(
    table, image: str, size: tuple[int, int], what: str, resize: bool
) -> tuple[np.ndarray, np.ndarray]:
    from datasets import Image
    from PIL import ImageOps
    from PIL.Image import DecompressionBombError

    table = table.cast_column(image, Image())  # files written without the hub's metadata
    pixels = np.empty((len(table), 3, *size), dtype=np.uint8)
    rows = track(table, f"decoding {what}")
    for index in range(len(table)):
        try:
            picture = next(rows)[image].convert("RGB")
            picture = np.asarray(ImageOps.fit(picture, size[::-1]) if resize else picture)
        except (OSError, SyntaxError, ValueError, DecompressionBombError) as error:
            raise ValueError(f"{what}: picture {index} cannot be read: {error}") from error
        except (AttributeError, TypeError):  # null
            raise ValueError(f"{what}: row {index} holds no image; remove it") from None
        if picture.shape[:2] != tuple(size):
            raise ValueError(
                f"{what}: picture {index} is {picture.shape[0]}x{picture.shape[1]}, but "
                f"{size[0]}x{size[1]} is expected: give other pictures, or the matching "
                "task.image_size"
            )
        pixels[index] = picture.transpose(2, 0, 1)
    return pixels, _labels(table, what)


def _labels(table, what: str) -> np.ndarray:
    """The column of labels, which must be whole numbers: nothing is rounded or parsed."""
    labels = table["label"][:]
    for index, label in enumerate(labels):
        if type(label) is not int:
            raise ValueError(
                f"{what}: the label of row {index} is {label!r:.60}; needed is a whole number, "
                "counted from 0"
            )
    return np.asarray(labels, dtype=np.int64)


def _cache_folder() -> Path:
    return Path(os.environ.get("ED_CACHE") or Path.home() / ".cache" / "ed")


def _read_cache(path: Path, shape: tuple[int, ...]):
    try:
        with np.load(path, allow_pickle=False) as file:
            pixels, labels = file["pixels"], file["labels"]
        kinds = (pixels.dtype, labels.dtype) == (np.uint8, np.int64)
        return (pixels, labels) if kinds and _shapes(pixels, labels) == (shape, shape[:1]) else None
    except (OSError, ValueError, KeyError, EOFError, BadZipFile):
        return None  # absent or damaged: decode again


def _shapes(*arrays: np.ndarray) -> tuple:
    return tuple(array.shape for array in arrays)


def _write_cache(path: Path, arrays) -> None:
    """Optional: without room for a cache the next run decodes again."""
    file = io.BytesIO()
    np.savez(file, pixels=arrays[0], labels=arrays[1])
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, file.getvalue())
        sweep(path)  # whoever else is writing the same pictures need not go on
