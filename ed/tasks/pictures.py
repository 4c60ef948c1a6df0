"""Small pictures with their labels: read from the hub or a folder, decoded once and kept."""

import contextlib
import hashlib
import io
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor

from ed.files import sweep, write_atomic
from ed.hub import hub_or_cache

EMBEDDED = Path(__file__).parents[1] / "data" / "cifar10_mini"
PICTURES_REMEDY = (
    "a folder with parquet files, a reachable hub id (like uoft-cs/cifar10), or "
    "`embedded`, the CIFAR-10 subset that ships with ed"
)


@dataclass(frozen=True)
class Pictures:
    pixels: Tensor  # (N, 3, H, W) uint8
    labels: Tensor  # (N,) int64

    def to(self, device) -> "Pictures":
        return Pictures(self.pixels.to(device), self.labels.to(device))

    def __len__(self) -> int:
        return len(self.labels)


def load_pictures(
    source: str,
    split: str,
    *,
    classes: int,
    size: tuple[int, int],
    key: str = "task.data",
    remedy: str = PICTURES_REMEDY,
) -> Pictures:
    """One split of a hub data set or of a local folder with the same columns, decoded once.

    The arguments are those of `load_table`. Grey pictures become RGB.
    """
    table = load_table(source, split, key, remedy)
    names = set(table.column_names)
    image = next((name for name in ("img", "image") if name in names), None)
    if image is None or "label" not in names:
        raise ValueError(
            f"{key}={source}: split {split!r} has columns {sorted(names)}; "
            "needed are 'img' (or 'image') and 'label', as in the hub's uoft-cs/cifar10"
        )
    content = hashlib.sha256(f"{table._fingerprint}/{source}/{split}/{len(table)}/{size}".encode())
    cached = _cache_folder() / f"pictures-{content.hexdigest()[:16]}.npz"
    arrays = _read_cache(cached, (len(table), 3, *size))
    if arrays is None:
        arrays = _decode(table, image, size, f"{key}={source}")
        _write_cache(cached, arrays)
    pixels, labels = arrays
    if labels.min() < 0 or labels.max() >= classes:
        raise ValueError(
            f"{key}={source}: labels of split {split!r} run from {labels.min()} to "
            f"{labels.max()}, but {classes} classes are expected: give other pictures, or the "
            "matching task.classes"
        )
    return Pictures(torch.from_numpy(pixels), torch.from_numpy(labels))


def load_table(source: str, split: str, key: str, remedy: str = PICTURES_REMEDY):
    """One split of a hub data set, or of a folder with parquet files, as `datasets` has it.

    `embedded` names the small CIFAR-10 subset that ships with the package. `key` is the config key
    that gave `source`, `remedy` what it may be instead, for messages.
    """
    import datasets  # heavy: only where pictures are read

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()

    looks_local = source.startswith((".", "/", "~")) or source.count("/") > 1
    folder = EMBEDDED if source == "embedded" else Path(source).expanduser()
    if looks_local and not folder.is_dir():
        raise FileNotFoundError(f"{key}={source}: no such folder. Give {remedy}")
    path = str(folder) if folder.is_dir() else source
    try:
        with hub_or_cache(path):
            return datasets.load_dataset(path, split=split)
    except Exception as error:  # datasets raises a dozen kinds: offline, unknown id, bad files
        raise ValueError(
            f"{key}={source}: split {split!r} could not be read "
            f"({type(error).__name__}: {str(error).splitlines()[0]}). Give {remedy}"
        ) from error


def _decode(table, image: str, size: tuple[int, int], what: str) -> tuple[np.ndarray, np.ndarray]:
    from datasets import Image
    from PIL.Image import DecompressionBombError
    from tqdm import tqdm

    table = table.cast_column(image, Image())  # files written without the hub's metadata
    pixels = np.empty((len(table), 3, *size), dtype=np.uint8)
    rows = tqdm(table, desc=f"decoding {what}", unit="picture", disable=None, leave=False)
    rows = iter(rows)
    for index in range(len(table)):
        try:
            picture = np.asarray(next(rows)[image].convert("RGB"))
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
