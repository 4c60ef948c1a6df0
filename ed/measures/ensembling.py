"""Weight-space ensembling: accuracy between zero-shot and fine-tuned weights."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ed.core.validate import each, fraction
from ed.measures.base import Measure, untouched
from ed.runtime.console import track


@dataclass(frozen=True)
class Ensembling(Measure):
    """Accuracy at (1 - alpha) zero-shot + alpha fine-tuned weights, including the head.

    Attributes:
        alphas: mixing coefficients; 0 and 1 give exactly the two original models.
    """

    alphas: tuple[float, ...] = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
    reads_examples = False
    evaluates = True  # so that alpha = 1 gives exactly the run's own accuracy

    def __post_init__(self) -> None:
        each(fraction, "measures.ensembling.alphas", self.alphas)

    def check(self, task) -> None:
        if not hasattr(task, "zero_shot"):
            raise ValueError(
                f"measures: {type(task).__name__} has no zero-shot weights; use ensembling with "
                "task=clip_finetune or task=clip_standin"
            )

    @torch.no_grad()
    def __call__(self, model: nn.Module, task) -> dict[str, float]:
        """Returns {"/alpha<alpha>/<metric>": accuracy in percent}."""
        fine_tuned = {name: value.clone() for name, value in model.state_dict().items()}
        values = {}
        with untouched(model):
            for alpha in track(self.alphas, "ensembling"):
                model.load_state_dict(interpolate(task.zero_shot, fine_tuned, alpha))
                torch.clear_autocast_cache()  # may hold the previous weights in bf16
                found = {k.removeprefix("eval/"): v for k, v in task.evaluate(model).items()}
                accuracies = {k: v for k, v in found.items() if k.startswith("acc")}
                values |= {f"/alpha{alpha:g}/{k}": v for k, v in accuracies.items()}
        return values


def interpolate(
    first: dict[str, Tensor], second: dict[str, Tensor], alpha: float
) -> dict[str, Tensor]:
    """Returns (1 - alpha) first + alpha second; integer buffers are taken from `second`."""
    return {
        name: torch.lerp(value, second[name], alpha) if value.is_floating_point() else second[name]
        for name, value in first.items()
    }
