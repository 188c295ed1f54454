"""The `bytes` of a chat's log-probabilities where tokens are parts of characters."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
import torch

from lockstep.integration.http.edge.config import HttpConfig
from lockstep.integration.http.server import serve_in_background
from lockstep.integration.service import RolloutService
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.grammars.token_text import TokenText
from lockstep.tests.support.bpe_tokenizer import train_tokenizer
from lockstep.tests.support.random_models import random_model

PATIENCE = 30.0
SPLIT = "\u65e5\u20ac"  # the tokenizer has learnt neither character


@pytest.fixture(scope="module")
def service() -> Iterator[RolloutService]:
    torch.set_num_threads(1)
    tokenizer = train_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    model = random_model("qwen3", vocab_size=1024, max_position_embeddings=256)
    service = RolloutService(Engine(model, EngineConfig(kv_cache=64), tokenizer=tokenizer))
    with service.rollout():
        yield service
        service.engine.stop()


@pytest.fixture(scope="module")
def client(service: RolloutService) -> Iterator[openai.OpenAI]:
    with (
        serve_in_background(service, HttpConfig(port=0, model_name="small")) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE) as client,
    ):
        yield client


def content_of(client: openai.OpenAI, *, stream: bool, **fields) -> list:
    """Return the log-probabilities of a chat's answer that is made of parts of characters."""
    ask = {"model": "small", "messages": [{"role": "user", "content": "a"}], "max_tokens": 8, "logprobs": True}
    answer = client.chat.completions.create(**ask, seed=3, top_logprobs=3, stream=stream, **fields)
    if not stream:
        return answer.choices[0].logprobs.content
    choices = [choice for chunk in answer for choice in chunk.choices]
    return [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_parts_of_characters_have_their_true_bytes(client, service, stream):
    tokenizer = service.engine.tokenizer
    spelled = TokenText(tokenizer, 1024)
    ids = tokenizer.encode(SPLIT, add_special_tokens=False)
    assert len(ids) > len(SPLIT) and spelled.spell(ids) == SPLIT.encode()
    content = content_of(client, stream=stream, logit_bias={str(id): 100 for id in ids})
    found = [bytes(entry.bytes) for entry in content]
    assert set(found) <= {spelled.pieces[id] for id in ids} and any("\ufffd" in entry.token for entry in content)
    for entry in (other for at in content for other in at.top_logprobs):
        if "\ufffd" in entry.token:
            assert bytes(entry.bytes) in spelled.pieces
        elif entry.token:
            assert bytes(entry.bytes).decode() == entry.token


def test_a_token_that_the_tokenizer_does_not_know_has_no_bytes(client, service):
    unknown = len(service.engine.tokenizer) + 1
    content = content_of(client, stream=False, logit_bias={str(unknown): 100})
    assert {(entry.token, entry.bytes is None) for entry in content} == {("", True)}
