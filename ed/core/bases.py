"""Orthogonal polynomial bases on [-1, 1], evaluated by their three-term recurrences."""

from collections.abc import Callable

import torch
from torch import Tensor

from ed.core.validate import choice, count

Basis = Callable[[Tensor, int], Tensor]


def chebyshev(t: Tensor, degree: int) -> Tensor:
    """Chebyshev polynomials T_0..T_degree at t in [-1, 1]: (...,) -> (..., degree + 1)."""
    count("degree", degree, least=0)
    columns = [torch.ones_like(t), t]
    for _ in range(degree - 1):  # unlike cos(k arccos t), differentiable at t = +-1
        columns.append(2 * t * columns[-1] - columns[-2])
    return torch.stack(columns[: degree + 1], dim=-1)


def legendre(t: Tensor, degree: int) -> Tensor:
    """Legendre polynomials P_0..P_degree at t in [-1, 1]: (...,) -> (..., degree + 1)."""
    count("degree", degree, least=0)
    columns = [torch.ones_like(t), t]
    for k in range(1, degree):  # Bonnet: (k + 1) P_{k+1} = (2k + 1) t P_k - k P_{k-1}
        columns.append(((2 * k + 1) * t * columns[-1] - k * columns[-2]) / (k + 1))
    return torch.stack(columns[: degree + 1], dim=-1)


BASES: dict[str, Basis] = {"chebyshev": chebyshev, "legendre": legendre}


def basis_of(basis: Basis | str) -> Basis:
    """Returns the basis with this name, or `basis` itself if it is a function."""
    if callable(basis) and not isinstance(basis, type):
        return basis
    return BASES[choice("basis", basis, BASES)]


def basis_name(basis: Basis | str) -> str:
    return basis if isinstance(basis, str) else getattr(basis, "__name__", type(basis).__name__)
