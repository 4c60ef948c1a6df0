"""What a model returns: picking the outputs, and arranging them by path."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor


def pick(returned, output: str | int | None = None) -> Tensor:
    """The outputs among what a model returns.

    Args:
        returned: a tensor, or a mapping, object or sequence that holds one.
        output: key, attribute or index of the outputs; None: the tensor itself, or its `logits`.
    """
    found = returned if isinstance(returned, Tensor) and output is None else None
    if found is None:
        found = _entry(returned, "logits" if output is None else output)
    if isinstance(found, Tensor):
        return found
    if hasattr(returned if found is None else found, "__array__"):
        raise ValueError(
            "outputs: the model returns a numpy array; wrap it, "
            "ed.Field.of(lambda x: torch.as_tensor(model(x)), x)"
        )
    kind = type(returned).__name__
    if output is not None:
        raise ValueError(f"output={output!r}: the {kind} has {_entries(returned)}")
    raise ValueError(
        f"outputs (N, C) are needed, the model returns a {kind} without logits: pick them, e.g. "
        f"output={_example(returned)!r}; it has {_entries(returned)}"
    )


def check_outputs(outputs: Tensor, *, softmax: bool, class_dim: int | None = None) -> None:
    """Raises ValueError unless outputs (N, C), or (N, ..., C, ...), can be read as classes."""
    shape = tuple(outputs.shape)
    if outputs.dim() == 1:
        raise ValueError(
            f"outputs (N, C) are needed, the model's are {shape}: give a number per input a "
            "dimension, ed.Field.of(lambda x: model(x)[:, None], x, module=model), with "
            "softmax=False"
        )
    if outputs.dim() != 2 and class_dim is None:
        raise ValueError(
            f"outputs (N, C) are needed, the model's are {shape}: name the dimension of the "
            "classes, e.g. class_dim=1 for (N, C, H, W) and class_dim=-1 for (N, T, C)"
        )
    last = outputs.dim() - 1
    if class_dim is not None and not (1 <= class_dim <= last or -last <= class_dim <= -1):
        raise ValueError(
            f"class_dim={class_dim}: outputs {shape} have the batch first; use 1 to {last}, or "
            "-1 for the last"
        )
    if softmax and outputs.shape[1 if class_dim is None else class_dim] == 1:
        raise ValueError(
            "the model has one output, and the softmax of one is 1 everywhere: fit it as it is "
            "(softmax=False), or pad it to two logits, "
            "ed.Field.of(lambda x: torch.nn.functional.pad(model(x), (1, 0)), x, module=model)"
        )


def by_position(outputs: Tensor, class_dim: int | None) -> Tensor:
    """Outputs (N, ..., C, ...) as (N, S, C), S positions of C classes; (N, C) stays."""
    if outputs.dim() == 2:
        return outputs
    return outputs.movedim(class_dim, -1).flatten(1, -2)


def by_path(outputs: Tensor, paths: int, class_dim: int | None = None) -> Tensor:
    """Outputs at P * n points -> (P, n, C), or (P, S, n, C) where there are S positions."""
    outputs = by_position(outputs, class_dim).unflatten(0, (paths, -1))
    return outputs.transpose(1, 2) if outputs.dim() == 4 else outputs


def beside(values: Tensor, own: Tensor, dims: int) -> Tensor:
    """What paths have each (P, ...) or all share, of `dims` dimensions, ready to broadcast.

    Values (P, S, n, C) with positions need a dimension for these after the first.
    """
    return own.unsqueeze(1) if values.dim() == 4 and own.dim() > dims else own


def _entry(returned, output: str | int):
    if isinstance(returned, Mapping):
        return returned.get(output)
    if isinstance(output, str):
        return getattr(returned, output, None)
    try:
        return returned[output]
    except (TypeError, IndexError, KeyError):
        return None


def _entries(returned) -> str:
    if isinstance(returned, Mapping):
        return "keys " + ", ".join(map(repr, returned))
    if isinstance(returned, (tuple, list)):
        return f"{len(returned)} entries"
    return "no such attribute"


def _example(returned) -> str | int:
    return next(iter(returned), 0) if isinstance(returned, Mapping) else 0
