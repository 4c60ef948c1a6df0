"""Expands experiment configs (configs/experiment) into overrides, without Hydra."""

import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from ed.analysis.spec import SpecError, nearest
from ed.runtime.files import APP, YAML_LOADER, yaml_text
from ed.runtime.runs import flat

CHOICE = "experiment="
GROUPS = ("task", "model", "optimizer", "regularizer")


def expanded(overrides: Sequence[str]) -> tuple[str, ...]:
    """Replaces `experiment=NAME` in a list of overrides with the settings of that config.

    These settings come first, so that other overrides take precedence, as in Hydra.
    """
    names = [text.removeprefix(CHOICE) for text in overrides if text.startswith(CHOICE)]
    others = [text for text in overrides if not text.startswith(CHOICE)]
    if not names:
        return tuple(others)
    recipe = _settings(names[-1], _folders(others), above=())
    return (*(f"{key}={value}" for key, value in recipe.items()), *others)


def group_defaults(overrides: Sequence[str]) -> dict[str, str]:
    """Returns the settings of the chosen group files, by dotted key."""
    choices = dict(text.split("=", 1) for text in overrides)
    found = {}
    for group in GROUPS:
        found |= _group_file(group, choices.get(group, ""))
    changed = debug_settings(overrides)
    return {key: word for key, word in found.items() if key not in changed}


def debug_settings(overrides: Sequence[str]) -> dict[str, str]:
    """Returns the settings of the chosen debug config, which replace those of other files."""
    choice = dict(text.split("=", 1) for text in overrides).get("debug", "")
    settings = _group_file("debug", choice)
    return {key.removeprefix("debug."): word for key, word in settings.items()}


def target_of(group: str, choice: str) -> str | None:
    """Returns the `_target_` of a group's choice; None for a list or a user's own config."""
    return _group_file(group, choice).get(f"{group}._target_")


def choice_of(group: str, config: Mapping) -> str | None:
    """Returns the name of the group file behind part of a config, e.g. `ed_fast`.

    Among the files with the same `_target_`, this is the one whose settings match best; None if
    no file has that `_target_`.
    """
    own = {f"{group}.{key}": word for key, word in _words(config).items()}
    agreements = {}
    for path in sorted((APP / "configs" / group).glob("*.yaml")):
        settings = _group_file(group, path.stem)
        if settings.get(f"{group}._target_") == config.get("_target_"):
            same = sum(own.get(key) == word for key, word in settings.items())
            agreements[path.stem] = 2 * same - len(settings)  # matches minus mismatches
    return max(agreements, key=agreements.get, default=None)


@functools.cache
def _group_file(group: str, choice: str) -> dict[str, str]:
    path = APP / "configs" / group / f"{choice}.yaml"
    if not path.is_file():  # a user's own config
        return {}
    raw = yaml.load(yaml_text(path), YAML_LOADER)
    found: dict[str, str] = {}
    for entry in raw.pop("defaults", []):
        found |= _group_file(group, entry) if isinstance(entry, str) else {}
    settings = {f"{group}.{key}": word for key, word in _words(raw).items()}
    return found | {k: word for k, word in settings.items() if "${" not in word and word != "???"}


def _folders(overrides: Sequence[str]) -> list[Path]:
    """Returns the folders of experiment configs: our own and those in hydra.searchpath."""
    searched = [text for text in overrides if text.startswith("hydra.searchpath=")]
    own = re.findall(r"file://([^],'\"]+)", " ".join(searched))
    return [Path(folder) / "experiment" for folder in (APP / "configs", *own)]


def _settings(name: str, folders: Sequence[Path], *, above: tuple[str, ...]) -> dict[str, str]:
    """Returns the settings of an experiment, including inherited ones, by dotted key."""
    path = next((f / f"{name}.yaml" for f in folders if (f / f"{name}.yaml").is_file()), None)
    if path is None or name in above:
        known = sorted(path.stem for folder in folders for path in folder.glob("*.yaml"))
        reason = "builds on itself" if name in above else nearest(name, known)
        raise SpecError(f"experiment={name}: {reason}")
    try:
        raw = yaml.load(yaml_text(path), YAML_LOADER) or {}
    except yaml.YAMLError as error:
        raise SpecError(f"{path} is not YAML ({' '.join(str(error).split())})") from None
    if not isinstance(raw, dict) or not isinstance(raw.get("defaults", []), list):
        raise SpecError(f"{path}: must be a mapping, with a list of defaults")
    found: dict[str, str] = {}
    for entry in raw.pop("defaults", []):
        if isinstance(entry, dict):
            found |= {k.removeprefix("override /"): _word(value) for k, value in entry.items()}
        elif entry != "_self_":
            found |= _settings(entry, folders, above=(*above, name))
    return found | {key: word for key, word in _words(raw).items() if "${" not in word}


def _words(config: Mapping) -> dict[str, str]:
    """Returns the settings of a config by dotted key, as they are written in overrides."""
    return {key: _word(value) for key, value in flat(config).items()}


def _word(value) -> str:
    """Formats a value as it is written in an override."""
    if isinstance(value, list):
        return f"[{','.join(map(_word, value))}]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)
