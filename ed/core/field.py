"""The field: the function being learnt, seen from a continuous space in which one can walk."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn

from ed.core.device_checks import assert_on_device, readable
from ed.core.inputs import points_of
from ed.core.model_state import batch_norms, frozen_statistics
from ed.core.outputs import pick

Context = dict[str, Tensor]


@dataclass(frozen=True, eq=False)  # tensors have no one answer to ==; compilers ask for a hash
class Field:
    """A network from some space on (pixels, token embeddings, features), at a batch of points.

        field = ed.Field.of(model, images)                    # inputs of any model
        field = ed.Field.from_text(bert, batch)               # word embeddings
        field = ed.Field.at_layer(vit, "blocks.3", images)    # features of a layer
        ed.estimate(field)
        ed.penalty(field, labels=labels)

    Attributes:
        forward: points (N, ...), context -> outputs (N, C), or an object that holds them.
        x: (B, ...), the batch in that space.
        context: per-example tensors (B, ...) that travel along, e.g. the attention mask. Merge
            rule: at an end of a path, its own; inside, the elementwise maximum of both ends. For
            a mask of what is kept (bool, 0/1, or 0/-inf where it is added to scores) that is the
            union. `estimate` and `penalty` reject contexts for which the maximum is meaningless:
            masks of padding, and numbers that differ between examples. In `penalty` on a CUDA
            device the numbers fail a device assertion, as wrong labels do.
        aside: a context manager for passes at points that are not data; it keeps them separate
            from the pass at the batch. None: batch norm of `module` keeps its running statistics,
            and without batch norm, batch and paths may share one forward pass.
        module: the network behind `forward`: `estimate` measures it in eval mode.
        output: key, attribute or index of the outputs in what `forward` returns; None: the tensor
            itself, or its `logits`.
        class_dim: dimension of the classes in outputs with positions, (N, C, H, W) or (N, T, V).
            Each position has a softmax of its own, and ED is the mean over positions. All count
            alike, so leave padding out.
    """

    forward: Callable[[Tensor, Context], Tensor]
    x: Tensor
    context: Context = field(default_factory=dict)
    aside: Callable[[], AbstractContextManager] | None = None
    module: nn.Module | None = None
    output: str | int | None = None
    class_dim: int | None = None

    @classmethod
    def of(
        cls, model: Callable[..., Tensor], x, *, examples: int | None = None, **settings
    ) -> Field:
        """The field of any callable from inputs to outputs.

        Args:
            model: takes the inputs, and each context as a keyword argument.
            x: a tensor or numpy array (B, ...), or a tuple (positional arguments) or dict (keyword
                arguments) of them, which then move together; or, with `examples`, a DataLoader of
                tensors or (inputs, ...) tuples, of which the first `examples` are used.
            settings: further attributes of the field, e.g. context={"mask": mask}.
        """
        called = model.func if isinstance(model, partial) else model
        owner = getattr(called, "__self__", called)  # of a method: model.forward, say
        if isinstance(owner, nn.Module):
            settings.setdefault("module", owner)
        points, arguments = points_of(x, settings.get("module"), examples=examples)

        def forward(points, context):
            positional, named = arguments(points)
            return model(*positional, **named, **context)

        return cls(forward, points, **settings)

    @classmethod
    def from_text(cls, model: nn.Module, batch, **settings) -> Field:
        """See `ed.core.spaces.text_field`."""
        from ed.core.spaces import text_field

        return text_field(model, batch, **settings)

    @classmethod
    def at_layer(cls, model: nn.Module, layer: str, x, **settings) -> Field:
        """See `ed.core.spaces.layer_field`."""
        from ed.core.spaces import layer_field

        return layer_field(model, layer, x, **settings)

    def __call__(self) -> Tensor:
        outputs = pick(self.forward(self.x, self.context), self.output)
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
        return self.at(self.x[rows], context)

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
        return self.at(points.flatten(0, 1), context)

    def join(self, other: Field) -> Field:
        """One field over both sets of points."""
        context = {k: torch.cat([v, other.context[k]]) for k, v in self.context.items()}
        return self.at(torch.cat([self.x, other.x]), context)

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
                "embedding of token ids (ed.Field.from_text)"
            )
        for name, value in self.context.items():
            if len(value) != len(self.x):
                raise ValueError(
                    f"context {name!r} has {len(value)} rows for {len(self.x)} points: give one "
                    "for each, and use what all share in `forward`"
                )

    def at(self, x: Tensor, context: Context | None = None) -> Field:
        """The same function at other points, and with another context where one is given."""
        context = self.context if context is None else context
        # not dataclasses.replace: torch.compile does not follow it in torch 2.6
        return Field(self.forward, x, context, self.aside, self.module, self.output, self.class_dim)


def as_field(model: Callable[..., Tensor] | Field, inputs=None, **settings) -> Field:
    """The field of a model at inputs, or a given one, with the settings that are not None."""
    if isinstance(model, Field) != (inputs is None):
        raise ValueError("give a model with inputs, or a Field, which has its own, without")
    settings = {name: value for name, value in settings.items() if value is not None}
    if not isinstance(model, Field):
        return Field.of(model, inputs, **settings)
    settings.pop("examples", None)
    return replace(model, **settings) if settings else model


def check_merge(context: Context, *, wait: bool = False) -> None:
    """Raises ValueError for contexts whose maximum over two examples means nothing.

    Args:
        wait: check values on any device, which takes a host sync. Otherwise a CUDA device and
            compiled code assert them (`assert_on_device`).
    """
    for name, value in context.items():
        if "padding" in name:
            raise ValueError(
                f"context {name!r} marks padding, and paths keep the maximum of both ends: pass "
                "what is kept, ~mask, under another name, and invert it in `forward`"
            )
        if value.dtype == torch.bool or value.numel() == 0:
            continue
        message = (
            f"context {name!r} is no mask and differs between examples, so it has no maximum "
            "that both share: interpolate it as one of several inputs, "
            "ed.Field.of(model, (x, y)), or use it in `forward`"
        )
        if not (wait or readable(value)):
            assert_on_device(_has_maximum(value), message)
        elif not _has_maximum(value):
            raise ValueError(message)


def _has_maximum(value: Tensor) -> Tensor:
    """Whether all examples share a value, or it is a mask: 0 and 1, or added to scores."""
    sound = (value == value[:1]).all() | ((value == 0) | (value == 1)).all()
    if not value.is_floating_point():
        return sound
    return sound | ((value.max() == 0) & (value.min() < -100))


def _merge(first: Tensor, second: Tensor, alpha: Tensor) -> Tensor:
    """Per-example tensors (P, ...) of both ends, at nodes (P, n): (P, n, ...)."""
    alpha = alpha.reshape(*alpha.shape, *[1] * (first.dim() - 1))
    first, second = first.unsqueeze(1), second.unsqueeze(1)
    # chosen, not multiplied by 0 or 1: a mask that is added to scores holds -inf
    return torch.maximum(
        torch.where(alpha > 0, first, second), torch.where(alpha < 1, second, first)
    )
