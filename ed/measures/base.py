"""Base class of measures, which compute numbers from a model and a task."""

import contextlib
from collections.abc import Hashable, Iterator, Sequence

import torch
from torch import Tensor, nn

from ed.core.model_state import evaluating
from ed.runtime.streams import generator


class Measure:
    """A measurement and its settings. Call it to get the values; the model does not change.

    Tasks provide `num_examples`, `examples(index)` (training examples without augmentation),
    `field`, `loss`, `noise_like`, and `evaluate`, which only some measures need.
    """

    reads_examples = True  # False if the measure needs only the weights
    evaluates = False  # True if it evaluates as the run does, in the same precision

    def check(self, task) -> None:
        """Raises ValueError if this measure does not apply to the task."""

    def check_model(self, model: nn.Module, task) -> None:
        """Raises ValueError if the settings do not fit the model's outputs at `task.probe()`."""

    def __call__(self, model: nn.Module, task) -> dict[str, float]:
        """Returns a dict of values; each key is a suffix to the measure's name."""
        raise NotImplementedError

    @property
    def passes(self) -> Hashable:
        """Identifies the forward passes; measures with equal keys are computed `together`."""
        return id(self)

    @staticmethod
    def together(measures: Sequence["Measure"], model: nn.Module, task) -> list[dict[str, float]]:
        """Returns the values of each measure, from shared forward passes if possible."""
        return [measure(model, task) for measure in measures]


def in_groups(measures: dict[str, Measure]) -> list[dict[str, Measure]]:
    """Groups measures that share their forward passes."""
    groups: dict[Hashable, dict[str, Measure]] = {}
    for name, measure in measures.items():
        groups.setdefault((type(measure), measure.passes), {})[name] = measure
    return list(groups.values())


@contextlib.contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Sets eval mode; restores modes, weights, buffers and random state exactly (not `.grad`)."""
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
    """Yields batches of the examples, each with its fraction of the total."""
    for part in index.split(batch_size):
        yield task.examples(part), len(part) / len(index)


def fixed_subset(size: int, count: int | None, seed: int) -> Tensor:
    """Returns sorted indices of `count` examples drawn with the seed; None selects all."""
    if count is None or count >= size:
        return torch.arange(size)
    return torch.randperm(size, generator=generator(seed, "measure"))[:count].sort().values
