"""Gradient checkpointing: blocks keep only their inputs, and run again when gradients are due."""

import contextlib
from collections.abc import Iterator
from functools import partial
from types import MethodType

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ed.core.model_state import run_again


def recompute_blocks(model: nn.Module) -> None:
    """Changes in place every block of a model that is made of lists of them; results stay."""
    blocks = [block for container in _outermost_lists(model) for block in container]
    if not blocks:
        raise ValueError(
            f"system.activation_checkpointing=true: {type(model).__name__} has no list of blocks "
            "(nn.Sequential, nn.ModuleList) to recompute; set system.activation_checkpointing=false"
        )
    for block in blocks:
        block.forward = MethodType(_forward_twice, block)  # a deep copy's belongs to the copy


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
    # the second run comes when the modes of the first may be gone, as those of paths in eval mode
    contexts = (contextlib.nullcontext(), run_again(block))
    return checkpoint(forward, *inputs, use_reentrant=False, context_fn=lambda: contexts, **named)
