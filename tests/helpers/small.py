"""Small runs for tests: by default, a few steps of a tiny ViT on the embedded images."""

import functools
from pathlib import Path

import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from omegaconf import DictConfig, OmegaConf

from ed.engine.compose import compose_config
from ed.engine.main import run
from ed.runtime.files import read_rows

SMALL = [
    "debug=tiny",
    "task.batch_size=200",  # 10 steps in one epoch
    "task.eval_every=1",
    "model.patch=16",
    "model.width=32",
    "model.depth=1",
    "model.heads=2",
    "system.log_every=1",
]

SMALL_GROKKING = [
    "task=grokking",
    "task.modulus=7",
    "task.steps=10",
    "task.eval_every=4",
    "model=grokking",
    "model.width=32",
    "system.device=cpu",
    "system.log_every=1",
]


composed = functools.cache(lambda *overrides: compose_config(list(overrides)))


@functools.cache
def parsed(override: str) -> Override:
    return OverridesParser.create().parse_override(override)


def quick_config(*overrides: str) -> DictConfig:
    """Returns the config of `compose_config`, but composes each choice of groups only once.

    Unknown keys and invalid values raise, as they do in Hydra.
    """
    choices, settings = [], {}
    for item in map(parsed, overrides):
        key = item.key_or_group
        if "." in key and item.type == OverrideType.CHANGE and not key.startswith("hydra."):
            settings[key] = item.value()
        else:
            choices.append(item.input_line)
    cfg = composed(*choices).copy()
    for key, value in settings.items():
        OmegaConf.update(cfg, key, value)
    return cfg


def small_config(folder: Path, *overrides: str, base=SMALL) -> DictConfig:
    cfg = quick_config(*base, *overrides)
    cfg.system.run_dir = str(folder)
    return cfg


def small_run(folder: Path, *overrides: str, base=SMALL) -> dict:
    return run(small_config(folder, *overrides, base=base), ["small"])


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from ed.engine.checkpoint import load_checkpoint

    return load_checkpoint(folder)["training"]["model"]


def rows_without_time(folder: Path) -> list[dict]:
    return [
        {key: value for key, value in row.items() if not key.startswith("time/")}
        for row in read_rows(folder / "metrics.jsonl")
    ]


def assert_same_run(first: Path, second: Path) -> None:
    ours, theirs = weights(first), weights(second)
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name
    assert rows_without_time(first) == rows_without_time(second)
