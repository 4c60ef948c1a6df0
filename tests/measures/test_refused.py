"""Measures that would be meaningless on a task are rejected before training."""

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
    ("task", "name"),
    [
        (["task=procgen", "model=impala"], "ProcgenPPO"),
        (["task=clip_standin_pretrain"], "StandInPretraining"),
    ],
    ids=["procgen", "clip"],
)
def test_sharpness_of_a_loss_that_couples_a_batch_needs_a_search_in_one_pass(task, name):
    """Otherwise `batch_size`, a memory setting, would change the result."""
    coupled, free = task_of(*task), task_of()
    for settings in ({}, {"group": 501}, {"examples": 501}, {"examples": 600, "group": 550}):
        with pytest.raises(ValueError, match=rf"batch_size=500: {name}.*group=500"):
            Sharpness(radii=(0.1,), **settings).check(coupled)
        Sharpness(radii=(0.1,), **settings).check(free)
    for settings in ({"group": 500}, {"examples": 500}, {"examples": 600, "group": 20}):
        Sharpness(radii=(0.1,), **settings).check(coupled)


def test_the_gap_needs_one_classifier_for_both_accuracies():
    with pytest.raises(ValueError, match=r"measures: .*StandInPretraining"):
        GeneralizationGap().check(task_of("task=clip_standin_pretrain"))
    GeneralizationGap().check(task_of())


def test_evaluation_only_tasks_reject_measures(capsys):
    assert evaluate.main([*SMALL, "measures=[gap,norm]"]) == 1
    assert "measures=[gap,norm]" in capsys.readouterr().err
