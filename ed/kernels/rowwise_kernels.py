"""Triton kernels of `ed.kernels.rowwise`. Each makes one pass over memory.

Column sums (gradients of weights and biases) stay in registers while a program loops over its
rows; each program then writes one row of partial sums.
"""

import triton
import triton.language as tl


@triton.jit
def add_norm(
    x, y, offset, weight, bias, total, normed, means, scales, rows, eps,
    C: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """total = x + y + offset, normed = (total - mean) * scale * weight + bias: (rows, C)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDE)
    exists, inside = row < rows, column < C
    place = row.to(tl.int64)[:, None] * C + column[None, :]
    here = exists[:, None] & inside[None, :]
    values = tl.load(x + place, mask=here, other=0.0).to(tl.float32)
    values += tl.load(y + place, mask=here, other=0.0).to(tl.float32)
    values += tl.load(offset + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    mean = tl.sum(values, 1) / C
    centred = tl.where(here, values - mean[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, 1) / C + eps)
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    shift = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    result = centred * scale[:, None] * factor[None, :] + shift[None, :]
    tl.store(total + place, values.to(total.dtype.element_ty), mask=here)
    tl.store(normed + place, result.to(normed.dtype.element_ty), mask=here)
    tl.store(means + row, mean, mask=exists)
    tl.store(scales + row, scale, mask=exists)


@triton.jit
def add_norm_gradient(
    to_total, to_normed, total, weight, means, scales, to_x, to_y, sums, rows, steps,
    C: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Computes to_x and to_y, equal up to dtype, and sums (programs, 3, C) for the parameters."""
    program, column = tl.program_id(0), tl.arange(0, WIDE)
    inside = column < C
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    of_weight = tl.zeros((ROWS, WIDE), tl.float32)
    of_bias = tl.zeros((ROWS, WIDE), tl.float32)
    of_y = tl.zeros((ROWS, WIDE), tl.float32)
    for step in range(steps):
        row = (program * steps + step) * ROWS + tl.arange(0, ROWS)
        exists = row < rows
        place = row.to(tl.int64)[:, None] * C + column[None, :]
        here = exists[:, None] & inside[None, :]
        values = tl.load(total + place, mask=here, other=0.0).to(tl.float32)
        above = tl.load(to_normed + place, mask=here, other=0.0).to(tl.float32)
        mean = tl.load(means + row, mask=exists, other=0.0)
        scale = tl.load(scales + row, mask=exists, other=0.0)
        unit = tl.where(here, (values - mean[:, None]) * scale[:, None], 0.0)
        of_weight += above * unit
        of_bias += above
        slope = above * factor[None, :]
        along, level = tl.sum(slope * unit, 1) / C, tl.sum(slope, 1) / C
        slope = (slope - unit * along[:, None] - level[:, None]) * scale[:, None]
        slope += tl.load(to_total + place, mask=here, other=0.0).to(tl.float32)
        slope = tl.where(here, slope, 0.0)
        of_y += slope
        tl.store(to_x + place, slope.to(to_x.dtype.element_ty), mask=here)
        tl.store(to_y + place, slope.to(to_y.dtype.element_ty), mask=here)
    sums += program * (3 * C) + column
    tl.store(sums, tl.sum(of_weight, 0), mask=inside)
    tl.store(sums + C, tl.sum(of_bias, 0), mask=inside)
    tl.store(sums + 2 * C, tl.sum(of_y, 0), mask=inside)


@triton.jit
def normal(x):
    """Standard normal density and CDF, accurate to 1e-7 (Abramowitz and Stegun 7.1.26)."""
    bell = tl.exp2(x * x * -0.7213475204444817)  # exp(-x^2 / 2)
    t = 1 / (1 + 0.23164188588 * tl.abs(x))  # 0.3275911 / sqrt(2)
    series = 1.421413741 + t * (-1.453152027 + t * 1.061405429)
    tail = 0.5 * bell * t * (0.254829592 + t * (-0.284496736 + t * series))
    return 0.3989422804014327 * bell, tl.where(x < 0, tail, 1 - tail)


@triton.jit
def gelu(x, y, number, SIZE: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    here = place < number
    values = tl.load(x + place, mask=here, other=0.0).to(tl.float32)
    _, below = normal(values)
    tl.store(y + place, (values * below).to(y.dtype.element_ty), mask=here)


@triton.jit
def gelu_gradient(
    gradient, x, to_x, sums, rows, steps, C: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr
):
    """Computes to_x and its column sums. Program axis 0 splits rows, axis 1 columns."""
    program, column = tl.program_id(0), tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    inside = column < C
    total = tl.zeros((ROWS, WIDE), tl.float32)
    for step in range(steps):
        row = (program * steps + step) * ROWS + tl.arange(0, ROWS)
        place = row.to(tl.int64)[:, None] * C + column[None, :]
        here = (row < rows)[:, None] & inside[None, :]
        values = tl.load(x + place, mask=here, other=0.0).to(tl.float32)
        above = tl.load(gradient + place, mask=here, other=0.0).to(tl.float32)
        density, below = normal(values)
        slope = above * (below + values * density)
        total += slope
        tl.store(to_x + place, slope.to(to_x.dtype.element_ty), mask=here)
    tl.store(sums + program * C + column, tl.sum(total, 0), mask=inside)
