"""Adaptive resolution: adds nodes and paths until the estimated errors are small enough.

A path is sampled at N + 1 Chebyshev points of the second kind, with N = K/4, K/2, K, 2K (11, 21,
41, 81 points for K = 40), until its coefficients show that more points would not change ED. Every
path uses at least 21 points. These points nest when N doubles, so no forward pass is repeated. The
fixed protocol uses points of the first kind, which nest only when their number triples.

The target is still the least-squares polynomial of degree K: for N < K, coefficients beyond N count
as 0, and for N >= K the interpolant is truncated at degree K. Two errors remain. Missing
coefficients lower ED. Aliasing raises it: on N + 1 points T_k equals T_{2N-k}, so |c_k| becomes
|c_k + c_{2N-k}|. Both errors are estimated by extrapolating the coefficients with a power law,
which is accurate for kinks (ReLU) and too high for smooth functions. If the coefficients do not
decay, aliasing is stronger with 81 points than with 200: ED was 1 % too high on the roughest
network tested.

On networks with kinks, most paths would need 81 points. Only a fifth of the paths that need more
than 21 get them. ED of the others is predicted from its value at 21 points, by linear regression
over that fifth. The standard error accounts for the residuals of this regression, which increased
it by 4 to 5 % on the networks tested, with 100 paths.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from ed.core.bases import chebyshev
from ed.core.caller import warn
from ed.core.degree import effective_degree
from ed.core.field import Field
from ed.core.fit import applied
from ed.core.memory import Footprint
from ed.core.nodes import ChebyshevNodes
from ed.core.outputs import by_path
from ed.core.pca import principal_scores
from ed.core.representation import Representation, changed, over_positions
from ed.core.result import Estimate, standard_error
from ed.core.tally import PATHS_SHOWN, check_finite, highest_curve
from ed.core.validate import optional, positive
from ed.core.walk import (
    in_eval_mode,
    measuring,
    outputs_on_paths,
    reporter,
    warn_if_coarse,
    warn_if_misread,
)

TOLERANCE = 0.02  # relative to mean ED
# Largest accepted change in ED between two levels, as a multiple of the limit: at few points, a
# rough path can look smooth.
CHANGE = 10
UNLIMITED = 10**6  # nodes per path; more than any level has
DOUBLINGS = 3  # from N = K/4 to 2K
BLOCK = 50  # paths refined together; the standard error is checked after each block
# Of the paths that need more than 21 points, the first LEAST_REFINED and every SHARE-th get them.
LEAST_REFINED, SHARE = 12, 5


def unlimited(representation: Representation, **changes) -> Representation:
    """Returns the settings without a resolution or default sampler, which are chosen here."""
    if changed(representation).sampler == Representation().sampler:
        changes = {"sampler": ChebyshevNodes()} | changes
    return changed(representation, **changes | {"resolution": UNLIMITED})


def ladder(representation: Representation) -> list[int]:
    """Returns the numbers of intervals N to try, each twice the previous one."""
    start = max(math.ceil(representation.degree / 4), representation.components or 0, 2)
    return [start * 2**doubling for doubling in range(DOUBLINGS + 1)]


def points_of_second_kind(intervals: int) -> Tensor:
    """Returns alpha_j = (1 - cos(j pi / N)) / 2 for j = 0..N, in float64: (N + 1,)."""
    steps = torch.arange(intervals + 1, dtype=torch.float64, device="cpu")
    return (1 - torch.cos(steps * (math.pi / intervals))) / 2


@cache  # only a few levels
def interpolation(intervals: int) -> Tensor:
    """Returns the matrix that maps values at second-kind points to coefficients of T_0..T_N."""
    return torch.linalg.inv(chebyshev(2 * points_of_second_kind(intervals) - 1, intervals))


def truncation_error(magnitudes: Tensor, degree: int) -> Tensor:
    """Estimates the error in ED on each path from mean |c_k|, k = 0..N: (P, N + 1) -> (P,).

    A power law through the means of |c_k| over the third and fourth quarters predicts the
    coefficients beyond N. Those up to `degree` are missing from ED; aliased ones inflate it.
    """
    last = magnitudes.shape[-1] - 1
    half, quarter = last // 2, last - last // 4
    k = torch.arange(2 * last + 1, dtype=magnitudes.dtype, device=magnitudes.device)
    centres = k[half + 1 : quarter + 1].mean(), k[quarter + 1 : last + 1].mean()
    before = magnitudes[:, half + 1 : quarter + 1].mean(-1, keepdim=True)
    tail = magnitudes[:, quarter + 1 :].mean(-1, keepdim=True)
    tiny = torch.finfo(magnitudes.dtype).tiny
    power = (before.clamp_min(tiny) / tail.clamp_min(tiny)).log() / (centres[1] / centres[0]).log()
    beyond = tail * (k[last + 1 :] / centres[1]) ** -power.clamp_min(0)  # (P, N): k = N + 1..2N
    missing = (beyond * k[last + 1 :])[:, : max(0, degree - last)].sum(-1)
    top = min(degree, last - 1)
    seen, folded = magnitudes[:, 1 : top + 1], beyond.flip(-1)[:, 1 : top + 1]
    # with independent signs, |c + a| is about sqrt(c^2 + a^2); the excess is this minus |c|
    excess = seen - (seen.square() - folded.square()).clamp_min(0).sqrt()
    return missing + (excess * k[1 : top + 1]).sum(-1)


def estimate_adaptively(
    source: Field,
    representation: Representation,
    *,
    softmax: bool,
    tolerance: float | None,
    target_se: float | None,
    pairs: int,
    memory_gib: float,
    seed: int,
    progress,
) -> Estimate:
    """Implements `ed.estimate(..., resolution="auto")`; see there for the arguments."""
    from ed.core.estimator import draw_pairs  # avoids a circular import

    tolerance = TOLERANCE if tolerance is None else tolerance
    _check(representation, tolerance, target_se)
    source = in_eval_mode(source)
    first, second, _ = draw_pairs(source, pairs, seed)
    ends = torch.stack([first, second]).cpu()
    with measuring(source), reporter(progress, pairs) as report:
        top = ladder(representation)[-1] + 1
        footprint = Footprint.of(source)
        warn_if_coarse(footprint)
        footprint.check(replace(representation, resolution=top), memory_gib, whole=True)
        chunk = footprint.points(memory_gib)
        block = min(BLOCK, max(1, chunk // top))
        walk = _Walk(source, representation, softmax, tolerance, chunk=chunk, pairs=pairs)
        for start in range(0, pairs, block):
            walk.refine(first[start : start + block], second[start : start + block])
            done = min(start + block, pairs)
            report(done)
            error = walk.standard_error(ends[:, :done])
            if target_se is not None and done >= min(BLOCK, pairs) and error <= target_se:
                break
    if target_se is not None and not error <= target_se:
        warn(
            f"target_se={target_se:g}: {done} paths have a standard error of {error:.2g}; increase "
            "pairs"
        )
    return walk.estimate(ends[:, :done])


def _check(representation: Representation, tolerance: float, target_se: float | None) -> None:
    if representation.sampler != ChebyshevNodes():
        raise ValueError(
            f'sampler={representation.sampler!r}: resolution="auto" sets its own; leave sampler out'
        )
    positive("tolerance", tolerance)
    optional(positive, "target_se", target_se)


class _Walk:
    """Refines paths block by block and accumulates the results."""

    def __init__(self, source, representation, softmax, tolerance, *, chunk, pairs):
        self.source, self.representation, self.softmax = source, representation, softmax
        self.tolerance, self.chunk, self.pairs = tolerance, chunk, pairs
        self.dtype = torch.promote_types(source.x.dtype, torch.float32)
        self.values = torch.empty(0, dtype=self.dtype, device="cpu")
        self.points = torch.empty(0, dtype=torch.long, device="cpu")
        self.spectra = torch.empty(0, representation.degree + 1, dtype=self.dtype, device="cpu")
        # ED and |c_k| at 21 points on paths that need more; ED is nan on the others
        self.coarse = torch.empty(0, dtype=self.dtype, device="cpu")
        self.coarse_spectra = self.spectra.clone()
        self.predicted = torch.empty(0, dtype=torch.bool, device="cpu")
        self.raw_total, self.curves = 0.0, {}

    def refine(self, first: Tensor, second: Tensor) -> None:
        """Measures a block of paths, adding nodes to each until its error is small enough."""
        levels, before = ladder(self.representation), len(self.values)
        self._append(len(first))
        raw = torch.zeros(len(first), dtype=torch.float64, device=first.device)
        previous, left = raw - math.inf, torch.arange(len(first), device=first.device)
        held = self._outputs(first, second, points_of_second_kind(levels[0]))
        for intervals in levels:
            raw[left], errors = self._resolved(held, intervals)
            limit = self._limit(raw)
            done = (errors <= limit) & ((raw[left] - previous[left]).abs() <= CHANGE * limit)
            done |= intervals == levels[-1]
            previous = raw.clone()
            if done.any():
                self._finish(held[done], intervals, before + left[done].cpu())
            left, held = left[~done], held[~done]
            if intervals == levels[1] and len(left):
                refined = self._choose(held, intervals, before + left.cpu())
                left, held = left[refined], held[refined]
            if not len(left):
                break
            between = points_of_second_kind(2 * intervals)[1::2]
            held = _interleaved(held, self._outputs(first[left], second[left], between))
        self.raw_total += raw.sum().item()
        self._predict()

    def _append(self, count: int) -> None:
        """Makes room for the results of more paths."""
        empty: dict[str, float] = {"values": 0, "spectra": 0, "points": 0, "predicted": False}
        empty |= {"coarse": math.nan, "coarse_spectra": 0}
        for name, value in empty.items():
            held = getattr(self, name)
            more = held.new_full((count, *held.shape[1:]), value)
            setattr(self, name, torch.cat([held, more]))

    def _choose(self, held: Tensor, intervals: int, paths: Tensor) -> Tensor:
        """Chooses which of these paths to refine; records ED of all at the current points."""
        place = int(self.coarse.isfinite().sum()) + torch.arange(len(paths), device="cpu")
        _, self.coarse[paths], coefficients = self._fit(held, intervals)
        self.coarse_spectra[paths] = _magnitudes(coefficients)
        refined = (place < LEAST_REFINED) | (place % SHARE == 0)
        self.predicted[paths] = ~refined
        self.points[paths[~refined]] = intervals + 1
        return refined.to(held.device)

    def _predict(self) -> None:
        """Predicts ED on paths that were not refined from those that were."""
        if self.predicted.any():
            known, slope, _ = self._regression()
            x, y = self.coarse.double(), self.values[known].double()
            predicted = y.mean() + slope * (x[self.predicted] - x[known].mean())
            self.values[self.predicted] = predicted.to(self.dtype)

    def _regression(self) -> tuple[Tensor, float, float]:
        """Returns the refined paths (a mask), the slope, and the variance of the residuals."""
        known = self.coarse.isfinite() & ~self.predicted
        x, y = self.coarse[known].double(), self.values[known].double()
        x, y = x - x.mean(), y - y.mean()
        slope = (x @ y / (x @ x).clamp_min(torch.finfo(x.dtype).tiny)).item()
        return known, slope, (y - slope * x).square().sum().item() / (len(x) - 2)

    def prediction_error(self) -> float:
        """Part of the standard error of mean ED that is due to predicting values."""
        if not self.predicted.any():
            return 0.0
        known, _, variance = self._regression()
        count, group, refined = len(self.values), self.coarse.isfinite().sum(), known.sum()
        # The mean residual of the refined paths stands for the whole group of paths that need more
        # points. The values contain the residuals of the refined paths already.
        excess = (group / count) ** 2 / refined - refined / count**2
        return math.sqrt(variance * excess.item())

    def standard_error(self, ends: Tensor) -> float:
        return math.hypot(standard_error(self.values, ends), self.prediction_error())

    def _limit(self, raw: Tensor) -> Tensor:
        """Error allowed on a path: the smaller of the tolerance and half the standard error."""
        limit = self.tolerance * (self.raw_total + raw.sum()) / len(self.values)
        if len(raw) < 2:
            return limit
        return torch.minimum(limit, raw.std() / math.sqrt(self.pairs) / 2)

    def estimate(self, ends: Tensor) -> Estimate:
        check_finite(self.values)
        nodes = max(int(self.points.max()), self.representation.degree + 1)
        return Estimate(
            self.values,
            self._spectrum(),
            replace(self.representation, resolution=nodes),
            ends,
            self.points,
            tuple(self.curves[path] for path in sorted(self.curves)),
            self.prediction_error(),
        )

    def _spectrum(self) -> Tensor:
        """Mean |c_k|, on predicted paths by the regression of ED, so that it agrees with ED."""
        spectra, coarse = self.spectra.clone(), self.coarse_spectra
        if self.predicted.any():
            known, slope, _ = self._regression()
            change = slope * (coarse[self.predicted] - coarse[known].mean(0))
            spectra[self.predicted] = spectra[known].mean(0) + change
        return spectra.mean(0).clamp_min(0)

    def _outputs(self, first: Tensor, second: Tensor, nodes: Tensor) -> Tensor:
        """Outputs or probabilities at nodes (n,): (P, n, C), or (P, S, n, C) with S positions."""
        nodes = nodes.to(first.device, self.dtype)
        outputs = outputs_on_paths(self.source, first, second, nodes, self.chunk).flatten(0, 1)
        class_dim = self.source.class_dim
        if not len(self.points.nonzero()):
            self.representation.check(outputs, softmax=self.softmax, class_dim=class_dim)
            warn_if_misread(outputs, softmax=self.softmax, class_dim=class_dim)
        values = by_path(outputs, len(first), class_dim).to(self.dtype)
        return values.softmax(-1) if self.softmax else values

    def _resolved(self, held: Tensor, intervals: int) -> tuple[Tensor, Tensor]:
        """Returns Chebyshev ED of each path at this level and its estimated error, both (P,)."""
        settings = self.representation
        values = (
            held if settings.components is None else principal_scores(held, settings.components)
        )
        magnitudes = applied(interpolation(intervals).to(held.device), values).abs()
        if settings.weighting == "normalised":
            total = magnitudes.sum(-2, keepdim=True)
            magnitudes = torch.where(total > 0, magnitudes / total, 0.0)
        magnitudes = over_positions(magnitudes.mean(-1), 2)  # (P, N + 1)
        errors = truncation_error(magnitudes, settings.degree)
        return effective_degree(magnitudes[:, : settings.degree + 1]), errors

    def _fit(self, held: Tensor, intervals: int) -> tuple[Tensor, Tensor, Tensor]:
        """Resamples paths at first-kind points and fits them as in the fixed protocol.

        Returns the values at these points, ED (P,) and the coefficients.
        """
        settings = self._settings(intervals)
        nodes = _chebyshev_nodes(settings)
        resample = chebyshev(2 * nodes - 1, intervals) @ interpolation(intervals)
        values = applied(resample.to(held.device), held).to(self.dtype)
        coefficients = settings.coefficients(values, nodes.to(held.device, self.dtype))
        return values, over_positions(settings.degrees(coefficients), 1).cpu(), coefficients

    def _settings(self, intervals: int) -> Representation:
        count = max(intervals, self.representation.degree) + 1
        return replace(self.representation, resolution=count)

    def _finish(self, held: Tensor, intervals: int, paths: Tensor) -> None:
        """Records the results of finished paths."""
        values, self.values[paths], coefficients = self._fit(held, intervals)
        self.points[paths] = intervals + 1
        self.spectra[paths] = _magnitudes(coefficients)
        settings, nodes = self._settings(intervals), points_of_second_kind(intervals)
        if settings.components is not None:  # principal directions depend on the nodes
            held, nodes = principal_scores(values, settings.components), _chebyshev_nodes(settings)
        for row, path in enumerate(paths.tolist()):
            if path < PATHS_SHOWN:
                self.curves[path] = highest_curve(nodes, held[row], coefficients[row])


def _magnitudes(coefficients: Tensor) -> Tensor:
    """Returns the mean of |c_k| over outputs and positions: (P, K + 1)."""
    return over_positions(coefficients.abs().mean(-2), 2).cpu()


def _chebyshev_nodes(settings: Representation) -> Tensor:
    """Returns the nodes of the fixed protocol; leaves the state of torch's generator unchanged."""
    unused = torch.Generator("cpu")
    return settings.nodes(1, generator=unused, device="cpu", dtype=torch.float64)


def _interleaved(held: Tensor, between: Tensor) -> Tensor:
    """Merges values at N + 1 points with those at the N points in between: (..., 2 N + 1, C)."""
    pairs = torch.stack([held[..., :-1, :], between], dim=-2).flatten(-3, -2)
    return torch.cat([pairs, held[..., -1:, :]], dim=-2)
