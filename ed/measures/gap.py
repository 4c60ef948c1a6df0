"""The generalization gap: training accuracy minus test accuracy."""

from dataclasses import dataclass

import torch
from torch import nn

from ed.core.validate import count
from ed.measures.base import Measure, in_batches, untouched


@dataclass(frozen=True)
class GeneralizationGap(Measure):
    """Training minus test accuracy in percentage points, on all examples, unaugmented.

    Both accuracies are computed in the precision of the weights, so the test accuracy that a bf16
    run logs may differ by a tenth of a point.

    Attributes:
        batch_size: examples per pass; affects memory, not the result.
    """

    batch_size: int = 1000

    def __post_init__(self) -> None:
        count("measures: batch_size", self.batch_size)

    def check(self, task) -> None:
        # without labels, loss and evaluation may use different classifiers
        if task.metric != "eval/acc" or not task.has_labels:
            raise ValueError(
                f"measures: gap needs a classification accuracy, but {type(task).__name__} reports "
                f"{task.metric} and has_labels={task.has_labels}; leave gap out of measures"
            )

    def check_model(self, model: nn.Module, task) -> None:
        batch = task.probe()
        if batch is not None and "acc" not in task.loss(task.field(model, batch)(), batch)[1]:
            raise ValueError(
                f"measures: gap needs the accuracy of each batch, but {type(task).__name__}.loss "
                "reports no acc (in percent); add it, or leave gap out of measures"
            )

    @torch.no_grad()
    def __call__(self, model: nn.Module, task) -> dict[str, float]:
        """Returns {"": gap, "_train": accuracy, "_test": accuracy}, all in percent."""
        size, percent = task.num_examples, 0.0
        with untouched(model):
            for batch, share in in_batches(task, torch.arange(size), self.batch_size):
                _, report = task.loss(task.field(model, batch)(), batch)
                percent += report["acc"].double() * share  # stays on the device to avoid a sync
            test = task.evaluate(model)["eval/acc"]
        train = 100 * round(float(percent) / 100 * size) / size  # removes float32 rounding error
        return {"": train - test, "_train": train, "_test": test}
