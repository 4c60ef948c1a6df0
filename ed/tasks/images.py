"""Pictures with labels, resident on the training device: loading, caching, crop and flip.

Shared by the tasks on small pictures. Pictures stay uint8 until they are used; augmentation is one
gather for the whole batch.
"""

import hashlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

EMBEDDED = Path(__file__).parents[1] / "data" / "cifar10_mini"


@dataclass(frozen=True)
class Pictures:
    pixels: Tensor  # (N, 3, H, W) uint8
    labels: Tensor  # (N,) int64

    def to(self, device) -> "Pictures":
        return Pictures(self.pixels.to(device), self.labels.to(device))

    def __len__(self) -> int:
        return len(self.labels)


def load_pictures(source: str, split: str, *, classes: int, size: tuple[int, int]) -> Pictures:
    """One split of a hub data set or of a local folder with the same columns, decoded once.

    `embedded` names the small CIFAR-10 subset that ships with the package.
    """
    table = _load_table(str(EMBEDDED) if source == "embedded" else source, split)
    names = set(table.column_names)
    image = next((name for name in ("img", "image") if name in names), None)
    if image is None or "label" not in names:
        raise ValueError(
            f"task.data={source}: split {split!r} has columns {sorted(names)}; "
            "needed are 'img' (or 'image') and 'label', as in the hub's uoft-cs/cifar10"
        )
    key = hashlib.sha256(f"{table._fingerprint}/{source}/{split}/{len(table)}/{size}".encode())
    cached = _cache_folder() / f"pictures-{key.hexdigest()[:16]}.npz"
    arrays = _read_cache(cached)
    if arrays is None:
        arrays = _decode(table, image, size, source)
        _write_cache(cached, arrays)
    pixels, labels = arrays
    if labels.min() < 0 or labels.max() >= classes:
        raise ValueError(
            f"task.data={source}: labels of split {split!r} run from {labels.min()} to "
            f"{labels.max()}, but task.classes={classes}"
        )
    return Pictures(torch.from_numpy(pixels), torch.from_numpy(labels))


def _load_table(source: str, split: str):
    import datasets  # heavy: only where pictures are read

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()

    looks_local = source.startswith((".", "/", "~")) or source.count("/") > 1
    if looks_local and not Path(source).expanduser().is_dir():
        raise FileNotFoundError(
            f"task.data={source}: no such folder. Give a folder with parquet files, a hub id "
            "(task.data=uoft-cs/cifar10), or task.data=embedded for the subset that ships with ed"
        )
    path = str(Path(source).expanduser()) if Path(source).expanduser().is_dir() else source
    try:
        return datasets.load_dataset(path, split=split)
    except Exception as error:  # datasets raises a dozen kinds: offline, unknown id, bad files
        reason = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        raise ValueError(
            f"task.data={source}: split {split!r} could not be read ({reason}). Give a folder with "
            "parquet files (task.data=/path), a reachable hub id, or task.data=embedded"
        ) from error


def _decode(table, image: str, size: tuple[int, int], source: str) -> tuple[np.ndarray, np.ndarray]:
    from tqdm import tqdm

    pixels = np.empty((len(table), 3, *size), dtype=np.uint8)
    rows = tqdm(table, desc=f"decoding {source}", unit="picture", disable=None, leave=False)
    for index, row in enumerate(rows):
        picture = np.asarray(row[image].convert("RGB"))
        if picture.shape[:2] != tuple(size):
            raise ValueError(
                f"task.data={source}: picture {index} is {picture.shape[0]}x{picture.shape[1]}, "
                f"but task.image_size={list(size)}"
            )
        pixels[index] = picture.transpose(2, 0, 1)
    return pixels, np.asarray(table["label"], dtype=np.int64)


def _cache_folder() -> Path:
    root = os.environ.get("ED_CACHE") or Path.home() / ".cache" / "ed"
    return Path(root)


def _read_cache(path: Path):
    try:
        with np.load(path, allow_pickle=False) as file:
            return file["pixels"], file["labels"]
    except (OSError, ValueError, KeyError, EOFError):
        return None  # absent or damaged: decode again


def _write_cache(path: Path, arrays) -> None:
    """Atomic, and optional: without room for a cache the next run decodes again."""
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            np.savez(file, pixels=arrays[0], labels=arrays[1])
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)


def crop_and_flip(padded: Tensor, index: Tensor, padding: int, generator) -> Tensor:
    """Random crops and horizontal flips of padded pictures, one gather for the whole batch.

    Args:
        padded: (N, 3, H + 2 padding, W + 2 padding).
        index: (B,), which pictures.
    Returns:
        (B, 3, H, W), same dtype.
    """
    device, count = padded.device, len(index)
    height, width = (side - 2 * padding for side in padded.shape[-2:])
    shift = torch.randint(2 * padding + 1, (2, count, 1), generator=generator, device=device)
    flip = torch.rand(count, 1, generator=generator, device=device) < 0.5
    rows = shift[0] + torch.arange(height, device=device)
    columns = torch.arange(width, device=device).expand(count, width)
    columns = shift[1] + torch.where(flip, width - 1 - columns, columns)
    channels = torch.arange(padded.shape[1], device=device)
    return padded[
        index[:, None, None, None],
        channels[None, :, None, None],
        rows[:, None, :, None],
        columns[:, None, None, :],
    ]
