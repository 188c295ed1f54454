"""SkyRL's RemoteInferenceClient (0.3): generation, control, and its update of weights over a gloo group.

python skyrl_program.py URL MODEL_FOLDER MODEL_NAME
"""

from __future__ import annotations

import asyncio
import sys
import typing
from dataclasses import dataclass

import aiohttp
import typing_extensions

if sys.version_info < (3, 12):  # before it pydantic refuses the standard library's, which SkyRL takes
    typing.TypedDict = typing_extensions.TypedDict

from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteInferenceClient

from lockstep.tests.clients.gloo_sender import GlooSender

PROMPTS = [[5, 17, 9], [40, 41, 42, 43]]


@dataclass
class InitInfo:
    """What its BroadcastInitInfo does, whose module imports ray."""

    values: dict

    def for_servers(self, world_size_per_server: int, num_servers: int, dp_size: int = 1) -> list[InitInfo]:
        return [
            InitInfo(self.values | {"rank_offset": 1 + index // dp_size * world_size_per_server})
            for index in range(num_servers)
        ]

    def to_api_payload(self) -> dict:
        return self.values


async def main(url: str, folder: str, model: str) -> None:
    async with RemoteInferenceClient(url, [url], data_parallel_size=1, model_name=model) as client:
        await generates(client)
        await controls(client)
        for packed in (True, False):
            await updates(client, url, folder, packed)
    print("SkyRL: done")


async def generates(client: RemoteInferenceClient) -> None:
    params = {"max_tokens": 6, "temperature": 1.0, "seed": 3, "logprobs": 0, "top_p": 1.0, "top_k": -1, "min_p": 0.0,
              "repetition_penalty": 1.0, "include_stop_str_in_output": True, "skip_special_tokens": True}  # fmt: skip
    batch = {"prompt_token_ids": PROMPTS, "sampling_params": params, "session_ids": ["a", "b"], "cache_salt": "1"}
    made = await client.generate(batch)
    assert [len(ids) == len(logprobs) > 0 for ids, logprobs in
            zip(made["response_ids"], made["response_logprobs"], strict=True)] == [True, True], made  # fmt: skip
    assert set(made["stop_reasons"]) <= {"stop", "length"} and all(isinstance(text, str) for text in made["responses"])
    again = await client.generate(batch)
    assert again == made
    prompt = {"chunks": [{"type": "encoded_text", "tokens": PROMPTS[1]}]}
    sampled = await client.sample({"json": {
        "prompt": prompt, "num_samples": 2, "include_prompt_logprobs": True, "topk_prompt_logprobs": 2,
        "sampling_params": {"max_tokens": 4, "seed": 1, "temperature": 1.0, "stop_tokens": [0]},
    }})  # fmt: skip
    assert len(sampled["sequences"]) == 2 and len(sampled["prompt_logprobs"]) == len(PROMPTS[1]), sampled
    assert [len(top) for top in sampled["topk_prompt_logprobs"][1:]] == [2] * (len(PROMPTS[1]) - 1)
    messages = [{"role": "user", "content": "the name"}]
    chat = await client.chat_completion({"json": {"messages": messages, "max_tokens": 4, "session_id": "a"}})
    assert chat["choices"][0]["message"]["role"] == "assistant", chat
    whole = await client.completion({"json": {"prompt": "the name", "max_tokens": 4}})
    assert whole["usage"]["completion_tokens"] > 0
    [ids] = await client.tokenize(["the name of the value"], add_special_tokens=False)
    assert await client.detokenize([ids]) == ["the name of the value"]
    refused = None
    try:
        await client.generate({"prompt_token_ids": [[-1]], "sampling_params": params})
    except aiohttp.ClientResponseError as error:
        refused = error
    assert refused is not None and refused.status == 400 and "token_ids" in refused.message, refused


async def controls(client: RemoteInferenceClient) -> None:
    assert await client.get_world_size() == (1, 1)
    long = {"prompt_token_ids": PROMPTS[:1], "sampling_params": {"max_tokens": 150, "seed": 1, "ignore_eos": True}}
    alone = await client.generate(long)
    running = asyncio.create_task(client.generate(long))
    async with aiohttp.ClientSession() as session:
        while not (await (await session.get(f"{client.proxy_url}/state")).json())["num_running"]:
            assert not running.done(), "it ended before it could be paused"
    for said in (await client.pause_generation()).values():
        assert said["body"]["status"] == "paused"
    assert not running.done()
    await client.resume_generation()
    assert await running == alone, "a request that was paused and kept goes on with its tokens"
    for mode in ("wait", "abort"):
        await client.pause(mode)
        await client.resume()
    for said in (await client.reset_prefix_cache()).values():
        assert said["body"] == {"success": True}
    await client.sleep(level=1, tags=["kv_cache"])
    await client.wake_up(["kv_cache"])
    assert await client.generate(long) == alone
    await client.finish_session("a")


async def updates(client: RemoteInferenceClient, url: str, folder: str, packed: bool) -> None:
    sender = GlooSender(folder, packed)
    values = {key: value for key, value in sender.init_info.items() if key != "packed"}
    joining = asyncio.create_task(client.init_weight_update_communicator(InitInfo(values)))
    await asyncio.to_thread(sender.join)
    await joining
    await client.pause_generation()
    await client.start_weight_update(is_checkpoint_format=True)
    updating = asyncio.create_task(client.update_weights_nccl({**sender.update_info, "packed": packed}))
    await asyncio.to_thread(sender.send)
    await updating
    await client.finish_weight_update()
    await client.resume_generation()
    async with aiohttp.ClientSession() as session, session.get(f"{url}/model_info") as answer:
        assert (await answer.json())["weight_digest"] == sender.digest
    sender.close()


asyncio.run(main(*sys.argv[1:]))
