"""Times of single kernels on a device, at the widths of a model, each beside the least possible time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import torch
from transformers import PreTrainedModel

from ....kernels.attention.paged import PagedStep, paged_attention
from ....kernels.layers.rms_norm import NormRule, rms_norm
from ....kernels.layers.swiglu import swiglu
from ....kernels.linear.linear import LinearMethod, invariant_linear, together_of
from ....kernels.sampling.draws import KEEP_ALL, RowSettings, draw_tokens
from ....kernels.sampling.logprobs import scaled_logprobs, selected_logprobs
from ..parts.device_time import device_ms
from ..parts.machine_peaks import Peaks

_BLOCK = 16
_CHUNK_ROWS = 512  # rows of a prompt or of a training batch
_SMALL = 1 << 28  # bytes of weights that fit into memory several times
Case = tuple[str, Callable[[], object], float, float]  # name, the timed function, bytes, operations


def kernel_times(
    model: PreTrainedModel, batch: int, context: int, peaks: Peaks, *, linear: LinearMethod, repeats: int = 20
) -> Iterator[dict[str, Any]]:
    """Measure median milliseconds of each kernel, in the model's dtype and on its device, one after the other.

    Rows: `batch` decode rows, a chunk of a prompt, and gradients for as many rows.
    """
    with torch.no_grad():
        for name, act, num_bytes, num_operations in _cases(model, batch, context, linear):
            yield timed(name, [act], num_bytes, num_operations, model.device, peaks, repeats)


def product_times(
    model: PreTrainedModel, rows: Sequence[int], peaks: Peaks, *, linear: LinearMethod
) -> Iterator[dict[str, Any]]:
    """Measure the products of a layer and of the head for these numbers of rows, and the library's beside each.

    Layers that read one tensor are one call where the method has one. Weights take turns with copies of theirs.
    """
    layer = model.model.layers[0]
    projections = (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj)
    groups = {
        "q|k|v": projections, "o": (layer.self_attn.o_proj,), "gate|up": (layer.mlp.gate_proj, layer.mlp.up_proj),
        "down": (layer.mlp.down_proj,), "head": (model.get_output_embeddings(),),
    }  # fmt: skip
    with torch.no_grad():
        for count in rows:
            for name, layers in groups.items():
                yield from _group_times(name, layers, count, model.device, peaks, linear)


def _group_times(
    name: str, layers: Sequence[Any], rows: int, device: torch.device, peaks: Peaks, linear: LinearMethod
) -> Iterator[dict[str, Any]]:
    weights = [layer.weight for layer in layers]
    num_weights, itemsize = sum(w.numel() for w in weights), weights[0].element_size()
    copies = [weights] + [[w.clone() for w in weights] for _ in range(3 if num_weights * itemsize < _SMALL else 0)]
    x = torch.randn(rows, weights[0].shape[1], device=device).to(weights[0].dtype)
    num_bytes = itemsize * (num_weights + x.numel() + rows * sum(w.shape[0] for w in weights))
    methods: dict[str, LinearMethod] = {name: linear, f"{name}, library's": "library"}
    for title, method in methods.items():
        acts = [partial(_products, x, copy, method, is_gated=name == "gate|up") for copy in copies]
        yield timed(f"{title}, {rows} rows", acts, num_bytes, 2 * rows * num_weights, device, peaks)


def _products(x: torch.Tensor, weights: Sequence[torch.Tensor], method: LinearMethod, *, is_gated: bool) -> object:
    together = together_of(method)
    if together is None or len(weights) == 1:
        outs = [invariant_linear(x, weight, method=method) for weight in weights]
        return swiglu(*outs) if is_gated else outs
    if is_gated:
        return together.gated(x, (weights[0], None), (weights[1], None))
    return together.products(x, [(weight, None) for weight in weights])


def timed(
    name: str, acts: Sequence[Callable[[], object]], num_bytes: float, num_operations: float, device: torch.device,
    peaks: Peaks, repeats: int = 10,
) -> dict[str, Any]:  # fmt: skip
    """Measure the milliseconds of one of `acts` beside the least possible time."""
    ms, floor_ms = device_ms(acts, device, repeats), peaks.floor_seconds(num_bytes, num_operations) * 1e3
    return {"kernel": name, "ms": round(ms, 4), "floor_ms": round(floor_ms, 4), "of_floor": round(floor_ms / ms, 3)}


def _cases(model: PreTrainedModel, batch: int, context: int, linear: LinearMethod) -> Iterator[Case]:
    yield from _norms(model, batch)
    yield _attention(model, batch, context, 1)
    yield _attention(model, 1, max(context, _CHUNK_ROWS), _CHUNK_ROWS)
    yield from _logprobs(model, batch)
    yield from _samplers(model, batch)


def _norms(model: PreTrainedModel, batch: int) -> Iterator[Case]:
    rule, itemsize = NormRule(model.config.rms_norm_eps, 0.0, True), model.dtype.itemsize
    weight, width = model.model.layers[0].input_layernorm.weight, model.config.hidden_size
    x = torch.randn(batch, width, device=model.device).to(model.dtype)
    yield "rms_norm", lambda: rms_norm(x, weight, rule), 2 * x.numel() * itemsize, 4 * x.numel()
    x = torch.randn(_CHUNK_ROWS, width, device=model.device).to(model.dtype)
    backward = _gradient(lambda x: rms_norm(x, weight, rule), x)
    yield "rms_norm, gradient", backward, 3 * x.numel() * itemsize, 10 * x.numel()


def _logprobs(model: PreTrainedModel, batch: int) -> Iterator[Case]:
    logits, token_ids = _logits(model, batch)
    numel, nbytes = logits.numel(), logits.nbytes
    yield "log-softmax with gather", lambda: selected_logprobs(logits, token_ids), nbytes, 4 * numel
    yield "log-softmax", lambda: scaled_logprobs(logits, 1.0), nbytes + 4 * numel, 4 * numel
    backward = _gradient(lambda logits: selected_logprobs(logits, token_ids), logits)
    yield "log-softmax with gather, gradient", backward, 2 * nbytes, 4 * numel


def _samplers(model: PreTrainedModel, batch: int) -> Iterator[Case]:
    logits, positions = _logits(model, batch)
    device, numel, nbytes = model.device, logits.numel(), logits.nbytes
    masks = torch.full((batch, -(-logits.shape[1] // 8)), 0b01010101, dtype=torch.uint8, device=device)
    allowed = torch.arange(batch, device=device), masks
    plain, filtered = _settings(batch, device), _settings(batch, device, top_k=50, top_p=0.95)
    yield "sampler", lambda: draw_tokens(logits, plain, positions), nbytes, 8 * numel
    yield "sampler, top-k and top-p", lambda: draw_tokens(logits, filtered, positions), nbytes, 8 * numel
    yield ("sampler, masks", lambda: draw_tokens(logits, plain, positions, allowed=allowed), nbytes + masks.nbytes,
           8 * numel)  # fmt: skip


def _logits(model: PreTrainedModel, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    logits = torch.randn(batch, model.config.vocab_size, device=model.device)
    return logits, torch.zeros(batch, dtype=torch.int64, device=model.device)


def _gradient(compute: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> Callable[[], object]:
    """Return the backward alone, of a forward that the first call runs: on its stream the backward will run too."""

    leaf = x.detach().requires_grad_()

    @cache
    def forward() -> tuple[torch.Tensor, torch.Tensor]:
        with torch.enable_grad():
            out = compute(leaf)
        return out, torch.ones_like(out)

    def backward() -> object:
        out, grad = forward()
        return torch.autograd.grad(out, leaf, grad, retain_graph=True)

    return backward


def _attention(model: PreTrainedModel, batch: int, context: int, rows: int) -> Case:
    """Build attention of the last `rows` positions of each sequence to `context` positions."""
    config, device, dtype = model.config, model.device, model.dtype
    heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    blocks_each = -(-context // _BLOCK)
    shape = (batch * blocks_each, _BLOCK, kv_heads, dim)
    keys, values = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
    query = torch.randn(batch * rows, heads, dim, device=device).to(dtype)
    ids = torch.randperm(batch * blocks_each, device=device).to(torch.int32).reshape(batch, blocks_each)
    starts = torch.arange(0, batch * rows + 1, rows, dtype=torch.int32, device=device)
    step = PagedStep(ids, starts, torch.full((batch,), context, dtype=torch.int32, device=device))
    seen = rows * (2 * context - rows + 1) // 2  # pairs of a row and a position, of each sequence
    return (
        "paged attention" if rows == 1 else f"paged attention, a chunk of {rows} rows",
        lambda: paged_attention(query, keys, values, step, scale=dim**-0.5),
        2 * batch * context * kv_heads * dim * dtype.itemsize,
        4 * batch * seen * heads * dim,
    )


def _settings(batch: int, device: torch.device, *, top_k: int = KEEP_ALL, top_p: float = 1.0) -> RowSettings:
    """Build settings of temperature 1."""

    def rows(value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((batch,), value, dtype=dtype, device=device)

    return RowSettings(
        temperatures=rows(1.0, torch.float32),
        seeds=torch.arange(batch, device=device),
        top_k=rows(top_k, torch.int64),
        top_p=rows(top_p, torch.float64),
        min_p=rows(0.0, torch.float32),
    )
