"""Errors for people: one line that names the key, the value and the remedy.

Mistakes of the user end in one line and exit code 1; an interrupted run in exit code 75 (try
again); anything unforeseen is a defect of ours and keeps its traceback.
"""

import argparse
import difflib
import errno
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from yaml import YAMLError

INTERRUPTED = 75  # EX_TEMPFAIL: the same command goes on
SPEAKING_SECONDS = 10  # at most; to look for the nearest valid key takes a while
SYMBOLS = {"lambda": "weight", "r": "resolution", "K": "degree", "m": "components"}  # the paper's
SYMBOLS |= {"n_p": "pairs", "n_proj": "projections", "epsilon": "damping"}
RENAMED = {  # until 0.3
    "system.capture": "system.cuda_graph",
    "system.checkpointing": "system.activation_checkpointing",
    "optimizer.clip": "optimizer.max_grad_norm",
    "task.length": "task.max_length",
    "task.envs": "task.num_envs",
    "task.rollout": "task.num_steps",
    "task.minibatches": "task.num_minibatches",
    "task.levels": "task.num_levels",
    "task.test_envs": "task.num_test_envs",
    "task.test_rollout": "task.num_test_steps",
    "task.clip": "task.clip_coef",
    "task.value_weight": "task.vf_coef",
    "task.entropy_weight": "task.ent_coef",
}
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
    """Hydra's complaint about one of the overrides, with the nearest valid names."""
    message = str(error)
    if "Could not load 'hydra/launcher/submitit_slurm'" in message:
        return "hydra/launcher=slurm needs hydra-submitit-launcher: pip install '.[slurm]'"
    if type(error).__name__ == "OverrideParseException":
        return (
            f"{error.override} cannot be read: write key=value, brackets and quotes in pairs, "
            "spaces in quotes; see https://hydra.cc/docs/advanced/override_grammar/basic"
        )
    if found := re.search(r"Could not (?:find|load) '((?:hydra/)?\w+)/([^']+)'", message):
        return _unknown_choice(found[1], found[2], overrides)
    if found := re.search(r"Interpolation key '(task\.\w+)' not found\s+full_key: (\S+)", message):
        return (
            f"{found[2]} is taken from {found[1]}, which this task does not have; start from an "
            "experiment, e.g. experiment=procgen"
        )
    if found := re.search(r"Missing mandatory value: ((\w+)\.\S+)", message):
        key, group = found.groups()
        return f"{key} has no default: give {key}=VALUE; the file in configs/{group} says which"
    if found := re.search(r"(?s)Error locating target '([^']+)'.*full_key: (\S+)", message):
        root = error
        while root.__cause__ is not None:
            root = root.__cause__
        return (
            f"{found[2]}._target_={found[1]}: not found ({_one_line(root)}); put the folder of its "
            "module on PYTHONPATH"
        )
    if found := re.search(r"(?s)unexpected keyword argument '(\w+)'.*full_key: (\S+)", message):
        tiny = "; debug=tiny is for tasks on pictures" if "debug=tiny" in overrides else ""
        key = f"{found[2]}.{found[1]}"
        if key in RENAMED:
            return f"{key}: renamed to {RENAMED[key]}"
        return f"{key}: there is no such setting here, leave it out{tiny}"
    if found := re.search(r"(?s)missing \d+ required .*?'(\w+)'.*full_key: (\S+)", message):
        name, key = found.groups()
        return (
            f"{key}.{name} is needed and not among the settings: a part of your own needs a line "
            "for it in its file, a run older than it one in its config.yaml, with a value as in "
            f"configs/{key.split('.')[0]}"
        )
    if found := re.search(r"Could not override '([^']+)'", message):
        try:
            return _unknown_key(found[1], overrides)
        except Exception as other:  # about a choice: those of a sweep Hydra reads after the keys
            if str(other) != message:  # the same: a file of the user's overrides what is not there
                return composition(other, overrides)
    return _one_line(error)


def _unknown_choice(group: str, choice: str, overrides: Sequence[str]) -> str:
    choices = _choices(group, overrides)
    near = difflib.get_close_matches(choice, choices, n=2, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    return f"{group}={choice}: no such choice; {hint}There are {', '.join(choices)}"


def _unknown_key(key: str, overrides: Sequence[str]) -> str:
    group, *rest = key.split(".")
    if key in RENAMED:
        return f"{key}: renamed to {RENAMED[key]}"
    overrides = [re.sub(r"^(\w+)=choice\((.*)\)$", r"\1=\2", word) for word in overrides]
    choices = _choices(group, overrides)
    valid = _valid_keys(overrides)
    if group == "measures" and rest and rest[0] in choices and f"measures.{rest[0]}" not in valid:
        return f"{key}: {rest[0]} is not among the measures; add measures=[{rest[0]}]"
    symbol = ".".join([group, SYMBOLS[rest[0]]]) if rest and rest[0] in SYMBOLS else None
    if symbol in valid:
        return f"unknown key {key!r}; the paper's {rest[0]} is {symbol}"
    # a measure's key names its owner
    owners = [] if group == "measures" else [c for c in choices if _has(c, key, overrides)]
    swept = next((w for w in overrides if re.match(rf"{group}=[^\[]*,", w)), None)
    if owners and swept:
        return _key_of_a_sweep(key, swept, owners, overrides)
    if owners:
        return f"unknown key {key!r} here; it belongs to {group}={', '.join(owners)}"
    near = difflib.get_close_matches(key, valid, n=3, cutoff=0.5)
    leaf = difflib.get_close_matches(
        key.split(".")[-1], sorted({k.split(".")[-1] for k in valid}), n=3, cutoff=0.6
    )
    near += [k for k in valid if k.split(".")[-1] in leaf and k not in near][: 3 - len(near)]
    hint = f"did you mean {', '.join(near)}?" if near else "see python train.py --cfg job"
    return f"unknown key {key!r}; {hint}"


def _key_of_a_sweep(key: str, swept: str, owners: Sequence[str], overrides: Sequence[str]) -> str:
    """A key of some of the choices that `swept` goes over, e.g. regularizer=none,ed."""
    given = next(word for word in overrides if word.startswith(f"{key}="))
    group, choices = swept.split("=", 1)
    for choice in map(str.strip, choices.split(",")):
        if choice not in owners:
            return f"{given}: {group}={choice} has no such setting; give it a command of its own"
    # Hydra reads what is not swept before it chooses, so on top of the group's default choice
    value = given.removeprefix(f"{key}=")
    return f"{given}: in a sweep over {group} write it as one, too: '{key}=choice({value})'"


def _choices(group: str, overrides: Sequence[str]) -> list[str]:
    """Of a group: ours and the user's."""
    from ed.engine.compose import CONFIGS

    folders = [CONFIGS, *_config_dirs(overrides)]
    return sorted({path.stem for folder in folders for path in (folder / group).glob("*.yaml")})


def _has(choice: str, key: str, overrides: Sequence[str]) -> bool:
    """Whether a choice for the key's group brings the key, of its own or by inheritance."""
    group = key.split(".")[0]
    try:
        return key in _valid_keys([*overrides, f"{group}={choice}"])  # the last choice counts
    except Exception:  # a broken file, of a choice that nobody asked for
        return False


def _config_dirs(overrides: Sequence[str]) -> list[Path]:
    """Folders of the user's own configs: Hydra's --config-dir, or a table's hydra.searchpath."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config-dir", "-cd", type=Path, action="append", default=[])
    searched = [word for word in overrides if word.startswith("hydra.searchpath=")]
    found = re.findall(r"file://([^],'\"]+)", " ".join(searched))
    return [*parser.parse_known_args(sys.argv[1:])[0].config_dir, *map(Path, found)]


def _valid_keys(overrides: Sequence[str]) -> list[str]:
    """All keys of the config composed from the group choices alone; of a sweep's the first."""
    from ed.engine.compose import GROUPS, compose_config, flat_keys

    choice = re.compile(rf"(?:experiment|{'|'.join(GROUPS)})=(?:\w+|\[[\w,]+\])")
    choices = [found.group() for word in overrides if (found := choice.match(word))]
    return flat_keys(compose_config(choices, folders=_config_dirs(overrides)))
