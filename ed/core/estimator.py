"""Measuring the effective degree of a trained model, within a memory budget."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ed.core.field import Field, as_field, check_outputs
from ed.core.modes import evaluating
from ed.core.nodes import ChebyshevNodes
from ed.core.representation import Representation, distinct_pairs

# The paper's protocol for trained models: r = 200, K = 40, 400 paths. It names no nodes: fixed ones
# here, as they make the best conditioned fit.
PROTOCOL = Representation(resolution=200, degree=40, sampler=ChebyshevNodes())
SYMBOLS = {"raw": "ED", "normalised": "ED_norm", "quadratic": "quadratic ED"}
LIVE_TENSORS = 4  # a forward pass without gradients holds a few activations at once


@dataclass(frozen=True)
class Estimate:
    """Effective degree of a model: `str` prints it as mean +- standard error.

    Attributes:
        values: (P,), effective degree of each path.
        spectrum: (K + 1,), mean |c_k| over paths and outputs.
        representation: the settings it was measured with.
        ends: (2, P), indices of the examples between which each path runs.
    """

    values: Tensor
    spectrum: Tensor
    representation: Representation = field(repr=False)
    ends: Tensor = field(repr=False)

    @property
    def mean(self) -> float:
        return self.values.mean().item()

    @property
    def standard_error(self) -> float:
        """Of the mean over paths, as an estimate for all data; nan for a single path.

        The square root of (sum_p e_p^2 + sum_{p, q} e_p e_q) / P^2, where e are deviations from the
        mean and p, q different paths with a common end. The second sum estimates a variance, that
        of what an end adds to all its paths, so it counts as 0 where chance makes it negative.
        Without it many paths between few examples would claim a precision that other examples do
        not bear out.
        """
        count = len(self.values)
        if count < 2:
            return math.nan
        deviations = self.values.double() - self.values.double().mean()
        alone = deviations.square().sum().item()
        by_end = torch.zeros(int(self.ends.max()) + 1, dtype=deviations.dtype)
        by_end.index_add_(0, self.ends.flatten(), deviations.repeat(2))
        shared = by_end.square().sum().item() - 2 * alone
        return math.sqrt(alone * count / (count - 1) + max(shared, 0.0)) / count

    @property
    def symbol(self) -> str:
        return SYMBOLS[self.representation.weighting]

    def __str__(self) -> str:
        # two digits of the error: with a thousand outputs ED is small, being their mean
        known = math.isfinite(self.standard_error) and self.standard_error > 0
        digits = max(0, 1 - math.floor(math.log10(self.standard_error))) if known else 4
        error = f"{self.mean:.{digits}f} +- {self.standard_error:.{digits}f}"
        return f"{self.symbol} {error} ({len(self.values)} paths)"


def estimate(
    model: Callable[[Tensor], Tensor] | Field,
    inputs: Tensor | None = None,
    *,
    pairs: int = 400,
    representation: Representation = PROTOCOL,
    softmax: bool = True,
    memory_gib: float = 1.0,
    seed: int = 0,
    progress: bool | Callable[[int, int], None] = False,
    **changes,
) -> Estimate:
    """Effective degree of a model on data, by default with the paper's protocol.

    Args:
        model: any callable from inputs (N, ...) to outputs (N, C), or a `Field` (then no inputs). A
            module is put in eval mode meanwhile and left as it was found; one that is hidden in a
            function is not seen: name it, `ed.Field.of(function, inputs, module=module)`.
        inputs: (N, ...), the examples between which the paths run; pairs are distinct. Scaled as
            the model expects them, and where it is.
        pairs: number of paths.
        representation: how paths are fitted.
        softmax: fit probabilities (the paper's raw ED) or the outputs as they are (its ED_norm,
            together with weighting="normalised").
        memory_gib: bound on what a chunk of the forward passes may hold.
        seed: of the pairs.
        progress: True for a bar, or a function called with (paths done, paths in all).
        changes: fields of the representation to change, e.g. resolution=50, degree=10.
    """
    representation = replace(representation, **changes) if changes else representation
    how = {"pairs": pairs, "memory_gib": memory_gib, "seed": seed, "progress": progress}
    return estimate_each(model, inputs, readings=[(representation, softmax)], **how)[0]


@torch.no_grad()
def estimate_each(
    model: Callable[[Tensor], Tensor] | Field,
    inputs: Tensor | None = None,
    *,
    readings: Sequence[tuple[Representation, bool]],
    pairs: int = 400,
    memory_gib: float = 1.0,
    seed: int = 0,
    progress: bool | Callable[[int, int], None] = False,
) -> list[Estimate]:
    """Several readings (representation, softmax) of the same paths, which are walked only once.

    The readings must agree in resolution and sampler; everything else is as in `estimate`.
    """
    representation = readings[0][0]
    walk = (representation.resolution, representation.sampler)
    if any((reading.resolution, reading.sampler) != walk for reading, _ in readings):
        raise ValueError("readings of one walk must have the same resolution and sampler")
    source = as_field(model, inputs)
    source.check_points()
    generator = torch.Generator().manual_seed(seed)
    first, second = distinct_pairs(len(source.x), pairs, generator=generator)
    dtype = torch.promote_types(source.x.dtype, torch.float32)
    nodes = representation.nodes(pairs, generator=generator, device="cpu", dtype=dtype)
    nodes, first, second = (each.to(source.x.device) for each in (nodes, first, second))
    tallies = [_Tally(*reading) for reading in readings]
    mode = evaluating(source.module) if source.module is not None else contextlib.nullcontext()
    with mode, _reporter(progress, pairs) as report:
        points = points_per_chunk(source, memory_gib)
        group = max(1, points // representation.resolution)  # whole paths, so that a fit is whole
        for start in range(0, pairs, group):
            paths = slice(start, start + group)
            own_nodes = nodes if nodes.dim() == 1 else nodes[paths]
            outputs = outputs_on_paths(source, first[paths], second[paths], own_nodes, points)
            for tally in tallies:
                check_outputs(outputs.flatten(0, 1), softmax=tally.softmax)
                if start == 0:
                    _warn_of_misreadings(outputs, softmax=tally.softmax)
                tally.add(outputs.to(dtype), own_nodes)
            report(min(start + group, pairs))
    ends = torch.stack([first, second]).cpu()
    return [tally.estimate(ends) for tally in tallies]


class _Tally:
    """What one reading finds on the paths, chunk by chunk."""

    def __init__(self, representation: Representation, softmax: bool):
        self.representation, self.softmax = representation, softmax
        self.degrees, self.spectra = [], []

    def add(self, values: Tensor, nodes: Tensor) -> None:
        """Outputs (P, r, C) at nodes (P, r) or (r,)."""
        values = values.softmax(-1) if self.softmax else values
        coefficients = self.representation.coefficients(values, nodes)
        self.degrees.append(self.representation.degrees(coefficients))
        self.spectra.append(coefficients.abs().mean(-2).sum(0))

    def estimate(self, ends: Tensor) -> Estimate:
        values = torch.cat(self.degrees).cpu()
        _check_finite(values)
        spectrum = torch.stack(self.spectra).sum(0) / len(values)
        return Estimate(values, spectrum.cpu(), self.representation, ends)


def _warn_of_misreadings(outputs: Tensor, *, softmax: bool) -> None:
    """What makes a number that is not the effective degree of the network meant."""
    if outputs.dtype in (torch.bfloat16, torch.float16):
        warnings.warn(
            f"the model's outputs are {outputs.dtype}: their rounding counts as roughness, and ED "
            "comes out too high, in bfloat16 up to twice; measure model.float() on "
            "inputs.float(), outside of autocast",
            stacklevel=5,
        )
    total = outputs.sum(-1, dtype=torch.float32)
    if softmax and (outputs >= 0).all() and ((total - 1).abs() < 0.01).all():
        warnings.warn(
            "the model's outputs are probabilities already, and would pass through a second "
            "softmax: set softmax=False",
            stacklevel=5,
        )


def outputs_on_paths(
    source: Field, first: Tensor, second: Tensor, nodes: Tensor, points: int
) -> Tensor:
    """Outputs (P, r, C) at the nodes of P paths, of which at most `points` exist at a time."""
    pieces = nodes.split(max(1, points // len(first)), dim=-1)
    along = (source.between(first, second, piece) for piece in pieces)
    return torch.cat([field().unflatten(0, (len(first), -1)) for field in along], dim=1)


def points_per_chunk(source: Field, memory_gib: float) -> int:
    """How many points fit the budget, from the largest tensor that one point makes on its way."""
    # two, as some models squeeze a batch of one away
    probe, first = _LargestOutput(), source.part(slice(2))
    try:
        with probe:
            first()
    except RuntimeError as error:  # torch says what does not fit, but not where it came from
        weight = next(source.module.parameters(), None) if source.module is not None else None
        has = "" if weight is None else f"; its weights are {weight.dtype} on {weight.device}"
        x = first.x
        error.add_note(f"The model got {tuple(x.shape)}, {x.dtype} on {x.device}{has}.")
        raise
    size = max(probe.size // len(first.x), source.x[0].numel() * source.x.element_size())
    return max(1, int(memory_gib * 2**30) // (LIVE_TENSORS * size))


class _LargestOutput(TorchDispatchMode):
    """Records the bytes of the largest tensor that any operation returns."""

    size = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        # a view holds no memory of its own, and views of weights would drown the activations
        inputs = {a.untyped_storage().data_ptr() for a in args if _is_dense(a)}
        for item in result if isinstance(result, (tuple, list)) else (result,):
            if _is_dense(item) and item.untyped_storage().data_ptr() not in inputs:
                self.size = max(self.size, item.numel() * item.element_size())
        return result


def _is_dense(value) -> bool:
    """A tensor with a storage of its own; a sparse one has several."""
    return isinstance(value, Tensor) and value.layout == torch.strided


@contextlib.contextmanager
def _reporter(progress, total: int):
    if progress is True:
        from tqdm import tqdm

        with tqdm(total=total, unit="path", desc="effective degree") as bar:
            yield lambda done: bar.update(done - bar.n)
    else:
        yield (lambda done: progress(done, total)) if progress else (lambda done: None)


def _check_finite(values: Tensor) -> None:
    bad = int((~values.isfinite()).sum())
    if bad:
        raise ValueError(
            f"the model's outputs are not finite on {bad} of {len(values)} paths: "
            "check its weights and the scale of the inputs"
        )
