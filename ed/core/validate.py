"""Checks for settings. Each returns the value, or raises a ValueError that names the key."""

import math
from collections.abc import Callable, Iterable, Sequence
from numbers import Integral, Real


def choice(key: str, value, choices: Iterable):
    known = list(choices)
    if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in known):
        names = [*map(str, known)]
        listed = f"{', '.join(names[:-1])} or {names[-1]}" if len(names) > 1 else names[0]
        raise ValueError(f"{key}={value}: use {listed}")
    return value


def count(key: str, value, *, least: int = 1):
    """Checks that the value is a whole number of at least `least`."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        raise ValueError(f"{key}={value}: must be a whole number, at least {least}")
    return value


def counts(group: str, *, least: int = 1, **values) -> None:
    """Checks several whole numbers: counts("task", epochs=3) checks task.epochs."""
    for name, value in values.items():
        count(f"{group}.{name}", value, least=least)


def positive(key: str, value):
    if not (_is_number(value) and value > 0):
        raise ValueError(f"{key}={value}: must be a positive number")
    return value


def not_negative(key: str, value):
    if not (_is_number(value) and value >= 0):
        raise ValueError(f"{key}={value}: must be a number, at least 0")
    return value


def fraction(key: str, value, *, zero: bool = True, one: bool = True):
    """Checks for a number in [0, 1]; `zero` and `one` set whether the ends are allowed."""
    inside = _is_number(value) and 0 <= value <= 1
    if not inside or (value == 0 and not zero) or (value == 1 and not one):
        low, high = "at least" if zero else "above", "at most" if one else "below"
        raise ValueError(f"{key}={value}: must be a number {low} 0 and {high} 1")
    return value


def optional(check: Callable, key: str, value, **limits):
    """Accepts None and all values that `check` accepts."""
    if value is None:
        return None
    try:
        return check(key, value, **limits)
    except ValueError as error:
        raise ValueError(f"{error}; or null") from None


def each(check: Callable, key: str, values, *, empty: bool = False, length: int = 0, **limits):
    """Checks each item of a list; `empty` allows an empty list, and `length` fixes its length."""
    listed = isinstance(values, Sequence) and not isinstance(values, str)
    if not listed or not (values or empty):
        raise ValueError(f"{key}={values}: must be a list in brackets, with at least one item")
    if length and len(values) != length:
        raise ValueError(f"{key}={values}: must have {length} items")
    for index, value in enumerate(values):
        check(f"{key}[{index}]", value, **limits)
    return values


def brief(error: BaseException) -> str:
    """Returns the error's type and any message on one line, for use in another message."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:200].removesuffix(":")


def _is_number(value) -> bool:
    """Whether the value is a finite number and not a bool."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    return bool(-math.inf < value < math.inf)  # type: ignore[operator]
