"""Tests of the algebra of small matrices against torch.linalg, and in compiled code."""

import functools

import pytest
import torch

import ed
from ed.core import small
from ed.core.penalty import Paths
from ed.regularizers.ed import EDRegularizer
from tests.helpers.core import uniform


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_solutions_equal_those_of_torch(size):
    design, right = uniform(5, 12, size), uniform(5, size, 7)
    normal = small.product(design.mT, design)
    torch.testing.assert_close(normal, design.mT @ design)
    found = small.solve_positive(normal, right)
    residual = (normal @ found - right).norm() / right.norm()
    condition = torch.linalg.cond(normal).max()
    assert residual <= 100 * torch.finfo(torch.float64).eps * condition


@torch._dynamo.config.patch(error_on_recompile=True)
@pytest.mark.parametrize(
    "settings",
    [
        {}, {"resolution": 3, "degree": 2}, {"components": 3}, {"basis": "legendre"},
        {"resolution": 15, "degree": 7}, {"resolution": 12, "degree": 10}, {"damping": 0.0},
        {"components": 3, "detach_pca": True}, {"anchored": False},
    ],
    ids=str,
)  # fmt: skip
def test_compiled_penalty_equals_the_eager_one(settings, monkeypatch):
    """It has no graph breaks, and other paths in later steps do not compile it again."""
    how = {"backend": "aot_eager", "fullgraph": True}
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, **how))
    torch.compiler.reset()
    torch.manual_seed(0)
    model, regularizer = torch.nn.Linear(12, 10), EDRegularizer(**settings)
    eager = regularizer.mean_degree
    regularizer.compile(torch.nn.Identity())
    for _ in range(2):
        x, labels = torch.randn(16, 12), torch.randint(10, (16,))
        labels = labels if regularizer.anchored else None
        paths = Paths.draw(ed.Field.of(model, x), regularizer.representation, 8, labels=labels)
        outputs = paths.field.apart()
        found, expected = (f(paths, outputs) for f in (regularizer.mean_degree, eager))
        torch.testing.assert_close(found, expected)
        grads = (torch.autograd.grad(v, model.weight, retain_graph=True) for v in (found, expected))
        torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-6)
