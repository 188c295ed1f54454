"""The attention that a hosted module calls: paged in a rollout step, packed or padded in the trainer's forward.

Registered with transformers' AttentionInterface, once per path of the kernel. Both forms call the same kernel, so the
trainer's log-probabilities equal the engine's. Letters: N rows, B batch, T tokens, H query heads, K KV heads,
D head size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypedDict, cast

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from ...kernels.attention.chunks import chunked_starts
from ...kernels.attention.packed import varlen_attention
from ...kernels.attention.paged import AttentionPath, NewRows, paged_attention
from ...kernels.attention.selected import selected_attention, selected_attention_in_step
from ...kernels.attention.selection import SelectedKeys, sees_more_than, select_keys
from ...kernels.attention.selection import write_rows as write_index_rows
from ...kernels.attention.shared_rows import SharedRows
from ...kernels.attention.step import RowLayout
from ...kernels.layers.rotary import rotary_into_cache
from .encoders.vision import WHOLE, whole_attention
from .layer_probe import OWN_ATTENTION, KVShape, LayerProbe
from .operations.carried import SHARED_ROWS, STEP_KEYWORD, told
from .operations.deferred import IS_USED, Rotation, plain
from .operations.distance_bias import DISTANCE_BIAS
from .operations.entries import Entries, attend_in_step, attend_packed, beside_tokens, take, write_entries, write_rows
from .operations.functions import outside_modes
from .operations.indexer import IndexChoice
from .operations.packed_rows import ends_of_blocks, hosted_mask, query_start
from .operations.pool_choice import PoolChoice
from .operations.shared_attention import LAYER
from .operations.shared_queries import SHARED_QUERIES, are_shared
from .steps.context import KVWritten, LayerKV, StepContext
from .steps.masks import has_blocks

ATTENTION_NAMES: dict[AttentionPath, str] = {
    "native": "lockstep",
    "triton": "lockstep_triton",
    "torch": "lockstep_torch",
}
CHUNK = "lockstep_chunk"  # attribute of an attention that sees chunks of positions: their length

# Keywords that transformers' modules pass to every attention and that do not change its result.
_HARMLESS = frozenset(
    {
        "position_ids",
        "use_cache",
        "output_router_logits",
        "output_attentions",
        "output_hidden_states",
        "is_causal",
        "cache_position",
        "cu_seq_lens_k",
        "max_length_q",
        "max_length_k",
        "logits_to_keep",
        "num_items_in_batch",
    }
)


_Choice = IndexChoice | PoolChoice | Entries | None  # of keys for rows, in place of all in the window


class _KernelOptions(TypedDict):
    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None
    bias: Tensor | None
    path: AttentionPath


def hosted_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    position_bias: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    indices: IndexChoice | None = None,
    path: AttentionPath,
    **others: object,
) -> tuple[Tensor, None]:
    """Compute attention with the signature of transformers' AttentionInterface.

    query [B, H, T, D], key and value [B, K, T, D], after rotary; returns ([B, T, H, D], None). s_aux [H] and sinks
    [B, H, T, 1] are logits of the softmax's denominator; position_bias [B, H, T, R] is by distance, from a part of the
    module that `distance_bias.py` knows. Raises ValueError that names every unknown keyword; none is ignored.
    """
    step, shared = others.pop(STEP_KEYWORD, None), cast(SharedRows | None, others.pop(SHARED_ROWS, None))
    if (result := _outside_layers(module, query, key, value, attention_mask, scaling, others)) is not None:
        return result, None
    layer = cast(int, others.pop(LAYER, getattr(module, "layer_idx", None)))  # the probe refuses a module without
    rotation, query, key = _unrotated(step, query, key) if IS_USED else (None, query, key)
    _refuse_call(module, others, dropout)
    batch, num_heads, num_rows, head_dim = query.shape
    choice = _choice_of(module, attention_mask, indices)
    if isinstance(choice, Entries):
        key, value = (beside_tokens(t, num_rows) for t in (key, value))
    _refuse_other_keys(module, key.shape[2], num_rows)
    options: _KernelOptions = {
        "scale": head_dim**-0.5 if scaling is None else scaling,
        "window": sliding_window,
        "softcap": softcap,
        "sinks": s_aux if sinks is None else _by_row(sinks)[..., 0],
        "bias": _by_distance(module, position_bias, num_rows),
        "path": path,
    }
    chunk = cast(int | None, vars(module).get(CHUNK))
    _refuse_choice(module, indices, batch * num_rows, sliding_window or chunk, position_bias)
    blocks = _blocks_of(module, attention_mask, chunk, choice)
    if rotation is not None and isinstance(step, StepContext):
        out = _with_rotation(rotation, value, _with_blocks(step.of_layer(layer, chunk), blocks), step.slots, options)
        return out.view(batch, num_rows, num_heads, value.shape[3]), None
    rows = [_by_row(t) for t in (query, key, value)]
    if isinstance(step, StepContext):
        out = _in_step(rows, step, layer, chunk, options, choice, blocks)
    else:
        if isinstance(step, LayerProbe):
            _tell(step, module, rows, layer, chunk, attention_mask, options, choice)
        mask = choice.mask if isinstance(choice, PoolChoice) else attention_mask
        starts = shared or query_start(mask, cu_seq_lens_q, others.get("position_ids"), batch, num_rows, query)
        out = _packed(module, rows, starts, chunk, options, choice, blocks)
    return out.view(batch, num_rows, num_heads, value.shape[3]), None


def _outside_layers(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None,
    others: Mapping[str, object],
) -> Tensor | None:  # fmt: skip
    """Compute attention that has no KV, [B, T, H, D]: of an encoder, or of a few queries to states of each position.
    None for that of a layer."""
    if WHOLE in vars(module):
        return whole_attention(module, query, key, value, mask, scaling, others.get("is_causal"))[0]
    if SHARED_QUERIES in vars(module) and mask is None and are_shared(query, key):
        return cast(Tensor, vars(module)[SHARED_QUERIES](query, key, value, scale=scaling).transpose(1, 2))
    return None


def _choice_of(module: nn.Module, mask: object, indices: IndexChoice | None) -> _Choice:
    """Return what an indexer or a compressor has found for the rows: it comes as the mask, as indices or by the way."""
    return mask if isinstance(mask, PoolChoice) else take(module) or indices


def _blocks_of(module: nn.Module, mask: object, chunk: int | None, choice: _Choice) -> Tensor | None:
    """Return a mask that `has_blocks`; None for any other. Raises ValueError for an attention that cannot take it."""
    if not isinstance(mask, Tensor) or not has_blocks(mask):
        return None
    if chunk is not None or choice is not None:
        raise ValueError(f"{type(module).__name__} sees images both ways in chunks, or of selected keys: not supported")
    return mask


def _with_blocks(kv: LayerKV, blocks: Tensor | None) -> LayerKV:
    """Return the KV of a step's rows with the keys that they see by a mask of blocks."""
    if blocks is None:
        return kv
    paged = kv.paged
    return kv._replace(paged=replace(paged, row_ends=ends_of_blocks(blocks, paged.query_start, paged.context_lens)))


def _refuse_other_keys(module: nn.Module, num_keys: int, num_rows: int) -> None:
    """Raise ValueError for keys of other tokens than the queries'."""
    if num_keys != num_rows:
        raise ValueError(
            f"{type(module).__name__} brought {num_keys} keys for {num_rows} queries: the hosted attention keeps "
            "its own KV, so call the module with use_cache=False and not through generate()"
        )


def _refuse_call(module: nn.Module, others: Mapping[str, object], dropout: float) -> None:
    """Raise ValueError for keywords that are not known, for attention that is not causal, and for dropout."""
    unknown = sorted(name for name, value in others.items() if value is not None and name not in _HARMLESS)
    if unknown:
        raise ValueError(f"{type(module).__name__} asks its attention for {', '.join(unknown)}: not supported")
    if others.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise ValueError(f"{type(module).__name__} is not causal: not supported")
    if dropout:
        raise ValueError(f"attention dropout ({dropout}) would make the trainer differ from the engine: set it to 0")


def _windowed(options: _KernelOptions) -> _KernelOptions:
    """Return the options of attention to a compressor's entries. Raises ValueError if tokens have no window."""
    if options["window"] is None or options["bias"] is not None:
        raise ValueError("attention to compressed entries needs a sliding_window, and no bias: not supported")
    return options


def _by_row(heads: Tensor) -> Tensor:
    """Reshape [B, H, T, D] to rows [N, H, D]."""
    return heads.transpose(1, 2).flatten(0, 1)


def _by_distance(module: nn.Module, bias: Tensor | None, num_rows: int) -> Tensor | None:
    """Return the bias [B, H, T, R] of rows as [N, H, R]. Raises ValueError for one that is not by distance."""
    if bias is None:
        return None
    if OWN_ATTENTION in vars(module) and bias.dim() == 2:
        return bias  # [H, R] of all rows
    if bias.shape[2:] != (num_rows, vars(module).get(DISTANCE_BIAS)):
        raise ValueError(f"{type(module).__name__} asks its attention for position_bias: not supported")
    return _by_row(bias).contiguous()


def chunk_of(module: nn.Module) -> int | None:
    """Return the tokens of a chunk of positions that the rows of an attention see; None for any other module."""
    config, layer = getattr(module, "config", None), getattr(module, "layer_idx", None)
    kinds = getattr(config, "layer_types", None) or ()
    if not isinstance(layer, int) or not 0 <= layer < len(kinds) or kinds[layer] != "chunked_attention":
        return None
    return cast(int, config.attention_chunk_size) if config is not None and hasattr(module, "is_causal") else None


def _tell(
    probe: LayerProbe, module: nn.Module, rows: list[Tensor], layer: int, chunk: int | None, mask: Tensor | None,
    options: _KernelOptions, choice: _Choice,
) -> None:  # fmt: skip
    """Tell the start-up probe of a call: the shape of a layer's KV of one token, its window and its mask."""
    (_, num_heads, key_dim), value_dim = rows[1].shape, rows[2].shape[2]
    shape = KVShape(num_heads, key_dim, value_dim, rows[1].dtype)
    has_indexer = isinstance(choice, Entries) or (choice is not None and choice.layer == layer)  # of its own
    if choice is not None and has_indexer and (keys := choice.keys) is not None:
        rate = 1 if isinstance(choice, IndexChoice) else choice.rate
        shape = replace(shape, index_dim=keys.shape[1], index_rate=rate, index_dtype=keys.dtype)
    mask = None if isinstance(choice, PoolChoice) else mask
    probe.attention_called(module, layer, shape, options["window"], chunk, mask)


def _packed(
    module: nn.Module, rows: list[Tensor], starts: Tensor | SharedRows, chunk: int | None, options: _KernelOptions,
    choice: _Choice, blocks: Tensor | None,
) -> Tensor:  # fmt: skip
    """Attend with query, key and value rows [N, heads, D] of packed sequences -> [N, H, D]. starts: their row offsets
    [S + 1], or the rows that they share. Raises ValueError for rows that cannot be shared."""
    path, shared = options["path"], None
    if isinstance(starts, SharedRows):
        if choice is not None or blocks is not None:
            raise ValueError(
                f"{type(module).__name__} selects keys, or sees images both ways: its rows cannot be shared"
            )
        shared, starts = starts, starts.starts
    if chunk is not None:
        starts = chunked_starts(starts, chunk, len(rows[0]) if shared is None else shared.num_tokens)
    if isinstance(choice, Entries):
        return attend_packed(rows[0], rows[1], rows[2], starts, choice, _windowed(options))
    selected = None if choice is None else _selected(choice, RowLayout(starts, None, None), path)
    if selected is None:
        ends = None if blocks is None else ends_of_blocks(blocks, starts, None)
        return varlen_attention(rows[0], rows[1], rows[2], starts, row_ends=ends, shared=shared, **options)
    rule = {name: value for name, value in options.items() if name not in ("window", "bias")}
    return selected_attention(rows[0], rows[1], rows[2], selected, **rule)  # type: ignore[arg-type]


def _unrotated(step: object, query: Tensor, key: Tensor) -> tuple[Rotation | None, Tensor, Tensor]:
    """Return the rotation of query and key where the step computes it with its KV write, else None; and both tensors,
    plain ones without a rotation."""
    rotation = Rotation.of(query, key) if isinstance(step, StepContext) and step.ends_at is None else None
    return (rotation, query, key) if rotation else (None, *plain((query, key)))


def _in_step(
    rows: list[Tensor], step: StepContext, layer: int, chunk: int | None, options: _KernelOptions, choice: _Choice,
    blocks: Tensor | None,
) -> Tensor:  # fmt: skip
    """Attend with query, key and value rows [N, heads, D] -> [N, H, D]. Raises KVWritten where the forward ends."""
    keys, values, paged = _with_blocks(step.of_layer(layer, chunk), blocks)
    if isinstance(choice, Entries):
        index = step.index_caches[layer - step.first_layer] if choice.keys is not None else None
        own, caches = (rows[1], rows[2]), (keys, values)
        if step.ends_at == layer:
            write_rows(own, caches, index, step.slots, choice)
            raise KVWritten
        return attend_in_step(rows[0], own, caches, index, paged, step.slots, choice, _windowed(options))
    if step.ends_at == layer:
        for cache, new in zip((keys, values), rows[1:], strict=True):
            cache.flatten(0, 1).index_copy_(0, step.slots, new)
        if isinstance(choice, PoolChoice) and choice.layer == layer:
            write_entries(choice.keys, _index_cache(choice, step), step.slots, choice.closings, choice.rate)
        elif choice is not None and choice.layer == layer:
            _index_cache(choice, step).flatten(0, 1).index_copy_(0, step.slots, choice.keys)
        raise KVWritten
    new_rows = NewRows(rows[1], rows[2], step.slots)
    selected = None if choice is None else _selected(choice, paged.layout, options["path"], step)
    if selected is None:
        return paged_attention(rows[0], keys, values, paged, new=new_rows, **options)
    return selected_attention_in_step(rows[0], keys, values, selected, new=new_rows, **options)


# -- rows that an indexer selects keys for -----------------------------------------------------------------------------


def _refuse_choice(module: nn.Module, choice: object, num_rows: int, window: int | None, bias: Tensor | None) -> None:
    """Raise ValueError for a choice that is not one of these rows, as that of a hosted indexer is; None is none."""
    if choice is None:
        return
    name = type(module).__name__
    if not isinstance(choice, IndexChoice):
        raise ValueError(f"{name} brings indices of keys that no hosted indexer has selected: not supported")
    if window is not None:
        raise ValueError(f"{name} selects keys in a window: not supported")
    if bias is not None:
        raise ValueError(f"{name} selects keys and adds a bias to their scores: not supported")
    if len(choice.keys) != num_rows:
        raise ValueError(f"{name} brings a selection of keys for {len(choice.keys)} rows to {num_rows}: not supported")


def _index_cache(choice: IndexChoice | PoolChoice, step: StepContext) -> Tensor:
    return step.index_caches[choice.layer - step.first_layer]


def _selected(
    choice: IndexChoice | PoolChoice, layout: RowLayout, path: AttentionPath, step: StepContext | None = None
) -> SelectedKeys | None:
    """Return the keys of each row, and write the rows' own index keys in a step; None where all rows see all keys."""

    if isinstance(choice, PoolChoice):
        own = () if step is None else (_index_cache(choice, step), step.slots)
        return choice.tokens(layout, path, *own)

    def select() -> SelectedKeys | None:
        if step is None:
            if not sees_more_than(layout, 1, choice.asked.most):
                return None
            return select_keys(choice.asked, choice.keys[:, None], layout, path=path)
        cache = _index_cache(choice, step)
        if not sees_more_than(layout, cache.shape[1], choice.asked.most):
            write_index_rows(choice.keys, cache, step.slots)
            return None
        return select_keys(choice.asked, cache, layout, path=path, fresh=choice.keys, slots=step.slots)

    return choice.selected(select)


# -- the plain call ----------------------------------------------------------------------------------------------------


def _with_rotation(rotation: Rotation, value: Tensor, kv: LayerKV, slots: Tensor, options: _KernelOptions) -> Tensor:
    """Rotate queries and keys, write keys and values [1, K, N, D] to the layer's caches, and attend -> [N, H, D]."""
    rotated = rotary_into_cache(*rotation.operands, plain(value), (kv.keys, kv.values), slots, rotation.norms)
    return paged_attention(rotated, *kv, **options)


def _told_attention(*args: Any, path: AttentionPath, **named: Any) -> tuple[Tensor, None]:
    """Compute `hosted_attention`, also where a layer has not handed on the keywords of its forward."""
    return hosted_attention(*args, path=path, **told(named))


for _path, _name in ATTENTION_NAMES.items():
    AttentionInterface.register(_name, outside_modes(partial(_told_attention, path=_path), takes_deferred=True))
    AttentionMaskInterface.register(_name, hosted_mask)
