"""Reads stored configs safely, because a run folder may come from someone else.

Building an arbitrary `_target_` could run untrusted code, so `stored_config` accepts only those in
configs/. To skip this check, use --trust (scripts) or system.trust=true (train.py). Anything in the
user's own command is always trusted.
"""

import functools
from collections.abc import Iterable, Iterator
from pathlib import Path

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ed.engine.compose import CONFIGS, GROUPS, PARTS
from ed.runtime.files import yaml_text
from ed.runtime.runs import CONFIG, is_plain

SPECIAL = ("_args_", "_partial_", "_recursive_", "_convert_")  # Hydra keys that ed does not use
REMEDY = (
    "if you trust the author of this folder, add --trust (train.py: system.trust=true; "
    "ed.load_run: trust=True)"
)


class UntrustedConfig(ValueError):
    """Raised if a stored config refers to a class or function that is not part of ed."""


def stored_config(folder: Path, *, trust: bool = False) -> DictConfig:
    """Reads a run folder's config; checks that it is safe to build unless `trust` is true."""
    path = folder / CONFIG
    cfg = read_config(path)
    for key in ("task", "model"):
        if key not in cfg or "_target_" not in cfg[key]:
            raise _damaged(path, f"{key}._target_ is missing")
    if not trust:
        check_targets(cfg, path)
    return cfg


def read_config(path: Path) -> DictConfig:
    """Reads a config to compare or show, not to build; raises ValueError if it is damaged."""
    text = yaml_text(path)
    try:
        cfg = OmegaConf.create(text)
    except (yaml.YAMLError, OmegaConfBaseException, ValueError, AssertionError) as error:
        raise _damaged(path, " ".join(str(error).split()) or "it is not a mapping") from None
    raw = OmegaConf.to_container(cfg, resolve=False) if isinstance(cfg, DictConfig) else None
    if raw is None or not is_plain(raw):
        raise _damaged(path, "it is not a mapping of settings")
    groups = {key: raw[key] for key in PARTS if key in raw}
    for key, group in (groups | {"measures": raw.get("measures") or {}}).items():
        if not isinstance(group, dict):
            raise _damaged(path, f"{key} is not a mapping")
    for key, value in _walk(raw):
        if isinstance(value, str) and "${" in value:  # stored configs are resolved
            raise _damaged(path, f"{key}={value[:60]} is a reference; stored configs have none")
    return cfg


def _damaged(path: Path, reason: str) -> ValueError:
    return ValueError(f"{path} is not the config of a run: {reason}; restore or remove it")


@functools.cache
def shipped_targets(group: str) -> frozenset[str]:
    """Returns every `_target_` in configs/ that builds a choice of this group."""
    configs = (yaml.safe_load(path.read_bytes()) for path in (CONFIGS / group).glob("*.yaml"))
    return frozenset(name for config in configs for name in targets(config))


def _group_at(key: str) -> str | None:
    """Returns the group whose choices may stand at a key, or None if it has no `_target_`."""
    match key.split("."):
        case [group, "_target_"] if group in GROUPS:
            return group
        case ["measures", _, "_target_"]:
            return "measures"
        case ["regularizer", "sampler", "_target_"]:
            return "sampler"
    return None


def targets(config) -> list[str]:
    """Returns every `_target_` in a config, at any depth."""
    if isinstance(config, DictConfig):
        config = OmegaConf.to_container(config, resolve=True)
    return [value for key, value in _walk(config) if key.split(".")[-1] == "_target_"]


def check_targets(cfg: DictConfig, path: Path, *, own: Iterable[str] = ()) -> None:
    """Raises UntrustedConfig if building `cfg`, stored in `path`, could run untrusted code.

    Args:
        own: additional trusted targets, from the user's command.
    """
    own = set(own)
    for key, value in _walk(OmegaConf.to_container(cfg, resolve=False)):
        name = key.split(".")[-1]
        if name in SPECIAL:
            raise UntrustedConfig(f"{path}: {key} is not an ed setting; {REMEDY}")
        if name != "_target_" or (isinstance(value, str) and value in own):
            continue
        group = _group_at(key)
        if group is None or not isinstance(value, str) or value not in shipped_targets(group):
            fault = f"is not in configs/{group}" if group else "is out of place"
            raise UntrustedConfig(
                f"{path}: {key}={value!r} {fault}, and building it could run foreign code; {REMEDY}"
            )


def _walk(value, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yields the dotted key and the value of every node in a container, at any depth."""
    if not isinstance(value, (dict, list)):
        return
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        yield f"{prefix}{key}", item
        yield from _walk(item, f"{prefix}{key}.")
