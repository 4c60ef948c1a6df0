"""Tests of the estimator: exact values, standard errors, memory, errors and warnings."""

import math
import warnings
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import ed
from ed.core.estimator import PROTOCOL, estimate_each
from ed.core.memory import LIVE_TENSORS, _Probe, points_per_chunk
from ed.core.representation import distinct_pairs
from tests.helpers.core import small_network, uniform

SETTINGS = {"resolution": 32, "degree": 8, "sampler": ed.ChebyshevNodes()}


def polynomial_map(task: int):
    """Returns a target map from the paper's polynomial-network study."""

    def forward(x):
        a, b, c = x.unbind(-1)
        rows = {
            1: (c + 2, b + 3, a + 1),
            2: (a * b, b * c, a * c),
            3: (a * b * c, a**2 * b * c**2, a**2 * b * c + b**2 * c),
        }
        return torch.stack(rows[task], dim=-1)

    return forward


# ED, ED_norm, ED (Legendre), ED (PCA-1), ED (PCA-2) of the exact maps on U[-2, 2]^3
EXACT = {
    1: (0.67, 0.28, 0.67, 1.32, 0.66),
    2: (1.18, 0.80, 1.33, 2.04, 1.32),
    3: (2.95, 1.16, 3.65, 5.4, 3.4),
}
VARIANTS = (
    {},
    {"weighting": "normalised"},
    {"basis": "legendre"},
    {"components": 1},
    {"components": 2},
)


@pytest.mark.parametrize("task", EXACT)
def test_exact_values_of_the_polynomial_maps(task):
    x = 4 * uniform(5000, 3) - 2
    readings = [(ed.Representation(**SETTINGS, **variant), False) for variant in VARIANTS]
    results = estimate_each(polynomial_map(task), x, readings=readings, pairs=5000)
    for result, exact in zip(results, EXACT[task], strict=True):
        noise = 4 * result.standard_error
        assert result.mean == pytest.approx(exact, abs=noise + 0.01 * exact)  # given to two digits


def test_estimate_does_not_depend_on_the_memory_budget():
    model, x = small_network(), torch.randn(40, 6)
    settings = {"representation": ed.Representation(resolution=20, degree=6), "pairs": 50}
    whole = ed.estimate(model, x, **settings)
    pieces = ed.estimate(model, x, memory_gib=1e-6, **settings)  # room for only a few points
    torch.testing.assert_close(whole.values, pieces.values, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(whole.spectrum, pieces.spectrum, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [10, 100_000], ids=["many paths", "part of a path"])
def test_no_tensor_is_larger_than_the_memory_budget(size):
    """The budget covers path points and activations; 200 large inputs would exceed it."""
    x, budget = torch.randn(8, size), 2**21
    with _Probe() as largest:
        ed.estimate(lambda p: p[:, :3].tanh(), x, pairs=4, memory_gib=budget / 2**30)
    assert x[0].numel() * 4 <= largest.size <= budget


def test_a_chunk_has_room_for_several_activations_of_each_point():
    """The input is the largest activation; a transposed view of the weights does not count."""
    field = ed.Field.of(nn.Linear(4000, 10), torch.randn(2, 4000))
    with torch.no_grad():
        assert points_per_chunk(field, memory_gib=1.0) == 2**30 // (LIVE_TENSORS * 4000 * 4)


def test_values_and_spectrum_give_the_same_mean():
    result = ed.estimate(small_network(), torch.randn(40, 6), pairs=60)
    assert result.representation == PROTOCOL
    assert result.mean == pytest.approx(result.values.mean().item())
    # raw ED is linear in |c|, so it follows from the mean spectrum
    degrees = torch.arange(41, dtype=torch.float32)
    assert (result.spectrum @ degrees).item() == pytest.approx(result.mean, rel=1e-4)
    assert str(result).startswith("ED ")


def test_the_seed_selects_the_paths():
    model, x = small_network(), torch.randn(40, 6)
    one, again, other = (ed.estimate(model, x, pairs=20, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(one.values, again.values)
    assert not torch.equal(one.ends, other.ends)
    generator = torch.Generator().manual_seed(1)
    assert torch.equal(other.ends, torch.stack(distinct_pairs(40, 20, generator=generator)))


def test_standard_error_accounts_for_shared_ends():
    """Compares with a sum over pairs of paths, or with std / sqrt(paths) if no ends are shared."""
    result = ed.estimate(small_network(), torch.randn(20, 6), pairs=60)
    deviations = (result.values - result.values.mean()).tolist()
    ends = [set(pair) for pair in result.ends.T.tolist()]
    assert all(len(pair) == 2 for pair in ends)
    shared = sum(
        deviations[p] * deviations[q]
        for p in range(60)
        for q in range(60)
        if p != q and ends[p] & ends[q]
    )
    alone = result.values.var().item() * 60
    assert result.standard_error == pytest.approx(math.sqrt(alone + max(shared, 0)) / 60, rel=1e-4)
    apart = replace(result, ends=torch.arange(120).view(2, 60))
    assert apart.standard_error == pytest.approx(math.sqrt(alone) / 60, rel=1e-5)


def test_standard_error_equals_the_spread_over_new_examples():
    """Draws many paths between few examples, so that many paths share an end."""
    x = 4 * torch.rand(40, 16, 3, generator=torch.Generator().manual_seed(0)) - 2
    settings = {"pairs": 100, "resolution": 8, "degree": 4, "softmax": False}
    results = [ed.estimate(lambda v: v.square(), pool, **settings) for pool in x]
    spread = torch.tensor([result.mean for result in results]).std().item()
    reported = torch.tensor([result.standard_error for result in results]).square().mean().sqrt()
    alone = torch.stack([result.values.var() / 100 for result in results]).mean().sqrt()
    assert spread > 1.6 * alone  # the naive standard error is too small
    assert reported.item() == pytest.approx(spread, rel=0.25)


def test_standard_error_falls_with_the_number_of_paths():
    model, x = small_network(), torch.randn(20_000, 6)
    representation = ed.Representation(resolution=12, degree=6, sampler=ed.ChebyshevNodes())
    few, many = (ed.estimate(model, x, pairs=n, representation=representation) for n in (200, 3200))
    assert few.standard_error / many.standard_error == pytest.approx(4, rel=0.2)  # sqrt(3200 / 200)


@pytest.mark.parametrize(
    ("arguments", "settings", "message"),
    [
        ((small_network,), {}, "^inputs"),
        ((lambda: ed.Field.of(small_network(), torch.randn(9, 6)), torch.randn(9, 6)), {}, "Field"),
        ((small_network, torch.randn(9, 6)), {"pairs": 0}, "pairs=0"),
        ((small_network, torch.randn(9, 6)), {"pairs": 2.0}, "^pairs=2.0"),
        ((small_network, torch.randn(9, 6)), {"pairs": True}, "^pairs=True"),
        ((small_network, torch.randn(9, 6)), {"pairs": None}, "^pairs=None"),
        ((small_network, torch.randn(9, 6)), {"seed": 1.5}, "^seed=1.5"),
        ((small_network, torch.randn(9, 6)), {"seed": 2**64}, "^seed=18"),
        ((small_network, torch.randn(9, 6)), {"softmax": "none"}, "^softmax=none"),
        ((small_network, torch.randn(9, 6)), {"detach_pca": "no"}, "^detach_pca=no"),
        ((small_network, torch.randn(9, 6)), {"class_dim": "1"}, "^class_dim=1"),
        ((small_network, torch.randn(9, 6)), {"class_dim": True}, "^class_dim=True"),
        ((small_network, torch.randn(9, 6)), {"progress": "bar"}, "^progress='bar'"),
        ((small_network, torch.randn(9, 6)), {"representation": {"degree": 3}}, "^representation="),
        ((small_network, torch.randn(9, 6)), {"output": "logits"}, "^output='logits': .*a tensor"),
        ((lambda: "resnet18", torch.randn(9, 6)), {}, "^model: got str"),
        ((small_network, torch.tensor(3.0)), {}, "^inputs: got a single number"),
        ((lambda: lambda x: x[:, :0], torch.randn(9, 6)), {}, r"^outputs: got \(\d+, 0\)"),
        ((small_network, torch.randn(9, 6)), {"memory_gib": math.nan}, "memory_gib=nan"),
        ((small_network, torch.randn(9, 6)), {"memory_gib": math.inf}, "memory_gib=inf"),
        ((small_network, torch.randn(9, 6)), {"damping": math.inf}, "^damping=inf"),
        ((lambda: lambda x: x.float(), torch.randint(9, (9, 6))), {}, r"inputs .*torch\.int64"),
        ((lambda: lambda x: x.sum(1), torch.randn(9, 6)), {}, r"^outputs.*\(N, C\)"),
        ((small_network, torch.randint(9, (9, 6))), {}, r"ed\.Field\.from_text"),
        ((small_network, [torch.randn(9, 6)]), {}, r"^inputs: .*list.*torch\.cat"),
        ((lambda: lambda x: (x, x), torch.randn(9, 6)), {}, "^outputs: .*tuple"),
        ((lambda: lambda x: {"out": x}, torch.randn(9, 6)), {}, "^outputs: .*dict"),
        ((lambda: nn.Linear(6, 1), torch.randn(9, 6)), {}, "^outputs: .*softmax=False"),
        ((lambda: lambda x: x.mean(0), torch.randn(9, 6, 3)), {}, r"^outputs: .*\(6, 3\)"),
        ((lambda: torch.sum, torch.randn(9, 6)), {}, r"^outputs: .*\(\).*batch_first"),
    ],
)
def test_estimate_rejects_wrong_arguments(arguments, settings, message):
    make, *inputs = arguments
    with pytest.raises(ValueError, match=message):
        ed.estimate(make(), *inputs, **({"pairs": 2} | settings))


def test_estimate_does_not_change_the_model_or_the_rng():
    model, x = small_network(), torch.randn(40, 6)
    model.train()
    model[1].eval()  # mixed modes must be restored
    state = {k: v.clone() for k, v in model.state_dict().items()}
    rng = torch.get_rng_state()
    ed.estimate(model, x, pairs=20)
    assert [m.training for m in model.modules()] == [True, True, False, True, True]
    assert torch.equal(torch.get_rng_state(), rng)
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name


def test_the_module_of_a_field_is_measured_in_eval_mode():
    """In training mode, dropout would increase ED."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.5), nn.Linear(16, 5)).train()
    x = torch.randn(30, 6)
    fields = [ed.Field.of(model, x), ed.Field.of(model.forward, x)]
    fields.append(ed.Field(lambda p, _: model(p), x, module=model))
    fields.append(ed.Field.of(lambda p: model(p), x, module=model))
    fields.append(ed.Field.of(partial(model), x))
    fields.append(ed.Field.of(partial(model.forward), x))
    expected = ed.estimate(model, x, pairs=20)
    for field in fields:
        assert torch.equal(ed.estimate(field, pairs=20).values, expected.values)
    assert all(module.training for module in model.modules())
    hidden = ed.estimate(lambda p: model(p), x, pairs=20)
    assert hidden.mean > 2 * expected.mean  # dropout stays on unless `module` is passed


class Bag(nn.Module):
    """A module whose `len` is 0."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def __len__(self):
        return 0

    def forward(self, x):
        assert not self.training
        return self.layer(x)


def test_a_module_with_length_zero_can_be_measured():
    ed.estimate(Bag().train(), torch.randn(30, 6), pairs=9)
    with pytest.raises(RuntimeError) as caught:
        ed.estimate(Bag(), torch.randn(30, 5), pairs=9)
    assert "its weights are torch.float32" in caught.value.__notes__[0]


def test_a_text_classifier_is_measured_in_its_embedding_space():
    """Runs the example from help(ed.Field) on a model in training mode."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
        vocab_size=50, num_labels=3,
    )  # fmt: skip
    bert = transformers.BertForSequenceClassification(config).train()
    ids, labels = torch.randint(50, (12, 7)), torch.randint(3, (12,))
    mask = (torch.arange(7) < torch.randint(3, 8, (12, 1))).long()
    field = ed.Field(
        lambda x, context: bert(inputs_embeds=x, attention_mask=context["mask"]),
        bert.get_input_embeddings()(ids), {"mask": mask}, module=bert,
    )  # fmt: skip
    first, second = (ed.estimate(field, pairs=20, resolution=12, degree=6) for _ in range(2))
    assert torch.equal(first.values, second.values)  # dropout is off
    assert first.mean > 0
    ed.penalty(field, labels=labels).backward()
    assert bert.get_input_embeddings().weight.grad.abs().sum() > 0


def test_torch_errors_get_a_note_with_the_input():
    with pytest.raises(RuntimeError, match="same dtype") as caught:
        ed.estimate(nn.Linear(6, 3).half(), torch.randn(9, 6), pairs=2)
    (note,) = caught.value.__notes__
    assert note == (
        "The model got (2, 6), torch.float32 on cpu; its weights are torch.float16 on cpu."
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_outputs_warn(dtype):
    """Rounding increases ED, here by a quarter in bfloat16."""
    model, x = small_network().eval(), torch.randn(30, 6)
    exact = ed.estimate(model, x, pairs=20)
    with pytest.warns(UserWarning, match=str(dtype)):
        rounded = ed.estimate(model.to(dtype), x.to(dtype), pairs=20)
    assert rounded.mean > (1.2 if dtype == torch.bfloat16 else 1.0) * exact.mean
    with pytest.warns(UserWarning, match=str(dtype)):  # also if the outputs are float32
        again = ed.estimate(lambda p: model(p.to(dtype)).float(), x.to(dtype), pairs=20)
    torch.testing.assert_close(rounded.values, again.values)  # softmax runs in float32


def test_applying_softmax_twice_warns():
    model, x = nn.Sequential(small_network(), nn.Softmax(-1)), torch.randn(30, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        plain = ed.estimate(model[0], x, pairs=20)
        unchanged = ed.estimate(model, x, pairs=20, softmax=False)
    torch.testing.assert_close(unchanged.values, plain.values)
    with pytest.warns(UserWarning, match="softmax=False"):
        ed.estimate(model, x, pairs=20)


def estimate_twice(model, x, **settings):
    return ed.compare(model, model, x, **settings)


@pytest.mark.parametrize(
    "call", [ed.estimate, ed.penalty, lambda *_, **how: ed.Representation(**how)]
)
def test_the_warning_about_too_few_nodes_points_to_the_line_of_the_caller(call):
    with pytest.warns(UserWarning, match="resolution=4") as seen:
        call(nn.Linear(6, 3), torch.randn(40, 6), resolution=4, degree=7)
    assert {warning.filename for warning in seen} == {__file__}


@pytest.mark.parametrize("resolution", [20, "auto"])
@pytest.mark.parametrize("model", [nn.Softmax(-1), nn.Linear(6, 3).bfloat16()], ids=str)
@pytest.mark.parametrize("measure", [ed.estimate, estimate_twice])
def test_warnings_point_to_the_line_of_the_caller(measure, model, resolution):
    x = torch.randn(30, 6).to(torch.bfloat16 if isinstance(model, nn.Linear) else torch.float32)
    with pytest.warns(UserWarning, match="softmax=False|bfloat16") as seen:
        measure(model, x, pairs=9, resolution=resolution, degree=5)
    assert {warning.filename for warning in seen} == {__file__}


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([1.0, 1.2, 1.4], "ED 1.20 +- 0.12 (3 paths)"),
        ([1e-4, 1.2e-4, 1.4e-4], "ED 0.000120 +- 0.000012 (3 paths)"),
        ([1e3, 1.2e3, 1.4e3], "ED 1200 +- 115 (3 paths)"),
        ([0.0, 0.0, 0.0], "ED 0.0000 +- 0.0000 (3 paths)"),
        ([0.5], "ED 0.5000 +- nan (1 paths)"),
    ],
)
def test_an_estimate_shows_two_digits_of_its_error(values, text):
    ends = torch.arange(2 * len(values)).view(2, -1)
    points = torch.full((len(values),), 4)
    estimate = ed.Estimate(torch.tensor(values), torch.zeros(4), ed.Representation(), ends, points)
    assert str(estimate) == text


def test_estimate_reports_progress_and_rejects_non_finite_outputs(capsys):
    seen = []
    x = torch.randn(30, 6)
    ed.estimate(
        small_network(), x, pairs=9, progress=lambda done, total: seen.append((done, total))
    )
    assert seen[-1] == (9, 9)
    ed.estimate(small_network(), x, pairs=9, progress=True)
    assert "effective degree" in capsys.readouterr().err
    with pytest.raises(ValueError, match="not finite on 9 of 9 paths"):
        ed.estimate(lambda p: p / 0, x, pairs=9)


class Sparse(nn.Module):
    """A model with a sparse matrix product, such as a graph convolution."""

    def __init__(self):
        super().__init__()
        self.register_buffer("edges", torch.eye(6).to_sparse())
        self.out = nn.Linear(6, 3)

    def forward(self, x):
        return self.out(torch.sparse.mm(self.edges, x.T).T)


@dataclass
class Fixed:
    """A custom sampler that is not hashable."""

    def __call__(self, uniform, anchored):
        return torch.linspace(0, 1, uniform.shape[-1], dtype=uniform.dtype)


def test_weights_without_storage_of_their_own_can_be_measured():
    weight, x = torch.randn(3, 6), torch.randn(30, 6)
    wrapped = TwoTensor(weight, weight)  # as the DTensors of tensor parallelism
    found = ed.estimate(lambda p: nn.functional.linear(p, wrapped).a, x, pairs=10)
    expected = ed.estimate(lambda p: nn.functional.linear(p, weight), x, pairs=10)
    assert torch.equal(found.values, expected.values)


def test_any_callable_can_be_measured():
    torch.manual_seed(0)
    x, out = torch.randn(30, 6), nn.Linear(6, 3)
    expected = ed.estimate(out, x, pairs=10).mean
    sparse = Sparse()
    sparse.out = out
    assert ed.estimate(sparse, x, pairs=10).mean == pytest.approx(expected, rel=1e-5)
    squeezing = ed.estimate(lambda x: out(x[:, None]).squeeze(), x, pairs=10)
    assert squeezing.mean == pytest.approx(expected, rel=1e-5)
    assert ed.estimate(out, x, pairs=10, sampler=Fixed(), resolution=50).mean > 0


@pytest.mark.parametrize("examples", [6, 30])  # 8 pairs out of 15 or 435
def test_pairs_are_drawn_on_the_cpu_with_another_default_device(examples):
    torch.manual_seed(0)
    x, out = torch.randn(examples, 6), nn.Linear(6, 3)
    expected = ed.estimate(out, x, pairs=8).mean
    with torch.device("meta"):
        assert ed.estimate(out, x, pairs=8).mean == expected
