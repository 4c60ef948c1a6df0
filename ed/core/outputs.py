"""Selects a model's outputs and arranges them by path."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

TWO_LOGITS = "ed.Field.of(lambda x: torch.nn.functional.pad(model(x), (1, 0)), x, module=model)"


def pick(returned, output: str | int | None = None) -> Tensor:
    """Selects the output tensor from the value that a model returns.

    Args:
        returned: a tensor, or a mapping, object or sequence that holds one.
        output: key, attribute or index of the outputs. If None, a tensor is returned as is, and
            `logits` are selected from anything else.
    """
    if isinstance(returned, Tensor):
        if output is not None:  # an index would select an example, not an output
            raise ValueError(f"output={output!r}: the model returns a tensor; leave output out")
        return returned
    found = _entry(returned, "logits" if output is None else output)
    if isinstance(found, Tensor):
        return found
    if hasattr(returned if found is None else found, "__array__"):
        raise ValueError(
            "outputs: got a numpy array; use ed.Field.of(lambda x: torch.as_tensor(model(x)), x)"
        )
    kind, tensors = type(returned).__name__, ", ".join(map(repr, _tensors(returned)[:5]))
    problem = f"outputs: the model returns a {kind} without logits"
    if output is not None:
        problem = f"output={output!r}: the {kind} has no such tensor"
    if tensors:
        raise ValueError(f"{problem}; set output to one of its tensors: {tensors}")
    raise ValueError(f"{problem}; use a function that returns a tensor")


def check_outputs(outputs: Tensor, *, softmax: bool, class_dim: int | None = None) -> None:
    """Raises ValueError unless outputs are (N, C), or (N, ..., C, ...) with `class_dim`."""
    shape = tuple(outputs.shape)
    if outputs.is_complex():
        raise ValueError(
            f"outputs: got {outputs.dtype}; use torch.view_as_real(outputs).flatten(1)"
        )
    if outputs.dim() == 1:
        raise ValueError(
            f"outputs: got {shape} instead of (N, C); set softmax=False and add a dimension: "
            "ed.Field.of(lambda x: model(x)[:, None], x, module=model)"
        )
    if outputs.dim() != 2 and class_dim is None:
        raise ValueError(
            f"outputs: got {shape} instead of (N, C); set class_dim, e.g. 1 for (N, C, H, W)"
        )
    last = outputs.dim() - 1
    whole = isinstance(class_dim, int) and not isinstance(class_dim, bool)
    if class_dim is not None and not (
        whole and (1 <= class_dim <= last or -last <= class_dim <= -1)
    ):
        raise ValueError(
            f"class_dim={class_dim}: outputs have shape {shape}; use 1 to {last}, or -1"
        )
    classes = outputs.shape[1 if class_dim is None else class_dim]
    if classes == 0:
        raise ValueError(f"outputs: got {shape}; the model needs at least one output")
    if softmax and classes == 1:
        raise ValueError(
            "outputs: the model has one output, whose softmax is always 1; set softmax=False, or "
            f"pad it to two logits: {TWO_LOGITS}"
        )


def by_position(outputs: Tensor, class_dim: int | None) -> Tensor:
    """Reshapes outputs (N, ..., C, ...) to (N, S, C) with S positions; keeps (N, C)."""
    if outputs.dim() == 2:
        return outputs
    assert class_dim is not None  # see check_outputs
    return outputs.movedim(class_dim, -1).flatten(1, -2)


def by_path(outputs: Tensor, paths: int, class_dim: int | None = None) -> Tensor:
    """Reshapes outputs at P * n points to (P, n, C), or (P, S, n, C) with S positions."""
    outputs = by_position(outputs, class_dim).unflatten(0, (paths, -1))
    return outputs.transpose(1, 2) if outputs.dim() == 4 else outputs


def beside(values: Tensor, own: Tensor, dims: int) -> Tensor:
    """Adds a position dimension to `own`, unless all paths share it (it then has `dims` dims)."""
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


def _tensors(returned) -> list:
    """Returns the keys, indices or attributes of the tensors that a model returns."""
    if isinstance(returned, (tuple, list)):
        returned = dict(enumerate(returned))
    elif not isinstance(returned, Mapping):
        returned = getattr(returned, "__dict__", {})
    return [key for key, value in returned.items() if isinstance(value, Tensor)]
