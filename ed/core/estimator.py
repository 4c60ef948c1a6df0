"""Estimates the effective degree of a trained model within a memory budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ed.core.field import Field, as_field, check_merge
from ed.core.inputs import is_loader
from ed.core.memory import Footprint, points_per_chunk
from ed.core.nodes import ChebyshevNodes
from ed.core.representation import Representation, changed, distinct_pairs
from ed.core.result import Comparison, Estimate
from ed.core.tally import Tally
from ed.core.validate import choice, count
from ed.core.walk import (
    in_eval_mode,
    measuring,
    outputs_on_paths,
    pieces_on_paths,
    reporter,
    warn_if_coarse,
    warn_if_misread,
)

__all__ = [
    "Estimate", "compare", "estimate", "estimate_each", "outputs_on_paths", "points_per_chunk",
]  # fmt: skip

# The paper's protocol for trained models: r = 200, K = 40, 400 paths. It does not specify the
# nodes; Chebyshev nodes give the best-conditioned fit.
PROTOCOL = Representation(resolution=200, degree=40, sampler=ChebyshevNodes())


def estimate(
    model: Callable[..., Tensor] | Field,
    inputs=None,
    *,
    pairs: int = 400,
    representation: Representation = PROTOCOL,
    softmax: bool = True,
    output: str | int | None = None,
    class_dim: int | None = None,
    memory_gib: float = 1.0,
    seed: int = 0,
    progress: bool | Callable[[int, int], None] = False,
    tolerance: float | None = None,
    target_se: float | None = None,
    **changes,
) -> Estimate:
    """Estimates the effective degree of a model on data, by default with the paper's protocol.

        ed.estimate(model, images)
        ed.estimate(model, loader, resolution="auto")           # 6 to 10 times fewer passes
        ed.estimate(segmenter, images, output="out", class_dim=1)

    Args:
        model: any callable from inputs (N, ...) to outputs (N, C), or a `Field` (then no inputs). A
            module runs in eval mode, and its original mode is restored. For a function that calls a
            module, pass `ed.Field.of(function, inputs, module=module)`.
        inputs: the examples that the paths connect: a tensor (N, ...) on the model's device, scaled
            as the model expects; a numpy array; a tuple or dict of these, interpolated together; or
            a shuffled DataLoader, whose first 2 * pairs examples are used.
        pairs: number of paths, each between a different pair of examples.
        representation: how paths are fitted.
        softmax: whether to fit probabilities, as in the paper's raw ED, or the raw outputs, as in
            its ED_norm (which also needs weighting="normalised").
        output: key, attribute or index of the outputs in the model's return value.
        class_dim: class dimension of outputs (N, C, H, W) or (N, T, V). Softmax is taken over it,
            and ED is averaged over positions.
        memory_gib: memory budget for a chunk of forward passes and its fit.
        seed: seed for choosing pairs.
        progress: True for a tqdm bar, or a function called with (finished paths, all paths).
        tolerance: error allowed on a path, relative to mean ED, if resolution="auto" (default:
            0.02). Half the standard error is used instead if it is smaller.
        target_se: standard error at which to stop adding paths, if resolution="auto"; `pairs` is
            then the maximum number of paths.
        changes: fields of the representation to change, e.g. resolution=50, degree=10. With
            resolution="auto", each path gets as many nodes as it needs (`ed.core.adaptive`).
    """
    choice("softmax", softmax, (True, False))
    examples = 2 * count("pairs", pairs)
    source = as_field(model, inputs, output=output, class_dim=class_dim, examples=examples)
    how = dict[str, Any](pairs=pairs, memory_gib=memory_gib, seed=seed, progress=progress)
    if changes.get("resolution") == "auto":
        from ed.core.adaptive import estimate_adaptively, unlimited

        how |= {"tolerance": tolerance, "target_se": target_se}
        settings = unlimited(representation, **changes)
        return estimate_adaptively(source, settings, softmax=softmax, **how)
    for name, value in (("tolerance", tolerance), ("target_se", target_se)):
        if value is not None:
            raise ValueError(f'{name}={value}: requires resolution="auto"')
    return estimate_each(source, readings=[(changed(representation, **changes), softmax)], **how)[0]


def compare(
    first: Callable[..., Tensor] | Field,
    second: Callable[..., Tensor] | Field,
    inputs=None,
    **settings,
) -> Comparison:
    """Compares the effective degree of two models on the same paths.

        print(ed.compare(baseline, regularized, images))
        # ED 0.21 - 0.13 = 0.080 +- 0.011, 95 % interval [0.058, 0.1] (400 paths)

    Args:
        first, second: as `model` in `estimate`; two fields need the same number of examples.
        settings: arguments of `estimate`, used for both models.
    """
    if settings.get("target_se") is not None:
        raise ValueError(
            "target_se: not supported here, as both models need the same paths; set pairs instead"
        )
    if is_loader(inputs) and not isinstance(first, Field):  # it may shuffle, so read it only once
        examples = 2 * count("pairs", settings.get("pairs", 400))
        inputs = Field.of(first, inputs, examples=examples).x
    results = [estimate(model, inputs, **settings) for model in (first, second)]
    if not torch.equal(results[0].ends, results[1].ends):
        raise ValueError("compare: the two fields must have the same number of examples")
    return Comparison(*results)


def estimate_each(
    model: Callable[..., Tensor] | Field,
    inputs=None,
    *,
    readings: Sequence[tuple[Representation, bool]],
    pairs: int = 400,
    memory_gib: float = 1.0,
    seed: int = 0,
    progress: bool | Callable[[int, int], None] = False,
) -> list[Estimate]:
    """Returns one estimate per (representation, softmax), all from the same forward passes.

    All readings must share one resolution and sampler. See `estimate` for the other arguments.
    """
    representation = readings[0][0]
    walk = (representation.resolution, representation.sampler)
    if any((reading.resolution, reading.sampler) != walk for reading, _ in readings):
        raise ValueError("readings: all must have the same resolution and sampler")
    source = in_eval_mode(as_field(model, inputs, examples=2 * pairs))
    first, second, generator = draw_pairs(source, pairs, seed)
    dtype = torch.promote_types(source.x.dtype, torch.float32)
    nodes = representation.nodes(pairs, generator=generator, device="cpu", dtype=dtype)
    nodes = nodes.to(source.x.device)
    tallies = [Tally(*reading, source.class_dim) for reading in readings]
    with measuring(source), reporter(progress, pairs) as report:
        footprint = Footprint.of(source)
        warn_if_coarse(footprint)
        points = footprint.points(memory_gib)
        for reading, _ in readings:
            footprint.check(reading, memory_gib)
        group = max(1, points // representation.resolution)  # whole paths, if at least one fits
        for start in range(0, pairs, group):
            paths = slice(start, start + group)
            own_nodes = nodes if nodes.dim() == 1 else nodes[paths]
            _take_group(source, first[paths], second[paths], own_nodes, points, tallies)
            report(min(start + group, pairs))
    ends = torch.stack([first, second]).cpu()
    return [tally.estimate(ends) for tally in tallies]


def draw_pairs(source: Field, pairs: int, seed: int) -> tuple[Tensor, Tensor, torch.Generator]:
    """Draws the ends of each path; returns them and the generator used."""
    count("seed", seed, least=0)
    if seed >= 2**63:
        raise ValueError(f"seed={seed}: must be below 2**63")
    source.check_points()
    check_merge(source.context, wait=True)
    generator = torch.Generator().manual_seed(int(seed))
    first, second = distinct_pairs(len(source.x), pairs, generator=generator)
    return first.to(source.x.device), second.to(source.x.device), generator


def _take_group(source, first, second, nodes, points, tallies) -> None:
    for tally in tallies:
        tally.begin(nodes)
    for outputs in pieces_on_paths(source, first, second, nodes, points):
        for tally in tallies:
            if not tally.done and not tally.degrees:
                how = {"softmax": tally.softmax, "class_dim": source.class_dim}
                tally.representation.check(outputs, **how)
                warn_if_misread(outputs, **how)
            tally.take(outputs, len(first))
    for tally in tallies:
        tally.end()
