"""Evaluation on ImageNet and its five distribution shifts, each scored on its own classes."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from ed.datasets.imagenet import classes
from ed.datasets.imagenet.loading import View, evaluation_batches
from ed.datasets.imagenet.sources import Source, expect, open_folders
from ed.runtime import processes
from ed.runtime.console import track

Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Shift:
    """A distribution shift of ImageNet, stored as its authors distribute it.

    Attributes:
        title: name in tables.
        folders: subfolders that may contain the class folders.
        labels: class folder -> label in this set.
        groups: for each label, the matching ImageNet indices; None: labels are ImageNet indices.
        images: expected number of images.
        ignored: class folders to skip.
        border: pixels to crop from each side.
    """

    title: str
    folders: tuple[str, ...]
    labels: dict[str, int]
    groups: Groups | None
    images: int
    ignored: tuple[str, ...] = ()
    border: int = 0


def shifts() -> dict[str, Shift]:
    """Returns the paper's five shifts, keyed by their names in metrics."""
    known = classes.objectnet()
    return {
        "v2": Shift(
            title="ImageNetV2",
            folders=("imagenetv2-matched-frequency-format-val",),
            labels={str(index): index for index in range(classes.NUM_CLASSES)},
            groups=None,
            images=10_000,
        ),
        "r": _of_subset("ImageNet-R", ("imagenet-r",), "r", 30_000),
        "a": _of_subset("ImageNet-A", ("imagenet-a",), "a", 7_500),
        "sketch": Shift(
            title="ImageNet-Sketch",
            folders=("sketch", "imagenet-sketch/sketch", "imagenet-sketch"),
            labels=classes.folder_labels(),
            groups=None,
            images=50_889,
        ),
        "objectnet": Shift(
            title="ObjectNet",
            folders=("objectnet-1.0/images", "objectnet/images", "images"),
            labels={folder: label for label, folder in enumerate(known)},
            groups=tuple(known.values()),
            images=18_574,
            ignored=classes.objectnet_others(),
            border=2,  # ObjectNet marks its test images with a red border
        ),
    }


def _of_subset(title: str, folders: tuple[str, ...], name: str, images: int) -> Shift:
    indices = classes.subset(name)
    labels = {classes.synsets()[index]: label for label, index in enumerate(indices)}
    return Shift(title, folders, labels, tuple((index,) for index in indices), images)


@dataclass(frozen=True)
class EvaluationSet:
    """Images to score a model on.

    Attributes:
        name: "v2", "r", "a", "sketch" or "objectnet"; "val" is ImageNet's validation set.
        images: labelled with the classes of this set.
        groups: for each label, the matching ImageNet indices; None: labels are ImageNet indices.
    """

    name: str
    images: Source
    groups: Groups | None = None


def locate(root: Path, name: str) -> Path:
    """Finds the class folders of shift `name` in `root` or its known subfolders."""
    shift = shifts()[name]
    candidates = [root / folder for folder in shift.folders]
    for folder in [*candidates, root]:
        if any((folder / class_folder).is_dir() for class_folder in shift.labels):
            return folder
    raise FileNotFoundError(
        f"no class folders (like {next(iter(shift.labels))}) in {root} or its subfolders "
        f"{', '.join(shift.folders)}; unpack the original archive there"
    )


def open_shift(name: str, root: str | Path) -> EvaluationSet:
    """Opens one of the five shifts; `root` is its folder or a folder with several shifts."""
    shift = shifts()[name]
    try:
        folder = locate(Path(root).expanduser(), name)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"task.shifts={root}: {shift.title}: {error}, or remove it from task.shift_names "
            "(task.shifts=null disables all shifts)"
        ) from None
    source = open_folders(
        folder, shift.labels, what=f"task.shifts={root}", ignored=shift.ignored, border=shift.border
    )
    expect(source, shift.images, shift.title)
    return EvaluationSet(name, source, shift.groups)


def restrict(logits: Tensor, groups: Groups | None) -> Tensor:
    """Maps ImageNet logits to the classes of a set: the maximum over each group.

    Args:
        logits: (N, C).
        groups: G tuples of indices below C; None keeps all classes.
    Returns:
        (N, G).
    """
    if groups is None:
        return logits
    longest = max(map(len, groups))
    # pad short groups with their first index, which does not change the maximum
    padded = [[*group, *[group[0]] * (longest - len(group))] for group in groups]
    return logits[:, torch.tensor(padded, device=logits.device)].amax(-1)


@torch.no_grad()
def accuracy(
    model: Callable[[Tensor], Tensor],
    images: EvaluationSet,
    *,
    view: View,
    normalise: Callable[[Tensor], Tensor],
    device: torch.device | str,
    batch_size: int = 256,
    workers: int | None = None,
) -> tuple[float, float]:
    """Returns the accuracy in percent and the mean cross-entropy; processes share the work.

    The model must be in eval mode.
    """
    source, correct, loss = images.images, *torch.zeros(2, device=device)
    ours = processes.part(len(source))
    batches = evaluation_batches(
        source, view, device=device, index=ours, batch_size=batch_size, workers=workers
    )
    total = -(-len(ours) // batch_size)
    with contextlib.closing(batches):
        for batch in track(batches, images.name, total=total):
            logits = restrict(model(normalise(batch["x"])), images.groups).float()
            correct = correct + (logits.argmax(-1) == batch["label"]).sum()
            loss = loss + F.cross_entropy(logits, batch["label"], reduction="sum")
    correct, loss = (float(processes.total(value)) for value in (correct, loss))
    return 100 * correct / len(source), loss / len(source)
