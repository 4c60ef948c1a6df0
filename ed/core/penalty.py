"""The differentiable penalty: effective degree along random paths between examples of a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ed.core.field import Field
from ed.core.representation import Representation, anchor, sample_pairs


@dataclass(frozen=True)
class Paths:
    """Random paths through a batch: the points where the network must be evaluated, and the rest.

    Attributes:
        field: at the P * n points that need a forward pass (n = r, or r - 2 when anchored).
        nodes: (P, r) or (r,).
        labels: class indices at both ends, (P,) each, when label-anchored.
    """

    representation: Representation
    field: Field
    nodes: Tensor
    labels: tuple[Tensor, Tensor] | None

    @classmethod
    def draw(
        cls,
        field: Field,
        representation: Representation,
        pairs: int,
        *,
        labels: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Paths:
        """`pairs` paths between examples of `field`; with `labels` (B,), label-anchored."""
        device = field.x.device
        first, second = sample_pairs(len(field.x), pairs, generator=generator, device=device)
        anchored = labels is not None
        dtype = torch.promote_types(field.x.dtype, torch.float32)
        nodes = representation.nodes(
            pairs, anchored=anchored, generator=generator, device=device, dtype=dtype
        )
        points = field.between(first, second, nodes[..., 1:-1] if anchored else nodes)
        ends = (labels[first], labels[second]) if anchored else None
        return cls(representation, points, nodes, ends)

    def degrees(self, logits: Tensor) -> Tensor:
        """Effective degree of each path's softmax outputs, from logits (P * n, C): (P,)."""
        # at least float32: softmax and fit lose too much in bf16
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        inner_nodes = self.nodes.shape[-1] - (2 if self.labels else 0)
        values = logits.softmax(-1).unflatten(0, (-1, inner_nodes))
        if self.labels:
            first, second = (F.one_hot(label, values.shape[-1]) for label in self.labels)
            values = anchor(values, first, second)
        coefficients = self.representation.coefficients(values, self.nodes)
        return self.representation.degrees(coefficients)


def penalty(
    model: Callable[[Tensor], Tensor],
    inputs: Tensor,
    labels: Tensor | None = None,
    *,
    pairs: int | None = None,
    generator: torch.Generator | None = None,
    **representation,
) -> Tensor:
    """Effective degree of any classifier on a batch, differentiable: add it to your loss.

    Args:
        model: inputs (N, ...) -> logits (N, C).
        labels: (B,) class indices, for label-anchored ED; leave out where there are none.
        pairs: number of random paths; half the batch by default, the paper's rule.
        representation: fields of `Representation`, e.g. resolution=4, degree=3, components=3.
    """
    paths = Paths.draw(
        Field.of(model, inputs),
        Representation(**representation),
        len(inputs) // 2 if pairs is None else pairs,
        labels=labels,
        generator=generator,
    )
    return paths.degrees(paths.field()).mean()
