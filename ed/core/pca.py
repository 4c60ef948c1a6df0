"""Per-path centred PCA of outputs, through the r x r Gram matrix.

A path has few points (r) and maybe many outputs (C), so the scores come from the r x r
eigen-problem G = Yc Yc' = V L V': scores = V sqrt(L). For 4 x 1000 outputs that is dozens of times
cheaper than a batched SVD on a GPU. It squares the condition number, so it happens in float64: in
float32 small components were mostly rounding, and ED_norm, which does not see how small they are,
came out twice as high with ten of them (tests/test_core_pca.py has the case).
"""

import functools

import torch
from torch import Tensor

from ed.core.fit import widened
from ed.core.validate import count

JACOBI_MAX_SIZE = 16  # above it a Jacobi sweep launches more kernels than it saves
OUTPUT_ROUNDING = 2  # in eps of the largest output; up to 1.1 measured, in sums without FMA
GRAM_ROUNDING = 16  # in eps of the largest eigenvalue; up to 2.5 measured for r = 4 to 200


def principal_scores(values: Tensor, components: int, *, detach: bool = False) -> Tensor:
    """Coordinates of centred values in their own top principal directions.

    Args:
        values: (..., r, C), outputs along the paths.
        components: m <= r - 1, as r centred points span at most r - 1 directions.
        detach: hold the directions constant in the backward pass.
    Returns:
        (..., r, m), each column up to sign, variances falling.
    """
    resolution = values.shape[-2]
    check_components(components, resolution)
    with torch.autocast(values.device.type, enabled=False):
        values = values.to(torch.promote_types(values.dtype, torch.float32))
        centred = widened(values - values.mean(-2, keepdim=True))
        noise = _rounding(values.detach())
        if not detach:
            return _GramScores.apply(centred, noise, components, values.dtype)[0].to(values.dtype)
        with torch.no_grad():
            eigenvalues, vectors = _gram_eigen_above(centred, noise)
            top = (vectors * _inverse_root(eigenvalues)[..., None, :])[..., :components]
        # centred @ directions with directions = centred' V / sqrt(L), which are never formed
        return ((centred @ centred.detach().mT) @ top).to(values.dtype)


def check_components(components: int, resolution: int) -> None:
    if count("components", components) > resolution - 1:
        raise ValueError(
            f"components={components}: {resolution} centred points span at most {resolution - 1} "
            f"directions, so use between 1 and {resolution - 1}, or none, or a larger resolution"
        )


def check_directions(components: int | None, outputs: int, *, softmax: bool) -> None:
    """Raises ValueError where ED_norm would average over directions that cannot vary."""
    possible = outputs - 1 if softmax else outputs
    if components is not None and components > possible:
        what = f"probabilities of {outputs} classes" if softmax else f"{outputs} outputs"
        raise ValueError(
            f"components={components}: {what} vary in at most {possible} directions, and ED_norm "
            f"of the rest would be rounding; use components <= {possible}"
        )


class _GramScores(torch.autograd.Function):
    """Centred values (..., r, C) -> scores (..., r, m), with a backward that is always finite.

    With S = V sqrt(L) and the upstream gradient B, the gradient of the centred values is
    (D + D') Yc with D = V [diag(dL) + F * (V' dV)] V', where dV = B sqrt(L),
    dL_j = v_j'B_j / (2 sqrt(L_j)) and F_ij = 1 / (l_j - l_i). Both quotients are guarded: where two
    eigenvalues meet, the rotation between their vectors is arbitrary and gets no gradient. They
    meet when they do in `precision`, that of the values before they were widened.
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
        blur = info.eps**0.5 * (left + right) + info.tiny**0.5  # relative to the pair: scale-free
        rotation = (right - left) / ((right - left).square() + blur.square())
        projected = vectors.mT @ grad  # (..., r, m)
        inner = projected * right.sqrt() * rotation  # its diagonal is 0, so dL has room there
        inverse = _inverse_root(eigenvalues)[..., :m]
        growth = projected.diagonal(dim1=-2, dim2=-1) * inverse / 2
        inner.diagonal(dim1=-2, dim2=-1).add_(growth)
        gram_grad = vectors @ inner @ vectors[..., :m].mT
        gradient = (gram_grad + gram_grad.mT) @ centred
        gradient = _Once.apply(gradient, centred) if torch.is_grad_enabled() else gradient
        return gradient, None, None, None


class _Once(torch.autograd.Function):
    """A gradient with respect to `point` as it is, which cannot be differentiated again: V and L
    would count as constants, and the second derivative be wrong without a word."""

    @staticmethod
    def forward(gradient: Tensor, point: Tensor) -> Tensor:
        return gradient.clone()

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        pass

    @staticmethod
    def backward(ctx, *_):
        raise NotImplementedError(
            "effective degree with PCA has no second derivatives: leave components out"
        )


def gram_eigen(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues (falling, clamped at 0) and eigenvectors of symmetric (..., r, r) matrices.

    On CUDA `torch.linalg.eigh` reads its status back to the host, which stalls the stream and
    cannot be captured in a graph; small matrices go through Jacobi rotations instead.
    """
    if gram.is_cuda and gram.shape[-1] <= JACOBI_MAX_SIZE:
        eigenvalues, vectors = jacobi_eigen(gram)
    else:
        # LAPACK's error names no cause; nan goes on to those who can say that the outputs are wild
        finite = gram.isfinite().all(-1).all(-1)
        eigenvalues, vectors = torch.linalg.eigh(torch.where(finite[..., None, None], gram, 0.0))
        eigenvalues = torch.where(finite[..., None], eigenvalues, torch.nan)
    order = eigenvalues.argsort(dim=-1, descending=True)
    vectors = vectors.gather(-1, order[..., None, :].expand_as(vectors))
    return eigenvalues.gather(-1, order).clamp_min(0), vectors


def jacobi_eigen(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigen-decomposition by parallel Jacobi rotations: no host sync, a fixed number of steps.

    Each round zeroes the entries (p, q) of floor(r / 2) disjoint index pairs at once; the
    round-robin order meets every pair once a sweep. Few kernels a round, as their launches are the
    whole cost.
    """
    size = matrix.shape[-1]
    identity, rounds = _jacobi_plan(size, matrix.dtype, matrix.device)
    vectors = identity.expand_as(matrix)
    for _ in range(3 + size // 2):  # 5 at r = 4, 11 at 16: down to float64 rounding
        for entries, generator, rest in rounds:
            difference, off = (matrix.flatten(-2) @ entries).chunk(2, dim=-1)
            angle = torch.atan2(off, difference) / 2  # 0 for a pair that is diagonal already
            rotation = torch.cat([angle.cos(), angle.sin()], dim=-1) @ generator + rest
            rotation = rotation.unflatten(-1, (size, size))
            matrix = rotation.mT @ matrix @ rotation
            vectors = vectors @ rotation
    return matrix.diagonal(dim1=-2, dim2=-1), vectors


@functools.cache
def _jacobi_plan(size: int, dtype: torch.dtype, device: torch.device):
    """Constants of `jacobi_eigen`, kept on the device: an upload at each call would stall it.

    A round is three matrices that act on flattened (size, size) ones: `entries` reads a_qq - a_pp
    and 2 a_pq off for each pair, `generator` turns their cosines and sines into a rotation, and
    `rest` has ones for an index that sits the round out.
    """
    rounds = []
    for pairs in _round_robin(size):
        count = len(pairs)
        entries = torch.zeros(size, size, 2 * count, device="cpu")
        generator = torch.zeros(2 * count, size, size, device="cpu")
        rest = torch.eye(size, device="cpu")
        for i, (p, q) in enumerate(pairs):
            entries[q, q, i], entries[p, p, i], entries[p, q, count + i] = 1, -1, 2
            generator[i, p, p] = generator[i, q, q] = generator[count + i, p, q] = 1
            generator[count + i, q, p] = -1
            rest[p, p] = rest[q, q] = 0
        constants = (entries.flatten(0, 1), generator.flatten(1), rest.flatten())
        rounds.append([constant.to(device, dtype) for constant in constants])
    return torch.eye(size, dtype=dtype, device=device), rounds


def _round_robin(size: int) -> list[list[tuple[int, int]]]:
    """Rounds of disjoint pairs in which every pair of range(size) meets once (circle method)."""
    players = list(range(size)) + [None] * (size % 2)
    rounds = []
    for _ in range(len(players) - 1):
        half = len(players) // 2
        meetings = zip(players[:half], reversed(players[half:]), strict=True)
        rounds.append([(min(a, b), max(a, b)) for a, b in meetings if None not in (a, b)])
        players = [players[0], players[-1], *players[1:-1]]
    return rounds


def _rounding(values: Tensor) -> Tensor:
    """(..., 1): how large a score the rounding of the outputs (..., r, C) alone may make."""
    largest = values.abs().amax((-2, -1)).unsqueeze(-1)
    spread = values.shape[-2] ** 0.5 + values.shape[-1] ** 0.5  # norm of a matrix of unit noise
    return widened(largest) * (OUTPUT_ROUNDING * torch.finfo(values.dtype).eps * spread)


def _gram_eigen_above(centred: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """As `gram_eigen` of the values, where what rounding alone may make counts as 0.

    Without that, ED_norm, which does not see how small a component is, would be the degree of the
    rounding wherever a path spans fewer directions than components are asked for.
    """
    eigenvalues, vectors = gram_eigen(centred @ centred.mT)
    # two sources: the outputs' own rounding, and the Gram matrix, which squares the scores
    own = GRAM_ROUNDING * torch.finfo(eigenvalues.dtype).eps * eigenvalues[..., :1]
    threshold = torch.maximum(noise.square(), own)
    return torch.where(eigenvalues <= threshold, 0.0, eigenvalues), vectors  # nan stays


def _inverse_root(eigenvalues: Tensor) -> Tensor:
    """1 / sqrt(l), and 0 where l is 0: a direction without variance pulls nothing."""
    tiny = torch.finfo(eigenvalues.dtype).tiny
    return torch.where(eigenvalues > 0, eigenvalues.clamp_min(tiny).rsqrt(), 0.0)
