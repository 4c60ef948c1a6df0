"""What a task is: data + field + loss + evaluation. It owns no optimizer and no checkpoint file."""

from collections.abc import Generator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ed.core.field import Field
from ed.core.model_state import evaluating
from ed.core.validate import not_negative
from ed.datasets.batches import Batch


class Task:
    """Interface and defaults. Lengths come in the task's own unit and leave as optimizer steps."""

    batch_size: int
    total_steps: int  # optimizer steps
    warmup_steps: int = 0
    eval_steps: int  # evaluate every so many steps
    metric: str  # the key of `evaluate` that tables report, e.g. eval/acc
    higher_is_better = True
    has_logits = True  # outputs are logits; false: values, whose softmax means nothing
    has_labels = False  # batches carry class indices under "label"
    has_noise = False  # `noise_like` makes random inputs
    no_sharing: str | None = None  # why several processes cannot share its batches
    no_parts: str | None = None  # why a batch cannot be cut at all, by processes or `accumulate`
    yields_share = False  # `batches` yields this process's rows only: `processes.part(batch_size)`
    static_shapes = True  # every batch has the same shapes, so a step can be captured
    loss_dtype = torch.float32  # of the outputs as they enter the loss
    penalised = slice(None)  # which outputs a penalty sees; PPO: the action logits
    workers: int | None = None  # processes that read data, where any do; None: one per core
    num_examples = 0  # training examples that `examples` can give; 0: measures find none

    def prepare(self, device: torch.device, seed: int) -> None:
        """Loads the data. Until then only settings are known, which is enough to check them."""

    def provenance(self) -> dict[str, str]:
        """What a run's record must say besides the usual, e.g. the version of a simulator."""
        return {}

    def check_model(self, model) -> None:
        """Raises ValueError where this task cannot train this model."""

    def batches(self, model, start: int) -> Generator[Batch]:
        """Batches from step `start` on, the same ones whenever they are asked for."""
        raise NotImplementedError

    def field(self, model, batch: Batch) -> Field:
        raise NotImplementedError

    def loss(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """The mean loss, and what to log; of classes the cross-entropy, and the accuracy."""
        loss = F.cross_entropy(outputs.to(self.loss_dtype), batch["label"])
        accuracy = (outputs.argmax(-1) == batch["label"]).float().mean()
        return loss, {"loss": loss.detach(), "acc": 100 * accuracy}

    def evaluation_steps(self) -> Sequence[int]:
        """The steps after which the model is evaluated, rising; beside them always the last."""
        return range(self.eval_steps, self.total_steps + 1, self.eval_steps)

    def evaluate(self, model) -> dict[str, float]:
        """Numbers by name, eval/NAME for those that tables may show; others are only logged."""
        raise NotImplementedError

    def examples(self, index: Tensor) -> Batch:
        """Training examples as they are, without augmentation: what measures look at.

        Args:
            index: (N,) on the CPU, below `num_examples`.
        """
        raise NotImplementedError

    def noise_like(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """Random inputs in the space of the field."""
        raise NotImplementedError

    def can_save(self, step: int) -> bool:
        """False where `batches` could not start again, e.g. inside a PPO rollout's epochs."""
        return True

    def state_dict(self) -> dict:
        """Only what `batches(start)` cannot recompute, e.g. reward statistics."""
        return {}

    def load_state_dict(self, state: dict) -> None:
        pass


def check_warmup(unit: str, warmup: float, total: int) -> None:
    """Refuses a warm-up that does not fit into training; both in `unit`, "epochs" or "steps"."""
    if not_negative(f"task.warmup_{unit}", warmup) > total:
        raise ValueError(f"task.warmup_{unit}={warmup}: must be at most task.{unit}={total}")


@torch.no_grad()
def check_shapes(
    model: nn.Module, key: str, *, inputs: tuple[int, ...], outputs: int, remedy: str
) -> None:
    """Refuses a model that does not make `outputs` numbers of an input of shape `inputs`.

    A loss may broadcast over others, or leave them idle, and nobody would notice. `key` and
    `remedy` are for messages: what of the task asks for it, and what would do.
    """
    kind, shape = type(model).__name__, " x ".join(map(str, inputs))
    device = next(model.parameters()).device
    try:
        with evaluating(model):
            found = tuple(model(torch.zeros(1, *inputs, device=device)).shape[1:])
    except Exception as error:  # models complain in a dozen ways
        reason = f"{kind} takes no inputs of {shape} ({' '.join(str(error).split())})"
        raise ValueError(f"{key}: {reason}; {remedy}") from error
    if found != (outputs,):
        has = " x ".join(map(str, found)) or "no"
        raise ValueError(f"{key}: {kind} has {has} outputs, needed are {outputs}; {remedy}")
