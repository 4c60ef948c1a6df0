"""Effective degree: how simple a polynomial is, read off its coefficients."""

import torch
from torch import Tensor


def effective_degree(coefficients: Tensor) -> Tensor:
    r"""ED(P) = \sum_k |c_k| k (Def. effective degree).

    Args:
        coefficients: (..., K + 1), ordered from degree 0.
    Returns:
        (...,). Limiting cases: 0 for a constant, k |c_k| for a pure degree-k term.
    """
    return coefficients.abs() @ _degrees(coefficients)


def normalised_degree(coefficients: Tensor) -> Tensor:
    r"""ED_norm(P) = \sum_k |c_k| k / \sum_k |c_k|, the constant term included below.

    Between 0 (constant) and K (pure degree K); unchanged when the polynomial is scaled. The zero
    polynomial has degree 0.
    """
    magnitudes = coefficients.abs()
    total = magnitudes.sum(-1)
    safe = torch.where(total > 0, total, torch.ones_like(total))
    return (magnitudes @ _degrees(coefficients)) / safe


def quadratic_degree(coefficients: Tensor) -> Tensor:
    r"""\sum_k c_k^2 k, the quadratic weighting that the paper tried and found weaker."""
    return coefficients.square() @ _degrees(coefficients)


WEIGHTINGS = {
    "raw": effective_degree,
    "normalised": normalised_degree,
    "quadratic": quadratic_degree,
}


def _degrees(coefficients: Tensor) -> Tensor:
    count = coefficients.shape[-1]
    return torch.arange(count, dtype=coefficients.dtype, device=coefficients.device)
