"""Polynomial networks: target maps, degree and training."""

import pytest
import torch
from hydra.utils import instantiate

import ed
from ed.core.field import Field
from ed.engine.compose import compose_config
from ed.engine.main import run
from ed.tasks.pnn import target_map, uniform_inputs

QUICK = ["task=pnn", "model=pnn", "optimizer.lr=0.01", "optimizer.weight_decay=0"]
QUICK += ["optimizer.max_grad_norm=1", "model.width=32", "system.device=cpu"]


def network(seed=0):
    torch.manual_seed(seed)
    return instantiate(compose_config([*QUICK, "model.width=16"]).model)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_maps_4_to_6_are_twice_maps_1_to_3(number):
    x = uniform_inputs(50, torch.Generator().manual_seed(0))
    assert torch.equal(target_map(number + 3, x), 2 * target_map(number, x))
    assert x.abs().max() <= 2


def test_the_maps_equal_the_maps_of_the_paper():
    x = torch.tensor([[2.0, 3.0, 5.0]])
    expected = {1: [7, 6, 3], 2: [6, 15, 10], 3: [30, 300, 105]}
    assert {number: target_map(number, x)[0].tolist() for number in expected} == expected


def test_evaluation_of_a_network_with_a_constant_error():
    task = instantiate(compose_config([*QUICK, "task.map=3", "task.examples=50"]).task)
    task.prepare(torch.device("cpu"), seed=0)
    found = task.evaluate(lambda x: target_map(3, x) + 0.5)
    assert found["eval/mse"] == pytest.approx(0.25)
    size = target_map(3, task.test).square().mean().sqrt().item()
    assert found["eval/relative_error"] == pytest.approx(0.5 / size)
    # evaluation and measures use different inputs
    assert not torch.isin(task.inputs, task.test).any()


def test_inputs_depend_only_on_the_step():
    task = instantiate(compose_config([*QUICK, "task.map=2", "task.batch_size=4"]).task)
    task.prepare(torch.device("cpu"), seed=0)
    assert (task.total_steps, task.warmup_steps, task.eval_steps) == (4000, 200, 1000)
    first, second, third = (b for b, _ in zip(task.batches(None, 0), range(3), strict=False))
    assert not torch.isin(first["x"], second["x"]).any()
    assert torch.equal(next(task.batches(None, 2))["x"], third["x"])
    assert torch.equal(third["y"], target_map(2, third["x"]))


def test_initial_weights_have_the_configured_spread():
    cfg = compose_config([*QUICK, "model.width=400", "model.gain=0.7", "model.bias=0.2"])
    torch.manual_seed(0)
    model = instantiate(cfg.model)
    for layer, inputs in zip(model.hidden, (3, 400, 400), strict=True):
        assert layer.weight.std().item() == pytest.approx(0.7 / inputs**0.5, rel=0.1)
        assert layer.bias.std().item() == pytest.approx(0.2, rel=0.15)
    assert model.output.weight.std().item() == pytest.approx(1 / 20, rel=0.1)


def test_the_network_is_a_polynomial_of_degree_eight():
    nodes = ed.ChebyshevNodes()(torch.zeros(40, dtype=torch.float64))
    ends = uniform_inputs(2, torch.Generator().manual_seed(1))
    along = Field.of(network(), ends).between(torch.tensor([0]), torch.tensor([1]), nodes)
    coefficients = ed.fit(along().unflatten(0, (1, 40)), nodes, 12, damping=0.0).abs()[0]
    assert coefficients[:, 9:].max() < 1e-12 * coefficients.max()
    assert coefficients[:, 8].min() > 1e-11 * coefficients.max()


def test_the_network_equals_its_formula_in_float64():
    model, x = network(), torch.randn(5, 3)
    expected = x.double()
    for layer in model.hidden:
        z = expected @ layer.weight.T + layer.bias
        expected = (z**2 - 1) / 2**0.5  # second Hermite polynomial with unit variance
    expected = expected @ model.output.weight.T + model.output.bias
    torch.testing.assert_close(model(x), expected, rtol=1e-12, atol=1e-12)


def test_unknown_maps_and_sizes_are_rejected():
    for override, message in (
        ("task.map=7", "task.map=7"),
        ("task.batch_size=0", "task.batch_size=0"),
        ("task.warmup_steps=5000", "task.warmup_steps=5000"),
        ("task.examples=1", "task.examples=1"),
        ("model.width=0", "model.width=0"),
        ("model.gain=-1", "model.gain=-1"),
    ):
        with pytest.raises(Exception, match=message):
            instantiate(compose_config([*QUICK, override])[override.split(".")[0]])
    # warmup may take all steps
    instantiate(compose_config([*QUICK, "task.warmup_steps=4000"]).task)


def test_a_short_run_learns_map_two(tmp_path):
    """A shorter version of the run in the table."""
    settings = [*QUICK, "task.map=2", "task.steps=400", "task.warmup_steps=50", "measures=pnn"]
    settings += [f"measures.{name}.pairs=1000" for name in ("ed", "ed_norm", "ed_pca1", "ed_pca2")]
    settings += ["measures.ed_legendre.pairs=1000", f"system.run_dir={tmp_path / 'run'}"]
    last = run(compose_config(settings), ["pnn"])["last"]
    assert last["eval/relative_error"] < 0.03
    exact = {
        "ed": 1.187,
        "ed_norm": 0.796,
        "ed_legendre": 1.335,
        "ed_pca1": 2.041,
        "ed_pca2": 1.325,
    }
    for name, value in exact.items():
        assert last[f"measure/{name}"] == pytest.approx(value, rel=0.08), name
