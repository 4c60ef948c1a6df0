"""The task interface: data, field, loss and evaluation."""

from collections.abc import Callable, Generator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ed.core.field import Field
from ed.core.model_state import evaluating
from ed.core.validate import not_negative
from ed.datasets.batches import Batch


class Task:
    """Base class of all tasks. Constructor arguments may be in epochs; attributes are in steps."""

    batch_size: int
    total_steps: int  # optimizer steps
    warmup_steps: int = 0
    eval_steps: int  # steps between evaluations
    metric: str  # the main metric: a key of `evaluate`, e.g. eval/acc
    higher_is_better = True
    has_logits = True  # False if softmax of the outputs is meaningless
    has_labels = False  # whether batches have class indices under "label"
    has_noise = False  # whether `noise_like` is implemented
    no_sharing: str | None = None  # why several processes cannot share a batch
    no_parts: str | None = None  # why processes or `accumulate` cannot split a batch
    no_evaluation: str | None = None  # why an untrained model cannot be evaluated
    yields_share = False  # whether `batches` yields only the rows of this process
    static_shapes = True  # whether all batches have the same shapes, as CUDA graphs require
    loss_dtype = torch.float32  # dtype in which the loss is computed, at least
    penalised = slice(None)  # outputs that penalties apply to; PPO: the action logits
    workers: int | None = None  # number of data-loading processes; None: one per core
    num_examples = 0  # number of training examples that `examples` can return
    num_validation = 0  # number of examples that `validation_examples` can return; 0: none

    def prepare(self, device: torch.device, seed: int) -> None:
        """Loads the data. The constructor has already checked the settings."""

    def provenance(self) -> dict[str, str]:
        """Returns details to store in meta.json, e.g. the version of a simulator."""
        return {}

    def log_remarks(self) -> None:
        """Logs a warning for each irregularity in the data."""

    def check_model(self, model) -> None:
        """Raises ValueError if this task cannot train this model."""

    def batches(self, model, start: int) -> Generator[Batch]:
        """Yields reproducible batches, starting at step `start`."""
        raise NotImplementedError

    def field(self, model, batch: Batch) -> Field:
        raise NotImplementedError

    def loss(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the mean loss and values to log; by default, cross-entropy and accuracy."""
        wide = outputs.to(torch.promote_types(outputs.dtype, self.loss_dtype))
        loss = F.cross_entropy(wide, batch["label"])
        accuracy = (outputs.argmax(-1) == batch["label"]).float().mean()
        return loss, {"loss": loss.detach(), "acc": 100 * accuracy}

    def evaluation_steps(self) -> Sequence[int]:
        """Returns the steps after which to evaluate, in order; the last step is always added."""
        if not self.total_steps:
            return ()
        return range(self.eval_steps, self.total_steps + 1, self.eval_steps)

    def evaluate(self, model) -> dict[str, float]:
        """Returns metrics by name; tables can show those under eval/, others are only logged."""
        raise NotImplementedError

    def examples(self, index: Tensor) -> Batch:
        """Returns training examples without augmentation, for measures.

        Args:
            index: (N,) on the CPU, with values below `num_examples`.
        """
        raise NotImplementedError

    def validation_examples(self, index: Tensor) -> Batch:
        """Returns validation examples for measures; optional. `index` is as in `examples`."""
        raise NotImplementedError

    def probe(self) -> Batch | None:
        """Returns two examples for checks before training, or None if there are no examples."""
        has_examples = type(self).examples is not Task.examples
        return self.examples(torch.arange(2)) if has_examples else None

    def images(self, batch: Batch) -> Tensor | None:
        """Returns the images of a batch, (N, 3, H, W) in [0, 1], or None if it has no images."""
        return None

    def input_stages(self) -> dict[str, Callable[[int], object]]:
        """Returns functions that take an example's index, one per loading stage, for benchmarks."""
        return {}

    def noise_like(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """Returns random inputs in the space of the field."""
        raise NotImplementedError

    def can_save(self, step: int) -> bool:
        """Returns whether `batches` can restart after this step; PPO: only between rollouts."""
        return True

    def state_dict(self) -> dict:
        """Returns state that `batches(start)` cannot recompute, e.g. reward statistics."""
        return {}

    def load_state_dict(self, state: dict) -> None:
        pass


class EpochTask(Task):
    """A task on a fixed data set, with training length and warm-up given in epochs."""

    def count_steps(self, examples: int) -> None:
        """Converts epochs of `examples` training examples to steps."""
        if examples < self.batch_size:
            raise ValueError(
                f"task.batch_size={self.batch_size}: task.data={self.data} has only {examples} "
                "training examples; reduce task.batch_size"
            )
        self.steps_per_epoch = examples // self.batch_size
        self.total_steps = self.epochs * self.steps_per_epoch
        self.warmup_steps = round(self.warmup_epochs * self.steps_per_epoch)
        self.eval_steps = self.eval_every * self.steps_per_epoch


def check_warmup(unit: str, warmup: float, total: int) -> None:
    """Raises if warm-up is longer than training; `unit` is "epochs" or "steps"."""
    if not_negative(f"task.warmup_{unit}", warmup) > total:
        raise ValueError(f"task.warmup_{unit}={warmup}: must be at most task.{unit}={total}")


@torch.no_grad()
def check_shapes(
    model: nn.Module, key: str, *, inputs: tuple[int, ...], outputs: int, remedy: str
) -> None:
    """Raises unless the model maps an input of shape `inputs` to `outputs` numbers.

    Otherwise, the loss could silently broadcast or ignore some outputs. `key` and `remedy` are
    parts of the error message.
    """
    kind, shape = type(model).__name__, " x ".join(map(str, inputs))
    device = next(model.parameters()).device
    try:
        with evaluating(model):
            found = tuple(model(torch.zeros(1, *inputs, device=device)).shape[1:])
    except Exception as error:  # models may raise any type
        reason = f"{kind} rejects inputs of shape {shape} ({' '.join(str(error).split())})"
        raise ValueError(f"{key}: {reason}; {remedy}") from error
    if found != (outputs,):
        has = " x ".join(map(str, found)) or "no"
        raise ValueError(f"{key}: {kind} has {has} outputs instead of {outputs}; {remedy}")
