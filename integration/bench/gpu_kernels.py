"""Times of single kernels on a device, at the widths of a model, each beside the least that its bytes and operations
take."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import PreTrainedModel

from ...kernels.linear import LinearMethod, invariant_linear
from ...kernels.logprobs import selected_logprobs
from ...kernels.paged_attention import PagedStep, paged_attention
from ...kernels.rms_norm import NormRule, rms_norm
from ...kernels.sampling import KEEP_ALL, RowSettings, draw_tokens
from .machine_peaks import Peaks
from .runs import clock

_BLOCK = 16
Case = tuple[str, Callable[[], object], float, float]  # name, what is timed, bytes, operations


def kernel_times(
    model: PreTrainedModel, batch: int, context: int, peaks: Peaks, *, linear: LinearMethod, repeats: int = 20
) -> list[dict[str, Any]]:
    """Median milliseconds of each kernel for `batch` decode rows, in the model's dtype and on its device."""
    table = []
    with torch.inference_mode():
        for name, act, num_bytes, num_operations in _cases(model, batch, context, linear):
            ms = statistics.median(list(_seconds(act, model.device, repeats))) * 1e3
            floor_ms = peaks.floor_seconds(num_bytes, num_operations) * 1e3
            share = round(floor_ms / ms, 3)
            table.append({"kernel": name, "ms": round(ms, 4), "floor_ms": round(floor_ms, 4), "of_floor": share})
    return table


def _seconds(act: Callable[[], object], device: torch.device, repeats: int) -> Iterator[float]:
    for _ in range(3):  # compiles, and warms up
        act()
    for _ in range(repeats):
        started = clock(device)
        act()
        yield clock(device) - started


def _cases(model: PreTrainedModel, batch: int, context: int, linear: LinearMethod) -> Iterator[Case]:
    config, device, dtype = model.config, model.device, model.dtype
    itemsize, width, vocab = dtype.itemsize, config.hidden_size, config.vocab_size
    layer = model.model.layers[0]
    x = torch.randn(batch, width, device=device).to(dtype)
    up = layer.mlp.up_proj.weight
    for name, method in (("product", linear), ("product, library's", "library")):
        yield (name, lambda method=method: invariant_linear(x, up, method=method), up.numel() * itemsize,
               2 * batch * up.numel())  # fmt: skip
    rule = NormRule(config.rms_norm_eps, 0.0, True)
    yield "rms_norm", lambda: rms_norm(x, layer.input_layernorm.weight, rule), 2 * x.numel() * itemsize, 4 * x.numel()
    yield _attention(model, batch, context)
    logits = torch.randn(batch, vocab, device=device)
    token_ids = torch.zeros(batch, dtype=torch.int64, device=device)
    yield "log-softmax with gather", lambda: selected_logprobs(logits, token_ids), logits.nbytes, 4 * logits.numel()
    settings = _settings(batch, device)
    yield "sampler", lambda: draw_tokens(logits, settings, token_ids), logits.nbytes, 8 * logits.numel()


def _attention(model: PreTrainedModel, batch: int, context: int) -> Case:
    config, device, dtype = model.config, model.device, model.dtype
    heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    blocks_each = -(-context // _BLOCK)
    shape = (batch * blocks_each, _BLOCK, kv_heads, dim)
    keys, values = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
    query = torch.randn(batch, heads, dim, device=device).to(dtype)
    ids = torch.randperm(batch * blocks_each, device=device).to(torch.int32).reshape(batch, blocks_each)
    starts = torch.arange(batch + 1, dtype=torch.int32, device=device)
    step = PagedStep(ids, starts, torch.full((batch,), context, dtype=torch.int32, device=device))
    return (
        "paged attention",
        lambda: paged_attention(query, keys, values, step, scale=dim**-0.5),
        2 * batch * context * kv_heads * dim * dtype.itemsize,
        4 * batch * context * heads * dim,
    )


def _settings(batch: int, device: torch.device) -> RowSettings:
    """Temperature 1, the whole vocabulary."""

    def rows(value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((batch,), value, dtype=dtype, device=device)

    return RowSettings(
        temperatures=rows(1.0, torch.float32),
        seeds=torch.arange(batch, device=device),
        top_k=rows(KEEP_ALL, torch.int64),
        top_p=rows(1.0, torch.float64),
        min_p=rows(0.0, torch.float32),
        filtered=torch.empty(0, dtype=torch.int64, device=device),
    )
