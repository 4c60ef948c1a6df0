"""Names of the 1,000 ImageNet classes, and which of them the shifted sets know.

The lists in `ed/datasets/embedded/imagenet` are facts that others published: synsets and the 200
classes of ImageNet-R and -A (github.com/hendrycks/imagenet-r and natural-adv-examples, MIT
licence), the class names and prompts of CLIP (mlfoundations/open_clip, MIT), ObjectNet's 113
classes in ImageNet's
terms (mlfoundations/wise-ft).
"""

import json
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "embedded" / "imagenet"
NUM_CLASSES = 1000


@cache
def synsets() -> tuple[str, ...]:
    """The WordNet ids, sorted: place i is class i, and the name of its folder."""
    return tuple(synset for synset, _ in _read("classes"))


def subset(name: str) -> tuple[int, ...]:
    """The ImageNet indices of the 200 classes of "r" or "a", ascending."""
    return tuple(_read("shifts")[name])


def objectnet() -> dict[str, tuple[int, ...]]:
    """ObjectNet's 113 folders that ImageNet knows, sorted, with their ImageNet indices."""
    return {folder: tuple(indices) for folder, indices in _read("shifts")["objectnet"].items()}


def objectnet_others() -> tuple[str, ...]:
    """ObjectNet's 200 folders that no ImageNet class matches."""
    return tuple(_read("shifts")["objectnet_others"])


@cache
def _read(name: str):
    return json.loads((FOLDER / f"{name}.json").read_bytes())
