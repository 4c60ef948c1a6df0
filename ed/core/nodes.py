"""Where a path is sampled: nodes alpha in [0, 1], rising from x2 (alpha = 0) to x1 (alpha = 1).

A sampler turns uniform draws of shape (..., r) into nodes. It is pure: all randomness arrives in
the argument, so it traces under `torch.compile` (which cannot see a `torch.Generator`) and a seeded
caller gets the same nodes again. Samplers whose nodes do not depend on the draws return the shape
(r,), and every path then shares one fit.

`anchored=True` is the form for label-anchored ED: the end nodes are where the labels stand, so only
the r - 2 nodes between them are the network's.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Sampler(Protocol):
    """Uniform draws (..., r) in [0, 1) -> nodes (..., r), or (r,) where all paths share them."""

    def __call__(self, uniform: Tensor, anchored: bool = False) -> Tensor: ...


@dataclass(frozen=True)
class RandomizedCosine:
    """theta_i ~ U[(i-1) pi/r, i pi/r], alpha_i = (1 - cos theta_i) / 2 (Def. randomized cosine).

    Anchored: theta_1 = 0 and theta_r = pi; strata 2..r-1 keep their places.
    """

    def __call__(self, uniform: Tensor, anchored: bool = False) -> Tensor:
        nodes = _cosine_map(_one_per_stratum(uniform) * (math.pi / uniform.shape[-1]))
        return _with_ends(nodes[..., 1:-1]) if anchored else nodes


@dataclass(frozen=True)
class ChebyshevNodes:
    """alpha_i = (1 - cos((2i - 1) pi / 2r)) / 2, the same for all paths (Eq. cheb_nodes).

    Anchored: the nodes stay where they are and the labels stand at the first and the last one
    (0.003 and 0.997 for r = 15), as the paper leaves the equation unchanged.
    """

    def __call__(self, uniform: Tensor, anchored: bool = False) -> Tensor:
        resolution = uniform.shape[-1]
        index = torch.arange(resolution, dtype=uniform.dtype, device=uniform.device)
        return _cosine_map((2 * index + 1) * (math.pi / (2 * resolution)))


@dataclass(frozen=True)
class UniformNodes:
    """alpha ~ U[0, 1], sorted; `even=True`: equally spaced, ends included, the same for all paths.

    Anchored: the first node is 0 and the last is 1. Where draws nearly meet and K = r - 1, ED
    answers an output hundreds of times as strongly as at Chebyshev nodes, so they are poor to train
    with; 15 even nodes answer 44 times as strongly, 4 just as Chebyshev's (scripts/theory.py).
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

    Anchored: the first node is 0 and the last is 1; strata 2..r-1 keep their places. With K = r - 1
    ED answers an output at 4 of them about as at randomized cosine nodes, and at 15 over 100 times
    as strongly (scripts/theory.py).
    """

    def __call__(self, uniform: Tensor, anchored: bool = False) -> Tensor:
        nodes = _one_per_stratum(uniform) / uniform.shape[-1]
        return _with_ends(nodes[..., 1:-1]) if anchored else nodes


def _one_per_stratum(uniform: Tensor) -> Tensor:
    """The i-th of r draws, moved to between i - 1 and i."""
    return torch.arange(uniform.shape[-1], dtype=uniform.dtype, device=uniform.device) + uniform


def _cosine_map(theta: Tensor) -> Tensor:
    return (1 - torch.cos(theta)) / 2


def _with_ends(inner: Tensor) -> Tensor:
    """0, the inner nodes, 1: (..., r - 2) -> (..., r)."""
    zero = inner.new_zeros(*inner.shape[:-1], 1)
    return torch.cat([zero, inner, zero + 1], dim=-1)
