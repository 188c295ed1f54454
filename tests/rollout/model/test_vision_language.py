"""Vision-language classes on text: hosted through their text model, from a module and from a folder; images refused."""

from __future__ import annotations

import pytest
import torch
import transformers

from lockstep.kernels.sampling.logprobs import selected_logprobs
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.sampling_params import SamplingParams

TEXT = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
VISION = {"hidden_size": 32, "intermediate_size": 32}
QWEN_IDS = {"image_token_id": 250, "video_token_id": 251, "vision_start_token_id": 252, "vision_end_token_id": 253}
QWEN_VISION = {**VISION, "depth": 1, "num_heads": 2, "out_hidden_size": 64, "patch_size": 4}
CLIP = {**VISION, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8, "patch_size": 4}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
CONFIGS = {
    "qwen3_vl": lambda: transformers.Qwen3VLConfig(
        text_config=TEXT, vision_config={**QWEN_VISION, "deepstack_visual_indexes": [0]}, **QWEN_IDS
    ),
    "qwen2_5_vl": lambda: transformers.Qwen2_5_VLConfig(
        text_config={**TEXT, "hidden_size": 128, "rope_parameters": MROPE},
        vision_config={**QWEN_VISION, "out_hidden_size": 128},
        **QWEN_IDS,
    ),
    "llava": lambda: transformers.LlavaConfig(
        text_config={**TEXT, "model_type": "llama"},
        vision_config={**CLIP, "model_type": "clip_vision_model"},
        image_token_index=250,
    ),
    "gemma3": lambda: transformers.Gemma3Config(
        text_config={**TEXT, "sliding_window": 20, "query_pre_attn_scalar": 32},
        vision_config=CLIP,
        mm_tokens_per_image=4,
        image_token_index=250,
        boi_token_index=252,
        eoi_token_index=253,
    ),
}
PROMPTS = [list(range(3, 40)), [9, 8, 7]]
ENGINE = EngineConfig(kv_cache="32 blocks", max_num_seqs=4, chunked_prefill_size=13)


def make(name, dtype=torch.float32):
    torch.manual_seed(1)
    model = transformers.AutoModelForImageTextToText.from_config(CONFIGS[name]()).to(dtype).eval()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 1.0 if "embed" in path else parameter.shape[-1] ** -0.5)
        if name == "gemma3":
            model.model.language_model.norm.weight.fill_(-0.9)  # else one token has all of the probability
    return model


def check(name, dtype, folder):
    model = make(name, dtype)
    model.save_pretrained(folder)
    for source in (model, folder):
        engine = Engine(source, ENGINE)
        for prompt, greedy in zip(
            PROMPTS, engine.generate(PROMPTS, {"max_new_tokens": 6, "temperature": 0}), strict=True
        ):
            expected = model.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False, pad_token_id=0)
            assert list(greedy.token_ids) == expected[0, len(prompt) :].tolist()
        for completion in engine.generate(PROMPTS, SamplingParams(max_new_tokens=6, sampling_seed=3)):
            ids = torch.tensor([completion.prompt_ids + completion.token_ids])
            with engine.model.training_numerics(), torch.no_grad():
                logits = engine.model.module(ids, use_cache=False).logits[0, completion.num_prompt_tokens - 1 : -1]
            chosen = selected_logprobs(logits, torch.tensor(completion.token_ids), 1.0)
            assert list(completion.logprobs) == chosen.tolist()
        engine.close()


@pytest.mark.parametrize(("name", "dtype"), [("qwen3_vl", torch.float32), ("llava", torch.bfloat16)])
def test_class_runs_on_text_as_transformers_and_as_its_trainer(name, dtype, tmp_path):
    check(name, dtype, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CONFIGS)
def test_every_class_runs_on_text(name, dtype, tmp_path):
    check(name, dtype, tmp_path)


def test_images_are_refused_by_name(tmp_path):
    engine = Engine(make("qwen3_vl"), ENGINE)
    with pytest.raises(ValueError, match="placeholders of image and video input, which is not supported"):
        engine.generate([[1, 252, 250, 251, 253, 2]], {"max_new_tokens": 1})
    with pytest.raises(ValueError, match=r"images and other inputs \(prompt, multi_modal_data\) are not supported"):
        engine.generate([{"prompt": "What is this?", "multi_modal_data": {"image": "x.png"}}], {"max_new_tokens": 1})
    with pytest.raises(ValueError, match="images and other inputs"):
        engine.add({"prompt": [1, 2], "multi_modal_data": {}}, {"max_new_tokens": 1})
    assert engine.generate([[1, 2, 3]], {"max_new_tokens": 1})[0].token_ids
