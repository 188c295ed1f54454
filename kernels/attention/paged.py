"""Attention for the engine (paged KV cache), with the bits of the trainer's (`packed.py`).

For equal query row, keys and values up to its position, the output has equal bits for any batch, chunking, block
size, block ids and thread count, and from either of the two functions. (The native, Triton and PyTorch paths each keep
that promise; results of two paths are only close. Inputs must be finite.)

Dimension letters: N rows of a step, S sequences, H query heads, K KV heads, D key width, E value width.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..machine import native
from ..machine.gpu import triton_serves
from .cpp import SOURCE, native_attention
from .padded import padded_attention
from .step import AttentionPath, NewRows, PagedStep, RowLayout, ScoreRule

__all__ = [
    "AttentionPath",
    "NewRows",
    "PagedStep",
    "attention_path",
    "paged_attention",
    "reference_attention",
]


def attention_path(device: torch.device, dtype: torch.dtype) -> AttentionPath:
    """Choose the implementation for tensors on this device and of this dtype. No other code decides this."""
    if dtype in (torch.float32, torch.bfloat16, torch.float16) and triton_serves(device):
        return "triton"
    if device.type == "cpu" and dtype in (torch.float32, torch.bfloat16) and native.load(SOURCE) is not None:
        return "native"
    return "torch"


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    step: PagedStep,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
    path: AttentionPath | None = None,
    new: NewRows | None = None,
) -> Tensor:
    """Compute causal attention of a step's rows over the blocks of their sequences; not differentiable.

    query [N,H,D], key_cache [num_blocks,block_size,K,D], value_cache [num_blocks,block_size,K,E] -> [N,H,E].
    Row i of sequence s is at position context_lens[s] - num_rows(s) + i; its key and value are in the
    cache already, or are in `new` and written there first. It sees positions up to its own, the last
    `window` of them if given. `softcap` bounds scores as Gemma-2 does (cap * tanh(score / cap)); `sinks` [H], or
    [N,H] of each row, are logits that join the softmax's denominator only, as in gpt-oss; `bias` [N,H,R] is what a row
    adds to the score of the key 0, 1, ..., R - 1 positions before it, as in Inkling, or [H,R] what all rows do, as in
    Bloom. Where the step has `row_ends`, rows see keys up to these, as those of an image do. `path` overrides
    `attention_path`. Raises ValueError naming every argument that does not fit.
    """
    kind = _kind(query, key_cache, value_cache, window, softcap, sinks, bias, new)
    if kind not in step.layout.fitting:
        _refuse_unfitting_step(query, key_cache, value_cache, step, window, softcap, sinks, bias, new)
        step.layout.fitting.add(kind)
    path = path or attention_path(query.device, query.dtype)
    rule = ScoreRule(scale, window, softcap)
    if path == "native":
        return native_attention(query, key_cache, value_cache, step.layout, rule, sinks, bias, new)
    if new is not None:
        key_cache.flatten(0, 1).index_copy_(0, new.slots, new.key)
        value_cache.flatten(0, 1).index_copy_(0, new.slots, new.value)
    return PATHS[path](query, key_cache, value_cache, step.layout, rule, sinks, bias)


def _kind(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    bias: Tensor | None,
    new: NewRows | None,
) -> tuple[Any, ...]:
    """Return the properties that `_refuse_unfitting_step` checks."""
    tensors = [query, key_cache, value_cache]
    if sinks is not None:
        tensors.append(sinks)
    if bias is not None:
        tensors.append(bias)
    if new is not None:
        tensors += (new.key, new.value, new.slots)
    described = [(t.shape, t.stride(), t.dtype, t.device) for t in tensors]
    return (window, softcap, sinks is None, bias is None, *described)


def _refuse_unfitting_step(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    step: PagedStep,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    bias: Tensor | None,
    new: NewRows | None,
) -> None:
    wrong = mismatches(query, key_cache, value_cache, 4, window, softcap, sinks, bias)
    if step.context_lens.device != query.device:
        wrong.append(f"step is on {step.context_lens.device}, query on {query.device}")
    wrong += wrong_ends(step.row_ends, query)
    if not wrong and key_cache.shape[:3] != value_cache.shape[:3]:
        wrong.append(f"key_cache {list(key_cache.shape)} and value_cache {list(value_cache.shape)} differ in blocks")
    if not wrong and new is not None:
        rows = query.shape[0]
        for name, tensor, cache in (("key", new.key, key_cache), ("value", new.value, value_cache)):
            if tensor.shape != (rows, *cache.shape[2:]) or tensor.dtype != cache.dtype or tensor.stride(-1) != 1:
                wrong.append(f"new {name} {list(tensor.shape)} {tensor.dtype} does not fit {rows} rows of its cache")
        if new.slots.shape != (rows,) or new.slots.dtype != torch.int64 or not new.slots.is_contiguous():
            wrong.append(f"slots are {new.slots.dtype} {list(new.slots.shape)}, not int64 [{rows}], contiguous")
    if wrong:
        raise ValueError("paged_attention: " + "; ".join(wrong))


def wrong_ends(ends: Tensor | None, query: Tensor) -> list[str]:
    if ends is None:
        return []
    is_fit = ends.dtype == torch.int32 and ends.shape == query.shape[:1] and ends.is_contiguous()
    if is_fit and ends.device == query.device:
        return []
    return [
        f"row_ends are {ends.dtype} {list(ends.shape)} on {ends.device}, not int32 [{len(query)}] on {query.device}"
    ]


def mismatches(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_dims: int,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    bias: Tensor | None,
) -> list[str]:
    """List arguments that no path could serve. Runs once a layer and step: formats nothing unless there is an error."""
    if query.dim() != 3 or key.dim() != key_dims or value.dim() != key_dims:
        return [
            f"query, key and value have {query.dim()}, {key.dim()}, {value.dim()} dimensions, "
            f"not 3, {key_dims}, {key_dims}"
        ]
    wrong = []
    if not query.dtype == key.dtype == value.dtype or not query.dtype.is_floating_point:
        wrong.append(f"query, key and value are {query.dtype}, {key.dtype} and {value.dtype}")
    if not query.device == key.device == value.device:
        wrong.append(f"query, key and value are on {query.device}, {key.device} and {value.device}")
    if query.shape[2] != key.shape[-1]:
        wrong.append(f"query and key are {query.shape[2]} and {key.shape[-1]} wide")
    if key.shape[-2] != value.shape[-2] or key.shape[-2] == 0 or query.shape[1] % key.shape[-2]:
        wrong.append(
            f"{query.shape[1]} query heads do not divide among {key.shape[-2]} key heads "
            f"and {value.shape[-2]} value heads"
        )
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.stride(-1) != 1:
            wrong.append(f"{name} has stride {tensor.stride(-1)} along its width, not 1")
    if window is not None and window < 1:
        wrong.append(f"window is {window}, not at least 1")
    if softcap is not None and not softcap > 0:
        wrong.append(f"softcap is {softcap}, not above 0")
    of_rows = query.shape[:2]
    if sinks is not None and (sinks.shape not in (of_rows[1:], of_rows) or sinks.device != query.device):
        wrong.append(
            f"sinks are {list(sinks.shape)} on {sinks.device}, not [{query.shape[1]}] or {list(of_rows)} on "
            f"{query.device}"
        )
    if bias is not None:
        fits = bias.shape[:-1] in (of_rows[1:], of_rows) and bias.shape[-1] > 0 and bias.is_contiguous()
        fits = fits and not (bias.dim() == 2 and bias.requires_grad)  # its gradient would be a sum over rows
        if not fits or bias.dtype != query.dtype or bias.device != query.device:
            wrong.append(
                f"bias is {bias.dtype} {list(bias.shape)} on {bias.device}, not {query.dtype} "
                f"{[*of_rows, 'distances']}, or one of all rows without a gradient, contiguous, on {query.device}"
            )
    return wrong


def _triton_attention(*arguments: Any) -> Tensor:
    from .triton_kernels import triton_attention  # imports Triton, which may not be installed

    return triton_attention(*arguments)


PATHS: dict[AttentionPath, Callable[..., Tensor]] = {
    "native": native_attention,
    "triton": _triton_attention,
    "torch": padded_attention,
}


def attend(
    path: AttentionPath, query: Tensor, key: Tensor, value: Tensor, layout: RowLayout, rule: ScoreRule,
    sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """Compute attention by the given path for arguments that fit."""
    return PATHS[path](query, key, value, layout, rule, sinks, None)


def reference_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
    row_ends: Tensor | None = None,
) -> Tensor:
    """Compute attention by its definition, for one sequence: query [T,H,D] at the last T of key [L,K,D], value [L,K,E].

    Softmax over all visible scores at once, in fp32. Returns [T,H,E].
    """
    num_rows, num_heads, _ = query.shape
    num_keys, num_kv_heads, _ = key.shape
    key = key.float().repeat_interleave(num_heads // num_kv_heads, dim=1)
    value = value.float().repeat_interleave(num_heads // num_kv_heads, dim=1)
    scores = torch.einsum("thd,lhd->htl", query.float(), key) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    position = torch.arange(num_keys - num_rows, num_keys, device=query.device)[:, None]
    other = torch.arange(num_keys, device=query.device)[None]
    if bias is not None:
        distance = (position - other).expand(num_heads, -1, -1)
        reach = bias.shape[-1]
        near = bias.float().expand(num_rows, num_heads, reach).transpose(0, 1)
        scores = scores + near.gather(2, distance.clamp(0, reach - 1)) * ((distance >= 0) & (distance < reach))
    hidden = other > position if row_ends is None else other >= row_ends[:, None]
    if window is not None:
        hidden = hidden | (other <= position - window)
    scores = scores.masked_fill(hidden, -math.inf)
    if sinks is not None:
        of_rows = sinks.float().expand(num_rows, num_heads).t()
        scores = torch.cat([scores, of_rows[:, :, None]], dim=-1)
    probs = torch.softmax(scores, dim=-1)[..., :num_keys]
    return torch.einsum("htl,lhe->the", probs, value).to(query.dtype)
