"""Tests of the messages of a chat: their roles, and whether they have content."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch

from lockstep.integration.grpo.tasks.arithmetic import build_tokenizer
from lockstep.integration.http.edge.config import HttpConfig
from lockstep.integration.http.server import serve_in_background
from lockstep.integration.service import RolloutService
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.tests.integration.http.openai.test_openai import small_model

# As most templates, it writes whatever role it is given; it knows one more by name.
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'ipython' %}tool{% else %}{{ message.role }}{% endif %}: "
    "{{ message.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
USER = {"role": "user", "content": "1 + 2?"}
CALL = {"id": "a", "type": "function", "function": {"name": "add", "arguments": "{}"}}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    torch.set_num_threads(1)
    tokenizer = build_tokenizer()
    tokenizer.chat_template = TEMPLATE
    service = RolloutService(Engine(small_model(), EngineConfig(kv_cache=64), tokenizer=tokenizer))
    with service.rollout(), serve_in_background(service, HttpConfig(port=0)) as server:
        yield server.url
    service.close()


def answers(url: str, messages: list[dict[str, Any]]) -> list[httpx.Response]:
    """Ask with the messages, and for their tokens."""
    paths = ("/v1/chat/completions", "/tokenize")
    return [httpx.post(url + path, json={"messages": messages, "max_tokens": 1}, timeout=60) for path in paths]


@pytest.mark.parametrize("role", ["king", "User", "", "assistant "])
def test_a_role_that_is_none_is_refused_by_its_place(url, role):
    for answer in answers(url, [USER, {"role": role, "content": "x"}]):
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "messages.1.role") and repr(role) in error["message"]


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool", "function", "ipython"])
def test_common_roles_and_those_of_the_chat_template_are_taken(url, role):
    assert [answer.status_code for answer in answers(url, [USER, {"role": role, "content": "x"}])] == [200, 200]


@pytest.mark.parametrize("role", ["system", "developer", "user", "tool"])
def test_a_message_without_content_is_refused_by_its_place(url, role):
    for without in ({"role": role, "content": None}, {"role": role}):
        for answer in answers(url, [USER, without]):
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages.1.content")


def test_an_assistant_needs_no_content(url):
    for silent in ({"content": None}, {"content": None, "tool_calls": [CALL]}, {"tool_calls": [CALL]}):
        message = {"role": "assistant", **silent}
        empty = [answer.json() for answer in answers(url, [USER, {"role": "assistant", "content": ""}, USER])]
        for answer, expected in zip(answers(url, [USER, message, USER]), empty, strict=True):
            assert answer.status_code == 200
            if "tokens" in expected:
                assert answer.json()["tokens"] == expected["tokens"]


def test_a_call_that_is_none_is_refused_by_its_place(url):
    wrong = {**CALL, "function": {"name": "add", "arguments": "{"}}
    for call, place in ((wrong, "1.function.arguments"), ({"function": {}}, "1")):
        for answer in answers(url, [USER, {"role": "assistant", "tool_calls": [CALL, call]}]):
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == f"messages.1.tool_calls.{place}"


@pytest.mark.parametrize(("depth", "place"), [(512, "messages"), (513, "messages.1.tool_calls.0.function.arguments")])
def test_arguments_that_are_nested_too_deeply_for_the_template_are_an_error_of_the_request(url, depth, place):
    deep = {**CALL, "function": {"name": "add", "arguments": "[" * depth + "]" * depth}}
    for answer in answers(url, [USER, {"role": "assistant", "tool_calls": [deep]}]):
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, place)
