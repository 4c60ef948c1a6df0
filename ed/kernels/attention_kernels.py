"""Triton kernels of `ed.kernels.attention`. Each program handles one head of one image.

Queries, keys and values are read directly from the packed projection (B, N, 3, H, D). To limit
padding, tokens are split into FULL tiles of size BLOCK and one of size TAIL: 65 tokens take a tile
of 64 and a tile of 16. Scores and probabilities stay in registers. Logarithms are to base 2, and
`scale` includes log2(e).
"""

import triton
import triton.language as tl


@triton.jit
def load(base, start, N: tl.constexpr, STRIDE: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr):
    """Loads ROWS rows starting at `start`, with zeros beyond N: (ROWS, D)."""
    row = start + tl.arange(0, ROWS)
    place = row[:, None] * STRIDE + tl.arange(0, D)[None, :]
    return tl.load(base + place, mask=(row < N)[:, None], other=0.0)


@triton.jit
def store(
    base, start, values, N: tl.constexpr, STRIDE: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr
):
    row = start + tl.arange(0, ROWS)
    place = row[:, None] * STRIDE + tl.arange(0, D)[None, :]
    tl.store(base + place, values.to(base.dtype.element_ty), mask=(row < N)[:, None])


@triton.jit
def absorb(
    query, top, total, mixed, qkv, start, scale,
    N: tl.constexpr, H: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Adds a tile of keys and values to a running softmax (maximum, sum, weighted values)."""
    key = load(qkv + H * D, start, N, 3 * H * D, D, KEYS)
    value = load(qkv + 2 * H * D, start, N, 3 * H * D, D, KEYS)
    scores = tl.dot(query, tl.trans(key)) * scale
    scores = tl.where((start + tl.arange(0, KEYS) < N)[None, :], scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 1))
    weights = tl.exp2(scores - higher[:, None])
    shrink = tl.exp2(top - higher)
    total = total * shrink + tl.sum(weights, 1)
    mixed = tl.dot(weights.to(value.dtype), value, mixed * shrink[:, None])
    return higher, total, mixed


@triton.jit
def attend(
    qkv, out, logs, start, scale, N: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
    FULL: tl.constexpr, BLOCK: tl.constexpr, TAIL: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Stores the outputs of a tile of queries, and the logarithms of their softmax sums."""
    query = load(qkv, start, N, 3 * H * D, D, ROWS)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, D), tl.float32)
    for tile in range(FULL):
        top, total, mixed = absorb(
            query, top, total, mixed, qkv, tile * BLOCK, scale, N, H, D, BLOCK
        )
    if TAIL > 0:
        top, total, mixed = absorb(
            query, top, total, mixed, qkv, FULL * BLOCK, scale, N, H, D, TAIL
        )
    store(out, start, mixed / total[:, None], N, H * D, D, ROWS)
    row = start + tl.arange(0, ROWS)
    tl.store(logs + row, top + tl.log2(total), mask=row < N)


@triton.jit
def attention(
    qkv, out, logs, scale, N: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
    FULL: tl.constexpr, BLOCK: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """Computes out (B, N, H, D) and logs (B, H, N) from qkv (B, N, 3, H, D)."""
    image, head = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    qkv += image * (N * 3 * H * D) + head * D
    out += image * (N * H * D) + head * D
    logs += (image * H + head) * N
    for tile in range(FULL):
        attend(qkv, out, logs, tile * BLOCK, scale, N, H, D, FULL, BLOCK, TAIL, BLOCK)
    if TAIL > 0:
        attend(qkv, out, logs, FULL * BLOCK, scale, N, H, D, FULL, BLOCK, TAIL, TAIL)


@triton.jit
def queries(
    qkv, out, gradient, logs, start,
    N: tl.constexpr, H: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Loads a tile of queries for the backward pass; rows beyond N have zero weights."""
    query = load(qkv, start, N, 3 * H * D, D, ROWS)
    above = load(gradient, start, N, H * D, D, ROWS)
    mixed = load(out, start, N, H * D, D, ROWS)
    row = start + tl.arange(0, ROWS)
    log = tl.load(logs + row, mask=row < N, other=float("inf"))
    return query, above, log, tl.sum(above.to(tl.float32) * mixed.to(tl.float32), 1)


@triton.jit
def slopes(key, value, query, above, log, common, here, scale):
    """Returns probabilities and score gradients of a tile, (keys, queries) in half precision."""
    weights = tl.exp2(tl.dot(key, tl.trans(query)) * scale - log[None, :])
    weights = tl.where(here[:, None], weights, 0.0)
    slope = weights * (tl.dot(value, tl.trans(above)) - common[None, :])
    return weights.to(above.dtype), slope.to(query.dtype)


@triton.jit
def to_key_value(
    key, value, to_key, to_value, qkv, out, gradient, logs, start, here, scale,
    N: tl.constexpr, H: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Adds the gradient from a tile of queries to a tile of keys and values."""
    query, above, log, common = queries(qkv, out, gradient, logs, start, N, H, D, ROWS)
    weights, slope = slopes(key, value, query, above, log, common, here, scale)
    return tl.dot(slope, query, to_key), tl.dot(weights, above, to_value)


@triton.jit
def key_value_gradient(
    qkv, out, gradient, logs, to_qkv, start, scale, factor,
    N: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
    FULL: tl.constexpr, BLOCK: tl.constexpr, TAIL: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Stores gradients of a tile of keys and values; returns their sums over tokens."""
    key = load(qkv + H * D, start, N, 3 * H * D, D, KEYS)
    value = load(qkv + 2 * H * D, start, N, 3 * H * D, D, KEYS)
    here = start + tl.arange(0, KEYS) < N
    to_key = tl.zeros((KEYS, D), tl.float32)
    to_value = tl.zeros((KEYS, D), tl.float32)
    for tile in range(FULL):
        to_key, to_value = to_key_value(
            key, value, to_key, to_value, qkv, out, gradient, logs, tile * BLOCK, here, scale,
            N, H, D, BLOCK,
        )  # fmt: skip
    if TAIL > 0:
        to_key, to_value = to_key_value(
            key, value, to_key, to_value, qkv, out, gradient, logs, FULL * BLOCK, here, scale,
            N, H, D, TAIL,
        )  # fmt: skip
    to_key *= factor
    store(to_qkv + H * D, start, to_key, N, 3 * H * D, D, KEYS)
    store(to_qkv + 2 * H * D, start, to_value, N, 3 * H * D, D, KEYS)
    return tl.sum(to_key, 0), tl.sum(to_value, 0)


@triton.jit
def to_queries(
    query, above, log, common, to_query, qkv, start, scale,
    N: tl.constexpr, H: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Adds the gradient from a tile of keys and values to a tile of queries."""
    key = load(qkv + H * D, start, N, 3 * H * D, D, KEYS)
    value = load(qkv + 2 * H * D, start, N, 3 * H * D, D, KEYS)
    weights = tl.exp2(tl.dot(query, tl.trans(key)) * scale - log[:, None])
    weights = tl.where((start + tl.arange(0, KEYS) < N)[None, :], weights, 0.0)
    slope = weights * (tl.dot(above, tl.trans(value)) - common[:, None])
    return tl.dot(slope.to(key.dtype), key, to_query)


@triton.jit
def query_gradient(
    qkv, out, gradient, logs, to_qkv, start, scale, factor,
    N: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
    FULL: tl.constexpr, BLOCK: tl.constexpr, TAIL: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Stores the gradient of a tile of queries; returns its sum over tokens."""
    query, above, log, common = queries(qkv, out, gradient, logs, start, N, H, D, ROWS)
    to_query = tl.zeros((ROWS, D), tl.float32)
    for tile in range(FULL):
        to_query = to_queries(
            query, above, log, common, to_query, qkv, tile * BLOCK, scale, N, H, D, BLOCK
        )
    if TAIL > 0:
        to_query = to_queries(
            query, above, log, common, to_query, qkv, FULL * BLOCK, scale, N, H, D, TAIL
        )
    to_query *= factor
    store(to_qkv, start, to_query, N, 3 * H * D, D, ROWS)
    return tl.sum(to_query, 0)


@triton.jit
def attention_gradient(
    qkv, out, gradient, logs, to_qkv, sums, scale, factor,
    N: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
    FULL: tl.constexpr, BLOCK: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """Computes to_qkv (B, N, 3, H, D) and its sums over each image's tokens (B, 3, H, D).

    Program axis 1 separates the pass over keys from the pass over queries. Scores are computed
    twice, but no partial sums go through memory.
    """
    image, head = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    qkv += image * (N * 3 * H * D) + head * D
    to_qkv += image * (N * 3 * H * D) + head * D
    out += image * (N * H * D) + head * D
    gradient += image * (N * H * D) + head * D
    logs += (image * H + head) * N
    sums += image * (3 * H * D) + head * D + tl.arange(0, D)
    if tl.program_id(1) == 0:
        of_key = tl.zeros((D,), tl.float32)
        of_value = tl.zeros((D,), tl.float32)
        for tile in range(FULL):
            more_key, more_value = key_value_gradient(
                qkv, out, gradient, logs, to_qkv, tile * BLOCK, scale, factor,
                N, H, D, FULL, BLOCK, TAIL, BLOCK,
            )  # fmt: skip
            of_key += more_key
            of_value += more_value
        if TAIL > 0:
            more_key, more_value = key_value_gradient(
                qkv, out, gradient, logs, to_qkv, FULL * BLOCK, scale, factor,
                N, H, D, FULL, BLOCK, TAIL, TAIL,
            )  # fmt: skip
            of_key += more_key
            of_value += more_value
        tl.store(sums + H * D, of_key)
        tl.store(sums + 2 * H * D, of_value)
    else:
        of_query = tl.zeros((D,), tl.float32)
        for tile in range(FULL):
            of_query += query_gradient(
                qkv, out, gradient, logs, to_qkv, tile * BLOCK, scale, factor,
                N, H, D, FULL, BLOCK, TAIL, BLOCK,
            )  # fmt: skip
        if TAIL > 0:
            of_query += query_gradient(
                qkv, out, gradient, logs, to_qkv, FULL * BLOCK, scale, factor,
                N, H, D, FULL, BLOCK, TAIL, TAIL,
            )  # fmt: skip
        tl.store(sums, of_query)


@triton.jit
def key_value_once(
    qkv, to_qkv, query, above, log, common, last_query, last_above, last_log, last_common,
    start, scale, factor, N: tl.constexpr, H: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Stores gradients of a tile of keys and values; returns its share of the query gradients."""
    key = load(qkv + H * D, start, N, 3 * H * D, D, KEYS)
    value = load(qkv + 2 * H * D, start, N, 3 * H * D, D, KEYS)
    here = start + tl.arange(0, KEYS) < N
    weights, slope = slopes(key, value, query, above, log, common, here, scale)
    to_value = tl.dot(weights, above)
    to_key = tl.dot(slope, query)
    to_query = tl.dot(tl.trans(slope), key)
    weights, slope = slopes(key, value, last_query, last_above, last_log, last_common, here, scale)
    to_value = tl.dot(weights, last_above, to_value)
    to_key = tl.dot(slope, last_query, to_key) * factor
    to_last = tl.dot(tl.trans(slope), key)
    store(to_qkv + H * D, start, to_key, N, 3 * H * D, D, KEYS)
    store(to_qkv + 2 * H * D, start, to_value, N, 3 * H * D, D, KEYS)
    return to_query, to_last, tl.sum(to_key, 0), tl.sum(to_value, 0)


@triton.jit
def attention_gradient_once(
    qkv, out, gradient, logs, to_qkv, sums, scale, factor,
    N: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
    FULL: tl.constexpr, BLOCK: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """Like `attention_gradient`, for one full tile and a tail.

    Each score is computed only once, as the gradients of all queries fit in registers.
    """
    image, head = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    qkv += image * (N * 3 * H * D) + head * D
    to_qkv += image * (N * 3 * H * D) + head * D
    out += image * (N * H * D) + head * D
    gradient += image * (N * H * D) + head * D
    logs += (image * H + head) * N
    sums += image * (3 * H * D) + head * D + tl.arange(0, D)
    query, above, log, common = queries(qkv, out, gradient, logs, 0, N, H, D, BLOCK)
    last_query, last_above, last_log, last_common = queries(
        qkv, out, gradient, logs, BLOCK, N, H, D, TAIL
    )
    to_query, to_last, of_key, of_value = key_value_once(
        qkv, to_qkv, query, above, log, common, last_query, last_above, last_log, last_common,
        0, scale, factor, N, H, D, BLOCK,
    )  # fmt: skip
    more_query, more_last, more_key, more_value = key_value_once(
        qkv, to_qkv, query, above, log, common, last_query, last_above, last_log, last_common,
        BLOCK, scale, factor, N, H, D, TAIL,
    )  # fmt: skip
    to_query = (to_query + more_query) * factor
    to_last = (to_last + more_last) * factor
    store(to_qkv, 0, to_query, N, 3 * H * D, D, BLOCK)
    store(to_qkv, BLOCK, to_last, N, 3 * H * D, D, TAIL)
    tl.store(sums, tl.sum(to_query, 0) + tl.sum(to_last, 0))
    tl.store(sums + H * D, of_key + more_key)
    tl.store(sums + 2 * H * D, of_value + more_value)
