"""Errors for people: one line that names the key, the value and the remedy.

Mistakes of the user end in one line and exit code 1; an interrupted run in exit code 75 (try
again); anything unforeseen is a defect of ours and keeps its traceback.
"""

import errno
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence

from yaml import YAMLError

from ed.runtime.console import restore

INTERRUPTED = 75  # EX_TEMPFAIL: the same command goes on
SPEAKING_SECONDS = 10  # at most; to look for the nearest valid key takes a while
EXPECTED = (ValueError, FileNotFoundError, FloatingPointError)
# of the system, about a place that is no use: read-only, or a file where a folder belongs
WRONG_PLACE = (PermissionError, FileExistsError, NotADirectoryError, IsADirectoryError)
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# by name: their modules load torch
EXPECTED_NAMES = ("RunError", "SaveError", "EngineError", "LostProcess")


def or_explain(main: Callable[[], int | None]) -> int | None:
    """What a script's `main` returns; where it fails, `explain` speaks and the process ends."""
    try:
        return main()
    except KeyboardInterrupt:
        restore()
        sys.exit(128 + signal.SIGINT)
    except Exception as error:
        sys.exit(explain(error))


def explain(error: BaseException, aloud: bool | None = None) -> int:
    """Prints what went wrong, unless another process does, and returns the exit code."""
    if aloud is None:
        aloud = is_first()
        if not aloud:  # whoever ends first ends all by torchrun, so the one that speaks must
            time.sleep(SPEAKING_SECONDS)
    if aloud:
        _speak(error)
    return INTERRUPTED if type(error).__name__ == "Interrupted" else 1


def _speak(error: BaseException) -> None:
    restore()
    if isinstance(error, BrokenPipeError):  # whoever read our output has left: `... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes at the end
    elif type(error).__name__ == "Interrupted":
        print(f"{error}; the same command goes on", file=sys.stderr)
    elif (reason := _reason(error)) is not None:
        print(f"error: {reason}", file=sys.stderr)
    else:
        traceback.print_exception(error)


def _reason(error: BaseException) -> str | None:
    """What the user did wrong, in one line; None where the mistake is ours."""
    if type(error).__module__.startswith(("hydra.", "omegaconf.")):
        refused = isinstance(error.__cause__, EXPECTED)  # by a constructor that Hydra called
        return str(error.__cause__) if refused else composition(error, sys.argv[1:])
    if isinstance(error, YAMLError):  # of a file in configs, which it names
        return _one_line(error)
    if isinstance(error, OSError) and error.errno in FULL:
        return (
            f"{error.filename or 'a file'}: {error.strerror}; free some space and run the same "
            "command again, which goes on from the last checkpoint"
        )
    if isinstance(error, WRONG_PLACE) and error.filename is not None:
        return (
            f"{error.filename}: {error.strerror}; give a place that you may read and write to. "
            "Where run folders go is for system.runs or system.run_dir to say, in scripts --runs"
        )
    if isinstance(error, EXPECTED) or type(error).__name__ in EXPECTED_NAMES:
        return str(error)
    return None


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def is_first() -> bool:
    """Of processes that cannot even begin: they share a command, and what is wrong with it."""
    return os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"


def composition(error: BaseException, overrides: Sequence[str]) -> str:
    """Why these overrides make no config, with the nearest valid names."""
    from hydra import errors as hydra
    from omegaconf.errors import InterpolationKeyError, MissingMandatoryValue

    from ed.engine.overrides import Overrides

    if isinstance(error, hydra.OverrideParseException):
        return (
            f"{error.override} cannot be read: write key=value, brackets and quotes in pairs, "
            "spaces in quotes; see https://hydra.cc/docs/advanced/override_grammar/basic"
        )
    if isinstance(error, hydra.MissingConfigException) and error.missing_cfg_file:
        group, _, choice = error.missing_cfg_file.rpartition("/")
        if choice == "submitit_slurm":
            return "hydra/launcher=slurm needs hydra-submitit-launcher: pip install '.[slurm]'"
        return Overrides(overrides).wrong_choice(group, choice)
    if isinstance(error, MissingMandatoryValue):
        key = error.full_key
        return f"{key} has no default: set {key}=VALUE; see configs/{key.split('.')[0]}"
    if isinstance(error, InterpolationKeyError):
        return (
            f"{error.full_key}: {str(error).splitlines()[0]}; start from an experiment, e.g. "
            "experiment=procgen"
        )
    if isinstance(error, hydra.ConfigCompositionException):
        try:
            return Overrides(overrides).wrong_key() or _one_line(error)
        except hydra.MissingConfigException as other:  # a choice of a sweep, which Hydra reads last
            return composition(other, overrides)
        except hydra.ConfigCompositionException:  # from a file of the user's, which `error` names
            pass
    return _one_line(error)
