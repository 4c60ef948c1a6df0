"""Base class of regularizers, with hooks for the objective and for the update of the weights."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

# combo_kernels: 6 % faster steps for ViT-Tiny (`experiments/results/speed/step_time.md`)
COMPILATION = {"dynamic": False, "options": {"combo_kernels": True}}


@dataclass(frozen=True)
class StepState:
    """State of training at one step.

    Attributes:
        progress: fraction of training that is done, a 0-dim tensor on the device, so that a CUDA
            graph reads its current value at every replay.
        generator: random generator of the regularizer, independent of all other streams.
        parts: number of parts of a batch (gradient accumulation times processes).
        variant: `Regularizer.variant` of this step.
    """

    progress: Tensor
    generator: torch.Generator
    parts: int = 1
    variant: int = 0


class Regularizer:
    """Plain training; the base class is also the `none` regularizer."""

    no_checkpointing: str | None = None  # why activation checkpointing does not work
    no_capture: str | None = None  # why a step cannot be captured in a CUDA graph
    no_kernels: str | None = None  # why a model cannot use our own kernels
    penalty_label = "penalty"  # name of train/penalty in the terminal

    def check(self, task, parts: int = 1) -> None:
        """Raises ValueError if this regularizer does not work with this task."""

    def compile(self, model: nn.Module) -> None:
        """Compiles the model in place; its state dict does not change."""
        model.compile(**COMPILATION)
        for part in ("to_space", "from_space"):  # the two parts of a model that can be split
            if hasattr(model, part):
                setattr(model, part, torch.compile(getattr(model, part), **COMPILATION))

    def variant(self, step: int) -> int:
        """The kind of this step; each kind has its own CUDA graph and its own reports."""
        return 0

    def objective(self, task, field, batch, state: StepState) -> tuple[Tensor, dict[str, Tensor]]:
        """The scalar to minimise on this batch, and values to log."""
        return task.loss(field(), batch)

    def step(self, optimizer, closure) -> dict[str, Tensor]:
        """Updates the weights. `closure()` computes gradients and returns values to log.

        `closure(sync=False)` does not average gradients over processes;
        `closure(update_statistics=False)` does not update batch-norm statistics.
        """
        report = closure()
        optimizer.step()
        return report


def check_two_examples(task, parts: int, what: str) -> None:
    """Raises ValueError if a part of a batch has fewer than two examples."""
    if task.batch_size // parts < 2:
        raise ValueError(
            f"task.batch_size={task.batch_size}{cut(parts)}: {what} at least 2 examples per part"
        )


def cut(parts: int) -> str:
    """Suffix for messages about batches that are cut into parts."""
    return f" cut into {parts} parts (accumulate x processes)" if parts > 1 else ""
