"""Finds the invalid override in a command and suggests similar valid names."""

import argparse
import contextlib
import difflib
import functools
import sys
from collections.abc import Sequence
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from omegaconf import OmegaConf

from ed.engine.compose import CONFIGS, compose_config, flat_keys

# maps symbols in the paper to setting names
SYMBOLS = {"lambda": "weight", "r": "resolution", "K": "degree", "m": "components"}
SYMBOLS |= {"n_p": "pairs", "n_proj": "projections", "epsilon": "damping"}


class Overrides:
    """The overrides of a command, as Hydra parses them.

    Attributes:
        folders: additional config folders, from --config-dir or hydra.searchpath.
        sweeps: for each group in the sweep, its choices.
        chosen: one choice for each group in the command; for a sweep, the first.
        settings: the overrides of single keys.
    """

    def __init__(self, words: Sequence[str]):
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        parser.add_argument("--config-dir", "-cd", type=Path, action="append", default=[])
        self.folders = parser.parse_known_args(sys.argv[1:])[0].config_dir
        given = [word for word in words if "=" in word and not word.startswith("-")]
        parsed = OverridesParser.create().parse_overrides(given)
        for found in parsed:
            places = found.value() if found.key_or_group == "hydra.searchpath" else None
            if isinstance(places, list):  # Hydra rejects other values
                places = [place for place in places if isinstance(place, str)]
                self.folders += [Path(place.removeprefix("file://")) for place in places]
        parsed = [found for found in parsed if not found.is_hydra_override()]
        groups = [found for found in parsed if self.choices(found.key_or_group)]
        self.settings = [
            found for found in parsed if found not in groups and found.type == OverrideType.CHANGE
        ]
        self.sweeps = {
            found.key_or_group: list(found.sweep_string_iterator())
            for found in groups
            if found.is_sweep_override()
        }
        self.chosen = [found.input_line for found in groups if not found.is_sweep_override()]
        self.chosen += [f"{group}={choices[0]}" for group, choices in self.sweeps.items()]

    def choices(self, group: str) -> list[str]:
        """Returns the choices of a group, including the user's, or [] if it does not exist."""
        return sorted(self._files(group))

    def _files(self, group: str) -> dict[str, Path]:
        places = [folder / group for folder in (CONFIGS, *self.folders)]
        return {path.stem: path for place in places for path in place.glob("*.yaml")}

    @functools.cached_property
    def valid(self) -> list[str]:
        return self.keys()

    def keys(self, *choices: str) -> list[str]:
        """Returns all config keys for the command's choices; `choices` take precedence."""
        cfg = compose_config([*self.chosen, *choices], folders=self.folders)
        return flat_keys(OmegaConf.to_container(cfg))

    def wrong_key(self) -> str | None:
        """Describes the first invalid setting, or returns None if all are valid."""
        return next(filter(None, map(self._wrong, self.settings)), None)

    def wrong_choice(self, group: str, choice: str) -> str:
        choices = self.choices(group)
        near = difflib.get_close_matches(choice, choices, n=2, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        return f"{group}={choice}: no such choice; {hint}Choices: {', '.join(choices)}"

    def _wrong(self, setting: Override) -> str | None:
        key, given = setting.key_or_group, setting.input_line
        group = key.split(".")[0]
        choices = [f"{group}={choice}" for choice in self.sweeps.get(group, ())]
        lacking = [choice for choice in choices if key not in self.keys(choice)]
        if lacking == choices and key not in self.valid:
            return self._unknown(key)
        if lacking:
            return f"{given}: {lacking[0]} has no such setting; run it with a separate command"
        if choices and not setting.is_sweep_override():
            # Hydra would apply it to the default choice, before the sweep replaces that choice
            again = f"{key}=choice({given.partition('=')[2]})"
            return f"{given}: in a sweep over {group}, write it as a sweep, too: '{again}'"
        return None

    def _unknown(self, key: str) -> str:
        group, *rest = key.split(".")
        valid, owners = self.valid, self._owners(key)
        if group == "measures" and owners:
            return f"{key}: {rest[0]} is not measured; add measures=[{rest[0]}]"
        symbol = f"{group}.{SYMBOLS[rest[0]]}" if rest and rest[0] in SYMBOLS else None
        if symbol in valid:
            return f"unknown key {key!r}; the paper's {rest[0]} is {symbol}"
        if owners:
            return f"unknown key {key!r} here; it belongs to {group}={', '.join(owners)}"
        near = difflib.get_close_matches(key, valid, n=3, cutoff=0.5)
        leaves = sorted({name.split(".")[-1] for name in valid})
        leaf = difflib.get_close_matches(key.split(".")[-1], leaves, n=3, cutoff=0.6)
        near += [k for k in valid if k.split(".")[-1] in leaf and k not in near][: 3 - len(near)]
        hint = f"did you mean {', '.join(near)}?" if near else "see python train.py --cfg job"
        return f"unknown key {key!r}; {hint}"

    def _owners(self, key: str) -> list[str]:
        """Returns the choices of the key's group that have this key."""
        group, *rest = key.split(".")
        owners = []
        for choice, path in sorted(self._files(group).items()) if rest else ():
            text = path.read_text("utf-8", errors="replace")  # read first, as composing is slow
            if f"{rest[-1]}:" not in text and "defaults:" not in text:
                continue
            if group == "measures" and choice != rest[0]:
                continue
            value = f"[{choice}]" if group == "measures" else choice
            with contextlib.suppress(Exception):  # a broken config that the command does not use
                if key in self.keys(f"{group}={value}"):
                    owners.append(choice)
        return owners
