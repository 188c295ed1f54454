"""Tests of counts and places of tokens that are not simply an answer's text, and of limits and keys."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch

from lockstep.integration.http.edge.config import HttpConfig
from lockstep.integration.http.server import serve_in_background
from lockstep.integration.service import RolloutService
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.tests.support.bpe_tokenizer import train_tokenizer
from lockstep.tests.support.random_models import random_model

CONTEXT = 256
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "object of the city": {"type": "integer"},
        "value": {"enum": ["true story", "false story"]},
    },
    "required": ["name", "object of the city", "value"],
    "additionalProperties": False,
}
SPECIAL = "<|im_start|>"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    torch.set_num_threads(1)
    tokenizer = train_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    model = random_model("qwen3", vocab_size=len(tokenizer), max_position_embeddings=CONTEXT)
    service = RolloutService(Engine(model, EngineConfig(kv_cache="128 blocks"), tokenizer=tokenizer))
    with service.rollout(), serve_in_background(service, HttpConfig(port=0)) as server:
        yield server.url
    service.close()


@pytest.fixture(scope="module")
def special() -> int:
    return train_tokenizer().convert_tokens_to_ids(SPECIAL)


def post(url: str, path: str, status: int = 200, **body: object) -> Any:
    answer = httpx.post(f"{url}/v1/{path}", json=body, timeout=60)
    assert answer.status_code == status, answer.text
    return answer.json()


def streamed(url: str, **body: object) -> list[Any]:
    with httpx.stream("POST", f"{url}/v1/completions", json={**body, "stream": True}, timeout=60) as answer:
        assert answer.status_code == 200, answer.read()
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_tokens_that_a_jump_replaces_count_once_in_the_usage_of_each_chunk(url):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": [5, 6, 7], "max_tokens": 60, "response_format": form, "jump_forward": "text"}
    for seed in range(12):
        *chunks, last = streamed(url, **body, seed=seed, stream_options=options)
        assert chunks[-1]["usage"] == {name: last["usage"][name] for name in chunks[-1]["usage"]}, seed


@pytest.mark.parametrize("is_named", [False, True])
def test_special_tokens_that_a_text_leaves_out_take_no_place_in_it(url, special, is_named):
    body = {"prompt": "the", "max_tokens": 12, "ignore_eos": True, "logit_bias": {str(special): 9.0}, "logprobs": 0}
    found = []
    for seed in range(6):
        whole = {**body, "seed": seed, "return_token_ids": True, "return_tokens_as_token_ids": is_named}
        [choice] = post(url, "completions", **whole)["choices"]
        kept = [id for id in choice["token_ids"] if id != special]
        assert max(choice["logprobs"]["text_offset"]) <= len(choice["text"])
        offsets = dict(zip(choice["token_ids"], choice["logprobs"]["text_offset"], strict=True))
        found += [id for id in choice["token_ids"] if id == special]
        first = kept[0] if kept else None
        assert first is None or min(offsets[first], offsets[choice["token_ids"][0]]) == 0
        parts = [one["choices"][0] for one in streamed(url, **whole) if one["choices"][0]["logprobs"] is not None]
        assert [at for one in parts for at in one["logprobs"]["text_offset"]] == choice["logprobs"]["text_offset"]
        [shown] = post(url, "completions", **whole, skip_special_tokens=False)["choices"]
        assert len(shown["text"]) == len(choice["text"]) + len(SPECIAL) * choice["token_ids"].count(special)
    assert found


def test_special_tokens_of_an_echoed_prompt_take_a_place_where_its_text_has_them(url, special):
    ids = [special, 300, special, 301]
    for prompt in (ids, f"{SPECIAL}the{SPECIAL} a"):
        [choice] = post(url, "completions", prompt=prompt, max_tokens=1, seed=1, echo=True, logprobs=0)["choices"]
        is_shown = SPECIAL in choice["text"]
        assert is_shown == isinstance(prompt, str)
        expected, text = [], ""
        for token in choice["logprobs"]["tokens"]:
            expected.append(len(text))
            text += "" if token == SPECIAL and not is_shown else token
        assert choice["logprobs"]["text_offset"] == expected and choice["text"] == text


def test_a_chat_without_a_limit_names_the_field_that_its_room_is_too_small_for(url):
    messages = [{"role": "user", "content": "the " * 100}]
    error = post(url, "chat/completions", 400, messages=messages, min_tokens=CONTEXT - 20)["error"]
    assert error["param"] == "min_tokens" and error["message"].startswith(f"min_tokens: {CONTEXT - 20} exceeds")
    assert "new_tokens" not in error["message"]


def test_pairs_of_a_salt_and_a_key_share_a_cache_with_equal_pairs_only(url):
    pairs = [(None, None), ("alice", None), (None, "alice"), ("a", "b"), ("a\0b", None), (None, "a\0b"), ("b", "a"),
             (None, '\0["alice", ""]'), ("alice", '"]'), (None, "\0[")]  # fmt: skip

    def num_cached(salt: str | None, key: str | None) -> int:
        body = {"prompt": [9] * 64, "max_tokens": 1, "cache_salt": salt, "extra_key": key}
        return post(url, "completions", **body)["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert [num_cached(*pair) for pair in pairs] == [0] * len(pairs)
    assert all(num_cached(*pair) for pair in pairs)
    assert num_cached("", "alice") and num_cached("alice", ""), "an empty one is none"
