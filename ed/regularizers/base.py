"""What a regularizer may change: what is minimised (`objective`) or how weights move (`step`)."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

# Kernels of equal depth in one launch: 0.94 of ViT-Tiny's step for the same compilation time
# (`experiments/results/speed/step_time.md`).
COMPILATION = {"dynamic": False, "options": {"combo_kernels": True}}


@dataclass(frozen=True)
class StepState:
    """Where training stands, as a regularizer sees it.

    Attributes:
        progress: 0-dim tensor on the device, the fraction of training that is done. A tensor, since
            a step captured in a CUDA graph must read it anew at each replay.
        generator: the regularizer's own random stream: no other method's draws move with it.
        parts: pieces one optimizer step is cut into (accumulation times processes).
        variant: the regularizer's own `variant` of this step.
    """

    progress: Tensor
    generator: torch.Generator
    parts: int = 1
    variant: int = 0


class Regularizer:
    """The base class is also the `none` regularizer: plain training."""

    no_checkpointing: str | None = None  # why blocks cannot be recomputed for the backward pass
    no_capture: str | None = None  # why a step cannot be captured in a CUDA graph
    no_kernels: str | None = None  # why a model cannot run by our own kernels
    penalty_label = "penalty"  # name of train/penalty in the terminal

    def check(self, task, parts: int = 1) -> None:
        """Raises ValueError where this regularizer cannot work on this task.

        Args:
            parts: pieces one optimizer step is cut into, as in `StepState`.
        """

    def compile(self, model: nn.Module) -> None:
        """Compiles what a step runs; the model's state dict stays as it is."""
        model.compile(**COMPILATION)
        for part in ("to_space", "from_space"):  # where a model can be cut, its two parts
            if hasattr(model, part):
                setattr(model, part, torch.compile(getattr(model, part), **COMPILATION))

    def variant(self, step: int) -> int:
        """Which kind of step this is; each kind has its own CUDA graph and its own reports."""
        return 0

    def objective(self, task, field, batch, state: StepState) -> tuple[Tensor, dict[str, Tensor]]:
        """The scalar to minimise on this batch, and what to log."""
        return task.loss(field(), batch)

    def step(self, optimizer, closure) -> dict[str, Tensor]:
        """One update. `closure()` leaves gradients in place and returns what to log.

        `closure(sync=False)` leaves those of this process's examples alone, where several train
        together; `closure(update_statistics=False)` keeps batch-norm statistics as they are.
        """
        report = closure()
        optimizer.step()
        return report


def check_two_examples(task, parts: int, what: str) -> None:
    """Refuses batches whose pieces hold no two examples between which `what` could run."""
    if task.batch_size // parts < 2:
        raise ValueError(
            f"task.batch_size={task.batch_size}{cut(parts)}: {what} at least 2 examples in a batch"
        )


def cut(parts: int) -> str:
    """What messages say of batches that do not stay whole."""
    return f" cut into {parts} parts (accumulate x processes)" if parts > 1 else ""
