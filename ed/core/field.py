"""The field: the function being learnt, seen from a continuous space in which one can walk."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

Context = dict[str, Tensor]


@dataclass(frozen=True)
class Field:
    """A network from some space on (pixels, token embeddings, features), at a batch of points.

    Attributes:
        forward: points (N, ...), context -> outputs (N, C).
        x: (B, ...), the batch in that space.
        context: per-example tensors (B, ...) that travel along, e.g. the attention mask. On a path
            they are merged by the maximum of those ends that take part, which for a 0/1 mask is
            the union inside the path and each end's own at that end.
        aside: for models with batch normalisation, a context that keeps a pass at points which are
            no data out of the running statistics. None: the model has no such state, and batch and
            paths may share one forward pass.
    """

    forward: Callable[[Tensor, Context], Tensor]
    x: Tensor
    context: Context = field(default_factory=dict)
    aside: Callable[[], AbstractContextManager] | None = None

    @classmethod
    def of(cls, model: Callable[[Tensor], Tensor], x: Tensor, **settings) -> Field:
        """The field of any callable from inputs to outputs."""
        return cls(lambda points, context: model(points), x, **settings)

    def __call__(self) -> Tensor:
        return self.forward(self.x, self.context)

    def between(self, first: Tensor, second: Tensor, alpha: Tensor) -> Field:
        """The paths alpha x1 + (1 - alpha) x2, Eq. (path): the one place that interpolates.

        Args:
            first, second: (P,), indices into the batch of x1 (alpha = 1) and x2 (alpha = 0).
            alpha: (P, n), or (n,) for the same nodes on every path.
        Returns:
            A field at P * n points, the nodes of a path side by side.
        """
        if not self.x.is_floating_point():
            raise ValueError(
                f"paths run between floating-point inputs, not {self.x.dtype}: whole numbers would "
                "be rounded on the way; convert and scale the inputs first"
            )
        # not in bf16, even where features are: rounded nodes would not be the ones that are fitted
        dtype = torch.promote_types(self.x.dtype, torch.float32)
        alpha = alpha.expand(len(first), alpha.shape[-1]).to(dtype)
        weight = alpha.reshape(*alpha.shape, *[1] * (self.x.dim() - 1))
        x1, x2 = (self.x[index].unsqueeze(1).to(dtype) for index in (first, second))
        points = torch.lerp(x2, x1, weight).to(self.x.dtype)  # exact at both ends
        context = {
            name: _merge(value[first], value[second], alpha).flatten(0, 1)
            for name, value in self.context.items()
        }
        return replace(self, x=points.flatten(0, 1), context=context)

    def join(self, other: Field) -> Field:
        """One field over both sets of points."""
        context = {k: torch.cat([v, other.context[k]]) for k, v in self.context.items()}
        return replace(self, x=torch.cat([self.x, other.x]), context=context)

    def with_paths(self, paths: Field) -> tuple[Tensor, Tensor]:
        """Outputs at the batch and on paths, in one forward pass where the model allows it.

        One pass over both is about 10 % faster than two; batch norm forbids it, as the statistics
        of the batch would see the path points.
        """
        if self.aside is None:
            outputs = self.join(paths)()
            return outputs[: len(self.x)], outputs[len(self.x) :]
        at_batch = self()
        with self.aside():
            return at_batch, paths()

    def at(self, x: Tensor) -> Field:
        """The same function and context at other points."""
        return replace(self, x=x)


def _merge(first: Tensor, second: Tensor, alpha: Tensor) -> Tensor:
    """Per-example tensors (P, ...) of both ends, at nodes (P, n): (P, n, ...)."""
    alpha = alpha.reshape(*alpha.shape, *[1] * (first.dim() - 1))
    return torch.maximum(first.unsqueeze(1) * (alpha > 0), second.unsqueeze(1) * (alpha < 1))
