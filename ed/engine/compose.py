"""Composes configs outside `train.py`, for scripts, tests and the launcher."""

import re
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from ed.runtime.files import APP

PARTS = ("task", "model", "regularizer", "sampler", "optimizer")
GROUPS = (*PARTS, "measures", "logger")
SINGLE = (*PARTS, "logger", "debug")  # groups with one choice per run
CONFIGS = APP / "configs"


def compose_config(overrides: list[str], *, folders: Sequence[Path] = ()) -> DictConfig:
    """Returns the config of `python train.py <overrides>`; `folders` add more configs."""
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        # quoted, because paths may contain spaces
        path = ",".join(f"'file://{folder.resolve()}'" for folder in folders)
        extra = [f"hydra.searchpath=[{path}]"] if folders else []
        return compose("train", overrides=[*overrides, *extra])


def sampler_is_unused(cfg: DictConfig, overrides: Sequence[str]) -> bool:
    """Returns whether the overrides choose a sampler that the config does not use."""
    chosen = any(re.match(r"sampler[.=]", text) for text in overrides)
    return chosen and "${sampler" not in OmegaConf.to_yaml(cfg)


def flat_keys(config: dict, prefix: str = "") -> list[str]:
    """Returns the dotted keys of a config, both groups and settings."""
    keys = []
    for key, value in config.items():
        inner = flat_keys(value, f"{prefix}{key}.") if isinstance(value, dict) else []
        keys += [f"{prefix}{key}", *inner]
    return keys
