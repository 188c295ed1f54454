"""SHA-256 (FIPS 180-4) of the tiles of many blocks on a GPU (Triton): one launch for all, one lane for a tile.

A lane hashes its tile 64 bytes after 64 bytes, so a GPU is fast only where it has many tiles at once; a model of some
billions of weights has about 100,000. Hence blocks of many tensors are hashed together: a table describes them, and
each program looks up its block. Sectors that a lane has not yet used up wait in the L1 cache.

Blocks are those of `tiles.py`, [k, r, m, c]: bands, rows, cells and columns. A tile is a strip of rows of a cell,
or a piece of one row.
"""

from collections.abc import Sequence
from itertools import accumulate, chain, pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..machine.triton_numbers import INTERPRETED

LANES = 128  # tiles of a program, one a thread
DIGEST_WORDS = 8
UNITS = (64, 4, 1)  # bytes contiguous in every tile; a block uses the first of these that fits it
MAX_TILE_BYTES = 1 << 28  # the number of bits of a tile must fit in 32 bits
_NUM_FIELDS = tl.constexpr(14)  # in a row of the table
_NUM_CONSTANTS = tl.constexpr(64)  # before the rows of the table
_ROUND_CONSTANTS = (
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
)  # fmt: skip


def triton_tile_hashes(blocks: Sequence[tuple[Tensor, int, int]]) -> list[bytes]:
    """Compute `tiles.tile_hashes_of_all` of blocks that are all on one GPU; waits for it at the end.

    Blocks are not changed, and copied on their GPU only where their columns are not contiguous. Raises ValueError for a
    device that is not served.
    """
    wrong = sorted({str(block.device) for block, _, _ in blocks if not (block.is_cuda or INTERPRETED.value)})
    if wrong:
        raise ValueError(f"Triton hashes tensors on a GPU, not on {', '.join(wrong)}")
    readable = [(_readable(block), strip_rows, piece_cols) for block, strip_rows, piece_cols in blocks]
    launched = []
    for unit in UNITS:
        indices = [i for i, fields in enumerate(readable) if fields[0].numel() and _unit(*fields) == unit]
        if indices:
            launched.append((indices, *_launch([readable[i] for i in indices], unit)))
    hashes = [b""] * len(blocks)
    for indices, digests, first_tiles in launched:
        raw = digests.cpu().view(torch.uint8).numpy().tobytes()
        for i, (first, end) in zip(indices, pairwise(first_tiles), strict=True):
            hashes[i] = raw[first * DIGEST_WORDS * 4 : end * DIGEST_WORDS * 4]
    return hashes


def _readable(block: Tensor) -> Tensor:
    block = block.detach().resolve_conj().resolve_neg()
    return block if block.stride(3) == 1 or block.shape[3] == 1 else block.contiguous()


def _unit(block: Tensor, strip_rows: int, piece_cols: int) -> int:
    """Choose from UNITS: 64 where rows of tiles are whole blocks of SHA-256, 4 where they are whole words, else 1."""
    size, cols = block.element_size(), block.shape[3]
    addresses = [block.data_ptr(), *(stride * size for stride in block.stride()[:3])]
    # The last piece of a row may be shorter, so the row counts too; a last strip has fewer rows of the same length.
    lengths = [min(piece_cols, cols) * size, cols * size]
    if any(number % 4 for number in [*addresses, *lengths]):
        return 1
    return 4 if any(length % 64 for length in lengths) else 64


def _launch(blocks: list[tuple[Tensor, int, int]], unit: int) -> tuple[Tensor, list[int]]:
    """Launch the kernel without waiting for it.

    Returns digests [tiles, 8] int32 in the order of their bytes, and the first tile of each block followed by the end.
    """
    device = blocks[0][0].device
    fields, num_tiles = [], []
    for block, strip_rows, piece_cols in blocks:
        (bands, rows, cells, cols), size = block.shape, block.element_size()
        strips, pieces = triton.cdiv(rows, strip_rows), triton.cdiv(cols, piece_cols)
        assert min(strip_rows, rows) * min(piece_cols, cols) * size < MAX_TILE_BYTES
        num_tiles.append(bands * cells * strips * pieces)
        strides = [stride * size for stride in block.stride()[:3]]
        fields.append([rows, cells, cols * size, *strides, strip_rows, piece_cols * size, strips, pieces])
    num_programs = [triton.cdiv(count, LANES) for count in num_tiles]
    first_tiles, first_programs = ([0, *accumulate(counts)] for counts in (num_tiles, num_programs))
    table = [
        [block.data_ptr(), first_programs[i], first_tiles[i], num_tiles[i], *fields[i]]
        for i, (block, _, _) in enumerate(blocks)
    ]
    owners = torch.arange(len(blocks), dtype=torch.int32).repeat_interleave(torch.tensor(num_programs))
    digests = torch.empty(first_tiles[-1], DIGEST_WORDS, dtype=torch.int32, device=device)
    numbers = [*_ROUND_CONSTANTS, *chain.from_iterable(table)]
    entries = torch.tensor(numbers, dtype=torch.int64).to(device)
    with torch.cuda.device_of(digests):
        _hash_kernel[(first_programs[-1],)](entries, owners.to(device), digests, TILES=LANES, UNIT=unit, num_warps=4)
    return digests, first_tiles


@triton.jit
def _rotated(x, n: tl.constexpr):
    return (x >> n) | (x << (32 - n))


@triton.jit
def _swapped(x):
    """Reverse the four bytes of uint32 x."""
    return (x >> 24) | ((x >> 8) & 0xFF00) | ((x << 8) & 0xFF0000) | (x << 24)


@triton.jit
def _round(a, b, c, d, e, f, g, h, word):
    """Run one round; the state after it is (second, a, b, c, first, e, f, g), of which it returns first and second."""
    one = h + (_rotated(e, 6) ^ _rotated(e, 11) ^ _rotated(e, 25)) + (g ^ (e & (f ^ g))) + word
    two = (_rotated(a, 2) ^ _rotated(a, 13) ^ _rotated(a, 22)) + ((a & b) | (c & (a | b)))
    return d + one, one + two


@triton.jit
def _next_word(w0, w1, w9, w14):
    small = _rotated(w1, 7) ^ _rotated(w1, 18) ^ (w1 >> 3)
    return w0 + small + w9 + (_rotated(w14, 17) ^ _rotated(w14, 19) ^ (w14 >> 10))


@triton.jit
def _word(data, base, row_stride, width, size, num_blocks, start, offset: tl.constexpr, UNIT: tl.constexpr):
    """Load the padded message's word at byte start + offset, big-endian: data, then 0x80, zeros, the number of bits.

    start: first byte of a block of SHA-256; data + base: the address where the tile begins.
    """
    position = start + offset
    if UNIT == 1:
        word = position.to(tl.uint32) * 0
        for j in tl.static_range(4):
            at = position + j
            row = at // width
            byte = tl.load(data + base + row * row_stride + at % width, mask=at < size, other=0).to(tl.uint32)
            word = (word << 8) | tl.where(at == size, 0x80, byte)
    else:
        row = (start if UNIT == 64 else position) // width  # one row for a whole block of UNIT 64
        from_ = data + base + row * row_stride + (position - row * width)
        raw = tl.load(from_.to(tl.pointer_type(tl.uint32), bitcast=True), mask=position < size, other=0)
        word = tl.where(position == size, tl.full((1,), 0x80000000, tl.uint32), _swapped(raw))
    return tl.where(position == num_blocks * 64 - 4, size.to(tl.uint32) * 8, word)


@triton.jit
def _hash_kernel(table, owners, digests, TILES: tl.constexpr, UNIT: tl.constexpr):
    """Hash TILES tiles of one block of the table, with the fields that `_launch` writes; sizes and strides in bytes."""
    program = tl.program_id(0)
    entry = table + _NUM_CONSTANTS + tl.load(owners + program) * _NUM_FIELDS
    data = tl.load(entry).to(tl.pointer_type(tl.uint8))
    tile = (program - tl.load(entry + 1).to(tl.int32)) * TILES + tl.arange(0, TILES)
    is_real = tile < tl.load(entry + 3).to(tl.int32)
    num_rows, num_cells = tl.load(entry + 4).to(tl.int32), tl.load(entry + 5).to(tl.int32)
    row_bytes = tl.load(entry + 6).to(tl.int32)
    band_stride, row_stride, cell_stride = tl.load(entry + 7), tl.load(entry + 8), tl.load(entry + 9)
    strip_rows, piece_bytes = tl.load(entry + 10).to(tl.int32), tl.load(entry + 11).to(tl.int32)
    strips, pieces = tl.load(entry + 12).to(tl.int32), tl.load(entry + 13).to(tl.int32)

    piece, strip = tile % pieces, tile // pieces % strips
    cell = tile // (pieces * strips)
    top, left = strip * strip_rows, piece * piece_bytes
    width = tl.minimum(piece_bytes, row_bytes - left)
    size = width * tl.minimum(strip_rows, num_rows - top)
    base = (cell // num_cells) * band_stride + (cell % num_cells) * cell_stride + top * row_stride + left
    num_blocks = tl.where(is_real, (size + 9 + 63) // 64, 0)
    size = tl.where(is_real, size, 0)

    zero = tl.zeros((TILES,), tl.uint32)
    s0, s1, s2, s3 = zero + 0x6A09E667, zero + 0xBB67AE85, zero + 0x3C6EF372, zero + 0xA54FF53A
    s4, s5, s6, s7 = zero + 0x510E527F, zero + 0x9B05688C, zero + 0x1F83D9AB, zero + 0x5BE0CD19
    for block in range(0, tl.max(num_blocks, 0)):
        start = block * 64 + tl.zeros((TILES,), tl.int32)
        w0 = _word(data, base, row_stride, width, size, num_blocks, start, 0, UNIT)
        w1 = _word(data, base, row_stride, width, size, num_blocks, start, 4, UNIT)
        w2 = _word(data, base, row_stride, width, size, num_blocks, start, 8, UNIT)
        w3 = _word(data, base, row_stride, width, size, num_blocks, start, 12, UNIT)
        w4 = _word(data, base, row_stride, width, size, num_blocks, start, 16, UNIT)
        w5 = _word(data, base, row_stride, width, size, num_blocks, start, 20, UNIT)
        w6 = _word(data, base, row_stride, width, size, num_blocks, start, 24, UNIT)
        w7 = _word(data, base, row_stride, width, size, num_blocks, start, 28, UNIT)
        w8 = _word(data, base, row_stride, width, size, num_blocks, start, 32, UNIT)
        w9 = _word(data, base, row_stride, width, size, num_blocks, start, 36, UNIT)
        w10 = _word(data, base, row_stride, width, size, num_blocks, start, 40, UNIT)
        w11 = _word(data, base, row_stride, width, size, num_blocks, start, 44, UNIT)
        w12 = _word(data, base, row_stride, width, size, num_blocks, start, 48, UNIT)
        w13 = _word(data, base, row_stride, width, size, num_blocks, start, 52, UNIT)
        w14 = _word(data, base, row_stride, width, size, num_blocks, start, 56, UNIT)
        w15 = _word(data, base, row_stride, width, size, num_blocks, start, 60, UNIT)
        a, b, c, d, e, f, g, h = s0, s1, s2, s3, s4, s5, s6, s7
        for first in range(0, 64, 16):  # not unrolled: unrolled it compiles many times longer
            if first > 0:
                w0, w1 = _next_word(w0, w1, w9, w14), _next_word(w1, w2, w10, w15)
                w2, w3 = _next_word(w2, w3, w11, w0), _next_word(w3, w4, w12, w1)
                w4, w5 = _next_word(w4, w5, w13, w2), _next_word(w5, w6, w14, w3)
                w6, w7 = _next_word(w6, w7, w15, w4), _next_word(w7, w8, w0, w5)
                w8, w9 = _next_word(w8, w9, w1, w6), _next_word(w9, w10, w2, w7)
                w10, w11 = _next_word(w10, w11, w3, w8), _next_word(w11, w12, w4, w9)
                w12, w13 = _next_word(w12, w13, w5, w10), _next_word(w13, w14, w6, w11)
                w14 = _next_word(w14, w15, w7, w12)
                w15 = _next_word(w15, w0, w8, w13)
            d, h = _round(a, b, c, d, e, f, g, h, w0 + tl.load(table + first).to(tl.uint32))
            c, g = _round(h, a, b, c, d, e, f, g, w1 + tl.load(table + first + 1).to(tl.uint32))
            b, f = _round(g, h, a, b, c, d, e, f, w2 + tl.load(table + first + 2).to(tl.uint32))
            a, e = _round(f, g, h, a, b, c, d, e, w3 + tl.load(table + first + 3).to(tl.uint32))
            h, d = _round(e, f, g, h, a, b, c, d, w4 + tl.load(table + first + 4).to(tl.uint32))
            g, c = _round(d, e, f, g, h, a, b, c, w5 + tl.load(table + first + 5).to(tl.uint32))
            f, b = _round(c, d, e, f, g, h, a, b, w6 + tl.load(table + first + 6).to(tl.uint32))
            e, a = _round(b, c, d, e, f, g, h, a, w7 + tl.load(table + first + 7).to(tl.uint32))
            d, h = _round(a, b, c, d, e, f, g, h, w8 + tl.load(table + first + 8).to(tl.uint32))
            c, g = _round(h, a, b, c, d, e, f, g, w9 + tl.load(table + first + 9).to(tl.uint32))
            b, f = _round(g, h, a, b, c, d, e, f, w10 + tl.load(table + first + 10).to(tl.uint32))
            a, e = _round(f, g, h, a, b, c, d, e, w11 + tl.load(table + first + 11).to(tl.uint32))
            h, d = _round(e, f, g, h, a, b, c, d, w12 + tl.load(table + first + 12).to(tl.uint32))
            g, c = _round(d, e, f, g, h, a, b, c, w13 + tl.load(table + first + 13).to(tl.uint32))
            f, b = _round(c, d, e, f, g, h, a, b, w14 + tl.load(table + first + 14).to(tl.uint32))
            e, a = _round(b, c, d, e, f, g, h, a, w15 + tl.load(table + first + 15).to(tl.uint32))
        goes_on = block < num_blocks  # False for tiles that are shorter than others of the program
        s0, s1 = tl.where(goes_on, s0 + a, s0), tl.where(goes_on, s1 + b, s1)
        s2, s3 = tl.where(goes_on, s2 + c, s2), tl.where(goes_on, s3 + d, s3)
        s4, s5 = tl.where(goes_on, s4 + e, s4), tl.where(goes_on, s5 + f, s5)
        s6, s7 = tl.where(goes_on, s6 + g, s6), tl.where(goes_on, s7 + h, s7)
    out = digests + (tl.load(entry + 2) + tile) * 8
    tl.store(out, _swapped(s0).to(tl.int32, bitcast=True), mask=is_real)
    tl.store(out + 1, _swapped(s1).to(tl.int32, bitcast=True), mask=is_real)
    tl.store(out + 2, _swapped(s2).to(tl.int32, bitcast=True), mask=is_real)
    tl.store(out + 3, _swapped(s3).to(tl.int32, bitcast=True), mask=is_real)
    tl.store(out + 4, _swapped(s4).to(tl.int32, bitcast=True), mask=is_real)
    tl.store(out + 5, _swapped(s5).to(tl.int32, bitcast=True), mask=is_real)
    tl.store(out + 6, _swapped(s6).to(tl.int32, bitcast=True), mask=is_real)
    tl.store(out + 7, _swapped(s7).to(tl.int32, bitcast=True), mask=is_real)
