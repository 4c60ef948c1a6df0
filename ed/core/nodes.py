"""Samplers place nodes alpha in [0, 1] along a path, from x2 (alpha = 0) to x1 (alpha = 1).

A sampler maps uniform draws (..., r) to nodes. It is a pure function, so it works with
`torch.compile` and is reproducible. Samplers that ignore the draws return nodes (r,), which all
paths share.

With `anchored=True` (label-anchored ED), labels provide the values at the two end nodes, and the
network is evaluated only at the r - 2 nodes in between.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ed.core.device_checks import assert_on_device, readable

ROUNDING = 1e-4  # a node may be outside [0, 1] by this; ample for float32


class Sampler(Protocol):
    """Maps uniform draws (..., r) to nodes in [0, 1]: (..., r), or (r,) if all paths share them."""

    def __call__(self, uniform: Tensor, anchored: bool = False) -> Tensor: ...


@dataclass(frozen=True)
class RandomizedCosine:
    """theta_i ~ U[(i-1) pi/r, i pi/r], alpha_i = (1 - cos theta_i) / 2 (Def. randomized cosine).

    Anchored: theta_1 = 0 and theta_r = pi; strata 2..r-1 are unchanged.
    """

    def __call__(self, uniform: Tensor, anchored: bool = False) -> Tensor:
        nodes = _cosine_map(_one_per_stratum(uniform) * (math.pi / uniform.shape[-1]))
        return _with_ends(nodes[..., 1:-1]) if anchored else nodes


@dataclass(frozen=True)
class ChebyshevNodes:
    """alpha_i = (1 - cos((2i - 1) pi / 2r)) / 2, the same for all paths (Eq. cheb_nodes).

    Anchored: the nodes stay the same, as in the paper; labels provide the values at the first and
    the last (0.003 and 0.997 for r = 15).
    """

    def __call__(self, uniform: Tensor, anchored: bool = False) -> Tensor:
        resolution = uniform.shape[-1]
        index = torch.arange(resolution, dtype=uniform.dtype, device=uniform.device)
        return _cosine_map((2 * index + 1) * (math.pi / (2 * resolution)))


@dataclass(frozen=True)
class UniformNodes:
    """alpha ~ U[0, 1], sorted; with `even=True`, equally spaced from 0 to 1 on every path.

    Anchored: the first node is 0 and the last is 1. Avoid random nodes in training if K = r - 1:
    two nodes may nearly coincide, and ED is on average about 12 (r = 4) or 390 (r = 15) times as
    sensitive to an output as with Chebyshev nodes. With even nodes, it is 44 times as sensitive at
    r = 15, and equally sensitive at r = 4 (scripts/theory.py).
    """

    even: bool = False

    def __call__(self, uniform: Tensor, anchored: bool = False) -> Tensor:
        resolution = uniform.shape[-1]
        if self.even:
            return torch.linspace(0, 1, resolution, dtype=uniform.dtype, device=uniform.device)
        if not anchored:
            return uniform.sort(dim=-1).values
        return _with_ends(uniform[..., 1:-1].sort(dim=-1).values)


@dataclass(frozen=True)
class StratifiedNodes:
    """alpha_i ~ U[(i-1)/r, i/r]: randomized cosine sampling without the cosine.

    Anchored: the first node is 0 and the last is 1; strata 2..r-1 are unchanged. Compared with
    randomized cosine nodes at K = r - 1, ED is 1.2 times as sensitive to an output for r = 4, and
    over 100 times as sensitive for r = 15 (scripts/theory.py).
    """

    def __call__(self, uniform: Tensor, anchored: bool = False) -> Tensor:
        nodes = _one_per_stratum(uniform) / uniform.shape[-1]
        return _with_ends(nodes[..., 1:-1]) if anchored else nodes


OWN = (RandomizedCosine, ChebyshevNodes, UniformNodes, StratifiedNodes)


def check_nodes(sampler: Sampler, nodes: Tensor) -> None:
    """Raises ValueError if a user's own sampler returns nodes outside [0, 1].

    CUDA devices and compiled code use `assert_on_device` instead, which avoids a host sync.
    """
    if type(sampler) in OWN:
        return
    inside = ((nodes >= -ROUNDING) & (nodes <= 1 + ROUNDING)).all()
    message = f"sampler={type(sampler).__name__}: nodes must be in [0, 1]"
    if not readable(nodes):
        assert_on_device(inside, message)
    elif not inside:
        low, high = nodes.min().item(), nodes.max().item()
        raise ValueError(f"{message}, but range from {low:.3g} to {high:.3g}; change the sampler")


def _one_per_stratum(uniform: Tensor) -> Tensor:
    """Shifts the i-th of r draws into [i - 1, i)."""
    return torch.arange(uniform.shape[-1], dtype=uniform.dtype, device=uniform.device) + uniform


def _cosine_map(theta: Tensor) -> Tensor:
    return (1 - torch.cos(theta)) / 2


def _with_ends(inner: Tensor) -> Tensor:
    """Adds the end nodes 0 and 1: (..., r - 2) -> (..., r)."""
    zero = inner.new_zeros(*inner.shape[:-1], 1)
    return torch.cat([zero, inner, zero + 1], dim=-1)
