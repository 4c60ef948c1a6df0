"""Jacobian regularization with random projections (Hoffman et al., 2019)."""

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ed.regularizers.base import Moment, Regularizer


class Jacobian(Regularizer):
    """task loss + weight R; R estimates half the mean squared Frobenius norm of d logits / dx.

    x is the field's: the normalised picture for task.space=input. In an inner space it is the
    features, which depend on earlier weights; R is then differentiated through them as well, so the
    earlier layers learn from it too (and could lower it by larger features alone).
    """

    no_compile = "regularizer=jacobian differentiates twice, which torch.compile cannot"
    no_checkpointing = "regularizer=jacobian differentiates twice, each time by other kernels"

    def __init__(self, weight: float, *, projections: int):
        if not weight >= 0:
            raise ValueError(f"regularizer.weight={weight}: must be at least 0")
        if projections < 1:
            raise ValueError(f"regularizer.projections={projections}: must be at least 1")
        self.weight, self.projections = weight, projections

    def objective(self, task, field, batch, moment: Moment) -> tuple[Tensor, dict[str, Tensor]]:
        if not field.x.requires_grad:  # pixels; features already do
            field = field.at(field.x.detach().requires_grad_())
        with sdpa_kernel(SDPBackend.MATH):  # fused attention has no second derivative
            outputs = field()
        loss, report = task.loss(outputs, batch)
        penalty = self.estimate(outputs[:, task.penalised], field.x, moment.generator)
        return loss + self.weight * penalty, report | {"penalty": penalty.detach()}

    def estimate(self, outputs: Tensor, x: Tensor, generator: torch.Generator) -> Tensor:
        """C ||v'J||^2 / (2 B n_proj), v uniform on the unit sphere: E = ||J||_F^2 / (2 B).

        Args:
            outputs: (B, C), computed from x.
            x: (B, ...), requires grad.
        """
        batch_size, classes = outputs.shape
        outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
        total = outputs.new_zeros(())
        # the backward pass keeps the forward's precisions by itself; autocast would change them
        with torch.autocast(x.device.type, enabled=False):
            for _ in range(self.projections):
                v = sphere(outputs, generator)
                (projected,) = torch.autograd.grad(outputs, x, v, create_graph=True)
                total = total + projected.to(outputs.dtype).square().sum()
        return classes * total / (2 * batch_size * self.projections)


def sphere(like: Tensor, generator: torch.Generator) -> Tensor:
    """A uniform unit vector per row of `like`: (B, C) -> (B, C)."""
    gaussian = torch.randn(like.shape, generator=generator, device=like.device, dtype=like.dtype)
    return F.normalize(gaussian, dim=-1)
