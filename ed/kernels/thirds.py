"""Triton functions on rows that a program holds as three tiles.

A width of 96 or 192 is no power of two, but a third of it is: products over the width are sums of
three products, and nothing is padded.
"""

import triton
import triton.language as tl


@triton.jit
def load_columns(base, row, rows, start, WIDTH: tl.constexpr, SIZE: tl.constexpr):
    """Columns start to start + SIZE of a matrix (rows, WIDTH), zero beyond the last row."""
    place = row.to(tl.int64)[:, None] * WIDTH + (start + tl.arange(0, SIZE))[None, :]
    return tl.load(base + place, mask=(row < rows)[:, None], other=0.0)


@triton.jit
def store_columns(base, values, row, rows, start, WIDTH: tl.constexpr, SIZE: tl.constexpr):
    place = row.to(tl.int64)[:, None] * WIDTH + (start + tl.arange(0, SIZE))[None, :]
    tl.store(base + place, values.to(base.dtype.element_ty), mask=(row < rows)[:, None])


@triton.jit
def load_third(base, row, rows, THIRD: tl.constexpr, C: tl.constexpr):
    return load_columns(base, row, rows, THIRD * (C // 3), C, C // 3)


@triton.jit
def store_third(base, values, row, rows, THIRD: tl.constexpr, C: tl.constexpr):
    store_columns(base, values, row, rows, THIRD * (C // 3), C, C // 3)


@triton.jit
def load_thirds(base, row, rows, C: tl.constexpr):
    third0 = load_third(base, row, rows, 0, C)
    third1 = load_third(base, row, rows, 1, C)
    third2 = load_third(base, row, rows, 2, C)
    return third0, third1, third2


@triton.jit
def store_thirds(base, third0, third1, third2, row, rows, C: tl.constexpr):
    store_third(base, third0, row, rows, 0, C)
    store_third(base, third1, row, rows, 1, C)
    store_third(base, third2, row, rows, 2, C)


@triton.jit
def vector(base, start, SIZE: tl.constexpr):
    """A part of a vector, as one row in float32."""
    return tl.load(base + start + tl.arange(0, SIZE)).to(tl.float32)[None, :]


@triton.jit
def matrix(base, row, column, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A tile of a weight matrix (..., WIDTH) that it fits into."""
    place = (row + tl.arange(0, ROWS))[:, None] * WIDTH + (column + tl.arange(0, COLUMNS))[None, :]
    return tl.load(base + place)


@triton.jit
def by_rows(w, start, C: tl.constexpr, SIZE: tl.constexpr):
    """Rows start to start + SIZE of weights (..., C), in thirds."""
    T: tl.constexpr = C // 3
    w0 = matrix(w, start, 0, C, SIZE, T)
    w1 = matrix(w, start, T, C, SIZE, T)
    w2 = matrix(w, start, 2 * T, C, SIZE, T)
    return w0, w1, w2


@triton.jit
def by_columns(w, start, C: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr):
    """Columns start to start + SIZE of weights (C, WIDTH), in thirds."""
    T: tl.constexpr = C // 3
    w0 = matrix(w, 0, start, WIDTH, T, SIZE)
    w1 = matrix(w, T, start, WIDTH, T, SIZE)
    w2 = matrix(w, 2 * T, start, WIDTH, T, SIZE)
    return w0, w1, w2


@triton.jit
def product(a0, a1, a2, b0, b1, b2):
    """a b, where a has its columns and b its rows in thirds."""
    return tl.dot(a2, b2, tl.dot(a1, b1, tl.dot(a0, b0)))


@triton.jit
def product_transposed(a0, a1, a2, b0, b1, b2):
    """a b', where both have their columns in thirds."""
    return product(a0, a1, a2, tl.trans(b0), tl.trans(b1), tl.trans(b2))


@triton.jit
def add_third(x, values, offset, total, row, rows, THIRD: tl.constexpr, C: tl.constexpr):
    """A third of total = x + values + offset, stored."""
    values += load_third(x, row, rows, THIRD, C).to(tl.float32)
    values += vector(offset, THIRD * (C // 3), C // 3)
    store_third(total, values, row, rows, THIRD, C)
    return values


@triton.jit
def add_norm(x, y0, y1, y2, offset, weight, bias, total, like, row, rows, eps, C: tl.constexpr):
    """The norm of total = x + y + offset, in thirds of the type of `like`; total is stored."""
    t0 = add_third(x, y0.to(tl.float32), offset, total, row, rows, 0, C)
    t1 = add_third(x, y1.to(tl.float32), offset, total, row, rows, 1, C)
    t2 = add_third(x, y2.to(tl.float32), offset, total, row, rows, 2, C)
    mean, scale = moments(t0, t1, t2, eps, C)
    n0 = norm_third(t0, mean, scale, weight, bias, 0, C).to(like.dtype.element_ty)
    n1 = norm_third(t1, mean, scale, weight, bias, 1, C).to(like.dtype.element_ty)
    n2 = norm_third(t2, mean, scale, weight, bias, 2, C).to(like.dtype.element_ty)
    return n0, n1, n2


@triton.jit
def moments(t0, t1, t2, eps, C: tl.constexpr):
    """Mean and reciprocal deviation of every row, (ROWS, 1)."""
    mean = (tl.sum(t0, 1) + tl.sum(t1, 1) + tl.sum(t2, 1))[:, None] / C
    t0 -= mean
    t1 -= mean
    t2 -= mean
    square = (tl.sum(t0 * t0, 1) + tl.sum(t1 * t1, 1) + tl.sum(t2 * t2, 1))[:, None]
    return mean, tl.rsqrt(square / C + eps)


@triton.jit
def norm_third(t, mean, scale, weight, bias, THIRD: tl.constexpr, C: tl.constexpr):
    T: tl.constexpr = C // 3
    return (t - mean) * scale * vector(weight, THIRD * T, T) + vector(bias, THIRD * T, T)


@triton.jit
def norm_again(total, weight, bias, normed, row, rows, eps, C: tl.constexpr):
    """The norm in a backward pass, stored for the gradient of the weights behind it."""
    t0, t1, t2 = load_thirds(total, row, rows, C)
    t0, t1, t2 = t0.to(tl.float32), t1.to(tl.float32), t2.to(tl.float32)
    mean, scale = moments(t0, t1, t2, eps, C)
    n0 = norm_third(t0, mean, scale, weight, bias, 0, C).to(normed.dtype.element_ty)
    n1 = norm_third(t1, mean, scale, weight, bias, 1, C).to(normed.dtype.element_ty)
    n2 = norm_third(t2, mean, scale, weight, bias, 2, C).to(normed.dtype.element_ty)
    store_thirds(normed, n0, n1, n2, row, rows, C)
    return n0, n1, n2, mean, scale


@triton.jit
def slope_third(
    above, total, weight, mean, scale, sums, row, rows, THIRD: tl.constexpr, C: tl.constexpr
):
    """Slopes before the norm's own projection, and their two sums over columns.

    Stores the sums over rows for the norm's weight and bias.
    """
    T: tl.constexpr = C // 3
    unit = (load_third(total, row, rows, THIRD, C).to(tl.float32) - mean) * scale
    column = THIRD * T + tl.arange(0, T)
    tl.store(sums + column, tl.sum(above * unit, 0))
    tl.store(sums + C + column, tl.sum(above, 0))
    slope = above * vector(weight, THIRD * T, T)
    return slope, tl.sum(slope * unit, 1), tl.sum(slope, 1)


@triton.jit
def finish_third(
    slope, along, level, to_total, total, mean, scale, to_x, to_y, sums, row, rows,
    THIRD: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Gradient of the sum in front of the norm: for x and y, and summed over rows for y's bias."""
    unit = (load_third(total, row, rows, THIRD, C).to(tl.float32) - mean) * scale
    slope = (slope - unit * along - level) * scale
    slope += load_third(to_total, row, rows, THIRD, C).to(tl.float32)
    store_third(to_x, slope, row, rows, THIRD, C)
    store_third(to_y, slope, row, rows, THIRD, C)
    tl.store(sums + 2 * C + THIRD * (C // 3) + tl.arange(0, C // 3), tl.sum(slope, 0))
    return slope


@triton.jit
def norm_gradient(
    d0, d1, d2, to_total, total, weight, mean, scale, to_x, to_y, sums, row, rows, C: tl.constexpr
):
    """From the norm's output back to its input, three thirds of it, with to_total added.

    Args:
        d0, d1, d2: gradients of the norm's output; zero in rows that do not exist.
        sums: one line (3, C), for the norm's weight and bias and the bias of y.
    """
    d0, along0, level0 = slope_third(d0, total, weight, mean, scale, sums, row, rows, 0, C)
    d1, along1, level1 = slope_third(d1, total, weight, mean, scale, sums, row, rows, 1, C)
    d2, along2, level2 = slope_third(d2, total, weight, mean, scale, sums, row, rows, 2, C)
    along = (along0 + along1 + along2)[:, None] / C
    level = (level0 + level1 + level2)[:, None] / C
    d0 = finish_third(
        d0, along, level, to_total, total, mean, scale, to_x, to_y, sums, row, rows, 0, C
    )
    d1 = finish_third(
        d1, along, level, to_total, total, mean, scale, to_x, to_y, sums, row, rows, 1, C
    )
    d2 = finish_third(
        d2, along, level, to_total, total, mean, scale, to_x, to_y, sums, row, rows, 2, C
    )
    return d0, d1, d2
