"""Folders of tiny random models of images and text, each with the processor that its family has."""

from __future__ import annotations

import base64
import copy
import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from lockstep.integration.folder_processor import without_videos

CONTEXT = 512
# As templates of models of images are written: content is a text, or a list of texts and images.
TEMPLATE = (
    "{{% for message in messages %}}<|im_start|>{{{{ message.role }}}}\n"
    "{{% if message.content is string %}}{{{{ message.content }}}}{{% else %}}{{% for part in message.content %}}"
    "{{% if part.type == 'image' %}}{image}{{% else %}}{{{{ part.text }}}}{{% endif %}}{{% endfor %}}{{% endif %}}"
    "<|im_end|>\n{{% endfor %}}{{% if add_generation_prompt %}}<|im_start|>assistant\n{{% endif %}}"
)
# As those of LLaVA's folders are: content is a list always.
TEMPLATE_OF_PARTS = (
    "{% for message in messages %}{{ message.role | upper }}: {% for part in message.content %}"
    "{% if part.type == 'image' %}<image>\n{% else %}{{ part.text }}{% endif %}{% endfor %} {% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
TOKENS = {
    "qwen3_vl": ["<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"],
    "llava": ["<|im_end|>", "<image>"],
    "gemma3": ["<|im_end|>", "<start_of_image>", "<image_soft_token>", "<end_of_image>"],
    "internvl": ["<|im_end|>", "<img>", "<IMG_CONTEXT>", "</img>", "<video>"],
}
NAMED = {  # tokens that a family's processor finds by name
    "gemma3": {"boi_token": "<start_of_image>", "image_token": "<image_soft_token>", "eoi_token": "<end_of_image>"},
    "internvl": {
        "start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    },
}  # fmt: skip
TEXT = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": CONTEXT, "bos_token_id": None,
    "pad_token_id": None,
}  # fmt: skip


def make_folder(family: str, tokenizer: PreTrainedTokenizerFast, folder: Path) -> Path:
    """Save a random model of a family of `TOKENS`, with its tokenizer and its processor."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", *TOKENS[family]]})
    tokenizer.pad_token = "<|im_end|>"
    if family in NAMED:
        tokenizer.save_pretrained(folder)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, extra_special_tokens=NAMED[family])
    processor = PROCESSORS[family](tokenizer)
    processor.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _model(family, tokenizer).save_pretrained(folder)
    return folder


def load_processor(folder: Path) -> Any:
    """Return the processor of a folder, without its part for videos, which needs torchvision."""
    named = transformers.ProcessorMixin.get_processor_dict(folder)[0]["processor_class"]
    return without_videos(getattr(transformers, named)).from_pretrained(folder)


def picture(seed: int, width: int = 70, height: int = 50) -> Any:
    """Return a picture of noise."""
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def png(image: Any, **options: Any) -> bytes:
    """Return the bytes of a picture's file."""
    out = io.BytesIO()
    image.save(out, **{"format": "PNG", **options})
    return out.getvalue()


def data_url(data: bytes, kind: str = "png") -> str:
    """Return bytes as clients send them."""
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def _qwen_processor(tokenizer: PreTrainedTokenizerFast) -> Any:
    images = transformers.Qwen2VLImageProcessorPil(
        size={"shortest_edge": 16 * 16, "longest_edge": 64 * 64}, patch_size=8, temporal_patch_size=2, merge_size=2
    )
    template = TEMPLATE.format(image="<|vision_start|><|image_pad|><|vision_end|>")
    return without_videos(transformers.Qwen3VLProcessor)(images, tokenizer, chat_template=template)


def _llava_processor(tokenizer: PreTrainedTokenizerFast) -> Any:
    images = transformers.CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    strategy = {"vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return transformers.LlavaProcessor(
        images, tokenizer, patch_size=8, image_token="<image>", chat_template=TEMPLATE_OF_PARTS, **strategy
    )


def _gemma_processor(tokenizer: PreTrainedTokenizerFast) -> Any:
    images = transformers.Gemma3ImageProcessorPil(size={"height": 32, "width": 32})
    template = TEMPLATE.format(image="<start_of_image>")
    return transformers.Gemma3Processor(images, tokenizer, chat_template=template, image_seq_length=4)


def _intern_processor(tokenizer: PreTrainedTokenizerFast) -> Any:
    images = transformers.GotOcr2ImageProcessorPil(
        size={"height": 32, "width": 32}, crop_to_patches=True, min_patches=1, max_patches=3
    )
    kind, template = without_videos(transformers.InternVLProcessor), TEMPLATE.format(image="<IMG_CONTEXT>")
    return kind(images, tokenizer, None, 4, chat_template=template)


PROCESSORS = {
    "qwen3_vl": _qwen_processor,
    "llava": _llava_processor,
    "gemma3": _gemma_processor,
    "internvl": _intern_processor,
}


def _model(family: str, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    text = {**TEXT, "vocab_size": len(tokenizer), "eos_token_id": tokenizer.convert_tokens_to_ids("<|im_end|>")}
    vision = {"hidden_size": 32, "intermediate_size": 32, "patch_size": 8}
    config: Any
    if family == "qwen3_vl":
        ids = {
            name: tokenizer.convert_tokens_to_ids(token)
            for name, token in (
                ("image_token_id", "<|image_pad|>"),
                ("video_token_id", "<|video_pad|>"),
                ("vision_start_token_id", "<|vision_start|>"),
                ("vision_end_token_id", "<|vision_end|>"),
            )
        }
        encoder = {**vision, "depth": 1, "num_heads": 2, "out_hidden_size": 64, "deepstack_visual_indexes": [0]}
        config = transformers.Qwen3VLConfig(text_config=text, vision_config=encoder, **ids)
    elif family == "gemma3":
        config = transformers.Gemma3Config(
            text_config={**text, "sliding_window": 64, "query_pre_attn_scalar": 32},
            vision_config={**vision, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32},
            mm_tokens_per_image=4,
            image_token_index=tokenizer.convert_tokens_to_ids("<image_soft_token>"),
            boi_token_index=tokenizer.convert_tokens_to_ids("<start_of_image>"),
            eoi_token_index=tokenizer.convert_tokens_to_ids("<end_of_image>"),
        )
    elif family == "internvl":
        encoder = {**vision, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": [32, 32]}
        config = transformers.InternVLConfig(
            text_config={**text, "model_type": "qwen2"},
            vision_config={**encoder, "patch_size": [8, 8]},
            image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"),
            image_seq_length=4,
            downsample_ratio=0.5,
        )
    else:
        encoder = {**vision, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32}
        config = transformers.LlavaConfig(
            text_config={**text, "model_type": "llama"},
            vision_config={**encoder, "model_type": "clip_vision_model"},
            image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        )
    torch.manual_seed(1)
    model = transformers.AutoModelForImageTextToText.from_config(config).eval()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if parameter.dim() > 1:
                embeds = "embed" in path and family not in ("gemma3", "internvl")  # which give them to the logits, too
                parameter.normal_(0.0, 1.0 if embeds else parameter.shape[-1] ** -0.5)
    return model
