"""Triton kernel of `ed.kernels.eigen`."""

import triton
import triton.language as tl


@triton.jit
def eigen(
    matrices, eigenvalues, vectors, sweeps,
    EPS: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Diagonalises one Gram matrix (SIZE, SIZE) per program by parallel Jacobi rotations.

    Each round zeroes the entries (p, q) of disjoint index pairs, as in a round-robin tournament, so
    a sweep of rounds covers every pair once. An odd size has one idle index per round. WIDE is the
    power of two that holds the matrix; indices beyond SIZE are idle.
    """
    OPPONENTS: tl.constexpr = SIZE - 1 + SIZE % 2  # of an index, and rounds per sweep; odd
    row, column = tl.arange(0, WIDE)[:, None], tl.arange(0, WIDE)[None, :]
    place = tl.program_id(0).to(tl.int64) * SIZE * SIZE + row * SIZE + column
    inside = (row < SIZE) & (column < SIZE)
    matrix = tl.load(matrices + place, mask=inside, other=0.0)
    trace = tl.sum(tl.sum(tl.where(row == column, matrix, 0.0), 0), 0)
    matrix = matrix / tl.where(trace == 0, 1.0, trace)  # so that squares cannot overflow
    turned = tl.where(row == column, 1.0, 0.0).to(matrix.dtype)  # product of all rotations
    index = tl.arange(0, WIDE)
    for step in range(sweeps * OPPONENTS):
        turn = step % OPPONENTS
        # the last index meets the one that would meet itself
        partner = (turn - index + OPPONENTS) % OPPONENTS
        partner = tl.where(partner == index, OPPONENTS, partner)
        last = turn * ((OPPONENTS + 1) // 2) % OPPONENTS
        partner = tl.where(index == OPPONENTS, last, partner)
        idle = (partner >= SIZE) | (index >= SIZE)
        partner = tl.where(idle, index, partner)
        # both indices of a pair read the same entry, so rounding cannot make their angles differ
        upper = tl.where((row < column) & (row == partner[None, :]), matrix, 0.0)
        entry = 2 * (tl.sum(upper, 0) + tl.sum(upper, 1))
        # rotating entries at rounding level in the null space would undo earlier rounds
        entry = tl.where(tl.abs(entry) <= EPS / 4, 0.0, entry)
        diagonal = tl.sum(tl.where(row == column, matrix, 0.0), 0)
        difference = tl.gather(diagonal, partner, 0) - diagonal
        positive = (difference > 0) | ((difference == 0) & (index < partner))
        scale = tl.abs(difference) + tl.sqrt(difference * difference + entry * entry)
        tangent = tl.where(positive, entry, -entry) / tl.where(scale == 0, 1.0, scale)
        cosine = 1 / tl.sqrt(1 + tangent * tangent)
        sine = tangent * cosine
        across = tl.broadcast_to(partner[None, :], (WIDE, WIDE))
        down = tl.broadcast_to(partner[:, None], (WIDE, WIDE))
        turned = turned * cosine[None, :] - tl.gather(turned, across, 1) * sine[None, :]
        matrix = matrix * cosine[None, :] - tl.gather(matrix, across, 1) * sine[None, :]
        matrix = matrix * cosine[:, None] - tl.gather(matrix, down, 0) * sine[:, None]
    diagonal = tl.sum(tl.where(row == column, matrix, 0.0), 0)
    diagonal *= trace
    tl.store(eigenvalues + tl.program_id(0) * SIZE + index, diagonal, mask=index < SIZE)
    tl.store(vectors + place, turned, mask=inside)
