"""Loads the fine-tuned CLIP models published with model soups (Wortsman et al.)."""

from collections.abc import Mapping
from pathlib import Path

import torch

from ed.core.validate import brief
from ed.models.clip import ClipClassifier, build
from ed.models.weights import load_weights, read_weights
from ed.runtime.files import read_json

# maps prefixes of parameter names in the published files to ours
NAMES = {"model.visual.": "visual.", "classification_head.": "head."}
RECIPES = "hparam_info.json"  # from their repository: {"model_1": {"lr": ..., "mix": ...}, ...}


def soup_member(
    folder: str, *, index: int, architecture: str | Mapping, classes: int
) -> ClipClassifier:
    """Loads `model_<index>.pt` without its text tower, and its `recipe` if available."""
    path = Path(folder).expanduser() / f"model_{index}.pt"
    given = f"model.folder={folder} model.index={index}"
    if not path.is_file():
        raise FileNotFoundError(
            f"{given}: {path} not found; download model_0.pt to model_71.pt from release v0.0.2 "
            "of github.com/mlfoundations/model-soups, and set model.folder or ED_SOUPS"
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
    """Returns a model's hyperparameters (learning rate, decay, ...), or None without the file."""
    if not path.is_file():
        return None
    try:
        recipe = read_json(path)[name]
        if not isinstance(recipe, dict):
            raise ValueError("it is not a mapping")
        return recipe
    except (ValueError, KeyError) as error:
        raise ValueError(
            f"{given}: {path} has no recipe for {name} ({brief(error)}); download it again from "
            "github.com/mlfoundations/model-soups, or remove it"
        ) from None
