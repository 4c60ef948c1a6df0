"""The 1,000 ImageNet classes and the subsets used by the distribution shifts.

The files in `ed/datasets/embedded/imagenet` come from github.com/hendrycks/imagenet-r and
natural-adv-examples (MIT; synsets, classes of ImageNet-R and -A), mlfoundations/open_clip (MIT;
class names and prompts of CLIP), mlfoundations/wise-ft (ObjectNet's 113 classes).
"""

import json
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "embedded" / "imagenet"
NUM_CLASSES = 1000


@cache
def synsets() -> tuple[str, ...]:
    """Returns the WordNet ids (which are the folder names) of all classes, in label order."""
    return tuple(synset for synset, _ in _read("classes"))


def folder_labels() -> dict[str, int]:
    """Maps each class folder of ImageNet-1k to its label."""
    return {synset: index for index, synset in enumerate(synsets())}


def subset(name: str) -> tuple[int, ...]:
    """Returns the sorted indices of the 200 classes in ImageNet-R ("r") or ImageNet-A ("a")."""
    return tuple(_read("shifts")[name])


def objectnet() -> dict[str, tuple[int, ...]]:
    """Maps the 113 ObjectNet folders that overlap with ImageNet to ImageNet indices."""
    return {folder: tuple(indices) for folder, indices in _read("shifts")["objectnet"].items()}


def objectnet_others() -> tuple[str, ...]:
    """Returns the 200 ObjectNet folders without a matching ImageNet class."""
    return tuple(_read("shifts")["objectnet_others"])


@cache
def _read(name: str):
    return json.loads((FOLDER / f"{name}.json").read_bytes())
