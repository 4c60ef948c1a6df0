"""What a measure is: (model, task) -> numbers, and the promise to leave the model as it was."""

import contextlib
from collections.abc import Hashable, Iterator, Sequence

import torch
from torch import Tensor, nn

from ed.core.model_state import evaluating
from ed.runtime.streams import generator


class Measure:
    """A frozen set of settings that turns a model into numbers.

    Tasks are known by what measures ask of them: `num_examples`, `examples(index)` (training
    examples without augmentation), `field`, `loss`, `noise_like`; of some also `evaluate`.
    """

    reads_examples = True  # false where the weights alone are looked at
    evaluates = False  # true: by the run's own evaluations, so in their precision

    def check(self, task) -> None:
        """Raises ValueError where this measure cannot be taken on this task."""

    def __call__(self, model: nn.Module, task) -> dict[str, float]:
        """Values by suffix of the measure's name; the suffix of a single value is empty."""
        raise NotImplementedError

    @property
    def passes(self) -> Hashable:
        """The forward passes it needs: measures with equal ones are taken `together`."""
        return id(self)

    @staticmethod
    def together(measures: Sequence["Measure"], model: nn.Module, task) -> list[dict[str, float]]:
        """The values of each."""
        return [measure(model, task) for measure in measures]


def in_groups(measures: dict[str, Measure]) -> list[dict[str, Measure]]:
    """Those that share their forward passes side by side."""
    groups: dict[Hashable, dict[str, Measure]] = {}
    for name, measure in measures.items():
        groups.setdefault((type(measure), measure.passes), {})[name] = measure
    return list(groups.values())


@contextlib.contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Eval mode, and afterwards modes, weights, statistics and random streams as before, bitwise.

    Gradients need no care: measures ask autograd for theirs and never write to `.grad`.
    """
    state = [*model.parameters(), *model.buffers()]
    before = [tensor.detach().clone() for tensor in state]
    devices = {tensor.device.index for tensor in state if tensor.device.type == "cuda"}
    try:
        with evaluating(model), torch.random.fork_rng(sorted(devices)):
            yield
    finally:
        with torch.no_grad():
            for tensor, old in zip(state, before, strict=True):
                tensor.copy_(old)  # (w + e) - e would not be w in floats


def in_batches(task, index: Tensor, batch_size: int) -> Iterator[tuple[dict[str, Tensor], float]]:
    """Batches of these examples, each with its share of them all."""
    for part in index.split(batch_size):
        yield task.examples(part), len(part) / len(index)


def fixed_subset(size: int, count: int | None, seed: int) -> Tensor:
    """Indices of `count` of `size` examples, the same at every call; None: all, in their order."""
    if count is None or count >= size:
        return torch.arange(size)
    return torch.randperm(size, generator=generator(seed, "measure"))[:count].sort().values
