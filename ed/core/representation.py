"""Polynomial representation of a path: from outputs to coefficients to effective degree."""

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ed.core.bases import Basis, basis_of
from ed.core.caller import warn
from ed.core.degree import WEIGHTINGS
from ed.core.fit import DAMPING, check_resolution, fit
from ed.core.nodes import RandomizedCosine, Sampler, check_nodes
from ed.core.outputs import check_outputs
from ed.core.pca import check_components, check_directions, principal_scores
from ed.core.validate import choice, count

SCALES = ("paper", "classes")


@dataclass(frozen=True)
class Representation:
    """Settings of the polynomial fit. Defaults to the paper's efficiency setting.

    Attributes:
        resolution: r, nodes per path.
        degree: K, maximum polynomial degree.
        sampler: places the nodes.
        basis: "chebyshev", "legendre", or a function of t in [-1, 1], (...), and K that returns the
            values of polynomials of degree 0 to K, (..., K + 1).
        components: m, number of principal components to fit; None fits all outputs.
        weighting: "raw" (ED), "normalised" (ED_norm) or "quadratic".
        damping: epsilon of the damped normal equations.
        detach_pca: treat the principal directions as constants in the backward pass.
        scale: unit of raw ED. "paper" is the mean over outputs, which falls as 1 / C with the
            number of classes C. "classes" multiplies it by C, or by sqrt(2) m with m components, so
            a straight line from one class to another has ED 1 for any C and m. The paper's
            strength lambda becomes lambda / C, or lambda / (sqrt(2) m) with PCA:

            | paper                          | C    | m | lambda   | in "classes"  |
            |--------------------------------|------|---|----------|---------------|
            | CIFAR-10, efficiency           | 10   | - | 7        | 0.7           |
            | CIFAR-10, performance          | 10   | - | 2        | 0.2           |
            | ImageNet from scratch          | 1000 | 3 | 3        | 0.71          |
            | ImageNet, fine-tuned CLIP      | 1000 | 3 | 2        | 0.47          |
            | GLUE: RTE and MRPC; CoLA       | 2    | - | 0.5; 0.3 | 0.25; 0.15    |
            | Procgen                        | 15   | 3 | 0.01     | 0.0024        |
    """

    resolution: int = 4
    degree: int = 3
    sampler: Sampler = field(default_factory=RandomizedCosine)
    basis: Basis | str = "chebyshev"
    components: int | None = None
    weighting: str = "raw"
    damping: float = DAMPING
    detach_pca: bool = False
    scale: str = "paper"

    def __post_init__(self) -> None:
        basis_of(self.basis)  # raises on unknown names
        choice("scale", self.scale, SCALES)
        choice("detach_pca", self.detach_pca, (True, False))
        if self.scale != "paper" and self.weighting != "raw":
            raise ValueError(f"scale={self.scale}: weighting={self.weighting} requires scale=paper")
        choice("weighting", self.weighting, WEIGHTINGS)
        count("resolution", self.resolution, least=2)
        count("degree", self.degree, least=0)
        if not callable(self.sampler) or isinstance(self.sampler, type):
            raise ValueError(
                f"sampler={self.sampler!r}: must be an instance, e.g. ed.ChebyshevNodes()"
            )
        check_resolution(self.resolution, self.degree, self.damping)
        if self.resolution <= self.degree:
            warn(
                f"resolution={self.resolution}: too few nodes for the {self.degree + 1} "
                f"coefficients of degree={self.degree}, so only damping determines the fit; use "
                f"resolution >= {self.degree + 1}"
            )
        if self.components is not None:
            check_components(self.components, self.resolution)

    def nodes(
        self,
        paths: int,
        *,
        anchored: bool = False,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """Draws nodes for `paths` paths: (paths, r), or (r,) if all paths share them."""
        uniform = torch.rand(
            paths, self.resolution, device=device, dtype=dtype, **_drawn_from(generator)
        )
        nodes = self.sampler(uniform, anchored)
        if nodes.shape[-1] != self.resolution:
            raise ValueError(
                f"sampler={type(self.sampler).__name__}: returned {nodes.shape[-1]} nodes per path "
                f"instead of resolution={self.resolution}"
            )
        check_nodes(self.sampler, nodes)
        return nodes if nodes.is_floating_point() else nodes.to(dtype)

    def coefficients(self, values: Tensor, nodes: Tensor) -> Tensor:
        """Fits values (..., r, C) at nodes (..., r) or (r,): (..., C or m, K + 1)."""
        if self.components is not None:
            values = principal_scores(values, self.components, detach=self.detach_pca)
        return fit(values, nodes, self.degree, basis=self.basis, damping=self.damping)

    def degrees(self, coefficients: Tensor) -> Tensor:
        """Returns each path's effective degree, a mean over outputs: (..., C, K + 1) -> (...,)."""
        degrees = WEIGHTINGS[self.weighting](coefficients).mean(-1)
        if self.scale == "paper":
            return degrees
        outputs = coefficients.shape[-2]
        return degrees * (outputs if self.components is None else math.sqrt(2) * outputs)

    def check(self, outputs: Tensor, *, softmax: bool, class_dim: int | None = None) -> None:
        """Raises ValueError if outputs do not match the settings."""
        check_outputs(outputs, softmax=softmax, class_dim=class_dim)
        classes = outputs.shape[1 if class_dim is None else class_dim]
        # raw ED may have one component per class, although the last only adds 0
        check_directions(
            self.components, classes, softmax=softmax and self.weighting == "normalised"
        )


def changed(representation: Representation, **changes) -> Representation:
    """Returns the representation with other settings."""
    if not isinstance(representation, Representation):
        raise ValueError(
            f"representation={representation!r}: must be an ed.Representation, e.g. "
            "ed.Representation(resolution=15, degree=7)"
        )
    return replace(representation, **changes) if changes else representation


def over_positions(values: Tensor, dims: int, where: Tensor | None = None) -> Tensor:
    """Averages (P, S, ...) over positions; values with only `dims` dimensions have none.

    With `where` (P, S), averages (P, S) over these positions; paths without any give 0.
    """
    if values.dim() <= dims:
        return values
    if where is None:
        return values.mean(1)
    return torch.where(where, values, 0).sum(1) / where.sum(1).clamp(min=1)


def sample_pairs(
    size: int, pairs: int, *, generator: torch.Generator | None = None, device=None
) -> tuple[Tensor, Tensor]:
    """Draws both indices of each pair independently (Algorithm 1): two tensors (pairs,)."""
    _check_pairs(size, pairs, possible=size * size)
    draw = torch.randint(size, (2, pairs), device=device, **_drawn_from(generator))
    return draw[0], draw[1]


def stratified_pairs(
    size: int, pairs: int, *, generator: torch.Generator | None = None, device=None
) -> tuple[Tensor, Tensor]:
    """Draws `size // 2` disjoint pairs from each random permutation: two tensors (pairs,)."""
    _check_pairs(size, pairs, possible=size * size)
    half = size // 2  # an odd size leaves one example out of each permutation
    how = {"device": device, **_drawn_from(generator)}
    orders = [torch.randperm(size, **how)[: 2 * half] for _ in range(math.ceil(pairs / half))]
    ends = torch.cat([order.view(2, half) for order in orders], dim=1)[:, :pairs]
    return ends[0], ends[1]


PAIRINGS = {"random": sample_pairs, "stratified": stratified_pairs}


def _check_pairs(size: int, pairs: int, *, possible: int) -> None:
    if size < 2:  # first, as half of a batch of one is no pair
        raise ValueError(
            f"inputs: got {size} examples, but paths need 2 or more; try DataLoader(drop_last=True)"
        )
    count("pairs", pairs)
    if pairs > possible:
        raise ValueError(
            f"pairs={pairs}: {size} examples form only {possible} pairs; use at most {possible}"
        )


def distinct_pairs(size: int, pairs: int, *, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draws distinct unordered pairs of different examples, on the CPU; for measurements."""
    possible = size * (size - 1) // 2
    _check_pairs(size, pairs, possible=possible)
    if pairs * 4 > possible:
        code = torch.randperm(possible, generator=generator, device="cpu")[:pairs]
    else:  # few of the possible pairs: draw until there are enough distinct ones
        drawn: dict[int, None] = {}
        while len(drawn) < pairs:
            more = torch.randint(possible, (2 * pairs,), generator=generator, device="cpu")
            drawn |= dict.fromkeys(more.tolist())
        code = torch.tensor(list(drawn)[:pairs], device="cpu")
    # pairs j < i are numbered by code = i (i - 1) / 2 + j; float64 is exact here
    high = ((1 + torch.sqrt(1 + 8 * code.double())) / 2).floor().long()
    low = code - high * (high - 1) // 2
    flip = torch.rand(pairs, generator=generator, device="cpu") < 0.5  # random order
    return torch.where(flip, low, high), torch.where(flip, high, low)


def anchor(values: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Adds the targets as values at the end nodes, y_1 = t2 and y_r = t1 (Algorithm 1).

    Args:
        values: (P, r - 2, C), outputs at the inner nodes.
        first, second: (P, C), targets of x1 (alpha = 1) and x2 (alpha = 0).
    Returns:
        (P, r, C).
    """
    targets = [t.unsqueeze(-2).to(values.dtype) for t in (second, first)]
    return torch.cat([targets[0], values, targets[1]], dim=-2)


def _drawn_from(generator: torch.Generator | None) -> dict:
    """Omits generator=None, which would make torch.compile fail on new batch sizes."""
    if not (generator is None or isinstance(generator, torch.Generator)):
        raise ValueError(
            f"generator={generator!r}: must be a torch.Generator; use "
            "torch.Generator(device).manual_seed(seed)"
        )
    return {} if generator is None else {"generator": generator}
