"""SHA-256 of the tiles of a block: the leaves of the model digest.

Letters used in shapes: a block has k bands of r rows by m cells of c columns, [k, r, m, c]; a cell is [r, c]. A cell is
cut into strips of whole rows, or, where a strip is one row, that row into pieces: these are the tiles.

The native path hashes several tiles at a time on each thread and reads a cell in place, so it is faster than hashlib
over the same bytes; hashlib pays a copy of the block and a switch of threads per tile. Blocks on a GPU that Triton
serves are hashed there, all tiles at once, and only digests are copied.
"""

from __future__ import annotations

import ctypes
import hashlib
from array import array
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate

import torch
from torch import Tensor

from ..machine import native
from ..machine.gpu import triton_serves

DIGEST_BYTES = 32
SOURCE = "sha256/sha256_tiles.cpp"


def tile_hashes_of_all(blocks: Sequence[tuple[Tensor, int, int]]) -> list[bytes]:
    """Compute the digests of all tiles of each (block, strip_rows, piece_cols): 32 bytes a tile, in the order band,
    cell, strip, piece. Many tiles at a time are fastest, everywhere.

    block: [k, r, m, c] of any dtype, device and strides. It is not changed; it is copied once where its columns are not
    contiguous, or where it is neither on the CPU nor on a GPU that Triton serves. Either strip_rows is 1 or piece_cols
    is c. Releases the GIL while it hashes.
    """
    hashes = [b""] * len(blocks)
    for device in {block.device for block, _, _ in blocks}:
        indices = [i for i, (block, _, _) in enumerate(blocks) if block.device == device]
        its_blocks = [blocks[i] for i in indices]
        found = _triton_hashes(its_blocks) if triton_serves(device) else _native_hashes(its_blocks)
        for i, digests in zip(indices, found, strict=True):
            hashes[i] = digests
    return hashes


def _native_hashes(blocks: Sequence[tuple[Tensor, int, int]]) -> list[bytes]:
    hash_tiles = _native()
    if hash_tiles is None:
        return [tile_hashes_reference(*fields) for fields in blocks]
    kept, described, sizes = [], array("q"), []
    for block, strip_rows, piece_cols in blocks:
        if block.numel() == 0:
            sizes.append(0)
            continue
        block = block.detach().resolve_conj().resolve_neg()
        if block.device.type != "cpu" or block.stride(3) != 1:
            block = block.contiguous().cpu()
        kept.append(block)
        (bands, rows, cells, cols), size = block.shape, block.element_size()
        band_stride, row_stride, cell_stride, _ = (stride * size for stride in block.stride())
        described.extend((block.data_ptr(), bands, rows, cells, cols * size))
        described.extend((band_stride, row_stride, cell_stride, strip_rows, piece_cols * size))
        sizes.append(bands * cells * -(-rows // strip_rows) * -(-cols // piece_cols) * DIGEST_BYTES)
    out = ctypes.create_string_buffer(sum(sizes))
    native.run(hash_tiles, described.buffer_info()[0], len(kept), out)
    ends = list(accumulate(sizes))
    raw = out.raw
    return [raw[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def _triton_hashes(blocks: Sequence[tuple[Tensor, int, int]]) -> list[bytes]:
    from .triton_kernels import triton_tile_hashes  # imports Triton, which may not be installed

    return triton_tile_hashes(blocks)


def tile_hashes_reference(block: Tensor, strip_rows: int, piece_cols: int) -> bytes:
    """Compute `tile_hashes_of_all` of one block with hashlib: one copy of it, cell after cell, one call per tile."""
    _, rows, _, cols = block.shape
    cells = block.detach().permute(0, 2, 1, 3).contiguous().cpu().resolve_conj().resolve_neg()
    raw = memoryview(cells.reshape(-1).view(torch.uint8).numpy())
    row_bytes, piece_bytes = cols * cells.element_size(), piece_cols * cells.element_size()
    bounds = [
        (row * row_bytes + start, (min(row + strip_rows, rows) - 1) * row_bytes + min(start + piece_bytes, row_bytes))
        for row in range(0, rows, strip_rows)
        for start in range(0, row_bytes, piece_bytes)
    ]
    sha256 = hashlib.sha256
    return b"".join(
        sha256(raw[cell + start : cell + stop]).digest()
        for cell in range(0, len(raw), rows * row_bytes or 1)
        for start, stop in bounds
    )


def is_native() -> bool:
    """Return whether our C++ code hashes tiles: there is a C++ compiler."""
    return _native() is not None


@cache
def _native() -> Callable[..., int] | None:
    return native.function(SOURCE, "sha256_tiles", [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p], ctypes.c_int64)
