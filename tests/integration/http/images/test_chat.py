"""Chats with images: their prompts are the processor's, their log-probabilities the trainer's, bit for bit."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from lockstep.integration.http.conversations.history import num_equal
from lockstep.rollout.media.reader import image_token
from lockstep.tests.integration.http.images.folders import data_url, load_processor, picture, png
from lockstep.tests.integration.http.images.served import CHAT, Served, image_part, text_part, trained_logprobs

ONE, TWO = picture(1), picture(2, 40, 40)
PARTS = (text_part("the "), image_part(data_url(png(ONE))), text_part(" and "), image_part(data_url(png(TWO))))


@pytest.fixture(scope="module")
def processor(folder: Path) -> Any:
    return load_processor(folder)


def as_trained(processor: Any, *content: dict[str, Any]) -> Any:
    """Return what the processor makes of a message, as a trainer asks it."""
    messages = [{"role": "user", "content": list(content)}]
    text = processor.apply_chat_template(messages, add_generation_prompt=True)
    images = [part["image"] for part in content if part["type"] == "image"]
    return processor(text=[text], images=[images], return_tensors="pt", add_special_tokens=False)


def logprobs_of(choice: dict[str, Any]) -> list[float]:
    return [one["logprob"] for one in choice["logprobs"]["content"]]


def test_prompt_ids_and_logprobs_are_the_trainers(served: Served, processor: Any) -> None:
    answer = served.chat(*PARTS)
    [choice] = answer["choices"]
    prompt = as_trained(
        processor,
        {"type": "text", "text": "the "},
        {"type": "image", "image": ONE},
        {"type": "text", "text": " and "},
        {"type": "image", "image": TWO},
    )
    assert answer["prompt_token_ids"] == choice["prompt_token_ids"] == prompt["input_ids"][0].tolist()
    assert answer["usage"]["prompt_tokens"] == prompt["input_ids"].shape[1]
    assert len(choice["token_ids"]) == 8
    assert logprobs_of(choice) == trained_logprobs(served.engine, prompt, choice["token_ids"])


def test_samples_of_a_prompt_streams_and_repeats_have_the_same_numbers(served: Served) -> None:
    together = served.chat(*PARTS, n=3)
    again = served.chat(*PARTS, n=3)
    assert [one["token_ids"] for one in together["choices"]] == [one["token_ids"] for one in again["choices"]]
    assert list(map(logprobs_of, together["choices"])) == list(map(logprobs_of, again["choices"]))
    assert len({tuple(one["token_ids"]) for one in together["choices"]}) > 1
    messages = [{"role": "user", "content": list(PARTS)}]
    body = {**CHAT, "logit_bias": served.no_media, "messages": messages, "stream": True, "n": 3}
    streamed: dict[int, list[int]] = {0: [], 1: [], 2: []}
    with served.client.stream("POST", "/v1/chat/completions", json=body) as events:
        lines = [line.removeprefix("data: ") for line in events.iter_lines() if line.startswith("data: {")]
    for event in map(json.loads, lines):
        for choice in event["choices"]:
            streamed[choice["index"]] += choice.get("token_ids") or []
    assert list(streamed.values()) == [one["token_ids"] for one in together["choices"]]


def test_the_prefix_cache_is_shared_by_equal_images_alone(served: Served) -> None:
    def cached(seed: int) -> int:
        part = image_part(data_url(png(picture(seed))))
        meta = served.chat(part, text_part("the name of the value"), return_meta_info=True)["choices"][0]["meta_info"]
        return meta["cached_tokens"]

    assert (cached(31), cached(32)) == (0, 0)
    assert cached(31) > 0
    known = served.chat(image_part(data_url(png(picture(31)))), text_part("the name of the value"))
    turns = [
        {"role": "user", "content": [image_part(data_url(png(picture(31)))), text_part("the name of the value")]},
        {"role": "assistant", "content": known["choices"][0]["message"]["content"]},
        {"role": "user", "content": [text_part("and"), image_part(data_url(png(picture(34))))]},
    ]
    later = served.ok("/v1/chat/completions", **CHAT, messages=turns, return_meta_info=True)
    shared = num_equal(known["prompt_token_ids"], later["prompt_token_ids"])
    assert later["choices"][0]["meta_info"]["cached_tokens"] >= shared // 16 * 16 > 0, "of a turn with one more image"
    jpeg = image_part(data_url(png(picture(33), format="JPEG"), "jpeg"))
    assert served.chat(jpeg, text_part("the name of the value"))["usage"]["prompt_tokens"] > 16


def test_a_prompt_is_scored_over_its_images(served: Served) -> None:
    answer = served.chat(*PARTS, prompt_logprobs=1)
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]


@pytest.mark.parametrize("role", ["system", "assistant", "tool"])
def test_images_may_be_in_messages_of_every_role_that_the_template_writes(served: Served, role: str) -> None:
    messages = [
        {"role": "user", "content": "the"},
        {"role": role, "content": [text_part("name"), PARTS[1]], "tool_call_id": "1"},
        {"role": "user", "content": [PARTS[3]]},
    ]
    answer = served.ok("/v1/chat/completions", messages=messages, logit_bias=served.no_media, **CHAT)
    token = image_token(served.engine.model.module)
    both = served.chat(*PARTS)["prompt_token_ids"]
    assert answer["prompt_token_ids"].count(token) == both.count(token) >= 8


def test_texts_alone_are_answered_as_before(served: Served) -> None:
    plain = served.ok("/v1/chat/completions", messages=[{"role": "user", "content": "the name"}], **CHAT)
    parts = served.chat(text_part("the "), text_part("name"), logit_bias=None)
    assert plain["prompt_token_ids"] == parts["prompt_token_ids"]
    assert "the name" in served.engine.tokenizer.decode(plain["prompt_token_ids"])


def test_the_openai_client_sends_images(served: Served) -> None:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{served.server.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(
            model="tiny",
            max_tokens=4,
            messages=[
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "the"},
                        {"type": "image_url", "image_url": {"url": data_url(png(ONE)), "detail": "high"}},
                    ],
                }
            ],
        )
    assert answer.usage is not None and answer.usage.prompt_tokens > 16


def test_tokenize_expands_images(served: Served) -> None:
    messages = [{"role": "user", "content": list(PARTS)}]
    found = served.ok("/tokenize", messages=messages)
    assert found["tokens"] == served.chat(*PARTS)["prompt_token_ids"]
    assert found["count"] == len(found["tokens"])


def test_an_answer_over_images_follows_a_grammar_and_names_alternatives(served: Served) -> None:
    pytest.importorskip("xgrammar")
    answer = served.chat(*PARTS, regex="(true|false) [0-9]{3}", max_tokens=40, top_logprobs=2)
    [choice] = answer["choices"]
    assert re.fullmatch("(true|false) [0-9]{3}", choice["message"]["content"])
    assert all(len(one["top_logprobs"]) == 2 for one in choice["logprobs"]["content"])


def test_an_answer_over_images_is_the_same_with_a_prediction(served: Served) -> None:
    plain = served.chat(*PARTS, max_tokens=20)["choices"][0]
    predicted = served.chat(*PARTS, max_tokens=20, draft_token_ids=plain["token_ids"])["choices"][0]
    assert predicted["token_ids"] == plain["token_ids"] and predicted["logprobs"] == plain["logprobs"]
