"""The differentiable penalty: effective degree along random paths between examples of a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from ed.core.field import Field, as_field, check_outputs
from ed.core.representation import Representation, anchor, sample_pairs

EFFICIENT = Representation()  # the paper's setting for training: r = 4, K = 3


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
        if labels is not None:
            _check_labels(labels, len(field.x), representation.resolution)
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

    def degrees(self, outputs: Tensor, *, softmax: bool = True) -> Tensor:
        """Effective degree of each path, from logits, or outputs as they are (P * n, C): (P,)."""
        check_outputs(outputs, softmax=softmax)
        if len(outputs) != len(self.field.x):
            raise ValueError(
                f"outputs at the {len(self.field.x)} path points are needed, got {len(outputs)} "
                "rows: pass those at paths.field.x alone, e.g. paths.field.apart()"
            )
        if self.labels and outputs.shape[1] == 1:
            raise ValueError(
                "labels: the model has one output, and no class to tell by it: leave them out, or "
                "make both logits of it, "
                "ed.Field(lambda x, _: torch.nn.functional.pad(model(x), (1, 0)), x, module=model)"
            )
        # at least float32: softmax and fit lose too much in bf16
        outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
        inner_nodes = self.nodes.shape[-1] - (2 if self.labels else 0)
        values = outputs.softmax(-1) if softmax else outputs
        values = values.unflatten(0, (-1, inner_nodes))
        if self.labels:
            first, second = (F.one_hot(label, values.shape[-1]) for label in self.labels)
            values = anchor(values, first, second)
        coefficients = self.representation.coefficients(values, self.nodes)
        return self.representation.degrees(coefficients)


def penalty(
    model: Callable[[Tensor], Tensor] | Field,
    inputs: Tensor | None = None,
    labels: Tensor | None = None,
    *,
    pairs: int | None = None,
    representation: Representation = EFFICIENT,
    softmax: bool = True,
    generator: torch.Generator | None = None,
    **changes,
) -> Tensor:
    """Effective degree of any model on a batch, differentiable: add it to your loss.

    Args:
        model: inputs (N, ...) -> logits (N, C), or a `Field` (then no inputs). A module stays in
            the mode it is in; its batch normalisation does not count the points on paths, unless
            it is hidden in a function: name it, `ed.Field.of(function, inputs, module=module)`.
        inputs: (B, ...), the batch between whose examples the paths run.
        labels: (B,) class indices, for label-anchored ED; leave out where there are none.
        pairs: number of random paths; half the batch by default, the paper's rule.
        representation: how paths are fitted.
        softmax: fit probabilities, as the paper does, or the outputs as they are: for a regression
            (without labels), or where the outputs are probabilities.
        generator: on the inputs' device, for draws of its own; torch's by default.
        changes: fields of the representation to change, e.g. resolution=15, components=3.
    Returns:
        The mean over paths, a scalar: 0 for constant probabilities, 1 / C for a straight line from
        one class to another, sqrt(1/2) / m with m components (so a strength found without PCA is
        another one with it). In float32 at least, also under autocast, outside of which `backward`
        belongs; what a model in float16 says beyond 65,504 is infinite, and the penalty then nan.
    """
    field = as_field(model, inputs)
    paths = Paths.draw(
        field,
        replace(representation, **changes) if changes else representation,
        len(field.x) // 2 if pairs is None else pairs,
        labels=labels,
        generator=generator,
    )
    return paths.degrees(paths.field.apart(), softmax=softmax).mean()


def _check_labels(labels: Tensor, size: int, resolution: int) -> None:
    tensor = isinstance(labels, Tensor)
    if not tensor or labels.shape != (size,) or labels.dtype != torch.long:
        got = f"{tuple(labels.shape)} and {labels.dtype}" if tensor else type(labels).__name__
        raise ValueError(
            f"labels: class indices are needed, shape ({size},) and torch.int64 for {size} inputs; "
            f"got {got}"
        )
    if resolution < 3:
        raise ValueError(
            f"resolution {resolution} is too small with labels, which stand at both ends of a "
            "path: use resolution >= 3, or leave the labels out"
        )
