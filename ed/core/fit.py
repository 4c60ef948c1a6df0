"""Fits polynomial coefficients to values at nodes by damped least squares.

The coefficients are linear in the values, c = M y with M = (T'T + eps I)^-1 T', and M depends only
on the nodes. One small linear solve per set of nodes suffices, and the gradient with respect to y
is the matrix M' of the paper's Proposition (differentiability of ED).
"""

import torch
from torch import Tensor

from ed.core import small
from ed.core.bases import Basis, basis_name, basis_of, chebyshev
from ed.core.validate import not_negative

DAMPING = 1e-6  # on cosine nodes, 1e-8 to 1e-4 give nearly the same results


def fit_matrix(
    nodes: Tensor, degree: int, *, basis: Basis | str = chebyshev, damping: float = DAMPING
) -> Tensor:
    """M = (T'T + damping I)^-1 T' with T_ik = phi_k(2 alpha_i - 1): (..., r) -> (..., K + 1, r).

    Always solved in float64, as the normal equations square the condition number. In float32, the
    damping is below the rounding error of T'T: with random uniform nodes, r = 15 and K = 14, half
    of the fits were off by 17 % or more, and a few were infinite.
    """
    check_resolution(nodes.shape[-1], degree, damping)
    with torch.autocast(nodes.device.type, enabled=False):
        design = basis_of(basis)(2 * widened(nodes) - 1, degree)
        expected = (*nodes.shape, degree + 1)
        if design.shape != expected:
            raise ValueError(
                f"basis={basis_name(basis)}: returned values of shape {tuple(design.shape)} for "
                f"t of shape {tuple(nodes.shape)} and degree={degree}; return {expected}"
            )
        identity = torch.eye(degree + 1, dtype=design.dtype, device=nodes.device)
        normal = small.matmul(design.mT, design) + damping * identity
        if small.solves(design, damping):
            return small.solve_positive(normal, design.mT).to(nodes.dtype)
        # torch.linalg.solve would sync with the host to check the LU status
        return torch.linalg.solve_ex(normal, design.mT).result.to(nodes.dtype)


def fit(values: Tensor, nodes: Tensor, degree: int, **settings) -> Tensor:
    """Fits one polynomial per output and returns its coefficients.

    Args:
        values: (..., r, C), outputs along the paths.
        nodes: (..., r), or (r,) for nodes shared by all paths.
    Returns:
        (..., C, degree + 1), in at least float32.
    """
    if values.dim() < 2 or values.shape[-2] != nodes.shape[-1]:
        raise ValueError(
            f"values: got {tuple(values.shape)} at nodes {tuple(nodes.shape)}; pass (..., r, C) at "
            "(..., r), e.g. values[:, None] for one output"
        )
    dtype = torch.promote_types(torch.promote_types(values.dtype, nodes.dtype), torch.float32)
    matrix = fit_matrix(widened(nodes.to(dtype)), degree, **settings)
    return applied(matrix, values.to(dtype)).to(dtype).mT


def applied(matrix: Tensor, values: Tensor) -> Tensor:
    """Multiplies matrix (..., K + 1, r) by values (..., r, C) in float64; TF32 is too coarse."""
    with torch.autocast(values.device.type, enabled=False):
        return small.matmul(widened(matrix), widened(values))


def widened(values: Tensor) -> Tensor:
    """Converts values to float64, except on Apple GPUs, which do not support it."""
    return values if values.device.type == "mps" else values.double()


def check_resolution(resolution: int, degree: int, damping: float) -> None:
    """Raises ValueError if, without damping, r nodes cannot determine K + 1 coefficients."""
    not_negative("damping", damping)
    if resolution <= degree and damping == 0:
        raise ValueError(
            f"resolution={resolution}: too few nodes for degree={degree} without damping; use "
            f"resolution >= {degree + 1}, degree <= {resolution - 1}, or damping > 0"
        )
