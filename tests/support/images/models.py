"""Tiny models of images and text with their processors, which run on Pillow alone."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerFast, ProcessorMixin

from ....integration.folder_processor import without_videos
from ..bpe_tokenizer import train_tokenizer

MARKS = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}IMAGE{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TEXT = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512, "bos_token_id": None,
    "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip


def image_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with the tokens of images."""
    tokenizer = train_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(MARKS)})
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(0)
    return tokenizer


def qwen2_5_vl(dtype: torch.dtype = torch.float32) -> tuple[PreTrainedModel, ProcessorMixin]:
    """Return a model whose rotary has three parts, and its processor; images of any size, in patches of 4 pixels."""
    tokenizer = image_tokenizer()
    images = transformers.Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, temporal_patch_size=2, min_pixels=64, max_pixels=64 * 64
    )
    template = _CHAT.replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>")
    processor = without_videos(transformers.Qwen2_5_VLProcessor)(images, tokenizer, chat_template=template)
    ids = {
        name: tokenizer.convert_tokens_to_ids(mark)
        for name, mark in zip(
            ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id"), MARKS[2:], strict=True
        )
    }
    rotary = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
    config = transformers.Qwen2_5_VLConfig(
        text_config={**_TEXT, "vocab_size": len(tokenizer), "rope_parameters": rotary},
        vision_config={
            "hidden_size": 32, "intermediate_size": 32, "depth": 1, "num_heads": 2, "out_hidden_size": 64,
            "patch_size": 4, "window_size": 16,
        },
        **ids,
    )  # fmt: skip
    return _made(config, dtype), processor


def llava(dtype: torch.dtype = torch.float32) -> tuple[PreTrainedModel, ProcessorMixin]:
    """Return a model of images of 32 x 32 pixels and one position a token, and its processor."""
    tokenizer = image_tokenizer()
    images = transformers.CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    processor = transformers.LlavaProcessor(
        images, tokenizer, patch_size=8, image_token="<|image_pad|>", vision_feature_select_strategy="default",
        num_additional_image_tokens=1, chat_template=_CHAT.replace("IMAGE", "<|image_pad|>"),
    )  # fmt: skip
    config = transformers.LlavaConfig(
        text_config={**_TEXT, "model_type": "llama", "vocab_size": len(tokenizer)},
        vision_config={
            "model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
            "num_attention_heads": 2, "image_size": 32, "patch_size": 8,
        },
        image_token_index=tokenizer.convert_tokens_to_ids("<|image_pad|>"),
    )  # fmt: skip
    return _made(config, dtype), processor


def _made(config: Any, dtype: torch.dtype) -> PreTrainedModel:
    torch.manual_seed(1)
    return transformers.AutoModelForImageTextToText.from_config(config).to(dtype).eval()
