"""Tests of the eigensolver against LAPACK, on a GPU or with Triton's interpreter."""

import os

import pytest
import torch

from ed.kernels.eigen import applies, eigen

pytest.importorskip("triton")
CUDA = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
EPS = torch.finfo(torch.float64).eps
needs_kernels = pytest.mark.skipif(
    not (CUDA or INTERPRETED), reason="needs a GPU or Triton's interpreter: see test_interpreted"
)


def decompose(matrices):
    """Returns eigenvalues and eigenvectors on the CPU, after checking the latter."""
    values, vectors = (made.cpu() for made in eigen(matrices.cuda() if CUDA else matrices))
    size = matrices.shape[-1]
    identity = torch.eye(size, dtype=torch.float64).expand_as(matrices)
    torch.testing.assert_close(vectors.mT @ vectors, identity, rtol=0, atol=100 * size * EPS)
    return values, vectors


SIZES = [(2, 12), (3, 2), (4, 12), (4, 2), (6, 2)]
CASES = [(*shape, scale) for shape in SIZES for scale in (1.0, 1e-165, 1e150)]
CASES += [(15, 3, scale) for scale in ((1.0, 1e-165, 1e150) if CUDA else (1.0,))]  # slow on a CPU


@needs_kernels
@pytest.mark.parametrize(("size", "rank", "scale"), CASES)
def test_decompositions_equal_those_of_lapack(size, rank, scale):
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(1, 2, size, rank, generator=generator, dtype=torch.float64)
    points = points * torch.logspace(0, -2, rank, dtype=torch.float64)
    matrices = scale * (points @ points.mT)
    values, vectors = decompose(matrices)
    noise = {"rtol": 0, "atol": 100 * EPS * float(matrices.abs().max())}
    torch.testing.assert_close((vectors * values[..., None, :]) @ vectors.mT, matrices, **noise)
    torch.testing.assert_close(values.sort().values, torch.linalg.eigvalsh(matrices), **noise)


@needs_kernels
def test_equal_and_zero_entries_need_no_special_care():
    ones, identity = torch.ones(4, 4, dtype=torch.float64), torch.eye(4, dtype=torch.float64)
    values, _ = decompose(torch.stack([0 * ones, identity, ones]))
    expected = torch.tensor([[0, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 4]], dtype=torch.float64)
    torch.testing.assert_close(values.sort().values, expected, rtol=0, atol=100 * EPS)
    assert eigen(ones.new_empty(0, 4, 4))[0].shape == (0, 4)


@needs_kernels
def test_nan_stays_in_its_matrix():
    matrices = torch.eye(3, dtype=torch.float64).repeat(2, 1, 1)
    matrices[0, 1, 2] = matrices[0, 2, 1] = torch.nan
    values, _ = eigen(matrices.cuda() if CUDA else matrices)
    assert values.isnan().any(-1).tolist() == [True, False]


@needs_kernels
def test_operator_is_registered_correctly():
    matrices = torch.eye(3, dtype=torch.float64).repeat(2, 1, 1)
    torch.library.opcheck(torch.ops.ed.eigen, (matrices.cuda() if CUDA else matrices,))


def test_other_devices_use_torch():
    assert not applies(torch.zeros(4, 4))


def test_kernel_compiles_for_a_gpu(compiled_for_hopper):
    from ed.kernels.eigen_kernels import eigen as kernel

    pointers = "matrices:d eigenvalues:d vectors:d"
    for size, wide, warps in ((3, 4, 1), (4, 4, 1), (15, 16, 4)):
        sizes = {"EPS": EPS, "SIZE": size, "WIDE": wide, "num_warps": warps}
        compiled_for_hopper(kernel, pointers, sizes, {"sweeps": "i32"})
