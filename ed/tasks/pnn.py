"""The paper's controlled study: learning polynomial maps R^3 -> R^3 of known degree."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ed.core.field import Field
from ed.core.validate import choice, count, counts
from ed.runtime.streams import generator
from ed.tasks.base import Batch, Task, check_shapes, check_warmup

RANGE = 2.0  # for inputs in [-2, 2]^3; not in the paper, but reproduces its table
MAPS = range(1, 7)
TEST_EXAMPLES = 10_000


def target_map(number: int, x: Tensor) -> Tensor:
    """Evaluates map `number` (1 to 6) of the paper at x (N, 3). Maps 4-6 are twice maps 1-3."""
    choice("task.map", number, MAPS)
    x1, x2, x3 = x.unbind(-1)
    scale, base = (1, number) if number <= 3 else (2, number - 3)
    if base == 1:
        rows = (x3 + 2, x2 + 3, x1 + 1)
    elif base == 2:
        rows = (x1 * x2, x2 * x3, x1 * x3)
    else:
        rows = (x1 * x2 * x3, x1**2 * x2 * x3**2, x1**2 * x2 * x3 + x2**2 * x3)
    return scale * torch.stack(rows, dim=-1)


def uniform_inputs(count: int, draw: torch.Generator) -> Tensor:
    """Draws `count` points uniformly from [-2, 2]^3: (count, 3), float64."""
    return RANGE * (2 * torch.rand(count, 3, generator=draw, dtype=torch.float64) - 1)


class PolynomialMaps(Task):
    """Learns a map from new random inputs at every step, with mean squared error.

    Args:
        map: number of the map, 1 to 6.
        examples: number of fixed inputs for measures.
    """

    metric = "eval/mse"
    higher_is_better = False
    has_logits = False

    def __init__(
        self,
        map: int = 1,
        *,
        steps: int = 4000,
        warmup_steps: int = 200,
        batch_size: int = 256,
        eval_every: int = 1000,
        examples: int = 20000,
    ):
        target_map(map, torch.zeros(1, 3))
        counts("task", steps=steps, batch_size=batch_size, eval_every=eval_every)
        count("task.examples", examples, least=2)  # measures connect pairs
        check_warmup("steps", warmup_steps, steps)
        self.map, self.batch_size, self.num_examples = map, batch_size, examples
        self.total_steps, self.warmup_steps, self.eval_steps = steps, warmup_steps, eval_every

    def check_model(self, model: nn.Module) -> None:
        remedy = "use model=pnn with model.inputs=3 and model.outputs=3"
        check_shapes(model, "task=pnn", inputs=(3,), outputs=3, remedy=remedy)

    def prepare(self, device: torch.device, seed: int) -> None:
        self.device, self.seed = device, seed
        # use the run's seed, so that the spread over seeds includes the choice of paths
        self.inputs = uniform_inputs(self.num_examples, generator(seed, "examples")).to(device)
        self.test = uniform_inputs(TEST_EXAMPLES, generator(seed, "test")).to(device)

    def batches(self, model, start: int) -> Iterator[Batch]:
        for step in range(start, self.total_steps):
            x = uniform_inputs(self.batch_size, generator(self.seed, "inputs", step))
            if self.device.type == "cuda":  # copying from pageable memory would block
                x = x.pin_memory()
            yield self._labelled(x.to(self.device, non_blocking=True))

    def examples(self, index: Tensor) -> Batch:
        return self._labelled(self.inputs[index.to(self.device)])

    def field(self, model: nn.Module, batch: Batch) -> Field:
        return Field.of(model, batch["x"])

    def loss(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        loss = (outputs - batch["y"]).square().mean()
        return loss, {"mse": loss.detach()}

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        target = target_map(self.map, self.test)
        error = model(self.test) - target
        relative = error.norm() / target.norm()
        return {"eval/mse": error.square().mean().item(), "eval/relative_error": relative.item()}

    def _labelled(self, x: Tensor) -> Batch:
        return {"x": x, "y": target_map(self.map, x)}
