"""Small random models of the families that Lockstep promises to host."""

from __future__ import annotations

import copy

import torch
import transformers
from transformers import PreTrainedModel

from lockstep.tests.families.configs import tiny_config
from lockstep.tests.optional_packages import needs_transformers

ABSENT = object()  # a setting of the common part that a configuration does not have
_COMMON = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # not hidden_size / num_attention_heads
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}

_DELTA = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_SHARED_EXPERT = {**_EXPERTS, "shared_expert_intermediate_size": 32}
_KIMI = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    **{"linear_num_heads": 4, "linear_head_dim": 24},  # not a whole number of vectors
    **{"kv_lora_rank": 24, "q_lora_rank": None, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16},
    **{"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1},
    **{"n_group": 1, "topk_group": 1},
}
# Heads and states that are no whole number of vectors, and groups of two heads.
_MAMBA = {
    "num_hidden_layers": 3,
    **{"mamba_n_heads": 4, "mamba_d_head": 24, "mamba_n_groups": 2, "mamba_d_state": 20, "mamba_chunk_size": 16},
}
_NEMOTRON = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
    **{"mamba_num_heads": 4, "mamba_head_dim": 24, "n_groups": 2, "ssm_state_size": 20, "chunk_size": 16},
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "moe_latent_size": 48},
    **{"moe_shared_expert_intermediate_size": 32},
}
_GRANITE = {
    **_MAMBA,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    **{"mamba_d_head": "auto", "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 48},
    **{"embedding_multiplier": 2.0, "residual_multiplier": 0.7, "attention_multiplier": 0.2, "logits_scaling": 0.5},
}
_FALCON = {
    **_MAMBA,
    **{"mamba_d_ssm": 96, "mamba_rms_norm": True, "mlp_multipliers": [0.8, 1.2], "key_multiplier": 0.9},
    **{"ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7], "ssm_in_multiplier": 1.3, "ssm_out_multiplier": 0.6},
    **{"attention_in_multiplier": 0.9, "attention_out_multiplier": 1.1, "lm_head_multiplier": 0.9},
}

# No attention: nothing of heads, of MLPs or of a longest context.
_SCAN = {
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size"), ABSENT),
    "max_position_embeddings": ABSENT,
    **{"num_hidden_layers": 3, "expand": 2, "state_size": 12, "conv_kernel": 4, "time_step_rank": 20},
}
_MAMBA_2 = {**_SCAN, "num_heads": 4, "head_dim": 32, "n_groups": 2, "state_size": 20, "chunk_size": 16}
_JAMBA = {
    **{"num_hidden_layers": 3, "attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 4},
    **{"num_experts_per_tok": 2, "mamba_d_state": 12, "mamba_dt_rank": 20},
}
# One block of attention and MLP in two layers, of which each has adapters of its own; Zamba's Mamba layers have heads.
_SHARED = {
    **{"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2, "num_key_value_heads": 4},
    **{"n_mamba_heads": 4, "head_dim": ABSENT},
}
_ZAMBA = {**_SHARED, "n_mamba_heads": 2, "mamba_d_state": 12, "mamba_dt_rank": 20}
_ZAMBA_2 = {
    **_SHARED,
    **{"mamba_d_state": 20, "mamba_ngroups": 2, "chunk_size": 16, "use_shared_attention_adapter": True},
    **{"adapter_rank": 8, "use_mem_rope": True},
}

# Blocks of 16 rows in the module's own code, which sequences do not fill, and factors of residuals.
_LIGHTNING = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    **{"block_size": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    **{"full_attn_alpha_factor": 0.9, "linear_attn_beta_factor": 1.2, "mlp_alpha_factor": 0.8},
}

# Convolutions of other widths than by default, biases, one layer in a window, and half of a head rotated.
_CONVOLVED = {
    **{"num_hidden_layers": 3, "layer_types": ["hybrid", "hybrid_sliding", "hybrid"], "sliding_window": 20},
    **{"cca_time0": 3, "cca_time1": 2, "attention_bias": True, "router_hidden_size": 24},
    **{"num_experts": 4, "moe_intermediate_size": 32, "hidden_act": "silu"},
}

# Rows see more keys than their indexer selects; of 16 heads not all are zero, so that scores differ.
_INDEXED = {
    **{"num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16},
    **{"v_head_dim": 24, "index_topk": 12, "index_n_heads": 16, "index_head_dim": 24, "moe_intermediate_size": 32},
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1},
    **{"num_hidden_layers": 3, "mlp_layer_types": ["dense", "sparse", "dense"]},
}

# An indexer that rotates in float32, and layers in a window that have other heads.
_NOTE = {
    **{**_INDEXED, "head_dim": 8, "sliding_window": 20, "shared_experts_intermediate_size": 32},
    "layer_types": ["indexed_attention", "sliding_attention", "indexed_attention"],
    "per_layer_config": {
        1: {
            **{"head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 24},
            **{"kv_lora_rank": 40, "qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 16},
        }
    },
}

# Chunks that begin inside a block of KV; a scale of queries that rises every eight positions in the layers without.
_CHUNKED = {
    **{"attention_chunk_size": 20, "floor_scale": 8, "attn_scale": 0.3, "attn_temperature_tuning": True},
    **{"no_rope_layers": [1, 0, 1], "num_hidden_layers": 3, "num_local_experts": 4, "num_experts_per_tok": 2},
    **{"intermediate_size_mlp": 48, "interleave_moe_layer_step": 2},
}

# A bias that ends before and behind the window, scales that rise from the eighth position, and other heads in windows.
_INKLING = {
    **{
        "num_hidden_layers": 3,
        "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding"],
        "sliding_window_size": 20,
    },
    **{"swa_num_attention_heads": 6, "swa_num_key_value_heads": 3, "swa_head_dim": 20, "d_rel": 8, "rel_extent": 24},
    **{"log_scaling_n_floor": 8, "log_scaling_alpha": 0.3, "conv_kernel_size": 4, "num_experts_per_tok": 2},
    **{"n_routed_experts": 4, "n_shared_experts": 2, "moe_intermediate_size": 32, "route_scale": 2.0},
    **{"mlp_layer_types": ["dense", "sparse", "sparse"], "logits_mup_width_multiplier": 2.0},
}

_INKLING_2 = {
    **{name: value for name, value in _INKLING.items() if name not in ("n_shared_experts", "mlp_layer_types")},
    **{"num_hidden_layers": 4, "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding", "hybrid"]},
    **{"unpadded_vocab_size": 252, "n_layers_per_attn_res_block": 2, "qk_l2_clip_threshold": 3.0},
    **{"rel_l2_clip_threshold": 2.0, "final_logit_softcapping": 9.0},
}
del _INKLING_2["logits_mup_width_multiplier"]

# Windows of 4 and 6 tokens, fewer entries than rows see, a first layer without any, and experts by a table of tokens.
_COMPRESSED = {
    **{"num_hidden_layers": 4, "num_key_value_heads": 1, "q_lora_rank": 32, "o_groups": 2, "o_lora_rank": 24},
    "layer_types": [
        *("sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"),
        "compressed_sparse_attention",
    ],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 6},
    **{"sliding_window": 10, "index_n_heads": 16, "index_head_dim": 24, "index_topk": 5, "partial_rotary_factor": 0.25},
    **{"mlp_layer_types": ["hash_moe", "moe", "moe", "moe"], "n_routed_experts": 4, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 32, "hc_sinkhorn_iters": 4},
}

# Pools of 4 tokens, fewer of them than rows see, which the third layer selects like the second, and a tail behind them.
_POOLED = {
    **{"num_hidden_layers": 4, "indexer_types": ["full", "full", "shared", "full"], "index_kpool": 4, "index_topk": 12},
    "layer_types": ["linear_attention", "indexed_attention", "indexed_attention", "indexed_attention"],
    **{"index_n_heads": 16, "index_head_dim": 24, "mlp_layer_types": ["dense", "sparse", "dense", "dense"]},
}

# Blocks of 4 tokens, fewer of them than rows see, and embeddings of n-grams before both delta nets.
_NGRAMS = {
    **_DELTA,
    **{
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    },
    **{"indexer_n_heads": 16, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 12},
    **{
        "indexer_compress_ratio": 4,
        "ple_layer_ids": [1, 3],
        "ple_embed_dim": 48,
        "ngram_size": 4,
        "heads_per_ngram": 2,
    },
    **{"ngram_vocab_size_base": 50, "make_ngram_vocab_size_divisible_by": 8, "ple_conv_kernel_size": 3},
    **{**_SHARED_EXPERT, "head_dim": 16, "hc_count": 2, "hc_lowrank": 16, "eos_token_id": 251},
}

# family -> (config class, settings of its config beyond the common part)
FAMILIES: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("LlamaConfig", {"rope_parameters": _LLAMA3_ROPE}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),  # has bias on q, k and v
    "qwen3": ("Qwen3Config", {}),
    "mistral": ("MistralConfig", {"sliding_window": 20}),
    "gemma2": ("Gemma2Config", {"sliding_window": 20, "query_pre_attn_scalar": 32}),
    "gemma3": ("Gemma3TextConfig", {"sliding_window": 20, "query_pre_attn_scalar": 32}),
    "olmo2": ("Olmo2Config", {}),  # norms follow attention and MLP, whose inputs are residual sums
    "gpt_oss": ("GptOssConfig", {"sliding_window": 20, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": ("Qwen3MoeConfig", _EXPERTS),
    "qwen3_5": ("Qwen3_5TextConfig", _DELTA),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", {**_DELTA, **_SHARED_EXPERT}),
    "qwen3_next": ("Qwen3NextConfig", {**_DELTA, **_SHARED_EXPERT}),
    "olmo_hybrid": ("OlmoHybridConfig", _DELTA),
    "kimi_linear": ("KimiLinearConfig", _KIMI),
    "nemotron_h": ("NemotronHConfig", _NEMOTRON),
    "granitemoehybrid": ("GraniteMoeHybridConfig", _GRANITE),
    "falcon_h1": ("FalconH1Config", _FALCON),
    "bamba": ("BambaConfig", {**_MAMBA, "mamba_d_head": "auto", "attn_layer_indices": [1]}),
    "mamba2": ("Mamba2Config", _MAMBA_2),
    "mamba": ("MambaConfig", _SCAN),
    "falcon_mamba": ("FalconMambaConfig", _SCAN),
    "jamba": ("JambaConfig", _JAMBA),
    "zamba": ("ZambaConfig", _ZAMBA),
    "zamba2": ("Zamba2Config", _ZAMBA_2),
    "zaya": ("ZayaConfig", _CONVOLVED),
    "minimax": ("MiniMaxConfig", _LIGHTNING),
    "deepseek_v32": ("DeepseekV32Config", _INDEXED),
    "dots3_note_text": ("Dots3NoteTextConfig", _NOTE),
    "glm_moe_dsa": ("GlmMoeDsaConfig", {**_INDEXED, "indexer_types": ["full", "shared", "full"]}),
    "llama4": ("Llama4TextConfig", _CHUNKED),
    "deepseek_v4": ("DeepseekV4Config", _COMPRESSED),
    "qwen4_exp": ("Qwen4ExpTextConfig", _NGRAMS),
    "inkling": ("InklingTextConfig", _INKLING),
    "inkling2": ("Inkling2TextConfig", _INKLING_2),
    "lfm2": ("Lfm2Config", {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}),
    "lfm2_moe": (
        "Lfm2MoeConfig",
        {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1, **_EXPERTS},
    ),
}

# Whose layers have another form in older versions of transformers.
_NEWEST = {
    *("lfm2", "lfm2_moe", "deepseek_v32", "deepseek_v4", "glm_moe_dsa", "inkling", "inkling2", "glm5_next"),
    *("zaya", "dots3_note_text", "qwen4_exp", "mamba", "mamba2", "falcon_mamba", "jamba", "zamba", "zamba2"),
}
# Tied heads, which would repeat the newest token for ever if embeddings were large.
_SMALL_EMBEDDINGS = ("mamba", "falcon_mamba", "zamba", "zamba2")

_made: dict[str, tuple[PreTrainedModel, torch.Tensor]] = {}  # with torch's random numbers after the model's


def random_model(family: str, dtype: torch.dtype = torch.float32, **overrides: object) -> PreTrainedModel:
    """Make a random model, the same every time, whose logits are far from uniform.

    Example: `random_model("gemma2", vocab_size=128)`.
    """
    if family in _NEWEST:
        needs_transformers(5, 23)
    key = repr((family, dtype, sorted(overrides.items()), torch.get_default_device()))
    if key not in _made:
        _made[key] = _make(family, dtype, overrides), torch.get_rng_state()
    model, state = _made[key]
    torch.set_rng_state(state)
    return copy.deepcopy(model)


def initial_model(family: str, **overrides: object) -> PreTrainedModel:
    """Make a model with the weights that transformers gives to a new one, the same every time; float32."""
    if family == "glm5_next":  # a class of images and text alone
        attention = {name: overrides.pop(name) for name in ("attn_implementation",) if name in overrides}
        config = tiny_config(family)
        config.text_config = type(config.text_config)(**{**config.text_config.to_dict(), **_POOLED, **overrides})
        torch.manual_seed(1)
        return transformers.AutoModelForImageTextToText.from_config(config, **attention).eval()
    config_name, extra = FAMILIES[family]
    settings = {**_COMMON, **extra, **overrides}
    config = getattr(transformers, config_name)(**{name: own for name, own in settings.items() if own is not ABSENT})
    torch.manual_seed(1)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def _make(family: str, dtype: torch.dtype, overrides: dict[str, object]) -> PreTrainedModel:
    model = spread_weights(cast(initial_model(family, **overrides), dtype)).eval()
    if family in _SMALL_EMBEDDINGS:
        with torch.no_grad():
            model.get_input_embeddings().weight.mul_(0.25)
    return model


def cast(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Cast a model in place as `from_pretrained` does: some parameters stay in float32. Returns it."""
    kept = model._keep_in_fp32_modules_strict or ()
    for name, tensor in (*model.to(dtype).named_parameters(), *model.named_buffers()):
        if tensor.is_floating_point() and any(f".{part}." in f".{name}." for part in kept):
            tensor.data = tensor.data.float()
    return model


def with_router_biases(model: PreTrainedModel, step: int = 0) -> PreTrainedModel:
    """Give a model's stored buffers, which its routers choose experts by, the values of a step. Returns it."""
    stored, generator = model.state_dict().keys(), torch.Generator().manual_seed(step)
    biases = [buffer for name, buffer in model.named_buffers() if name in stored]
    assert biases, "no stored buffers"
    for bias in biases:
        bias.copy_(torch.randn(bias.shape, generator=generator))
    return model


def spread_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Give a model random weights, biases and sinks that make its logits far from uniform. Returns it."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 1.0 if "embed" in name else parameter.shape[-1] ** -0.5)
            elif "sinks" in name or "bias" in name:
                parameter.normal_(0.0, 0.5)
            elif name.endswith(".temp"):  # a factor of keys (ZAYA1), which begins at 0: attention would be uniform
                parameter.normal_(1.0, 0.3)
        for name, buffer in model.named_buffers():
            if name.endswith("tid2eid"):  # the experts of each token: distinct ones
                first, num_chosen = torch.randint(4, (len(buffer), 1)), torch.arange(buffer.shape[1])
                buffer.copy_((first + num_chosen) % 4)
    return model
