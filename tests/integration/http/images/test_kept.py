"""What was made of images is kept for the requests of a group, within a limit, and counted once while they use it."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from lockstep.integration.http.edge.config import HttpConfig
from lockstep.integration.http.images.kept import KeptPrompts, Made, OpenImages
from lockstep.integration.http.images.processor import FolderProcessor
from lockstep.integration.http.server import serve_in_background
from lockstep.rollout.errors import Overloaded
from lockstep.tests.integration.http.images.folders import data_url, picture, png
from lockstep.tests.integration.http.images.served import Served, image_part, text_part
from lockstep.tests.support.callers import soon, submit

CHATS = "/v1/chat/completions"


def made_of(num_bytes: int) -> Made:
    return Made({"input_ids": [1], "pixel_values": torch.zeros(num_bytes, dtype=torch.uint8)})


def test_equal_prompts_are_made_once_also_at_the_same_time() -> None:
    kept, calls, begun, release = KeptPrompts(100), [], threading.Event(), threading.Event()

    def make() -> Made:
        calls.append(1)
        begun.set()
        assert release.wait(60)
        return made_of(10)

    asked = [submit(kept.of, b"a", make) for _ in range(3)]
    assert begun.wait(60)
    release.set()
    assert len({id(soon(one)) for one in asked}) == len(calls) == 1


def test_the_prompts_that_were_used_last_are_kept_within_the_limit() -> None:
    kept, calls = KeptPrompts(25), []

    def of(key: bytes, num_bytes: int = 10) -> None:
        kept.of(key, lambda: calls.append(key) or made_of(num_bytes))

    for key in (b"a", b"b", b"a", b"c", b"a", b"b"):
        of(key)
    assert calls == [b"a", b"b", b"c", b"b"]
    of(b"large", 99)  # larger than all that is kept: nothing is, and it is made again
    of(b"large", 99)
    of(b"a")
    assert calls[4:] == [b"large", b"large", b"a"]


def test_a_prompt_that_fails_is_not_kept() -> None:
    kept = KeptPrompts(25)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            kept.of(b"a", lambda: Made({"input_ids": 1 / 0}))
    assert kept.of(b"a", lambda: made_of(1)).num_bytes == 1


def test_shared_images_are_counted_until_the_last_request_has_its_answer() -> None:
    opened, made, other = OpenImages(100), made_of(60), made_of(30)
    for request in ("a", "b"):
        opened.take(request, 5)
        opened.share(request, [made])
    assert opened.num == 70
    with pytest.raises(Overloaded, match="max_open_image_bytes"):
        opened.take("c", 31)
    opened.take("c", 5)
    with pytest.raises(Overloaded, match="75 bytes of images, and 30 more"):
        opened.share("c", [made, other])
    opened.release("c")
    opened.release("a")
    assert opened.num == 65
    opened.release("b")
    opened.release("b")
    assert opened.num == 0
    opened.take("alone", 5)
    opened.share("alone", [made_of(500)])
    assert opened.num == 505


def test_requests_of_a_group_are_made_once(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, own = [], FolderProcessor.of_text

    def counted(self: FolderProcessor, *given: Any, **named: Any) -> Any:
        calls.append(given[0])
        return own(self, *given, **named)

    monkeypatch.setattr(FolderProcessor, "of_text", counted)
    parts = (image_part(data_url(png(picture(77)))), text_part("the"))
    asked = [submit(served.chat, *parts, seed=seed) for seed in range(4)]
    answers = [soon(one) for one in asked]
    assert len(calls) == 1
    assert len({tuple(one["prompt_token_ids"]) for one in answers}) == 1
    served.chat(*parts, text_part("name"))
    served.chat(image_part(data_url(png(picture(78)))), text_part("the"))
    assert len(calls) == 3


def test_images_of_far_too_many_tokens_are_refused_before_they_are_decoded(served: Served) -> None:
    if served.model_type != "qwen3_vl":
        pytest.skip("images of every size have as many tokens")
    assert served.server.app.state.hub.limits.images.processor("messages").num_tokens([(64, 64)]) == 16
    many = [image_part(data_url(png(picture(seed, 64, 64))[:-40])) for seed in range(80)]  # none is whole
    with serve_in_background(served.service, HttpConfig(port=0, max_images=80)) as server, Served(server) as other:
        param, message = other.refused(CHATS, messages=[{"role": "user", "content": many}])
        assert param == "messages" and "1280 tokens of images" in message, message
        param, message = other.refused(CHATS, messages=[{"role": "user", "content": many[:1]}])
        assert "cannot be decoded" in message
