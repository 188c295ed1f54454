"""The door to paged_attention.cpp: attention on a CPU, in float32 and bfloat16."""

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from . import native
from .attention_step import RowLayout, ScoreRule, refuse_layout

SOURCE = "paged_attention.cpp"


class _Problem(ctypes.Structure):
    """`Problem` in paged_attention.cpp, field by field."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("query", "key", "value", "out", "sinks")),
        *((name, ctypes.c_void_p) for name in ("block_tables", "query_start", "context_lens")),
        *(
            (name, ctypes.c_int64)
            for name in ("num_sequences", "table_width", "table_stride", "num_blocks", "block_size")
        ),
        *((name, ctypes.c_int64) for name in ("num_heads", "num_kv_heads", "key_width", "value_width")),
        *(
            (name, ctypes.c_int64)
            for name in ("query_row", "query_head", "key_block", "key_token", "key_head")
        ),
        *(
            (name, ctypes.c_int64)
            for name in ("value_block", "value_token", "value_head", "out_row", "out_head")
        ),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
        ("window", ctypes.c_int64),
    ]


_entry_points: list[Callable[..., int]] = []


def _entry_point() -> Callable[..., int]:
    if not _entry_points:
        library = native.load(SOURCE)
        if library is None:
            raise ValueError(f"native attention was asked for, but {native.why_unavailable(SOURCE)}")
        arguments = [ctypes.POINTER(_Problem), ctypes.c_int64, ctypes.c_int64, ctypes.c_int64]
        _entry_points.append(library.function("lockstep_attention", arguments, ctypes.c_int64))
    return _entry_points[0]


def native_attention(
    query: Tensor, key: Tensor, value: Tensor, layout: RowLayout, rule: ScoreRule, sinks: Tensor | None
) -> Tensor:
    if query.device.type != "cpu" or query.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(
            f"native attention serves float32 and bfloat16 on a CPU, not {query.dtype} on {query.device}"
        )
    num_rows, num_heads, width = query.shape
    out = query.new_empty(num_rows, num_heads, value.shape[-1])
    tables, contexts, starts = layout.block_tables, layout.context_lens, layout.query_start
    if sinks is not None:
        sinks = sinks.detach().float().contiguous()
    table_sizes, block_strides = (0, 0, 0, 1), (0, 0)
    if tables is not None:
        table_sizes = (tables.shape[1], tables.stride(0), key.shape[0], key.shape[1])
        block_strides = (key.stride(0), value.stride(0))
    problem = _Problem(
        *(query.data_ptr(), key.data_ptr(), value.data_ptr(), out.data_ptr(), _address(sinks)),
        *(_address(tables), starts.data_ptr(), _address(contexts)),
        *(starts.shape[0] - 1, *table_sizes),
        *(num_heads, key.shape[-2], width, value.shape[-1]),
        *(query.stride(0), query.stride(1), block_strides[0], key.stride(-3), key.stride(-2)),
        *(block_strides[1], value.stride(-3), value.stride(-2), out.stride(0), out.stride(1)),
        *(rule.scale, rule.softcap or 0.0, rule.window or 0),
    )
    bad = _entry_point()(problem, num_rows, query.dtype == torch.bfloat16, torch.get_num_threads())
    if bad:
        refuse_layout(bad - 1, layout, num_rows)
    return out


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
