"""Activation checkpointing: blocks store only their inputs and rerun in the backward pass."""

import contextlib
from collections.abc import Iterator
from functools import partial
from types import MethodType

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ed.core.model_state import run_again


def recompute_blocks(model: nn.Module) -> None:
    """Checkpoints every block in the model's lists of blocks, in place; results do not change."""
    blocks = [block for container in _outermost_lists(model) for block in container]
    if not blocks:
        raise ValueError(
            f"system.activation_checkpointing=true: {type(model).__name__} has no nn.Sequential or "
            "nn.ModuleList of blocks; set it to false"
        )
    for block in blocks:
        block.forward = MethodType(_forward_twice, block)  # bound, so a deep copy gets its own


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
    # the model may have switched modes by the second run, e.g. after paths in eval mode
    contexts = (contextlib.nullcontext(), run_again(block))
    return checkpoint(forward, *inputs, use_reentrant=False, context_fn=lambda: contexts, **named)
