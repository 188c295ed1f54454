"""renderers (0.1.12), the client that verifiers and prime-rl generate with: messages in, tokens and a message out.

python renderers_program.py URL TOKENIZER_FOLDER MODEL_NAME
"""

from __future__ import annotations

import asyncio
import sys

from openai import AsyncOpenAI, BadRequestError
from renderers import DefaultRendererConfig, OverlongPromptError, create_renderer
from renderers.base import load_tokenizer
from renderers.client import generate

MESSAGES = [{"role": "user", "content": "the name of the value"}]


async def main(url: str, folder: str, model: str) -> None:
    renderer = create_renderer(load_tokenizer(folder), DefaultRendererConfig())
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    params = {"max_tokens": 6, "temperature": 1.0, "seed": 3, "top_p": 1.0, "min_p": 0.0, "top_k": -1}
    asked = {"client": client, "renderer": renderer, "messages": MESSAGES, "model": model, "sampling_params": params}
    made = await generate(**asked, cache_salt="epoch-1", priority=3, extra_headers={"X-Session-ID": "a"})
    again = await generate(**asked)
    assert made["completion_ids"] == again["completion_ids"] and 0 < len(made["completion_ids"]) <= 6, made
    assert made["completion_logprobs"] == again["completion_logprobs"]
    assert len(made["completion_logprobs"]) == len(made["completion_ids"])
    assert made["prompt_ids"] and made["finish_reason"] in ("stop", "length"), made
    assert made["request_id"].startswith("generate-tokens-")
    continued = await generate(**asked, prompt_ids=[*made["prompt_ids"], *made["completion_ids"]])
    assert continued["prompt_ids"][: len(made["prompt_ids"])] == made["prompt_ids"]
    try:
        await generate(**asked, prompt_ids=[5] * 100_000)
        raise AssertionError("a prompt longer than the context was sent")
    except OverlongPromptError as error:
        print(f"as it should be: {error}")
    try:
        await generate(**asked | {"sampling_params": {"temperature": -1}})
        raise AssertionError("a temperature of -1 was taken")
    except BadRequestError as error:
        print(f"as it should be: {error}")
    await client.close()
    print("renderers: done")


asyncio.run(main(*sys.argv[1:]))
