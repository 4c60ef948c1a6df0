"""Algebra of small matrices by elementwise operations, which torch.compile fuses into few kernels.

Batched library calls for matrices of 4 x 4 cost more in kernel launches than in arithmetic.
"""

import torch
from torch import Tensor

LARGEST = 16  # rows and columns of the first factor
MOST_UNKNOWNS = 8  # of a system; beyond this, the unrolled operations take long to compile
LEAST_DAMPING = 1e-10  # below, rounding in float64 can make normal equations indefinite


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Matrix product of (..., n, k) and (..., k, m); elementwise if compiled and a is small."""
    return product(a, b) if _unrolled(a) else a @ b


def product(a: Tensor, b: Tensor) -> Tensor:
    return (a.unsqueeze(-1) * b.unsqueeze(-3)).sum(-2)


def solves(design: Tensor, damping: float) -> bool:
    """Whether to call `solve_positive` for the normal equations of a design matrix (..., n, k)."""
    positive = damping >= LEAST_DAMPING and design.dtype == torch.float64
    return _unrolled(design) and design.shape[-1] <= MOST_UNKNOWNS and positive


def _unrolled(matrix: Tensor) -> bool:
    return torch.compiler.is_compiling() and max(matrix.shape[-2:]) <= LARGEST


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
