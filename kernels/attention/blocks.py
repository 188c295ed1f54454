"""Keys and values of Triton's attention as blocks with a table, of a cache or of packed rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .step import RowLayout

_ENDLESS = 1 << 30  # size of the one block of a packed sequence


@dataclass(frozen=True)
class Blocks:
    """Keys and values as blocks with a table, of a cache or of packed rows."""

    key: Tensor  # [blocks,tokens,K,D]
    value: Tensor  # [blocks,tokens,K,E]
    tables: Tensor  # int32 [S,W]
    contexts: Tensor  # int32 [S]
    size: int  # tokens of a block
    is_packed: bool


def blocks_of(key: Tensor, value: Tensor, layout: RowLayout, units: tuple[int, int]) -> Blocks:
    """Describe the keys and values as blocks; packed rows become one endless block per sequence.

    units: the arguments of `_is_aligned` for keys and values. Raises ValueError for a cache that is not aligned.
    """
    if layout.block_tables is None or layout.context_lens is None:
        key, value = (_one_block_each(aligned(t, unit)) for t, unit in zip((key, value), units, strict=True))
        return Blocks(key, value, layout.query_start[:-1, None], layout.query_start.diff(), _ENDLESS, is_packed=True)
    _refuse_unaligned(key, units[0])
    _refuse_unaligned(value, units[1])
    return Blocks(key, value, layout.block_tables, layout.context_lens, key.shape[1], is_packed=False)


def _is_aligned(tensor: Tensor, unit: int) -> bool:
    """Return whether vectors of 16 bytes may be read, as the compiled kernel assumes for these widths."""
    strides_fit = all(stride % unit == 0 for stride in tensor.stride()[:-1])
    return tensor.stride(-1) == 1 and strides_fit and tensor.data_ptr() % 16 == 0


def aligned(tensor: Tensor, unit: int) -> Tensor:
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


def strides_in_units(tensor: Tensor, unit: int) -> tuple[int, ...]:
    """Return strides in units; the kernel multiplies by the unit, so the compiler knows a divisor of each address."""
    return tuple(stride // unit for stride in tensor.stride()[:-1])
