"""Errors for people: one line that names the key, the value and the remedy.

Mistakes of the user end in one line and exit code 1; an interrupted run in exit code 75 (try
again); anything unforeseen is a defect of ours and keeps its traceback.
"""

import difflib
import os
import re
import sys
import time
import traceback

INTERRUPTED = 75  # EX_TEMPFAIL: the same command goes on
SPEAKING_SECONDS = 10  # at most; to look for the nearest valid key takes a while
EXPECTED = (ValueError, FileNotFoundError, FloatingPointError)
# by name: their modules load torch
EXPECTED_NAMES = ("RunError", "SaveError", "EngineError", "LostProcess")


def explain(error: BaseException, aloud: bool | None = None) -> int:
    """Prints what went wrong, unless another process does, and returns the exit code."""
    if aloud is None:
        aloud = _is_first()
        if not aloud:  # whoever ends first ends all by torchrun, so the one that speaks must
            time.sleep(SPEAKING_SECONDS)
    if not aloud:
        return INTERRUPTED if type(error).__name__ == "Interrupted" else 1
    if type(error).__module__.startswith(("hydra.", "omegaconf.")):
        refused = isinstance(error.__cause__, EXPECTED)  # by a constructor that Hydra called
        print(f"error: {error.__cause__ if refused else _composition(error)}", file=sys.stderr)
        return 1
    if type(error).__name__ == "Interrupted":
        print(f"{error}; the same command goes on", file=sys.stderr)
        return INTERRUPTED
    if isinstance(error, EXPECTED) or type(error).__name__ in EXPECTED_NAMES:
        print(f"error: {error}", file=sys.stderr)
        return 1
    traceback.print_exception(error)
    return 1


def _is_first() -> bool:
    """Of processes that cannot even begin: they share a command, and what is wrong with it."""
    return os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"


def _composition(error: BaseException) -> str:
    """Hydra's complaint about an override, with the nearest valid names."""
    message = str(error)
    if "Could not load 'hydra/launcher/submitit_slurm'" in message:
        return "hydra/launcher=slurm needs hydra-submitit-launcher: pip install '.[slurm]'"
    wrong = re.search(r"Could not override '([^']+)'", message)
    if wrong is None:
        return re.sub(r"\s+", " ", message)
    key = wrong.group(1)
    valid = _valid_keys()
    near = difflib.get_close_matches(key, valid, n=3, cutoff=0.5)
    leaf = difflib.get_close_matches(
        key.split(".")[-1], sorted({k.split(".")[-1] for k in valid}), n=3, cutoff=0.6
    )
    near += [k for k in valid if k.split(".")[-1] in leaf and k not in near][: 3 - len(near)]
    hint = f"did you mean {', '.join(near)}?" if near else "see python train.py --cfg job"
    return f"unknown key {key!r}; {hint}"


def _valid_keys() -> list[str]:
    """All keys of the config composed from the group choices on the command line alone."""
    from ed.engine.compose import GROUPS, compose_config, flat_keys

    choice = re.compile(rf"({'|'.join(GROUPS)})=[\w\[\],]+")
    return flat_keys(compose_config([a for a in sys.argv[1:] if choice.fullmatch(a)]))
