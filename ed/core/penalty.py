"""Differentiable penalty: effective degree on random paths between examples of a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ed.core.field import Field, as_field, check_merge
from ed.core.labels import check_labels, check_positions, counted, targets
from ed.core.outputs import TWO_LOGITS, beside, by_path
from ed.core.representation import PAIRINGS, Representation, anchor, changed, over_positions
from ed.core.validate import choice

EFFICIENT = Representation()  # the paper's setting for training: r = 4, K = 3


@dataclass(frozen=True, eq=False)  # == on tensors is elementwise
class Paths:
    """Random paths between examples of a batch. Lets loss and penalty share a forward pass.

    Attributes:
        field: the P * n points to evaluate (n = r, or r - 2 with label anchoring).
        nodes: (P, r), or (r,) if all paths share them.
        labels: class indices (P,) or probabilities (P, C) of both ends; None without anchoring.
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
        pairing: str = "random",
        generator: torch.Generator | None = None,
    ) -> Paths:
        """Draws `pairs` paths between examples of `field`.

        Args:
            labels: class indices (B,) or probabilities (B, C), e.g. from mixup or a teacher; they
                enable label anchoring. If the field has a `class_dim`, one entry per position;
                a path skips positions where either end has the index -100.
            pairing: "random" draws both ends independently (Algorithm 1). "stratified" draws
                disjoint pairs until every example is used, then starts again; of an odd number of
                examples, one is left out each time.
        """
        if not isinstance(field, Field):
            raise ValueError(f"field: got {type(field).__name__}; pass ed.Field.of(model, inputs)")
        field.check_points()
        check_merge(field.context)
        anchored, device = labels is not None, field.x.device
        if labels is not None:
            check_labels(labels, len(field.x), class_dim=field.class_dim)
            if labels.device != device:
                raise ValueError(f"labels: on {labels.device}, but inputs on {device}; move them")
            check_anchored(representation.resolution)
        draw_pairs = PAIRINGS[choice("pairing", pairing, PAIRINGS)]
        first, second = draw_pairs(len(field.x), pairs, generator=generator, device=device)
        dtype = torch.promote_types(field.x.dtype, torch.float32)
        nodes = representation.nodes(
            pairs, anchored=anchored, generator=generator, device=device, dtype=dtype
        )
        points = field.between(first, second, nodes[..., 1:-1] if anchored else nodes)
        ends = None if labels is None else (labels[first], labels[second])
        return cls(representation, points, nodes, ends)

    def degrees(self, outputs: Tensor, *, softmax: bool = True) -> Tensor:
        """Returns the effective degree of each path (P,), from outputs (P * n, C) at its points."""
        class_dim, representation = self.field.class_dim, self.representation
        representation.check(outputs, softmax=softmax, class_dim=class_dim)
        if len(outputs) != len(self.field.x):
            raise ValueError(
                f"outputs: got {len(outputs)} rows for {len(self.field.x)} path points; pass "
                "paths.field.apart()"
            )
        # bf16 is too coarse for softmax and fit
        outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
        inner_nodes = self.nodes.shape[-1] - (2 if self.labels else 0)
        values = by_path(outputs, len(outputs) // inner_nodes, class_dim)
        values = values.softmax(-1) if softmax else values
        classes, where = values.shape[-1], None
        if self.labels:
            if classes == 1:
                raise ValueError(
                    f"labels: the model has only one output; leave labels out, or use {TWO_LOGITS}"
                )
            check_positions(self.labels[0], outputs, class_dim)
            ends = [targets(label, classes, class_dim=class_dim) for label in self.labels]
            values, where = anchor(values, *ends), counted(*self.labels)
        coefficients = representation.coefficients(values, beside(values, self.nodes, 1))
        return over_positions(representation.degrees(coefficients), 1, where)


def penalty(
    model: Callable[..., Tensor] | Field,
    inputs=None,
    labels: Tensor | None = None,
    *,
    pairs: int | None = None,
    representation: Representation = EFFICIENT,
    softmax: bool = True,
    output: str | int | None = None,
    class_dim: int | None = None,
    generator: torch.Generator | None = None,
    **changes,
) -> Tensor:
    """Computes the differentiable effective degree of a model on a batch; add it to your loss.

        loss = cross_entropy(model(x), labels) + 7 * ed.penalty(model, x, labels)
        loss = loss + ed.penalty(model, x, labels, scale="classes")   # does not depend on C

    Args:
        model: maps inputs (N, ...) to logits (N, C); or a `Field` (then no inputs). A module keeps
            its mode, and points on paths do not update its batch-norm statistics. For a function
            that calls a module, pass `ed.Field.of(function, inputs, module=module)`.
        inputs: (B, ...), the batch whose examples the paths connect; or a tuple or dict of
            inputs, interpolated together.
        labels: for label-anchored ED: (B,) class indices, or (B, C) probabilities. A wrong index
            raises ValueError on the CPU (RuntimeError if compiled). On a CUDA device, it triggers a
            device-side assertion, which prints the reason; the process must then restart. On
            other devices, the penalty becomes nan.
        pairs: number of random paths; half the batch by default, as in the paper.
        representation: how paths are fitted.
        softmax: fit probabilities, as in the paper. Set it to False for regression (without
            labels), or if the outputs are already probabilities.
        output: key, attribute or index of the outputs in the model's return value.
        class_dim: class dimension of outputs (N, C, H, W) or (N, T, V). Softmax is taken over it,
            and ED is averaged over positions. Labels then have one entry per position; a path skips
            positions where either end has the index -100.
        generator: random generator on the inputs' device; torch's default if None.
        changes: fields of the representation to change, e.g. resolution=15, components=3.
    Returns:
        The mean over paths, a scalar in at least float32, even under autocast. Call `backward`
        outside autocast. Constant probabilities give 0. A straight line from one class to another
        gives 1 / C, or sqrt(1/2) / m with m components, so retune the strength when you add PCA.
        With scale="classes", that line gives 1. float16 outputs above 65,504 overflow, and the
        penalty becomes nan.

    Without labels, a network can lower the penalty without becoming simpler if blending destroys a
    visible cue, such as the black border of a zero-padded crop: it then stays confident only where
    it sees the cue. Use crops without borders, or pass labels (experiments/results/crop).
    """
    choice("softmax", softmax, (True, False))
    field = as_field(model, inputs, output=output, class_dim=class_dim)
    paths = Paths.draw(
        field,
        changed(representation, **changes),
        len(field.x) // 2 if pairs is None else pairs,
        labels=labels,
        generator=generator,
    )
    return paths.degrees(paths.field.apart(), softmax=softmax).mean()


def check_anchored(resolution: int) -> None:
    """Raises ValueError if label anchoring leaves no node for the network."""
    if resolution < 3:
        raise ValueError(
            f"resolution={resolution}: labels replace the network at both ends of a path; use at "
            "least 3 nodes"
        )
