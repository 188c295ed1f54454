"""The arithmetic of Triton's attention: what a tile of keys adds to rows' sums, and how two sums become one.

No bit depends on how a tile is laid out over lanes and warps. Maxima are exact in any order. The weights of a row are
added by the matrix product that also adds the values: its order along the keys is that of its instructions, which is
one for tiles of 16 rows (mma.sync) and of 64 (wgmma) on the devices where `use_tall_tiles` says so. Everything else is
elementwise, and kernels are compiled without fusion (UNFUSED): what is fused says fma.
"""

import math

import triton
import triton.language as tl

from ..machine.triton_numbers import dot_added, rounded

LOG2E = tl.constexpr(math.log2(math.e))
COLUMNS = tl.constexpr(16)  # of ones: the narrowest product that all instructions take


@triton.jit
def fold(top, total, acc, next_top, next_total, next_acc):
    """Combine a row's softmax state with its next part: top [R] scores in log2, total [R], acc [R,E]."""
    new_top = tl.maximum(top, next_top)
    base = tl.where(new_top == float("-inf"), 0.0, new_top)  # nothing seen yet: exp2(-inf - 0) is 0
    old, new = tl.exp2(top - base), tl.exp2(next_top - base)
    total = tl.fma(total, old, next_total * new)
    acc = tl.fma(acc, tl.broadcast_to(old[:, None], acc.shape), next_acc * new[:, None])
    return new_top, total, acc


@triton.jit
def rows_of(tensor, at, is_there, WIDTH: tl.constexpr, PAD: tl.constexpr, UNIT: tl.constexpr, MASKED: tl.constexpr):
    """Load rows [R, PAD] that begin at `at` units; zeros beyond the width and, if MASKED, where there is none."""
    c = tl.arange(0, PAD)
    tile = tensor + at[:, None] * UNIT + c[None, :]
    if MASKED:
        return tl.load(tile, mask=is_there[:, None] & (c < WIDTH)[None, :], other=0.0)
    elif WIDTH == PAD:
        return tl.load(tile)
    else:
        return tl.load(tile, mask=(c < WIDTH)[None, :], other=0.0)


@triton.jit
def near_keys(bias, bias_at, reach, distance):
    """Load what rows add to the scores of keys, by their distance, from the lines [reach] of bias at `bias_at`.

    bias_at and reach fit the shape of distance. Returns it in float32; 0 for keys beyond the reach.
    """
    return tl.load(bias + bias_at + distance, mask=(distance >= 0) & (distance < reach), other=0.0).to(tl.float32)


@triton.jit
def add_tile(
    top, total, acc, q, k, v, is_seen, near, scale, softcap, MASKED: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Add a tile of keys k [KEYS,D] and values v [KEYS,E] to the sums of rows q [R,D].

    top [R], total [R,COLUMNS] with equal columns, acc [R,E]; is_seen [R,KEYS] is not read unless MASKED, nor is near
    [R,KEYS], the bias of scores, unless HAS_BIAS. A row that sees none of the keys keeps its bits: it adds zeros.
    """
    score = dot_added(tl.zeros((q.shape[0], k.shape[0]), tl.float32), q, tl.trans(k))
    factor = scale * LOG2E
    if HAS_SOFTCAP:
        score = softcap * (1.0 - 2.0 / (tl.exp2(score * scale * (2.0 * LOG2E) / softcap) + 1.0))
        factor = scale * 0.0 + LOG2E
    elif HAS_BIAS:
        score = score * scale
        factor = scale * 0.0 + LOG2E
    if HAS_BIAS:
        score = score + near
    if MASKED:
        score = tl.where(is_seen, score, float("-inf"))
    new_top = tl.maximum(top, tl.max(score, 1) * factor)
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    old = tl.exp2(top - base)
    below = tl.broadcast_to(-base[:, None], score.shape)
    weight = rounded(tl.exp2(tl.fma(score, tl.full(score.shape, 1.0, tl.float32) * factor, below)), v.dtype)
    total = dot_added(total * old[:, None], weight, tl.full((k.shape[0], COLUMNS), 1.0, v.dtype))
    return new_top, total, dot_added(acc * old[:, None], weight, v)


@triton.jit
def block_of(tables, table_at, other, is_there, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """Load the blocks of keys `other` of the sequence whose table begins at `table_at`; BLOCK 0: its one block."""
    if BLOCK == 0:
        return tl.load(tables + table_at + other * 0).to(tl.int64)
    elif MASKED:
        return tl.load(tables + table_at + other // BLOCK, mask=is_there, other=0).to(tl.int64)
    else:
        return tl.load(tables + table_at + other // BLOCK).to(tl.int64)


@triton.jit
def add_keys(
    top, total, acc, q, first, end, position, row_end, key, value, tables, table_at, kv_head,
    key_block, key_token, key_head, value_block, value_token, value_head, window, scale, softcap, bias, bias_at, reach,
    MASKED: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_BIAS: tl.constexpr,
    KEYS: tl.constexpr, D: tl.constexpr, E: tl.constexpr, D_PAD: tl.constexpr, E_PAD: tl.constexpr,
    D_UNIT: tl.constexpr, E_UNIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add the keys first, ..., first + KEYS - 1 to the sums of rows; MASKED: those below `end` that each row sees."""
    other = first + tl.arange(0, KEYS)
    is_there = other < end
    block = block_of(tables, table_at, other, is_there, BLOCK, MASKED)
    token = other.to(tl.int64)
    if BLOCK > 0:
        token = (other % BLOCK).to(tl.int64)
    k = rows_of(key, block * key_block + token * key_token + kv_head * key_head, is_there, D, D_PAD, D_UNIT, MASKED)
    v = rows_of(
        value, block * value_block + token * value_token + kv_head * value_head, is_there, E, E_PAD, E_UNIT, MASKED
    )
    is_seen = is_there[None, :] & (other[None, :] < row_end[:, None])
    if HAS_WINDOW:
        is_seen = is_seen & (other[None, :] > position[:, None] - window)
    near = 0.0
    if HAS_BIAS:
        near = near_keys(bias, bias_at[:, None], reach[:, None], position[:, None] - other[None, :])
    return add_tile(top, total, acc, q, k, v, is_seen, near, scale, softcap, MASKED, HAS_SOFTCAP, HAS_BIAS)


@triton.jit
def nothing(ROWS: tl.constexpr, E_PAD: tl.constexpr):
    """Return the sums of no keys."""
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    return top, tl.zeros((ROWS, COLUMNS), tl.float32), tl.zeros((ROWS, E_PAD), tl.float32)


@triton.jit
def store_sums(sums, scales, at, is_real, top, total, acc, E_PAD: tl.constexpr):
    """Write the sums of rows to their slots, sums [slots,E_PAD] and scales [slots,2]."""
    tl.store(scales + at * 2, top, mask=is_real)
    tl.store(scales + at * 2 + 1, total, mask=is_real)
    tl.store(sums + at[:, None] * E_PAD + tl.arange(0, E_PAD)[None, :], acc, mask=is_real[:, None])


@triton.jit
def store_rows(
    out, sinks, at, sink_at, is_real, top, total, acc, HAS_SINKS: tl.constexpr, E: tl.constexpr, E_PAD: tl.constexpr
):
    """Add each row's sink to its sums, divide, and write the rows `at` of out [N * H,E]."""
    if HAS_SINKS:
        sink = tl.load(sinks + sink_at, mask=is_real, other=0.0) * LOG2E
        top, total, acc = fold(top, total, acc, sink, total * 0.0 + 1.0, acc * 0.0)
    result = acc / tl.where(is_real, total, 1.0)[:, None]
    e = tl.arange(0, E_PAD)
    mask = is_real[:, None] & (e < E)[None, :]
    tl.store(out + at[:, None] * E + e[None, :], rounded(result, out.dtype.element_ty), mask=mask)
