"""Tests of measures: closed forms, invariances, unchanged models."""

import inspect
import math
from dataclasses import fields, replace

import pytest
import torch
from hydra.utils import get_class, instantiate
from torch import nn

from ed.core.estimator import PROTOCOL, estimate, estimate_each
from ed.core.field import Field
from ed.core.nodes import ChebyshevNodes
from ed.core.representation import Representation
from ed.engine.compose import CONFIGS, compose_config
from ed.measures.base import Measure, fixed_subset, in_groups, untouched
from ed.measures.degree import EffectiveDegree
from ed.measures.gap import GeneralizationGap
from ed.measures.norm import ParameterNorm
from ed.measures.sharpness import Sharpness
from tests.helpers.measuring import Toy, network


class Careless(Measure):
    """A custom measure that changes everything that `untouched` restores."""

    def __call__(self, model, task):
        with untouched(model), torch.no_grad():
            model.train()
            for tensor in model.state_dict().values():
                tensor.add_(1)
            torch.rand(1)
        return {"": 1.0}


ED = EffectiveDegree(pairs=20, resolution=16, degree=6)
ALL = {
    "ed": ED,
    "ed_norm": EffectiveDegree(
        pairs=20, resolution=16, degree=6, weighting="normalised", outputs="raw"
    ),
    "ed_pca": EffectiveDegree(pairs=20, resolution=16, degree=6, components=2),
    "ed_noise": EffectiveDegree(pairs=20, resolution=16, degree=6, endpoints="noise"),
    "sharpness": Sharpness(radii=(0.01, 0.1)),
    "adaptive": Sharpness(radii=(0.5,), adaptive=True, examples=30, batch_size=7),
    "worst": Sharpness(radii=(0.05,), method="worst", steps=5),
    "groups": Sharpness(radii=(0.05, 0.1), examples=30, group=12),
    "norm": ParameterNorm(),
    "gap": GeneralizationGap(batch_size=17),
    "careless": Careless(),
}


def test_rescaling_two_linear_layers_changes_only_plain_sharpness_and_norm():
    """Layers (s W1, s b1) and (W2 / s, b2) compute the same function for any s > 0."""
    scaled, original = network(), network()
    with torch.no_grad():
        for tensor in (scaled[0].weight, scaled[0].bias):
            tensor.mul_(8)
        scaled[1].weight.div_(8)
    for name in ("ed", "ed_norm", "ed_pca", "ed_noise", "adaptive"):
        before, after = (ALL[name](model, Toy()) for model in (original, scaled))
        assert after == pytest.approx(before, rel=1e-9), name
    for name in ("sharpness", "norm"):
        before, after = (ALL[name](model, Toy()) for model in (original, scaled))
        assert all(abs(after[key] / before[key] - 1) > 0.1 for key in before), name


def test_the_gap_is_train_minus_test_accuracy_of_all_examples_in_eval_mode():
    model, task = network(norm=True).eval(), Toy()
    task.label = model(task.x).argmax(-1)
    task.label[-1] = (task.label[-1] + 1) % 3  # only the last label is wrong
    found = GeneralizationGap(batch_size=7)(model.train(), task)
    model.eval()
    right = sum(int(model(task.x[i : i + 1]).argmax() == task.label[i]) for i in range(60))
    test = task.evaluate(model)["eval/acc"]
    assert found == {"": 100 * right / 60 - test, "_train": 100 * right / 60, "_test": test}


def test_norm_includes_every_parameter():
    model = network(norm=True).float()
    flat = nn.utils.parameters_to_vector(model.parameters()).double()
    assert ParameterNorm()(model, Toy())[""] == pytest.approx(flat.norm().item(), rel=1e-12)


def test_variants_share_their_forward_passes():
    """Measures on the same paths share passes and return the same values as when run separately."""

    class Counting(Toy):
        def field(self, model, batch):
            self.passes = []

            def forward(x, context):
                self.passes.append(len(x))
                return model(x)

            return Field(forward, batch["x"])

    legendre = replace(ED, basis="legendre", degree=4)
    variants = {name: ALL[name] for name in ("ed", "ed_norm", "ed_pca")} | {"legendre": legendre}
    others = {name: ALL[name] for name in ("ed_noise", "norm", "sharpness", "adaptive", "worst")}
    others |= {"seed": replace(ED, seed=1), "nodes": replace(ED, resolution=20)}
    groups = in_groups(variants | others)
    assert [list(group) for group in groups] == [list(variants), *([name] for name in others)]
    task, model = Counting(), network()
    found = EffectiveDegree.together(list(variants.values()), model, task)
    assert task.passes == [2, 20 * 16]  # the pass of two points measures memory
    assert found == [measure(model, Toy()) for measure in variants.values()]
    assert replace(ED, memory_gib=1e-6)(model, task) == pytest.approx(found[0], rel=1e-9)
    assert max(task.passes) < 20


@pytest.mark.parametrize("name", ["ed", "ed_norm", "ed_pca", "ed_noise"])
def test_effective_degree_uses_the_penalised_outputs(name):
    """Each path joins two examples or noise inputs of its own, chosen by the seed."""

    class Named(Toy):
        penalised = slice(0, 2)

        def field(self, model, batch):
            return Field.of(lambda x: {"all": model(x)}, batch["x"], output="all")

    measure, model, task = replace(ALL[name], pairs=15, seed=3), network().eval(), Named()
    ends = task.x[fixed_subset(60, 30, seed=3)]
    if name == "ed_noise":
        ends = task.noise_like(ends, torch.Generator().manual_seed(3))
    settings = {"softmax": name != "ed_norm", "components": 2 if name == "ed_pca" else None}
    settings["weighting"] = "normalised" if name == "ed_norm" else "raw"
    settings |= {"resolution": 16, "degree": 6, "pairs": 15, "seed": 3}
    expected = estimate(lambda x: model(x)[:, :2], ends, **settings)
    assert measure(model, task) == {"": expected.mean, "_se": expected.standard_error}


def test_readings_must_share_their_nodes():
    readings = [(replace(ED, resolution=r).representation, True) for r in (16, 17)]
    with pytest.raises(ValueError, match="resolution and sampler"):
        estimate_each(network(), Toy().x, readings=readings, pairs=5)


@pytest.mark.parametrize("name", ALL)
def test_a_measure_does_not_change_the_model(name):
    model = network(norm=True)
    model[0].eval()  # modules may be in different modes
    nn.functional.cross_entropy(model(Toy().x), Toy().label).backward()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    gradients = [weight.grad.clone() for weight in model.parameters()]
    modes = [module.training for module in model.modules()]
    rng = torch.get_rng_state()
    first, second = ALL[name](model, Toy()), ALL[name](model, Toy())
    assert first == second
    assert all(math.isfinite(value) for value in first.values())
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    for weight, gradient in zip(model.parameters(), gradients, strict=True):
        assert torch.equal(weight.grad, gradient)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), rng)


def test_the_model_is_restored_when_a_measure_fails():
    class Failing(Toy):
        calls = 0

        def loss(self, outputs, batch):
            self.calls += 1
            if self.calls > 1:  # fails at the perturbed weights
                raise RuntimeError("no more")
            return super().loss(outputs, batch)

    model = network()
    before = nn.utils.parameters_to_vector(model.parameters()).clone()
    with pytest.raises(RuntimeError, match="no more"):
        ALL["sharpness"](model, Failing())
    assert torch.equal(nn.utils.parameters_to_vector(model.parameters()), before)


def test_defaults_match_the_papers_protocol():
    """Python and the command line default to 400 paths, r = 200 fixed nodes and K = 40."""
    paper = {"resolution": 200, "degree": 40, "sampler": ChebyshevNodes(), "damping": 1e-6}
    assert Representation(**paper, basis="chebyshev", weighting="raw") == PROTOCOL
    assert inspect.signature(estimate).parameters["pairs"].default == 400
    leaves = compose_config(["measures=paper"]).measures
    raw, normalised = (instantiate(leaves[name]) for name in ("ed", "ed_norm"))
    assert raw == EffectiveDegree()
    assert normalised == EffectiveDegree(weighting="normalised", outputs="raw")
    assert (raw.pairs, raw.outputs, raw.representation) == (400, "softmax", PROTOCOL)


@pytest.mark.parametrize("choice", sorted(path.stem for path in CONFIGS.glob("measures/*.yaml")))
def test_every_setting_of_a_measure_has_a_key(choice):
    """Hydra rejects overrides of keys that are not in the config."""
    for name, leaf in compose_config([f"measures={choice}"]).measures.items():
        settings = {field.name for field in fields(get_class(leaf._target_))}
        assert set(leaf) - {"_target_"} == settings, name
