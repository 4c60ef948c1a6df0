"""The published fine-tuned CLIP models of model-soups (Wortsman et al.), one file each."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch

from ed.models.clip import ClipClassifier, build
from ed.models.weights import load_weights, read_weights

NAMES = {"model.visual.": "visual.", "classification_head.": "head."}  # theirs: ours
RECIPES = "hparam_info.json"  # of their repository: {"model_1": {"lr": ..., "mix": ...}, ...}


def soup_member(
    folder: str, *, index: int, architecture: str | Mapping, classes: int
) -> ClipClassifier:
    """`model_<index>.pt` of a folder: image tower, l2-normalised features, linear head with bias.

    What the files still hold of the text tower takes no part in classification and is left out.
    Its `recipe` is that of the list of recipes, where it lies beside the models.
    """
    path = Path(folder).expanduser() / f"model_{index}.pt"
    given = f"model.folder={folder} model.index={index}"
    if not path.is_file():
        raise FileNotFoundError(
            f"{given}: there is no {path}. Get model_0.pt to model_71.pt of release v0.0.2 of "
            "github.com/mlfoundations/model-soups; model.folder or ED_SOUPS names their folder"
        )
    state = {}
    for name, value in read_weights(path, given).items():
        prefix = next((prefix for prefix in NAMES if name.startswith(prefix)), None)
        if prefix is not None:
            state[NAMES[prefix] + name.removeprefix(prefix)] = value
    visual = build(architecture).visual
    model = ClipClassifier(visual, torch.zeros(classes, visual.output_dim))
    load_weights(model, state, given)
    model.recipe = read_recipe(path.parent / RECIPES, path.stem, given)
    return model


def read_recipe(path: Path, name: str, given: str) -> dict | None:
    """How a model was fine-tuned: learning rate, decay, mixup, ...; None where no list is there."""
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_bytes())[name]
    except (ValueError, KeyError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"{given}: {path} does not tell the recipe of {name} ({reason}); copy it anew from "
            "github.com/mlfoundations/model-soups, or remove it"
        ) from None
