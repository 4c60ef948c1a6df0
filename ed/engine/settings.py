"""Checks the names and types of all settings before anything is built."""

import contextlib
import math
import sys
from inspect import signature
from types import FunctionType, NoneType, UnionType
from typing import get_args, get_type_hints

from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf

from ed.engine.compose import GROUPS, PARTS

KEYS = (*GROUPS, "seed", "precision", "accumulate", "system")
SYSTEM = {"device": str, "runs": str, "run_dir": str | None, "log_every": int, "trust": bool}
SYSTEM |= {"measure_every": int | None, "workers": int | None, "threads": int | None}
SYSTEM |= {"save_seconds": float, "max_minutes": float | None, "keep_checkpoint": bool}
SYSTEM |= {"activation_checkpointing": bool, "deterministic": bool}
KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
# larger values would never finish or not fit in memory
MOST = {"epochs": 10**6, "warmup_epochs": 10**6, "steps": 10**10, "frames": 10**12}
MOST |= {"degree": 1000, "resolution": 10**5, "pairs": 10**8, "projections": 10**6}
MOST |= {"batch_size": 10**8, "width": 10**6, "depth": 10**4, "heads": 10**4, "classes": 10**7}
MOST |= {"examples": 10**8, "modulus": 10**4, "eval_per_decade": 10**4, "repeat": 10**4}
MOST |= {"length": 10**4, "max_length": 10**5, "threads": 1024, "workers": 1024}
SIZES = ("hidden", "inputs", "outputs", "actions", "numbers", "channels", "embed_dim", "patch")
SIZES += ("num_envs", "num_test_envs", "num_steps", "num_test_steps", "update_epochs")
MOST |= dict.fromkeys(SIZES, 10**6)
MOST_WHOLE = 2**62  # the limit for all other integers
MOST_FLOAT = 3e38  # about the largest float32


def check_settings(cfg: DictConfig) -> None:
    """Checks settings against the type annotations of the constructors that receive them.

    The constructors check the ranges of values.
    """
    for key, value in OmegaConf.to_container(cfg, resolve=True).items():
        if key not in KEYS:  # added with + on the command line
            raise ValueError(f"+{key}: no such key; remove it, or see python train.py --help")
        check_numbers(key, value)
    if type(cfg.seed) is not int:
        raise ValueError(f"seed={cfg.seed}: must be a whole number")
    _check_values("system", cfg.system, SYSTEM)
    for name in PARTS:
        check_leaf(name, cfg[name])
    for name, leaf in cfg.measures.items():
        check_leaf(f"measures.{name}", leaf)


def check_numbers(key: str, value, name: str | None = None) -> None:
    """Raises ValueError if any number in `value` is NaN, infinite or outside its limits.

    Args:
        name: the key of the limit in MOST; None: the last part of `key`.
    """
    if isinstance(value, dict):
        for name, item in value.items():
            check_numbers(f"{key}.{name}", item)
    elif isinstance(value, list):
        for item in value:
            check_numbers(key, item)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{key}={value}: must be a finite number")
    elif isinstance(value, (int, float)):
        other = MOST_WHOLE if isinstance(value, int) else MOST_FLOAT
        most = MOST.get(name or key.split(".")[-1], other)
        if value > most:
            raise ValueError(f"{key}={value:,}: must be at most {most:,}")
        if value < -other:
            raise ValueError(f"{key}={value:,}: must be at least {-other:,}")


def check_leaf(name: str, leaf: DictConfig) -> None:
    """Raises ValueError if the constructor `_target_` does not accept these settings."""
    if not isinstance(leaf, DictConfig):
        raise ValueError(f"{name}={leaf}: must be settings with a _target_, indented under a name")
    if not isinstance(leaf.get("_target_"), str):
        raise ValueError(
            f"{name}._target_ is missing: set it to the class to build, e.g. _target_: module.Class"
        )
    try:
        functions = _constructors(get_object(leaf._target_))
    except ImportError as error:
        if not isinstance(error.__cause__, (ModuleNotFoundError, AttributeError)):
            raise  # the module exists, but importing it fails
        raise ValueError(
            f"{name}._target_={leaf._target_}: not found ({error.__cause__}); fix the name, or "
            "add the module's folder to PYTHONPATH"
        ) from error
    _check_names(name, leaf, functions)
    hints = {}
    for function in reversed(functions):  # subclasses override their bases
        with contextlib.suppress(NameError):  # a type imported only for type checking
            hints |= get_type_hints(function)
    _check_values(name, leaf, hints)


def _check_names(name: str, leaf: DictConfig, functions: list) -> None:
    if not functions or _hands_on(functions[-1]):
        return
    known = {key for function in functions for key in signature(function).parameters}
    for key in leaf:
        if key not in known and not key.startswith("_"):
            tiny = "; debug=tiny is for image tasks" if "debug=tiny" in sys.argv else ""
            raise ValueError(f"{name}.{key}: {leaf._target_} has no such setting{tiny}")


def _check_values(name: str, values: DictConfig, hints: dict) -> None:
    for key, value in OmegaConf.to_container(values, resolve=True).items():
        hint = hints.get(key)
        kinds = get_args(hint) if isinstance(hint, UnionType) else (hint,)
        if value == "???" or not set(kinds) <= {*KINDS, NoneType}:
            continue  # Hydra checks missing values; constructors check lists and objects
        if not any(_fits(value, kind) for kind in kinds):
            wanted = " or ".join("null" if k is NoneType else KINDS[k] for k in kinds)
            raise ValueError(f"{name}.{key}={'null' if value is None else value}: must be {wanted}")


def _constructors(target) -> list:
    """Returns the constructors that receive the settings, subclasses first."""
    if not isinstance(target, type):
        return [target] if isinstance(target, FunctionType) else []
    functions = []
    for base in target.__mro__:
        if isinstance(function := vars(base).get("__init__"), FunctionType):
            functions.append(function)
            if not _hands_on(function):
                break
    return functions


def _hands_on(function) -> bool:
    """Returns whether a constructor passes **kwargs to its base class."""
    return any(p.kind is p.VAR_KEYWORD for p in signature(function).parameters.values())


def _fits(value, kind: type) -> bool:
    if isinstance(value, bool):  # bool is a subclass of int
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)
