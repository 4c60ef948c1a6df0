"""Weight ensembling: interpolation between two networks and its evaluation."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ed.engine.loop import _Session
from ed.measures.ensembling import Ensembling, interpolate
from ed.runtime.streams import generator

ALPHAS = [f"{alpha / 10:g}" for alpha in range(11)]  # the paper's grid


class LinearTask:
    """Reports one output of a linear model, which is linear in the weights."""

    def __init__(self, zero_shot):
        self.zero_shot = zero_shot

    def evaluate(self, model):
        return {"eval/acc": model(torch.ones(1, 3)).item(), "eval/loss": 0.0}


def test_ensembling_of_a_linear_model_is_linear():
    torch.manual_seed(0)
    first, second = (nn.Linear(3, 1) for _ in range(2))
    before = {name: value.clone() for name, value in second.state_dict().items()}
    values = Ensembling()(second, LinearTask(first.state_dict()))
    low, high = first(torch.ones(1, 3)).item(), second(torch.ones(1, 3)).item()
    assert list(values) == [f"/alpha{alpha}/acc" for alpha in ALPHAS]
    for alpha in ALPHAS:
        expected = (1 - float(alpha)) * low + float(alpha) * high
        assert values[f"/alpha{alpha}/acc"] == pytest.approx(expected, abs=1e-6)
    assert all(torch.equal(value, before[name]) for name, value in second.state_dict().items())


def test_interpolation_is_exact_at_both_ends():
    first = {"w": torch.randn(1000, generator=generator(0, "a")) * 1e3}
    second = {"w": torch.randn(1000, generator=generator(0, "b")) * 1e-3}
    assert torch.equal(interpolate(first, second, 0.0)["w"], first["w"])
    assert torch.equal(interpolate(first, second, 1.0)["w"], second["w"])
    counts = ({"batches": torch.tensor(number)} for number in (3, 5))
    # integers are not interpolated
    assert interpolate(*counts, 0.5) == {"batches": torch.tensor(5)}


@pytest.mark.parametrize("bf16", [False, True])
def test_ensembling_evaluates_in_the_precision_of_the_run(bf16):
    """Both ends of the ensemble must match the run's own evaluations."""
    models = [nn.Linear(3, 1, bias=False) for _ in range(2)]
    for model, weight in zip(models, (1.001, 2.002), strict=True):  # bf16 rounds these to 1 and 2
        nn.init.constant_(model.weight, weight)
    task = LinearTask(models[0].state_dict())
    precision = torch.autocast("cpu", torch.bfloat16, enabled=bf16)
    step = SimpleNamespace(autocast=precision)
    sessions = [_Session(task, model, step, None, {"e": Ensembling()}) for model in models]
    found = sessions[1].measure()
    for alpha, session in zip(("0", "1"), sessions, strict=True):
        assert found[f"measure/e/alpha{alpha}/acc"] == session.evaluate()["eval/acc"]
    assert (found["measure/e/alpha1/acc"] == 6.0) == bf16


@pytest.mark.parametrize("alphas", [0.5, [], [0, 2]])
def test_invalid_alphas_are_rejected(alphas):
    with pytest.raises(ValueError, match=r"measures.ensembling.alphas"):
        Ensembling(alphas)
