"""Labels for anchoring: class indices or probabilities, and the targets they make."""

from __future__ import annotations

import torch
from torch import Tensor

from ed.core.device_checks import assert_on_device, readable
from ed.core.outputs import by_position

SUM_TOLERANCE = 0.01  # of probabilities, which may come in bfloat16


def check_labels(labels: Tensor, size: int, *, class_dim: int | None = None) -> None:
    """Raises ValueError unless labels are class indices (B,) or probabilities (B, C).

    With `class_dim`, they have a value for each position: indices (B, ...), or probabilities of
    the shape of the outputs.
    """
    tensor = isinstance(labels, Tensor)
    soft = tensor and labels.is_floating_point()
    fits = tensor and labels.shape[:1] == (size,) and labels.dtype != torch.bool
    if class_dim is None:
        fits = fits and labels.dim() == (2 if soft else 1)
    if not fits or (soft and labels.dim() < 2):
        got = f"{tuple(labels.shape)} and {labels.dtype}" if tensor else type(labels).__name__
        raise ValueError(
            f"labels: class indices are needed, shape ({size},) and torch.int64, or "
            f"probabilities ({size}, C); got {got}"
        )
    if not readable(labels):
        return
    if soft:
        _check_rows(_probable(labels, 1 if class_dim is None else class_dim))
    elif (labels < 0).any():
        raise ValueError(
            f"labels: {labels.min().item()} is no class; leave such examples out of the penalty"
        )


def targets(labels: Tensor, classes: int, *, class_dim: int | None = None) -> Tensor:
    """(P,) class indices or (P, C) probabilities -> (P, C); with positions, (P, S, C).

    A label outside the classes raises ValueError on the CPU. On a CUDA device and in compiled code
    a device assertion fails instead, as raising would take a host sync at each step. On devices
    without assertions only its row shows it, which is nan.
    """
    if labels.is_floating_point():
        rows = by_position(labels, class_dim)
        if rows.shape[-1] != classes:
            raise ValueError(
                f"labels: probabilities of {rows.shape[-1]} classes for a model with {classes}; "
                f"use shape ({len(labels)}, {classes})"
            )
        valid = _probable(rows, -1)
    else:
        labels = labels.flatten(1) if labels.dim() > 1 else labels
        rows = labels.unsqueeze(-1) == torch.arange(classes, device=labels.device)
        valid = rows.any(-1)
        if readable(labels) and not valid.all():
            raise ValueError(
                f"labels: {labels[~valid][0].item()} is outside the model's {classes} classes; "
                f"use 0 to {classes - 1}"
            )
    if not readable(labels):
        assert_on_device(
            valid.all(),
            "labels: an index is outside the model's classes (-100 is, too), or a row holds no "
            "probabilities; leave such examples out of the penalty",
        )
    rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
    return torch.where(valid.unsqueeze(-1), rows, torch.nan)


def _probable(labels: Tensor, class_dim: int) -> Tensor:
    return (labels >= 0).all(class_dim) & ((labels.sum(class_dim) - 1).abs() < SUM_TOLERANCE)


def _check_rows(valid: Tensor) -> None:
    rows = (~valid.flatten(1).all(1) if valid.dim() > 1 else ~valid).nonzero().flatten().tolist()
    if rows:
        raise ValueError(
            f"labels: row {rows[0]} holds no probabilities (at least 0, with sum 1); apply "
            "softmax to logits, or pass class indices as torch.int64"
        )
