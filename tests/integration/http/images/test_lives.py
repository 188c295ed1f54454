"""Requests with images through the lives of a server: a trainer's phases, releases of weights, aborts, and moves."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import transformers

from lockstep.integration.http.edge.config import HttpConfig
from lockstep.integration.http.server import serve_in_background
from lockstep.integration.router.config import RouterConfig
from lockstep.integration.router.server import route_in_background
from lockstep.integration.service import RolloutService
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.tests.integration.http.images.folders import data_url, picture, png
from lockstep.tests.integration.http.images.served import CHAT, Served, image_part
from lockstep.tests.support.callers import PATIENCE, soon, submit

CHATS = "/v1/chat/completions"
SIZES = ((70, 50), (40, 40), (60, 20), (20, 60), (64, 64), (30, 60))


def chat_of(served: Served, size: tuple[int, int] = SIZES[0], **fields: object) -> dict[str, Any]:
    content = [image_part(data_url(png(picture(1, *size))))]
    return {**CHAT, "logit_bias": served.no_media, "messages": [{"role": "user", "content": content}], **fields}


@pytest.fixture
def trained(folder: Path) -> Iterator[Served]:
    """Serve the module of a trainer, beside it."""
    torch.set_num_threads(1)
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    service = RolloutService(Engine(model, EngineConfig(kv_cache="64 blocks", max_num_seqs=4), tokenizer=tokenizer))
    with serve_in_background(service, HttpConfig(port=0)) as server, Served(server) as served:
        yield served
        service.engine.stop()
    service.close()


def test_images_wait_for_a_rollout_phase_and_leave_the_module_to_its_trainer(
    trained: Served, until: Callable[..., None]
) -> None:
    service, module = trained.service, trained.engine.model.module
    with service.rollout():
        expected = trained.ok(CHATS, **chat_of(trained, SIZES[1]))
    module.train()
    begun = trained.engine.model.phase.num_begun
    waiting = [submit(trained.client.post, CHATS, json=chat_of(trained, size)) for size in (SIZES[1], *SIZES[2:])]
    hub = trained.server.app.state.hub
    until(lambda: len(hub.open) == len(waiting))
    text = submit(trained.client.post, CHATS, json={**CHAT, "messages": [{"role": "user", "content": "the"}]})
    is_known = trained.model_type != "gemma3"  # whose tokens of images see each other: each prompt is asked for them
    until(lambda: trained.engine.state()["num_waiting"] >= 1 + is_known)  # the text, and the size that is known
    assert module.training and trained.engine.model.phase.num_begun == begun
    with service.rollout():
        answers = [soon(one) for one in waiting]
        assert soon(text).status_code == 200
    assert [answer.status_code for answer in answers] == [200] * len(waiting)
    assert answers[0].json()["choices"][0]["token_ids"] == expected["choices"][0]["token_ids"]
    assert module.training and trained.engine.model.phase.num_begun == begun + 1


def test_the_end_of_a_phase_waits_for_images_that_are_counted(trained: Served, until: Callable[..., None]) -> None:
    with trained.service.rollout():
        trained.ok(CHATS, **chat_of(trained))
        asked = [submit(trained.client.post, CHATS, json=chat_of(trained, size)) for size in SIZES[1:]]
    assert not trained.engine.model.in_rollout_phase
    with trained.service.rollout():
        assert [soon(one).status_code for one in asked] == [200] * len(asked)


def test_a_client_that_leaves_while_its_images_wait_is_forgotten(trained: Served, until: Callable[..., None]) -> None:
    with pytest.raises(httpx.ReadTimeout):
        trained.client.post(CHATS, json=chat_of(trained), timeout=1.0)
    hub = trained.server.app.state.hub
    until(lambda: not hub.open and hub.image_bytes.num == 0 and hub.admission.num_sequences == 0)
    with trained.service.rollout():
        assert trained.ok(CHATS, **chat_of(trained))["choices"]


def test_new_sizes_are_refused_while_the_weights_hold_nothing(folder: Path) -> None:
    torch.set_num_threads(1)
    service = RolloutService(Engine(folder, EngineConfig(kv_cache="64 blocks", max_num_seqs=4)))
    with serve_in_background(service, HttpConfig(port=0)) as server, Served(server) as served:
        served.ok("/release_memory_occupation", tags=["weights"])
        answer = served.client.post(CHATS, json=chat_of(served))
        assert answer.status_code == 503, answer.text
        assert "need the model, which does not run" in answer.json()["error"]["message"]
        served.ok("/resume_memory_occupation", tags=["weights"])
        assert served.client.post(CHATS, json=chat_of(served)).status_code == 503
        served.ok("/update_weights_from_disk", model_path=str(folder))
        assert served.ok(CHATS, **chat_of(served))["choices"]
    service.close()


def test_requests_with_images_are_aborted_and_the_next_is_answered(served: Served, until: Callable[..., None]) -> None:
    served.engine.pause_generation("in_place")
    asked = submit(served.client.post, CHATS, json=chat_of(served, rid="mine"))
    until(lambda: served.engine.state()["num_waiting"])
    served.client.post("/abort_request", json={"rid": "mine"}).raise_for_status()
    assert soon(asked).json()["choices"][0]["finish_reason"] == "abort"
    served.engine.continue_generation()
    assert len(served.ok(CHATS, **chat_of(served))["choices"][0]["token_ids"]) == 8
    served.engine.check_integrity()


def test_a_renewal_draws_the_answer_again_over_its_images(served: Served) -> None:
    processor = served.server.app.state.hub.limits.images.processor("text")
    body = {
        "text": f"the {processor.placeholder}",
        "image_data": data_url(png(picture(1))),
        "sampling_params": {"max_new_tokens": 6, "ignore_eos": True, "logit_bias": served.no_media},
        "return_logprob": True,
    }
    first = served.ok("/generate", **body)
    again = served.ok("/renew", **body, output_ids=[first["output_ids"]], seeds=[first["meta_info"]["seed"]])
    assert again["output_ids"] == first["output_ids"]
    assert again["meta_info"]["output_token_logprobs"] == first["meta_info"]["output_token_logprobs"]


def test_reports_say_that_images_are_understood(served: Served, trained: Served) -> None:
    assert served.ok("/model_info")["has_image_understanding"] is True


def test_a_router_passes_images_on(served: Served, tmp_path: Path) -> None:
    config = RouterConfig((served.server.url,), HttpConfig(port=0), journal=tmp_path / "journal.json")
    with route_in_background(config) as router:
        answer = httpx.post(f"{router.url}{CHATS}", json=chat_of(served), timeout=PATIENCE)
        assert answer.status_code == 200, answer.text
        direct = served.ok(CHATS, **chat_of(served))
        assert answer.json()["choices"][0]["token_ids"] == direct["choices"][0]["token_ids"]
        streamed = httpx.post(f"{router.url}{CHATS}", json=chat_of(served, stream=True), timeout=PATIENCE)
    events = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
    ids = [id for event in events for choice in event["choices"] for id in choice.get("token_ids") or ()]
    assert ids == direct["choices"][0]["token_ids"]


@pytest.mark.parametrize("check", ["proven", "trusted"])
def test_an_answer_over_images_goes_on_where_another_server_has_left_it(served: Served, check: str) -> None:
    processor = served.server.app.state.hub.limits.images.processor("text")
    params = {"max_new_tokens": 9, "ignore_eos": True, "sampling_seed": 3, "logit_bias": served.no_media}
    body = {
        "text": f"the {processor.placeholder}",
        "image_data": data_url(png(picture(1))),
        "sampling_params": params,
        "return_logprob": True,
    }
    assert served.service.name_weights() is not None
    whole, info = served.ok("/generate", **body), served.ok("/server_info")
    drawn = whole["meta_info"]["output_token_logprobs"]
    one = {
        "token_ids": whole["output_ids"][:4],
        "logprobs": [logprob for logprob, _, _ in drawn[:4]],
        "num_chars": 0,
        "spans": [["default", info["weight_digest"], 0]],
    }
    begun = {
        "sequences": [one],
        "check": check,
        "weight_digest": info["weight_digest"],
        "guarantee": info["guarantee"],
        "head": {"rids": ["a"]},
    }
    found = served.ok("/generate", **body, begun=begun)
    assert found["output_ids"] == whole["output_ids"]
    assert found["meta_info"]["output_token_logprobs"] == drawn


def test_images_that_wait_for_a_phase_are_aborted_and_others_are_tokenised(
    trained: Served, until: Callable[..., None]
) -> None:
    asked = [chat_of(trained, size, rid=f"r{index}") for index, size in enumerate([*SIZES, (60, 20)])]
    waiting = [submit(trained.client.post, CHATS, json=one) for one in asked]
    hub = trained.server.app.state.hub
    until(lambda: len(hub.open) == len(waiting) and all(hasattr(one, "asked") for one in hub.open))
    tokens = trained.client.post("/tokenize", json={"messages": asked[0]["messages"]}, timeout=30)
    assert tokens.status_code == 200
    trained.client.post("/abort_request", json={"rid": "r1"}).raise_for_status()
    answer = soon(waiting[1]).json()
    assert answer["choices"][0]["finish_reason"] == "abort" and answer["usage"]["completion_tokens"] == 0
    trained.client.post("/abort_request", json={"abort_all": True}).raise_for_status()
    answers = [soon(one).json() for one in waiting]
    assert [answer["choices"][0]["finish_reason"] for answer in answers] == ["abort"] * len(waiting)
    assert answers[0]["usage"]["prompt_tokens"] == tokens.json()["count"]
    until(lambda: not hub.open and hub.image_bytes.num == 0 and hub.admission.num_sequences == 0)
    with trained.service.rollout():
        assert trained.ok(CHATS, **chat_of(trained))["choices"]
