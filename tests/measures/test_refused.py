"""Measures that would not say what their name does on some tasks are refused before training."""

import re

import pytest
from hydra.utils import instantiate

from ed.engine.compose import compose_config
from ed.measures.gap import GeneralizationGap
from ed.measures.sharpness import Sharpness
from scripts import evaluate
from tests.helpers.small import SMALL


def task_of(*overrides: str):
    return instantiate(compose_config(list(overrides)).task)


@pytest.mark.parametrize(
    ("task", "reason"),
    [
        (["task=procgen", "model=impala"], "ProcgenPPO .* advantages are normalised"),
        (["task=clip_standin_pretrain"], "StandInPretraining .* captions choose among all"),
    ],
    ids=["procgen", "clip"],
)
def test_sharpness_of_a_loss_that_couples_a_batch_needs_a_search_in_one_pass(task, reason):
    """Else `batch_size`, which is there for the memory, would change the result."""
    coupled, free = task_of(*task), task_of()
    for settings in ({}, {"group": 501}, {"examples": 501}, {"examples": 600, "group": 550}):
        with pytest.raises(ValueError, match=f"batch_size=500: {reason}.*set group=500"):
            Sharpness(radii=(0.1,), **settings).check(coupled)
        Sharpness(radii=(0.1,), **settings).check(free)
    for settings in ({"group": 500}, {"examples": 500}, {"examples": 600, "group": 20}):
        Sharpness(radii=(0.1,), **settings).check(coupled)


def test_the_gap_needs_one_classifier_for_both_accuracies():
    with pytest.raises(ValueError, match="StandInPretraining learns no classes; leave gap out"):
        GeneralizationGap().check(task_of("task=clip_standin_pretrain"))
    GeneralizationGap().check(task_of())


def test_measures_are_not_ignored_where_a_model_is_only_evaluated(capsys):
    assert evaluate.main([*SMALL, "measures=[gap,norm]"]) == 1
    told = r"error: measures=\[gap,norm\]: nothing is measured here.*train.py takes measures"
    assert re.match(told, capsys.readouterr().err)
