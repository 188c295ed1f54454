"""Tests of OpenAI's endpoints by the openai package over a real socket."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator

import httpx
import openai
import pytest
import torch
from transformers import PreTrainedModel

from lockstep.integration.grpo.tasks.arithmetic import build_tokenizer
from lockstep.integration.http.edge.config import HttpConfig
from lockstep.integration.http.server import serve_in_background
from lockstep.integration.service import RolloutService
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.tests.support.random_models import random_model

PATIENCE = 30.0
CONTEXT = 256
PROMPT = "What is 347 + 285?\n"
MESSAGES = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1 + 2?"}]
TEMPLATE = (
    "{% for message in messages %}{% if message.role not in ('system', 'user', 'assistant') %}"
    "{{ raise_exception('no such role') }}{% endif %}{{ message.role }}: {{ message.content + '\n' }}{% endfor %}"
    "{% if mood %}({{ mood }}){% endif %}{% if add_generation_prompt %}assistant: {% endif %}"
)
AS_ONE = "system: Add.\nuser: 1 + 2?\nassistant: "


def small_model() -> PreTrainedModel:
    """Make a model with every token of the tokenizer."""
    return random_model("qwen3", vocab_size=128, max_position_embeddings=CONTEXT)


@pytest.fixture(scope="module")
def service() -> Iterator[RolloutService]:
    torch.set_num_threads(1)
    tokenizer = build_tokenizer()
    tokenizer.chat_template = TEMPLATE
    service = RolloutService(Engine(small_model(), EngineConfig(kv_cache=64), tokenizer=tokenizer))
    with service.rollout():
        yield service
        service.engine.stop()


@pytest.fixture(scope="module")
def url(service: RolloutService) -> Iterator[str]:
    with serve_in_background(service, HttpConfig(port=0, model_name="small")) as server:
        yield server.url


@pytest.fixture
def client(url: str, service: RolloutService) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE) as client:
        yield client
    deadline, tick = time.monotonic() + PATIENCE, threading.Event()
    while service.engine.state()["num_running"] + service.engine.state()["num_waiting"]:
        assert time.monotonic() < deadline, "requests are left"
        tick.wait(0.005)
    service.engine.check_integrity()
    assert service.engine.state()["num_held_blocks"] == 0


def direct(service: RolloutService, prompt, **params):
    """Return the Python API's answer to one prompt."""
    return service.engine.generate([prompt], SamplingParams(**params))[0]


def a_chat(client: openai.OpenAI, **fields):
    return client.chat.completions.create(**{"model": "small", "messages": MESSAGES, "temperature": 0, **fields})


def a_completion(client: openai.OpenAI, **fields):
    return client.completions.create(**{"model": "small", "prompt": PROMPT, "temperature": 0, **fields})


# -- completions ----------------------------------------------------------------------------------------------------


def test_completion_is_that_of_the_python_api_with_sixteen_tokens_by_default(client, service):
    expected = direct(service, PROMPT, temperature=0, max_new_tokens=16, ignore_eos=True)
    answer = a_completion(client, extra_body={"ignore_eos": True})
    [choice] = answer.choices
    assert (answer.object, answer.model) == ("text_completion", "small") and answer.id.startswith("cmpl-")
    assert choice.text == expected.text and choice.finish_reason == "length" and choice.index == 0
    num_prompt = len(expected.prompt_ids)
    counts = (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens)
    assert counts == (num_prompt, 16, num_prompt + 16)
    assert answer.metadata["weight_version"] == "default"


def test_prompts_may_be_texts_or_token_ids_alone_or_many(client, service):
    ids = service.engine.tokenizer(PROMPT)["input_ids"]
    [expected] = {choice.text for choice in a_completion(client).choices}
    assert a_completion(client, prompt=ids).choices[0].text == expected
    assert [choice.text for choice in a_completion(client, prompt=[ids, ids]).choices] == [expected] * 2
    sampled = {"n": 2, "seed": 4, "temperature": 1, "max_tokens": 4, "extra_body": {"ignore_eos": True}}
    many = a_completion(client, prompt=[PROMPT, "b"], **sampled)
    assert [choice.index for choice in many.choices] == [0, 1, 2, 3]
    assert many.usage.completion_tokens == 16, "two samples of each of two prompts"
    alone = a_completion(client, prompt="b", **sampled)
    assert [choice.text for choice in many.choices[2:]] == [choice.text for choice in alone.choices]
    assert many.usage.prompt_tokens == len(ids) + alone.usage.prompt_tokens, "a prompt counts once"


def test_seed_repeats_and_another_seed_does_not(client):
    def text(seed: int) -> str:
        return a_completion(client, seed=seed, temperature=1).choices[0].text

    assert text(1) == text(1) != text(2)


def test_stop_is_trimmed_and_named(client):
    whole = a_completion(client).choices[0].text
    stop = whole[3:5]
    [choice] = a_completion(client, stop=[stop, "never"]).choices
    assert choice.text == whole[: whole.index(stop)] and choice.finish_reason == "stop"
    assert choice.matched_stop == stop
    [kept] = a_completion(client, stop=stop, extra_body={"no_stop_trim": True}).choices
    assert stop in kept.text


def test_log_probabilities_of_completions(client, service):
    expected = direct(service, PROMPT, temperature=0, max_new_tokens=4)
    [choice] = a_completion(client, max_tokens=4, logprobs=2).choices
    found, decode = choice.logprobs, service.engine.tokenizer.decode
    assert found.token_logprobs == list(expected.logprobs)
    assert found.tokens == [decode([id]) for id in expected.token_ids]
    assert [len(ranked) for ranked in found.top_logprobs] == [2] * 4
    for token, logprob, ranked in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True):
        assert next(iter(ranked.items())) == (token, logprob), "greedy: the likeliest is the chosen one"
    assert found.text_offset[0] == 0 and found.text_offset[1] == len(found.tokens[0])
    alone = a_completion(client, max_tokens=4, logprobs=0).choices[0].logprobs
    pairs = zip(alone.tokens, alone.token_logprobs, strict=True)
    assert alone.top_logprobs == [{token: logprob} for token, logprob in pairs], "the drawn token alone"
    streamed = [c.choices[0].logprobs for c in a_completion(client, max_tokens=4, logprobs=0, stream=True)]
    assert [at for part in streamed for at in part.top_logprobs] == alone.top_logprobs


def test_the_drawn_token_is_among_the_likeliest_of_a_completion_wherever_it_ranks(client):
    choices = a_completion(client, max_tokens=20, logprobs=1, temperature=1.5, seed=4, n=4).choices
    found = [
        (at, *pair)
        for c in choices
        for at, *pair in zip(c.logprobs.top_logprobs, c.logprobs.tokens, c.logprobs.token_logprobs, strict=True)
    ]
    assert all(ranked[token] >= logprob for ranked, token, logprob in found)
    assert {len(ranked) for ranked, _, _ in found} == {1, 2}


def test_echo_puts_the_prompt_first_and_scores_it(client, service):
    whole = a_completion(client, max_tokens=4, echo=True).choices[0]
    assert whole.text == PROMPT + a_completion(client, max_tokens=4).choices[0].text
    [scored] = a_completion(client, max_tokens=0, echo=True, logprobs=1).choices
    ids = service.engine.tokenizer(PROMPT)["input_ids"]
    assert scored.text == PROMPT and len(scored.logprobs.token_logprobs) == len(ids)
    assert scored.logprobs.token_logprobs[0] is None and scored.logprobs.top_logprobs[0] is None
    with torch.no_grad():
        rows = torch.log_softmax(small_model()(torch.tensor([ids])).logits[0], -1)
    wanted = rows[:-1].gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
    assert scored.logprobs.token_logprobs[1:] == pytest.approx(wanted, abs=1e-4)
    as_ids = a_completion(client, prompt=ids, max_tokens=4, echo=True).choices[0]
    assert as_ids.text == whole.text
    [streamed] = ["".join(c.choices[0].text for c in a_completion(client, max_tokens=4, echo=True, stream=True))]
    assert streamed == whole.text


def test_streamed_completion_adds_up_and_ends_with_usage(client):
    ask = {"max_tokens": 6, "logprobs": 1, "extra_body": {"speculation": False}}  # else it may come in one step
    whole = a_completion(client, **ask)
    chunks = list(a_completion(client, **ask, stream=True, stream_options={"include_usage": True}))
    *pieces, last = chunks
    assert last.choices == [] and last.usage.completion_tokens == whole.usage.completion_tokens
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens
    assert all(piece.usage is None for piece in pieces) and len(pieces) > 1
    choices = [piece.choices[0] for piece in pieces]
    assert "".join(choice.text for choice in choices) == whole.choices[0].text
    assert [choice.finish_reason for choice in choices] == [None] * (len(choices) - 1) + ["length"]
    for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
        added = [entry for choice in choices for entry in getattr(choice.logprobs, name)]
        assert added == getattr(whole.choices[0].logprobs, name), name
    assert len({piece.id for piece in pieces}) == 1
    plain = list(a_completion(client, **ask, stream=True))
    assert all(piece.choices for piece in plain), "no usage chunk unless asked for"


def test_engines_own_settings_pass_through(client, service):
    settings = {
        "top_k": 3, "min_p": 0.1, "repetition_penalty": 1.2, "min_tokens": 2, "ignore_eos": True,
        "skip_special_tokens": False,
    }  # fmt: skip
    expected = direct(
        service, PROMPT, max_new_tokens=8, sampling_seed=9, top_k=3, min_p=0.1, repetition_penalty=1.2,
        min_new_tokens=2, ignore_eos=True, skip_special_tokens=False, logit_bias={20: 3.0}, frequency_penalty=0.5,
        presence_penalty=0.5, temperature=0.8, top_p=0.9,
    )  # fmt: skip
    [choice] = a_completion(
        client, max_tokens=8, seed=9, temperature=0.8, top_p=0.9, logit_bias={"20": 3}, frequency_penalty=0.5,
        presence_penalty=0.5, extra_body={**settings, "return_token_ids": True},
    ).choices  # fmt: skip
    assert choice.response_token_ids == list(expected.token_ids) == choice.token_ids
    assert choice.prompt_token_ids == list(expected.prompt_ids)


# -- chat -----------------------------------------------------------------------------------------------------------


def test_chat_goes_through_the_template_and_fills_the_context_by_default(client, service):
    ids = service.engine.tokenizer(AS_ONE, add_special_tokens=False)["input_ids"]
    expected = direct(service, ids, temperature=0, max_new_tokens=CONTEXT - len(ids))
    answer = a_chat(client)
    [choice] = answer.choices
    assert answer.object == "chat.completion" and choice.message.role == "assistant"
    assert choice.message.content == expected.text and answer.usage.prompt_tokens == len(ids)
    assert choice.finish_reason == expected.finish_reason.type
    for name in ("max_tokens", "max_completion_tokens"):
        assert a_chat(client, **{name: 3}).usage.completion_tokens == 3


def test_template_can_be_passed_by_or_given_more(client, service):
    ids = service.engine.tokenizer(AS_ONE, add_special_tokens=False)["input_ids"]
    expected = a_chat(client, max_tokens=5).choices[0].message.content
    bypassed = client.post(
        "/chat/completions", body={"input_ids": ids, "max_tokens": 5, "temperature": 0}, cast_to=httpx.Response
    ).json()
    assert bypassed["choices"][0]["message"]["content"] == expected and bypassed["model"] == "small"
    parts = [{"role": "system", "content": [{"type": "text", "text": "Ad"}, {"type": "text", "text": "d."}]}]
    assert a_chat(client, max_tokens=5, messages=[*parts, MESSAGES[1]]).choices[0].message.content == expected

    def prompt(**extra: object) -> str:
        answer = a_chat(client, max_tokens=1, extra_body={"return_prompt_token_ids": True, **extra})
        return service.engine.tokenizer.decode(answer.choices[0].prompt_token_ids)

    assert prompt() == AS_ONE
    assert "(glad)" in prompt(chat_template_kwargs={"mood": "glad"})
    assert prompt(add_generation_prompt=False) == AS_ONE.removesuffix("assistant: ")


def test_chat_log_probabilities_and_what_it_tells_about_itself(client, service):
    extra = {"return_meta_info": True, "return_prompt_token_ids": True, "return_token_ids": True}
    answer = a_chat(client, max_tokens=3, logprobs=True, top_logprobs=2, extra_body={**extra, "rid": "chat-1"})
    [choice] = answer.choices
    meta, content = choice.meta_info, choice.logprobs.content
    assert answer.id == "chat-1" == meta["id"] and meta["completion_tokens"] == 3
    assert [entry.logprob for entry in content] == [triple[0] for triple in meta["output_token_logprobs"]]
    assert [triple[1] for triple in meta["output_token_logprobs"]] == choice.response_token_ids
    for entry in content:
        assert len(entry.top_logprobs) == 2 and entry.top_logprobs[0].token == entry.token
        assert bytes(entry.bytes).decode() == entry.token
    [span] = answer.weight_versions
    assert (span["version"], span["start"], span["end"]) == ("default", 0, 3)


def test_streamed_chat_adds_up_sample_by_sample(client):
    ask = {"max_tokens": 5, "n": 2, "temperature": 1, "seed": 2, "logprobs": True}
    whole = a_chat(client, **ask)
    chunks = list(a_chat(client, **ask, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].usage.completion_tokens == 10 and chunks[-1].choices == []
    assert chunks[0].object == "chat.completion.chunk"
    for index, expected in enumerate(whole.choices):
        mine = [chunk.choices[0] for chunk in chunks[:-1] if chunk.choices[0].index == index]
        assert mine[0].delta.role == "assistant"
        assert "".join(choice.delta.content for choice in mine) == expected.message.content
        assert mine[-1].finish_reason == "length"
        logprobs = [entry.logprob for choice in mine if choice.logprobs for entry in choice.logprobs.content]
        assert logprobs == [entry.logprob for entry in expected.logprobs.content]


def test_streams_carry_token_ids_and_meta_info(client):
    extra = {"return_token_ids": True, "return_meta_info": True}
    answer = a_chat(client, max_tokens=4, extra_body=extra)
    chunks, whole = list(a_chat(client, max_tokens=4, extra_body=extra, stream=True)), answer.choices[0]
    choices = [chunk.choices[0] for chunk in chunks]
    assert choices[0].prompt_token_ids == whole.prompt_token_ids == chunks[0].prompt_token_ids
    assert answer.prompt_token_ids == whole.prompt_token_ids
    assert not any(hasattr(chunk, "prompt_token_ids") for chunk in chunks[1:])
    streamed = [id for choice in choices[1:] for id in choice.response_token_ids]
    assert streamed == whole.response_token_ids
    assert choices[-1].meta_info["output_token_logprobs"] == whole.meta_info["output_token_logprobs"]


def test_the_last_chunk_of_a_sequence_names_the_weights_as_a_whole_answer_does(client, service):
    fields = {"model": "small", "max_tokens": 4, "seed": 3, "extra_body": {"ignore_eos": True}}
    asked = {
        client.completions: {"prompt": [1, 2, 3]},
        client.chat.completions: {"messages": [{"role": "user", "content": "a"}]},
    }
    for api, prompt in asked.items():
        whole = api.create(**fields, **prompt).model_dump()
        chunks = [chunk.model_dump() for chunk in api.create(**fields, **prompt, n=2, stream=True)]
        last = [chunk for chunk in chunks if chunk["choices"] and chunk["choices"][0]["finish_reason"]]
        assert len(last) == 2
        for chunk in last:
            assert chunk["weight_versions"] == [{"version": "default", "start": 0, "end": 4}]
            for name in ("metadata", "weight_digest", "weight_versions"):
                assert chunk[name] == whole[name]
        assert all("weight_versions" not in chunk for chunk in chunks if chunk not in last)


def test_stream_that_is_left_is_aborted(client, service):
    before = service.engine.metrics.num_aborted
    with a_completion(client, max_tokens=200, stream=True, extra_body={"ignore_eos": True}) as stream:
        next(iter(stream))
    deadline, tick = time.monotonic() + PATIENCE, threading.Event()
    while service.engine.metrics.num_aborted == before:
        assert time.monotonic() < deadline
        tick.wait(0.005)


def test_aborted_request_ends_with_that_reason(client, service):
    with a_completion(client, max_tokens=200, stream=True, extra_body={"ignore_eos": True, "rid": "gone"}) as stream:
        first = next(iter(stream))
        service.engine.abort_request("gone")
        rest = list(stream)
    assert first.choices[0].finish_reason is None and rest[-1].choices[0].finish_reason == "abort"


# -- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"temperature": False}, "temperature"),
        ({"logit_bias": {"5": 1, "7": True}}, "logit_bias.7"),
        ({"logit_bias": {"5": False}}, "logit_bias.5"),
        ({"stop": 13}, "stop"),  # a token id is no text
        ({"stop": ["a", 13]}, "stop"),
        ({"extra_body": {"stop_regex": "(?:(?:(?:x?){100}){100}){100}y"}}, "stop_regex"),
        ({"extra_body": {"stop_token_ids": [128]}}, "stop_token_ids"),
        ({"extra_body": {"stop_token_ids": [True]}}, "stop_token_ids.0"),
        ({"n": 0}, "n"),
        ({"n": 10**7}, "n"),
        ({"seed": 2**70}, "seed"),
        ({"stop": [""]}, "stop"),
        ({"logprobs": "many"}, "logprobs"),
        ({"stream_options": 3}, "stream_options"),
        ({"extra_body": {"min_tokens": -2}}, "min_tokens"),
        ({"extra_body": {"lora_path": "adapter"}}, "lora_path"),
        ({"extra_body": {"regex": ""}}, "regex"),
        ({"extra_body": {"response_format": {"type": "xml"}}}, "response_format"),
        ({"extra_body": {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}}, "response_format"),
    ],
)
@pytest.mark.parametrize("call", [a_chat, a_completion])
def test_mistakes_of_either_call_name_the_parameter(client, call, fields, param):
    with pytest.raises(openai.BadRequestError) as caught:
        call(client, **fields)
    assert caught.value.param == param and param in caught.value.message
    assert caught.value.type == "invalid_request_error"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": 13}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [128]}, "prompt"),
        ({"prompt": [1] * (CONTEXT + 1)}, "prompt"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"echo": True, "logprobs": 1, "stream": True}, "echo"),
    ],
)
def test_mistakes_of_completions_name_the_parameter(client, fields, param):
    with pytest.raises(openai.BadRequestError) as caught:
        a_completion(client, **fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [{"content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0.image_url"),
        ({"messages": [*MESSAGES, {"role": "wizard", "content": "x"}]}, "messages.2.role"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": "x" * CONTEXT}]}, "messages"),
        ({"extra_body": {"input_ids": [1]}}, "messages"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"extra_body": {"chat_template": "{{ 1 }}"}}, "chat_template"),
        ({"extra_body": {"chat_template_kwargs": {"tokenize": False}}}, "chat_template_kwargs"),
        ({"extra_body": {"chat_template_kwargs": {"mood": "x" * 100_000}}}, "messages"),
    ],
)
def test_mistakes_of_chats_name_the_parameter(client, fields, param):
    with pytest.raises(openai.BadRequestError) as caught:
        a_chat(client, **fields)
    assert caught.value.param == param


def test_harmless_fields_are_taken(client):
    text_only = {"type": "text"}
    answer = a_chat(
        client, max_tokens=2, response_format=text_only, modalities=["text"], user="me", store=False,
        tool_choice="none", service_tier="auto", parallel_tool_calls=False, extra_body={"tools": None, "unknown": [1]},
    )  # fmt: skip
    assert answer.usage.completion_tokens == 2


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_body_that_is_no_json_is_a_400_in_openais_shape(url, path):
    for kind, content in (("text/plain", b'{"prompt": "a"}'), ("application/json", b"{"), ("application/json", b"[]")):
        response = httpx.post(url + path, content=content, headers={"Content-Type": kind})
        error = response.json()["error"]
        assert response.status_code == 400 and error["type"] == "invalid_request_error" and error["message"]
    fine = {"prompt": "a", "input_ids": [5], "max_tokens": 1}
    kind = "application/json; charset=utf-8"
    assert httpx.post(url + path, json=fine, headers={"Content-Type": kind}).status_code == 200


def test_async_client_streams_too(url):
    async def texts() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:

            async def one() -> str:
                stream = await client.completions.create(model="small", prompt=PROMPT, temperature=0, stream=True)
                return "".join([chunk.choices[0].text async for chunk in stream])

            return await asyncio.gather(*(one() for _ in range(8)))

    assert len(set(asyncio.run(texts()))) == 1
