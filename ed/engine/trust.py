"""Run folders may come from someone else: their configs build only parts that configs/ names.

Every entry point that builds something from a stored config reads it with `stored_config`, which
refuses any other `_target_`: calling it could run code of the folder's author. --trust of the
scripts and system.trust=true of train.py lift this. Parts that the user's own command names are
trusted anyway.
"""

import functools
from collections.abc import Iterable, Iterator
from pathlib import Path

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ed.engine.compose import CONFIGS
from ed.runtime.files import yaml_text
from ed.runtime.runs import CONFIG

PARTS = ("task", "model", "regularizer", "sampler", "optimizer")
SPECIAL = ("_args_", "_partial_", "_recursive_", "_convert_")  # of Hydra; ours use none of them
REMEDY = "if you trust whoever made this folder, add --trust (train.py: system.trust=true)"


class UntrustedConfig(ValueError):
    """A stored config wants to build something that is not a part of ed."""


def stored_config(folder: Path, *, trust: bool = False) -> DictConfig:
    """The config of a run folder, safe to build; with `trust`, whatever it names."""
    path = folder / CONFIG
    cfg = read_config(path)
    for key in ("task", "model"):
        if key not in cfg or "_target_" not in cfg[key]:
            raise _damaged(path, f"{key}._target_ is missing")
    if not trust:
        check_targets(cfg, path)
    return cfg


def read_config(path: Path) -> DictConfig:
    """A stored config, to be compared or shown; ValueError where it is not one."""
    text = yaml_text(path)
    try:
        cfg = OmegaConf.create(text)
    except (yaml.YAMLError, OmegaConfBaseException, ValueError, AssertionError) as error:
        raise _damaged(path, " ".join(str(error).split()) or "it is not a mapping") from None
    if not isinstance(cfg, DictConfig) or not all(isinstance(key, str) for key in cfg):
        raise _damaged(path, "it is not a mapping of settings")
    raw = OmegaConf.to_container(cfg, resolve=False)
    for key in PARTS:
        if key in raw and not isinstance(raw[key], dict):
            raise _damaged(path, f"{key} is not a mapping")
    if not isinstance(raw.get("measures") or {}, dict):
        raise _damaged(path, "measures is not a mapping")
    for key, value in _walk(raw):
        if isinstance(value, str) and "${" in value:  # runs store their configs resolved
            raise _damaged(path, f"{key}={value[:60]} refers to another value")
    return cfg


def _damaged(path: Path, reason: str) -> ValueError:
    return ValueError(f"{path} is not the config of a run: {reason}; restore or remove it")


@functools.cache
def shipped_targets() -> frozenset[str]:
    """Every `_target_` that a file in configs/ names."""
    found: set[str] = set()
    for path in CONFIGS.glob("**/*.yaml"):
        found |= set(targets(yaml.safe_load(path.read_bytes())))
    return frozenset(found)


def targets(config) -> list[str]:
    """Every `_target_` in a config, at any depth."""
    if isinstance(config, DictConfig):
        config = OmegaConf.to_container(config, resolve=True)
    return [value for key, value in _walk(config) if key.split(".")[-1] == "_target_"]


def check_targets(cfg: DictConfig, path: Path, *, own: Iterable[str] = ()) -> None:
    """Raises UntrustedConfig if building `cfg`, stored in `path`, could run foreign code.

    Args:
        own: targets that are trusted as well, as the user's own command names them.
    """
    allowed = shipped_targets() | set(own)
    for key, value in _walk(OmegaConf.to_container(cfg, resolve=False)):
        name = key.split(".")[-1]
        if name in SPECIAL:
            raise UntrustedConfig(f"{path}: {key} is not a setting of ed; {REMEDY}")
        if name == "_target_" and (not isinstance(value, str) or value not in allowed):
            raise UntrustedConfig(
                f"{path}: {key}={value!r} is not a part of ed, and building it could run foreign "
                f"code; {REMEDY}"
            )


def _walk(value, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Dotted key and value of every node below a container, containers included."""
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    else:
        return
    for key, item in items:
        yield f"{prefix}{key}", item
        yield from _walk(item, f"{prefix}{key}.")
