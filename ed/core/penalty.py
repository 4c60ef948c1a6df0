"""The differentiable penalty: effective degree along random paths between examples of a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ed.core.field import Field, as_field, check_merge
from ed.core.labels import check_labels, targets
from ed.core.outputs import beside, by_path
from ed.core.representation import PAIRINGS, Representation, anchor, over_positions
from ed.core.validate import choice

EFFICIENT = Representation()  # the paper's setting for training: r = 4, K = 3


@dataclass(frozen=True)
class Paths:
    """Random paths through a batch: the points where the network must be evaluated, and the rest.

    Attributes:
        field: at the P * n points that need a forward pass (n = r, or r - 2 when anchored).
        nodes: (P, r) or (r,).
        labels: class indices (P,) or probabilities (P, C) at both ends, when label-anchored.
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
        """`pairs` paths between examples of `field`; label-anchored with `labels`.

        Pairing is "random", two independent draws per path as in Algorithm 1, or "stratified",
        where no example ends a second path before every example has ended one.
        Labels are class indices (B,) or probabilities (B, C), e.g. of mixup or a teacher; where
        the field has a `class_dim`, indices (B, ...) or probabilities for each position.
        """
        if labels is not None:
            check_labels(labels, len(field.x), class_dim=field.class_dim)
            _check_anchored(representation.resolution)
        device = field.x.device
        draw_pairs = PAIRINGS[choice("pairing", pairing, PAIRINGS)]
        first, second = draw_pairs(len(field.x), pairs, generator=generator, device=device)
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
        class_dim, representation = self.field.class_dim, self.representation
        representation.check(outputs, softmax=softmax, class_dim=class_dim)
        if len(outputs) != len(self.field.x):
            raise ValueError(
                f"outputs at the {len(self.field.x)} path points are needed, got {len(outputs)} "
                "rows: pass those at paths.field.x alone, e.g. paths.field.apart()"
            )
        # at least float32: softmax and fit lose too much in bf16
        outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
        inner_nodes = self.nodes.shape[-1] - (2 if self.labels else 0)
        values = by_path(outputs, len(outputs) // inner_nodes, class_dim)
        values = values.softmax(-1) if softmax else values
        classes = values.shape[-1]
        if self.labels:
            _check_classes(classes)
            ends = (targets(label, classes, class_dim=class_dim) for label in self.labels)
            values = anchor(values, *ends)
        coefficients = representation.coefficients(values, beside(values, self.nodes, 1))
        return over_positions(representation.degrees(coefficients), 1)


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
    """Effective degree of any model on a batch, differentiable: add it to your loss.

        loss = cross_entropy(model(x), labels) + 7 * ed.penalty(model, x, labels)
        loss = loss + ed.penalty(model, x, labels, scale="classes")   # whatever the classes

    Args:
        model: inputs (N, ...) -> logits (N, C), or a `Field` (then no inputs). A module stays in
            the mode it is in; its batch normalisation does not count the points on paths. A
            function hides its module, so name it: `ed.Field.of(function, inputs, module=module)`.
        inputs: (B, ...), the batch between whose examples the paths run; or a tuple or dict of
            inputs, which move together.
        labels: for label-anchored ED: (B,) class indices, or (B, C) probabilities. An index
            outside the classes raises ValueError on the CPU, and RuntimeError in compiled code
            there. A CUDA device asserts instead of waiting for the host: it prints the reason, the
            next call that waits for it raises "device-side assert triggered", and the process has
            to start again. On other devices the penalty is nan.
        pairs: number of random paths; half the batch by default, the paper's rule.
        representation: how paths are fitted.
        softmax: fit probabilities, as the paper does, or the outputs as they are: for a regression
            (without labels), or where the outputs are probabilities.
        output: key, attribute or index of the outputs in what the model returns.
        class_dim: dimension of the classes in outputs (N, C, H, W) or (N, T, V): softmax over it,
            mean over positions. Labels then have one entry per position.
        generator: on the inputs' device, for draws of its own; torch's by default.
        changes: fields of the representation to change, e.g. resolution=15, components=3.
    Returns:
        The mean over paths, a scalar: 0 for constant probabilities, 1 / C for a straight line from
        one class to another, sqrt(1/2) / m with m components (so a strength found without PCA is
        another one with it); 1 for that line with scale="classes". In float32 at least, also under
        autocast, outside of which `backward` belongs. Outputs in float16 beyond 65,504 are
        infinite, and the penalty then nan.

    Without labels a network can flatten every path for free if inputs carry a mark that blending
    destroys, such as the black border of a zero-padded crop: it is then confident only where the
    mark is. Use crops without borders, or labels (experiments/results/crop).
    """
    field = as_field(model, inputs, output=output, class_dim=class_dim)
    check_merge(field.context)
    paths = Paths.draw(
        field,
        replace(representation, **changes) if changes else representation,
        len(field.x) // 2 if pairs is None else pairs,
        labels=labels,
        generator=generator,
    )
    return paths.degrees(paths.field.apart(), softmax=softmax).mean()


def _check_anchored(resolution: int) -> None:
    if resolution < 3:
        raise ValueError(
            f"resolution={resolution}: too few nodes with labels, which take both ends of a path; "
            "use resolution >= 3, or leave the labels out"
        )


def _check_classes(classes: int) -> None:
    if classes == 1:
        raise ValueError(
            "labels: the model has one output, and no class to tell by it: leave them out, or "
            "pad it to two logits, "
            "ed.Field.of(lambda x: torch.nn.functional.pad(model(x), (1, 0)), x, module=model)"
        )
