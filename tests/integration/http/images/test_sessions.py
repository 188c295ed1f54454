"""Sessions with images: tokens stand, each turn takes the KV before it, and log-probabilities are the trainer's."""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.integration.image_inputs import TYPES
from lockstep.rollout.media.reader import image_token
from lockstep.tests.integration.http.images.folders import data_url, load_processor, picture, png
from lockstep.tests.integration.http.images.served import CHAT, Served, image_part, text_part, trained_logprobs

PICTURES = (picture(61), picture(62, 40, 40), picture(63))
URLS = tuple(data_url(png(one)) for one in PICTURES)


@pytest.fixture(scope="module")
def processor(folder: Path) -> Any:
    return load_processor(folder)


@pytest.fixture
def session(served: Served) -> Iterator[str]:
    id = served.ok("/open_session", pin=True)
    yield id
    served.client.post("/close_session", json={"session_id": id})


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


def chat(served: Served, session: dict[str, Any], *messages: dict[str, Any], **fields: Any) -> Any:
    body = {**CHAT, "logit_bias": served.no_media, "return_meta_info": True, **fields}
    return served.ok("/v1/chat/completions", session_params=session, messages=list(messages), **body)


def as_trained(served: Served, processor: Any, ids: list[int], *pictures: Any) -> Any:
    """Return what a processor makes of the pictures, beside the tokens of a prompt that has them."""
    made = processor(text=[processor.image_token * len(pictures)], images=[list(pictures)], return_tensors="pt")
    token_ids, module = torch.tensor([ids]), served.engine.model.module
    taken = inspect.signature(type(module).forward).parameters
    types = {name: (token_ids == image_token(module)).long() for name in TYPES if name in taken}
    return {name: one for name, one in made.items() if name not in (*TYPES, "attention_mask")} | {
        "input_ids": token_ids, **types,
    }  # fmt: skip


def assert_trained(served: Served, processor: Any, answer: Any, *pictures: Any) -> None:
    choice = answer["choices"][0]
    prompt = as_trained(served, processor, choice["prompt_token_ids"], *pictures)
    logprobs = [one["logprob"] for one in choice["logprobs"]["content"]]
    assert logprobs == trained_logprobs(served.engine, prompt, choice["token_ids"])


def tokens_of(answer: Any) -> list[int]:
    return [*answer["choices"][0]["prompt_token_ids"], *answer["choices"][0]["token_ids"]]


def cached(answer: Any) -> int:
    return answer["choices"][0]["meta_info"]["cached_tokens"]


def test_turns_with_images_keep_their_tokens_and_take_the_kv_before(served: Served, processor: Any, session: str):
    first = chat(served, {"id": session}, user(text_part("the "), image_part(URLS[0]), text_part(" name")))
    second = chat(served, {"id": session}, user(text_part("and what of this value? "), image_part(URLS[1])))
    third = chat(served, {"id": session}, user(text_part("the name")))
    for before, after in ((first, second), (second, third)):
        known = tokens_of(before)
        assert after["choices"][0]["prompt_token_ids"][: len(known)] == known
        assert after["session"]["num_history_tokens"] == len(known)
        assert cached(after) >= (len(known) - 1) // 16 * 16 > 0
    assert_trained(served, processor, first, PICTURES[0])
    assert_trained(served, processor, second, *PICTURES[:2])
    assert_trained(served, processor, third, *PICTURES[:2])
    info = served.ok(f"/session_info?session_id={session}")
    token = image_token(served.engine.model.module)
    assert info["token_ids"] == tokens_of(third) and info["token_ids"].count(token) > 2
    parts = [
        part for message in info["messages"] if isinstance(message["content"], list) for part in message["content"]
    ]
    assert [len(part["sha256"]) for part in parts if part["type"] == "image"] == [64, 64]
    assert info["num_bytes"] > sum(map(len, URLS[:2]))


def test_the_whole_conversation_goes_on_where_its_pictures_are_the_sessions(served: Served, session: str):
    opening = user(image_part(URLS[0]), text_part(" name"))
    first = chat(served, {"id": session}, opening)
    said = {"role": "assistant", "content": first["choices"][0]["message"]["content"]}
    whole = [opening, said, user(text_part("and "), image_part(URLS[1]))]
    second = chat(served, {"id": session}, *whole)
    assert second["choices"][0]["prompt_token_ids"][: len(tokens_of(first))] == tokens_of(first)
    body = {**CHAT, "session_params": {"id": session, "messages": "all"}}
    other = [user(image_part(URLS[2]), text_part(" name")), *whole[1:]]
    field, message = served.refused("/v1/chat/completions", **body, messages=other)
    assert field == "messages.0" and "differs from the session's message" in message
    branched = chat(served, {"id": session, "branch": True, "messages": "all"}, *other)
    assert branched["session"]["parent_rid"] is None


def test_new_messages_with_other_settings_begin_a_conversation_with_the_pictures_before_them(
    served: Served, session: str
):
    opening, new = user(image_part(URLS[0]), text_part(" name")), user(text_part("and "), image_part(URLS[1]))
    first = chat(served, {"id": session}, opening)
    fields = {"chat_template_kwargs": {"other": True}}
    other = chat(served, {"id": session, "branch": True, "messages": "new"}, new, **fields)
    assert other["session"]["parent_rid"] is None
    said = {"role": "assistant", "content": first["choices"][0]["message"]["content"]}
    whole = chat(served, {"id": session, "branch": True, "messages": "all"}, opening, said, new, **fields)
    assert other["choices"][0]["prompt_token_ids"] == whole["choices"][0]["prompt_token_ids"]
    assert tokens_of(other) == tokens_of(whole), "the same pictures"


def test_generate_goes_on_with_image_data(served: Served, processor: Any, session: str):
    params = {"max_new_tokens": 6, "sampling_seed": 3, "logit_bias": served.no_media}
    common = {"sampling_params": params, "return_logprob": True, "return_prompt_token_ids": True}
    mark = processor.image_token
    first = served.ok(
        "/generate", text=f"the {mark} name", image_data=URLS[0], session_params={"id": session}, **common
    )
    known = [*first["prompt_token_ids"], *first["output_ids"]]
    ids = [*processor.tokenizer("and", add_special_tokens=False)["input_ids"],
           processor.tokenizer.convert_tokens_to_ids(mark)]  # fmt: skip
    second = served.ok("/generate", input_ids=ids, image_data=[URLS[1]], session_params={"id": session}, **common)
    assert second["prompt_token_ids"][: len(known)] == known
    assert second["meta_info"]["cached_tokens"] >= (len(known) - 1) // 16 * 16
    prompt = as_trained(served, processor, second["prompt_token_ids"], *PICTURES[:2])
    logprobs = [one[0] for one in second["meta_info"]["output_token_logprobs"]]
    assert logprobs == trained_logprobs(served.engine, prompt, second["output_ids"])
    field, message = served.refused("/generate", input_ids=[5], session_params={"id": session, "offset": -3})
    assert field == "session_params.offset" and "history has images" in message
    again = served.ok(
        "/generate", input_ids=[5, 6], session_params={"id": session, "drop_previous_output": True}, **common
    )  # fmt: skip
    assert again["prompt_token_ids"] == [*second["prompt_token_ids"], 5, 6]


def test_the_blocks_of_a_turn_with_images_are_pinned(served: Served, session: str):
    answer = chat(served, {"id": session}, user(image_part(URLS[2]), text_part("the name of the value")))
    num = len(tokens_of(answer)) - 1
    deadline = time.monotonic() + 30
    while (pinned := served.ok(f"/session_info?session_id={session}")["num_pinned_blocks"]) < num // 16:
        assert time.monotonic() < deadline, pinned
