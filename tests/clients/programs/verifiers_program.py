"""verifiers (0.4): its clients of training (token ids) and of evaluation (chat, whole and streamed).

python verifiers_program.py URL TOKENIZER_FOLDER MODEL_NAME
"""

from __future__ import annotations

import asyncio
import sys

from renderers import DefaultRendererConfig
from verifiers.v1.clients.client import resolve_client
from verifiers.v1.configs.client import EvalClientConfig, TrainClientConfig
from verifiers.v1.dialects import ChatDialect
from verifiers.v1.types import SamplingConfig


async def main(url: str, folder: str, model: str) -> None:
    where = {"base_url": f"{url}/v1", "api_key_var": "LOCKSTEP_API_KEY"}
    sampling = SamplingConfig(temperature=1.0, max_tokens=6, seed=3)
    body = {"model": model, "messages": [{"role": "user", "content": "the name"}], "max_tokens": 6, "seed": 3}
    train = resolve_client(
        TrainClientConfig(**where, renderer=DefaultRendererConfig(), renderer_model_name=folder)
    )  # fmt: skip
    responses = [await train.get_response(ChatDialect(), body, sampling, session_id="a") for _ in range(2)]
    for response in responses:
        assert response.tokens.completion_ids and response.tokens.prompt_ids, response
        assert len(response.tokens.completion_logprobs) == len(response.tokens.completion_ids)
        assert response.finish_reason in ("stop", "length")
    assert responses[0].tokens.completion_ids == responses[1].tokens.completion_ids
    await train.close()
    evaluation = resolve_client(EvalClientConfig(**where))
    response = await evaluation.get_response(ChatDialect(), body, sampling, session_id="a")
    assert response.message.content is not None and response.usage.completion_tokens > 0, response
    reply = await evaluation.relay(ChatDialect(), body | {"stream": True}, session_id="a")
    events = [event async for event in reply.chunks]
    await reply.close()
    assert events[-1].strip() == b"data: [DONE]" and len(events) > 2, events
    await evaluation.close()
    print("verifiers: done")


asyncio.run(main(*sys.argv[1:]))
