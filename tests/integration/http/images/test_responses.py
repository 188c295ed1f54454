"""Images in items of the Responses API: the prompts and answers are those of the same chats."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.tests.integration.http.images.served import CHAT, Served
from lockstep.tests.integration.http.images.test_chat import PARTS

ASKS = {name: value for name, value in CHAT.items() if name != "max_tokens"} | {"max_output_tokens": 8}


def as_items(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    """Return parts of a chat as this API has them."""
    return [
        {"type": "input_image", "image_url": part["image_url"]["url"], "detail": "auto"}
        if part["type"] == "image_url"
        else {"type": "input_text", "text": part["text"]}
        for part in parts
    ]


def ask(served: Served, items: list[dict[str, Any]]) -> Any:
    return served.ok("/v1/responses", input=items, logit_bias=served.no_media, **ASKS)


def test_images_of_a_user_and_of_a_calls_output_are_those_of_the_chat(served: Served) -> None:
    [choice] = served.chat(*PARTS)["choices"]
    answer = ask(served, [{"role": "user", "content": as_items(*PARTS)}])
    for name in ("prompt_token_ids", "token_ids", "logprobs"):
        assert answer[name] == choice[name], name
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "the"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": [*PARTS], "tool_call_id": "1"},
    ]
    chat = served.ok("/v1/chat/completions", messages=messages, logit_bias=served.no_media, **CHAT)
    items = [
        {"role": "user", "content": "the"},
        {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": as_items(*PARTS)},
    ]
    assert ask(served, items)["token_ids"] == chat["choices"][0]["token_ids"]


@pytest.mark.parametrize(("item", "name"), [({"role": "user"}, "content"),
                                            ({"type": "function_call_output", "call_id": "1"}, "output")])  # fmt: skip
@pytest.mark.parametrize("url", ["https://a/b.png", "data:image/png;base64,AAAA", ""])
def test_an_image_that_is_none_is_refused_at_its_place(served: Served, item: Any, name: str, url: str) -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": url}]
    answer = served.client.post("/v1/responses", json={"input": [{**item, name: parts}], "max_output_tokens": 1})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, f"input.0.{name}.1.image_url")
