"""Runs forward passes along paths in eval mode, without gradients, a few points at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from ed.core.caller import warn
from ed.core.field import Field
from ed.core.memory import Footprint
from ed.core.model_state import alone, evaluating


@contextlib.contextmanager
def measuring(source: Field) -> Iterator[None]:
    """Disables gradients, sets eval mode, and locks the module against other measurements."""
    with contextlib.ExitStack() as stack:
        # torch 2.6 would use weights that autocast cached here in training, without gradients
        stack.callback(torch.clear_autocast_cache)
        stack.enter_context(torch.no_grad())
        if source.module is not None:
            stack.enter_context(alone(source.module))
            stack.enter_context(evaluating(source.module))
        yield


def in_eval_mode(source: Field) -> Field:
    """Returns the field with points computed in eval mode, with the current weights."""
    if source.recompute is None or source.module is None:
        return source
    with measuring(source):
        return source.at(source.recompute())


def pieces_on_paths(
    source: Field, first: Tensor, second: Tensor, nodes: Tensor, points: int
) -> Iterator[Tensor]:
    """Yields outputs (P * n, ...) at the next n nodes of P paths, up to `points` at a time."""
    for piece in nodes.split(max(1, points // len(first)), dim=-1):
        yield source.between(first, second, piece)()


def outputs_on_paths(
    source: Field, first: Tensor, second: Tensor, nodes: Tensor, points: int
) -> Tensor:
    """Returns outputs (P, r, ...) at the nodes of P paths, computed up to `points` at a time."""
    pieces = pieces_on_paths(source, first, second, nodes, points)
    return torch.cat([piece.unflatten(0, (len(first), -1)) for piece in pieces], dim=1)


@contextlib.contextmanager
def reporter(progress, total: int):
    """Yields a function that takes the number of finished paths and reports progress."""
    if not (progress is None or isinstance(progress, bool) or callable(progress)):
        raise ValueError(f"progress={progress!r}: use True, False or a function of two numbers")
    if progress is True:
        from tqdm import tqdm

        with tqdm(total=total, unit="path", desc="effective degree") as bar:
            yield lambda done: bar.update(done - bar.n)
    else:
        yield (lambda done: progress(done, total)) if progress else (lambda done: None)


def warn_if_coarse(footprint: Footprint) -> None:
    """Warns about half precision anywhere in the network."""
    if footprint.half is not None:
        warn(
            f"the model computes in {footprint.half}: rounding can double ED; use model.float() "
            "and inputs.float(), outside autocast"
        )


def warn_if_misread(outputs: Tensor, *, softmax: bool, class_dim: int | None) -> None:
    """Warns about outputs that look like probabilities."""
    total = outputs.sum(-1 if class_dim is None else class_dim, dtype=torch.float32)
    if softmax and (outputs >= 0).all() and ((total - 1).abs() < 0.01).all():
        warn("outputs are already probabilities; set softmax=False to avoid a second softmax")
