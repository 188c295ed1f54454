"""renderers (0.1.12) with images: its renderer of Qwen3-VL makes tokens and tensors, which vLLM's own code encodes.

python renderers_images_program.py URL MODEL_FOLDER MODEL_NAME: the server is not used, images need a model of theirs.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from openai import AsyncOpenAI
from renderers.client import generate
from renderers.qwen3_vl import Qwen3VLRenderer

from lockstep.integration.http.edge.config import HttpConfig
from lockstep.integration.http.server import serve_in_background
from lockstep.integration.service import RolloutService
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.tests.integration.http.images.folders import data_url, load_processor, make_folder, picture, png
from lockstep.tests.integration.http.images.served import Served, image_part, text_part, trained_logprobs
from lockstep.tests.support.bpe_tokenizer import train_tokenizer

# Of Qwen3-VL's vocabulary, which the renderer looks up.
WORDS = ["<|endoftext|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]


def message(seed: int, text: str) -> dict[str, object]:
    return {"role": "user", "content": [image_part(data_url(png(picture(seed)))), text_part(text)]}


def check(served: Served, made: dict[str, Any], processor: Any, seeds: list[int]) -> None:
    """Compare the log-probabilities with those of the module's forward over the processor's tensors."""
    found = processor.image_processor(images=[picture(seed) for seed in seeds], return_tensors="pt")
    ids = torch.tensor([made["prompt_ids"]])
    prompt = {"input_ids": ids, **found, "mm_token_type_ids": (ids == processor.image_token_id).int()}
    assert made["completion_logprobs"] == trained_logprobs(served.engine, prompt, made["completion_ids"])


async def talk(served: Served, folder: Path, model: str) -> None:
    processor = load_processor(folder)
    renderer = Qwen3VLRenderer(processor.tokenizer, processor=processor)
    client = AsyncOpenAI(base_url=f"{served.server.url}/v1", api_key="none", max_retries=0)
    params = {"max_tokens": 6, "temperature": 1.0, "seed": 3, "logit_bias": served.no_media}
    asked: dict[str, Any] = {"client": client, "renderer": renderer, "model": model, "sampling_params": params}

    made = await generate(**asked, messages=[message(1, "the name")])
    check(served, made, processor, [1])
    # The next turn goes on from the tokens of this one, with one more image; the first one is not encoded again.
    bridged = renderer.bridge_to_next_turn(
        made["prompt_ids"], made["completion_ids"], [message(2, "of the value")],
        previous_multi_modal_data=made["multi_modal_data"],
    )  # fmt: skip
    assert bridged is not None
    second = await generate(
        **asked, messages=[], prompt_ids=bridged.token_ids, multi_modal_data=bridged.multi_modal_data
    )
    assert second["prompt_ids"][: len(made["prompt_ids"])] == made["prompt_ids"]
    check(served, second, processor, [1, 2])
    # The server's processor instead of the client's.
    raw = await generate(**asked, messages=[message(1, "the name")], process_multimodal=False)
    for name in ("prompt_ids", "completion_ids", "completion_logprobs"):
        assert raw[name] == made[name], name
    assert len(raw["mm_placeholders"]["image"]) == 1 and len(raw["renderer_prompt_ids"]) < len(raw["prompt_ids"])
    await client.close()


def main(_url: str, _folder: str, model: str) -> None:
    torch.set_num_threads(1)
    tokenizer = train_tokenizer()
    tokenizer.add_tokens(WORDS, special_tokens=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = make_folder("qwen3_vl", tokenizer, Path(scratch))
        service = RolloutService(Engine(folder, EngineConfig(kv_cache="256 blocks", max_num_seqs=8)))
        config = HttpConfig(port=0, model_name=model)
        with serve_in_background(service, config) as server, Served(server) as served:
            asyncio.run(talk(served, folder, model))
        service.close()
    print("renderers with images: done")


main(*sys.argv[1:])
