"""Jacobian regularization with random projections (Hoffman et al., 2019)."""

import contextlib
import logging
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from ed.core.model_state import batch_norms
from ed.core.outputs import pick
from ed.core.validate import count, not_negative
from ed.regularizers.base import COMPILATION, Regularizer, StepState

logger = logging.getLogger("ed")


class Jacobian(Regularizer):
    """task loss + weight R, where R estimates half the mean squared norm of d logits / dx.

    The norm is the Frobenius norm, and x is the field's input: normalised pixels for
    task.space=input. In a feature space, R also has a gradient with respect to earlier layers,
    which can lower it simply by scaling the features up.
    """

    no_checkpointing = "regularizer=jacobian differentiates twice, with different kernels"
    no_kernels = "regularizer=jacobian differentiates twice"

    def __init__(self, weight: float = 0.1, *, projections: int = 1):
        self.weight = not_negative("regularizer.weight", weight)
        self.projections = count("regularizer.projections", projections)
        self.pull_back = None  # set to the compiled function by `compile`
        self.width: int | None = None  # number of outputs, set at the first step

    def check_model(self, model: nn.Module, task) -> None:
        batch = task.probe()
        if batch is not None and (outputs := task.field(model, batch)()).dim() != 2:
            raise ValueError(
                f"regularizer=jacobian: needs outputs (N, C), but got {tuple(outputs.shape)}; use "
                "regularizer=ed or none"
            )

    def compile(self, model: nn.Module) -> None:
        """Compiles the forward pass and its first derivative in one graph.

        A compiled graph supports only one backward pass, which the weight update needs.
        """
        unsupported = None
        if batch_norms(model):
            unsupported = "the running statistics of batch norm"
        elif any(getattr(part, "custom_operators", False) for part in model.modules()):
            unsupported = "the kernels of this model"
        if unsupported:
            reason = f"torch.func does not support {unsupported}"
            logger.info("the training step is not compiled: %s", reason)
        else:
            self.pull_back = torch.compile(pull_back, **COMPILATION)

    def objective(self, task, field, batch, state: StepState) -> tuple[Tensor, dict[str, Tensor]]:
        with plain_attention():
            if self.pull_back is not None:
                outputs, penalty = self.compiled_estimate(field, task.penalised, state.generator)
            else:
                if not field.x.requires_grad:  # pixels; features already require it
                    field = field.at(field.x.detach().requires_grad_())
                outputs = field()
                penalty = self.estimate(outputs[:, task.penalised], field.x, state.generator)
        loss, report = task.loss(outputs, batch)
        return loss + self.weight * penalty, report | {"penalty": penalty.detach()}

    def compiled_estimate(self, field, penalised: slice, generator) -> tuple[Tensor, Tensor]:
        """Computes outputs and penalty with the compiled function, given random directions."""
        if self.width is None:
            # restore the random state, as a resumed run repeats this pass
            devices = [field.x.device] if field.x.is_cuda else []
            with torch.no_grad(), torch.random.fork_rng(devices):
                self.width = field().shape[-1]
        dtype = torch.promote_types(field.x.dtype, torch.float32)
        zeros = torch.zeros(len(field.x), self.width, device=field.x.device, dtype=dtype)
        directions = []
        for _ in range(self.projections):
            v = zeros.clone()
            v[:, penalised] = sphere(zeros[:, penalised], generator)
            directions.append(v)
        outputs, total = self.pull_back(
            field.forward, field.x, field.context, directions, field.output
        )
        classes = zeros[:, penalised].shape[1]
        return outputs, classes * total / (2 * len(zeros) * self.projections)

    def estimate(self, outputs: Tensor, x: Tensor, generator: torch.Generator) -> Tensor:
        """Returns C ||v'J||^2 / (2 B), averaged over directions v; estimates ||J||_F^2 / (2 B).

        The directions are uniform on the unit sphere.

        Args:
            outputs: (B, C), computed from x.
            x: (B, ...), must require grad.
        """
        batch_size, classes = outputs.shape
        outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
        total = outputs.new_zeros(())
        # the backward pass already uses the forward pass's dtypes; autocast would change them
        with torch.autocast(x.device.type, enabled=False):
            for _ in range(self.projections):
                v = sphere(outputs, generator)
                (projected,) = torch.autograd.grad(outputs, x, v, create_graph=True)
                total = total + projected.to(outputs.dtype).square().sum()
        return classes * total / (2 * batch_size * self.projections)


@contextlib.contextmanager
def plain_attention():
    """Uses torch's math attention, as fused kernels have no second derivative.

    In a bf16 step it runs in bf16; by default, torch would use float32 and round the result.
    """
    switch = torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp
    before = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    switch(True)
    try:
        with sdpa_kernel(SDPBackend.MATH), Aligned():
            yield
    finally:
        switch(before)


class Aligned(TorchFunctionMode):
    """Pads attention to a multiple of 8 tokens.

    Tensor cores need rows aligned to 16 bytes. Without padding, the 65 tokens of a ViT cannot use
    them, and attention takes over a quarter of ViT-Tiny's step.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.scaled_dot_product_attention:
            return aligned_attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def aligned_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *rest, **settings
) -> Tensor:
    """Calls `scaled_dot_product_attention` on padded tokens."""
    tokens, others = query.shape[-2], key.shape[-2]
    add, hide = -tokens % 8, -others % 8
    causal = rest[1:2] == (True,) or settings.get("is_causal", False)
    if causal or not (add or hide):
        return F.scaled_dot_product_attention(query, key, value, attn_mask, *rest, **settings)
    if attn_mask is None:
        attn_mask = query.new_zeros(1, others)
    elif attn_mask.dtype == torch.bool:
        attn_mask = query.new_zeros(()).where(attn_mask, -math.inf)
    attn_mask = attn_mask.expand(*attn_mask.shape[:-2], tokens, others)
    mask = F.pad(F.pad(attn_mask, [0, hide], value=-math.inf), [0, 0, 0, add])
    query, key, value = (
        F.pad(x, [0, 0, 0, more]) for x, more in ((query, add), (key, hide), (value, hide))
    )
    out = F.scaled_dot_product_attention(query, key, value, mask, *rest, **settings)
    return out[..., :tokens, :]


def pull_back(
    forward, x: Tensor, context: dict, directions: list[Tensor], output: str | int | None = None
) -> tuple[Tensor, Tensor]:
    """Returns outputs (B, C) at x, and the sum of ||v'J||^2 over rows and directions v (B, C)."""
    dtype = directions[0].dtype
    outputs, transposed = torch.func.vjp(lambda p: pick(forward(p, context), output).to(dtype), x)
    # unlike in `estimate`, keep autocast on: traced attention would otherwise mix precisions
    squares = [transposed(v)[0].to(dtype).square().sum() for v in directions]
    return outputs, torch.stack(squares).sum()


def sphere(like: Tensor, generator: torch.Generator) -> Tensor:
    """Draws a uniform random unit vector for each row of `like`: (B, C) -> (B, C)."""
    gaussian = torch.randn(like.shape, generator=generator, device=like.device, dtype=like.dtype)
    return F.normalize(gaussian, dim=-1)
