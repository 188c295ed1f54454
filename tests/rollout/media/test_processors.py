"""Prompts as a processor of transformers gives them, from a text and pictures."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import LlavaProcessor, PreTrainedTokenizerFast

from lockstep.rollout.engine import Engine
from lockstep.tests.rollout.model.test_vision_language import CLIP, ENGINE, TEXT

pillow = pytest.importorskip("PIL.Image")
CLIPImageProcessorPil = getattr(transformers, "CLIPImageProcessorPil", None)
if CLIPImageProcessorPil is None:
    pytest.skip("transformers has no processor of images on Pillow", allow_module_level=True)


@pytest.fixture
def processor(bpe_tokenizer: PreTrainedTokenizerFast) -> LlavaProcessor:
    tokenizer = copy.deepcopy(bpe_tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(0)
    images = CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    strategy = {"vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return LlavaProcessor(images, tokenizer, patch_size=8, image_token="<image>", **strategy)


@pytest.fixture
def engine(processor: LlavaProcessor) -> Engine:
    tokenizer: Any = processor.tokenizer
    config = transformers.LlavaConfig(
        text_config={**TEXT, "model_type": "llama", "vocab_size": len(tokenizer)},
        vision_config={**CLIP, "model_type": "clip_vision_model", "image_size": 32, "patch_size": 8},
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config).eval()
    return Engine(model, ENGINE, tokenizer=tokenizer)


def picture(seed: int) -> Any:
    return pillow.fromarray(np.random.default_rng(seed).integers(0, 256, (50, 70, 3), dtype=np.uint8))


def test_the_output_of_a_processor_is_a_prompt(processor, engine):
    given = processor(images=[picture(1), picture(2)], text="What is <image> beside <image> here?", return_tensors="pt")
    params = {"max_new_tokens": 8, "temperature": 0}
    [completion] = engine.generate([given], params)
    expected = engine.model.module.generate(**given, max_new_tokens=8, do_sample=False)
    assert list(completion.token_ids) == expected[0, given["input_ids"].shape[1] :].tolist()
    assert completion.text == processor.tokenizer.decode(completion.token_ids)
    lists = processor(images=[picture(1), picture(2)], text="What is <image> beside <image> here?")
    assert engine.generate(lists, params)[0].logprobs == completion.logprobs
    [chunk, *_] = engine.stream(given, params)
    assert chunk.token_ids[0] == completion.token_ids[0]


def test_what_no_processor_has_made_is_refused_with_the_remedy(processor, engine):
    pictures, texts = [picture(1), picture(2)], ["A <image>", "The <image>"]
    several = processor(images=pictures, text=texts, return_tensors="pt", padding=True)
    with pytest.raises(ValueError, match=r"must be \[P\] or \[1, P\], not \[2, .*one prompt each"):
        engine.generate(several, {"max_new_tokens": 1})
    with pytest.raises(ValueError, match=r"pass what the model's processor makes of them \(input_ids, pixel_values"):
        engine.generate([{"prompt": "A <image>", "multi_modal_data": {"image": picture(1)}}], {"max_new_tokens": 1})
    with pytest.raises(ValueError, match=r"pass images as their processor gives them"):
        engine.generate(["A <image>"], {"max_new_tokens": 1})
