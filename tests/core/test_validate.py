"""Tests of settings validation: valid values are returned; errors for others name the key."""

import math

import numpy as np
import pytest

from ed.core.validate import (
    brief,
    choice,
    count,
    counts,
    each,
    fraction,
    not_negative,
    optional,
    positive,
)

NOT_NUMBERS = [math.nan, math.inf, -math.inf, True, "1", None, [1]]


@pytest.mark.parametrize(
    ("check", "good", "bad"),
    [
        (count, [1, 7, np.int64(3)], [0, -1, 1.0, 2.5]),
        (positive, [1, 0.5, np.float32(0.5)], [0, -1.0]),
        (not_negative, [0, 0.0, 3], [-1e-9]),
        (fraction, [0, 0.5, 1, 1.0], [-0.1, 1.1]),
    ],
)
def test_valid_numbers_pass_and_others_raise_with_their_key(check, good, bad):
    assert [check("a.b", value) for value in good] == good
    for value in [*bad, *NOT_NUMBERS]:
        with pytest.raises(ValueError, match=r"^a\.b="):
            check("a.b", value)


def test_bounds_can_be_changed():
    assert count("a.b", 0, least=0) == 0
    for value, ends in [(0, {"zero": False}), (1, {"one": False})]:
        assert fraction("a.b", 0.5, **ends) == 0.5
        with pytest.raises(ValueError, match=r"^a\.b="):
            fraction("a.b", value, **ends)


def test_choices_distinguish_numbers_from_booleans():
    assert choice("a.b", True, ("auto", True, False)) is True
    assert choice("a.b", 1, range(1, 7)) == 1
    for value, choices in [(True, range(1, 7)), (1, ("auto", True)), ("x", ["y"]), ([1], {"y": 0})]:
        with pytest.raises(ValueError, match=r"^a\.b="):
            choice("a.b", value, choices)


def test_counts_are_checked_by_group():
    counts("task", epochs=1, batch_size=2)
    with pytest.raises(ValueError, match=r"^task\.batch_size=0"):
        counts("task", epochs=1, batch_size=0)


def test_optional_settings_may_be_none():
    assert optional(count, "a.b", None) is None
    assert optional(count, "a.b", 0, least=0) == 0
    with pytest.raises(ValueError, match=r"^a\.b=0"):
        optional(count, "a.b", 0)


def test_lists_are_checked_item_by_item():
    assert each(fraction, "a.b", [0.1, 0.2]) == [0.1, 0.2]
    assert each(fraction, "a.b", (), empty=True) == ()
    for values in [[], 0.5, "0.5", [0.1, 2], [0.1, "x"]]:
        with pytest.raises(ValueError, match=r"^a\.b(\[1\])?="):
            each(fraction, "a.b", values)


def test_brief_errors_are_one_line_without_a_colon_before_nothing():
    assert brief(ValueError("two\nlines")) == "ValueError: two lines"
    assert brief(StopIteration()) == "StopIteration"
