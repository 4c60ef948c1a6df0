"""Locations of the data of runs: the values of launch.py's --data."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from ed.analysis.spec import SpecError, place_of
from ed.runtime.files import APP


def located(text: str) -> str:
    """Returns the override for `--data`, with an absolute path because runs start elsewhere."""
    key, value = place_of(text).split("=", 1)
    if os.path.exists(value) and Path.cwd() != APP:
        value = str(Path(value).absolute())
    return f"{key}={quoted(value)}"


def require_places(texts: Sequence[str]) -> None:
    """Rejects missing local paths at once, instead of in every run."""
    for text in texts:
        value = place_of(text).partition("=")[2]
        found = any((folder / value).exists() for folder in (Path.cwd(), APP))
        if re.match(r"/|\.\.?/", value) and not found:
            raise SpecError(f"--data {text}: no such file or folder")


def quoted(value: str) -> str:
    """Quotes a path or name for Hydra's override grammar, if necessary.

    Hydra treats a backslash as an escape only before a quote, so only those are doubled.
    """
    if re.fullmatch(r"[\w/.:@%+-]+( [\w/.:@%+-]+)*", value, re.ASCII):
        return value
    escaped = re.sub(r"(\\+)(?='|\Z)", r"\1\1", value).replace("'", r"\'")
    return f"'{escaped}'"
