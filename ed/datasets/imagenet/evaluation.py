"""Evaluation sets: ImageNet's own and its five shifts, each scored on the classes that it has."""

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
    """What a shifted set should look like, as its authors distribute it.

    Attributes:
        title: its name in tables.
        folders: where the class folders may lie in a collection, as unpacked.
        labels: class folder -> label in this set.
        groups: for each label the ImageNet indices that count as it; None: label = index.
        pictures: how many there are.
        ignored: class folders that are there and take no part.
        border: pixels to cut off each side.
    """

    title: str
    folders: tuple[str, ...]
    labels: dict[str, int]
    groups: Groups | None
    pictures: int
    ignored: tuple[str, ...] = ()
    border: int = 0


def shifts() -> dict[str, Shift]:
    """The five sets of the paper, by the names that metrics carry."""
    known = classes.objectnet()
    return {
        "v2": Shift(
            title="ImageNetV2",
            folders=("imagenetv2-matched-frequency-format-val",),
            labels={str(index): index for index in range(classes.NUM_CLASSES)},
            groups=None,
            pictures=10_000,
        ),
        "r": _of_subset("ImageNet-R", ("imagenet-r",), "r", 30_000),
        "a": _of_subset("ImageNet-A", ("imagenet-a",), "a", 7_500),
        "sketch": Shift(
            title="ImageNet-Sketch",
            folders=("sketch", "imagenet-sketch/sketch", "imagenet-sketch"),
            labels={synset: index for index, synset in enumerate(classes.synsets())},
            groups=None,
            pictures=50_889,
        ),
        "objectnet": Shift(
            title="ObjectNet",
            folders=("objectnet-1.0/images", "objectnet/images", "images"),
            labels={folder: label for label, folder in enumerate(known)},
            groups=tuple(known.values()),
            pictures=18_574,
            ignored=classes.objectnet_others(),
            border=2,  # its pictures come in a red frame, so that none is trained on unnoticed
        ),
    }


def _of_subset(title: str, folders: tuple[str, ...], name: str, pictures: int) -> Shift:
    indices = classes.subset(name)
    labels = {classes.synsets()[index]: label for label, index in enumerate(indices)}
    return Shift(title, folders, labels, tuple((index,) for index in indices), pictures)


@dataclass(frozen=True)
class EvaluationSet:
    """Images to score a model on.

    Attributes:
        name: "v2", "r", "a", "sketch", "objectnet"; "val" for ImageNet's own.
        pictures: their labels count in the classes of this set.
        groups: for each label the ImageNet indices that count as it; None: label = index.
    """

    name: str
    pictures: Source
    groups: Groups | None = None

    def restrict(self, logits: Tensor) -> Tensor:
        return logits if self.groups is None else restrict(logits, self.groups)


def locate(root: Path, name: str) -> Path:
    """The class folders of shift `name`: in a collection `root`, or `root` itself."""
    shift = shifts()[name]
    candidates = [root / folder for folder in shift.folders]
    for folder in [*candidates, root]:
        if any((folder / class_folder).is_dir() for class_folder in shift.labels):
            return folder
    raise FileNotFoundError(
        f"no class folders (like {next(iter(shift.labels))}) in {root} nor in its "
        f"{', '.join(shift.folders)}: unpack the set there as its authors distribute it"
    )


def open_shift(name: str, root: str | Path) -> EvaluationSet:
    """One of the five shifts, from the folder it was unpacked to or a collection of them."""
    shift = shifts()[name]
    try:
        folder = locate(Path(root).expanduser(), name)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"task.shifts={root}: {shift.title}: {error}, or leave it out: task.shift_names lists "
            "those to evaluate on, and task.shifts=null is none"
        ) from None
    source = open_folders(
        folder, shift.labels, what=f"task.shifts={root}", ignored=shift.ignored, border=shift.border
    )
    expect(source, shift.pictures, shift.title)
    return EvaluationSet(name, source, shift.groups)


def restrict(logits: Tensor, groups: Groups) -> Tensor:
    """Logits of a set's own classes: the largest over each group; all others are left out.

    Args:
        logits: (N, C).
        groups: G tuples of indices below C.
    Returns:
        (N, G).
    """
    longest = max(map(len, groups))
    # short groups repeat their first index, which leaves the maximum as it is
    padded = [[*group, *[group[0]] * (longest - len(group))] for group in groups]
    return logits[:, torch.tensor(padded, device=logits.device)].amax(-1)


@torch.no_grad()
def accuracy(
    model: Callable[[Tensor], Tensor],
    pictures: EvaluationSet,
    *,
    view: View,
    normalise: Callable[[Tensor], Tensor],
    device: torch.device | str,
    batch_size: int = 256,
    workers: int | None = None,
) -> tuple[float, float]:
    """Accuracy in percent and mean cross-entropy of a model (in eval mode, which is the caller's to
    set) on all pictures of a set; of several processes each scores a part of them."""
    source, correct, loss = pictures.pictures, *torch.zeros(2, device=device)
    ours = processes.part(len(source))
    batches = evaluation_batches(
        source, view, device=device, index=ours, batch_size=batch_size, workers=workers
    )
    total = -(-len(ours) // batch_size)
    with contextlib.closing(batches):
        for batch in track(batches, pictures.name, total=total):
            logits = pictures.restrict(model(normalise(batch["x"]))).float()
            correct = correct + (logits.argmax(-1) == batch["label"]).sum()
            loss = loss + F.cross_entropy(logits, batch["label"], reduction="sum")
    correct, loss = (float(processes.total(value)) for value in (correct, loss))
    return 100 * correct / len(source), loss / len(source)
