"""Triton kernels of `ed.models.narrow`. Tensors are (N, H, W, C) in memory; a pixel is a row.

A program works on a block of pixels and all their channels. So index arithmetic is done once per
pixel, the nine shifted reads of a block hit the cache, and what comes before and after a
convolution (ReLU, bias, mask, sum) costs no pass of its own over memory.
"""

import triton
import triton.language as tl


@triton.jit
def rectified(values):
    return tl.where(values < 0, 0.0, values)  # tl.maximum would turn bf16 into float32


@triton.jit
def places(pixel, C: tl.constexpr):
    """Where the channels of each pixel lie: (pixels, C)."""
    return pixel.to(tl.int64)[:, None] * C + tl.arange(0, C)[None, :]


@triton.jit
def neighbours(
    x, pixel, pixels, dy, dx, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr,
    RELU: tl.constexpr,
):  # fmt: skip
    """The channels of each pixel's neighbour, (pixels, C); zeros outside of its picture."""
    row, column = pixel // W % H + dy, pixel % W + dx
    inside = (pixel < pixels) & (row >= 0) & (row < H) & (column >= 0) & (column < W)
    values = tl.load(x + places(pixel + dy * W + dx, C), mask=inside[:, None], other=0.0)
    return rectified(values) if RELU else values


@triton.jit
def window(
    x, pixel, pixels, H: tl.constexpr, W: tl.constexpr, CI: tl.constexpr, K: tl.constexpr,
    RELU: tl.constexpr,
):  # fmt: skip
    """All 9 CI <= K values around each pixel, tap by tap: (pixels, K); for few channels."""
    k = tl.arange(0, K)
    dy, dx, channel = k // CI // 3 - 1, k // CI % 3 - 1, k % CI
    row, column = (pixel // W % H)[:, None] + dy[None, :], (pixel % W)[:, None] + dx[None, :]
    inside = (row >= 0) & (row < H) & (column >= 0) & (column < W)
    inside &= (pixel < pixels)[:, None] & (k < 9 * CI)[None, :]
    place = (pixel[:, None] + (dy * W + dx)[None, :]).to(tl.int64) * CI + channel[None, :]
    values = tl.load(x + place, mask=inside, other=0.0)
    return rectified(values) if RELU else values


@triton.jit
def convolve(
    x, weight, bias, mask, residual, y, pixels,
    H: tl.constexpr, W: tl.constexpr, CI: tl.constexpr, CO: tl.constexpr, K: tl.constexpr,
    RELU: tl.constexpr, BIAS: tl.constexpr, MASK: tl.constexpr, RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """y = [mask > 0] (relu(x) * weight + bias) + residual, weight (9, CI, CO) or (K, CO)."""
    pixel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    co = tl.arange(0, CO)
    total = tl.zeros((BLOCK, CO), tl.float32)
    if K > 0:
        k = tl.arange(0, K)
        part = k[:, None] * CO + co[None, :]
        weights = tl.load(weight + part, mask=(k < 9 * CI)[:, None], other=0.0)
        total = tl.dot(window(x, pixel, pixels, H, W, CI, K, RELU), weights, total)
    else:
        for tap in tl.static_range(9):
            values = neighbours(x, pixel, pixels, tap // 3 - 1, tap % 3 - 1, H, W, CI, RELU)
            part = (tap * CI + tl.arange(0, CI))[:, None] * CO + co[None, :]
            total = tl.dot(values, tl.load(weight + part), total)
    here, place = (pixel < pixels)[:, None], places(pixel, CO)
    if BIAS:
        total += tl.load(bias + co).to(tl.float32)[None, :]
    if MASK:
        total = tl.where(tl.load(mask + place, mask=here, other=0.0) > 0, total, 0.0)
    if RESIDUAL:
        total += tl.load(residual + place, mask=here, other=0.0).to(tl.float32)
    tl.store(y + place, total.to(y.dtype.element_ty), mask=here)


@triton.jit
def weight_gradient(
    x, gradient, weights, biases, pixels, blocks,
    H: tl.constexpr, W: tl.constexpr, CI: tl.constexpr, CO: tl.constexpr, K: tl.constexpr,
    RELU: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of `blocks` blocks the sums for each program: weights (programs, 9, CI, CO), biases (.., CO).

    Three programs share the blocks, one for each row of taps; of few channels one does all.
    """
    program, line = tl.program_id(0), tl.program_id(1)
    co = tl.arange(0, CO)
    bias = tl.zeros((CO,), tl.float32)
    SIZE: tl.constexpr = K if K > 0 else CI
    left = tl.zeros((SIZE, CO), tl.float32)  # all taps, of few channels
    middle = tl.zeros((SIZE, CO), tl.float32)
    right = tl.zeros((SIZE, CO), tl.float32)
    for block in range(program * blocks, (program + 1) * blocks):
        pixel = block * BLOCK + tl.arange(0, BLOCK)
        here = (pixel < pixels)[:, None]
        above = tl.load(gradient + places(pixel, CO), mask=here, other=0.0)
        bias += tl.sum(above.to(tl.float32), 0)
        if K > 0:
            around = window(x, pixel, pixels, H, W, CI, K, RELU)
            left = tl.dot(tl.trans(around), above, left)
        else:
            near = neighbours(x, pixel, pixels, line - 1, -1, H, W, CI, RELU)
            same = neighbours(x, pixel, pixels, line - 1, 0, H, W, CI, RELU)
            far = neighbours(x, pixel, pixels, line - 1, 1, H, W, CI, RELU)
            left = tl.dot(tl.trans(near), above, left)
            middle = tl.dot(tl.trans(same), above, middle)
            right = tl.dot(tl.trans(far), above, right)
    k = tl.arange(0, SIZE)[:, None]
    into = weights + (program * 9 + line * 3) * CI * CO + k * CO + co[None, :]
    tl.store(into, left, mask=k < 9 * CI)
    if K == 0:
        tl.store(into + CI * CO, middle)
        tl.store(into + 2 * CI * CO, right)
    if line == 0:
        tl.store(biases + program * CO + co, bias)


@triton.jit
def pool(
    x, y, taps, pixels, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr
):
    """The largest of 3 x 3 at every other pixel, and which of the nine it was."""
    OH: tl.constexpr = (H + 1) // 2
    OW: tl.constexpr = (W + 1) // 2
    pixel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    c = tl.arange(0, C)
    row, column = pixel // OW % OH * 2, pixel % OW * 2
    centre = (pixel // (OH * OW)).to(tl.int64) * (H * W) + row * W + column
    best = tl.full((BLOCK, C), float("-inf"), tl.float32)
    which = tl.zeros((BLOCK, C), tl.int8)
    for tap in tl.static_range(9):
        dy = tap // 3 - 1
        dx = tap % 3 - 1
        inside = (pixel < pixels) & (row + dy >= 0) & (row + dy < H)
        inside &= (column + dx >= 0) & (column + dx < W)
        place = (centre + dy * W + dx)[:, None] * C + c[None, :]
        value = tl.load(x + place, mask=inside[:, None], other=float("-inf")).to(tl.float32)
        larger = (value > best) | (value != value)  # nan wins, as in torch
        best = tl.where(larger, value, best)
        which = tl.where(larger, tl.full((BLOCK, C), tap, tl.int8), which)
    place, here = places(pixel, C), (pixel < pixels)[:, None]
    tl.store(y + place, best.to(y.dtype.element_ty), mask=here)
    tl.store(taps + place, which, mask=here)


@triton.jit
def pool_gradient(
    gradient, taps, x, pixels, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Each input pixel collects from the up to four windows that it lies in: no atomic sums."""
    OH: tl.constexpr = (H + 1) // 2
    OW: tl.constexpr = (W + 1) // 2
    pixel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    c = tl.arange(0, C)
    row, column = pixel // W % H, pixel % W
    picture = (pixel // (H * W)).to(tl.int64) * (OH * OW)
    total = tl.zeros((BLOCK, C), tl.float32)
    for corner in tl.static_range(4):
        dy = corner // 2
        dx = corner % 2
        # an even row is the middle of one window; an odd one the last of one, the first of another
        oy, ox = (row + dy) // 2, (column + dx) // 2
        inside = (pixel < pixels) & (oy < OH) & (ox < OW)
        inside &= ((dy == 0) | (row % 2 == 1)) & ((dx == 0) | (column % 2 == 1))
        tap = (row + 1 - 2 * oy) * 3 + column + 1 - 2 * ox
        place = (picture + oy * OW + ox)[:, None] * C + c[None, :]
        which = tl.load(taps + place, mask=inside[:, None], other=-1)
        above = tl.load(gradient + place, mask=inside[:, None], other=0.0).to(tl.float32)
        total += tl.where(which == tap[:, None], above, 0.0)
    place, here = places(pixel, C), (pixel < pixels)[:, None]
    tl.store(x + place, total.to(x.dtype.element_ty), mask=here)
