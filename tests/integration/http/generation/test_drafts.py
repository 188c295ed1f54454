"""Drafts over a real socket: fields of /generate and OpenAI's routes, their limits, and the counts in answers."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
import torch

from lockstep.integration.grpo.tasks.arithmetic import build_tokenizer
from lockstep.integration.http.edge.config import HttpConfig
from lockstep.integration.http.server import BackgroundServer, serve_in_background
from lockstep.integration.router.config import RouterConfig
from lockstep.integration.router.server import route_in_background
from lockstep.integration.service import RolloutService
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.speculation.lengths import WholeDrafts
from lockstep.tests.support.random_models import random_model

CONTEXT = 128
SETTINGS = {"max_new_tokens": 12, "sampling_seed": 3, "ignore_eos": True}
FIRST, SECOND = [5, 6, 7], [8, 9]
SPEC = {
    "spec_verify_ct", "spec_accept_rate", "spec_accept_length", "spec_num_proposed_drafts", "spec_draft_token_num",
    "spec_num_correct_drafts", "spec_accept_token_num", "draft_sources",
}  # fmt: skip


@pytest.fixture(scope="module")
def served() -> Iterator[BackgroundServer]:
    torch.set_num_threads(1)
    model = random_model("qwen3", vocab_size=128, max_position_embeddings=CONTEXT)
    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    engine = Engine(model, EngineConfig(kv_cache=64, speculation={"caller": 4}), tokenizer=tokenizer)
    assert engine.parts.speculation is not None
    engine.parts.speculation.lengths = WholeDrafts()
    service = RolloutService(engine)
    with service.rollout(), serve_in_background(service, HttpConfig(port=0, max_waiting_tokens=500)) as server:
        yield server
        engine.stop()


@pytest.fixture
def client(served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=60) as client:
        yield client


def generate(client: httpx.Client, **body: object):
    response = client.post("/generate", json={"sampling_params": SETTINGS, **body})
    assert response.status_code == 200, response.text
    return response.json()


def refusal(client: httpx.Client, path: str, **body: object) -> tuple[int, str | None, str]:
    response = client.post(path, json=body)
    error = response.json()["error"]
    return response.status_code, error.get("param"), error["message"]


# -- /generate ---------------------------------------------------------------------------------------------------------


def test_a_draft_saves_steps_and_the_answer_counts_it_under_sglangs_names(client):
    plain = generate(client, input_ids=FIRST, speculation=False)
    assert SPEC.isdisjoint(plain["meta_info"])
    again = generate(client, input_ids=FIRST, draft_token_ids=plain["output_ids"])
    assert again["output_ids"] == plain["output_ids"]
    meta = again["meta_info"]
    num_steps, num_drafted = meta["spec_verify_ct"], meta["spec_draft_token_num"]
    assert num_steps > 0
    assert meta["spec_accept_token_num"] == meta["spec_num_correct_drafts"] == num_drafted > 0
    assert meta["spec_num_proposed_drafts"] == num_drafted
    assert meta["spec_accept_rate"] == 1
    assert meta["spec_accept_length"] == (num_drafted + num_steps) / num_steps
    assert meta["draft_sources"] == {"caller": {"drafted_tokens": num_drafted, "accepted_tokens": num_drafted}}
    off = generate(client, input_ids=FIRST, draft_token_ids=plain["output_ids"], speculation=False)
    assert SPEC.isdisjoint(off["meta_info"])


def test_a_stream_ends_with_the_counts(client):
    plain = generate(client, input_ids=FIRST)
    body = {"input_ids": FIRST, "sampling_params": SETTINGS, "draft_token_ids": plain["output_ids"], "stream": True}
    lines = [line for line in client.post("/generate", json=body).text.splitlines() if line]
    assert lines[-1] == "data: [DONE]"
    assert '"spec_verify_ct":' in lines[-2]
    assert all('"spec_verify_ct":' not in line for line in lines[:-2])


def test_a_batch_has_a_draft_and_a_choice_for_each_prompt(client):
    first, second = generate(client, input_ids=[FIRST, SECOND])
    drafts = [first["output_ids"], second["output_ids"]]
    for fields, has_drafts in (
        ({"draft_token_ids": drafts}, [True, True]),
        ({"draft_token_ids": [None, drafts[1]]}, [False, True]),
        ({"draft_token_ids": drafts, "speculation": [True, False]}, [True, False]),
        ({"draft_token_ids": drafts, "speculation": False}, [False, False]),
    ):
        answers = generate(client, input_ids=[FIRST, SECOND], **fields)
        assert [answer["output_ids"] for answer in answers] == drafts
        assert ["spec_verify_ct" in answer["meta_info"] for answer in answers] == has_drafts


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"draft_token_ids": [1, 128]}, None, "draft_token_ids names [128], but the vocabulary ends at 127"),
        ({"draft_token_ids": [1, -1]}, None, "draft_token_ids must be token ids, not [-1]"),
        ({"draft_token_ids": [1, 1.5]}, "draft_token_ids", "must be token ids, not [1.5]"),
        ({"draft_token_ids": [1, True]}, "draft_token_ids", "must be token ids, not [True]"),
        ({"draft_token_ids": "12"}, "draft_token_ids", "list"),
        ({"draft_token_ids": [[1]]}, "draft_token_ids", "must be token ids, not [[1]]"),
        ({"draft_token_ids": [1] * 129}, "draft_token_ids", "129 tokens are more than the context has, which is 128"),
        ({"speculation": "perhaps"}, "speculation", "boolean"),
        ({"input_ids": [FIRST, SECOND], "draft_token_ids": [1, 2]}, "draft_token_ids", "for each of them"),
        ({"input_ids": [FIRST, SECOND], "draft_token_ids": [[1]]}, "draft_token_ids", "1 entries for 2 prompts"),
        ({"input_ids": [FIRST, SECOND], "speculation": [False]}, "speculation", "1 entries for 2 prompts"),
        # drafts count among what waits, for each sample
        ({"draft_token_ids": [1] * 100, "sampling_params": {**SETTINGS, "n": 5}}, None, "(max_waiting_tokens)"),
    ],
    ids=str,
)
def test_bad_drafts_are_refused_by_name(client, fields, param, says):
    status, named, message = refusal(client, "/generate", **{"input_ids": FIRST, "sampling_params": SETTINGS, **fields})
    assert status == 400
    assert says in message
    if param is not None:
        assert named is not None
        assert named.partition(".")[0] == param


def test_a_router_passes_drafts_on(client, served, tmp_path):
    first, second = generate(client, input_ids=[FIRST, SECOND])
    drafts = [first["output_ids"], second["output_ids"]]
    config = RouterConfig((served.url,), HttpConfig(port=0), journal=tmp_path / "j.json", health_interval_s=0.1)
    with route_in_background(config) as router, httpx.Client(base_url=router.url, timeout=60) as routed:
        answers = generate(routed, input_ids=[FIRST, SECOND], draft_token_ids=drafts, speculation=[True, False])
    assert [answer["output_ids"] for answer in answers] == drafts
    assert ["spec_verify_ct" in answer["meta_info"] for answer in answers] == [True, False]


# -- OpenAI's routes ---------------------------------------------------------------------------------------------------


def chat(client: httpx.Client, **fields: object):
    body = {"messages": [{"role": "user", "content": "12+30="}], "seed": 3, "max_tokens": 12, "ignore_eos": True}
    response = client.post("/v1/chat/completions", json={**body, "return_token_ids": True, **fields})
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("in_parts", [False, True])
def test_a_prediction_is_a_draft_and_usage_counts_it(client, in_parts):
    plain = chat(client)
    assert "completion_tokens_details" not in plain["usage"]
    text = plain["choices"][0]["message"]["content"]
    content = [{"type": "text", "text": text[:2]}, {"type": "text", "text": text[2:]}] if in_parts else text
    again = chat(client, prediction={"type": "content", "content": content}, return_meta_info=True)
    assert again["choices"][0]["token_ids"] == plain["choices"][0]["token_ids"]
    details, meta = again["usage"]["completion_tokens_details"], again["choices"][0]["meta_info"]
    assert details["accepted_prediction_tokens"] == meta.get("spec_accept_token_num", 0)
    drafted = details["accepted_prediction_tokens"] + details["rejected_prediction_tokens"]
    assert drafted == meta["spec_draft_token_num"] > 0
    wrong = chat(client, prediction={"type": "content", "content": "0" * 12}, speculation=False)
    assert set(wrong["usage"]["completion_tokens_details"].values()) == {0}


def test_token_ids_are_a_draft_of_both_routes(client):
    plain = chat(client)["choices"][0]["token_ids"]
    again = chat(client, draft_token_ids=plain, return_meta_info=True)["choices"][0]
    assert again["token_ids"] == plain
    assert again["meta_info"]["spec_accept_token_num"] > 0
    body = {"prompt": [FIRST, SECOND], "seed": 3, "max_tokens": 12, "ignore_eos": True, "return_token_ids": True}
    first = client.post("/v1/completions", json=body).json()["choices"]
    drafts = [choice["token_ids"] for choice in first]
    again = client.post("/v1/completions", json={**body, "draft_token_ids": drafts, "return_meta_info": True}).json()
    assert [choice["token_ids"] for choice in again["choices"]] == drafts
    assert all(choice["meta_info"]["spec_accept_token_num"] > 0 for choice in again["choices"])


@pytest.mark.parametrize(
    ("prediction", "says"),
    [
        ({"type": "speech", "content": "1"}, 'needs the type "content"'),
        ({"type": "content"}, "needs the type"),
        ({"type": "content", "content": [{"type": "image_url"}]}, "content of the type image_url"),
        ({"type": "content", "content": "1" * 200}, "exceeds the maximum allowed length"),
        ("1", "dictionary"),
    ],
    ids=str,
)
def test_predictions_that_are_none_are_refused_by_name(client, prediction, says):
    body = {"messages": [{"role": "user", "content": "1"}], "max_tokens": 2, "prediction": prediction}
    status, param, message = refusal(client, "/v1/chat/completions", **body)
    assert (status, param) == (400, "prediction")
    assert says in message


def test_a_prediction_beside_token_ids_is_refused(client):
    body = {"messages": [{"role": "user", "content": "1"}], "draft_token_ids": [1]}
    prediction = {"type": "content", "content": "1"}
    assert refusal(client, "/v1/chat/completions", **body, prediction=prediction)[:2] == (400, "prediction")
