"""Causal attention on a GPU (Triton): the paged cache in splits of fixed length, chunks and decode in the same tiles.

A program holds ROWS (row, query head) pairs of one sequence that share a KV head, for a chunk of a prompt and for the
one row of a decode step. Chunks and packed rows may have taller tiles, whose instructions (wgmma on Hopper) are others
than those of 16 rows (mma.sync): only where `use_tall_tiles` has found on the device that both give the same bits, as
they do on an H100. It reads the keys in tiles of KEYS, and every SPLIT keys, counted from position 0, it starts a new
empty sum. Splits are added from left to right, either here (many rows: one program reads all splits) or by a second
kernel (few rows: programs share the splits, so that one long context fills the GPU). Adding a split or a tile of which
a row sees nothing changes no bit (`triton_softmax.py` has the arithmetic). So a row's bits depend on the keys that it
sees alone; the division of work changes only the speed.

Packed sequences are a cache of one block a sequence, whose id is the sequence's first row: the same kernel, the same
bits. Nothing is read back from the GPU, so a captured graph may hold these calls; therefore the contents of a step's
tensors are checked on a CPU only.

Dimension letters: N rows of a step, S sequences, H query heads, K KV heads, G = H / K, D key width, E value width.
"""

import math
from itertools import pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..machine.triton_launches import UNFUSED, early_launch, wait_for_inputs
from ..machine.triton_numbers import INTERPRETED
from .blocks import Blocks, aligned, blocks_of, strides_in_units
from .step import RowLayout, ScoreRule, ends_fit, refuse_layout
from .tiles import FEW_ROWS, Sharing, Tiling, share_splits, tall_tiling, tiling_of
from .triton_softmax import add_keys, fold, nothing, rows_of, store_rows, store_sums

SERVED = (torch.float32, torch.bfloat16, torch.float16)


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
    bias: Tensor | None = None,
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
    blocks = blocks_of(key, value, layout, units)
    # Each sequence begins a new tile; this is the largest possible number.
    num_tiles = num_rows * (num_heads // num_kv_heads) // tiling.rows + num_sequences
    if sharing is None:
        num_splits = 1 if blocks.is_packed else triton.cdiv(blocks.tables.shape[1] * blocks.size, tiling.split)
        row_bytes = num_rows * num_heads * _padded(value_width) * 4
        sharing = share_splits(num_rows, num_sequences, num_tiles * num_kv_heads, num_splits, row_bytes)
    sinks = None if sinks is None else sinks.detach().float().contiguous()
    _launch(aligned(query, units[0]), blocks, layout, rule, sinks, bias, out, num_tiles, tiling, sharing)
    return out


def _launch(
    query: Tensor, blocks: Blocks, layout: RowLayout, rule: ScoreRule, sinks: Tensor | None, bias: Tensor | None,
    out: Tensor, num_tiles: int, tiling: Tiling, sharing: Sharing,
) -> None:  # fmt: skip
    """Launch the kernel, and the second one where programs share splits."""
    (num_rows, num_heads, width), (num_kv_heads, value_width) = query.shape, blocks.value.shape[2:]
    units, query_start = (math.gcd(width, 16), math.gcd(value_width, 16)), layout.query_start
    is_shared = sharing.num_slots > 1
    shape = (num_rows, num_heads, sharing.num_slots) if is_shared else (0,)
    sums = query.new_empty(*shape, _padded(value_width), dtype=torch.float32)
    scales = query.new_empty(*shape, 2, dtype=torch.float32)
    numbers = {"num_sequences": len(query_start) - 1, "num_heads": num_heads, "group": num_heads // num_kv_heads}
    numbers |= {"num_slots": sharing.num_slots, "window": rule.window or 0}
    numbers["sink_row"] = num_heads if sinks is not None and sinks.dim() == 2 else 0
    fixed = {"ROWS": tiling.rows, "SPLIT": tiling.split, "E": value_width, "E_PAD": _padded(value_width)}
    fixed |= {"HAS_WINDOW": rule.window is not None, "HAS_SINKS": sinks is not None}
    fixed["HAS_ENDS"] = layout.row_ends is not None
    sinks = query if sinks is None else sinks  # not read
    row_ends = query_start if layout.row_ends is None else layout.row_ends
    launch = {"num_warps": tiling.num_warps, **early_launch(query.device), **UNFUSED}
    strides = [stride for t, unit in zip((query, blocks.key, blocks.value), (units[0], *units), strict=True)
               for stride in strides_in_units(t, unit)]  # fmt: skip
    with torch.cuda.device_of(query):
        _attend_kernel[(num_tiles, num_kv_heads, sharing.num_programs)](
            *(query, blocks.key, blocks.value, sums, scales, out, sinks, blocks.tables, query_start, blocks.contexts),
            *(blocks.tables.stride(0), *strides),
            row_ends=row_ends, bias=query if bias is None else bias, reach=0 if bias is None else bias.shape[-1],
            bias_row=bias.stride(0) if bias is not None and bias.dim() == 3 else 0,
            HAS_BIAS=bias is not None,
            scale=rule.scale, softcap=rule.softcap or 0.0, HAS_SOFTCAP=rule.softcap is not None, KEYS=tiling.keys,
            D=width, D_PAD=_padded(width), D_UNIT=units[0], E_UNIT=units[1],
            BLOCK=0 if blocks.is_packed else blocks.size, IS_SHARED=is_shared, **numbers, **fixed, **launch,
            num_stages=tiling.num_stages,
        )  # fmt: skip
        if is_shared:
            _merge_kernel[(num_tiles, num_kv_heads)](
                sums, scales, out, sinks, query_start, blocks.contexts, row_ends, **numbers, **fixed, **launch
            )


def _padded(width: int) -> int:
    return max(16, triton.next_power_of_2(width))


def _tiling_for(query: Tensor, value_width: int, num_sequences: int) -> Tiling:
    tiling = tiling_of(query.dtype, max(query.shape[2], value_width))
    is_tall = len(query) > FEW_ROWS * num_sequences and _tall.get((query.device, query.dtype), False)
    return tall_tiling(tiling) if is_tall else tiling


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
        if not fits or not ends_fit(layout, start, end - start, context):
            refuse_layout(s, layout, query.shape[0])


# Not specialised to sizes and strides: chunks, decode and training share one binary and all its choices.
_SIZES = ["num_sequences", "num_heads", "group", "num_slots", "window", "table_stride", "sink_row", "bias_row", "reach"]
_STRIDES = [
    *("query_row", "query_head", "key_block", "key_token", "key_head", "value_block", "value_token", "value_head")
]
_TABLES = ["block_tables", "query_start", "context_lens", "row_ends"]


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


@triton.jit
def _walk(
    all_top, all_total, all_acc, top, total, acc, q, begin, stop, end, position, row_end, key, value, tables, table_at,
    kv_head, key_block, key_token, key_head, value_block, value_token, value_head, window, scale, softcap, bias,
    bias_at, reach, MASKED: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_BIAS: tl.constexpr,
    KEYS: tl.constexpr, SPLIT: tl.constexpr, D: tl.constexpr, E: tl.constexpr, D_PAD: tl.constexpr,
    E_PAD: tl.constexpr, D_UNIT: tl.constexpr, E_UNIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add the keys from begin to stop, tile by tile, to the sums of their split, and these, where it ends, to the sums
    of all splits. One loop crosses splits: loads run ahead within a loop only."""
    for first in range(begin, stop, KEYS):
        top, total, acc = add_keys(
            top, total, acc, q, first, end, position, row_end, key, value, tables, table_at, kv_head,
            key_block, key_token, key_head, value_block, value_token, value_head, window, scale, softcap, bias,
            bias_at, reach, MASKED, HAS_WINDOW, HAS_SOFTCAP, HAS_BIAS, KEYS, D, E, D_PAD, E_PAD, D_UNIT, E_UNIT, BLOCK,
        )  # fmt: skip
        if (first + KEYS) % SPLIT == 0:
            all_top, all_total, all_acc = fold(all_top, all_total, all_acc, top, tl.max(total, 1), acc)
            top, total, acc = nothing(q.shape[0], E_PAD)
    return all_top, all_total, all_acc, top, total, acc


@triton.jit(do_not_specialize=_SIZES + _STRIDES, do_not_specialize_on_alignment=[*_TABLES, "sinks", "bias"])
def _attend_kernel(
    query, key, value, sums, scales, out, sinks, block_tables, query_start, context_lens, table_stride,
    query_row, query_head, key_block, key_token, key_head, value_block, value_token, value_head,
    num_sequences, num_heads, group, num_slots, window, sink_row, scale, softcap, row_ends, bias, bias_row, reach,
    HAS_ENDS: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, SPLIT: tl.constexpr, D: tl.constexpr,
    E: tl.constexpr, D_PAD: tl.constexpr, E_PAD: tl.constexpr, D_UNIT: tl.constexpr, E_UNIT: tl.constexpr,
    BLOCK: tl.constexpr, IS_SHARED: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    """Compute the splits p, p + P, ... of one tile of ROWS pairs (row, query head): program (tile, KV head, p).

    IS_SHARED: writes sums [N,H,slots,E_PAD] and scales [N,H,slots,2] (top, total), a slot per split. Else P is 1, and
    the program folds all splits itself and writes out [N,H,E].
    """
    wait_for_inputs(IS_EARLY)
    # The last tiles of a sequence see the most keys: they begin first.
    tile, kv_head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
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
    row_end = position + 1  # of the keys that each row sees
    lowest = tile * 0  # of the keys that the first row sees
    seen_from = tile * 0  # all rows see the keys from here
    seen_to = before + first_pair // group + 1  # to here
    if HAS_WINDOW:
        lowest = tl.maximum(seen_to - window, 0)
        seen_from = tl.maximum(last - window + 1, 0)
    if HAS_ENDS:
        row_end = tl.load(row_ends + row, mask=is_real, other=0)
        last = tl.max(row_end, 0) - 1
        seen_to = tl.min(tl.where(is_real, row_end, 0x7FFFFFFF), 0)

    q = rows_of(query, row * query_row + head * query_head, is_real, D, D_PAD, D_UNIT, True)
    slot_at = (row * num_heads + head) * num_slots
    bias_at = row * bias_row + head * reach
    reach = tl.where(is_real, reach, 0)
    table_at = s * table_stride
    if IS_SHARED:
        for split in range(lowest // SPLIT + tl.program_id(2), last // SPLIT + 1, tl.num_programs(2)):
            top, total, acc = nothing(ROWS, E_PAD)
            end = tl.minimum((split + 1) * SPLIT, last + 1)
            begin = tl.maximum(split * SPLIT, lowest // KEYS * KEYS)
            for first in range(begin, end, KEYS):
                top, total, acc = add_keys(
                    top, total, acc, q, first, end, position, row_end, key, value, block_tables, table_at, kv_head,
                    key_block, key_token, key_head, value_block, value_token, value_head, window, scale, softcap, bias,
                    bias_at, reach, True, HAS_WINDOW, HAS_SOFTCAP, HAS_BIAS, KEYS, D, E, D_PAD, E_PAD, D_UNIT, E_UNIT,
                    BLOCK,
                )  # fmt: skip
            store_sums(sums, scales, slot_at + split, is_real, top, tl.max(total, 1), acc, E_PAD)
    else:
        # Tiles of which all rows see all keys need no masks.
        end = last + 1
        begin = lowest // KEYS * KEYS
        whole = begin
        if HAS_WINDOW:
            whole = tl.minimum(tl.maximum(begin, tl.cdiv(seen_from, KEYS) * KEYS), end)
        partly = whole + tl.maximum(tl.minimum(end, seen_to) - whole, 0) // KEYS * KEYS
        all_top = tl.full((ROWS,), float("-inf"), tl.float32)
        all_total = tl.zeros((ROWS,), tl.float32)
        all_acc = tl.zeros((ROWS, E_PAD), tl.float32)
        top, total, acc = nothing(ROWS, E_PAD)
        if HAS_WINDOW:
            all_top, all_total, all_acc, top, total, acc = _walk(
                all_top, all_total, all_acc, top, total, acc, q, begin, whole, end, position, row_end, key, value,
                block_tables, table_at, kv_head, key_block, key_token, key_head, value_block, value_token, value_head,
                window, scale, softcap, bias, bias_at, reach, True, HAS_WINDOW, HAS_SOFTCAP, HAS_BIAS, KEYS, SPLIT, D,
                E, D_PAD, E_PAD, D_UNIT, E_UNIT, BLOCK,
            )  # fmt: skip
        all_top, all_total, all_acc, top, total, acc = _walk(
            all_top, all_total, all_acc, top, total, acc, q, whole, partly, end, position, row_end, key, value,
            block_tables, table_at, kv_head, key_block, key_token, key_head, value_block, value_token, value_head,
            window, scale, softcap, bias, bias_at, reach, False, HAS_WINDOW, HAS_SOFTCAP, HAS_BIAS, KEYS, SPLIT, D,
            E, D_PAD, E_PAD, D_UNIT, E_UNIT, BLOCK,
        )  # fmt: skip
        all_top, all_total, all_acc, top, total, acc = _walk(
            all_top, all_total, all_acc, top, total, acc, q, partly, end, end, position, row_end, key, value,
            block_tables, table_at, kv_head, key_block, key_token, key_head, value_block, value_token, value_head,
            window, scale, softcap, bias, bias_at, reach, True, HAS_WINDOW, HAS_SOFTCAP, HAS_BIAS, KEYS, SPLIT, D,
            E, D_PAD, E_PAD, D_UNIT, E_UNIT, BLOCK,
        )  # fmt: skip
        all_top, all_total, all_acc = fold(all_top, all_total, all_acc, top, tl.max(total, 1), acc)
        sink_at = row * sink_row + head
        store_rows(out, sinks, slot_at, sink_at, is_real, all_top, all_total, all_acc, HAS_SINKS, E, E_PAD)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=[*_TABLES, "sinks"])
def _merge_kernel(
    sums, scales, out, sinks, query_start, context_lens, row_ends,
    num_sequences, num_heads, group, num_slots, window, sink_row,
    HAS_ENDS: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr, ROWS: tl.constexpr, SPLIT: tl.constexpr,
    E: tl.constexpr, E_PAD: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    """Add the splits of each row from left to right, then its sink, and divide: out [N,H,E]."""
    wait_for_inputs(IS_EARLY)
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
    if HAS_ENDS:
        end_split = (tl.load(row_ends + row, mask=is_real, other=1) - 1) // SPLIT + 1
    if HAS_WINDOW:
        first_split = tl.maximum(position - window + 1, 0) // SPLIT
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
        top, total, acc = fold(top, total, acc, next_top, next_total, next_acc)
    sink_at = row * sink_row + head
    store_rows(out, sinks, row * num_heads + head, sink_at, is_real, top, total, acc, HAS_SINKS, E, E_PAD)
