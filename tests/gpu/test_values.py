"""GPU tests of values: results equal those of torch or the CPU, and wrong values are rejected."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import ed
from ed.core.field import Field
from ed.core.fit import fit_matrix
from ed.core.nodes import UniformNodes
from ed.core.pca import gram_eigen, principal_scores
from ed.engine.optimizer import ParallelAdamW

pytestmark = pytest.mark.gpu


def test_parallel_adamw_equals_torch():
    """Results are bitwise equal, including in a CUDA graph and after loading a state."""

    def train(kind, steps: int, state=None) -> tuple[list[torch.Tensor], dict]:
        torch.manual_seed(0)
        weights = [nn.Parameter(torch.randn(7 * n, device="cuda")) for n in range(1, 120)]
        groups = [{"params": weights[:90]}, {"params": weights[90:], "weight_decay": 0.0}]
        rate = torch.tensor(0.01, device="cuda")
        optimizer = kind(groups, lr=rate, weight_decay=0.1, fused=True, capturable=True)
        if state is not None:
            optimizer.load_state_dict(state)
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        stream = torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            optimizer.step()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            optimizer.step()
        for _ in range(steps):
            optimizer.param_groups[0]["lr"].mul_(0.9)
            graph.replay()
        return weights, optimizer.state_dict()

    (first, state), (expected, their_state) = (
        train(kind, 5) for kind in (ParallelAdamW, torch.optim.AdamW)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, expected, strict=True))
    resumed, expected = (
        train(kind, 3, given)[0]
        for kind, given in ((ParallelAdamW, their_state), (torch.optim.AdamW, state))
    )
    assert all(torch.equal(a, b) for a, b in zip(resumed, expected, strict=True))


@pytest.mark.parametrize("resolution", [2, 3, 4, 15, 16, 40])
def test_eigen_decomposition_matches_lapack(resolution):
    values = torch.randn(64, resolution, 50, dtype=torch.float64)
    gram = values @ values.mT
    eigenvalues, vectors = gram_eigen(gram.cuda())
    rebuilt = (vectors * eigenvalues[..., None, :]) @ vectors.mT
    torch.testing.assert_close(rebuilt.cpu(), gram, rtol=1e-5, atol=1e-5 * float(gram.max()))


@pytest.mark.parametrize(("resolution", "degree"), [(4, 3), (15, 14)])
def test_fit_of_ill_conditioned_nodes_on_cuda_equals_cpu(resolution, degree):
    nodes = UniformNodes()(torch.rand(20_000, resolution), True)
    ours, theirs = fit_matrix(nodes.cuda(), degree).cpu(), fit_matrix(nodes, degree)
    error = (ours - theirs).abs().amax((1, 2)) / theirs.abs().amax((1, 2))
    assert error.max() < 1e-6  # solved in float64, rounded to float32


@pytest.mark.parametrize("compiled", [False, True])
def test_scores_on_cuda_equal_cpu(compiled):
    values = torch.randn(32, 4, 100, generator=torch.Generator().manual_seed(0))
    score = torch.compile(principal_scores) if compiled else principal_scores
    results = []
    for device, how in (("cpu", principal_scores), ("cuda", score)):
        given = values.to(device).requires_grad_()
        scores = how(given, 3).abs()
        (gradient,) = torch.autograd.grad(scores.square().sum() + scores.sum(), given)
        results.append([scores.cpu(), gradient.cpu()])
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


WRONG = """
import sys, torch, ed
how, kind = sys.argv[1:]
torch.manual_seed(0)
model, x = torch.nn.Linear(4, 3).cuda(), torch.randn(6, 4, device="cuda")
labels, number = torch.arange(6, device="cuda") % 3, torch.ones(6, 4, device="cuda")
shift = torch.zeros(1, device="cuda")
settings = ed.Representation(sampler=lambda uniform, anchored: uniform + shift)

def penalty():
    field = ed.Field.of(lambda x, number: model(x * number), x, context={"number": number})
    return ed.penalty(field, labels=labels, pairs=36, representation=settings)

if how == "compiled":
    penalty = torch.compile(penalty, fullgraph=True)
value = penalty()
if how == "captured":
    torch.cuda.set_sync_debug_mode("error")
    graph, outer = torch.cuda.CUDAGraph(), penalty
    with torch.cuda.graph(graph):
        value = outer()
    penalty = graph.replay
    penalty()
    torch.cuda.set_sync_debug_mode("default")
print("right", value.isfinite().item(), flush=True)
if kind == "labels":
    labels[2] = -100
elif kind == "sampler":
    shift += 1
else:
    number.copy_(torch.rand(6, 4))
penalty()
torch.cuda.synchronize()
print("not rejected")
"""


@pytest.mark.parametrize("how", ["eager", "compiled", "captured"])
@pytest.mark.parametrize(
    ("kind", "shown"),
    [("labels", "labels: "), ("context", "context 'number'"), ("sampler", "sampler=")],
)
def test_wrong_values_trigger_a_device_assertion(how, kind, shown):
    """Runs in a separate process, because a process cannot use the GPU after an assertion."""
    root = Path(__file__).parents[2]
    run = subprocess.run(
        [sys.executable, "-c", WRONG, how, kind], cwd=root, capture_output=True, text=True
    )
    assert run.stdout.split() == ["right", "True"], run.stderr
    assert run.returncode == 1
    assert shown in run.stderr
    assert "device-side assert" in run.stderr


def test_estimate_rejects_float_contexts_on_the_gpu():
    x, number = torch.randn(9, 4, device="cuda"), torch.rand(9, 1, device="cuda")
    field = Field(lambda p, c: p, x, {"number": number})
    with pytest.raises(ValueError, match="context 'number'"):
        ed.estimate(field, pairs=3)
