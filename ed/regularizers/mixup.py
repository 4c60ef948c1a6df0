"""Mixup (Zhang et al., 2018): trains on mixtures of examples and labels."""

from collections.abc import Callable

import torch
from torch import Tensor

from ed.core.validate import positive
from ed.regularizers.base import Regularizer, StepState, check_two_examples


class Mixup(Regularizer):
    """lam L(out, t1) + (1 - lam) L(out, t2) at lam x1 + (1 - lam) x2, lam ~ Beta(alpha, alpha).

    Cross-entropy is linear in its target, so this equals the soft-label loss. Only the mixed batch
    passes through the network, so it updates batch-norm statistics. Examples are mixed in the
    field's space (pixels or features), within each part of a batch under gradient accumulation.
    """

    def __init__(self, alpha: float = 1.0, *, per_example: bool = False):
        self.alpha, self.per_example = positive("regularizer.alpha", alpha), per_example

    def check(self, task, parts: int = 1) -> None:
        if not task.has_labels:
            raise ValueError(
                f"regularizer=mixup: {type(task).__name__} has no labels; set regularizer=none"
            )
        check_two_examples(task, parts, "mixing needs")

    def objective(self, task, field, batch, state: StepState) -> tuple[Tensor, dict[str, Tensor]]:
        size, device = len(field.x), field.x.device
        partner = torch.randperm(size, generator=state.generator, device=device)
        lam = self.draw(size if self.per_example else 1, field.x, state.generator)
        mixed = field.between(torch.arange(size, device=device), partner, lam[:, None])
        outputs = mixed()
        loss = _per_example(task.loss) if self.per_example else task.loss
        own_loss, own_report = loss(outputs, batch)
        other_loss, other_report = loss(outputs, batch | {"label": batch["label"][partner]})

        def mix(own: Tensor, other: Tensor) -> Tensor:
            return (lam * own + (1 - lam) * other).mean()

        report = {name: mix(own_report[name], other_report[name]) for name in own_report}
        return mix(own_loss, other_loss), report

    def draw(self, count: int, like: Tensor, generator: torch.Generator) -> Tensor:
        """Draws lam ~ Beta(alpha, alpha) on the device of `like`: (count,)."""
        dtype = torch.promote_types(like.dtype, torch.float32)
        if self.alpha == 1:
            return torch.rand(count, generator=generator, device=like.device, dtype=dtype)
        # the method of torch.distributions.Beta, which does not accept a generator
        alphas = torch.full((count, 2), self.alpha, device=like.device, dtype=dtype)
        return torch._sample_dirichlet(alphas, generator=generator)[:, 0]


def _per_example(loss: Callable) -> Callable:
    """Converts a loss that averages over a batch into one that returns each example's loss."""

    def of_one(outputs: Tensor, example: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        return loss(outputs[None], {name: value[None] for name, value in example.items()})

    return torch.vmap(of_one)
