"""Splits of data sets: their names, and held-out examples."""

import pytest

from ed.datasets.splits import evaluation_split, held_out


def test_splits_are_found_by_their_common_names():
    assert evaluation_split(["train", "test", "validation"], None, "d") == "validation"
    assert evaluation_split(["train", "test"], None, "d") == "test"
    assert evaluation_split(["train"], None, "d") is None
    with pytest.raises(ValueError, match=r"^task\.split=dev: "):
        evaluation_split(["train", "test"], "dev", "d")


def test_training_and_held_out_sets_are_a_partition():
    train, evaluated = held_out(50, 0.2, seed=3)
    assert sorted([*train.tolist(), *evaluated.tolist()]) == list(range(50))
    assert len(evaluated) == 10
    with pytest.raises(ValueError, match=r"^task\.holdout=0\.1: "):
        held_out(3, 0.1, seed=0)
