"""Tests of measures: closed forms, invariances, unchanged models."""

import inspect
import json
import math
import os
import signal
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
import torch
from hydra.utils import get_class, instantiate
from omegaconf import OmegaConf
from torch import nn

from ed.core.estimator import PROTOCOL, estimate, estimate_each
from ed.core.field import Field
from ed.core.nodes import ChebyshevNodes
from ed.core.representation import Representation
from ed.engine.compose import CONFIGS, compose_config
from ed.engine.loop import Interrupted, _Session
from ed.engine.main import run
from ed.measures.base import Measure, fixed_subset, in_groups, untouched
from ed.measures.degree import EffectiveDegree
from ed.measures.gap import GeneralizationGap
from ed.measures.norm import ParameterNorm
from ed.measures.sharpness import TINY, Sharpness, _checkpoints, worst_case
from ed.runtime.runs import read_done
from tests.helpers.small import small_config, small_run, weights


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


class Toy:
    """The part of a task that measures use: 60 points in the plane, three classes."""

    num_examples, has_noise, penalised, metric = 60, True, slice(None), "eval/acc"

    def __init__(self):
        draw = torch.Generator().manual_seed(0)
        self.x = torch.randn(60, 2, generator=draw, dtype=torch.float64)
        self.label = torch.randint(3, (60,), generator=draw)

    def examples(self, index):
        return {"x": self.x[index], "label": self.label[index]}

    def field(self, model, batch):
        return Field.of(model, batch["x"])

    def loss(self, outputs, batch):
        right = (outputs.argmax(-1) == batch["label"]).float().mean()
        return nn.functional.cross_entropy(outputs, batch["label"]), {"acc": 100 * right}

    def evaluate(self, model):
        return {"eval/acc": 100 * (model(-self.x).argmax(-1) == self.label).double().mean().item()}

    def noise_like(self, x, generator):
        return torch.rand(x.shape, generator=generator, dtype=x.dtype)


class Bowl(nn.Module):
    """A model whose loss is w'Aw / 2 for any data."""

    def __init__(self, matrix):
        super().__init__()
        self.matrix = matrix
        draw = torch.Generator().manual_seed(1)
        self.w = nn.Parameter(torch.randn(len(matrix), generator=draw, dtype=torch.float64))

    def forward(self, x):
        return (self.w @ self.matrix @ self.w / 2).expand(len(x), 1)


class BowlTask(Toy):
    def loss(self, outputs, batch):
        return outputs.mean(), {}


def matrix(*eigenvalues):
    draw = torch.Generator().manual_seed(2)
    square = torch.randn(len(eigenvalues), len(eigenvalues), generator=draw, dtype=torch.float64)
    vectors = torch.linalg.qr(square).Q
    return vectors @ torch.diag(torch.tensor(eigenvalues, dtype=torch.float64)) @ vectors.T


def network(seed=0, norm=False):
    torch.manual_seed(seed)
    layers = [nn.Linear(2, 8), nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 3)]
    if norm:
        layers.insert(2, nn.BatchNorm1d(8))
    return nn.Sequential(*layers).double()


@pytest.mark.parametrize("rho", [0.01, 0.5])
def test_one_step_sharpness_of_a_quadratic(rho):
    """L(w + e) - L(w) = g'e + e'Ae / 2 with g = Aw.

    The step e is rho g / ||g||, or rho w^2 g / || |w| g || for adaptive sharpness.
    """
    model = Bowl(matrix(0.5, 2.0, 7.0))
    model.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    w, a = model.w.detach(), model.matrix
    g = a @ w
    for adaptive in (False, True):
        e = rho * w**2 * g / (w.abs() * g).norm() if adaptive else rho * g / g.norm()
        expected = (g @ e + e @ a @ e / 2).item()
        found = Sharpness(radii=(rho,), adaptive=adaptive, batch_size=7)(model, BowlTask())
        assert found[f"_{rho:g}"] == pytest.approx(expected, rel=1e-9)


def test_worst_case_sharpness_of_a_quadratic():
    """The worst e is along g if A is a multiple of I, else (m - A) e = g with ||e|| = rho."""
    rho = 0.3
    model = Bowl(2 * torch.eye(4, dtype=torch.float64))
    worst = Sharpness(radii=(rho,), method="worst", steps=20)
    expected = 2 * rho * model.w.norm().item() + rho**2
    assert worst(model, BowlTask())["_0.3"] == pytest.approx(expected, rel=1e-9)
    model = Bowl(matrix(0.1, 1.0, 20.0))
    w, a = model.w.detach(), model.matrix
    low, high = 20.0 + 1e-9, 1e6
    for _ in range(200):  # bisects for the multiplier m at which e has length rho
        middle = (low + high) / 2
        e = torch.linalg.solve(middle * torch.eye(3, dtype=torch.float64) - a, a @ w)
        low, high = (middle, high) if e.norm() > rho else (low, middle)
    expected = (w @ a @ e + e @ a @ e / 2).item()
    assert worst(model, BowlTask())["_0.3"] == pytest.approx(expected, rel=1e-4)


class Waves:
    """A two-dimensional surface with many maxima that records where it is evaluated."""

    def __init__(self):
        self.centre, self.seen = [torch.zeros(2, dtype=torch.float64)], []
        self.loss, self.slope = self.gradient(self.centre)

    def gradient(self, u):
        point = u[0].clone().requires_grad_()
        self.seen.append(u[0])
        height = torch.tensor([1.0, 0.7], dtype=torch.float64)
        loss = (height * (5 * point + 0.4).sin()).sum() + point.sum() / 3
        return loss.item(), list(torch.autograd.grad(loss, point))


def auto_pgd(surface: Waves, rho: float, steps: int, checkpoints: list[int]) -> list[int]:
    """Runs Algorithm 1 of Croce & Hein; returns the checkpoints at which the step was halved."""

    def inside(u):
        return u * min(1.0, rho / (u.norm().item() + TINY))

    points, losses, slopes = [surface.centre[0]], [surface.loss], [surface.slope[0]]
    at, old, step, rises, halvings, top = 0, 0, 2 * rho, [], [], surface.loss
    for k in range(1, steps + 1):
        ahead = inside(points[at] + step * slopes[at] / (slopes[at].norm() + TINY))
        move = 0.75 * (ahead - points[at]) + 0.25 * (points[at] - points[old])
        points.append(ahead if k == 1 else inside(points[at] + move))
        loss, (slope,) = surface.gradient([points[-1]])
        rises.append(loss > losses[at])
        losses, slopes, at, old = [*losses, loss], [*slopes, slope], k, at
        if k in checkpoints:
            before = checkpoints[checkpoints.index(k) - 1] if k > checkpoints[0] else 0
            stuck = before not in halvings and max(losses) == top
            if sum(rises) < 0.75 * len(rises) or stuck:
                step, halvings = step / 2, [*halvings, k]
                at = old = losses.index(max(losses))
            rises, top = [], max(losses)
    return halvings


# covers halving if no better point is found (rho = 4), except right after a halving (rho = 2.8)
@pytest.mark.parametrize("rho", [0.2, 2.0, 2.8, 4.0])
def test_worst_case_search_equals_auto_pgd(rho):
    found, expected = Waves(), Waves()
    rise = worst_case(found, rho, 20)
    halvings = auto_pgd(expected, rho, 20, [5, 9, 12, 14, 16, 18, 19, 20])
    # large steps between maxima amplify rounding errors (to 1e-9 at rho = 4)
    torch.testing.assert_close(found.seen, expected.seen, rtol=0, atol=1e-6)
    assert 0 < len(halvings) < 8
    assert rise == max(found.gradient([u])[0] for u in found.seen[:21]) - found.loss
    assert {22, 41, 57, 70, 80, 87, 93, 99} == _checkpoints(100) & set(range(101))


@pytest.mark.parametrize("adaptive", [False, True])
def test_worst_case_is_at_least_one_step_sharpness(adaptive):
    model, radii = network(), (0.05, 0.5)
    step = Sharpness(radii=radii, adaptive=adaptive)(model, Toy())
    worst = Sharpness(radii=radii, adaptive=adaptive, method="worst", steps=8)(model, Toy())
    assert all(worst[key] >= step[key] > 0 for key in step)


def test_one_step_sharpness_equals_finite_differences_for_small_radii():
    """L(w + rho g / ||g||) - L(w) tends to rho ||g||; finite differences give the norm."""
    model, task, rho, h = network().eval(), Toy(), 1e-5, 1e-6

    def loss():
        with torch.no_grad():
            return task.loss(model(task.x), {"label": task.label})[0].item()

    squares = 0.0
    for weight in model.parameters():
        flat = weight.data.view(-1)
        for i in range(len(flat)):
            old = flat[i].item()
            flat[i] = old + h
            above = loss()
            flat[i] = old - h
            squares += ((above - loss()) / (2 * h)) ** 2
            flat[i] = old
    found = Sharpness(radii=(rho,), examples=None, batch_size=11)(model, task)["_1e-05"]
    assert found == pytest.approx(rho * math.sqrt(squares), rel=1e-3)


@pytest.mark.parametrize("scale", [12, 18])
@pytest.mark.parametrize("adaptive", [False, True])
def test_sharpness_of_a_confident_network_is_exact(adaptive, scale):
    """The loss is 3e-8 or 4e-12; in float32, cross-entropy would round it to 0."""
    corners = torch.tensor([[1.0, 0.0], [-0.5, 0.75**0.5], [-0.5, -(0.75**0.5)]])
    task, model = Toy(), nn.Linear(2, 3, bias=False)
    task.x, task.label = corners.repeat(20, 1), torch.arange(3).repeat(20)
    model.weight.data = scale * corners
    found = Sharpness(radii=(0.05,), adaptive=adaptive)(model, task)["_0.05"]
    weight = (scale * corners).double().requires_grad_()

    def loss(weight):
        return nn.functional.cross_entropy(task.x.double() @ weight.T, task.label)

    (slope,) = torch.autograd.grad(loss(weight), weight)
    ball = weight.detach().abs() if adaptive else torch.ones_like(slope)
    step = 0.05 * ball**2 * slope / (ball * slope).norm()
    exact = (loss(weight + step) - loss(weight)).item()
    assert found == pytest.approx(exact, rel=2e-2, abs=0)
    assert 0 < exact < 1e-7


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


def test_chunks_do_not_change_the_result():
    whole, parts = (
        Sharpness(radii=(0.1,), batch_size=size)(network(), Toy()) for size in (1000, 7)
    )
    assert whole["_0.1"] == pytest.approx(parts["_0.1"], rel=1e-10)


def test_a_subset_is_fixed_and_has_no_repeats():
    index = fixed_subset(1000, 100, seed=3)
    assert torch.equal(index, fixed_subset(1000, 100, seed=3))
    assert not torch.equal(index, fixed_subset(1000, 100, seed=4))
    assert len(index.unique()) == 100
    assert torch.equal(fixed_subset(5, None, seed=0), torch.arange(5))
    assert torch.equal(fixed_subset(5, 9, seed=0), torch.arange(5))


def test_groups_have_separate_searches_and_are_averaged_by_size():
    """The sharpness of a group equals the sharpness of a task with only its examples."""
    model, grouped = network(), Sharpness(radii=(0.05, 0.1), examples=30, group=12, seed=3)
    parts = grouped.groups(60)
    assert [len(part) for part in parts] == [12, 12, 6]
    assert torch.cat(list(parts)).sort().values.equal(fixed_subset(60, 30, 3))
    assert not torch.cat(list(parts)).equal(fixed_subset(60, 30, 3))  # groups are shuffled
    one, other = (replace(grouped, examples=None, seed=seed).groups(60)[0] for seed in (3, 4))
    assert not one.equal(other)

    class Part(Toy):
        def __init__(self, index):
            super().__init__()
            self.x, self.label, self.num_examples = self.x[index], self.label[index], len(index)

    alone = [Sharpness(radii=(0.05, 0.1))(model, Part(part)) for part in parts]
    for key, value in grouped(model, Toy()).items():
        expected = sum(n * rises[key] for n, rises in zip((12, 12, 6), alone, strict=True)) / 30
        assert value == pytest.approx(expected, rel=1e-9)


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


def test_a_resumed_run_finishes_its_measures(tmp_path, monkeypatch):
    """If a run stops between measures, the same command computes the remaining ones."""

    def stop(self, model, task):
        os.kill(os.getpid(), signal.SIGTERM)
        return {"": 1.0}

    with monkeypatch.context() as patch:
        patch.setattr(ParameterNorm, "__call__", stop)
        with pytest.raises(Interrupted, match="sharpness"):
            small_run(tmp_path / "run", "measures=[norm,sharpness]", "system.measure_every=1")
    assert not (tmp_path / "run" / "DONE").exists()
    last = small_run(tmp_path / "run", "measures=[norm,sharpness]")["last"]
    assert {"measure/norm", "measure/sharpness_0.05"} < set(last)
    assert last["measure/norm"] != 1.0


MEASURED = [
    "measures=paper",
    "measures.ed.pairs=5",
    "measures.ed.resolution=50",
    "measures.ed_norm.pairs=5",
    "measures.ed_norm.resolution=50",
    "measures.sharpness.examples=300",
    "measures.sharpness.method=worst",
    "measures.sharpness.steps=2",
    "measures.adaptive_sharpness.examples=300",
]


def test_measures_are_in_the_summary_and_do_not_change_training(tmp_path):
    """Measures must not change the random numbers of dropout or of the regularizer."""
    extra = ["regularizer=ed", "model.dropout=0.1", "task.epochs=2"]
    plain = small_run(tmp_path / "plain", *extra)
    summary = small_run(tmp_path / "measured", *extra, *MEASURED, "system.measure_every=1")
    expected = {"ed", "ed_se", "ed_norm", "ed_norm_se", "norm", "gap", "gap_train", "gap_test"}
    expected |= {f"sharpness_{rho}" for rho in ("0.01", "0.05", "0.1")}
    expected |= {f"adaptive_sharpness_{rho}" for rho in ("0.01", "0.05", "0.1", "0.5", "1")}
    done = json.loads((tmp_path / "measured" / "DONE").read_text())
    assert {f"measure/{key}" for key in expected} | set(plain["last"]) == set(done["last"])
    assert done["last"] == summary["last"]
    # on a CPU, both use the same precision
    assert done["last"]["measure/gap_test"] == done["last"]["eval/acc"]
    text = (tmp_path / "measured" / "metrics.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    assert [row["step"] for row in rows if "measure/ed" in row] == [10, 20]
    assert {key: summary["last"][key] for key in plain["last"]} == plain["last"]
    before, after = weights(tmp_path / "plain"), weights(tmp_path / "measured")
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_a_finished_run_computes_only_missing_measures(tmp_path, capsys):
    """Running the same command with other measures or settings loads the checkpoint."""
    folder = tmp_path / "run"
    few = ["measures.ed.pairs=3", "measures.ed.resolution=50"]
    first = small_run(folder, "measures=[ed,norm]", *few)
    before = weights(folder)
    sharp = ["measures=[ed,sharpness]", *few, "measures.sharpness.examples=50"]
    second = small_run(folder, *sharp)
    assert "measuring it: sharpness\n" in capsys.readouterr().out
    assert first["last"].items() < second["last"].items()
    assert "measure/sharpness_0.05" in second["last"]
    assert read_done(folder) == second
    assert all(torch.equal(before[key], value) for key, value in weights(folder).items())
    assert small_run(folder, *sharp) == second
    assert "measuring it" not in capsys.readouterr().out
    more = small_run(folder, "measures=ed", "measures.ed.pairs=4", *few[1:])
    assert more["last"]["measure/ed"] != first["last"]["measure/ed"]
    stored = OmegaConf.load(folder / "config.yaml").measures
    assert stored.ed.pairs == 4
    assert list(stored) == ["ed", "norm", "sharpness"]


class Precision(Measure):
    """A measure that returns whether it runs in bf16."""

    def __init__(self, evaluates: bool):
        self.evaluates = evaluates

    def __call__(self, model, task):
        return {"": float(torch.is_autocast_enabled("cpu"))}


def test_only_evaluations_use_the_precision_of_the_run():
    """Other measures run in full precision, because rounding to bf16 would increase ED."""
    step = SimpleNamespace(autocast=torch.autocast("cpu", torch.bfloat16))
    measures = {"weights": Precision(False), "evaluation": Precision(True)}
    found = _Session(None, None, step, None, measures).measure()
    assert found == {"measure/weights": 0, "measure/evaluation": 1}


class Plain(Measure):
    """A custom measure that does not define equality; one of its values is infinite."""

    def __call__(self, model, task):
        return {"": 1.0, "_wild": math.inf}


def test_a_measure_without_equality_is_computed_once(tmp_path, capsys):
    cfg = small_config(tmp_path / "run")
    cfg.measures = {"plain": {"_target_": f"{__name__}.Plain"}}
    summaries = [run(cfg, ["small"]) for _ in range(2)]
    assert summaries[0] == summaries[1]
    assert summaries[0]["last"]["measure/plain"] == 1
    assert "measure/plain_wild" not in summaries[0]["last"]
    assert "Infinity" not in (tmp_path / "run" / "metrics.jsonl").read_text()
    printed = capsys.readouterr().out
    assert "already done" in printed
    assert "measuring it" not in printed


def test_a_finished_run_without_checkpoint_reports_missing_measures(tmp_path, capsys):
    summary = small_run(tmp_path / "run", "system.keep_checkpoint=false")
    assert small_run(tmp_path / "run", "measures=norm") == summary
    printed = capsys.readouterr().out
    assert "already done" in printed
    assert "not measured: norm;" in printed


def test_the_stored_config_lists_the_computed_measures(tmp_path):
    """This also holds for runs that were stopped and resumed with other measures."""
    with pytest.raises(Interrupted):
        small_run(tmp_path / "run", "measures=ed", "system.max_minutes=0")
    small_run(tmp_path / "run", "measures=norm")
    assert list(OmegaConf.load(tmp_path / "run" / "config.yaml").measures) == ["norm"]
