"""Attention for the engine (paged KV cache) and for the trainer (packed sequences), with equal bits.

For equal query row, keys and values up to its position, the output has equal bits whatever the batch, the chunking, the
block size and ids, the thread count, and whichever of the two functions computed it. (The native and the PyTorch path
each keep that promise; between the two only closeness holds. Inputs are taken to be finite.)

Dimension letters: N rows of a step, S sequences, H query heads, K KV heads, D key width, E value width.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import native
from .padded_attention import (
    Gathered,
    ScoreRule,
    attend_piece,
    gather_piece,
    piece_gradients,
    plan_pieces,
    reference_attention,
    score_budget,
)

__all__ = ["AttentionPath", "PagedStep", "attention_path", "paged_attention", "reference_attention", "varlen_attention"]

AttentionPath = Literal["native", "torch"]

SOURCE = "paged_attention.cpp"


@dataclass(frozen=True)
class PagedStep:
    """Where the rows of one step and their keys lie. Built once a step, used by every layer.

    Raises ValueError when the tensors do not fit each other.
    """

    block_tables: Tensor  # [S, max_blocks] int32 ids; entries beyond the context are not read
    query_start: Tensor  # [S + 1] int32, row offsets: sequence s owns rows [query_start[s], query_start[s + 1])
    context_lens: Tensor  # [S] int32, tokens in the KV cache, this step's rows included

    def __post_init__(self) -> None:
        tensors = {"block_tables": self.block_tables, "query_start": self.query_start, "context_lens": self.context_lens}
        wrong = [f"{name} is {t.dtype}, not int32" for name, t in tensors.items() if t.dtype != torch.int32]
        wrong += [
            f"{name} has {t.dim()} dimensions, not {dims}"
            for (name, t), dims in zip(tensors.items(), (2, 1, 1), strict=True)
            if t.dim() != dims
        ]
        if not wrong:
            num_sequences = self.context_lens.shape[0]
            if self.block_tables.shape[0] != num_sequences or self.query_start.shape[0] != num_sequences + 1:
                wrong.append(
                    f"block_tables {list(self.block_tables.shape)}, query_start {list(self.query_start.shape)} and "
                    f"context_lens {list(self.context_lens.shape)} speak of different numbers of sequences"
                )
            wrong += [f"{name} is not contiguous" for name, t in tensors.items() if t.numel() and t.stride(-1) != 1]
        if len({t.device for t in tensors.values()}) > 1:
            wrong.append(f"devices differ: {({name: str(t.device) for name, t in tensors.items()})}")
        if wrong:
            raise ValueError("PagedStep: " + "; ".join(wrong))


def attention_path(device: torch.device, dtype: torch.dtype) -> AttentionPath:
    """Which implementation serves tensors of this kind: the one place where that is decided."""
    if device.type == "cpu" and dtype in (torch.float32, torch.bfloat16) and native.load(SOURCE) is not None:
        return "native"
    return "torch"


def paged_attention(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, step: PagedStep, *, scale: float, window: int | None = None,
    softcap: float | None = None, sinks: Tensor | None = None, path: AttentionPath | None = None,
) -> Tensor:
    """Causal attention of a step's rows over the blocks of their sequences; not differentiable.

    query [N,H,D], key_cache [num_blocks,block_size,K,D], value_cache [num_blocks,block_size,K,E] -> [N,H,E]. Row i of
    sequence s stands at position context_lens[s] - num_rows(s) + i; its key and value are in the cache already. It sees
    positions up to its own, the last `window` of them if given. `softcap` bounds scores as Gemma-2 does
    (cap * tanh(score / cap)); `sinks` [H] are logits that join the softmax's denominator only, as in gpt-oss.
    `path` overrides `attention_path`. Raises ValueError naming every argument that does not fit.
    """
    wrong = _mismatches(query, key_cache, value_cache, 4, window, softcap, sinks)
    if step.context_lens.device != query.device:
        wrong.append(f"step is on {step.context_lens.device}, query on {query.device}")
    if not wrong and key_cache.shape[:3] != value_cache.shape[:3]:
        wrong.append(f"key_cache {list(key_cache.shape)} and value_cache {list(value_cache.shape)} differ in blocks")
    if wrong:
        raise ValueError("paged_attention: " + "; ".join(wrong))
    forward = _PATHS[path or attention_path(query.device, query.dtype)]
    layout = _Layout(step.query_start, step.context_lens, step.block_tables)
    return forward(query, key_cache, value_cache, layout, ScoreRule(scale, window, softcap), sinks)


def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, query_start: Tensor, *, scale: float, window: int | None = None,
    softcap: float | None = None, sinks: Tensor | None = None, path: AttentionPath | None = None,
) -> Tensor:
    """Causal attention within each of S sequences packed in rows; differentiable in query, key, value and sinks.

    query [N,H,D], key [N,K,D], value [N,K,E], query_start [S+1] int32 -> [N,H,E]; the rest as in `paged_attention`, and
    the same bits. The backward recomputes probabilities in fp32, many sequences at a time, within a fixed budget of
    memory (`padded_attention`). Raises ValueError naming every argument that does not fit.
    """
    wrong = _mismatches(query, key, value, 3, window, softcap, sinks)
    if not wrong and not query.shape[0] == key.shape[0] == value.shape[0]:
        wrong.append(f"query, key and value have {query.shape[0]}, {key.shape[0]} and {value.shape[0]} rows")
    if query_start.dtype != torch.int32 or query_start.dim() != 1 or query_start.device != query.device:
        wrong.append(f"query_start is {query_start.dtype} {list(query_start.shape)} on {query_start.device}")
    if wrong:
        raise ValueError("varlen_attention: " + "; ".join(wrong))
    path = path or attention_path(query.device, query.dtype)
    rule = ScoreRule(scale, window, softcap)
    differentiated = [t for t in (query, key, value, sinks) if t is not None and t.requires_grad]
    if differentiated and torch.is_grad_enabled():
        return _VarlenAttention.apply(query, key, value, sinks, query_start, rule, path)
    return _PATHS[path](query, key, value, _Layout(query_start, None, None), rule, sinks)


def _mismatches(
    query: Tensor, key: Tensor, value: Tensor, key_dims: int, window: int | None, softcap: float | None,
    sinks: Tensor | None,
) -> list[str]:
    """What no path could serve. Runs once a layer and step, hence the plain comparisons before any formatting."""
    if query.dim() != 3 or key.dim() != key_dims or value.dim() != key_dims:
        return [f"query, key and value have {query.dim()}, {key.dim()}, {value.dim()} dimensions, not 3, {key_dims}, {key_dims}"]
    wrong = []
    if not query.dtype == key.dtype == value.dtype or not query.dtype.is_floating_point:
        wrong.append(f"query, key and value are {query.dtype}, {key.dtype} and {value.dtype}")
    if not query.device == key.device == value.device:
        wrong.append(f"query, key and value are on {query.device}, {key.device} and {value.device}")
    if query.shape[2] != key.shape[-1]:
        wrong.append(f"query and key are {query.shape[2]} and {key.shape[-1]} wide")
    if key.shape[-2] != value.shape[-2] or key.shape[-2] == 0 or query.shape[1] % key.shape[-2]:
        wrong.append(f"{query.shape[1]} query heads do not divide among {key.shape[-2]} key and {value.shape[-2]} value heads")
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.stride(-1) != 1:
            wrong.append(f"{name} has stride {tensor.stride(-1)} along its width, not 1")
    if window is not None and window < 1:
        wrong.append(f"window is {window}, not at least 1")
    if softcap is not None and not softcap > 0:
        wrong.append(f"softcap is {softcap}, not above 0")
    if sinks is not None and (sinks.shape != (query.shape[1],) or sinks.device != query.device):
        wrong.append(f"sinks are {list(sinks.shape)} on {sinks.device}, not [{query.shape[1]}] on {query.device}")
    return wrong


@dataclass(frozen=True)
class _Layout:
    """PagedStep, or with two Nones the packed sequences of `varlen_attention`."""

    query_start: Tensor
    context_lens: Tensor | None
    block_tables: Tensor | None


class _Problem(ctypes.Structure):
    """`Problem` in paged_attention.cpp, field by field."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("query", "key", "value", "out", "sinks")),
        *((name, ctypes.c_void_p) for name in ("block_tables", "query_start", "context_lens")),
        *((name, ctypes.c_int64) for name in ("num_sequences", "table_width", "table_stride", "num_blocks", "block_size")),
        *((name, ctypes.c_int64) for name in ("num_heads", "num_kv_heads", "key_width", "value_width")),
        *((name, ctypes.c_int64) for name in ("query_row", "query_head", "key_block", "key_token", "key_head")),
        *((name, ctypes.c_int64) for name in ("value_block", "value_token", "value_head", "out_row", "out_head")),
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


def _native_forward(
    query: Tensor, key: Tensor, value: Tensor, layout: _Layout, rule: ScoreRule, sinks: Tensor | None
) -> Tensor:
    if query.device.type != "cpu" or query.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"native attention serves float32 and bfloat16 on a CPU, not {query.dtype} on {query.device}")
    num_rows, num_heads, width = query.shape
    out = query.new_empty(num_rows, num_heads, value.shape[-1])
    tables, contexts, starts = layout.block_tables, layout.context_lens, layout.query_start
    if sinks is not None:
        sinks = sinks.detach().float().contiguous()
    paged = tables is not None
    problem = _Problem(
        query.data_ptr(), key.data_ptr(), value.data_ptr(), out.data_ptr(), sinks.data_ptr() if sinks is not None else None,
        tables.data_ptr() if paged else None, starts.data_ptr(), contexts.data_ptr() if contexts is not None else None,
        starts.shape[0] - 1, *((tables.shape[1], tables.stride(0), key.shape[0], key.shape[1]) if paged else (0, 0, 0, 1)),
        num_heads, key.shape[-2], width, value.shape[-1],
        query.stride(0), query.stride(1), key.stride(0) if paged else 0, key.stride(-3), key.stride(-2),
        value.stride(0) if paged else 0, value.stride(-3), value.stride(-2), out.stride(0), out.stride(1),
        rule.scale, rule.softcap or 0.0, rule.window or 0,
    )  # fmt: skip
    bad = _entry_point()(problem, num_rows, query.dtype == torch.bfloat16, torch.get_num_threads())
    if bad:
        _refuse(bad - 1, layout, num_rows)
    return out


def _refuse(sequence: int, layout: _Layout, num_rows: int) -> None:
    starts = layout.query_start.tolist()
    if sequence < 0:
        raise ValueError(f"query_start runs from {starts[0]} to {starts[-1]}, but the query has {num_rows} rows")
    message = f"sequence {sequence}: rows {starts[sequence]} to {starts[sequence + 1]}"
    if layout.context_lens is not None and layout.block_tables is not None:
        message += f", context {int(layout.context_lens[sequence])}, blocks {layout.block_tables[sequence].tolist()}"
    raise ValueError(message + " do not fit the query and the cache")


def _torch_forward(
    query: Tensor, key: Tensor, value: Tensor, layout: _Layout, rule: ScoreRule, sinks: Tensor | None
) -> Tensor:
    out = query.new_empty(*query.shape[:2], value.shape[-1])
    for _, piece in _pieces(query, key, value, layout, rule):
        result = attend_piece(piece, rule, sinks)
        out[piece.rows[piece.row_is_real]] = result[piece.row_is_real].to(out.dtype)
    return out


def _pieces(query: Tensor, key: Tensor, value: Tensor, layout: _Layout, rule: ScoreRule):
    """Yields (Piece, Gathered) until every row of the step was in one."""
    starts = layout.query_start.tolist()
    rows = [end - start for start, end in zip(starts, starts[1:], strict=False)]
    contexts = rows if layout.context_lens is None else layout.context_lens.tolist()
    _check_on_host(starts, rows, contexts, query, key, layout)
    start_of = layout.query_start.to(torch.int64)

    def fetch(sequences: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        if layout.block_tables is None:
            packed = start_of[sequences][:, None] + positions
            return key[packed], value[packed]
        block_size = key.shape[1]
        blocks = layout.block_tables[sequences[:, None], positions // block_size].to(torch.int64)
        return key[blocks, positions % block_size], value[blocks, positions % block_size]

    num_heads, num_kv_heads = query.shape[1], key.shape[-2]
    group = num_heads // num_kv_heads
    for piece in plan_pieces(rows, contexts, num_heads, group, score_budget(query.device)):
        yield piece, gather_piece(piece, query, starts, rows, contexts, fetch, num_kv_heads, rule)


def _check_on_host(
    starts: list[int], rows: list[int], contexts: list[int], query: Tensor, key: Tensor, layout: _Layout
) -> None:
    """What the native kernel checks by itself."""
    if starts[0] != 0 or starts[-1] != query.shape[0]:
        _refuse(-1, layout, query.shape[0])
    tables = layout.block_tables
    for s, (count, context) in enumerate(zip(rows, contexts, strict=True)):
        fits = 0 <= count <= context
        if fits and tables is not None:
            used = tables[s, : -(-context // key.shape[1])]
            fits = context <= tables.shape[1] * key.shape[1]
            fits = fits and (not used.numel() or bool((used >= 0).all() & (used < key.shape[0]).all()))
        if not fits:
            _refuse(s, layout, query.shape[0])


_PATHS: dict[AttentionPath, Callable[..., Tensor]] = {"native": _native_forward, "torch": _torch_forward}


class _VarlenAttention(torch.autograd.Function):
    """Forward through the chosen kernel, backward in plain PyTorch."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, query_start: Tensor, rule: ScoreRule,
        path: AttentionPath,
    ) -> Tensor:
        ctx.save_for_backward(query, key, value, sinks, query_start)
        ctx.rule = rule
        return _PATHS[path](query, key, value, _Layout(query_start, None, None), rule, sinks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, query_start = ctx.saved_tensors
        grads = [torch.zeros(t.shape, dtype=torch.float32, device=t.device) for t in (query, key, value)]
        grad_sinks = None if sinks is None else torch.zeros(sinks.shape, dtype=torch.float32, device=sinks.device)
        starts = query_start.tolist()
        for piece, gathered in _pieces(query, key, value, _Layout(query_start, None, None), ctx.rule):
            found = piece_gradients(gathered, grad_out, ctx.rule, sinks, key.shape[1])
            grads[0][gathered.rows[gathered.row_is_real]] = found.query[gathered.row_is_real]
            _add_key_gradients(grads[1:], (found.key, found.value), gathered, [starts[s] for s in piece.sequences])
            if grad_sinks is not None and found.sinks is not None:
                grad_sinks += found.sinks
        inputs = (query, key, value, sinks)
        results = [None if t is None else g.to(t.dtype) for t, g in zip(inputs, (*grads, grad_sinks), strict=True)]
        return *results, None, None, None


def _add_key_gradients(
    grads: list[Tensor], found: tuple[Tensor, Tensor], gathered: Gathered, starts: list[int]
) -> None:
    if len(starts) == 1:  # perhaps one of several runs of rows of a long sequence: their shares add up
        num_keys = int(gathered.key_is_real.sum())
        for grad, part in zip(grads, found, strict=True):
            grad[starts[0] : starts[0] + num_keys] += part[0, :num_keys]
        return
    offset = torch.arange(gathered.key_is_real.shape[1], device=grads[0].device)
    rows = (torch.tensor(starts, device=grads[0].device)[:, None] + offset)[gathered.key_is_real]
    for grad, part in zip(grads, found, strict=True):
        grad[rows] = part[gathered.key_is_real]
