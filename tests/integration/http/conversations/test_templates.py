"""Tests of sessions over templates that write a conversation in their own ways, with forced answers of a model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from lockstep.rollout.engine import Engine
from lockstep.tests.support.chat.serving import Serve, byte_engine, forced, serving

ASK = {"role": "user", "content": "ask"}
TOOLS = [{"type": "function", "function": {"name": "now", "description": "d", "parameters": {"type": "object"}}}]
# The last answer of a conversation ends otherwise than the earlier ones, as gpt-oss has it.
REWRITTEN = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}"
    "{{ '<|return|>' if loop.last and not add_generation_prompt and m.role == 'assistant' else '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant<|message|>{% endif %}"
)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with byte_engine() as engine:
        yield engine


@pytest.fixture(scope="module")
def serve(engine: Engine) -> Iterator[Serve]:
    with serving(engine) as serve:
        yield serve


def turn(engine: Engine, url: str, id: str, messages: list[Any], answer: str, **fields: object) -> tuple[str, Any]:
    """Return the prompt of a turn of a session, and its message, which is the forced answer."""
    body = {"messages": messages, "max_tokens": 200, "response_format": forced(answer), "return_token_ids": True}
    found = httpx.post(f"{url}/sessions/{id}/v1/chat/completions", json={**body, **fields}, timeout=60)
    assert found.status_code == 200, found.text
    assert engine.tokenizer is not None
    told = found.json()
    return str(engine.tokenizer.decode(told["prompt_token_ids"])), told["choices"][0]["message"]


def test_a_token_that_ends_the_last_answer_alone_is_not_followed_by_the_one_that_ends_others(engine, serve):
    url = serve(REWRITTEN, tool_call_parser="none", reasoning_parser="none")
    assert engine.tokenizer is not None
    stop = {"stop_token_ids": [engine.tokenizer.convert_tokens_to_ids("<|return|>")]}
    _, message = turn(engine, url, "end", [ASK], "hm<|return|>", **stop)
    prompt, _ = turn(engine, url, "end", [ASK, message, ASK], "x", **stop)
    assert prompt.endswith("<|message|>hm<|return|><|start|>user<|message|>ask<|end|><|start|>assistant<|message|>")
