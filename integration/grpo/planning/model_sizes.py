"""Sizes of a job's model for its plan, as far as a model without memory for its weights tells them: the KV of a token,
and the widths of its layers. Layers may differ in their heads and widths."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from ....rollout.ranks.mesh import MeshPlan


def layer_configs(text: PretrainedConfig) -> Sequence[PretrainedConfig]:
    """Return the configuration of each layer of a decoder."""
    # Of a configuration that differs by layer, transformers lets no such value be read from the whole.
    return list(getattr(text, "per_layer_config", None) or [text] * text.num_hidden_layers)


def kv_bytes_per_token(model: PreTrainedModel, mesh: MeshPlan, itemsize: int) -> int | None:
    """Return the bytes that the rank with the largest share holds for one token, about: the first stages may have one
    layer more, and several ranks may have one KV head. Layers without KV count as such. None: neither the projections
    nor the configuration tell it; the engine measures it when it is made.
    """
    configs = layer_configs(model.config.get_text_config(decoder=True))
    by_layer = _projected(model, mesh.tp)
    numbers = [by_layer.get(layer, 0) for layer in range(len(configs))]
    if not any(numbers):
        numbers = [_configured(config, mesh.tp) for config in configs]
    num = -(-len(configs) // mesh.pp)  # layers of a stage
    return itemsize * max(sum(numbers[first : first + num]) for first in range(0, len(numbers), num)) or None


def mlp_width(config: PretrainedConfig) -> int:
    """Return the number of activations of a layer's MLP for one token, about, by the layer's configuration: experts
    count as often as a token has them. Four times the hidden size where the configuration does not tell."""
    num_experts = getattr(config, "num_experts_per_tok", None) or 1  # of a token
    experts = (getattr(config, "moe_intermediate_size", None) or 0) * num_experts
    widths = getattr(config, "intermediate_size", None), experts, 4 * config.hidden_size
    return next(width for width in widths if isinstance(width, int) and width)


def _projected(model: nn.Module, tp: int) -> dict[int, int]:
    """Return the numbers of a token's keys and values on one rank, by layer, of attentions that project them."""
    found: dict[int, int] = {}
    for part in model.modules():
        layer, head_dim = getattr(part, "layer_idx", None), getattr(part, "head_dim", None)
        keys, values = (getattr(getattr(part, name, None), "out_features", None) for name in ("k_proj", "v_proj"))
        if isinstance(layer, int) and isinstance(head_dim, int) and keys:
            widths = keys, values or keys  # where values are the keys, a layer has one projection of both
            found[layer] = sum(-(-(width // head_dim) // tp) * head_dim for width in widths)
    return found


def _configured(config: PretrainedConfig, tp: int) -> int:
    """Return the same for a layer with attention, by its configuration; 0 where that does not tell."""
    num_heads = getattr(config, "num_attention_heads", None)
    heads = getattr(config, "num_key_value_heads", None) or num_heads
    if not isinstance(heads, int) or not isinstance(num_heads, int):
        return 0
    names = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")  # of latent attention
    latent = [size for name in names if isinstance(size := getattr(config, name, None), int)]
    if len(latent) == len(names):
        return -(-num_heads // tp) * sum(latent)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    return 2 * -(-heads // tp) * head_dim
