"""The field: the function being learnt, seen from a continuous space in which one can walk."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn

from ed.core.modes import batch_norms, frozen_statistics

Context = dict[str, Tensor]


@dataclass(frozen=True, eq=False)  # tensors have no one answer to ==; compilers ask for a hash
class Field:
    """A network from some space on (pixels, token embeddings, features), at a batch of points.

    For a text classifier of transformers, with paths between its word embeddings:

        field = ed.Field(
            lambda x, context: bert(inputs_embeds=x, attention_mask=context["mask"]),
            bert.get_input_embeddings()(ids), {"mask": mask}, module=bert,
        )
        ed.estimate(field)
        ed.penalty(field, labels=labels)

    Attributes:
        forward: points (N, ...), context -> outputs (N, C), or what holds them as `logits`; for a
            model without context there is `ed.Field.of(model, x)`.
        x: (B, ...), the batch in that space.
        context: per-example tensors (B, ...) that travel along, e.g. the attention mask. On a path
            they are merged by the maximum of those ends that take part, which for a 0/1 mask is
            the union inside the path and each end's own at that end. Hand over what is kept; for a
            model that asks for what is padding, `forward` turns it round: nn.Transformer's
            src_key_padding_mask=~context["mask"].
        aside: a context for passes at points which are no data; it keeps them apart from the pass
            at the batch. None: batch normalisation of `module` keeps its running statistics, and
            without any, batch and paths may share one forward pass.
        module: the network behind `forward`: `estimate` measures it in eval mode.
    """

    forward: Callable[[Tensor, Context], Tensor]
    x: Tensor
    context: Context = field(default_factory=dict)
    aside: Callable[[], AbstractContextManager] | None = None
    module: nn.Module | None = None

    @classmethod
    def of(cls, model: Callable[[Tensor], Tensor], x: Tensor, **settings) -> Field:
        """The field of any callable from inputs to outputs."""
        called = model.func if isinstance(model, partial) else model
        owner = getattr(called, "__self__", called)  # of a method: model.forward, say
        if isinstance(owner, nn.Module):
            settings.setdefault("module", owner)
        return cls(lambda points, context: model(points), x, **settings)

    def __call__(self) -> Tensor:
        outputs = _tensor(self.forward(self.x, self.context))
        if outputs.shape[:1] != self.x.shape[:1]:
            raise ValueError(
                f"outputs (N, C) are needed, a row for each of {len(self.x)} inputs; the model's "
                f"are {tuple(outputs.shape)}: keep the batch first (batch_first=True in "
                "torch.nn.Transformer and LSTM)"
            )
        return outputs

    def part(self, rows: slice) -> Field:
        """The same function at some of the points."""
        context = {name: value[rows] for name, value in self.context.items()}
        return replace(self, x=self.x[rows], context=context)

    def between(self, first: Tensor, second: Tensor, alpha: Tensor) -> Field:
        """The paths alpha x1 + (1 - alpha) x2, Eq. (path): the one place that interpolates.

        Args:
            first, second: (P,), indices into the batch of x1 (alpha = 1) and x2 (alpha = 0).
            alpha: (P, n), or (n,) for the same nodes on every path.
        Returns:
            A field at P * n points, the nodes of a path side by side.
        """
        self.check_points()
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
        if self._aside() is None:
            outputs = self.join(paths)()
            return outputs[: len(self.x)], outputs[len(self.x) :]
        return self(), paths.apart()

    def apart(self) -> Tensor:
        """Outputs in a pass of their own, at points which are no data: nothing learns from them."""
        with (self._aside() or nullcontext)():
            return self()

    def _aside(self) -> Callable[[], AbstractContextManager] | None:
        if self.aside is None and self.module is not None and batch_norms(self.module):
            return partial(frozen_statistics, self.module)
        return self.aside

    def check_points(self) -> None:
        """Raises ValueError where one cannot walk between the points."""
        if not self.x.is_floating_point():
            raise ValueError(
                f"paths run between floating-point inputs, not {self.x.dtype}: whole numbers would "
                "be rounded on the way; convert and scale them first, or begin behind the "
                "embedding of token ids (help(ed.Field))"
            )
        for name, value in self.context.items():
            if len(value) != len(self.x):
                raise ValueError(
                    f"context {name!r} has {len(value)} rows for {len(self.x)} points: one each is "
                    "needed, as they travel along; what all share belongs into `forward`"
                )

    def at(self, x: Tensor) -> Field:
        """The same function and context at other points."""
        return replace(self, x=x)


def as_field(model: Callable[[Tensor], Tensor] | Field, inputs: Tensor | None) -> Field:
    """The field of a model at inputs, or a field that was given as such."""
    if isinstance(model, Field) != (inputs is None):
        raise ValueError("give a model with inputs, or a Field, which has its own, without")
    if inputs is not None and not isinstance(inputs, Tensor):
        raise ValueError(
            f"inputs: one tensor (N, ...) is needed, not {type(inputs).__name__}; from batches: "
            "torch.cat([batch[0] for batch in loader]), from an array: torch.as_tensor(array)"
        )
    return model if isinstance(model, Field) else Field.of(model, inputs)


def check_outputs(outputs: Tensor, *, softmax: bool) -> None:
    """Raises ValueError for outputs that are not (N, C), or whose softmax says nothing."""
    if outputs.dim() != 2:
        raise ValueError(
            f"outputs (N, C) are needed, the model's are {tuple(outputs.shape)}: reshape them or "
            "pick some, e.g. ed.Field(lambda x, _: model(x).reshape(len(x), -1), x, module=model)"
        )
    if softmax and outputs.shape[1] == 1:
        raise ValueError(
            "the model has one output, and the softmax of one is 1 everywhere: take it as it is "
            "(softmax=False), or make both logits of it, "
            "ed.Field(lambda x, _: torch.nn.functional.pad(model(x), (1, 0)), x, module=model)"
        )


def _tensor(outputs) -> Tensor:
    """Outputs, or the `logits` of what transformers and many others return."""
    if isinstance(outputs, Tensor):
        return outputs
    logits = outputs.get("logits") if isinstance(outputs, Mapping) else None
    logits = getattr(outputs, "logits", None) if logits is None else logits
    if not isinstance(logits, Tensor):
        kind = type(outputs).__name__
        raise ValueError(
            f"outputs (N, C) are needed, the model returns a {kind} without logits: pick them out, "
            "e.g. ed.Field(lambda x, _: model(x)[0], x, module=model)"
        )
    return logits


def _merge(first: Tensor, second: Tensor, alpha: Tensor) -> Tensor:
    """Per-example tensors (P, ...) of both ends, at nodes (P, n): (P, n, ...)."""
    alpha = alpha.reshape(*alpha.shape, *[1] * (first.dim() - 1))
    first, second = first.unsqueeze(1), second.unsqueeze(1)
    # chosen, not multiplied by 0 or 1: a mask that is added to scores holds -inf
    return torch.maximum(
        torch.where(alpha > 0, first, second), torch.where(alpha < 1, second, first)
    )
