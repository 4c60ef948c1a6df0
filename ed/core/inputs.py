"""Model inputs: tensors, arrays, tuples and dicts of them, or batches from a loader."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

LAYOUT = "a tensor or array (N, ...), or a tuple or dict of them"


def points_of(
    inputs, module: nn.Module | None = None, *, examples: int | None = None
) -> tuple[Tensor, Callable[[Tensor], tuple[tuple, dict]]]:
    """Returns inputs as one tensor of points, and a function from points to model arguments.

    Several inputs are flattened and concatenated to (B, D1 + D2 + ...), so that a path
    interpolates all of them together.

    Args:
        inputs: a tensor (B, ...), a numpy array, a tuple (positional arguments) or dict (keyword
            arguments) of these, or a DataLoader.
        module: arrays and loader batches are moved to its device, and arrays cast to its dtype.
        examples: number of examples to take from a loader; None rejects loaders.
    """
    if is_loader(inputs):
        if examples is None:
            raise ValueError(f"inputs: got a loader; pass one batch: {LAYOUT}")
        inputs = _collect(inputs, examples)
        inputs = inputs.to(_home(module, inputs).device)
    if isinstance(inputs, Mapping):
        parts = {name: _as_tensor(part, module, name) for name, part in inputs.items()}
        names = list(parts)
        x, split = _pack(list(parts.values()))
        return x, lambda points: ((), dict(zip(names, split(points), strict=True)))
    if isinstance(inputs, tuple):
        x, split = _pack([_as_tensor(part, module, str(i)) for i, part in enumerate(inputs)])
        return x, lambda points: (tuple(split(points)), {})
    return _as_tensor(inputs, module), lambda points: ((points,), {})


def moved(inputs, module: nn.Module):
    """Returns tensors, alone or in a tuple or mapping, on the module's device and in its dtype."""
    if isinstance(inputs, Mapping):
        return {name: moved(part, module) for name, part in inputs.items()}
    if isinstance(inputs, tuple):
        return tuple(moved(part, module) for part in inputs)
    if not isinstance(inputs, Tensor):
        return inputs
    home = _home(module, inputs)
    return inputs.to(home.device, home.dtype if inputs.is_floating_point() else inputs.dtype)


def is_loader(inputs) -> bool:
    """Whether the inputs are batches to be read one after another."""
    known = isinstance(inputs, (Tensor, Mapping, Sequence)) or hasattr(inputs, "__array__")
    return isinstance(inputs, Iterable) and not known


def _collect(loader: Iterable, examples: int) -> Tensor:
    """Returns the first examples of a loader, without changing random states."""
    parts, count = [], 0
    with torch.random.fork_rng(devices=[]), _restored_generators(loader):
        for batch in loader:
            part = batch[0] if isinstance(batch, (tuple, list)) else batch
            if not isinstance(part, Tensor):
                raise ValueError(
                    f"inputs: the loader yields {type(part).__name__}; use one that yields "
                    "tensors, or pass one batch as a tuple or dict"
                )
            parts.append(part)
            count += len(part)
            if count >= examples:
                break
    if not parts:
        raise ValueError("inputs: the loader is empty; note that generators can be read only once")
    return torch.cat(parts)[:examples]


@contextlib.contextmanager
def _restored_generators(loader: Iterable) -> Iterator[None]:
    """Restores the generators of a DataLoader and its samplers, and those of random and numpy."""
    batches = getattr(loader, "batch_sampler", None)
    owners = (loader, getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None))
    found = {getattr(owner, "generator", None) for owner in owners}
    states = {one: one.get_state() for one in found if isinstance(one, torch.Generator)}
    numpy = sys.modules.get("numpy")
    python, array = random.getstate(), numpy and numpy.random.get_state()
    try:
        yield
    finally:
        for generator, state in states.items():
            generator.set_state(state)
        random.setstate(python)
        if numpy:
            numpy.random.set_state(array)


def _as_tensor(part, module: nn.Module | None, name: str = "") -> Tensor:
    where = f"inputs[{name!r}]" if name else "inputs"
    if not isinstance(part, Tensor) and hasattr(part, "__array__"):
        array = part.__array__()  # a pandas DataFrame is read-only, which torch does not support
        part = torch.as_tensor(array if array.flags.writeable else array.copy())
        part = part if module is None else moved(part, module)
    if not isinstance(part, Tensor):
        raise ValueError(
            f"{where}: got {type(part).__name__}; pass {LAYOUT}, or a DataLoader (join a list of "
            "batches with torch.cat)"
        )
    if part.dim() == 0:
        raise ValueError(f"{where}: got a single number; pass {LAYOUT}")
    if name and not part.is_floating_point():
        raise ValueError(
            f"{where} is {part.dtype}: convert to float, pass masks and constants as "
            "ed.Field.of(model, x, context={name: tensor}), or use ed.Field.from_text for token ids"
        )
    return part


def _home(module: nn.Module | None, default: Tensor) -> Tensor:
    """Returns a weight whose device and dtype inputs should match, or the default."""
    weights = module.parameters() if module is not None else ()
    return next((weight for weight in weights if weight.is_floating_point()), default)


def _pack(parts: list[Tensor]) -> tuple[Tensor, Callable[[Tensor], list[Tensor]]]:
    sizes = {len(part) for part in parts}
    if len(sizes) != 1:
        raise ValueError(f"inputs: got {sorted(sizes)} examples; all inputs need the same number")
    shapes, dtypes = [part.shape[1:] for part in parts], [part.dtype for part in parts]
    widths = [shape.numel() for shape in shapes]

    def split(points: Tensor) -> list[Tensor]:
        pieces = points.split(widths, dim=1)
        kinds = zip(pieces, shapes, dtypes, strict=True)
        return [piece.reshape(len(points), *shape).to(d) for piece, shape, d in kinds]

    return torch.cat([part.reshape(len(part), -1) for part in parts], dim=1), split
