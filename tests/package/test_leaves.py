"""Tests that config leaves have the keys and defaults of their class."""

import inspect
from pathlib import Path

import pytest
import yaml
from hydra.utils import get_object

CONFIGS = Path(__file__).parents[2] / "configs"
GROUPS = ("task", "model", "regularizer", "sampler", "optimizer", "measures")
# leaves that differ from the defaults of their class, or whose class has none
CHANGED = {
    "model/clip_b32", "model/clip_small", "model/clip_small_pretrain", "model/clip_soup",
    "task/clip_finetune", "task/clip_standin", "task/clip_standin_pretrain", "task/image_folder",
    "task/imagenet", "task/mnist_cifar", "task/text_classification",
    "model/timm", "model/transformers",  # `name` is mandatory
}  # fmt: skip


def leaves() -> dict[str, dict]:
    """Returns all config leaves with a `_target_`, by group/choice."""
    found = {}
    for group in GROUPS:
        for path in sorted((CONFIGS / group).glob("*.yaml")):
            leaf = yaml.safe_load(path.read_text()) or {}
            if "_target_" in leaf and not leaf.get("defaults"):
                found[f"{group}/{path.stem}"] = leaf
    return found


def plain(value):
    """Converts a value so that lists equal tuples and 1/3 equals its rounded decimal form."""
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return pytest.approx(value, rel=1e-6) if isinstance(value, float) else value


def all_parameters(target) -> dict[str, inspect.Parameter]:
    """Returns a constructor's parameters, including those it passes on to its parents."""
    if not isinstance(target, type):
        return dict(inspect.signature(target).parameters)
    found = {}
    for base in target.__mro__:
        own = inspect.signature(base).parameters if base is not object else {}
        found = {k: p for k, p in own.items() if p.kind is not p.VAR_KEYWORD} | found
        if not any(p.kind is p.VAR_KEYWORD for p in own.values()):
            return found
    return found


@pytest.mark.parametrize("name", sorted(set(leaves()) - CHANGED))
def test_a_leaf_states_the_defaults_of_its_class(name):
    leaf = leaves()[name]
    parameters = all_parameters(get_object(leaf.pop("_target_")))
    assert set(leaf) <= set(parameters)
    for key, parameter in parameters.items():
        assert parameter.default is not parameter.empty, f"{key} has no default"
        stated = leaf.get(key, parameter.default)  # a leaf may omit rarely used settings
        if not (isinstance(stated, str) and stated.startswith("${")):
            assert plain(parameter.default) == plain(stated), key
