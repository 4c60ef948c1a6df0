"""Tests that measures are rejected before training if they are meaningless for the task."""

import pytest
import torch
from hydra.utils import instantiate

from ed.engine.check import check
from ed.engine.compose import compose_config
from ed.engine.main import check_examples
from ed.measures.base import Measure
from ed.measures.degree import EffectiveDegree
from ed.measures.gap import GeneralizationGap
from ed.measures.norm import ParameterNorm
from ed.measures.sharpness import Sharpness
from ed.regularizers.base import Regularizer
from ed.tasks.base import Task
from scripts import evaluate
from tests.helpers.measuring import Toy, network
from tests.helpers.small import SMALL, SMALL_GROKKING, small_run


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
def test_sharpness_of_a_loss_over_whole_batches_needs_groups_that_fit_a_batch(task, name):
    """With larger groups, `batch_size`, which should only limit memory, would change the result."""
    coupled, free = task_of(*task), task_of()
    for settings in ({}, {"group": 501}, {"examples": 501}, {"examples": 600, "group": 550}):
        with pytest.raises(ValueError, match=rf"batch_size=500: {name}.*group=500"):
            Sharpness(radii=(0.1,), **settings).check(coupled)
        Sharpness(radii=(0.1,), **settings).check(free)
    for settings in ({"group": 500}, {"examples": 500}, {"examples": 600, "group": 20}):
        Sharpness(radii=(0.1,), **settings).check(coupled)


@pytest.mark.parametrize("task", ["pnn", "clip_standin_pretrain"])
def test_the_gap_needs_a_classification_accuracy(task):
    """Training and test accuracy must come from the same classifier."""
    with pytest.raises(ValueError, match=r"^measures: gap"):
        GeneralizationGap().check(task_of(f"task={task}"))
    GeneralizationGap().check(task_of())


def test_the_gap_needs_the_accuracy_of_each_batch(monkeypatch):
    """Otherwise, the measure would fail only after training."""

    class Own(Toy):
        def probe(self):
            return self.examples(torch.arange(2))

    GeneralizationGap().check_model(network(), Own())
    monkeypatch.setattr(Own, "loss", lambda *_: (torch.zeros(()), {"loss": torch.zeros(())}))
    with pytest.raises(ValueError, match=r"^measures: gap .*Own\.loss"):
        GeneralizationGap().check_model(network(), Own())


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: EffectiveDegree(outputs="tanh"), "outputs=tanh"),
        (lambda: EffectiveDegree(endpoints="dust"), "endpoints=dust"),
        (lambda: EffectiveDegree(pairs=0), "pairs=0"),
        (lambda: EffectiveDegree(memory_gib=0), "memory_gib=0"),
        (lambda: EffectiveDegree(basis="fourier"), "basis=fourier"),
        (lambda: Sharpness(radii=()), "radii="),
        (lambda: Sharpness(radii=(0.1, -1)), r"radii\[1\]=-1"),
        (lambda: Sharpness(radii=0.1), r"radii=0.1"),
        (lambda: Sharpness(radii=("a",)), r"radii\[0\]=a"),
        (lambda: Sharpness(radii=(0.1,), method="luck"), "method=luck"),
        (lambda: Sharpness(radii=(0.1,), steps=0), "steps=0"),
        (lambda: Sharpness(radii=(0.1,), batch_size=0), "batch_size=0"),
        (lambda: Sharpness(radii=(0.1,), group=0), "group=0"),
        (lambda: Sharpness(radii=(0.1,), examples=0), "examples=0"),
        (lambda: GeneralizationGap(batch_size=0), "batch_size=0"),
    ],
)
def test_impossible_measures_are_rejected(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_tasks_without_examples_are_rejected_before_training():
    cfg = compose_config([])
    task = Task()
    task.batch_size, task.metric = 10, "eval/acc"
    check(cfg, task, Regularizer(), [ParameterNorm()])
    with pytest.raises(ValueError, match=r"EffectiveDegree .*Task"):
        check(cfg, task, Regularizer(), [EffectiveDegree()])
    with pytest.raises(ValueError, match=r"system.measure_every=0"):
        check(compose_config(["system.measure_every=0"]), task, Regularizer())


def test_tasks_that_do_not_count_their_examples_are_rejected_before_training():
    task = Toy()
    check_examples(task, {"own": Measure()})
    task.num_examples = 0
    check_examples(task, {"norm": ParameterNorm()})
    with pytest.raises(ValueError, match=r"^measures: own .*Toy\.num_examples"):
        check_examples(task, {"own": Measure()})


def test_more_paths_than_pairs_are_rejected_before_training():
    task = task_of("task=grokking", "task.modulus=7")
    assert task.num_examples == 13
    EffectiveDegree(pairs=13 * 12 // 2).check(task)
    with pytest.raises(ValueError, match=r"pairs=79: .*78"):
        EffectiveDegree(pairs=79).check(task)


NORMALISED = ["measures=[ed]", "measures.ed.pairs=5", "measures.ed.weighting=normalised"]
PENALTY = ["regularizer=ed", "regularizer.resolution=12", "regularizer.weighting=normalised"]


@pytest.mark.parametrize(
    ("base", "overrides", "message"),
    [
        (SMALL_GROKKING, [*NORMALISED, "measures.ed.components=9"], "measures: components=9"),
        (SMALL_GROKKING, [*NORMALISED, "measures.ed.memory_gib=1e-9"], "measures: memory_gib="),
        (SMALL_GROKKING, [*PENALTY, "regularizer.components=9"], r"regularizer\.components=9"),
        (
            ["task=pnn", "model=pnn", "task.examples=20", "system.device=cpu"],
            [*NORMALISED, "measures.ed.outputs=raw", "measures.ed.components=4"],
            "measures: components=4",
        ),
    ],
    ids=["components", "memory", "penalty", "raw"],
)
def test_settings_that_do_not_fit_the_outputs_are_rejected_before_training(
    base, overrides, message, tmp_path
):
    with pytest.raises(ValueError, match=f"^{message}"):
        small_run(tmp_path / "run", *overrides, base=base)
    assert not (tmp_path / "run").exists()


def test_games_are_not_played_to_check_the_outputs():
    """Before the first rollout there are no frames; the value output is not penalised."""
    cfg = compose_config(["task=procgen", "model=impala", "model.channels=[2]"])
    task, model = instantiate(cfg.task), instantiate(cfg.model)
    task.prepare(torch.device("cpu"), 0)
    EffectiveDegree(components=14, weighting="normalised").check_model(model, task)
    with pytest.raises(ValueError, match="components=15"):
        EffectiveDegree(components=15, weighting="normalised").check_model(model, task)


def test_regression_rejects_softmax():
    """Both the measure and the penalty reject softmax outputs."""
    cfg = compose_config(["task=pnn", "regularizer=ed", "regularizer.anchored=false"])
    task = instantiate(cfg.task)
    EffectiveDegree(outputs="raw").check(task)
    with pytest.raises(ValueError, match=r"outputs=softmax: .*outputs=raw"):
        EffectiveDegree().check(task)
    with pytest.raises(ValueError, match="regularizer=ed: "):
        instantiate(cfg.regularizer).check(task)


def test_noise_endpoints_need_images():
    task = task_of("task.space=embedding", "model.patch=8")
    with pytest.raises(ValueError, match="endpoints=noise"):
        EffectiveDegree(endpoints="noise").check(task)


def test_evaluation_only_tasks_reject_measures(capsys):
    assert evaluate.main([*SMALL, "measures=[gap,norm]"]) == 1
    assert "measures=[gap,norm]" in capsys.readouterr().err
