"""Gradient checkpointing: blocks keep only their inputs, and run again when gradients are due."""

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ed.core.modes import run_again


def recompute_blocks(model: nn.Module) -> None:
    """Changes in place every block of a model that is made of lists of them; results stay."""
    blocks = [block for container in _outermost_lists(model) for block in container]
    if not blocks:
        raise ValueError(
            f"system.checkpointing=true: {type(model).__name__} has no list of blocks "
            "(nn.Sequential, nn.ModuleList) to recompute; set system.checkpointing=false"
        )
    for block in blocks:
        block.forward = _recomputed(block)


def _outermost_lists(module: nn.Module) -> Iterator[nn.Module]:
    if isinstance(module, nn.Sequential | nn.ModuleList):
        yield module
    else:
        for child in module.children():
            yield from _outermost_lists(child)


def _recomputed(block: nn.Module) -> Callable:
    forward = block.forward

    def contexts() -> tuple[contextlib.AbstractContextManager, ...]:
        """For both runs. The second comes when the modes of the first may be gone, as those of
        paths in eval mode are."""
        return contextlib.nullcontext(), run_again(block)

    def twice(*inputs, **named):
        if not torch.is_grad_enabled():
            return forward(*inputs, **named)
        return checkpoint(forward, *inputs, use_reentrant=False, context_fn=contexts, **named)

    return twice
