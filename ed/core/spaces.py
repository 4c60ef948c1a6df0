"""Fields that start inside a network: at word embeddings or at a layer's output."""

from __future__ import annotations

import contextlib
import difflib
import inspect
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import checkpoint

from ed.core.field import Field
from ed.core.model_state import alone, frozen_statistics
from ed.core.outputs import pick
from ed.core.walk import measuring

TEXT_CONTEXT = ("attention_mask", "token_type_ids")
CHECKED = 4  # number of examples on which a field is compared with the whole network
_checked: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # models that handle padding
_switching = threading.RLock()  # two threads would restore torch's global switches out of order


def text_field(model: nn.Module, batch, **settings) -> Field:
    """Builds a field that starts at the word embeddings of a transformers model.

        batch = tokenizer(sentences, padding=True, return_tensors="pt")
        ed.estimate(ed.Field.from_text(classifier, batch))
        ed.estimate(ed.Field.from_text(decoder, batch, class_dim=-1))   # logits (N, T, V)

    Args:
        model: an encoder or decoder that takes `inputs_embeds`, or a wrapper such as DDP.
        batch: `input_ids` (B, T), and optionally `attention_mask` and `token_type_ids`. On a path,
            each is the maximum over both ends: a token is kept, or belongs to the second segment,
            if this holds at either end.
        settings: further attributes of the field.
    """
    inner = model if hasattr(model, "get_input_embeddings") else getattr(model, "module", model)
    if getattr(getattr(inner, "config", None), "is_encoder_decoder", False):
        raise ValueError(
            f"from_text: {type(inner).__name__} is an encoder-decoder; build an ed.Field directly"
        )
    embed = getattr(inner, "get_input_embeddings", None)
    if embed is None:
        raise ValueError(
            f"from_text: {type(inner).__name__} has no get_input_embeddings(); use Field.at_layer"
        )
    if not isinstance(batch, Mapping) or not isinstance(batch.get("input_ids"), Tensor):
        raise ValueError(
            'from_text: batch has no tensor input_ids; use tokenizer(texts, return_tensors="pt")'
        )
    if "position_ids" in batch:
        raise ValueError("from_text: position_ids cannot be merged on a path; leave them out")
    ids = batch["input_ids"]
    context = {name: batch[name] for name in TEXT_CONTEXT if name in batch}

    def forward(points: Tensor, context: dict[str, Tensor]):
        return model(inputs_embeds=points, **context)

    def words() -> Tensor:
        return embed()(ids)

    how = dict[str, Any](module=model, recompute=words) | settings
    field = Field(forward, words(), context, **how)
    _check_padding(inner, ids, field)
    return field


def _check_padding(model: nn.Module, ids: Tensor, field: Field) -> None:
    """Raises ValueError if embeddings and token ids of padded sentences give different outputs.

    Decoders that classify the last token find it by the ids, and without them take the last
    position, which may be padding. Each model is checked once, on the first batch with padding.
    """
    if model in _checked or torch.compiler.is_compiling():
        return
    kept = field.context.get("attention_mask")
    if kept is None:
        padding = getattr(getattr(model, "config", None), "pad_token_id", None)
        kept = torch.ones_like(ids) if padding is None else ids != padding
    if kept.dim() != 2 or bool(kept.all()):
        return
    rows = kept.sum(1).argsort()[:CHECKED]
    context = {name: value[rows] for name, value in field.context.items()}
    with measuring(field):
        expected = pick(model(input_ids=ids[rows], **context), field.output)
        found = field.at(field.x[rows], context)()
    if found.dim() > 2 and found.shape[:2] == kept[rows].shape:  # ignores outputs at padding
        found, expected = (values[kept[rows].bool()] for values in (found, expected))
    if _differ(found, expected):
        raise ValueError(
            f"from_text: in padded sentences, {type(model).__name__} gives other outputs for "
            "embeddings than for token ids; pad on the other side, or build an ed.Field directly"
        )
    _checked.add(model)


def layer_field(model: nn.Module, layer: str, x, **settings) -> Field:
    """Builds a field that starts at the output of a layer, so that paths connect features.

        ed.estimate(ed.Field.at_layer(vit, "blocks.3", images))
        words = ed.Field.from_text(bert, batch)
        ed.estimate(ed.Field.at_layer(bert, "bert.encoder.layer.0", words))

    The whole network still runs, on copies of the first example, and the points replace the layer's
    output. Each pass therefore costs as much as a full forward pass.

    Args:
        layer: name of a submodule, as in `model.named_modules()`. It must run once per pass, and no
            connection may bypass it. If it returns a tuple, the first item is used. For a penalty,
            it must not run under activation checkpointing.
        x: inputs of the model (as in `ed.Field.of`), or a field of the model.
        settings: further attributes of the field.
    """
    part = _submodule(model, layer)
    if isinstance(x, Field):
        source = replace(x, **{"module": model} | settings)
    else:
        source = Field.of(model, x, **settings)

    @_eager
    def features(field: Field) -> Tensor:
        with _reading(part, layer) as found:
            field.copied().apart()
        return found[0]

    @_eager
    def forward(points: Tensor, context: dict[str, Tensor]):
        carrier = source.x[:1].detach().expand(len(points), *source.x.shape[1:]).clone()
        with contextlib.ExitStack() as carrying:  # only the layers after this one see the points
            carrying.enter_context(frozen_statistics(model))
            with _writing(part, layer, points, carrying.close):
                return source.forward(carrier, context)

    def recompute() -> Tensor:
        return features(source if source.recompute is None else source.at(source.recompute()))

    devices = [source.x.device] if source.x.is_cuda else []
    with alone(model):  # as other threads may measure the same model
        with torch.random.fork_rng(devices):  # measuring between steps must not affect training
            field = replace(source, forward=forward, x=features(source), recompute=recompute)
        _check_bypass(source, field, features, layer)
    return field


def _eager(function: Callable) -> Callable:
    """Runs a function without compiled code, which ignores hooks on the layers inside it."""

    @torch.compiler.disable
    def run(*arguments):
        with _switching, torch.compiler.set_stance("force_eager"), _padded():
            return function(*arguments)

    return run


@contextlib.contextmanager
def _padded() -> Iterator[None]:
    """Stops TransformerEncoder from passing nested tensors, without padding, between layers."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def _check_bypass(source: Field, field: Field, features, layer: str) -> None:
    """Raises ValueError if the input affects the outputs other than through the layer."""
    if field.x.shape[:1] != source.x.shape[:1]:  # windows or tokens as rows, for example
        raise ValueError(
            f"at_layer: {layer!r} returns {tuple(field.x.shape)} for {len(source.x)} inputs; use a "
            "layer with one row per input"
        )
    few = source.part(slice(CHECKED))
    with measuring(source):
        expected = _eager(few.copied())()
        found = replace(field, context=few.context).at(features(few))()
    if _differ(found, expected):
        raise ValueError(
            f"at_layer: part of the network bypasses {layer!r}; use a layer where branches join"
        )


def _differ(found: Tensor, expected: Tensor) -> bool:
    return bool((found - expected).abs().max() > 1e-3 * expected.abs().max())


def _submodule(model: nn.Module, layer: str) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise ValueError(f"at_layer: got a {type(model).__name__}; pass a module")
    names = dict(model.named_modules(remove_duplicate=False))
    if not layer or layer not in names:
        near = difflib.get_close_matches(str(layer), names, n=3) or list(names)[1:4]
        listed = ", ".join(map(repr, near))
        raise ValueError(f"at_layer: no layer {layer!r}; use one such as {listed}")
    return names[layer]


@contextlib.contextmanager
def _reading(part: nn.Module, layer: str) -> Iterator[list[Tensor]]:
    """Records the submodule's output; raises ValueError unless it runs exactly once."""
    found = []

    def record(module, args, output) -> None:
        value = output[0] if isinstance(output, tuple) else output
        # a copy, as the next layer may work in place
        found.append(value.clone() if isinstance(value, Tensor) else value)

    handle = part.register_forward_hook(record)
    try:
        yield found
    finally:
        handle.remove()
    if len(found) != 1:
        raise ValueError(
            f"at_layer: {layer!r} ran {len(found)} times; use a layer that runs once per pass"
        )
    if not isinstance(found[0], Tensor):
        raise ValueError(
            f"at_layer: {layer!r} returns a {type(found[0]).__name__}; use a layer that returns a "
            "tensor"
        )


@contextlib.contextmanager
def _writing(
    part: nn.Module, layer: str, points: Tensor, then: Callable[[], None]
) -> Iterator[None]:
    """Replaces the submodule's output with the points, and calls `then`."""
    graded, outside = torch.is_grad_enabled(), _checkpoints()

    def replaced(module, args, output):
        if graded and _checkpoints() > outside:
            raise ValueError(
                f"at_layer: {layer!r} runs under activation checkpointing, and the backward pass "
                "would run it again without the points; disable checkpointing, or use a layer "
                "whose output leaves the checkpointed block"
            )
        then()
        own = points.clone()  # a copy, as the next layer may work in place
        return (own, *output[1:]) if isinstance(output, tuple) else own

    handle = part.register_forward_hook(replaced)
    try:
        yield
    finally:
        handle.remove()


def _checkpoints() -> int:
    """Counts the calls of torch.utils.checkpoint around this one."""
    frames = traceback.walk_stack(inspect.currentframe())
    return sum(frame.f_globals.get("__name__") == checkpoint.__name__ for frame, _ in frames)
