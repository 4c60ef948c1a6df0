"""The task interface: data + field + loss + evaluation, without optimizer or checkpoints."""

from collections.abc import Callable, Generator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ed.core.field import Field
from ed.core.model_state import evaluating
from ed.core.validate import not_negative
from ed.datasets.batches import Batch


class Task:
    """Interface and defaults. Constructors take a task's own units, attributes are in steps."""

    batch_size: int
    total_steps: int  # optimizer steps
    warmup_steps: int = 0
    eval_steps: int  # steps between evaluations
    metric: str  # the key of `evaluate` that tables report, e.g. eval/acc
    higher_is_better = True
    has_logits = True  # false: outputs are values, for which softmax is meaningless
    has_labels = False  # batches have class indices under "label"
    has_noise = False  # `noise_like` is implemented
    no_sharing: str | None = None  # why several processes cannot share its batches
    no_parts: str | None = None  # why a batch cannot be split, by processes or `accumulate`
    no_evaluation: str | None = None  # why an untrained model cannot be evaluated
    yields_share = False  # `batches` yields this process's rows only: `processes.part(batch_size)`
    static_shapes = True  # all batches have the same shapes, so a step can be captured
    loss_dtype = torch.float32  # of the outputs in the loss
    penalised = slice(None)  # the outputs that a penalty sees; PPO: the action logits
    workers: int | None = None  # data loading processes, if any; None: one per core
    num_examples = 0  # training examples that `examples` can return

    def prepare(self, device: torch.device, seed: int) -> None:
        """Loads the data. Settings are checked before, in the constructor."""

    def provenance(self) -> dict[str, str]:
        """Returns additions to a run's record, e.g. the version of a simulator."""
        return {}

    def log_remarks(self) -> None:
        """Logs a warning for each irregularity of the data."""

    def check_model(self, model) -> None:
        """Raises ValueError if this task cannot train this model."""

    def batches(self, model, start: int) -> Generator[Batch]:
        """Yields batches from step `start` on, reproducibly."""
        raise NotImplementedError

    def field(self, model, batch: Batch) -> Field:
        raise NotImplementedError

    def loss(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the mean loss and values to log; here cross-entropy and accuracy."""
        loss = F.cross_entropy(outputs.to(self.loss_dtype), batch["label"])
        accuracy = (outputs.argmax(-1) == batch["label"]).float().mean()
        return loss, {"loss": loss.detach(), "acc": 100 * accuracy}

    def evaluation_steps(self) -> Sequence[int]:
        """Returns the steps after which to evaluate, ascending; the last step is implied."""
        return range(self.eval_steps, self.total_steps + 1, self.eval_steps)

    def evaluate(self, model) -> dict[str, float]:
        """Returns values by name; tables may show those under eval/, others are only logged."""
        raise NotImplementedError

    def examples(self, index: Tensor) -> Batch:
        """Returns training examples without augmentation, for measures.

        Args:
            index: (N,) on the CPU, below `num_examples`.
        """
        raise NotImplementedError

    def images(self, batch: Batch) -> Tensor | None:
        """Returns the images of a batch, (N, 3, H, W) in [0, 1]; None without images."""
        return None

    def input_stages(self) -> dict[str, Callable[[int], object]]:
        """Returns the steps of loading example i, for benchmarks; {} for data in memory."""
        return {}

    def noise_like(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """Returns random inputs in the space of the field."""
        raise NotImplementedError

    def can_save(self, step: int) -> bool:
        """False where `batches` could not restart, e.g. inside a PPO rollout's epochs."""
        return True

    def state_dict(self) -> dict:
        """Returns what `batches(start)` cannot recompute, e.g. reward statistics."""
        return {}

    def load_state_dict(self, state: dict) -> None:
        pass


class EpochTask(Task):
    """A task on a data set: `epochs`, `warmup_epochs` and `eval_every` are in epochs."""

    def count_steps(self, examples: int) -> None:
        """Converts epochs of `examples` training examples to steps."""
        if examples < self.batch_size:
            raise ValueError(
                f"task.batch_size={self.batch_size}: task.data={self.data} has only {examples} "
                "training examples; reduce it"
            )
        self.steps_per_epoch = examples // self.batch_size
        self.total_steps = self.epochs * self.steps_per_epoch
        self.warmup_steps = round(self.warmup_epochs * self.steps_per_epoch)
        self.eval_steps = self.eval_every * self.steps_per_epoch


def check_warmup(unit: str, warmup: float, total: int) -> None:
    """Raises if the warm-up exceeds training; both in `unit`, "epochs" or "steps"."""
    if not_negative(f"task.warmup_{unit}", warmup) > total:
        raise ValueError(f"task.warmup_{unit}={warmup}: must be at most task.{unit}={total}")


@torch.no_grad()
def check_shapes(
    model: nn.Module, key: str, *, inputs: tuple[int, ...], outputs: int, remedy: str
) -> None:
    """Raises unless the model maps an input of shape `inputs` to `outputs` numbers.

    Otherwise a loss might broadcast, or ignore some outputs, without an error. `key` and `remedy`
    are for the message.
    """
    kind, shape = type(model).__name__, " x ".join(map(str, inputs))
    device = next(model.parameters()).device
    try:
        with evaluating(model):
            found = tuple(model(torch.zeros(1, *inputs, device=device)).shape[1:])
    except Exception as error:  # models raise many types
        reason = f"{kind} rejects inputs of {shape} ({' '.join(str(error).split())})"
        raise ValueError(f"{key}: {reason}; {remedy}") from error
    if found != (outputs,):
        has = " x ".join(map(str, found)) or "no"
        raise ValueError(f"{key}: {kind} has {has} outputs instead of {outputs}; {remedy}")
