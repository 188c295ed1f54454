"""Receipts on every wire: /generate, OpenAI's calls and vLLM's, whole and streamed; all are proven."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest

from lockstep.integration.http.edge.config import HttpConfig
from lockstep.integration.http.server import serve_in_background
from lockstep.rollout.receipt import is_in_full

PROMPT = [5, 17, 9, 31]
PARAMS = {"max_new_tokens": 5, "ignore_eos": True}
WIRES = {
    "/generate": ({"input_ids": PROMPT, "sampling_params": PARAMS}, lambda answer: answer["meta_info"]),
    "/v1/completions": ({"prompt": PROMPT, "max_tokens": 5, "ignore_eos": True}, lambda a: a["choices"][0]),
    "/v1/chat/completions": ({"input_ids": PROMPT, "max_tokens": 5, "ignore_eos": True}, lambda a: a["choices"][0]),
    "/inference/v1/generate": (
        {"token_ids": PROMPT, "sampling_params": {"max_tokens": 5, "ignore_eos": True}}, lambda a: a["choices"][0]
    ),
}  # fmt: skip


@pytest.fixture
def client(small_service) -> Iterator[httpx.Client]:
    with (
        serve_in_background(small_service, HttpConfig(port=0)) as server,
        httpx.Client(base_url=server.url, timeout=30) as client,
    ):
        yield client


@pytest.mark.parametrize("path", WIRES)
def test_an_answer_has_its_receipt_where_it_is_asked_for(client, small_service, path):
    body, where = WIRES[path]
    answer = client.post(path, json=body).raise_for_status().json()
    assert "receipt" not in where(answer)
    found = []
    for kind in (True, "digests"):
        answer = client.post(path, json={**body, "return_receipt": kind}).raise_for_status().json()
        found.append(where(answer)["receipt"])
    with client.stream("POST", path, json={**body, "return_receipt": True, "stream": True}) as response:
        lines = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]
    found += [where(line)["receipt"] for line in lines if "receipt" in where(line)]
    assert len(found) == 3 and [is_in_full(receipt) for receipt in found] == [True, False, True]
    report = small_service.replay(found)
    assert [verdict.status for verdict in report.verdicts] == ["equal", "unproven", "equal"], list(report.lines())
    wrong = client.post(path, json={**body, "return_receipt": "all"})
    assert wrong.status_code in (400, 422) and "return_receipt" in wrong.text


def test_a_batch_says_for_each_prompt_whether_it_wants_a_receipt(client):
    body = {"input_ids": [PROMPT, PROMPT, PROMPT], "sampling_params": PARAMS, "return_receipt": [True, None, "digests"]}
    answers = client.post("/generate", json=body).raise_for_status().json()
    assert ["receipt" in answer["meta_info"] for answer in answers] == [True, False, True]


def test_weights_without_a_digest_get_one_for_a_receipt(client, small_service):
    small_service.engine.weights.set_weight_digest(None)
    body, _ = WIRES["/generate"]
    answer = client.post("/generate", json={**body, "return_receipt": True}).raise_for_status().json()
    [span] = answer["meta_info"]["receipt"]["spans"]
    assert span["digest"] == small_service.model_digest() == small_service.engine.weight_digest
