"""Random conversations over sessions: tokens of earlier turns never change, and every log-probability is the one of a
single forward of the trainer over the whole conversation, in every bit."""

from __future__ import annotations

import json
import random
import time
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from lockstep.integration.http.edge.config import HttpConfig
from lockstep.integration.http.server import serve_in_background
from lockstep.tests.integration.http.conversations.conftest import TOKENIZERS, Served, make_service
from lockstep.tests.rollout.engine.callers import assert_idle, trainer_logprobs

NUM_THREADS = 8
MAX_HISTORY = 200  # tokens after which a conversation in the small pool ends, so that another turn fits always
PIECES = (
    "hello", " the number", "\n", "  ", "città", "ключ", "東京", "\U0001f469\u200d\U0001f467", "e\u0301", "\u202e",
    "\x00", "<|im_end|>", "<|im_start|>user\n", "<|eot_id|>", "<|begin_of_text|>", "<think>", "</think>", "<tool_call>",
    "</tool_response>", "{{ 1 }}", "{% raw %}", '"}', "0.25",
)  # fmt: skip
THOUGHT = "<think>\n[a-z ]{1,8}\n</think>\n\n[a-z ]{1,8}"
TOWN = {"type": "string", "enum": ["città", "東京", "New York"]}
SCHEMA = {"type": "object", "properties": {"town": TOWN, "days": {"type": "integer"}}, "required": ["town"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]


@dataclass
class Conversation:
    """One conversation: what a client knows of it, and what each of its answers said."""

    temperature: float
    kwargs: dict[str, Any]
    tools: list[dict[str, Any]] | None
    messages: list[dict[str, Any]] = field(default_factory=list)
    history: list[int] = field(default_factory=list)
    answers: list[tuple[int, list[float]]] = field(default_factory=list)  # start and log-probabilities of each output
    num_differing: int = 0  # prompts that the template would have written otherwise
    has_thoughts: bool = False
    num_calls: int = 0


def text_of(draw: random.Random) -> str:
    return "".join(draw.choices(PIECES, k=draw.randint(1, 6)))


def new_messages(draw: random.Random, talk: Conversation) -> list[dict[str, Any]]:
    if not talk.messages:
        system = [{"role": "system", "content": text_of(draw)}] if draw.random() < 0.5 else []
        return [*system, {"role": "user", "content": text_of(draw)}]
    if called := talk.messages[-1].get("tool_calls"):
        return [{"role": "tool", "tool_call_id": one["id"], "content": text_of(draw)} for one in called]
    if draw.random() < 0.4:
        return [{"role": "tool", "content": text_of(draw)} for _ in range(draw.randint(1, 2))]
    return [{"role": "user", "content": text_of(draw)}]


def settings(draw: random.Random, talk: Conversation) -> dict[str, Any]:
    body: dict[str, Any] = {
        "max_tokens": draw.randint(1, 16), "seed": draw.randrange(2**31), "temperature": talk.temperature,
        "logprobs": True, "return_token_ids": True, "chat_template_kwargs": talk.kwargs,
    }  # fmt: skip
    if talk.tools is not None:
        body["tools"] = talk.tools
    kind = draw.random()
    if talk.tools is not None and kind < 0.5:
        body |= {"tool_choice": "required", "parallel_tool_calls": kind < 0.2, "max_tokens": 90}
    elif kind < 0.2:
        body |= {"regex": THOUGHT, "max_tokens": 40}
    elif kind < 0.4:
        body |= {"stop": ["e", "\n"]}
    elif kind < 0.6:
        body |= {"ignore_eos": True}
    return body


def as_templates_read(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with the arguments of its calls as objects, and a text where there is no content."""
    calls = [
        {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
        for call in message.get("tool_calls") or ()
    ]
    return {**message, "content": message["content"] or "", **({"tool_calls": calls} if calls else {})}


def converse(served: Served, kind: str, seed: int, max_history: int | None) -> Conversation:
    draw, tokenizer = random.Random(f"{kind} {seed}"), TOKENIZERS[kind]()
    tools = TOOLS if draw.random() < 0.5 else None
    kwargs = {"enable_thinking": False} if draw.random() < 0.3 else {}
    talk = Conversation(draw.choice((0.7, 1.0)), kwargs, tools)
    id = served.open()
    for number in range(draw.randint(2, 5)):
        if max_history is not None and len(talk.history) > max_history:
            break
        new = new_messages(draw, talk)
        given = [*talk.messages, *new] if draw.random() < 0.5 or not number else new
        answer = served.chat(id, given, **settings(draw, talk))
        [choice] = answer["choices"]
        prompt = choice["prompt_token_ids"]
        assert prompt[: len(talk.history)] == talk.history, "tokens of earlier turns stand"
        assert answer["session"]["num_history_tokens"] == len(talk.history)
        talk.messages += new
        text = tokenizer.apply_chat_template(
            list(map(as_templates_read, talk.messages)),
            tools=tools,
            tokenize=False,
            add_generation_prompt=True,
            **kwargs,
        )
        theirs = tokenizer(text, add_special_tokens=False)["input_ids"]
        expected = next((i for i, pair in enumerate(zip(prompt, theirs, strict=False)) if pair[0] != pair[1]), None)
        if expected is None and len(prompt) != len(theirs):
            expected = min(len(prompt), len(theirs))
        assert answer["session"]["template_differs_at"] == expected
        talk.num_differing += expected is not None
        talk.has_thoughts |= bool(choice["message"].get("reasoning_content"))
        for call in choice["message"].get("tool_calls") or ():
            assert call["function"]["name"] == "weather"
            assert json.loads(call["function"]["arguments"])["town"] in TOWN["enum"]
            talk.num_calls += 1
        added = tokenizer.decode(prompt[len(talk.history) :])
        assert text.endswith(added) or text.endswith(added.removeprefix(tokenizer.eos_token)), "what the template adds"
        talk.answers.append((len(prompt), [one["logprob"] for one in choice["logprobs"]["content"]]))
        talk.history = prompt + choice["token_ids"]
        talk.messages.append(choice["message"])
    served.ok("/close_session", session_id=id)
    return talk


def run(kind: str, num_conversations: int, record_property: Any, *, is_small: bool = False) -> list[Conversation]:
    """Run conversations and check them. is_small: in a pool where blocks are evicted, and with pauses for which
    sequences give theirs back."""
    service = make_service(kind, **({"kv_cache": "28 blocks", "admission_ratio": 0} if is_small else {}))
    began = time.monotonic()
    with service.rollout(), serve_in_background(service, HttpConfig(port=0)) as server:
        with (
            httpx.Client(base_url=server.url, timeout=60) as client,
            ThreadPoolExecutor(NUM_THREADS) as pool,
        ):
            served = Served(service, server, client)
            running = [
                pool.submit(converse, served, kind, seed, MAX_HISTORY if is_small else None)
                for seed in range(num_conversations)
            ]
            while is_small and wait(running, timeout=0.02).not_done:  # often: a pause may come between two turns
                service.engine.pause_generation("retract")
                service.engine.continue_generation()
            talks = [one.result() for one in running]
            assert client.get("/state").json()["conversations"]["num_bytes"] == 0
        server.close()
        assert_idle(service.engine)
    generated, state = time.monotonic(), service.engine.state()
    pressed = {"evicted": state["num_evicted_blocks"], "retracted": state["metrics"]["num_retractions"]}
    assert not is_small or (pressed["evicted"] and pressed["retracted"]), pressed
    for talk in talks:
        expected = trainer_logprobs(service.engine, talk.history, talk.temperature)
        for start, logprobs in talk.answers:
            assert logprobs == expected[start - 1 : start - 1 + len(logprobs)]
    num_turns = sum(len(talk.answers) for talk in talks)
    record_property(
        "figures",
        f"{kind}: {len(talks)} conversations, {num_turns} turns, {sum(len(talk.history) for talk in talks)} tokens, "
        f"{sum(talk.num_calls for talk in talks)} calls, "
        f"{sum(talk.num_differing for talk in talks)} prompts that the template writes otherwise; "
        f"{pressed}; {generated - began:.1f} s generated, {time.monotonic() - generated:.1f} s in forwards",
    )
    return talks


@pytest.mark.parametrize("kind", ["chatml", "llama"])
def test_tokens_stand_and_log_probabilities_are_those_of_one_forward(kind, record_property):
    talks = run(kind, 10, record_property)
    assert any(talk.num_differing for talk in talks), "some templates would have written it otherwise"
    assert any(talk.num_calls for talk in talks)
    assert kind == "llama" or any(talk.has_thoughts for talk in talks)


def test_tokens_stand_where_blocks_are_evicted_and_sequences_retracted(record_property):
    run("chatml", 8, record_property, is_small=True)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["chatml", "llama"])
def test_tokens_stand_in_a_thousand_conversations(kind, record_property):
    run(kind, 500, record_property)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["chatml", "llama"])
def test_tokens_stand_in_many_conversations_in_a_small_pool(kind, record_property):
    run(kind, 100, record_property, is_small=True)
