"""Classification of your own images: class folders or any image data set."""

from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ed.core.validate import each, fraction, not_negative, positive
from ed.datasets.images import (
    Images,
    count_classes,
    decode,
    decoded_once,
    load_images,
    load_table,
    read_labels,
    split_names,
)
from ed.datasets.splits import EVALUATION, evaluation_split, held_out
from ed.tasks.image_task import ImageTask

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".ppm", ".tif", ".tiff")
REMEDY = (
    "a folder with one subfolder per class (optionally inside train/ and val/), a folder with "
    "parquet files, or a hub id"
)
SPLITS = {"train", "training", "testing", *EVALUATION}
LEAST_STD = 1 / 255  # avoids division by zero for constant channels


class ImageFolder(ImageTask):
    """Classifies images, resized to `image_size` and kept on the device as bytes.

    `data` is a folder with class folders as in torchvision's ImageFolder, optionally inside train/
    and val/ (or test/), or a data set with columns `image` and `label`. Without an evaluation
    split, a fraction `holdout` of the training images is held out, the same for every seed.

    Attributes:
        class_names: names of the class folders in label order; None for a data set.
    """

    def __init__(
        self,
        data: str,
        *,
        classes: int | None = None,
        split: str | None = None,
        holdout: float = 0.2,
        split_seed: int = 0,
        mean: list[float] | None = None,
        std: list[float] | None = None,
        **settings,
    ):
        fraction("task.holdout", holdout, zero=False, one=False)
        self.data, self.split, self.holdout, self.split_seed = data, split, holdout, split_seed
        self.folder = _class_folder_root(data)
        self.class_names = _class_names(self.folder, data) if self.folder else None
        found = classes if self.class_names is None else len(self.class_names)
        if classes is not None and found != classes:
            raise ValueError(
                f"task.classes={classes}: task.data={data} has {found} class folders; use "
                f"task.classes={found}"
            )
        super().__init__(data, classes=found or _count_classes(data), **settings)
        if (mean is None) != (std is None):
            raise ValueError(
                "task.mean, task.std: set both, or neither to compute them from the data"
            )
        self.computed = mean is None
        if not self.computed:
            self.mean = tuple(each(not_negative, "task.mean", mean, length=3))
            self.std = tuple(each(positive, "task.std", std, length=3))

    def load(self, split: str) -> Images:
        name = evaluation_split(self._splits(), self.split, self.data)
        if name is not None:
            return self._read("train" if split == "train" else name)
        whole = self._read("train")
        indices = held_out(len(whole), self.holdout, self.split_seed)
        index = indices[0] if split == "train" else indices[1]
        return Images(whole.pixels[index], whole.labels[index])

    def plan(self, device: torch.device, seed: int, *, epoch: int) -> None:
        if self.computed:
            self.mean, self.std = channel_statistics(self.train.pixels)
        super().plan(device, seed, epoch=epoch)

    def provenance(self) -> dict[str, str]:
        rounded = {"mean": self.mean, "std": self.std}
        record = {key: " ".join(f"{x:.4f}" for x in values) for key, values in rounded.items()}
        return record | ({"class_names": ", ".join(self.class_names)} if self.class_names else {})

    def _splits(self) -> list[str]:
        if self.folder is None:
            return split_names(self.data, "task.data", REMEDY)
        above = self.folder.parent
        names = sorted({*EVALUATION, self.split or "test"}) if self.folder.name == "train" else []
        return [name for name in names if (above / name).is_dir()]

    def _read(self, split: str) -> Images:
        if self.folder is None:
            how = {"classes": self.classes, "size": self.image_size, "remedy": REMEDY}
            return load_images(self.data, split, resize=True, **how)
        root = self.folder if split == "train" else self.folder.parent / split
        what = f"task.data={self.data}"
        return _read_classes(
            root, self.class_names, self.image_size, what, training=split == "train"
        )


def channel_statistics(pixels: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Returns the mean and standard deviation per channel of uint8 images, scaled to [0, 1]."""
    count = pixels.numel() // pixels.shape[1]
    total = torch.zeros(2, pixels.shape[1], dtype=torch.float64, device=pixels.device)
    for part in pixels.split(256):  # limits the memory for float64 copies
        values = part.double() / 255
        total += torch.stack([values.sum((0, 2, 3)), values.square().sum((0, 2, 3))])
    mean, square = total / count
    std = (square - mean.square()).clamp(min=LEAST_STD**2).sqrt()
    return tuple(mean.tolist()), tuple(std.tolist())


def _class_folder_root(data: str) -> Path | None:
    """Returns the folder that contains the class folders, or None if `data` is a data set."""
    folder = Path(data).expanduser()
    if not folder.is_dir() or any(folder.rglob("*.parquet")):
        return None
    return folder / "train" if (folder / "train").is_dir() else folder


def _class_names(root: Path, data: str) -> list[str]:
    names = _subfolders(root)
    if len(names) < 2:
        raise ValueError(f"task.data={data}: {root} has {len(names)} class folders; use {REMEDY}")
    if all(name.lower() in SPLITS for name in names):
        raise ValueError(
            f"task.data={data}: {', '.join(names)} look like splits, not classes; name them train "
            "and val"
        )
    return names


def _subfolders(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.is_dir() and path.name[0] != ".")


def image_files(folder: Path) -> list[Path]:
    """Lists images at any depth; skips hidden ones, such as copies in .ipynb_checkpoints."""
    return [
        path
        for path in sorted(folder.rglob("*"))
        if path.suffix.lower() in SUFFIXES
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    ]


def _count_classes(data: str) -> int:
    table, what = load_table(data, "train", "task.data", REMEDY), f"task.data={data}"
    feature = table.features.get("label")
    if feature is None:
        raise ValueError(f"{what}: no column 'label' among {', '.join(table.column_names)}")
    named = getattr(feature, "num_classes", None)
    return named or count_classes(read_labels(table, what).tolist(), what)


def _read_classes(
    root: Path, names: list[str], size: tuple[int, int], what: str, *, training: bool
) -> Images:
    unknown = [name for name in _subfolders(root) if name not in names]
    if unknown:
        raise ValueError(f"{what}: {root} has class {unknown[0]}, which is not in the training set")
    files = [(path, label) for label, name in enumerate(names) for path in image_files(root / name)]
    empty = sorted(set(range(len(names))) - {label for _, label in files})
    if not files or (empty and training):
        where = root / names[empty[0]] if training else root
        raise ValueError(f"{what}: {where} has no images ({' '.join(SUFFIXES)})")
    stats = [(str(path), label, path.stat().st_mtime_ns) for path, label in files]
    decode = partial(_decode_files, files, size, what)
    pixels, labels = decoded_once(f"{stats}/{size}", decode, (len(files), 3, *size))
    return Images(torch.from_numpy(pixels), torch.from_numpy(labels))


def _decode_files(files: list, size: tuple[int, int], what: str) -> tuple[np.ndarray, np.ndarray]:
    from PIL import Image

    paths, labels = zip(*files, strict=True)
    pixels = decode(map(Image.open, paths), paths, size, what=what, resize=True)
    return pixels, np.array(labels, dtype=np.int64)
