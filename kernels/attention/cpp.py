"""ctypes bindings of paged_attention.cpp: attention on a CPU, in float32 and bfloat16."""

import ctypes
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from ..machine import native
from .step import NewRows, RowLayout, ScoreRule, refuse_layout

SOURCE = "attention/paged_attention.cpp"


class _Problem(ctypes.Structure):
    """The C++ struct `Problem` of attention_tiles.h, field by field."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("query", "key", "value", "out", "sinks")),
        *((name, ctypes.c_void_p) for name in ("new_key", "new_value", "slots", "bias")),
        *((name, ctypes.c_void_p) for name in ("block_tables", "query_start", "context_lens", "row_ends")),
        *(
            (name, ctypes.c_int64)
            for name in ("num_sequences", "table_width", "table_stride", "num_blocks", "block_size")
        ),
        *((name, ctypes.c_int64) for name in ("num_heads", "num_kv_heads", "key_width", "value_width")),
        *((name, ctypes.c_int64) for name in ("query_row", "query_head", "key_block", "key_token", "key_head")),
        *((name, ctypes.c_int64) for name in ("value_block", "value_token", "value_head", "out_row", "out_head")),
        *((name, ctypes.c_int64) for name in ("new_key_row", "new_key_head", "new_value_row", "new_value_head")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
        *((name, ctypes.c_int64) for name in ("window", "sink_row", "bias_row", "bias_reach")),
    ]


@cache
def _entry_point() -> Callable[..., int]:
    library = native.load(SOURCE)
    if library is None:
        raise ValueError(f"native attention was asked for, but {native.why_unavailable(SOURCE)}")
    arguments: list[type] = [ctypes.POINTER(_Problem), ctypes.c_int64, ctypes.c_int64, ctypes.c_int64]
    return library.function("lockstep_attention", arguments, ctypes.c_int64)


def native_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: RowLayout,
    rule: ScoreRule,
    sinks: Tensor | None,
    bias: Tensor | None = None,
    new: NewRows | None = None,
) -> Tensor:
    """Compute attention with the C++ kernel.

    new: rows to write into the caches `key` and `value` first, in the same call. Raises ValueError for a layout that
    does not fit.
    """
    problem = _prepared(query, key, value, layout, rule, sinks, bias, new)
    num_rows = query.shape[0]
    out = query.new_empty(num_rows, query.shape[1], value.shape[-1])
    if sinks is not None:
        sinks = sinks.detach().float().contiguous()
    problem.query, problem.key, problem.value = query.data_ptr(), key.data_ptr(), value.data_ptr()
    problem.out, problem.sinks, problem.bias = out.data_ptr(), _address(sinks), _address(bias)
    if new is not None:
        problem.new_key, problem.new_value = new.key.data_ptr(), new.value.data_ptr()
        problem.slots = new.slots.data_ptr()
    bad = native.run(_entry_point(), problem, num_rows, query.dtype is torch.bfloat16, torch.get_num_threads())
    if bad:
        if new is not None and bad < -1:
            raise ValueError(f"row {-2 - bad} is to be written at slot {int(new.slots[-2 - bad])}, beyond the cache")
        refuse_layout(bad - 1, layout, num_rows)
    return out


def _prepared(
    query: Tensor, key: Tensor, value: Tensor, layout: RowLayout, rule: ScoreRule, sinks: Tensor | None,
    bias: Tensor | None, new: NewRows | None,
) -> _Problem:  # fmt: skip
    """Return the problem without the tensors that change from layer to layer: layers of one kind share it."""
    strides = (query.stride(), key.stride(), value.stride(), new and (new.key.stride(), new.value.stride()))
    kinds = (sinks is not None and sinks.dim(), bias is not None and bias.shape[-2:], bias is not None and bias.dim())
    kind = (query.shape, key.shape, value.shape, strides, rule, query.dtype, kinds)
    known = layout.prepared.get(kind)
    if known is not None:
        return known
    if query.device.type != "cpu" or query.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"native attention serves float32 and bfloat16 on a CPU, not {query.dtype} on {query.device}")
    num_heads, width, value_width = query.shape[1], query.shape[2], value.shape[-1]
    tables, contexts, starts = layout.block_tables, layout.context_lens, layout.query_start
    table_sizes, block_strides = (0, 0, 0, 1), (0, 0)
    if tables is not None:
        table_sizes = (tables.shape[1], tables.stride(0), key.shape[0], key.shape[1])
        block_strides = (key.stride(0), value.stride(0))
    new_strides = (0, 0, 0, 0) if new is None else (*new.key.stride()[:2], *new.value.stride()[:2])
    problem = _Problem(
        *(None,) * 9,  # set by each call
        *(_address(tables), starts.data_ptr(), _address(contexts), _address(layout.row_ends)),
        *(starts.shape[0] - 1, *table_sizes),
        *(num_heads, key.shape[-2], width, value_width),
        *(query.stride(0), query.stride(1), block_strides[0], key.stride(-3), key.stride(-2)),
        *(block_strides[1], value.stride(-3), value.stride(-2), num_heads * value_width, value_width),
        *new_strides,
        *(rule.scale, rule.softcap or 0.0, rule.window or 0),
        num_heads if sinks is not None and sinks.dim() == 2 else 0,
        *((0, 0) if bias is None else (bias.stride(0) if bias.dim() == 3 else 0, bias.shape[-1])),
    )
    layout.prepared[kind] = problem
    return problem


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
