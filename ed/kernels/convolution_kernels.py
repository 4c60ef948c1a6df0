"""Triton kernels of `ed.kernels.convolution`. Tensors are (N, H, W, C) in memory.

With few channels, the matrix products of a convolution are too small for tensor cores, and its nine
taps read every pixel nine times. We therefore treat FOLD adjacent pixels of a row as one group. A
group and its two neighbouring pixels are contiguous in memory, so a row of three taps is one
product with a band matrix; its zeros cost less than many small products. A column of groups in an
image is called a strand. Each program moves down its strands, so that each row is read once and
contributes to three rows of outputs. ReLU, bias, mask and residual sum are fused, so they need no
extra pass over memory.
"""

import triton
import triton.language as tl


@triton.jit
def rectified(values):
    return tl.where(values < 0, 0.0, values)  # tl.maximum would convert bf16 to float32


@triton.jit
def places(pixel, C: tl.constexpr):
    """Returns offsets of the channels of each pixel: (pixels, C)."""
    return pixel.to(tl.int64)[:, None] * C + tl.arange(0, C)[None, :]


@triton.jit
def strands(block, number, W: tl.constexpr, FOLD: tl.constexpr, BLOCK: tl.constexpr):
    """Returns the image, first column and validity of each strand in a block."""
    strand = block * BLOCK + tl.arange(0, BLOCK)
    return strand // (W // FOLD), strand % (W // FOLD) * FOLD, strand < number


@triton.jit
def around(
    image, column, here, H: tl.constexpr, W: tl.constexpr, CI: tl.constexpr, FOLD: tl.constexpr,
    K: tl.constexpr,
):  # fmt: skip
    """Returns offsets (strands, K) of a first-row group and its two neighbours, and a mask."""
    k = tl.arange(0, K)[None, :]
    pixel = column[:, None] + k // CI - 1
    inside = here[:, None] & (pixel >= 0) & (pixel < W)
    if K > (FOLD + 2) * CI:
        inside &= k < (FOLD + 2) * CI
    first = (image.to(tl.int64) * (H * W) + column - 1) * CI
    return first[:, None] + k, inside


@triton.jit
def outputs(image, column, H: tl.constexpr, W: tl.constexpr, CO: tl.constexpr, N: tl.constexpr):
    """Returns offsets of the outputs of a first-row group: (strands, N)."""
    first = (image.to(tl.int64) * (H * W) + column) * CO
    return first[:, None] + tl.arange(0, N)[None, :]


@triton.jit
def pack(
    weight, bands, to_output, to_input, to_row, to_column,
    CI: tl.constexpr, CO: tl.constexpr, FOLD: tl.constexpr, K: tl.constexpr, FLIP: tl.constexpr,
):  # fmt: skip
    """Builds the band matrices (3, K, FOLD CO), one per row of taps, from a strided weight."""
    N: tl.constexpr = FOLD * CO
    line = tl.program_id(0)
    k, n = tl.arange(0, K)[:, None], tl.arange(0, N)[None, :]
    tap = k // CI - n // CO
    inside = (tap >= 0) & (tap < 3) & (k < (FOLD + 2) * CI)
    row, column = (2 - line, 2 - tap) if FLIP else (line, tap)
    place = n % CO * to_output + k % CI * to_input + row * to_row + column * to_column
    values = tl.load(weight + place, mask=inside, other=0.0)
    tl.store(bands + line * K * N + k * N + n, values.to(bands.dtype.element_ty))


@triton.jit
def finish(
    total, offset, mask, residual, y, place, here,
    BIAS: tl.constexpr, MASK: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Adds bias, applies the mask, adds the residual, and stores the result."""
    if BIAS:
        total += offset
    if MASK:
        total = tl.where(tl.load(mask + place, mask=here, other=0.0) > 0, total, 0.0)
    if RESIDUAL:
        total += tl.load(residual + place, mask=here, other=0.0).to(tl.float32)
    tl.store(y + place, total.to(y.dtype.element_ty), mask=here)


@triton.jit
def convolve(
    x, bands, bias, mask, residual, y, number,
    H: tl.constexpr, W: tl.constexpr, CI: tl.constexpr, CO: tl.constexpr, FOLD: tl.constexpr,
    K: tl.constexpr, RELU: tl.constexpr, BIAS: tl.constexpr, MASK: tl.constexpr,
    RESIDUAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y = [mask > 0] (relu(x) * weight + bias) + residual, for a block of strands."""
    N: tl.constexpr = FOLD * CO
    image, column, here = strands(tl.program_id(0), number, W, FOLD, BLOCK)
    source, inside = around(image, column, here, H, W, CI, FOLD, K)
    place = outputs(image, column, H, W, CO, N) - W * CO
    band = bands + tl.arange(0, K)[:, None] * N + tl.arange(0, N)[None, :]
    upper, middle, lower = tl.load(band), tl.load(band + K * N), tl.load(band + 2 * K * N)
    offset = tl.load(bias + tl.arange(0, N) % CO).to(tl.float32)[None, :] if BIAS else 0.0
    above = tl.zeros((BLOCK, N), tl.float32)  # outputs one row up, which still need this row
    level = tl.zeros((BLOCK, N), tl.float32)  # outputs of this row, which also need the next
    for row in range(H):
        values = tl.load(x + source, mask=inside, other=0.0)
        values = rectified(values) if RELU else values
        done = tl.dot(values, lower, above)
        above = tl.dot(values, middle, level)
        level = tl.dot(values, upper)
        wanted = here[:, None] & (row > 0)
        finish(done, offset, mask, residual, y, place, wanted, BIAS, MASK, RESIDUAL)
        source += W * CI
        place += W * CO
    finish(above, offset, mask, residual, y, place, here[:, None], BIAS, MASK, RESIDUAL)


@triton.jit
def convolve_few(
    x, bands, bias, mask, residual, y, number,
    H: tl.constexpr, W: tl.constexpr, CI: tl.constexpr, CO: tl.constexpr, FOLD: tl.constexpr,
    K: tl.constexpr, RELU: tl.constexpr, BIAS: tl.constexpr, MASK: tl.constexpr,
    RESIDUAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Like `convolve`, for a block of single groups, which is faster for few images."""
    N: tl.constexpr = FOLD * CO
    line, column, here = strands(tl.program_id(0), number, W, FOLD, BLOCK)
    source, inside = around(line, column, here, 1, W, CI, FOLD, K)
    place = outputs(line, column, 1, W, CO, N)
    band = bands + tl.arange(0, K)[:, None] * N + tl.arange(0, N)[None, :]
    offset = tl.load(bias + tl.arange(0, N) % CO).to(tl.float32)[None, :] if BIAS else 0.0
    total = tl.zeros((BLOCK, N), tl.float32)
    for tap in tl.static_range(3):
        row = line % H + (tap - 1)
        exists = inside & ((row >= 0) & (row < H))[:, None]
        values = tl.load(x + source + (tap - 1) * (W * CI), mask=exists, other=0.0)
        values = rectified(values) if RELU else values
        total = tl.dot(values, tl.load(band + tap * (K * N)), total)
    finish(total, offset, mask, residual, y, place, here[:, None], BIAS, MASK, RESIDUAL)


@triton.jit
def weight_gradient(
    x, gradient, bands, biases, number, blocks,
    H: tl.constexpr, W: tl.constexpr, CI: tl.constexpr, CO: tl.constexpr, FOLD: tl.constexpr,
    K: tl.constexpr, RELU: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sums gradients over `blocks` blocks: bands (programs, 3, K, N), biases (programs, N)."""
    N: tl.constexpr = FOLD * CO
    program = tl.program_id(0)
    bias = tl.zeros((BLOCK, N), tl.float32)
    upper = tl.zeros((K, N), tl.float32)
    middle = tl.zeros((K, N), tl.float32)
    lower = tl.zeros((K, N), tl.float32)
    for block in range(program * blocks, (program + 1) * blocks):
        image, column, here = strands(block, number, W, FOLD, BLOCK)
        source, inside = around(image, column, here, H, W, CI, FOLD, K)
        place = outputs(image, column, H, W, CO, N)
        above = tl.zeros((BLOCK, N), gradient.dtype.element_ty)
        level = tl.load(gradient + place, mask=here[:, None], other=0.0)
        for row in range(H):
            values = tl.load(x + source, mask=inside, other=0.0)
            values = tl.trans(rectified(values) if RELU else values)
            place += W * CO
            below = tl.load(gradient + place, mask=here[:, None] & (row < H - 1), other=0.0)
            bias += level.to(tl.float32)
            upper = tl.dot(values, below, upper)
            middle = tl.dot(values, level, middle)
            lower = tl.dot(values, above, lower)
            above = level
            level = below
            source += W * CI
    k, n = tl.arange(0, K)[:, None], tl.arange(0, N)[None, :]
    into = bands + program.to(tl.int64) * 3 * K * N + k * N + n
    tl.store(into, upper)
    tl.store(into + K * N, middle)
    tl.store(into + 2 * K * N, lower)
    tl.store(biases + program * N + tl.arange(0, N), tl.sum(bias, 0))


@triton.jit
def pool(
    x, y, taps, pixels, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr
):
    """3 x 3 max pooling with stride 2; `taps` receives the index of each maximum."""
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
        larger = (value > best) | (value != value)  # nan propagates, as in torch
        best = tl.where(larger, value, best)
        which = tl.where(larger, tl.full((BLOCK, C), tap, tl.int8), which)
    place, here = places(pixel, C), (pixel < pixels)[:, None]
    tl.store(y + place, best.to(y.dtype.element_ty), mask=here)
    tl.store(taps + place, which, mask=here)


@triton.jit
def windows(gradient, taps, place, inside):
    """Loads the upstream gradient and the selected pixel of each window."""
    above = tl.load(gradient + place, mask=inside[:, None], other=0.0).to(tl.float32)
    return above, tl.load(taps + place, mask=inside[:, None], other=-1)


@triton.jit
def pool_gradient(
    gradient, taps, x, number, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Stores gradients of each window's middle pixel and its right, lower and diagonal neighbours.

    The middle pixel belongs to one window only; the others also belong to the next windows to the
    right and below. Each pixel is written once, so no atomic sums are needed.
    """
    OH: tl.constexpr = (H + 1) // 2
    OW: tl.constexpr = (W + 1) // 2
    window = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = window < number
    row, column = window // OW % OH, window % OW
    right, below = exists & (column + 1 < OW), exists & (row + 1 < OH)
    place = places(window, C)
    here, tap_here = windows(gradient, taps, place, exists)
    east, tap_east = windows(gradient, taps, place + C, right)
    south, tap_south = windows(gradient, taps, place + OW * C, below)
    across, tap_across = windows(gradient, taps, place + (OW + 1) * C, right & below)
    middle = tl.where(tap_here == 4, here, 0.0)
    beside = tl.where(tap_here == 5, here, 0.0) + tl.where(tap_east == 3, east, 0.0)
    under = tl.where(tap_here == 7, here, 0.0) + tl.where(tap_south == 1, south, 0.0)
    corner = tl.where(tap_here == 8, here, 0.0) + tl.where(tap_east == 6, east, 0.0)
    corner += tl.where(tap_south == 2, south, 0.0) + tl.where(tap_across == 0, across, 0.0)
    pixel = (window // (OH * OW)).to(tl.int64) * (H * W) + row * (2 * W) + column * 2
    to = x + pixel[:, None] * C + tl.arange(0, C)[None, :]
    wide, tall = exists & (column * 2 + 1 < W), exists & (row * 2 + 1 < H)
    kind = x.dtype.element_ty
    tl.store(to, middle.to(kind), mask=exists[:, None])
    tl.store(to + C, beside.to(kind), mask=wide[:, None])
    tl.store(to + W * C, under.to(kind), mask=tall[:, None])
    tl.store(to + (W + 1) * C, corner.to(kind), mask=(wide & tall)[:, None])
