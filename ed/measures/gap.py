"""The generalization gap: how much better a model does on the examples it was trained on."""

from dataclasses import dataclass

import torch
from torch import nn

from ed.core.validate import count
from ed.measures.base import Measure, in_batches, untouched


@dataclass(frozen=True)
class GeneralizationGap(Measure):
    """Train minus test accuracy, in points: all examples, clean, in eval mode.

    Both accuracies are those of the weights' own precision, so that they can be subtracted; the
    logged test accuracy of a run that computes in bf16 may differ from this one by a tenth of a
    point.

    Attributes:
        batch_size: examples per pass; bounds the memory, not the result.
    """

    batch_size: int = 1000

    def __post_init__(self) -> None:
        count("measures: batch_size", self.batch_size)

    def check(self, task) -> None:
        if task.metric != "eval/acc":
            raise ValueError(
                f"measures: the gap is one of accuracies, but {type(task).__name__} is judged by "
                f"{task.metric}; leave gap out of measures"
            )
        if not task.has_labels:  # its loss and its evaluation may be of two classifiers
            raise ValueError(
                f"measures: the gap is one of class accuracies, but {type(task).__name__} learns "
                "no classes; leave gap out of measures"
            )

    @torch.no_grad()
    def __call__(self, model: nn.Module, task) -> dict[str, float]:
        """{"": gap, "_train": accuracy in percent, "_test": likewise}."""
        size, percent = task.num_examples, 0.0
        with untouched(model):
            for batch, share in in_batches(task, torch.arange(size), self.batch_size):
                _, report = task.loss(task.field(model, batch)(), batch)
                percent += report["acc"].double() * share  # summed on the device: no wait per batch
            test = task.evaluate(model)["eval/acc"]
        train = 100 * round(float(percent) / 100 * size) / size  # reports are rounded, counts not
        return {"": train - test, "_train": train, "_test": test}
