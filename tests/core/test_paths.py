"""Tests of paths, anchors, pairs and representations against the paper's claims, in float64."""

import itertools
import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import ed
from ed.core.bases import legendre
from ed.core.field import Field
from ed.core.fit import fit
from ed.core.model_state import evaluating
from ed.core.pca import principal_scores
from ed.core.penalty import Paths
from ed.core.representation import anchor, distinct_pairs, sample_pairs, stratified_pairs
from tests.helpers.core import ANY_SPEED, small_network, uniform


@given(st.integers(1, 3), st.integers(1, 5), st.integers(0, 2**31))
@settings(max_examples=40, **ANY_SPEED)
def test_degree_is_preserved_along_random_paths(dimension, degree, seed):
    """Lemma (degree preservation): along a random path, P almost surely keeps its degree."""
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
    assert c[degree + 1 :].max() < 1e-9 * scale  # zero above the degree
    # the leading coefficient is 2 P_D(v) / 4^D, where P_D(v) is almost surely nonzero
    top = powers.sum(-1) == degree
    leading = ((ends[0] - ends[1]) ** powers[top]).prod(-1) @ weights[top]
    expected = abs(leading) * 2 / 4**degree if degree else abs(leading)
    torch.testing.assert_close(c[degree], expected, rtol=1e-6, atol=1e-9 * float(scale))


def test_paths_run_from_the_second_to_the_first():
    x = uniform(5, 3, 4, 4)
    nodes = torch.tensor([0.0, 0.25, 1.0], dtype=torch.float64)
    first, second = torch.tensor([0, 1]), torch.tensor([2, 3])
    along = Field.of(lambda p: p, x).between(first, second, nodes).x.unflatten(0, (2, 3))
    assert torch.equal(along[:, 0], x[second])  # bitwise equal at alpha = 0
    assert torch.equal(along[:, 2], x[first])
    torch.testing.assert_close(along[:, 1], 0.25 * x[first] + 0.75 * x[second])


def test_nodes_are_not_rounded_to_bf16():
    """Features are rounded to bf16, but the nodes must not be."""
    x, alpha = uniform(2, 50).bfloat16(), uniform(4, seed=1).float()
    along = Field.of(nn.Identity(), x).between(torch.tensor([0]), torch.tensor([1]), alpha).x
    exact = torch.lerp(x[1].double(), x[0].double(), alpha.double()[:, None])
    assert torch.equal(along, exact.bfloat16())


def test_contexts_are_merged_inside_a_path_but_not_at_its_ends():
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 1]])
    field = Field(lambda p, c: c["mask"], uniform(2, 4, 8), {"mask": mask})
    alpha = torch.tensor([0.0, 0.1, 0.9, 1.0])
    merged = field.between(torch.tensor([0]), torch.tensor([1]), alpha)()
    assert merged.tolist() == [[1, 0, 0, 1], [1, 1, 0, 1], [1, 1, 0, 1], [1, 1, 0, 0]]


@pytest.mark.parametrize("shape", [(), (1, 4), (6, 4)], ids=str)
def test_a_context_needs_a_row_for_every_point(shape):
    field = Field(lambda p, c: p, uniform(5, 4), {"mask": torch.ones(shape)})
    for use in (lambda: ed.estimate(field, pairs=2), lambda: ed.penalty(field)):
        with pytest.raises(ValueError, match="context 'mask'"):
            use()


def test_additive_masks_are_merged_to_the_union():
    """-inf hides a token; a token visible at either end is visible in between."""
    seen = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 1]]).bool()
    added = torch.zeros(2, 4).masked_fill(~seen, -torch.inf)
    field = Field(lambda p, c: c["mask"], uniform(2, 4, 8), {"mask": added})
    alpha = torch.tensor([0.0, 0.5, 1.0])
    merged = field.between(torch.tensor([0]), torch.tensor([1]), alpha)()
    assert torch.equal(merged == 0, torch.stack([seen[1], seen[0] | seen[1], seen[0]]))
    assert not merged.isnan().any()


def test_joined_field_equals_both_parts():
    """A single pass evaluates both parts, each point with its own context."""
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
    """On a straight line between different one-hot labels, |c_1| = 1/2 in two coordinates."""
    nodes = sampler(uniform(9, 6), anchored=True)
    t1, t2 = (torch.eye(classes, dtype=torch.float64)[i].expand(9, -1) for i in (0, 1))
    inner = nodes[:, 1:-1, None] * t1[:, None] + (1 - nodes[:, 1:-1, None]) * t2[:, None]
    representation = ed.Representation(resolution=6, degree=3, damping=0.0)
    values = anchor(inner, t1, t2)
    degrees = representation.degrees(representation.coefficients(values, nodes))
    torch.testing.assert_close(degrees, torch.full_like(degrees, 1 / classes), rtol=1e-6, atol=0)


@pytest.mark.parametrize("components", [1, 2, 3])
def test_floor_of_anchored_ed_with_pca(components):
    """The line has length sqrt(2) and one principal direction, so ED = (sqrt(2) / 2) / m."""
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


def test_anchoring_follows_the_order_of_algorithm_1():
    values = anchor(torch.zeros(2, 3, 4), torch.full((2, 4), 1.0), torch.full((2, 4), 2.0))
    assert values[:, 0].unique().tolist() == [2.0]  # y_1 = t2 at alpha = 0
    assert values[:, -1].unique().tolist() == [1.0]  # y_r = t1 at alpha = 1


def test_each_end_of_an_anchored_path_has_the_label_of_its_example():
    """Outputs lie on the line between the labels, so every path has degree 0 or 1."""
    field, draw = Field.of(nn.Identity(), torch.eye(3).double()), torch.Generator().manual_seed(0)
    representation = ed.Representation(damping=0.0)
    paths = Paths.draw(field, representation, 9, labels=torch.arange(3), generator=draw)
    first, second = paths.labels
    assert (first != second).any()
    degrees = paths.degrees(paths.field(), softmax=False)
    torch.testing.assert_close(degrees, (first != second).double() / 3, rtol=1e-9, atol=1e-9)


def test_anchored_paths_need_two_fewer_points():
    field, labels = Field.of(nn.Linear(4, 3), torch.randn(8, 4)), torch.randint(3, (8,))
    assert len(Paths.draw(field, ed.Representation(), 5).field.x) == 5 * 4
    assert len(Paths.draw(field, ed.Representation(), 5, labels=labels).field.x) == 5 * 2


def test_field_settings_override_those_of_the_module():
    """Explicit `aside` and `module` take precedence."""
    model, x = small_network().train(), torch.randn(12, 6)
    field = Field.of(model, x, aside=partial(evaluating, model))
    assert torch.equal(field.apart(), small_network().eval()(x))
    assert Field.of(model[0], x, module=model).module is model


def test_too_few_nodes_warn():
    with pytest.warns(UserWarning, match="^resolution=4"):
        ed.Representation(resolution=4, degree=4)


def test_pairs_are_uniform_draws_within_the_batch():
    first, second = sample_pairs(50, 2000, generator=torch.Generator().manual_seed(0))
    for index in (first, second):
        assert 0 <= index.min() <= index.max() < 50
        assert index.float().mean().item() == pytest.approx(24.5, abs=1.7)  # 5 standard errors
    assert (first == second).float().mean().item() == pytest.approx(1 / 50, abs=0.02)


@pytest.mark.parametrize("size", [2, 8, 9])
def test_stratified_pairs_use_every_example_equally_often(size):
    half = size // 2
    for rounds in (1, 2):
        draw = torch.Generator().manual_seed(0)
        first, second = stratified_pairs(size, rounds * half, generator=draw)
        assert (first != second).all()
        for start in range(0, rounds * half, half):
            ends = torch.cat([first[start : start + half], second[start : start + half]])
            assert len(set(ends.tolist())) == 2 * half
    some, _ = stratified_pairs(size, 1, generator=torch.Generator().manual_seed(0))
    assert torch.equal(some, first[:1])  # drawing fewer pairs gives a prefix


def test_all_stratified_pairs_are_equally_likely():
    seen, draws, size = torch.zeros(6, 6), 600, 6
    for seed in range(draws):
        seen[stratified_pairs(size, 3, generator=torch.Generator().manual_seed(seed))] += 1
    share = 3 / (size * (size - 1))  # chance that a draw contains a given ordered pair
    expected = draws * share * (1 - torch.eye(size))
    assert (seen - expected).abs().max() < 5 * math.sqrt(draws * share)


@pytest.mark.parametrize(("size", "count"), [(2, 1), (5, 10), (30, 400), (1000, 400)])
def test_distinct_pairs_are_distinct(size, count):
    first, second = distinct_pairs(size, count, generator=torch.Generator().manual_seed(0))
    assert (first != second).all()
    assert min(first.min(), second.min()) >= 0
    assert max(first.max(), second.max()) < size
    unordered = {tuple(sorted(pair)) for pair in zip(first.tolist(), second.tolist(), strict=True)}
    assert len(unordered) == count


@pytest.mark.parametrize(("size", "count"), [(6, 5), (12, 5)], ids=["many", "few"])
def test_all_distinct_pairs_are_equally_likely(size, count):
    """Both orders of a pair are equally likely."""
    seen, draws = torch.zeros(size, size), 600
    for seed in range(draws):
        first, second = distinct_pairs(size, count, generator=torch.Generator().manual_seed(seed))
        seen[first, second] += 1
    share = count / (size * (size - 1))  # chance that a draw contains a given ordered pair
    expected = draws * share * (1 - torch.eye(size))
    assert (seen - expected).abs().max() < 5 * math.sqrt(draws * share)


def test_a_batch_of_one_is_rejected_by_the_penalty_too():
    with pytest.raises(ValueError, match="drop_last=True"):
        ed.penalty(lambda x: x, torch.randn(1, 3))


def test_wrong_objects_are_rejected():
    x = torch.randn(8, 3)
    with pytest.raises(ValueError, match=r"^generator=0: .*torch\.Generator"):
        ed.penalty(lambda x: x, x, generator=0)
    with pytest.raises(ValueError, match=r"^field: .*ed\.Field\.of"):
        ed.Paths.draw(torch.nn.Linear(3, 2), ed.Representation(), 4)


def test_integer_nodes_of_a_sampler_are_converted():
    def ends(uniform, anchored):
        return torch.arange(uniform.shape[-1], device=uniform.device)

    how = {"sampler": ends, "resolution": 2, "degree": 1, "softmax": False}
    assert ed.estimate(lambda x: x, torch.randn(8, 3), pairs=4, **how).mean > 0


def test_wrong_numbers_of_pairs_are_rejected():
    generator = torch.Generator()
    for draw in (sample_pairs, stratified_pairs):
        with pytest.raises(ValueError, match="drop_last=True"):
            draw(1, 1)
        for count in (0, 10):
            with pytest.raises(ValueError, match=f"^pairs={count}"):
                draw(3, count)
    with pytest.raises(ValueError, match=r"^pairs=4"):
        distinct_pairs(3, 4, generator=generator)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"resolution": 4, "degree": 4, "damping": 0.0}, "^resolution=4"),
        ({"components": 4}, "^components=4"),
        ({"basis": "fourier"}, "^basis=fourier"),
        ({"weighting": "cubic"}, "^weighting=cubic"),
        ({"resolution": 1}, "^resolution=1"),
        ({"degree": -1}, "^degree=-1"),
        ({"damping": -1.0}, "^damping=-1"),
        ({"sampler": "chebyshev"}, "^sampler='chebyshev'"),
        ({"sampler": ed.ChebyshevNodes}, "^sampler=<class"),
    ],
)
def test_impossible_representations_are_rejected(settings, message):
    with pytest.raises(ValueError, match=message):
        ed.Representation(**settings)


def test_samplers_must_return_one_node_per_position():
    class Half:
        def __call__(self, uniform, anchored=False):
            return uniform[..., ::2]

    with pytest.raises(ValueError, match=r"sampler=Half: returned 2 nodes .* resolution=4"):
        ed.Representation(sampler=Half()).nodes(3)


def outside(uniform, anchored=False):
    """A sampler on [-1, 1], which is a common mistake."""
    return 2 * uniform - 1


@pytest.mark.parametrize("anchored", [False, True])
@pytest.mark.parametrize("sampler", [outside, lambda u, anchored: u * torch.nan], ids=["-1", "nan"])
def test_nodes_outside_the_path_are_rejected(sampler, anchored):
    x, labels = torch.randn(8, 3, dtype=torch.float64), torch.arange(8) % 3 if anchored else None
    message = r"^sampler=function: .*\[0, 1\]"
    with pytest.raises(ValueError, match=message):
        ed.penalty(torch.nn.Identity(), x, labels, sampler=sampler)
    with pytest.raises(ValueError, match=message):
        ed.estimate(torch.nn.Identity(), x, pairs=8, resolution=9, degree=3, sampler=sampler)


def test_nodes_may_be_outside_the_path_by_rounding():
    def rounded(uniform, anchored=False):
        return torch.linspace(-1e-6, 1 + 1e-6, uniform.shape[-1], dtype=uniform.dtype)

    assert ed.Representation(sampler=rounded).nodes(3).shape == (4,)


def test_compiled_code_rejects_nodes_outside_the_path_without_a_graph_break():
    x = torch.randn(8, 3, dtype=torch.float64)
    penalty = torch.compile(ed.penalty, backend="aot_eager", fullgraph=True)
    right = ed.Representation(sampler=lambda uniform, anchored: uniform)
    assert penalty(torch.nn.Identity(), x, representation=right) >= 0
    with pytest.raises(RuntimeError, match="sampler="):
        penalty(torch.nn.Identity(), x, representation=ed.Representation(sampler=outside))


def test_a_representation_applies_its_settings():
    nodes, values = ed.RandomizedCosine()(uniform(5, 4)), uniform(5, 4, 6).requires_grad_()
    settings = {"components": 2, "detach_pca": True, "damping": 0.1, "basis": "legendre"}
    found = ed.Representation(**settings).coefficients(values, nodes)
    scores = principal_scores(values, 2, detach=True)
    expected = fit(scores, nodes, 3, basis=legendre, damping=0.1)
    assert torch.equal(found, expected)
    gradients = [torch.autograd.grad(c.square().sum(), values)[0] for c in (found, expected)]
    assert torch.equal(*gradients)
