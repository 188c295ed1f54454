"""Causal attention on a GPU (Triton): the paged cache in splits of fixed length, chunks and decode in the same tiles.

A program holds ROWS (row, query head) pairs of one sequence that share a KV head, for a chunk of a prompt and for the
one row of a decode step. Chunks and packed rows may have taller tiles, whose instructions (wgmma on Hopper) are others
than those of 16 rows (mma.sync): only where `use_tall_tiles` has found on the device that both give the same bits. It
reads the keys in tiles of KEYS, and every SPLIT keys, counted
from position 0, it starts a new empty sum. Splits are added from left to right, either here (many rows: one program
reads all splits) or by a second kernel (few rows: programs share the splits, so that one long context fills the GPU).
Both add with `_fold`, whose products cannot be contracted differently, and adding a split or a tile of which a row sees
nothing changes no bit. So a row's bits depend on the keys that it sees alone; the division of work changes only the
speed.

Packed sequences are a cache of one block a sequence, whose id is the sequence's first row: the same kernel, the same
bits. Nothing is read back from the GPU, so a captured graph may hold these calls; therefore the contents of a step's
tensors are checked on a CPU only.

Dimension letters: N rows of a step, S sequences, H query heads, K KV heads, G = H / K, D key width, E value width.
"""

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..machine.triton_numbers import INTERPRETED, dot_added, rounded
from .step import RowLayout, ScoreRule, refuse_layout
from .tiles import FEW_ROWS, Sharing, Tiling, share_splits, tall_tiling, tiling_of

SERVED = (torch.float32, torch.bfloat16, torch.float16)
LOG2E = tl.constexpr(math.log2(math.e))
_ENDLESS = 1 << 30  # size of the one block of a packed sequence


_tall: dict[tuple[torch.device, torch.dtype], bool] = {}  # whether tall tiles give the bits of the others


def use_tall_tiles(dtype: torch.dtype, device: torch.device) -> bool:
    """Find out whether tall tiles have the bits of tiles of 16 rows here; if so, chunks and packed rows take them.

    The answer is remembered. It depends on the device's kind, so that ranks agree. Call it before a graph is captured.
    """
    if dtype == torch.float32:  # no tensor cores: taller tiles gain nothing
        return False
    if (device, dtype) not in _tall:
        _tall[device, dtype] = all(_tall_tiles_agree(dtype, device, width) for width in (64, 128))
    return _tall[device, dtype]


def _tall_tiles_agree(dtype: torch.dtype, device: torch.device, width: int) -> bool:
    """Compare both tilings on two packed sequences that cross splits and tiles, with large and small scores."""
    generator = torch.Generator().manual_seed(5)
    query, key, value = (
        (torch.randn(330, heads, width, generator=generator, dtype=torch.float32) * 2).to(device, dtype)
        for heads in (4, 2, 2)
    )
    layout = RowLayout(torch.tensor([0, 301, 330], dtype=torch.int32, device=device), None, None)
    plain = tiling_of(dtype, width)
    rule = ScoreRule(width**-0.5, None, None)
    results = [
        triton_attention(query, key, value, layout, rule, None, tiling=tiling) for tiling in (plain, tall_tiling(plain))
    ]
    return torch.equal(*results)


def triton_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: RowLayout,
    rule: ScoreRule,
    sinks: Tensor | None,
    *,
    tiling: Tiling | None = None,
    sharing: Sharing | None = None,
) -> Tensor:
    """Compute attention of query [N,H,D]; key and value as in `paged_attention`, or [N,K,D] and [N,K,E] packed ->
    [N,H,E].

    `tiling` changes bits, `sharing` does not; both are for tests and measurements. Raises ValueError for a device or
    dtype that is not served, and for a layout on a CPU that does not fit.
    """
    if query.dtype not in SERVED or not (query.is_cuda or INTERPRETED.value):
        raise ValueError(
            f"Triton attention serves floats of 16 and 32 bits on a GPU, not {query.dtype} on {query.device}"
        )
    if not query.is_cuda:
        _check_on_host(query, key, layout)
    (num_rows, num_heads, width), value_width = query.shape, value.shape[-1]
    num_sequences, num_kv_heads = layout.query_start.shape[0] - 1, key.shape[-2]
    out = query.new_empty(num_rows, num_heads, value_width)
    if not out.numel():
        return out
    tiling = tiling or _tiling_for(query, value_width, num_sequences)
    units = math.gcd(width, 16), math.gcd(value_width, 16)
    blocks = _blocks_of(key, value, layout, units)
    query, key, value, tables = _aligned(query, units[0]), blocks.key, blocks.value, blocks.tables
    # Each sequence begins a new tile; this is the largest possible number.
    num_tiles = num_rows * (num_heads // num_kv_heads) // tiling.rows + num_sequences
    value_pad = max(16, triton.next_power_of_2(value_width))
    if sharing is None:
        num_splits = 1 if blocks.is_packed else triton.cdiv(tables.shape[1] * blocks.size, tiling.split)
        row_bytes = num_rows * num_heads * value_pad * 4
        sharing = share_splits(num_rows, num_sequences, num_tiles * num_kv_heads, num_splits, row_bytes)
    sums = query.new_empty(num_rows, num_heads, sharing.num_slots, value_pad, dtype=torch.float32)
    scales = query.new_empty(num_rows, num_heads, sharing.num_slots, 2, dtype=torch.float32)
    numbers = {"num_sequences": num_sequences, "num_heads": num_heads, "group": num_heads // num_kv_heads}
    numbers |= {"num_slots": sharing.num_slots, "window": rule.window or 0}
    fixed = {"ROWS": tiling.rows, "SPLIT": tiling.split, "E_PAD": value_pad, "HAS_WINDOW": rule.window is not None}
    launch = {"num_warps": tiling.num_warps, "num_stages": tiling.num_stages}
    sinks = None if sinks is None else sinks.detach().float().contiguous()
    with torch.cuda.device_of(query):
        _attend_kernel[(num_tiles, num_kv_heads, sharing.num_programs)](
            *(query, key, value, sums, scales, tables, layout.query_start, blocks.contexts),
            *(tables.stride(0), blocks.size),
            *(*_strides(query, units[0]), *_strides(key, units[0]), *_strides(value, units[1])),
            scale=rule.scale, softcap=rule.softcap or 0.0, HAS_SOFTCAP=rule.softcap is not None, KEYS=tiling.keys,
            D=width, E=value_width, D_PAD=max(16, triton.next_power_of_2(width)), D_UNIT=units[0], E_UNIT=units[1],
            **numbers, **fixed, **launch,
        )  # fmt: skip
        _merge_kernel[(num_tiles, num_kv_heads)](
            *(sums, scales, out, query if sinks is None else sinks, layout.query_start, blocks.contexts),
            HAS_SINKS=sinks is not None, E=value_width, **numbers, **fixed, num_warps=tiling.num_warps,
        )  # fmt: skip
    return out


def _tiling_for(query: Tensor, value_width: int, num_sequences: int) -> Tiling:
    tiling = tiling_of(query.dtype, max(query.shape[2], value_width))
    is_tall = len(query) > FEW_ROWS * num_sequences and _tall.get((query.device, query.dtype), False)
    return tall_tiling(tiling) if is_tall else tiling


@dataclass(frozen=True)
class _Blocks:
    """Keys and values as blocks with a table, of a cache or of packed rows."""

    key: Tensor  # [blocks,tokens,K,D]
    value: Tensor  # [blocks,tokens,K,E]
    tables: Tensor  # int32 [S,W]
    contexts: Tensor  # int32 [S]
    size: int  # tokens of a block
    is_packed: bool


def _blocks_of(key: Tensor, value: Tensor, layout: RowLayout, units: tuple[int, int]) -> _Blocks:
    """Describe the keys and values as blocks; packed rows become one endless block per sequence.

    units: the arguments of `_is_aligned` for keys and values. Raises ValueError for a cache that is not aligned.
    """
    if layout.block_tables is None or layout.context_lens is None:
        key, value = (_one_block_each(_aligned(t, unit)) for t, unit in zip((key, value), units, strict=True))
        return _Blocks(key, value, layout.query_start[:-1, None], layout.query_start.diff(), _ENDLESS, is_packed=True)
    _refuse_unaligned(key, units[0])
    _refuse_unaligned(value, units[1])
    return _Blocks(key, value, layout.block_tables, layout.context_lens, key.shape[1], is_packed=False)


def _check_on_host(query: Tensor, key: Tensor, layout: RowLayout) -> None:
    starts = layout.query_start.tolist()
    if starts[0] != 0 or starts[-1] != query.shape[0]:
        refuse_layout(-1, layout, query.shape[0])
    for s, (start, end) in enumerate(pairwise(starts)):
        context = end - start if layout.context_lens is None else int(layout.context_lens[s])
        fits = 0 <= end - start <= context
        if fits and layout.block_tables is not None:
            used = layout.block_tables[s, : -(-context // key.shape[1])]
            fits = context <= layout.block_tables.shape[1] * key.shape[1]
            fits = fits and bool(((used >= 0) & (used < key.shape[0])).all())
        if not fits:
            refuse_layout(s, layout, query.shape[0])


def _is_aligned(tensor: Tensor, unit: int) -> bool:
    """Return whether vectors of 16 bytes may be read, as the compiled kernel assumes for these widths."""
    strides_fit = all(stride % unit == 0 for stride in tensor.stride()[:-1])
    return tensor.stride(-1) == 1 and strides_fit and tensor.data_ptr() % 16 == 0


def _aligned(tensor: Tensor, unit: int) -> Tensor:
    return tensor if _is_aligned(tensor, unit) else tensor.clone(memory_format=torch.contiguous_format)


def _one_block_each(rows: Tensor) -> Tensor:
    """View [N,K,D] as a cache whose blocks may begin at any row: strides, not the shape, give a block's length."""
    return rows.as_strided((rows.shape[0], 1, *rows.shape[1:]), (rows.stride(0), *rows.stride()))


def _refuse_unaligned(cache: Tensor, unit: int) -> None:
    if not _is_aligned(cache, unit):  # copying a cache at every step would be too slow
        raise ValueError(
            f"Triton attention reads a cache with strides of multiples of {unit} from an address of multiples of 16, "
            f"not strides {list(cache.stride())} from {cache.data_ptr() % 16} beyond"
        )


def _strides(tensor: Tensor, unit: int) -> tuple[int, ...]:
    """Return strides in units; the kernel multiplies by the unit, so the compiler knows a divisor of each address."""
    return tuple(stride // unit for stride in tensor.stride()[:-1])


# Not specialised to sizes and strides: chunks, decode and training share one binary and all its choices.
_SIZES = ["num_sequences", "num_heads", "group", "num_slots", "window", "table_stride", "block_size"]
_STRIDES = [
    *("query_row", "query_head", "key_block", "key_token", "key_head", "value_block", "value_token", "value_head")
]
_TABLES = ["block_tables", "query_start", "context_lens"]


@triton.jit
def _fold(top, total, acc, next_top, next_total, next_acc):
    """Combine a row's softmax state with its next part: top [R] scores in log2, total [R], acc [R,E].

    Explicit fma leaves the compiler no choice of which products to contract, so two kernels give the same bits.
    """
    new_top = tl.maximum(top, next_top)
    base = tl.where(new_top == float("-inf"), 0.0, new_top)  # nothing seen yet: exp2(-inf - 0) is 0
    old, new = tl.exp2(top - base), tl.exp2(next_top - base)
    total = tl.fma(total, old, next_total * new)
    acc = tl.fma(acc, tl.broadcast_to(old[:, None], acc.shape), next_acc * new[:, None])
    return new_top, total, acc


@triton.jit
def sequence_of(tile, query_start, num_sequences, group, ROWS: tl.constexpr):
    """Find the sequence of a tile: the tiles of sequence s begin at query_start[s] * group // ROWS + s."""
    low = tile * 0
    high = num_sequences
    while high - low > 1:
        middle = (low + high) // 2
        is_later = tl.load(query_start + middle) * group // ROWS + middle <= tile
        low = tl.where(is_later, middle, low)
        high = tl.where(is_later, high, middle)
    return low


@triton.jit(do_not_specialize=_SIZES + _STRIDES, do_not_specialize_on_alignment=_TABLES)
def _attend_kernel(
    query, key, value, sums, scales, block_tables, query_start, context_lens,
    table_stride, block_size,
    query_row, query_head, key_block, key_token, key_head, value_block, value_token, value_head,
    num_sequences, num_heads, group, num_slots, window, scale, softcap,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, SPLIT: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, D_PAD: tl.constexpr, E_PAD: tl.constexpr,
    D_UNIT: tl.constexpr, E_UNIT: tl.constexpr,
):  # fmt: skip
    """Compute the splits p, p + P, ... of one tile of ROWS pairs (row, query head): program (tile, KV head, p).

    Writes sums [N,H,slots,E_PAD] and scales [N,H,slots,2] (top, total): a slot per split, or one for all of them.
    """
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    s = sequence_of(tile, query_start, num_sequences, group, ROWS)
    start = tl.load(query_start + s)
    num_pairs = (tl.load(query_start + s + 1) - start) * group
    first_pair = (tile - (start * group // ROWS + s)) * ROWS
    if first_pair >= num_pairs:
        return
    context = tl.load(context_lens + s)
    before = context - num_pairs // group  # keys before this step's rows
    pair = first_pair + tl.arange(0, ROWS)
    is_real = pair < num_pairs
    position = before + pair // group
    row, head = (start + pair // group).to(tl.int64), kv_head * group + pair % group
    last = tl.minimum(context - 1, before + (first_pair + ROWS - 1) // group)
    first_key = tile * 0
    if HAS_WINDOW:
        first_key = tl.maximum(before + first_pair // group - window + 1, 0)

    d, e, offset = tl.arange(0, D_PAD), tl.arange(0, E_PAD), tl.arange(0, KEYS)
    rows_at = row * query_row + head * query_head
    q = tl.load(query + rows_at[:, None] * D_UNIT + d[None, :], mask=is_real[:, None] & (d < D)[None, :], other=0.0)
    slot_at = (row * num_heads + head) * num_slots
    adds_here = num_slots == 1
    all_top = tl.full((ROWS,), float("-inf"), tl.float32)
    all_total = tl.zeros((ROWS,), tl.float32)
    all_acc = tl.zeros((ROWS, E_PAD), tl.float32)
    for split in range(first_key // SPLIT + tl.program_id(2), last // SPLIT + 1, tl.num_programs(2)):
        top = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        acc = tl.zeros((ROWS, E_PAD), tl.float32)
        end = tl.minimum((split + 1) * SPLIT, last + 1)
        for first in range(tl.maximum(split * SPLIT, first_key // KEYS * KEYS), end, KEYS):
            other = first + offset
            is_there = other < end
            block = tl.load(block_tables + s * table_stride + other // block_size, mask=is_there, other=0).to(tl.int64)
            keys_at = block * key_block + (other % block_size).to(tl.int64) * key_token + kv_head * key_head
            k_mask = is_there[:, None] & (d < D)[None, :]
            k = tl.load(key + keys_at[:, None] * D_UNIT + d[None, :], mask=k_mask, other=0.0)
            score = dot_added(tl.zeros((ROWS, KEYS), tl.float32), q, tl.trans(k)) * scale
            if HAS_SOFTCAP:
                score = softcap * (1.0 - 2.0 / (tl.exp2(score * (2.0 * LOG2E) / softcap) + 1.0))
            is_seen = is_there[None, :] & (other[None, :] <= position[:, None])
            if HAS_WINDOW:
                is_seen = is_seen & (other[None, :] > position[:, None] - window)
            score = tl.where(is_seen, score * LOG2E, float("-inf"))
            tile_top = tl.maximum(top, tl.max(score, 1))
            base = tl.where(tile_top == float("-inf"), 0.0, tile_top)
            old = tl.exp2(top - base)
            prob = tl.exp2(score - base[:, None])
            values_at = block * value_block + (other % block_size).to(tl.int64) * value_token + kv_head * value_head
            v_mask = is_there[:, None] & (e < E)[None, :]
            v = tl.load(value + values_at[:, None] * E_UNIT + e[None, :], mask=v_mask, other=0.0)
            # A separate sum, added by fma: unseen keys add an exact 0, even if tensor cores would change a sum they add
            # to.
            part = dot_added(tl.zeros((ROWS, E_PAD), tl.float32), rounded(prob, v.dtype), v)
            total = tl.fma(total, old, tl.sum(prob, 1))
            acc = tl.fma(acc, tl.broadcast_to(old[:, None], acc.shape), part)
            top = tile_top
        all_top = tl.where(adds_here, all_top, float("-inf"))
        all_total = tl.where(adds_here, all_total, 0.0)
        all_acc = tl.where(adds_here, all_acc, 0.0)
        all_top, all_total, all_acc = _fold(all_top, all_total, all_acc, top, total, acc)
        at = slot_at + tl.where(adds_here, 0, split)
        due_split = tl.where(adds_here, last // SPLIT, split)
        is_due = tl.where(due_split == split, pair, num_pairs) < num_pairs
        tl.store(scales + at * 2, all_top, mask=is_due)
        tl.store(scales + at * 2 + 1, all_total, mask=is_due)
        tl.store(sums + at[:, None] * E_PAD + e[None, :], all_acc, mask=is_due[:, None])


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=[*_TABLES, "sinks"])
def _merge_kernel(
    sums, scales, out, sinks, query_start, context_lens,
    num_sequences, num_heads, group, num_slots, window,
    HAS_WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr, ROWS: tl.constexpr, SPLIT: tl.constexpr,
    E: tl.constexpr, E_PAD: tl.constexpr,
):  # fmt: skip
    """Add the splits of each row from left to right, then its sink, and divide: out [N,H,E]."""
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    s = sequence_of(tile, query_start, num_sequences, group, ROWS)
    start = tl.load(query_start + s)
    num_pairs = (tl.load(query_start + s + 1) - start) * group
    first_pair = (tile - (start * group // ROWS + s)) * ROWS
    if first_pair >= num_pairs:
        return
    pair = first_pair + tl.arange(0, ROWS)
    is_real = pair < num_pairs
    position = tl.load(context_lens + s) - num_pairs // group + pair // group
    row, head = (start + pair // group).to(tl.int64), kv_head * group + pair % group
    first_split, end_split = position * 0, position // SPLIT + 1
    if HAS_WINDOW:
        first_split = tl.maximum(position - window + 1, 0) // SPLIT
    if num_slots == 1:
        first_split, end_split = position * 0, position * 0 + 1
    from_split = tl.min(tl.where(is_real, first_split, 0x7FFFFFFF), 0)
    to_split = tl.max(tl.where(is_real, end_split, 0), 0)
    e = tl.arange(0, E_PAD)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, E_PAD), tl.float32)
    for split in range(from_split, to_split):
        is_its = is_real & (first_split <= split) & (split < end_split)
        at = (row * num_heads + head) * num_slots + split
        next_top = tl.load(scales + at * 2, mask=is_its, other=float("-inf"))
        next_total = tl.load(scales + at * 2 + 1, mask=is_its, other=0.0)
        next_acc = tl.load(sums + at[:, None] * E_PAD + e[None, :], mask=is_its[:, None], other=0.0)
        top, total, acc = _fold(top, total, acc, next_top, next_total, next_acc)
    if HAS_SINKS:
        sink = tl.load(sinks + head, mask=is_real, other=0.0) * LOG2E
        top, total, acc = _fold(top, total, acc, sink, total * 0.0 + 1.0, acc * 0.0)
    result = acc / tl.where(is_real, total, 1.0)[:, None]
    out_at = (row * num_heads + head)[:, None] * E + e[None, :]
    tl.store(out + out_at, rounded(result, out.dtype.element_ty), mask=is_real[:, None] & (e < E)[None, :])
