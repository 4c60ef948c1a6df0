"""Tests of PCA by Gram matrices against the SVD: values, gradients, degenerate cases."""

import pytest
import torch
from torch import nn

import ed
from ed.core.pca import gram_eigen, principal_scores


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def svd_scores(values, components):
    centred = values - values.mean(-2, keepdim=True)
    u, s, _ = torch.linalg.svd(centred, full_matrices=False)
    return u[..., :components] * s[..., None, :components]


@pytest.mark.parametrize("components", [1, 2, 3])
@pytest.mark.parametrize("outputs", [3, 10, 1000])
def test_scores_equal_those_of_the_svd(components, outputs):
    values = normal(6, 4, outputs)
    ours, theirs = principal_scores(values, components), svd_scores(values, components)
    torch.testing.assert_close(ours.abs(), theirs.abs(), rtol=1e-9, atol=1e-9)  # up to sign


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_measured_scores_equal_those_with_a_gradient(dtype):
    """Also if outputs on a path are constant, vary in one direction, or are not finite."""
    values = normal(6, 30, 5).to(dtype)
    values[0], values[1] = 0.3, values[1, :, :1]
    values[2, 7, 1] = torch.nan
    differentiable = principal_scores(values.clone().requires_grad_(), 5).detach()
    found, tolerance = principal_scores(values, 5), 1e-5 if dtype == torch.float32 else 1e-9
    torch.testing.assert_close(
        found.abs(), differentiable.abs(), rtol=tolerance, atol=tolerance, equal_nan=True
    )
    assert not found[0].any()
    assert not found[1, :, 1:].any()


def test_small_components_of_float32_outputs_are_accurate():
    """Later components of smooth paths are tiny, so the Gram matrix needs float64."""
    nodes = torch.linspace(-1, 1, 200, dtype=torch.float64)[:, None]
    values = (normal(20, 1, 10) * nodes + normal(20, 1, 10, seed=1)).softmax(-1)
    ours, theirs = principal_scores(values.float(), 10), svd_scores(values, 10)
    assert theirs[..., 5:].abs().max() < 1e-4
    torch.testing.assert_close(ours.double().abs(), theirs.abs(), rtol=1e-5, atol=1e-6)


def test_normalised_degree_of_small_components_does_not_depend_on_the_precision():
    """ED_norm ignores the size of a component, so rounding errors in small ones would show."""
    network = nn.Sequential(nn.Linear(50, 256), nn.Tanh(), nn.Linear(256, 1000)).double()
    representation = ed.Representation(200, 40, components=10, weighting="normalised")
    nodes = representation.nodes(20, dtype=torch.float64)
    with torch.no_grad():
        # long enough that all components are far above the rounding error of float32 outputs
        outputs = network(normal(20, 1, 50) + 4 * nodes[..., None] * normal(20, 1, 50, seed=1))

    def degree(dtype):
        coefficients = representation.coefficients(outputs.to(dtype), nodes.to(dtype))
        return representation.degrees(coefficients).mean().item()

    assert degree(torch.float32) == pytest.approx(degree(torch.float64), rel=1e-3)


@pytest.mark.parametrize("scale", [1e-4, 1, 1e4])
@pytest.mark.parametrize("components", [1, 2, 3])
def test_gradient_equals_autograd_through_the_svd(components, scale):
    values = (scale * normal(8, 4, 10)).requires_grad_()
    weight = normal(8, 4, components, seed=1)

    def objective(scores):  # like ED, ignores the arbitrary signs of the columns
        return (weight * scores.square()).sum() + scores.abs().sum()

    (ours,) = torch.autograd.grad(objective(principal_scores(values, components)), values)
    (theirs,) = torch.autograd.grad(objective(svd_scores(values, components)), values)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-8)


def test_detached_scores_have_equal_values_and_constant_directions():
    values = normal(5, 4, 10).requires_grad_()
    moving, held = principal_scores(values, 2), principal_scores(values, 2, detach=True)
    torch.testing.assert_close(moving.abs(), held.abs(), rtol=1e-9, atol=1e-9)
    centred = (values - values.mean(-2, keepdim=True)).detach()
    _, _, directions = torch.linalg.svd(centred, full_matrices=False)
    projected = (values - values.mean(-2, keepdim=True)) @ directions[..., :2, :].mT
    (ours,) = torch.autograd.grad(held.square().sum(), values)
    (expected,) = torch.autograd.grad(projected.square().sum(), values)
    torch.testing.assert_close(ours, expected, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("detach", [False, True])
@pytest.mark.parametrize(
    "values",
    [
        torch.zeros(4, 10),  # a constant path: all eigenvalues are zero
        torch.ones(4, 10),
        torch.linspace(0, 1, 4)[:, None] * torch.ones(10),  # a line: one nonzero eigenvalue
        normal(50, 4, 1) * normal(10),  # lines: rounding makes some eigenvalues negative
        torch.eye(4),  # three equal eigenvalues
        torch.eye(4) * 1e-12,
        torch.eye(4) * 1e12,
    ],
    ids=["zero", "constant", "line", "lines", "equal", "tiny", "huge"],
)
def test_gradients_are_finite_for_equal_or_zero_eigenvalues(values, dtype, detach):
    values = values.detach().to(dtype, copy=True).requires_grad_()
    scores = principal_scores(values, 3, detach=detach)
    scores.abs().sum().backward()
    assert scores.isfinite().all()
    assert values.grad.isfinite().all()


def test_nearly_equal_components_are_not_rotated():
    """Rounding in float32 decides which direction comes first, so its gradient is arbitrary.

    The eigenvalues differ by 4e-6 of their sum. In float64, this difference is reliable.
    """
    directions = torch.tensor([[1, 1, -1, -1], [1, -1, 1, -1]], dtype=torch.float64).mT
    values = directions * torch.tensor([1 + 2e-6, 1 - 2e-6], dtype=torch.float64)
    weight, sizes = normal(4, 2), {}
    for dtype in (torch.float32, torch.float64):
        moved = values.to(dtype, copy=True).requires_grad_()
        (weight.to(dtype) * principal_scores(moved, 2)).sum().backward()
        sizes[dtype] = moved.grad.norm().item()
    assert sizes[torch.float32] < 0.01 * sizes[torch.float64]


def test_scores_of_bf16_values_have_the_precision_of_float32():
    values = normal(5, 4, 20).bfloat16()
    for detach in (False, True):
        found = principal_scores(values, 2, detach=detach)
        assert torch.equal(found, principal_scores(values.float(), 2, detach=detach))


def test_full_rank_scores_keep_distances():
    """With m = r - 1 components, PCA only rotates the path points."""
    values = normal(5, 4, 20)
    torch.testing.assert_close(
        torch.cdist(principal_scores(values, 3), principal_scores(values, 3)),
        torch.cdist(values, values),
    )


def test_eigenvalues_are_in_descending_order():
    eigenvalues, _ = gram_eigen(normal(9, 5, 7) @ normal(9, 7, 5))
    assert (eigenvalues.diff(dim=-1) <= 0).all()


@pytest.mark.parametrize("components", [0, 4, 7])
def test_impossible_numbers_of_components_are_rejected(components):
    with pytest.raises(ValueError, match=f"components={components}"):
        principal_scores(normal(4, 10), components)


@pytest.mark.parametrize(("weighting", "most"), [("raw", 10), ("normalised", 9)])
def test_more_components_than_outputs_are_rejected(weighting, most):
    """Raw ED is a mean over components, so constant ones would shrink it."""
    net, x = torch.nn.Linear(4, 10), normal(12, 4).float()
    settings = {"resolution": 20, "degree": 3, "pairs": 4, "weighting": weighting}
    ed.estimate(net, x, components=most, **settings)
    with pytest.raises(ValueError, match=f"components={most + 1}: .*use at most {most}"):
        ed.estimate(net, x, components=most + 1, **settings)


def test_second_derivatives_raise():
    """Second derivatives would be wrong: the backward pass treats eigenvectors as constants."""
    values = normal(3, 4, 10).requires_grad_()
    scores = principal_scores(values.square(), 2)
    (gradient,) = torch.autograd.grad(scores.abs().sum(), values, create_graph=True)
    with pytest.raises(NotImplementedError, match="components"):
        torch.autograd.grad(gradient.sum(), values)


@pytest.mark.parametrize("detach", [False, True])
@pytest.mark.parametrize("components", [1, 2, 3])
def test_components_beyond_the_rank_of_a_path_are_zero(components, detach):
    """On a straight line, one component has degree 1 and the others are exactly 0."""
    torch.manual_seed(0)
    how = {"components": components, "weighting": "normalised", "detach_pca": detach}
    found = ed.estimate(nn.Linear(8, 10), torch.randn(64, 8), pairs=60, softmax=False, **how)
    assert found.mean == pytest.approx(1 / components, rel=1e-3)


def test_detaching_does_not_change_the_value_of_small_components():
    nodes = torch.linspace(-1, 1, 20)
    values = torch.stack([nodes, 1e-4 * nodes.square()], dim=-1)
    moving, held = (principal_scores(values, 2, detach=detach) for detach in (False, True))
    torch.testing.assert_close(held.abs(), moving.abs(), rtol=1e-4, atol=1e-9)
    assert moving[:, 1].abs().max() > 1e-5


@pytest.mark.parametrize("detach", [False, True])
def test_non_finite_outputs_raise_with_pca(detach):
    def wild(x):  # infinite on some of the paths
        return torch.where(x > 2, torch.inf, x)

    x, how = normal(40, 6), {"components": 3, "softmax": False, "detach_pca": detach}
    with pytest.raises(ValueError, match=r"not finite on \d of 9 paths"):
        ed.estimate(wild, x, pairs=9, resolution=20, degree=5, **how)
    assert ed.penalty(lambda x: x * torch.nan, x, **how).isnan()
