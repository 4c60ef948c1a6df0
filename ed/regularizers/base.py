"""Base class of regularizers, with hooks for the objective and the weight update."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

# combo_kernels makes ViT-Tiny steps 6 % faster (`experiments/results/speed/step_time.md`)
COMPILATION = {"dynamic": False, "options": {"combo_kernels": True}}


@dataclass(frozen=True)
class StepState:
    """State of training at one step.

    Attributes:
        progress: fraction of training completed, as a 0-dim tensor on the device, so that a CUDA
            graph reads the current value at every replay.
        generator: random generator used only by the regularizer.
        parts: number of parts of a batch (accumulation steps times processes).
        variant: value of `Regularizer.variant` at this step.
    """

    progress: Tensor
    generator: torch.Generator
    parts: int = 1
    variant: int = 0


class Regularizer:
    """Base class of regularizers; used directly, it is `none`, i.e. plain training."""

    no_checkpointing: str | None = None  # reason for not supporting activation checkpointing
    no_capture: str | None = None  # reason for not supporting CUDA graphs
    no_kernels: str | None = None  # reason for not supporting the kernels of `ed.kernels`
    penalty_label = "penalty"  # label of train/penalty in the terminal

    def check(self, task, parts: int = 1) -> None:
        """Raises ValueError if this regularizer does not work with this task."""

    def check_model(self, model: nn.Module, task) -> None:
        """Raises ValueError if the settings do not fit the model's outputs at `task.probe()`."""

    def compile(self, model: nn.Module) -> None:
        """Compiles the model in place; its state dict does not change."""
        model.compile(**COMPILATION)
        for part in ("to_space", "from_space"):  # models that can be split have both
            if hasattr(model, part):
                setattr(model, part, torch.compile(getattr(model, part), **COMPILATION))

    def variant(self, step: int) -> int:
        """Returns the kind of this step; each kind has its own CUDA graph and reports."""
        return 0

    def objective(self, task, field, batch, state: StepState) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the scalar to minimise on this batch, and values to log."""
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
            f"task.batch_size={task.batch_size}{cut(parts)}: {what} 2 or more examples per part"
        )


def cut(parts: int) -> str:
    """Returns a suffix for error messages about batches that are split into parts."""
    return f" split into {parts} parts (accumulate x processes)" if parts > 1 else ""
