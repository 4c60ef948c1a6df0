"""Paths, anchoring, penalty and estimator: the paper's statements about them, in float64."""

import itertools
import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import ed
from ed.core.bases import legendre
from ed.core.estimator import (
    LIVE_TENSORS,
    PROTOCOL,
    _LargestOutput,
    estimate_each,
    points_per_chunk,
)
from ed.core.field import Field
from ed.core.fit import fit
from ed.core.modes import evaluating
from ed.core.pca import principal_scores
from ed.core.penalty import Paths
from ed.core.representation import anchor, distinct_pairs, sample_pairs

SETTINGS = {"resolution": 32, "degree": 8, "sampler": ed.ChebyshevNodes()}


def uniform(*shape, seed=0):
    return torch.rand(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def polynomial_map(task: int):
    """The exact target maps of the paper's study on polynomial networks."""

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
    x = 4 * uniform(20000, 3) - 2
    readings = [(ed.Representation(**SETTINGS, **variant), False) for variant in VARIANTS]
    results = estimate_each(polynomial_map(task), x, readings=readings, pairs=20000)
    assert [result.mean for result in results] == pytest.approx(EXACT[task], rel=0.03)


@given(st.integers(1, 3), st.integers(1, 5), st.integers(0, 2**31))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_degree_is_preserved_along_random_paths(dimension, degree, seed):
    """Lemma (degree preservation): P restricted to a path has P's own degree, almost surely."""
    generator = torch.Generator().manual_seed(seed)
    powers = torch.tensor(
        [p for p in itertools.product(range(degree + 1), repeat=dimension) if sum(p) <= degree]
    )
    weights = torch.randn(len(powers), generator=generator, dtype=torch.float64)
    ends = torch.randn(2, dimension, generator=generator, dtype=torch.float64)

    def forward(x):
        return ((x[:, None, :] ** powers).prod(-1) @ weights)[:, None]

    nodes = ed.ChebyshevNodes()(uniform(16))
    along = Field.of(forward, ends).between(torch.tensor([0]), torch.tensor([1]), nodes)
    c = ed.fit(along().unflatten(0, (1, 16)), nodes, 8, damping=0.0).abs().flatten()
    scale = c.max()
    assert c[degree + 1 :].max() < 1e-9 * scale  # nothing above the degree
    # the leading coefficient is 2 P_D(v) / 4^D; P_D(v) is zero with probability zero
    top = powers.sum(-1) == degree
    leading = ((ends[0] - ends[1]) ** powers[top]).prod(-1) @ weights[top]
    expected = abs(leading) * 2 / 4**degree if degree else abs(leading)
    torch.testing.assert_close(c[degree], expected, rtol=1e-6, atol=1e-9 * float(scale))


def test_paths_run_from_the_second_to_the_first():
    x = uniform(5, 3, 4, 4)
    nodes = torch.tensor([0.0, 0.25, 1.0], dtype=torch.float64)
    first, second = torch.tensor([0, 1]), torch.tensor([2, 3])
    along = Field.of(lambda p: p, x).between(first, second, nodes).x.unflatten(0, (2, 3))
    assert torch.equal(along[:, 0], x[second])  # alpha = 0, bitwise
    assert torch.equal(along[:, 2], x[first])
    torch.testing.assert_close(along[:, 1], 0.25 * x[first] + 0.75 * x[second])


def test_points_between_bf16_features_lie_at_the_nodes_that_are_fitted():
    """Their own rounding cannot be helped; that of the nodes would come on top."""
    x, alpha = uniform(2, 50).bfloat16(), uniform(4, seed=1).float()
    along = Field.of(nn.Identity(), x).between(torch.tensor([0]), torch.tensor([1]), alpha).x
    exact = torch.lerp(x[1].double(), x[0].double(), alpha.double()[:, None])
    assert torch.equal(along, exact.bfloat16())


def test_context_is_the_union_inside_a_path_and_each_ends_own_there():
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 1]])
    field = Field(lambda p, c: c["mask"], uniform(2, 4, 8), {"mask": mask})
    alpha = torch.tensor([0.0, 0.1, 0.9, 1.0])
    merged = field.between(torch.tensor([0]), torch.tensor([1]), alpha)()
    assert merged.tolist() == [[1, 0, 0, 1], [1, 1, 0, 1], [1, 1, 0, 1], [1, 1, 0, 0]]


@pytest.mark.parametrize("rows", [1, 6])
def test_a_context_needs_a_row_for_every_point(rows):
    field = Field(lambda p, c: p, uniform(5, 4), {"mask": torch.ones(rows, 4)})
    for use in (lambda: ed.estimate(field, pairs=2), lambda: ed.penalty(field)):
        with pytest.raises(ValueError, match=f"context 'mask' has {rows} rows for 5 points"):
            use()


def test_masks_that_are_added_to_scores_are_merged_alike():
    """-inf where nothing is looked at; and what may be looked at from either end, may inside."""
    seen = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 1]]).bool()
    added = torch.zeros(2, 4).masked_fill(~seen, -torch.inf)
    field = Field(lambda p, c: c["mask"], uniform(2, 4, 8), {"mask": added})
    alpha = torch.tensor([0.0, 0.5, 1.0])
    merged = field.between(torch.tensor([0]), torch.tensor([1]), alpha)()
    assert torch.equal(merged == 0, torch.stack([seen[1], seen[0] | seen[1], seen[0]]))
    assert not merged.isnan().any()


def test_joined_field_equals_both_parts():
    """Each point with its own context, in one pass."""
    model = nn.Linear(4, 3).double()
    field = Field(lambda p, c: model(p) * c["size"], uniform(5, 4), {"size": uniform(5, 1, seed=1)})
    paths = field.between(torch.tensor([0, 1]), torch.tensor([2, 3]), uniform(2, 6))
    at_batch, on_paths = field.with_paths(paths)
    torch.testing.assert_close(at_batch, field())
    torch.testing.assert_close(on_paths, paths())
    torch.testing.assert_close(field.part(slice(1, 2))(), field()[1:2])


@pytest.mark.parametrize("classes", [2, 10, 100])
@pytest.mark.parametrize("sampler", [ed.RandomizedCosine(), ed.UniformNodes()], ids=repr)
def test_floor_of_anchored_ed_is_one_over_classes(classes, sampler):
    """A straight line between two different one-hot labels: |c_1| = 1/2 in two coordinates."""
    nodes = sampler(uniform(9, 6), anchored=True)
    t1, t2 = (torch.eye(classes, dtype=torch.float64)[i].expand(9, -1) for i in (0, 1))
    inner = nodes[:, 1:-1, None] * t1[:, None] + (1 - nodes[:, 1:-1, None]) * t2[:, None]
    representation = ed.Representation(resolution=6, degree=3, damping=0.0)
    values = anchor(inner, t1, t2)
    degrees = representation.degrees(representation.coefficients(values, nodes))
    torch.testing.assert_close(degrees, torch.full_like(degrees, 1 / classes), rtol=1e-6, atol=0)


@pytest.mark.parametrize("components", [1, 2, 3])
def test_floor_of_anchored_ed_with_pca(components):
    """The same line has one principal direction of length sqrt(2): ED = (sqrt(2) / 2) / m."""
    nodes = ed.RandomizedCosine()(uniform(9, 4), anchored=True)
    t1, t2 = (torch.eye(10, dtype=torch.float64)[i].expand(9, -1) for i in (3, 7))
    inner = nodes[:, 1:-1, None] * t1[:, None] + (1 - nodes[:, 1:-1, None]) * t2[:, None]
    representation = ed.Representation(components=components, damping=0.0)
    values = anchor(inner, t1, t2)
    degrees = representation.degrees(representation.coefficients(values, nodes))
    expected = torch.full_like(degrees, math.sqrt(2) / 2 / components)
    torch.testing.assert_close(degrees, expected, rtol=1e-6, atol=0)


def test_same_label_and_constant_path_have_degree_zero():
    nodes = ed.RandomizedCosine()(uniform(3, 4), anchored=True)
    target = torch.eye(10, dtype=torch.float64)[4].expand(3, -1)
    representation = ed.Representation(damping=0.0)
    values = anchor(target[:, None].expand(3, 2, 10), target, target)
    degrees = representation.degrees(representation.coefficients(values, nodes))
    assert degrees.abs().max() < 1e-10


def test_anchoring_puts_the_labels_in_algorithm_ones_order():
    values = anchor(torch.zeros(2, 3, 4), torch.full((2, 4), 1.0), torch.full((2, 4), 2.0))
    assert values[:, 0].unique().tolist() == [2.0]  # y_1 = t2 at alpha = 0
    assert values[:, -1].unique().tolist() == [1.0]  # y_r = t1 at alpha = 1


def test_each_end_of_an_anchored_path_has_the_label_of_its_example():
    """Outputs on the line between the labels: every path is a line of degree 1, or a constant."""
    field, draw = Field.of(nn.Identity(), torch.eye(3).double()), torch.Generator().manual_seed(0)
    representation = ed.Representation(damping=0.0)
    paths = Paths.draw(field, representation, 9, labels=torch.arange(3), generator=draw)
    first, second = paths.labels
    assert (first != second).any()
    degrees = paths.degrees(paths.field(), softmax=False)
    torch.testing.assert_close(degrees, (first != second).double() / 3, rtol=1e-9, atol=1e-9)


def test_paths_are_half_as_many_as_examples():
    """The paper's rule, of four nodes each; those of labels cost nothing."""
    seen = []

    def forward(x):
        seen.append(len(x))
        return x

    ed.penalty(forward, torch.randn(12, 3))
    ed.penalty(forward, torch.randn(12, 3), torch.arange(12) % 3)
    assert seen == [6 * 4, 6 * 2]


def test_anchored_paths_cost_two_points_less():
    field, labels = Field.of(nn.Linear(4, 3), torch.randn(8, 4)), torch.randint(3, (8,))
    assert len(Paths.draw(field, ed.Representation(), 5).field.x) == 5 * 4
    assert len(Paths.draw(field, ed.Representation(), 5, labels=labels).field.x) == 5 * 2


def test_penalty_gradient_equals_finite_differences():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4)).double()
    x, labels = uniform(6, 3), torch.tensor([0, 1, 2, 3, 0, 1])

    def value(weight, components):
        def forward(points):
            return model[2](torch.tanh(points @ weight.mT))

        generator = torch.Generator().manual_seed(3)
        return ed.penalty(forward, x, labels, generator=generator, components=components)

    weight = model[0].weight.detach().clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda w: value(w, None), weight)
    assert torch.autograd.gradcheck(lambda w: value(w, 2), weight)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "settings",
    [{}, {"components": 2}, {"components": 2, "detach_pca": True}, {"weighting": "normalised"},
     {"weighting": "quadratic"}],
    ids=str,
)  # fmt: skip
def test_autocast_does_not_reach_the_penalty(settings, dtype, device):
    """The same logits give the same penalty and gradient; probabilities here fall to 1e-45, which
    float16 does not know, nor float32 the reciprocal of."""
    x = (40 * torch.randn(32, 5, generator=torch.Generator().manual_seed(0))).to(device)
    labels = torch.arange(32, device=device) % 5

    def value_and_gradient():
        inputs = x.clone().requires_grad_()
        generator = torch.Generator(device).manual_seed(1)
        with torch.autocast(device, dtype, enabled=inside):
            value = ed.penalty(nn.Identity(), inputs, labels, generator=generator, **settings)
        return value, *torch.autograd.grad(value, inputs)

    inside = False
    expected = value_and_gradient()
    inside = True
    found = value_and_gradient()
    for one, other in zip(found, expected, strict=True):
        assert one.isfinite().all()
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def test_bf16_logits_have_float32_probabilities():
    draw = torch.Generator().manual_seed(0)
    field = Field.of(nn.Identity(), torch.zeros(8, 5))
    paths = Paths.draw(field, ed.Representation(), 6, generator=draw)
    logits = torch.randn(6 * 4, 5, generator=draw).bfloat16()
    assert torch.equal(paths.degrees(logits), paths.degrees(logits.float()))


def test_penalty_compiles_without_a_graph_break():
    """Random draws come from torch.rand, which traces; generators stay outside."""
    nodes = ed.RandomizedCosine()(torch.rand(8, 4), anchored=True)
    values = torch.randn(8, 4, 10, requires_grad=True)

    def degree(values, nodes, representation):
        return representation.degrees(representation.coefficients(values, nodes)).mean()

    for components in (None, 3):
        representation = ed.Representation(components=components)
        explanation = torch._dynamo.explain(degree)(values, nodes, representation)
        assert explanation.graph_break_count == 0, explanation.break_reasons
    explanation = torch._dynamo.explain(lambda u: ed.RandomizedCosine()(u, True))(torch.rand(8, 4))
    assert explanation.graph_break_count == 0, explanation.break_reasons


def test_a_compiled_step_takes_batches_of_other_sizes():
    """The last one of an epoch is smaller, and torch then traces sizes as symbols."""
    model = nn.Linear(6, 3)

    def loss(x, labels):
        return model(x).square().mean() + ed.penalty(model, x, labels, components=2)

    compiled = torch.compile(loss, backend="eager", fullgraph=True)
    for size in (8, 5):
        x, labels = torch.randn(size, 6), torch.arange(size) % 3
        torch.manual_seed(0)
        expected = torch.autograd.grad(loss(x, labels), model.weight)
        torch.manual_seed(0)
        torch.testing.assert_close(torch.autograd.grad(compiled(x, labels), model.weight), expected)


@pytest.mark.parametrize(
    ("model", "labels", "settings", "message"),
    [
        (nn.Linear(6, 3), torch.zeros(4).long(), {}, r"shape \(8,\) .* got \(4,\)"),
        (nn.Linear(6, 3), torch.zeros(8, 3).long(), {}, r"got \(8, 3\)"),
        (nn.Linear(6, 3), torch.zeros(8), {}, "got .*float32"),
        (nn.Linear(6, 3), torch.zeros(8).long(), {"resolution": 2, "degree": 1}, "at both ends"),
        (nn.Linear(6, 3), [0] * 8, {}, "got list"),
        (nn.Linear(6, 3), 4, {}, "got int"),
        (nn.Linear(6, 3), None, {"pairs": 0}, "use pairs between 1 and 64"),
        (nn.Linear(6, 3), None, {"pairs": 8 / 2}, r"pairs must be a whole number, got 4\.0"),
        (nn.Linear(6, 1), None, {}, "softmax of one is 1 everywhere"),
        (
            nn.Linear(6, 1),
            torch.arange(8) % 2,
            {"softmax": False},
            "one output, and no class to tell by it",
        ),
        (lambda x: x.mean(0, keepdim=True), None, {}, "a row for each of"),
        (lambda x: x.sum(1), None, {}, r"\(N, C\) are needed, the model's are \(16,\): reshape"),
    ],
)
def test_penalty_refuses_what_it_would_misread(model, labels, settings, message):
    with pytest.raises(ValueError, match=message):
        ed.penalty(model, torch.randn(8, 6), labels, **settings)


def test_penalty_keeps_the_statistics_of_batch_norm():
    """Points on paths are no data; the batch itself is counted by the pass that makes the loss.
    They are normalised as data would be."""
    model, twin, x = small_network().train(), small_network().train(), torch.randn(12, 6)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    labels, draws = torch.randint(5, (12,)), [torch.Generator().manual_seed(0) for _ in range(2)]
    value = ed.penalty(model, x, labels, generator=draws[0])
    assert torch.equal(value, ed.penalty(lambda p: twin(p), x, labels, generator=draws[1]))
    value.backward()
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name
    assert model[1].track_running_stats
    assert all(weight.grad is not None for weight in model.parameters())


def test_a_field_is_seen_as_its_settings_say():
    """Named, `aside` and `module` go before what the network itself would suggest."""
    model, x = small_network().train(), torch.randn(12, 6)
    field = Field.of(model, x, aside=partial(evaluating, model))
    assert torch.equal(field.apart(), small_network().eval()(x))
    assert Field.of(model[0], x, module=model).module is model


def test_logits_are_found_in_what_a_model_returns():
    """As a key or an attribute, as transformers has it: the same value as from the bare tensor."""
    linear, x = nn.Linear(6, 3), torch.randn(12, 6)

    class Returned:
        def __init__(self, logits):
            self.logits = logits

    def value(model):
        return ed.penalty(model, x, generator=torch.Generator().manual_seed(0))

    for wrap in (Returned, lambda logits: {"logits": logits, "loss": None}):
        assert torch.equal(value(lambda x, wrap=wrap: wrap(linear(x))), value(linear))


@pytest.mark.parametrize("labels", [None, torch.tensor([0, 1, 2] * 4)], ids=["free", "anchored"])
def test_penalty_takes_outputs_as_they_are(labels):
    """A model with its own softmax: the value, and the gradient, of the one without."""
    linear, x = nn.Linear(6, 3), torch.randn(12, 6)

    def value_and_gradient(model, **how):
        generator = torch.Generator().manual_seed(0)
        value = ed.penalty(model, x, labels, generator=generator, **how)
        return value, *torch.autograd.grad(value, linear.weight)

    expected = value_and_gradient(linear)
    found = value_and_gradient(nn.Sequential(linear, nn.Softmax(-1)), softmax=False)
    torch.testing.assert_close(found, expected)


def test_penalty_of_a_regression():
    """f(x) = x^2 on a path of length d has c_1 = d (x1 + x2) / 2 and c_2 = d^2 / 8, whatever the
    nodes: written out for all pairs that can be drawn, of which there is one with two ends."""
    x = torch.tensor([[1.0], [4.0]], dtype=torch.float64)
    found = {
        round(ed.penalty(lambda p: p.square(), x, pairs=1, softmax=False, damping=0.0).item(), 9)
        for _ in range(30)
    }
    assert found == {0.0, 3 * 5 / 2 + 2 * 9 / 8}


def test_settings_come_one_by_one_or_as_one_object():
    model, x = small_network().eval(), torch.randn(40, 6)
    settings = {"resolution": 12, "degree": 5, "basis": "legendre"}
    whole = ed.Representation(**settings)

    def penalty(**how):
        return ed.penalty(model, x, generator=torch.Generator().manual_seed(0), **how)

    assert torch.equal(penalty(representation=whole), penalty(**settings))
    result = ed.estimate(model, x, pairs=20, **settings)
    assert result.representation == ed.Representation(sampler=ed.ChebyshevNodes(), **settings)
    with pytest.raises(TypeError, match="resolutoin"):
        ed.estimate(model, x, resolutoin=12)


def test_too_few_nodes_are_warned_of_where_the_damping_decides():
    with pytest.warns(UserWarning, match="4 nodes do not determine the 5 coefficients"):
        ed.Representation(resolution=4, degree=4)


def test_pairs_are_uniform_draws_within_the_batch():
    first, second = sample_pairs(50, 2000, generator=torch.Generator().manual_seed(0))
    for index in (first, second):
        assert 0 <= index.min() <= index.max() < 50
        assert index.float().mean().item() == pytest.approx(24.5, abs=1.7)  # 5 standard errors
    assert (first == second).float().mean().item() == pytest.approx(1 / 50, abs=0.02)


@pytest.mark.parametrize(("size", "count"), [(2, 1), (5, 10), (30, 400), (1000, 400)])
def test_distinct_pairs_are_distinct(size, count):
    first, second = distinct_pairs(size, count, generator=torch.Generator().manual_seed(0))
    assert (first != second).all()
    assert min(first.min(), second.min()) >= 0
    assert max(first.max(), second.max()) < size
    unordered = {tuple(sorted(pair)) for pair in zip(first.tolist(), second.tolist(), strict=True)}
    assert len(unordered) == count


@pytest.mark.parametrize(("size", "count"), [(6, 5), (12, 5)], ids=["many", "few"])
def test_every_distinct_pair_is_as_likely(size, count):
    """Also at either end: a measure sees all examples alike."""
    seen, draws = torch.zeros(size, size), 600
    for seed in range(draws):
        first, second = distinct_pairs(size, count, generator=torch.Generator().manual_seed(seed))
        seen[first, second] += 1
    share = count / (size * (size - 1))  # of ordered pairs
    expected = draws * share * (1 - torch.eye(size))
    assert (seen - expected).abs().max() < 5 * math.sqrt(draws * share)


def test_bad_numbers_of_pairs_are_refused():
    generator = torch.Generator()
    with pytest.raises(ValueError, match=r"at least 2 examples .* DataLoader\(drop_last=True\)"):
        sample_pairs(1, 1)
    for count in (0, 10):
        with pytest.raises(ValueError, match="asked of 3 examples, which form only 9: use pairs b"):
            sample_pairs(3, count)
    with pytest.raises(ValueError, match="4 distinct pairs asked of 3 examples"):
        distinct_pairs(3, 4, generator=generator)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"resolution": 4, "degree": 4, "damping": 0.0}, "without damping"),
        ({"components": 4}, "components=4: 4 centred points span at most 3"),
        ({"basis": "fourier"}, "basis must be one of chebyshev, legendre; got 'fourier'"),
        ({"weighting": "cubic"}, "weighting must be one of"),
        ({"resolution": 1}, "resolution must be >= 2"),
        ({"degree": -1}, "degree must be >= 0"),
        ({"damping": -1.0}, "damping must be >= 0"),
        ({"sampler": "chebyshev"}, r"e.g. ed.ChebyshevNodes\(\); got 'chebyshev'"),
        ({"sampler": ed.ChebyshevNodes}, r"e.g. ed.ChebyshevNodes\(\); got <class"),
    ],
)
def test_impossible_representations_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        ed.Representation(**settings)


def test_a_representation_passes_its_settings_on():
    nodes, values = ed.RandomizedCosine()(uniform(5, 4)), uniform(5, 4, 6).requires_grad_()
    settings = {"components": 2, "detach_pca": True, "damping": 0.1, "basis": "legendre"}
    found = ed.Representation(**settings).coefficients(values, nodes)
    scores = principal_scores(values, 2, detach=True)
    expected = fit(scores, nodes, 3, basis=legendre, damping=0.1)
    assert torch.equal(found, expected)
    gradients = [torch.autograd.grad(c.square().sum(), values)[0] for c in (found, expected)]
    assert torch.equal(*gradients)


def small_network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 5))


def test_estimate_does_not_depend_on_the_memory_budget():
    model, x = small_network(), torch.randn(40, 6)
    settings = {"representation": ed.Representation(resolution=20, degree=6), "pairs": 50}
    whole = ed.estimate(model, x, **settings)
    pieces = ed.estimate(model, x, memory_gib=1e-6, **settings)  # a few points at a time
    torch.testing.assert_close(whole.values, pieces.values, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(whole.spectrum, pieces.spectrum, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [10, 100_000], ids=["many paths", "a part of one"])
def test_no_tensor_is_larger_than_the_memory_budget(size):
    """Neither the points on paths nor what the model makes of them: 200 large inputs do not fit."""
    x, budget = torch.randn(8, size), 2**21
    with _LargestOutput() as largest:
        ed.estimate(lambda p: p[:, :3].tanh(), x, pairs=4, memory_gib=budget / 2**30)
    assert x[0].numel() * 4 <= largest.size <= budget


def test_a_chunk_has_room_for_several_activations_of_each_point():
    """Of which the input is the largest here; the weights, seen transposed, are none."""
    field = ed.Field.of(nn.Linear(4000, 10), torch.randn(2, 4000))
    with torch.no_grad():
        assert points_per_chunk(field, memory_gib=1.0) == 2**30 // (LIVE_TENSORS * 4000 * 4)


def test_estimate_is_the_mean_of_its_paths_and_its_spectrum():
    result = ed.estimate(small_network(), torch.randn(40, 6), pairs=60)
    assert result.representation == PROTOCOL
    assert result.mean == pytest.approx(result.values.mean().item())
    # raw ED is linear in |c|, so the mean spectrum already holds it
    degrees = torch.arange(41, dtype=torch.float32)
    assert (result.spectrum @ degrees).item() == pytest.approx(result.mean, rel=1e-4)
    assert str(result).startswith("ED ")


def test_the_seed_of_an_estimate_chooses_its_paths():
    model, x = small_network(), torch.randn(40, 6)
    one, again, other = (ed.estimate(model, x, pairs=20, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(one.values, again.values)
    assert not torch.equal(one.ends, other.ends)
    generator = torch.Generator().manual_seed(1)
    assert torch.equal(other.ends, torch.stack(distinct_pairs(40, 20, generator=generator)))


def test_standard_error_counts_what_paths_with_a_common_end_share():
    """Written out over all pairs of paths; without common ends it is std / sqrt(paths)."""
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


def test_standard_error_is_the_spread_over_other_examples():
    """Many paths between few examples: other examples give a mean that is as far as it says."""
    x = 4 * torch.rand(40, 16, 3, generator=torch.Generator().manual_seed(0)) - 2
    settings = {"pairs": 100, "resolution": 8, "degree": 4, "softmax": False}
    results = [ed.estimate(lambda v: v.square(), pool, **settings) for pool in x]
    spread = torch.tensor([result.mean for result in results]).std().item()
    told = torch.tensor([result.standard_error for result in results]).square().mean().sqrt()
    alone = torch.stack([result.values.var() / 100 for result in results]).mean().sqrt()
    assert spread > 1.6 * alone  # what the paths alone would claim
    assert told.item() == pytest.approx(spread, rel=0.25)


def test_standard_error_falls_with_the_number_of_paths():
    model, x = small_network(), torch.randn(20_000, 6)
    representation = ed.Representation(resolution=12, degree=6, sampler=ed.ChebyshevNodes())
    few, many = (ed.estimate(model, x, pairs=n, representation=representation) for n in (200, 3200))
    assert few.standard_error / many.standard_error == pytest.approx(4, rel=0.2)  # sqrt(16)


@pytest.mark.parametrize(
    ("arguments", "settings", "message"),
    [
        ((small_network,), {}, "a model with inputs, or a Field"),
        ((lambda: ed.Field.of(small_network(), torch.randn(9, 6)), torch.randn(9, 6)), {}, "Field"),
        ((small_network, torch.randn(9, 6)), {"pairs": 0}, "pairs=0"),
        ((small_network, torch.randn(9, 6)), {"pairs": 2.0}, "pairs must be a whole number"),
        ((lambda: lambda x: x.float(), torch.randint(9, (9, 6))), {}, r"not torch\.int64"),
        ((lambda: lambda x: x.sum(1), torch.randn(9, 6)), {}, r"\(N, C\) are needed"),
        ((small_network, torch.randint(9, (9, 6))), {}, r"help\(ed.Field\)"),
        ((small_network, [torch.randn(9, 6)]), {}, r"not list; from batches: torch.cat"),
        ((lambda: lambda x: (x, x), torch.randn(9, 6)), {}, "returns a tuple without logits"),
        ((lambda: lambda x: {"out": x}, torch.randn(9, 6)), {}, "returns a dict without logits"),
        ((lambda: nn.Linear(6, 1), torch.randn(9, 6)), {}, "softmax of one is 1 everywhere"),
        ((lambda: lambda x: x.mean(0), torch.randn(9, 6, 3)), {}, "each of 1 inputs; the model's"),
        ((lambda: torch.sum, torch.randn(9, 6)), {}, r"are \(\): keep the batch first"),
    ],
)
def test_estimate_refuses_what_it_would_misread(arguments, settings, message):
    make, *inputs = arguments
    with pytest.raises(ValueError, match=message):
        ed.estimate(make(), *inputs, **({"pairs": 2} | settings))


def test_estimate_leaves_the_model_and_the_rng_as_they_were():
    model, x = small_network(), torch.randn(40, 6)
    model.train()
    model[1].eval()  # a mixture of modes must survive
    state = {k: v.clone() for k, v in model.state_dict().items()}
    rng = torch.get_rng_state()
    ed.estimate(model, x, pairs=20)
    assert [m.training for m in model.modules()] == [True, True, False, True, True]
    assert torch.equal(torch.get_rng_state(), rng)
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name


def test_the_module_of_a_field_is_measured_in_eval_mode():
    """Dropout along a path would be read as roughness."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.5), nn.Linear(16, 5)).train()
    x = torch.randn(30, 6)
    fields = [ed.Field.of(model, x), ed.Field.of(model.forward, x)]
    fields.append(ed.Field(lambda p, _: model(p), x, module=model))
    fields.append(ed.Field.of(lambda p: model(p), x, module=model))
    expected = ed.estimate(model, x, pairs=20)
    for field in fields:
        assert torch.equal(ed.estimate(field, pairs=20).values, expected.values)
    assert all(module.training for module in model.modules())
    hidden = ed.estimate(lambda p: model(p), x, pairs=20)
    assert hidden.mean > 2 * expected.mean  # which is why the docstring asks for the module


def test_a_text_classifier_walks_between_word_embeddings():
    """The example of help(ed.Field), on a model in the mode in which transformers trains it."""
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
    assert torch.equal(first.values, second.values)  # no dropout
    assert first.mean > 0
    ed.penalty(field, labels=labels).backward()
    assert bert.get_input_embeddings().weight.grad.abs().sum() > 0


def test_inputs_that_do_not_fit_are_shown_beside_what_torch_says():
    with pytest.raises(RuntimeError, match="same dtype") as caught:
        ed.estimate(nn.Linear(6, 3).half(), torch.randn(9, 6), pairs=2)
    (note,) = caught.value.__notes__
    assert note == (
        "The model got (1, 6), torch.float32 on cpu; its weights are torch.float16 on cpu."
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounded_outputs_are_warned_of(dtype):
    """Rounding is rough, and ED counts it: in bfloat16 this network gains a quarter."""
    model, x = small_network().eval(), torch.randn(30, 6)
    exact = ed.estimate(model, x, pairs=20)
    with pytest.warns(UserWarning, match=rf"{dtype}: their rounding .* measure model\.float\(\)"):
        rounded = ed.estimate(model.to(dtype), x.to(dtype), pairs=20)
    assert rounded.mean > (1.2 if dtype == torch.bfloat16 else 1.0) * exact.mean
    again = ed.estimate(lambda p: model(p.to(dtype)).float(), x.to(dtype), pairs=20)
    torch.testing.assert_close(rounded.values, again.values)  # the softmax rounds no more


def test_a_second_softmax_is_warned_of(recwarn):
    model, x = nn.Sequential(small_network(), nn.Softmax(-1)), torch.randn(30, 6)
    plain = ed.estimate(model[0], x, pairs=20)
    as_they_are = ed.estimate(model, x, pairs=20, softmax=False)
    assert not recwarn
    torch.testing.assert_close(as_they_are.values, plain.values)
    with pytest.warns(UserWarning, match="probabilities already, .* softmax=False"):
        ed.estimate(model, x, pairs=20)


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
    estimate = ed.Estimate(torch.tensor(values), torch.zeros(4), ed.Representation(), ends)
    assert str(estimate) == text


def test_estimate_reports_progress_and_refuses_non_finite_outputs(capsys):
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
