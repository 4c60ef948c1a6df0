"""Class names and prompt templates for captions and zero-shot heads."""

import json
from pathlib import Path

from ed.core.validate import choice

IMAGENET = Path(__file__).parents[1] / "datasets" / "embedded" / "imagenet"
CIFAR10 = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
SHORT = (
    "a photo of a {}.",
    "a blurry photo of a {}.",
    "a low contrast photo of a {}.",
    "a bad photo of a {}.",
    "a photo of a small {}.",
    "a photo of a big {}.",
    "a photo of the {}.",
    "a picture of a {}.",
)
SETS = ("cifar10", "imagenet", "imagenet_7")


def captions(prompts: str) -> list[list[str]]:
    """Returns the captions of every class, one per template.

    `cifar10` has 8 templates. `imagenet` uses the class names and 80 templates that OpenAI
    published with CLIP, and `imagenet_7` uses 7 of these templates.
    """
    choice("model.prompts", prompts, SETS)
    if prompts == "cifar10":
        names, templates = CIFAR10, SHORT
    else:
        names = [name for _, name in _read("classes.json")]
        chosen = "openai_80" if prompts == "imagenet" else "simple_7"
        templates = _read("prompts.json")[chosen]
    return [[template.format(name) for template in templates] for name in names]


def _read(name: str):
    return json.loads((IMAGENET / name).read_bytes())
