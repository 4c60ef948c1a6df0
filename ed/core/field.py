"""Fields: networks as functions on a continuous space, each with a batch of points."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn

from ed.core.device_checks import assert_on_device, readable
from ed.core.inputs import points_of
from ed.core.model_state import batch_norms, ddp_wrappers, frozen_statistics
from ed.core.outputs import pick

Context = dict[str, Tensor]


@dataclass(frozen=True, eq=False)  # stays hashable for torch.compile; == on tensors is elementwise
class Field:
    """A network as a function of pixels, token embeddings or features, with a batch of points.

        field = ed.Field.of(model, images)                    # inputs of any model
        field = ed.Field.from_text(bert, batch)               # word embeddings
        field = ed.Field.at_layer(vit, "blocks.3", images)    # features of a layer
        ed.estimate(field)
        ed.penalty(field, labels=labels)

    Attributes:
        forward: maps points (N, ...) and context to outputs (N, C), or an object holding them.
        x: the batch of points, (B, ...).
        context: per-example tensors (B, ...) that `forward` needs, e.g. the attention mask. Each
            end of a path keeps its own; inner points use the elementwise maximum of both ends. For
            masks of kept tokens (bool, 0/1, or additive 0/-inf), this is the union. `estimate` and
            `penalty` reject contexts whose maximum is meaningless: padding masks, and numbers that
            differ between examples. In `penalty` on a CUDA device, such numbers trigger a
            device-side assertion, as wrong labels do.
        aside: context manager for forward passes on paths, which are then separate from the batch's
            pass. If None, passes on paths leave the batch-norm statistics of `module` unchanged;
            without batch norm, batch and paths may share one forward pass.
        module: the network behind `forward`; `estimate` puts it in eval mode.
        output: key, attribute or index of the outputs in the value that `forward` returns. If None,
            the value itself is used, or its `logits`.
        class_dim: class dimension of outputs with positions, (N, C, H, W) or (N, T, V). Softmax is
            taken at each position, and ED is averaged over all positions with equal weight, so
            exclude padding (in `penalty`, with labels of -100).
        recompute: computes x again, for points that depend on the weights or the mode of `module`,
            such as word embeddings or features after dropout; `estimate` calls it in eval mode.
    """

    forward: Callable[[Tensor, Context], Tensor]
    x: Tensor
    context: Context = field(default_factory=dict)
    aside: Callable[[], AbstractContextManager] | None = None
    module: nn.Module | None = None
    output: str | int | None = None
    class_dim: int | None = None
    recompute: Callable[[], Tensor] | None = None

    @classmethod
    def of(
        cls, model: Callable[..., Tensor], x, *, examples: int | None = None, **settings
    ) -> Field:
        """Builds a field from any callable that maps inputs to outputs.

        Args:
            model: takes the inputs, and each context tensor as a keyword argument.
            x: a tensor or numpy array (B, ...); a tuple (positional arguments) or dict (keyword
                arguments) of them, interpolated together; or, with `examples`, a DataLoader that
                yields tensors or (inputs, ...) tuples; its first `examples` examples are used.
            settings: further attributes of the field, e.g. context={"mask": mask}.
        """
        if not callable(model):
            raise ValueError(f"model: got {type(model).__name__}; pass a module or a function")
        called = model.func if isinstance(model, partial) else model
        owner = getattr(called, "__self__", called)  # a bound method, e.g. model.forward
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
                f"outputs: got {tuple(outputs.shape)} for {len(self.x)} inputs; keep the batch "
                "first (batch_first=True in torch.nn.Transformer and LSTM)"
            )
        return outputs

    def part(self, rows: slice) -> Field:
        """Returns the same function at a slice of the points."""
        context = {name: value[rows] for name, value in self.context.items()}
        return self.at(self.x[rows], context)

    def between(self, first: Tensor, second: Tensor, alpha: Tensor) -> Field:
        """Returns the same function at points alpha x1 + (1 - alpha) x2, Eq. (path).

        Args:
            first, second: (P,), indices of x1 (alpha = 1) and x2 (alpha = 0) in the batch.
            alpha: (P, n), or (n,) for the same nodes on every path.
        Returns:
            A field at P * n points; the nodes of a path are adjacent.
        """
        self.check_points()
        # interpolate in at least float32, even for bf16 features: the fit assumes exact nodes
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
        """Returns the same function at the points of both fields."""
        context = {k: torch.cat([v, other.context[k]]) for k, v in self.context.items()}
        return self.at(torch.cat([self.x, other.x]), context)

    def with_paths(self, paths: Field) -> tuple[Tensor, Tensor]:
        """Returns outputs at the batch and on paths, from one forward pass if possible."""
        if self._aside() is None:  # about 10 % faster, but paths would update batch norm
            outputs = self.join(paths)()
            return outputs[: len(self.x)], outputs[len(self.x) :]
        return self(), paths.apart()

    def apart(self) -> Tensor:
        """Returns outputs from a separate pass that leaves buffers of the module unchanged."""
        aside = self._aside()
        if aside is None and self.module is not None and ddp_wrappers(self.module):
            aside = partial(frozen_statistics, self.module)
        with (aside or nullcontext)():
            return self()

    def _aside(self) -> Callable[[], AbstractContextManager] | None:
        if self.aside is None and self.module is not None and batch_norms(self.module):
            return partial(frozen_statistics, self.module)
        return self.aside

    def check_points(self) -> None:
        """Raises ValueError if the points cannot be interpolated."""
        if not self.x.is_floating_point():
            raise ValueError(
                f"inputs are {self.x.dtype}: use floats, or ed.Field.from_text for token ids"
            )
        for name, value in self.context.items():
            if not isinstance(value, Tensor):
                raise ValueError(f"context {name!r} is a {type(value).__name__}: pass a tensor")
            if value.shape[:1] != self.x.shape[:1]:
                raise ValueError(
                    f"context {name!r} is {tuple(value.shape)} for {len(self.x)} points: pass one "
                    "row per point"
                )

    def copied(self) -> Field:
        """Returns the same function at copies of the points, as some networks work in place."""
        return self.at(self.x.clone())

    def __deepcopy__(self, memo) -> Field:
        return self  # `forward` keeps the original network, so a copy of `module` would not fit

    def at(self, x: Tensor, context: Context | None = None) -> Field:
        """Returns the same function at other points, optionally with another context."""
        context = self.context if context is None else context
        # torch.compile in torch 2.6 cannot trace dataclasses.replace
        return Field(self.forward, x, context, self.aside, self.module, self.output, self.class_dim)


def as_field(model: Callable[..., Tensor] | Field, inputs=None, **settings) -> Field:
    """Builds a field from a model and inputs, or updates a Field with non-None settings."""
    if isinstance(model, Field) != (inputs is None):
        raise ValueError("inputs: required with a model; leave them out with a Field")
    settings = {name: value for name, value in settings.items() if value is not None}
    if not isinstance(model, Field):
        return Field.of(model, inputs, **settings)
    settings.pop("examples", None)
    return replace(model, **settings) if settings else model


def check_merge(context: Context, *, wait: bool = False) -> None:
    """Raises ValueError for contexts whose maximum over two examples is meaningless.

    Args:
        wait: check values on any device, at the cost of a host sync. By default, CUDA devices and
            compiled code use `assert_on_device` instead.
    """
    for name, value in context.items():
        if "padding" in name:
            raise ValueError(
                f"context {name!r} marks padding, but paths take the maximum of both ends: pass "
                "~mask, which marks kept tokens, under another name, and invert it in `forward`"
            )
        if value.dtype == torch.bool or value.numel() == 0:
            continue
        message = (
            f"context {name!r} is not a mask and differs between examples, so paths cannot merge "
            "it: use one value for all examples or, if values in between make sense, pass it as a "
            "float input: ed.Field.of(model, (x, y))"
        )
        if not (wait or readable(value)):
            assert_on_device(_has_maximum(value), message)
        elif not _has_maximum(value):
            raise ValueError(message)


def _has_maximum(value: Tensor) -> Tensor:
    """Whether all examples share one value, or the tensor is a 0/1 or additive 0/-inf mask."""
    sound = (value == value[:1]).all() | ((value == 0) | (value == 1)).all()
    if not value.is_floating_point():
        return sound
    return sound | ((value.max() == 0) & (value.min() < -100))


def _merge(first: Tensor, second: Tensor, alpha: Tensor) -> Tensor:
    """Merges the tensors (P, ...) of both ends for nodes (P, n): (P, n, ...)."""
    alpha = alpha.reshape(*alpha.shape, *[1] * (first.dim() - 1))
    first, second = first.unsqueeze(1), second.unsqueeze(1)
    # `where` instead of a product with 0 or 1, as additive masks contain -inf
    return torch.maximum(
        torch.where(alpha > 0, first, second), torch.where(alpha < 1, second, first)
    )
