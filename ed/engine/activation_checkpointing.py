"""Activation checkpointing: stores only each block's input and recomputes the rest."""

import contextlib
from collections.abc import Iterator
from functools import partial
from types import MethodType

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ed.core.model_state import run_again


def recompute_blocks(model: nn.Module) -> None:
    """Applies activation checkpointing to each block of the model, in place."""
    blocks = [block for container in _outermost_lists(model) for block in container]
    if not blocks:
        raise ValueError(
            f"system.activation_checkpointing=true: {type(model).__name__} has no nn.Sequential or "
            "nn.ModuleList of blocks; set system.activation_checkpointing=false"
        )
    for block in blocks:
        # a bound method, so that a deep copy of the block gets its own
        block.forward = MethodType(_forward_twice, block)


def _outermost_lists(module: nn.Module) -> Iterator[nn.Module]:
    if isinstance(module, nn.Sequential | nn.ModuleList):
        yield module
    else:
        for child in module.children():
            yield from _outermost_lists(child)


def _forward_twice(block: nn.Module, *inputs, **named):
    forward = partial(type(block).forward, block)
    if not torch.is_grad_enabled():
        return forward(*inputs, **named)
    # the recomputation must use the original train/eval mode, which may have changed since
    contexts = (contextlib.nullcontext(), run_again(block))
    return checkpoint(forward, *inputs, use_reentrant=False, context_fn=lambda: contexts, **named)
