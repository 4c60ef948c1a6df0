"""Base class of measures, which map (model, task) to numbers and do not change the model."""

import contextlib
from collections.abc import Hashable, Iterator, Sequence

import torch
from torch import Tensor, nn

from ed.core.model_state import evaluating
from ed.runtime.streams import generator


class Measure:
    """Settings of a measurement; calling it returns the values.

    Tasks provide `num_examples`, `examples(index)` (training examples without augmentation),
    `field`, `loss`, `noise_like`, and for some measures `evaluate`.
    """

    reads_examples = True  # False if the measure only needs the weights
    evaluates = False  # True if it uses the run's own evaluation, and thus its precision

    def check(self, task) -> None:
        """Raises ValueError if this measure does not apply to the task."""

    def __call__(self, model: nn.Module, task) -> dict[str, float]:
        """Values by suffix of the measure's name; a single value has an empty suffix."""
        raise NotImplementedError

    @property
    def passes(self) -> Hashable:
        """Key of the forward passes; measures with equal keys are computed `together`."""
        return id(self)

    @staticmethod
    def together(measures: Sequence["Measure"], model: nn.Module, task) -> list[dict[str, float]]:
        """The values of each measure, from shared forward passes if possible."""
        return [measure(model, task) for measure in measures]


def in_groups(measures: dict[str, Measure]) -> list[dict[str, Measure]]:
    """Groups measures that share their forward passes."""
    groups: dict[Hashable, dict[str, Measure]] = {}
    for name, measure in measures.items():
        groups.setdefault((type(measure), measure.passes), {})[name] = measure
    return list(groups.values())


@contextlib.contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Eval mode; restores modes, weights, buffers and random state bitwise, but not `.grad`."""
    state = [*model.parameters(), *model.buffers()]
    before = [tensor.detach().clone() for tensor in state]
    devices = {tensor.device.index for tensor in state if tensor.device.type == "cuda"}
    try:
        with evaluating(model), torch.random.fork_rng(sorted(devices)):
            yield
    finally:
        with torch.no_grad():
            for tensor, old in zip(state, before, strict=True):
                tensor.copy_(old)


def in_batches(task, index: Tensor, batch_size: int) -> Iterator[tuple[dict[str, Tensor], float]]:
    """Batches of these examples, each with its fraction of all of them."""
    for part in index.split(batch_size):
        yield task.examples(part), len(part) / len(index)


def fixed_subset(size: int, count: int | None, seed: int) -> Tensor:
    """Sorted indices of `count` random examples, fixed by the seed; None selects all."""
    if count is None or count >= size:
        return torch.arange(size)
    return torch.randperm(size, generator=generator(seed, "measure"))[:count].sort().values
