"""Computes the effective degree of a polynomial from its coefficients.

Uses sums instead of matrix products, which autocast would run in bf16 or float16.
"""

import torch
from torch import Tensor


def effective_degree(coefficients: Tensor) -> Tensor:
    r"""ED(P) = \sum_k |c_k| k (Def. effective degree).

    Args:
        coefficients: (..., K + 1), ordered from degree 0.
    Returns:
        (...,). Limiting cases: 0 for a constant, k |c_k| for a pure degree-k term.
    """
    return (coefficients.abs() * _degrees(coefficients)).sum(-1)


def normalised_degree(coefficients: Tensor) -> Tensor:
    r"""ED_norm(P) = \sum_k |c_k| k / \sum_k |c_k|, with the constant term in the denominator.

    Lies between 0 (constant) and K (pure degree K); does not depend on the scale of P. The zero
    polynomial has degree 0. So do polynomials so small that the division would overflow in the
    backward pass, such as softmax outputs of classes with vanishing probability.
    """
    magnitudes = coefficients.abs()
    total = magnitudes.sum(-1)
    info = torch.finfo(total.dtype)
    safe = torch.where(total > info.tiny / info.eps, total, torch.ones_like(total))
    return (magnitudes * _degrees(coefficients)).sum(-1) / safe


def quadratic_degree(coefficients: Tensor) -> Tensor:
    r"""\sum_k c_k^2 k, the quadratic weighting, which performed worse in the paper."""
    return (coefficients.square() * _degrees(coefficients)).sum(-1)


WEIGHTINGS = {
    "raw": effective_degree,
    "normalised": normalised_degree,
    "quadratic": quadratic_degree,
}


def _degrees(coefficients: Tensor) -> Tensor:
    count = coefficients.shape[-1]
    return torch.arange(count, dtype=coefficients.dtype, device=coefficients.device)
