"""Triton kernels of `ed.kernels.norm_products`: a program keeps a tile of rows, in three thirds.

The hidden layer of an MLP is made in chunks. Forward, a chunk is used up at once. Backward, it is
computed again and written, with its gradient, for the products that make the weights' gradients.
"""

import triton
import triton.language as tl

from ed.kernels.rowwise_kernels import normal
from ed.kernels.thirds import (
    add_norm,
    by_columns,
    by_rows,
    load_columns,
    load_thirds,
    norm_again,
    norm_gradient,
    product,
    product_transposed,
    store_columns,
    store_thirds,
    vector,
)


@triton.jit
def add_norm_linear(
    x, y, offset, weight, bias, w, b, total, out, rows, eps,
    C: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """total = x + y + offset (rows, C), out = norm(total) w' + b (rows, WIDTH)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    y0, y1, y2 = load_thirds(y, row, rows, C)
    n0, n1, n2 = add_norm(x, y0, y1, y2, offset, weight, bias, total, w, row, rows, eps, C)
    for start in range(0, WIDTH, CHUNK):
        w0, w1, w2 = by_rows(w, start, C, CHUNK)
        made = product_transposed(n0, n1, n2, w0, w1, w2) + vector(b, start, CHUNK)
        store_columns(out, made, row, rows, start, WIDTH, CHUNK)


@triton.jit
def add_norm_linear_gradient(
    to_total, to_out, total, weight, bias, w, to_x, to_y, normed, sums, rows, eps,
    C: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """to_x = to_y, in their own precisions; sums (programs, 3 C) for weight, bias and offset.

    `normed` is for the gradient of w.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    sums += tl.program_id(0) * (3 * C)
    _, _, _, mean, scale = norm_again(total, weight, bias, normed, row, rows, eps, C)
    d0 = tl.zeros((ROWS, C // 3), tl.float32)
    d1 = tl.zeros((ROWS, C // 3), tl.float32)
    d2 = tl.zeros((ROWS, C // 3), tl.float32)
    for start in range(0, WIDTH, CHUNK):
        w0, w1, w2 = by_rows(w, start, C, CHUNK)
        above = load_columns(to_out, row, rows, start, WIDTH, CHUNK)
        d0 = tl.dot(above, w0, d0)
        d1 = tl.dot(above, w1, d1)
        d2 = tl.dot(above, w2, d2)
    norm_gradient(d0, d1, d2, to_total, total, weight, mean, scale, to_x, to_y, sums, row, rows, C)


@triton.jit
def add_norm_mlp(
    x, y, project, offset, weight, bias, w1, b1, w2, total, out, rows, eps,
    C: tl.constexpr, H: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
    PROJECT: tl.constexpr,
):  # fmt: skip
    """total = x + y + offset, out = gelu(norm(total) w1' + b1) w2', of rows (rows, C).

    With PROJECT, y project' takes the place of y.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    y0, y1, y2 = load_thirds(y, row, rows, C)
    if PROJECT:
        y0, y1, y2 = projected(y0, y1, y2, project, C)
    n0, n1, n2 = add_norm(x, y0, y1, y2, offset, weight, bias, total, w1, row, rows, eps, C)
    z0 = tl.zeros((ROWS, C // 3), tl.float32)
    z1 = tl.zeros((ROWS, C // 3), tl.float32)
    z2 = tl.zeros((ROWS, C // 3), tl.float32)
    for start in range(0, H, CHUNK):
        p0, p1, p2 = by_rows(w1, start, C, CHUNK)
        q0, q1, q2 = by_columns(w2, start, C, H, CHUNK)
        a = product_transposed(n0, n1, n2, p0, p1, p2) + vector(b1, start, CHUNK)
        _, below = normal(a)
        h = (a * below).to(n0.dtype)
        z0 = tl.dot(h, tl.trans(q0), z0)
        z1 = tl.dot(h, tl.trans(q1), z1)
        z2 = tl.dot(h, tl.trans(q2), z2)
    store_thirds(out, z0, z1, z2, row, rows, C)


@triton.jit
def projected(y0, y1, y2, w, C: tl.constexpr):
    """y w', in thirds as y is."""
    T: tl.constexpr = C // 3
    a0, a1, a2 = by_rows(w, 0, C, T)
    b0, b1, b2 = by_rows(w, T, C, T)
    c0, c1, c2 = by_rows(w, 2 * T, C, T)
    z0 = product_transposed(y0, y1, y2, a0, a1, a2)
    z1 = product_transposed(y0, y1, y2, b0, b1, b2)
    z2 = product_transposed(y0, y1, y2, c0, c1, c2)
    return z0, z1, z2


@triton.jit
def projected_back(d0, d1, d2, w, C: tl.constexpr):
    """d w, in thirds as d is."""
    T: tl.constexpr = C // 3
    a0, a1, a2 = by_columns(w, 0, C, C, T)
    b0, b1, b2 = by_columns(w, T, C, C, T)
    c0, c1, c2 = by_columns(w, 2 * T, C, C, T)
    d0, d1, d2 = d0.to(a0.dtype), d1.to(a0.dtype), d2.to(a0.dtype)
    z0 = product(d0, d1, d2, a0, a1, a2)
    z1 = product(d0, d1, d2, b0, b1, b2)
    z2 = product(d0, d1, d2, c0, c1, c2)
    return z0, z1, z2


@triton.jit
def add_norm_mlp_gradient(
    to_total, to_out, total, project, weight, bias, w1, b1, w2,
    to_x, to_sum, to_y, normed, hidden, to_hidden, sums, rows, eps,
    C: tl.constexpr, H: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
    PROJECT: tl.constexpr,
):  # fmt: skip
    """to_x = to_sum, in their own precisions; sums (programs, H + 3 C) for b1 and the norm.

    `normed`, `hidden`, `to_hidden` (before GELU) and `to_sum` are for gradients of the weights.
    With PROJECT, to_y = to_sum project.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    sums += tl.program_id(0) * (H + 3 * C)
    n0, n1, n2, mean, scale = norm_again(total, weight, bias, normed, row, rows, eps, C)
    above0, above1, above2 = load_thirds(to_out, row, rows, C)
    d0 = tl.zeros((ROWS, C // 3), tl.float32)
    d1 = tl.zeros((ROWS, C // 3), tl.float32)
    d2 = tl.zeros((ROWS, C // 3), tl.float32)
    for start in range(0, H, CHUNK):
        p0, p1, p2 = by_rows(w1, start, C, CHUNK)
        q0, q1, q2 = by_columns(w2, start, C, H, CHUNK)
        a = product_transposed(n0, n1, n2, p0, p1, p2) + vector(b1, start, CHUNK)
        density, below = normal(a)
        to_a = product(above0, above1, above2, q0, q1, q2) * (below + a * density)
        store_columns(hidden, a * below, row, rows, start, H, CHUNK)
        store_columns(to_hidden, to_a, row, rows, start, H, CHUNK)
        tl.store(sums + start + tl.arange(0, CHUNK), tl.sum(to_a, 0))
        slope = to_a.to(n0.dtype)
        d0 = tl.dot(slope, p0, d0)
        d1 = tl.dot(slope, p1, d1)
        d2 = tl.dot(slope, p2, d2)
    d0, d1, d2 = norm_gradient(
        d0, d1, d2, to_total, total, weight, mean, scale, to_x, to_sum, sums + H, row, rows, C
    )
    if PROJECT:
        d0, d1, d2 = projected_back(d0, d1, d2, project, C)
        store_thirds(to_y, d0, d1, d2, row, rows, C)
