"""Computes how many path points fit in a memory budget."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ed.core.field import Field
from ed.core.representation import Representation
from ed.core.validate import positive

LIVE_TENSORS = 4  # large activations that coexist in a forward pass without gradients
FIT_BYTES = 24  # per output and node: probabilities, a float64 copy, part of the coefficients
HALF = (torch.float16, torch.bfloat16)
COEFFICIENT_BYTES = 24  # per coefficient: float64 value, rounded copy, magnitude


def points_per_chunk(source: Field, memory_gib: float) -> int:
    """Returns the number of points that fit in the budget, at least 1."""
    return Footprint.of(source).points(memory_gib)


@dataclass(frozen=True)
class Footprint:
    """Memory that a field needs, measured in a forward pass at two points.

    Attributes:
        point: bytes per point of the largest tensor in a forward pass.
        outputs: number of outputs per point.
        output_bytes: bytes per output during the fit.
        half: float16 or bfloat16, if any operation returned it.
    """

    point: int
    outputs: int
    output_bytes: int
    half: torch.dtype | None = None

    @classmethod
    def of(cls, source: Field) -> Footprint:
        # two points, as some models squeeze a batch of one; copies, as some work in place
        probe, first = _Probe(), source.part(slice(2)).copied()
        try:
            with probe:
                outputs = first()
        except RuntimeError as error:  # torch's message omits dtypes and devices
            weight = next(source.module.parameters(), None) if source.module is not None else None
            has = "" if weight is None else f"; its weights are {weight.dtype} on {weight.device}"
            x = first.x
            error.add_note(f"The model got {tuple(x.shape)}, {x.dtype} on {x.device}{has}.")
            raise
        size = max(probe.size // len(first.x), source.x[0].numel() * source.x.element_size())
        return cls(size, outputs[0].numel(), outputs.element_size() + FIT_BYTES, probe.half)

    def points(self, memory_gib: float) -> int:
        """Returns the number of points whose activations and fit stay within the budget (>= 1)."""
        positive("memory_gib", memory_gib)
        size = max(LIVE_TENSORS * self.point, self.outputs * self.output_bytes)
        return max(1, int(memory_gib * 2**30) // size)

    def check(
        self, representation: Representation, memory_gib: float, *, whole: bool = False
    ) -> None:
        """Raises ValueError if the fit of a single path exceeds the budget.

        PCA and adaptive resolution (`whole`) need all outputs of a path at once. Otherwise, only
        the coefficients stay in memory.
        """
        nodes, degree = representation.resolution, representation.degree
        whole = whole or representation.components is not None
        each = nodes * self.output_bytes if whole else (degree + 1) * COEFFICIENT_BYTES
        size = self.outputs * each
        if size > memory_gib * 2**30:
            why = f"{nodes} nodes at once" if whole else f"a fit up to degree {degree}"
            raise ValueError(
                f"memory_gib={memory_gib:g}: {why} with {self.outputs} outputs takes "
                f"{size / 2**30:.2g} GiB for one path; raise memory_gib, or fit fewer outputs"
            )


class _Probe(TorchDispatchMode):
    """Records the bytes of the largest tensor that any operation returns, and half precision."""

    size, half = 0, None

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        # skip views: they use no extra memory, and a view of a weight can exceed the activations
        inputs = {a.untyped_storage()._cdata for a in args if _is_dense(a)}
        for item in result if isinstance(result, (tuple, list)) else (result,):
            if _is_dense(item) and item.untyped_storage()._cdata not in inputs:
                self.size = max(self.size, item.numel() * item.element_size())
                self.half = item.dtype if item.dtype in HALF else self.half
        return result


def _is_dense(value) -> bool:
    """Whether the value is a tensor with a single storage."""
    return isinstance(value, Tensor) and value.layout == torch.strided
