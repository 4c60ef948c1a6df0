"""Checks labels for anchoring and converts them to target vectors."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ed.core.device_checks import assert_on_device, readable
from ed.core.outputs import by_position

SUM_TOLERANCE = 0.01  # loose enough for bfloat16 probabilities
IGNORED = -100  # label of positions that do not count, as in torch's cross_entropy


def check_labels(labels: Tensor, size: int, *, class_dim: int | None = None) -> None:
    """Raises ValueError unless labels are class indices (B,) or probabilities (B, C).

    With `class_dim`, labels have one entry per position: indices (B, ...) with -100 for positions
    to ignore, or probabilities shaped like the outputs.
    """
    tensor = isinstance(labels, Tensor)
    soft = tensor and labels.is_floating_point()
    fits = tensor and labels.shape[:1] == (size,) and labels.dtype != torch.bool
    if class_dim is None:
        fits = fits and labels.dim() == (2 if soft else 1)
    elif soft:
        fits = fits and -labels.dim() <= class_dim < labels.dim()
    if not fits or (soft and labels.dim() < 2):
        got = f"{tuple(labels.shape)} and {labels.dtype}" if tensor else type(labels).__name__
        use = f"class indices ({size},) as torch.int64, or probabilities ({size}, C) as floats"
        if class_dim is not None:
            use = "a class index per position (torch.int64), or floats shaped like the outputs"
        elif tensor and labels.dim() > 1:
            use += "; for one label per position, set class_dim"
        raise ValueError(f"labels: got {got}; use {use}")
    if not readable(labels):
        return
    if soft:
        valid = _probable(labels, 1 if class_dim is None else class_dim)
        if not valid.all():
            raise ValueError(
                f"labels: row {(~valid).nonzero()[0, 0].item()} is not a probability distribution; "
                "apply softmax, pass class indices as torch.int64, or leave labels out if the "
                "outputs are not classes"
            )
        return
    wrong = labels < 0
    remedy = "exclude such examples from the penalty"
    if labels.dim() > 1:
        wrong, remedy = wrong & ~ignored(labels), "label positions to ignore with -100"
    if wrong.any():
        raise ValueError(f"labels: {labels[wrong][0].item()} is not a class; {remedy}")


def check_positions(labels: Tensor, outputs: Tensor, class_dim: int | None) -> None:
    """Raises ValueError unless labels have one entry per position of outputs (N, ..., C, ...).

    Labels may also be flat, with one dimension for all positions.
    """
    if class_dim is None:
        return
    expected = tuple(outputs.movedim(class_dim, -1).shape[1:-1])
    rows = labels.movedim(class_dim, -1)[..., 0] if labels.is_floating_point() else labels
    found = tuple(rows.shape[1:])
    if found not in (expected, (math.prod(expected),)):
        raise ValueError(
            f"labels: got {found} per example, but the outputs have positions {expected}; pass one "
            "label per position"
        )


def targets(labels: Tensor, classes: int, *, class_dim: int | None = None) -> Tensor:
    """Converts indices (P,) or probabilities (P, C) to (P, C), or (P, S, C) with positions.

    Ignored positions become rows of zeros.

    A wrong label raises ValueError on the CPU. CUDA devices and compiled code use a device-side
    assertion instead, which avoids a host sync per step. On other devices, its row becomes nan.
    """
    if labels.is_floating_point():
        rows = by_position(labels, class_dim)
        if rows.shape[-1] != classes:
            raise ValueError(
                f"labels: got {rows.shape[-1]} classes, but the model has {classes}; pass "
                f"probabilities (B, {classes})"
            )
        valid = _probable(rows, -1)
    else:
        several = labels.dim() > 1
        labels = labels.flatten(1) if several else labels
        rows = labels.unsqueeze(-1) == torch.arange(classes, device=labels.device)
        valid = rows.any(-1) | ignored(labels) if several else rows.any(-1)
        if readable(labels) and not valid.all():
            use = f"0 to {classes - 1}" + ", or -100 for positions to ignore" * several
            raise ValueError(f"labels: {labels[~valid][0].item()} is not a class; use {use}")
    if not readable(labels):
        assert_on_device(
            valid.all(),
            "labels: an index is outside the model's classes, or a row is not a probability "
            "distribution; exclude such examples from the penalty",
        )
    rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
    return torch.where(valid.unsqueeze(-1), rows, torch.nan)


def counted(first: Tensor, second: Tensor) -> Tensor | None:
    """Returns which positions have a label at both ends of a path (P, S); None if all do."""
    if first.is_floating_point() or first.dim() < 2:
        return None
    return ~(ignored(first) | ignored(second)).flatten(1)


def ignored(labels: Tensor) -> Tensor:
    return labels.long() == IGNORED  # in uint8, -100 would equal 156


def _probable(labels: Tensor, class_dim: int) -> Tensor:
    return (labels >= 0).all(class_dim) & ((labels.sum(class_dim) - 1).abs() < SUM_TOLERANCE)
