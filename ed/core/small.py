"""Algebra of small matrices by elementwise operations, which torch.compile fuses into few kernels.

Batched library calls for matrices of 4 x 4 cost more in kernel launches than in arithmetic.
"""

import torch
from torch import Tensor

LARGEST = 16  # rows and columns
MOST_UNKNOWNS = 8  # of a system; beyond this, the unrolled operations take long to compile


def is_small(*matrices: Tensor) -> bool:
    """Whether to use these functions: for small matrices in compiled code."""
    sizes = [size for matrix in matrices for size in matrix.shape[-2:]]
    return torch.compiler.is_compiling() and max(sizes) <= LARGEST


def product(a: Tensor, b: Tensor) -> Tensor:
    """Matrix product: (..., n, k) and (..., k, m) to (..., n, m)."""
    return (a.unsqueeze(-1) * b.unsqueeze(-3)).sum(-2)


def solve_positive(matrix: Tensor, right: Tensor) -> Tensor:
    """Solves positive definite systems (..., n, n) for columns (..., n, m), by Cholesky factors."""
    size = matrix.shape[-1]
    lower: list[list[Tensor]] = [[] for _ in range(size)]
    scale = []  # inverse of the diagonal
    for j in range(size):
        square = matrix[..., j, j] - _dot(lower[j], lower[j])
        scale.append(square.rsqrt())
        for i in range(j + 1, size):
            lower[i].append((matrix[..., i, j] - _dot(lower[i][:j], lower[j])) * scale[j])
    solved: list[Tensor] = []
    for i in range(size):  # forward substitution
        known = _combine(lower[i], solved)
        solved.append((right[..., i, :] - known) * scale[i].unsqueeze(-1))
    for i in reversed(range(size)):  # backward substitution
        known = _combine([lower[k][i] for k in range(i + 1, size)], solved[i + 1 :])
        solved[i] = (solved[i] - known) * scale[i].unsqueeze(-1)
    return torch.stack(solved, dim=-2)


def _dot(a: list[Tensor], b: list[Tensor]) -> Tensor | float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def _combine(weights: list[Tensor], rows: list[Tensor]) -> Tensor | float:
    return sum(w.unsqueeze(-1) * row for w, row in zip(weights, rows, strict=True))
