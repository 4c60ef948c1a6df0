"""Centred PCA of the outputs on each path, computed from the r x r Gram matrix.

A path has few points (r) and possibly many outputs (C), so the scores V sqrt(L) come from the r x r
eigenproblem G = Yc Yc' = V L V'. For 4 x 1000 outputs on a GPU this is dozens of times cheaper than
a batched SVD. G squares the condition number, so we use float64: in float32, small components were
mostly rounding error, which doubled ED_norm with ten components (tests/core/test_pca.py).

Measurements need no gradient. If C < r, they use the C x C matrix Yc' Yc = W L W' and the scores
Yc W, which is dozens of times faster for 10 outputs at 200 nodes.
"""

import torch
from torch import Tensor

from ed.core import small
from ed.core.fit import widened
from ed.core.validate import count
from ed.kernels import eigen as kernel

OUTPUT_ROUNDING = 2  # multiple of eps * largest output; measured: at most 1.1 (without FMA)
GRAM_ROUNDING = 16  # multiple of eps * largest eigenvalue; measured: at most 3 (r = 4 to 200)


def principal_scores(values: Tensor, components: int, *, detach: bool = False) -> Tensor:
    """Returns the principal component scores of the outputs on each path.

    Args:
        values: (..., r, C), outputs along the paths.
        components: m <= r - 1, as r centred points span at most r - 1 directions.
        detach: treat the directions as constants in the backward pass.
    Returns:
        (..., r, m), in order of decreasing variance; the sign of each column is arbitrary.
    """
    resolution = values.shape[-2]
    check_components(components, resolution)
    with torch.autocast(values.device.type, enabled=False):
        values = values.to(torch.promote_types(values.dtype, torch.float32))
        centred = widened(values - values.mean(-2, keepdim=True))
        noise = _rounding(values.detach())
        if components <= values.shape[-1] < resolution and not values.requires_grad:
            eigenvalues, directions = _gram_eigen_above(centred.mT, noise)
            scores = small.matmul(centred, directions)
            scores = torch.where(eigenvalues[..., None, :] == 0, 0.0, scores)  # nan stays nan
            return scores[..., :components].to(values.dtype)
        if not detach:
            return _GramScores.apply(centred, noise, components, values.dtype)[0].to(values.dtype)
        with torch.no_grad():
            eigenvalues, vectors = _gram_eigen_above(centred, noise)
            top = (vectors * _inverse_root(eigenvalues)[..., None, :])[..., :components]
        # equals centred @ directions, but avoids the large matrix directions = centred' V / sqrt(L)
        gram = small.matmul(centred, centred.detach().mT)
        return small.matmul(gram, top).to(values.dtype)


def check_components(components: int, resolution: int) -> None:
    if count("components", components) > resolution - 1:
        raise ValueError(
            f"components={components}: {resolution} nodes span only {resolution - 1} directions; "
            f"use at most {resolution - 1}, or a larger resolution"
        )


def check_directions(components: int | None, outputs: int, *, softmax: bool) -> None:
    """Raises ValueError if there are more components than directions in which outputs vary."""
    possible = outputs - 1 if softmax else outputs
    if components is not None and components > possible:
        what = f"probabilities of {outputs} classes" if softmax else f"{outputs} outputs"
        raise ValueError(
            f"components={components}: {what} vary in only {possible} directions; use at most "
            f"{possible}"
        )


def waits_for_device(resolution: int) -> bool:
    """Whether PCA on paths with this many nodes syncs a GPU with the host."""
    return not kernel.USABLE or resolution > kernel.LARGEST


class _GramScores(torch.autograd.Function):
    """Maps centred values (..., r, C) to scores (..., r, m), with a gradient that stays finite.

    With S = V sqrt(L) and the upstream gradient B, the gradient of the centred values is
    (D + D') Yc with D = V [diag(dL) + F * (V' dV)] V', where dV = B sqrt(L),
    dL_j = v_j'B_j / (2 sqrt(L_j)) and F_ij = 1 / (l_j - l_i). Both divisions are protected against
    zero. If two eigenvalues are equal in `precision`, the dtype of the original values, the
    rotation between their vectors is arbitrary and gets no gradient.
    """

    @staticmethod
    def forward(
        centred: Tensor, noise: Tensor, components: int, precision: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        eigenvalues, vectors = _gram_eigen_above(centred, noise)
        scores = vectors[..., :components] * eigenvalues[..., None, :components].sqrt()
        return scores, eigenvalues, vectors

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        centred, _, ctx.components, ctx.precision = inputs
        _, eigenvalues, vectors = output
        ctx.mark_non_differentiable(eigenvalues, vectors)
        ctx.save_for_backward(centred, eigenvalues, vectors)

    @staticmethod
    def backward(ctx, grad: Tensor, *_):
        centred, eigenvalues, vectors = ctx.saved_tensors
        m, info = ctx.components, torch.finfo(ctx.precision)
        left, right = eigenvalues[..., :, None], eigenvalues[..., None, :m]
        blur = info.eps**0.5 * (left + right) + info.tiny**0.5  # relative to the eigenvalues
        rotation = (right - left) / ((right - left).square() + blur.square())
        projected = small.matmul(vectors.mT, grad)  # (..., r, m)
        inner = projected * right.sqrt() * rotation  # its diagonal is 0; dL is added there
        inverse = _inverse_root(eigenvalues)[..., :m]
        growth = projected.diagonal(dim1=-2, dim2=-1) * inverse / 2
        inner.diagonal(dim1=-2, dim2=-1).add_(growth)
        gram_grad = small.matmul(small.matmul(vectors, inner), vectors[..., :m].mT)
        gradient = small.matmul(gram_grad + gram_grad.mT, centred)
        gradient = _Once.apply(gradient, centred) if torch.is_grad_enabled() else gradient
        return gradient, None, None, None


class _Once(torch.autograd.Function):
    """Passes a gradient through, and raises if it is differentiated again.

    V and L would be treated as constants, so second derivatives would be silently wrong.
    """

    @staticmethod
    def forward(gradient: Tensor, point: Tensor) -> Tensor:
        return gradient.clone()

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        pass

    @staticmethod
    def backward(ctx, *_):
        raise NotImplementedError(
            "components: effective degree with PCA has no second derivative; use components=None"
        )


def gram_eigen(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues (decreasing, >= 0) and eigenvectors of symmetric (..., r, r) matrices."""
    if kernel.applies(gram):
        eigenvalues, vectors = kernel.eigen(gram)
    else:
        # return nan so that callers can report non-finite outputs; LAPACK's error is unclear
        finite = gram.isfinite().all(-1).all(-1)
        eigenvalues, vectors = torch.linalg.eigh(torch.where(finite[..., None, None], gram, 0.0))
        eigenvalues = torch.where(finite[..., None], eigenvalues, torch.nan)
    order = eigenvalues.argsort(dim=-1, descending=True)
    vectors = vectors.gather(-1, order[..., None, :].expand_as(vectors))
    return eigenvalues.gather(-1, order).clamp_min(0), vectors


def _rounding(values: Tensor) -> Tensor:
    """Bounds the scores (..., 1) that rounding error in outputs (..., r, C) can produce."""
    largest = values.abs().amax((-2, -1)).unsqueeze(-1)
    # the spectral norm of a matrix of unit noise
    spread = values.shape[-2] ** 0.5 + values.shape[-1] ** 0.5
    return widened(largest) * (OUTPUT_ROUNDING * torch.finfo(values.dtype).eps * spread)


def _gram_eigen_above(centred: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Calls `gram_eigen` and sets eigenvalues at the level of rounding error to 0.

    ED_norm does not depend on the size of a component, so it would otherwise measure rounding error
    on paths that span fewer directions than `components`.
    """
    eigenvalues, vectors = gram_eigen(small.matmul(centred, centred.mT))
    # `noise` bounds scores, whose squares are eigenvalues; `own` is rounding in the Gram matrix
    own = GRAM_ROUNDING * torch.finfo(eigenvalues.dtype).eps * eigenvalues[..., :1]
    threshold = torch.maximum(noise.square(), own)
    return torch.where(eigenvalues <= threshold, 0.0, eigenvalues), vectors  # nan stays nan


def _inverse_root(eigenvalues: Tensor) -> Tensor:
    """1 / sqrt(l), or 0 for l = 0: a direction without variance gets no gradient."""
    tiny = torch.finfo(eigenvalues.dtype).tiny
    return torch.where(eigenvalues > 0, eigenvalues.clamp_min(tiny).rsqrt(), 0.0)
