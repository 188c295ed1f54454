"""Tiny configurations of any model type: sizes of its default configuration are made small by the names of fields.

Where names do not tell, `EXCEPTIONS` has the values of a type.
"""

from __future__ import annotations

import dataclasses
import re
from itertools import count
from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig

NUM_LAYERS = 4
NUM_HEADS = 4
MAX_LAYERS = 8  # for configurations with many kinds of layers
VOCAB_SIZE = 256
USUAL_TOKENS = range(10, 240)  # below are special tokens of texts, above are those that stand for images and the like

# The first expression that the whole name of a field matches gives its largest value.
_SIZES: tuple[tuple[re.Pattern[str], int], ...] = tuple(
    (re.compile(pattern), value)
    for pattern, value in {
        r".*vocab_size.*": VOCAB_SIZE,
        r"(max_.*positions?|.*position_embeddings|n_positions|n_ctx|.*seq_len|seq_length|context_length)": 512,
        r"first_k_dense_replace|num_dense_layers|num_nextn_predict_layers|num_mtp_layers|.*moe_layer_start.*": 1,
        r"num_kv_shared_layers|max_window_layers|.*num_memory_blocks": 2,
        r"(.*_)?(num_)?(n_)?(hidden_)?(layers?|depth|blocks)": NUM_LAYERS,
        r".*(num_key_value_heads|num_kv_heads|kv_n_heads|num_(query|attention)_groups)": 2,
        r".*(num_experts_per_tok|num_experts_per_token|moe_topk|moe_k|moe_top_k|top_k_experts|num_selected_experts)": 2,
        r".*(shared_experts?|n_shared|zero_expert_num)": 1,
        r".*(num|n_routed|n|local)_experts.*": 4,
        r"index_n_heads": 16,  # of few heads all may be zero, and scores of an indexer equal
        r".*(num_heads|n_heads?|_heads|num_head)": NUM_HEADS,
        r"n_group": 2,
        r"topk_group": 1,
        r".*_rank": 16,
        r".*(head_dim|d_kv|dim_head|d_head|rotary_dim|head_size|d_state|state_size)": 16,
        r".*(sliding_windows?|window_size|local_attention|attention_chunk_size)": 20,
        r".*index_topk": 16,
        r".*chunk_size": 16,
        r"(image|img)_size": 32,
        r".*(intermediate|ffn|mlp|inner|d_ff|feed_?forward|conv_L_cache).*": 96,
        r".*(size|dim|dims|width|channels?|d_model|n_embd|n_embed|hidden|embd|size_.*|dff|dim_.*|d_ssm|lowrank)": 64,
    }.items()
)
_LAYERS = re.compile(r"(num_)?(hidden_)?(n_)?(text_)?(decoder_)?layers?|n_layer")
_TOKENS = re.compile(r".*_token_(id|index|ids)|.*_token")
_TEXT_TOKENS = re.compile(r"(pad|bos|eos|sep|cls|mask|unk|decoder_start|forced_[be]os)_token_id")

# model type -> values of its configuration, or of the one of that type inside a composite one
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16}
_MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}}
_HALF_MROPE = {
    "rope_parameters": {**_MROPE["rope_parameters"], "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
}
_INDEXER = {
    "indexer_n_heads": 16,  # of few heads all may be zero, and scores equal
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
}
_GEMMA4_VISION = {
    **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 4, "head_dim": 16, "patch_size": 8, "pooling_kernel_size": 2},
    "position_embedding_size": 64,
}
_GEMMA4_UNIFIED_VISION = {
    **{"patch_size": 8, "pooling_kernel_size": 1, "mm_embed_dim": 64, "mm_posemb_size": 64, "output_proj_dims": 64}
}
EXCEPTIONS: dict[str, dict[str, Any]] = {
    "apertus1p5": {"image_token_offset": 244, "audio_token_offset": 252},  # behind those that stand for media
    "apertus1p5_vision_tokenizer": {"codebook_size": 8},
    "aria": {"projector_patch_to_query_dict": {16: 4}},
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "bloom": {"seq_length": 512},
    "chameleon": {"vocabulary_map": {"<image>": 250}},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "rope_parameters": {"sliding_attention": _MROPE["rope_parameters"], "full_attention": None},
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 96, "moe_top_k": 2, "ffn_act_fn": {"name": "silu"}},
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "n_routed_experts": 4, "topk_group": 1, "n_group": 2},
    "deepseek_ocr2_text": {
        "mlp_layer_types": ["dense"] + ["sparse"] * 3,
        "num_experts_per_tok": 2,
        "n_routed_experts": 4,
    },
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32, "global_head_dim": 32},
    "dory": {"n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1},
    "dots1": {"num_experts_per_tok": 2, "n_routed_experts": 4, "n_shared_experts": 1},
    "emu3": {"vocabulary_map": {"<image>": 250}},
    "ernie4_5_vl_moe_text": {"rope_parameters": {**_MROPE["rope_parameters"], "mrope_section": [3, 3, 2]}},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 128},
    "gemma4": {"vision_config": _GEMMA4_VISION},
    "gemma4_text": {"global_head_dim": 32, "use_bidirectional_attention": "vision"},
    "gemma4_unified": {"vision_config": _GEMMA4_UNIFIED_VISION},
    "gemma4_unified_text": {"global_head_dim": 32, "sliding_window": 70},  # not less than an image's tokens
    "glm4v_moe_text": _HALF_MROPE,
    "glm4v_text": _MROPE,
    "glm_ocr_text": _MROPE,
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granite4_vision": {"deepstack_layer_map": [[-1, 1]], "downsample_rate": "1/2"},
    "granitemoehybrid": {**_MAMBA, "layer_types": ["mamba", "attention"] * 2, "num_hidden_layers": 4},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "hunyuan_vl_text": {
        "head_dim": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "xdrope_section": [2, 2, 2, 2]},
    },
    "inkling2_loop_text": {
        "n_layers_per_attn_res_block": 1,
        "loop_layer_index_start": 1,
        "loop_layer_index_end": 3,
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_hidden_layers": 4},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "llama4_vision_model": {"intermediate_size": 256},
    "ministral": {"head_dim": 16},
    "mistral_large4_text": {"kv_source_layers": [0, 1, 2, 3, 4, 4, 4, 3]},  # with rotary positions, and without
    "molmo2_adapter": {"vision_feature_layer": [3, 1]},
    "muse_glimmer": {"out_hidden_size": 256},
    "muse_spark": {"out_hidden_size": 256},
    "nemotron": {"num_key_value_heads": 2},
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2},
    "paddleocr_vl_text": _MROPE,
    "qwen2_5_omni_text": _MROPE,
    "qwen2_5_omni_thinker": {"vision_start_token_id": 250},
    "qwen2_5_vl_text": _MROPE,
    "qwen2_vl_text": _MROPE,
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 250},
    "qwen4_exp_text": _INDEXER,
    "reformer": {"axial_pos_embds": False},
    "step3p5": {"sliding_window": 20},
    "wavtokenizer_encoder": {"codebook_size": 4},
    "vipllava": {"vision_feature_layer": [-2, -3]},
    "zamba": {"num_hidden_layers": 12, "layers_block_type": None},
    "zamba2": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2},  # of one shared block
}


def tiny_config(model_type: str) -> PretrainedConfig:
    """Make the small configuration of a model type. Raises the errors of its class for values that do not fit."""
    return _shrunk(CONFIG_MAPPING[model_type](), count(USUAL_TOKENS.stop))


def _shrunk(config: PretrainedConfig, media_tokens: count[int]) -> PretrainedConfig:
    """Return a configuration of the same class with small values in the place of large ones."""
    own = {own: name for name, own in config.attribute_map.items()}
    kinds = _layer_kinds(config)
    fresh = vars(type(config)())
    values: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        name, before = field.name, vars(config).get(field.name)  # getattr refuses values that layers may have anew
        if isinstance(before, PretrainedConfig):
            values[name] = _shrunk(before, media_tokens)
        elif isinstance(before, list | tuple) and kinds and len(before) == _num_layers(config):
            values[name] = type(before)(_small(own.get(name, name), before[layer]) for layer in kinds)
        elif _TOKENS.fullmatch(name):
            values[name] = _token(field, before, media_tokens)
        elif kinds and own.get(name, name) == "num_hidden_layers":
            values[name] = len(kinds)
        else:
            values[name] = _small(own.get(name, name), before)
            is_derived = field.default is None and type(before) is int  # from other fields, by the class itself
            if (before if is_derived else values[name]) == fresh.get(name):
                del values[name]
    if vars(config).get("num_key_value_heads") == vars(config).get("num_attention_heads", 0):
        values["num_key_value_heads"] = NUM_HEADS
    if "is_decoder" in {field.name for field in dataclasses.fields(config)}:
        values["is_decoder"] = True
    return type(config)(**{**values, **EXCEPTIONS.get(config.model_type, {})})


def _small(name: str, value: Any) -> Any:
    """Return a value that a field of this name has in a small configuration."""
    if isinstance(value, float) and ("drop" in name or "jitter" in name):
        return 0.0
    if isinstance(value, list | tuple) and value and all(type(one) is int for one in value):
        return type(value)(_small(name, one) for one in value)
    if name.startswith("rope_") and isinstance(value, dict) and "mrope_section" in value:
        return {**value, "mrope_section": [4, 2, 2]}
    if type(value) is not int:
        return value
    return min([value, *(limit for pattern, limit in _SIZES if pattern.fullmatch(name))][:2])


def _token(field: dataclasses.Field[Any], before: Any, media_tokens: count[int]) -> Any:
    if _TEXT_TOKENS.fullmatch(field.name):
        small = isinstance(before, int) and before < USUAL_TOKENS.start
        return before if small or before is None else None if "None" in str(field.type) else 2
    if isinstance(before, list | tuple):
        return type(before)(next(media_tokens) for _ in before)
    return next(media_tokens) if type(before) is int else before


def _num_layers(config: PretrainedConfig) -> int:
    number = getattr(config, "num_hidden_layers", 0)
    return number if isinstance(number, int) else 0


def _layer_kinds(config: PretrainedConfig) -> list[int]:
    """Return the indices of layers to keep: the first of each kind that the lists with an entry per layer tell."""
    total = _num_layers(config)
    lists = [value for field in dataclasses.fields(config)
             if isinstance(value := vars(config).get(field.name), list | tuple) and len(value) == total]  # fmt: skip
    first: dict[str, int] = {}
    for layer in range(total):
        first.setdefault(repr([values[layer] for values in lists]), layer)
    kept = sorted(first.values())[:MAX_LAYERS]
    others = [layer for layer in range(total) if layer not in kept]
    return sorted([*kept, *others[: max(0, min(NUM_LAYERS, total) - len(kept))]])
