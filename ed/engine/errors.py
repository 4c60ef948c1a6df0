"""Prints errors on one line, with the key, the value and the remedy.

User errors print one line and exit with code 1. Interrupted runs exit with code 75. Any other error
is a bug in ed and prints a traceback.
"""

import errno
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence

from yaml import YAMLError

from ed.runtime.console import is_first, replace_unencodable, restore
from ed.runtime.extras import install, missing_package
from ed.runtime.signals import print_stacks_on_request

INTERRUPTED = 75  # EX_TEMPFAIL: the same command resumes the run
SPEAKING_SECONDS = 10  # time for rank 0 to find the nearest valid key and print
EXPECTED = (ValueError, FileNotFoundError, FloatingPointError)
WRONG_PLACE = (PermissionError, FileExistsError, NotADirectoryError, IsADirectoryError)
BAD_PLACE = (errno.EROFS, errno.ENAMETOOLONG)  # Python has no exception types for these
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NO_CHOICE = r"null|true|false|\d+|\[(.*,)?null(,.*)?\]"  # values that no choice has
# as names, because their modules import torch, which is slow
EXPECTED_NAMES = ("RunError", "SaveError", "EngineError", "LostProcess")


def or_explain(main: Callable[[], int | None]) -> int | None:
    """Runs a script's `main` and returns its result; explains errors and exits."""
    replace_unencodable()
    print_stacks_on_request()
    try:
        return main()
    except KeyboardInterrupt:
        restore()
        sys.exit(128 + signal.SIGINT)
    except Exception as error:
        sys.exit(explain(error))


def explain(error: BaseException, show: bool | None = None) -> int:
    """Prints an error and returns the exit code.

    Args:
        show: whether this process prints the error; None: only if it is rank 0.
    """
    if show is None:
        show = is_first()
        if not show:  # torchrun stops all processes when one exits, so wait for rank 0 to print
            time.sleep(SPEAKING_SECONDS)
    if show:
        _show(error)
    return INTERRUPTED if type(error).__name__ == "Interrupted" else 1


def _show(error: BaseException) -> None:
    restore()
    if isinstance(error, BrokenPipeError):  # the reader has closed the pipe, e.g. `... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it at exit
    elif type(error).__name__ == "Interrupted":
        print(f"{error}; the same command resumes it", file=sys.stderr)
    elif (reason := _reason(error)) is not None:
        print(f"error: {reason}", file=sys.stderr)
    else:
        traceback.print_exception(error)


def _reason(error: BaseException) -> str | None:
    """Describes a user error in one line; returns None for a bug in ed."""
    if (empty := _empty_choice(error, sys.argv[1:])) is not None:
        return empty
    if (missing := missing_package(error)) is not None:
        return missing
    if type(error).__module__.startswith(("hydra.", "omegaconf.")):
        if isinstance(error.__cause__, EXPECTED):  # raised by a constructor that Hydra called
            return str(error.__cause__)
        return composition(error, sys.argv[1:])
    if isinstance(error, YAMLError):  # its message includes the file name
        return _one_line(error)
    if isinstance(error, OSError) and error.errno in FULL:
        return (
            f"{error.filename or 'a file'}: {error.strerror}; free some space and run the same "
            "command again, which resumes from the last checkpoint"
        )
    wrong = isinstance(error, OSError) and error.errno in BAD_PLACE
    if (wrong or isinstance(error, WRONG_PLACE)) and error.filename is not None:
        return (
            f"{error.filename}: {error.strerror}; use a path that you can read and write. For run "
            "folders set system.runs or system.run_dir (scripts: --runs)"
        )
    if isinstance(error, RuntimeError) and str(error).startswith("DataLoader worker"):
        return (
            f"{_one_line(error)}; if memory ran out, use a smaller system.workers. The same "
            "command resumes from the last checkpoint"
        )
    if type(error).__name__ == "OutOfMemoryError":  # torch's, whose message is a paragraph
        return (
            f"{'. '.join(_one_line(error).split('. ')[:2])}; in train.py, lower task.batch_size, "
            "raise accumulate or set system.activation_checkpointing=true; in measure.py, lower "
            "--memory-gib"
        )
    if isinstance(error, EXPECTED) or type(error).__name__ in EXPECTED_NAMES:
        return str(error)
    return None


def _empty_choice(error: BaseException, overrides: Sequence[str]) -> str | None:
    """Explains GROUP=null, GROUP=[null] and GROUP=3, for which Hydra does not name the group."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if not frames or not frames[-1].f_globals.get("__name__", "").startswith("hydra."):
        return None
    from ed.engine.overrides import Overrides

    known = Overrides([])
    for word in overrides:
        group, _, choice = word.partition("=")
        if re.fullmatch(NO_CHOICE, choice) and known.choices(group):
            return known.wrong_choice(group, choice)
    return None


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def composition(error: BaseException, overrides: Sequence[str]) -> str:
    """Explains why these overrides do not compose and suggests similar valid names."""
    from hydra import errors as hydra
    from omegaconf.errors import InterpolationKeyError, MissingMandatoryValue

    from ed.engine.compose import SINGLE
    from ed.engine.overrides import Overrides

    if isinstance(error, hydra.OverrideParseException):
        return (
            f"{error.override} cannot be parsed: write key=value, close brackets and "
            "quotes, and quote spaces; see https://hydra.cc/docs/advanced/override_grammar/basic"
        )
    if isinstance(error, hydra.MissingConfigException) and error.missing_cfg_file:
        group, _, choice = error.missing_cfg_file.rpartition("/")
        if choice == "submitit_slurm":
            return f"hydra/launcher=slurm needs hydra-submitit-launcher: {install('slurm')}"
        if not group:
            return f"--config-name {choice}: no such config; use experiment=NAME to choose a recipe"
        return Overrides(overrides).wrong_choice(group, choice)
    if isinstance(error, MissingMandatoryValue):
        key = error.full_key
        return f"{key} has no default: set {key}=VALUE; see configs/{key.split('.')[0]}"
    if isinstance(error, InterpolationKeyError):
        reason = str(error).splitlines()[0]
        remedy = "use an existing key"
        if error.full_key.startswith("model."):  # models take sizes from the task
            remedy = "choose a model that fits the task, or an experiment, which sets both"
        return f"{error.full_key}: {reason}; {remedy}"
    if several := re.match("Ambiguous value for argument '(.*)'\n", str(error)):
        key, _, values = several[1].partition("=")
        more = "" if key in SINGLE else f"; use {key}=[{values}] for a list"
        return f"{several[1]}: put -m before all settings for a sweep{more}"
    if isinstance(error, hydra.ConfigCompositionException):
        try:
            return Overrides(overrides).wrong_key() or _one_line(error)
        except hydra.MissingConfigException as other:  # an invalid choice in a sweep
            return composition(other, overrides)
        except hydra.ConfigCompositionException:  # an invalid user config, which `error` names
            pass
    return _one_line(error)
