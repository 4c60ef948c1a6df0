"""Tests of bases, nodes and the fit against closed forms and numpy, in float64."""

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ed.core.bases import BASES, chebyshev, legendre
from ed.core.degree import WEIGHTINGS, effective_degree, normalised_degree, quadratic_degree
from ed.core.fit import fit, fit_matrix
from ed.core.nodes import ChebyshevNodes, RandomizedCosine, StratifiedNodes, UniformNodes
from ed.core.representation import Representation
from scripts.theory import anchored_nodes, straight_line, strongest_answers
from tests.helpers.core import ANY_SPEED, uniform

SAMPLERS = [
    RandomizedCosine(),
    ChebyshevNodes(),
    UniformNodes(),
    UniformNodes(even=True),
    StratifiedNodes(),
]
NUMPY = {"chebyshev": np.polynomial.chebyshev, "legendre": np.polynomial.legendre}
VANDER = {"chebyshev": "chebvander", "legendre": "legvander"}
FIT = {"chebyshev": "chebfit", "legendre": "legfit"}


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("basis", BASES)
def test_basis_equals_numpy(basis):
    t = torch.linspace(-1, 1, 33, dtype=torch.float64)
    expected = getattr(NUMPY[basis], VANDER[basis])(t.numpy(), 40)
    # up to degree 40, each step of a recurrence loses at most a few units in the last place
    torch.testing.assert_close(BASES[basis](t, 40), torch.from_numpy(expected), rtol=0, atol=1e-12)


def test_chebyshev_is_orthogonal_on_its_own_nodes():
    t = 2 * ChebyshevNodes()(uniform(16)) - 1
    design = chebyshev(t, 7)
    expected = torch.diag(torch.tensor([1.0] + [0.5] * 7, dtype=torch.float64))
    torch.testing.assert_close(design.mT @ design / 16, expected, atol=1e-14, rtol=0)


def test_legendre_is_orthogonal_under_gauss_quadrature():
    t, weight = (torch.from_numpy(a) for a in np.polynomial.legendre.leggauss(12))
    design = legendre(t, 7)
    expected = torch.diag(2 / (2 * torch.arange(8, dtype=torch.float64) + 1))
    torch.testing.assert_close(design.mT @ (weight[:, None] * design), expected, atol=1e-14, rtol=0)


def test_chebyshev_nodes_follow_the_equation():
    r = 15
    expected = [(1 - math.cos((2 * i - 1) * math.pi / (2 * r))) / 2 for i in range(1, r + 1)]
    nodes = ChebyshevNodes()(uniform(7, r))
    torch.testing.assert_close(nodes, torch.tensor(expected, dtype=torch.float64))
    assert nodes.shape == (r,)  # shared by all paths, so one factorisation suffices
    torch.testing.assert_close(ChebyshevNodes()(uniform(r), anchored=True), nodes)


def test_normal_matrix_of_fixed_nodes_has_condition_number_two():
    for r, degree in ((4, 3), (15, 7), (15, 14), (200, 40)):
        design = chebyshev(2 * ChebyshevNodes()(uniform(r)) - 1, degree)
        assert torch.linalg.cond(design.mT @ design).item() == pytest.approx(2, rel=1e-10)


@pytest.mark.parametrize("anchored", [False, True])
def test_randomized_cosine_draws_one_angle_per_stratum(anchored):
    r = 6
    nodes = RandomizedCosine()(uniform(500, r), anchored)
    theta = torch.acos(1 - 2 * nodes)
    strata = (theta / (math.pi / r)).floor()
    if anchored:
        assert (nodes[:, 0] == 0).all()
        assert (nodes[:, -1] == 1).all()
        strata, expected = strata[:, 1:-1], torch.arange(1, r - 1)
    else:
        expected = torch.arange(r)
    torch.testing.assert_close(strata, expected.double().expand_as(strata))


def test_randomized_cosine_is_uniform_within_a_stratum():
    theta = torch.acos(1 - 2 * RandomizedCosine()(uniform(20000, 4)))[:, 1] / (math.pi / 4) - 1
    assert theta.mean().item() == pytest.approx(0.5, abs=0.01)  # 5 standard errors
    assert theta.var().item() == pytest.approx(1 / 12, abs=0.003)


def test_uniform_nodes_are_sorted_and_keep_their_ends():
    free, anchored = (UniformNodes()(uniform(100, 8), a) for a in (False, True))
    for nodes in (free, anchored):
        assert (nodes.diff(dim=-1) >= 0).all()
    assert (anchored[:, 0] == 0).all()
    assert (anchored[:, -1] == 1).all()
    assert torch.equal(free, uniform(100, 8).sort().values)
    # only the inner draws are sorted; sorting all r would keep the inner nodes away from the ends
    assert torch.equal(anchored[:, 1:-1], uniform(100, 8)[:, 1:-1].sort().values)
    even = UniformNodes(even=True)(uniform(100, 5))
    assert even.tolist() == [0, 0.25, 0.5, 0.75, 1]  # shared by all paths


@pytest.mark.parametrize("anchored", [False, True])
def test_each_part_has_one_stratified_node(anchored):
    nodes = StratifiedNodes()(uniform(500, 6), anchored)
    inner = nodes[:, 1:-1] if anchored else nodes
    parts = torch.arange(1, 5) if anchored else torch.arange(6)
    torch.testing.assert_close((6 * inner).floor(), parts.double().expand_as(inner))
    assert not anchored or (nodes[:, [0, -1]] == torch.tensor([0, 1])).all()


@pytest.mark.parametrize("sampler", SAMPLERS, ids=repr)
def test_nodes_are_anchored_only_on_request(sampler):
    assert torch.equal(sampler(uniform(3, 6)), sampler(uniform(3, 6), anchored=False))


@pytest.mark.parametrize(
    ("sampler", "r", "mean", "worst"),
    [
        (RandomizedCosine(), 4, 1.2, 4.2),
        (RandomizedCosine(), 15, 3.3, 17),
        (UniformNodes(even=True), 4, 1.0, 1.0),
        (UniformNodes(even=True), 15, 44, 44),
        (StratifiedNodes(), 4, 1.5, 6.4),
        (StratifiedNodes(), 15, 374, 644),
        (UniformNodes(), 4, 12.8, 246),
        (UniformNodes(), 15, 392, 920),
    ],
    ids=repr,
)
def test_sensitivity_of_ed_to_one_output(sampler, r, mean, worst):
    """Checks the largest effect of one inner output on ED, relative to Chebyshev nodes.

    Compares the mean and the 99th percentile over paths, with K = r - 1. The effect is small for
    even and stratified nodes at r = 4 but not at 15, and large for independent draws at both. The
    paper's "uniform" nodes train well at r = 4 and badly at 15, so they may be even or stratified.
    """
    fixed = strongest_answers(anchored_nodes(ChebyshevNodes(), r), r - 1)
    nodes = anchored_nodes(sampler, r, paths=20_000)
    multiples = strongest_answers(nodes, r - 1).flatten() / fixed
    assert multiples.mean().item() == pytest.approx(mean, rel=0.1)
    assert multiples.quantile(0.99).item() == pytest.approx(worst, rel=0.1)


@pytest.mark.parametrize(
    ("r", "damping", "mean", "line"),
    [(4, 1e-2, 2.5, 0.62), (4, 1e-3, 4.2, 0.55), (15, 1e-2, 6.8, 5.4), (15, 1e-3, 18, 4.8)],
)
def test_damping_stabilises_independent_draws_but_biases_lines(r, damping, mean, line):
    """Compares independent draws with Chebyshev nodes of the same r, both damped.

    The paper calls its damping "small". With a damping of 0.01, independent draws are nearly
    harmless at r = 4 but harmful at 15, so they may be the paper's uniform nodes.
    """
    fixed, free = (anchored_nodes(sampler, r) for sampler in (ChebyshevNodes(), UniformNodes()))
    multiples = strongest_answers(free, r - 1, damping) / strongest_answers(fixed, r - 1, damping)
    assert multiples.mean().item() == pytest.approx(mean, rel=0.1)
    assert straight_line(fixed, r - 1, damping).item() == pytest.approx(0.5, rel=0.01)
    assert straight_line(free, r - 1, damping).mean().item() == pytest.approx(line, rel=0.1)


@pytest.mark.parametrize("sampler", SAMPLERS, ids=repr)
@pytest.mark.parametrize("basis", BASES)
@pytest.mark.parametrize("anchored", [False, True])
def test_polynomials_up_to_the_degree_are_recovered_exactly(sampler, basis, anchored):
    degree, r, paths, outputs = 5, 12, 7, 3
    nodes = sampler(uniform(paths, r), anchored)
    coefficients = normal(paths, outputs, degree + 1)
    values = BASES[basis](2 * nodes.expand(paths, r) - 1, degree) @ coefficients.mT
    fitted = fit(values, nodes, degree, basis=BASES[basis], damping=0.0)
    # uniform nodes are ill-conditioned (up to 1e7 here), the others are not
    tolerance = 1e-6 if isinstance(sampler, UniformNodes) else 1e-10
    torch.testing.assert_close(fitted, coefficients, rtol=0, atol=tolerance)


@pytest.mark.parametrize(("r", "degree"), [(4, 3), (15, 14)])
@pytest.mark.parametrize("anchored", [False, True])
def test_close_float32_nodes_are_fitted_correctly(r, degree, anchored):
    """If two random nodes nearly coincide, T'T + eps I is singular in float32."""
    nodes = UniformNodes()(uniform(20_000, r).float(), anchored)
    design = np.polynomial.chebyshev.chebvander(2 * nodes.double().numpy() - 1, degree)
    transposed = design.transpose(0, 2, 1)
    normal = transposed @ design + 1e-6 * np.eye(degree + 1)
    expected = torch.from_numpy(np.linalg.solve(normal, transposed))
    error = (fit_matrix(nodes, degree, damping=1e-6) - expected).abs().amax((1, 2))
    # relative to the largest entry; float32 rounding errors are about 1e-7
    assert (error / expected.abs().amax((1, 2))).max() < 3e-7


@pytest.mark.parametrize("basis", BASES)
def test_least_squares_equals_numpy(basis):
    nodes, values = RandomizedCosine()(uniform(5, 20)), normal(5, 20, 4)
    ours = fit(values, nodes, 6, basis=BASES[basis], damping=0.0)
    for path in range(5):
        t = 2 * nodes[path].numpy() - 1
        theirs = getattr(NUMPY[basis], FIT[basis])(t, values[path].numpy(), 6)
        torch.testing.assert_close(ours[path].mT, torch.from_numpy(theirs), rtol=0, atol=1e-11)


def test_shared_nodes_equal_nodes_repeated_for_each_path():
    nodes, values = ChebyshevNodes()(uniform(9)), normal(3, 2, 9, 4)
    torch.testing.assert_close(fit(values, nodes, 5), fit(values, nodes.expand(3, 2, 9), 5))


def test_damped_fit_solves_the_damped_normal_equations():
    nodes, values, damping = RandomizedCosine()(uniform(8)), normal(8, 3), 0.1
    design = chebyshev(2 * nodes - 1, 5)
    c = fit(values, nodes, 5, damping=damping).mT
    left = design.mT @ (design @ c) + damping * c
    torch.testing.assert_close(left, design.mT @ values, rtol=0, atol=1e-12)


@pytest.mark.parametrize("damping", [0.0, 1e-3])
def test_gradient_of_ed_equals_the_closed_form(damping):
    """Checks the paper's proposition on the differentiability of ED, with and without damping."""
    nodes, values = RandomizedCosine()(uniform(6, 7)), normal(6, 7, 1).requires_grad_()
    coefficients = fit(values, nodes, 4, damping=damping)
    (gradient,) = torch.autograd.grad(effective_degree(coefficients).sum(), values)
    design = chebyshev(2 * nodes - 1, 4)
    inverse = torch.linalg.inv(design.mT @ design + damping * torch.eye(5, dtype=torch.float64))
    weighted = coefficients.detach().sign() * torch.arange(5, dtype=torch.float64)
    torch.testing.assert_close(gradient, design @ inverse @ weighted.mT, rtol=0, atol=1e-11)


@pytest.mark.parametrize("basis", BASES)
def test_degree_zero_fits_the_mean(basis):
    nodes, values = RandomizedCosine()(uniform(3, 6)), normal(3, 6, 2)
    representation = Representation(resolution=6, degree=0, basis=basis, damping=0.0)
    found = representation.coefficients(values, nodes)
    torch.testing.assert_close(found, values.mean(-2)[..., None], rtol=0, atol=1e-12)
    assert representation.degrees(found).tolist() == [0, 0, 0]


def test_nodes_may_require_gradients():
    nodes, values = RandomizedCosine()(uniform(2, 6)).requires_grad_(), normal(2, 6, 2)
    assert torch.autograd.gradcheck(lambda n, v: fit(v, n, 3), (nodes, values.requires_grad_()))


def test_degrees_in_limiting_cases():
    c = torch.zeros(4, 6, dtype=torch.float64)
    c[0, 0], c[1, 3], c[2, 1], c[2, 2] = 5, -2, 1, -1
    assert effective_degree(c).tolist() == [0, 6, 3, 0]
    assert normalised_degree(c).tolist() == [0, 3, 1.5, 0]  # the zero polynomial has degree 0
    assert quadratic_degree(c).tolist() == [0, 12, 3, 0]


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_every_polynomial_has_its_own_degree(weighting):
    degree, c = WEIGHTINGS[weighting], normal(3, 4, 6)
    expected = torch.stack([degree(one) for one in c.flatten(0, 1)]).view(3, 4)
    torch.testing.assert_close(degree(c), expected, rtol=1e-12, atol=0)
    representation = Representation(weighting=weighting)
    torch.testing.assert_close(representation.degrees(c), expected.mean(1), rtol=1e-12, atol=0)


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=8), st.floats(0.1, 10))
@example([0.0, 0.0, 0.0, 1.35], 1.0)  # 3 x 1.35 / 1.35 rounds to slightly more than 3
@settings(max_examples=50, **ANY_SPEED)
def test_ed_is_homogeneous_and_ed_norm_invariant(coefficients, scale):
    c = torch.tensor(coefficients, dtype=torch.float64)
    torch.testing.assert_close(effective_degree(scale * c), scale * effective_degree(c))
    if c.abs().sum() > 1e-3:
        torch.testing.assert_close(normalised_degree(scale * c), normalised_degree(c))
        assert 0 <= normalised_degree(c) <= (len(c) - 1) * (1 + 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_gradient_of_ed_norm_is_finite_for_subnormal_numbers(dtype):
    lowest = math.log10(torch.finfo(dtype).smallest_normal)
    # ends with subnormal numbers and 0
    scale = torch.logspace(0, lowest - 6, 50, dtype=torch.float64)
    c = (scale[:, None] * torch.tensor([1.0, 2.0, -1.0])).to(dtype).requires_grad_()
    degree = normalised_degree(c)
    (gradient,) = torch.autograd.grad(degree.sum(), c)
    assert gradient.isfinite().all()
    usual = scale > 1e8 * torch.finfo(dtype).smallest_normal / torch.finfo(dtype).eps
    torch.testing.assert_close(degree[usual], torch.ones_like(degree[usual]))


def test_bf16_values_are_fitted_in_float32_under_autocast():
    nodes, values = RandomizedCosine()(uniform(3, 6).float()), normal(3, 6, 4).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        inside = fit(values, nodes, 3)
    assert inside.dtype == torch.float32
    torch.testing.assert_close(inside, fit(values.float(), nodes, 3), rtol=0, atol=0)


def test_float32_values_are_rounded_once_at_the_end():
    """The fit runs in float64, so it does not depend on TF32 on a GPU."""
    nodes, values = RandomizedCosine()(uniform(3, 60).float()), normal(3, 60, 4).float()
    expected = fit(values.double(), nodes.double(), 20).float()
    torch.testing.assert_close(fit(values, nodes, 20), expected, rtol=0, atol=0)


def test_too_few_nodes_without_damping_are_rejected():
    with pytest.raises(ValueError, match=r"^resolution=4"):
        fit_matrix(uniform(4), 4, damping=0.0)
    assert fit_matrix(uniform(4), 4, damping=1e-6).isfinite().all()  # allowed with damping


@pytest.mark.parametrize("shape", [(8,), (7, 1), (2, 7, 3)])
def test_values_must_have_one_row_per_node(shape):
    with pytest.raises(ValueError, match=r"^values: "):
        fit(torch.ones(shape), torch.linspace(0, 1, 8), 3)


def test_a_basis_can_be_named():
    values, nodes = torch.randn(6, 2), torch.linspace(0, 1, 6)
    named = fit(values, nodes, 3, basis="legendre")
    assert torch.equal(named, fit(values, nodes, 3, basis=BASES["legendre"]))
    with pytest.raises(ValueError, match=r"^basis=fourier: use chebyshev or legendre"):
        fit(values, nodes, 3, basis="fourier")


def test_a_basis_of_your_own_may_be_a_function():
    def powers(t, degree):
        return torch.stack([t**k for k in range(degree + 1)], dim=-1)

    nodes = ChebyshevNodes()(uniform(5))
    values = (2 * nodes - 1).square()[:, None]
    own = Representation(resolution=5, degree=3, basis=powers, damping=0.0)
    square = torch.tensor([[0.0, 0.0, 1.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(own.coefficients(values, nodes), square, rtol=0, atol=1e-12)


def test_a_basis_must_return_one_value_per_degree():
    def first_only(t, degree):
        return torch.ones_like(t)

    with pytest.raises(ValueError, match=r"^basis=first_only: .*\(6,\).*\(6, 4\)"):
        fit(torch.randn(6, 2), torch.linspace(0, 1, 6), 3, basis=first_only)
