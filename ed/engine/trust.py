"""Reads stored configs safely: a run folder may come from someone else.

Building any `_target_` could run the author's code, so `stored_config` accepts only those in
configs/. --trust (scripts) and system.trust=true (train.py) lift this; parts that the user's own
command names are always trusted.
"""

import functools
from collections.abc import Iterable, Iterator
from pathlib import Path

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ed.engine.compose import CONFIGS, PARTS
from ed.runtime.files import yaml_text
from ed.runtime.runs import CONFIG

SPECIAL = ("_args_", "_partial_", "_recursive_", "_convert_")  # Hydra's; ed uses none of them
REMEDY = "if you trust whoever made this folder, add --trust (train.py: system.trust=true)"


class UntrustedConfig(ValueError):
    """A stored config names a class or function that is not part of ed."""


def stored_config(folder: Path, *, trust: bool = False) -> DictConfig:
    """The config of a run folder, safe to build unless `trust` skips the check."""
    path = folder / CONFIG
    cfg = read_config(path)
    for key in ("task", "model"):
        if key not in cfg or "_target_" not in cfg[key]:
            raise _damaged(path, f"{key}._target_ is missing")
    if not trust:
        check_targets(cfg, path)
    return cfg


def read_config(path: Path) -> DictConfig:
    """A stored config, to compare or show but not to build; ValueError if it is damaged."""
    text = yaml_text(path)
    try:
        cfg = OmegaConf.create(text)
    except (yaml.YAMLError, OmegaConfBaseException, ValueError, AssertionError) as error:
        raise _damaged(path, " ".join(str(error).split()) or "it is not a mapping") from None
    if not isinstance(cfg, DictConfig) or not all(isinstance(key, str) for key in cfg):
        raise _damaged(path, "it is not a mapping of settings")
    raw = OmegaConf.to_container(cfg, resolve=False)
    groups = {key: raw[key] for key in PARTS if key in raw}
    for key, group in (groups | {"measures": raw.get("measures") or {}}).items():
        if not isinstance(group, dict):
            raise _damaged(path, f"{key} is not a mapping")
    for key, value in _walk(raw):
        if isinstance(value, str) and "${" in value:  # runs store their configs resolved
            raise _damaged(path, f"{key}={value[:60]} refers to another value")
    return cfg


def _damaged(path: Path, reason: str) -> ValueError:
    return ValueError(f"{path} is not the config of a run: {reason}; restore or remove it")


@functools.cache
def shipped_targets() -> frozenset[str]:
    """Every `_target_` in configs/."""
    configs = (yaml.safe_load(path.read_bytes()) for path in CONFIGS.glob("**/*.yaml"))
    return frozenset(name for config in configs for name in targets(config))


def targets(config) -> list[str]:
    """Every `_target_` in a config, at any depth."""
    if isinstance(config, DictConfig):
        config = OmegaConf.to_container(config, resolve=True)
    return [value for key, value in _walk(config) if key.split(".")[-1] == "_target_"]


def check_targets(cfg: DictConfig, path: Path, *, own: Iterable[str] = ()) -> None:
    """Raises UntrustedConfig if building `cfg`, stored in `path`, could run foreign code.

    Args:
        own: further trusted targets, from the user's own command.
    """
    allowed = shipped_targets() | set(own)
    for key, value in _walk(OmegaConf.to_container(cfg, resolve=False)):
        name = key.split(".")[-1]
        if name in SPECIAL:
            raise UntrustedConfig(f"{path}: {key} is not an ed setting; {REMEDY}")
        if name == "_target_" and (not isinstance(value, str) or value not in allowed):
            raise UntrustedConfig(
                f"{path}: {key}={value!r} is not part of ed, and building it could run foreign "
                f"code; {REMEDY}"
            )


def _walk(value, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Dotted key and value of every node below a container, containers included."""
    if not isinstance(value, (dict, list)):
        return
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        yield f"{prefix}{key}", item
        yield from _walk(item, f"{prefix}{key}.")
