"""Grokking: learn all equations a o b = c modulo p from some of them.

The inputs are the tokens `a o b =`; the logits at the equals sign predict the answer c. openai/grok
also puts end-of-sequence tokens around equations and trains on the closing one, which is learned
within a few steps.
"""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from ed.core.field import Field
from ed.core.validate import choice, count, counts, fraction
from ed.datasets.batches import Batch, shuffled_batches
from ed.models.grokking import GrokkingTransformer
from ed.runtime.streams import generator
from ed.tasks.base import Task, check_warmup

OPERATIONS = {
    "addition": lambda x, y: x + y,
    "subtraction": lambda x, y: x - y,
    "multiplication": lambda x, y: x * y,
    "division": None,  # handled in `equations`
    "quadratic": lambda x, y: x**2 + x * y + y**2,
    "cubic": lambda x, y: x**3 + x * y,
}
PRECISIONS = {"float32": torch.float32, "float64": torch.float64}


def equations(operation: str, modulus: int) -> Tensor:
    """Returns every equation a o b = c modulo `modulus` as rows (a, b, c).

    For division, b != 0 and a = b c.
    """
    choice("task.operation", operation, OPERATIONS)
    count("task.modulus", modulus, least=2)
    numbers = torch.arange(modulus)
    if operation == "division":
        if any(modulus % d == 0 for d in range(2, math.isqrt(modulus) + 1)):
            raise ValueError(f"task.modulus={modulus}: division needs a prime modulus")
        c, b = torch.cartesian_prod(numbers, numbers[1:]).unbind(1)
        return torch.stack([b * c % modulus, b, c], dim=1)
    a, b = torch.cartesian_prod(numbers, numbers).unbind(1)
    return torch.stack([a, b, OPERATIONS[operation](a, b) % modulus], dim=1)


class ModularArithmetic(Task):
    """Learns a binary operation from some of its equations; evaluates on these and on the rest.

    Args:
        split_seed: seed of the split, independent of the run's seed.
        batch_size: capped at half of the training equations.
        eval_every: steps between evaluations.
        eval_per_decade: additional, geometrically spaced evaluations per factor of ten in steps,
            which resolve the first thousand steps.
        loss_precision: dtype of log-softmax and loss, not of the network. With `float32`, the
            gradients of well-fitted equations round to zero (softmax collapse, Prieto et al.
            2025).
    """

    metric = "eval/acc"
    has_labels = True

    def __init__(
        self,
        operation: str = "division",
        modulus: int = 97,
        *,
        train_fraction: float = 0.3,
        split_seed: int = 0,
        steps: int = 1_000_000,
        warmup_steps: int = 10,
        batch_size: int = 512,
        eval_every: int = 10000,
        eval_per_decade: int = 20,
        loss_precision: str = "float32",
    ):
        counts("task", steps=steps, batch_size=batch_size)
        counts("task", eval_every=eval_every, eval_per_decade=eval_per_decade)
        check_warmup("steps", warmup_steps, steps)
        fraction("task.train_fraction", train_fraction)
        choice("task.loss_precision", loss_precision, PRECISIONS)
        self.loss_dtype = PRECISIONS[loss_precision]
        self.modulus, self.rows = modulus, equations(operation, modulus)
        self.num_examples = round(train_fraction * len(self.rows))
        if not 2 <= self.num_examples < len(self.rows):
            raise ValueError(
                f"task.train_fraction={train_fraction}: {len(self.rows)} equations must be split "
                "into at least 2 for training and 1 for validation"
            )
        self.num_validation = len(self.rows) - self.num_examples
        self.split_seed, self.total_steps, self.warmup_steps = split_seed, steps, warmup_steps
        self.batch_size = min(batch_size, math.ceil(self.num_examples / 2))
        self.eval_steps, self.eval_per_decade = eval_every, eval_per_decade

    def check_model(self, model: nn.Module) -> None:
        if not isinstance(model, GrokkingTransformer):
            raise ValueError(f"task=grokking: use model=grokking, not {type(model).__name__}")
        if model.vocabulary != self.modulus + 2 or len(model.positions) != 4:
            raise ValueError(
                f"model.numbers={model.vocabulary - 2}, model.length={len(model.positions)}: use "
                f"model.numbers={self.modulus}, model.length=4"
            )

    def prepare(self, device: torch.device, seed: int) -> None:
        self.device, self.seed = device, seed
        order = torch.randperm(len(self.rows), generator=generator(self.split_seed, "split"))
        rows = self.rows[order].to(device)
        self.train, self.validation = (
            self._tokens(part) for part in (rows[: self.num_examples], rows[self.num_examples :])
        )

    def _tokens(self, rows: Tensor) -> Batch:
        """Returns the tokens `a o b =` (N, 4) and the answers (N,)."""
        a, b, c = rows.unbind(1)
        operator, equals = torch.full_like(a, self.modulus), torch.full_like(a, self.modulus + 1)
        return {"ids": torch.stack([a, operator, b, equals], dim=1), "label": c.contiguous()}

    def evaluation_steps(self) -> Sequence[int]:
        points = math.floor(self.eval_per_decade * math.log10(self.total_steps)) + 1
        geometric = {round(10 ** (i / self.eval_per_decade)) for i in range(points)}
        return sorted(geometric.union(super().evaluation_steps()))

    def batches(self, model, start: int) -> Iterator[Batch]:
        steps, how = range(start, self.total_steps), {"seed": self.seed, "device": self.device}
        for _, index in shuffled_batches(self.num_examples, self.batch_size, steps, **how):
            yield self.examples(index)

    def examples(self, index: Tensor) -> Batch:
        index = index.to(self.device)
        # has less host overhead than value[index], which matters for such small steps
        return {name: value.index_select(0, index) for name, value in self.train.items()}

    def validation_examples(self, index: Tensor) -> Batch:
        return {name: value[index.to(self.device)] for name, value in self.validation.items()}

    def field(self, model: nn.Module, batch: Batch) -> Field:
        return Field.of(model, model.embed(batch["ids"]))

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        values = {}
        for prefix, part in (("eval/", self.validation), ("eval/train_", self.train)):
            _, report = self.loss(self.field(model, part)(), part)
            values |= {f"{prefix}{name}": value.item() for name, value in report.items()}
        return values
