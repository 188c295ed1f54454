"""Tests of `return_top_p_token_ids`: the tokens that filters kept, as slime's trainer decodes them."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from itertools import pairwise

import httpx
import numpy as np
import pytest

from lockstep.integration.http.edge.config import HttpConfig
from lockstep.integration.http.server import serve_in_background

ASKED = {"custom_params": {"return_top_p_token_ids": True}, "sampling_seed": 5, "max_new_tokens": 12}


@pytest.fixture
def client(small_service) -> Iterator[httpx.Client]:
    with (
        serve_in_background(small_service, HttpConfig(port=0, max_kept_token_ids=2000)) as server,
        httpx.Client(base_url=server.url, timeout=30) as client,
    ):
        yield client


def decoded(text: str) -> list[int]:
    return np.frombuffer(base64.b64decode(text), dtype=np.int32).tolist()


def check(meta: dict, token_ids: list[int]) -> None:
    ids, offsets = decoded(meta["top_p_token_ids"]), decoded(meta["top_p_token_offsets"])
    assert len(offsets) == len(token_ids) + 1 and offsets[0] == 0 and offsets[-1] == len(ids)
    kept = [ids[a:b] for a, b in pairwise(offsets)]
    assert all(token in its for token, its in zip(token_ids, kept, strict=True))
    assert 1 < len(ids) < 128 * len(token_ids)


def test_ids_and_offsets_come_with_the_answer_and_at_a_streams_end(client):
    body = {"input_ids": [5, 6, 7], "sampling_params": {**ASKED, "top_p": 0.7, "ignore_eos": True}}
    answer = client.post("/generate", json={**body, "return_logprob": True}).raise_for_status().json()
    check(answer["meta_info"], answer["output_ids"])
    with client.stream("POST", "/generate", json={**body, "stream": True}) as response:
        lines = [line[6:] for line in response.iter_lines() if line.startswith("data: {")]
    last = httpx.Response(200, text=lines[-1]).json()
    for key in ("top_p_token_ids", "top_p_token_offsets"):
        assert last["meta_info"][key] == answer["meta_info"][key]
    several = {**body, "sampling_params": {**body["sampling_params"], "n": 2}}
    for sample in client.post("/generate", json=several).raise_for_status().json():
        check(sample["meta_info"], sample["output_ids"])


def test_nothing_is_listed_where_nothing_is_filtered_or_asked(client):
    for params in ({**ASKED}, {"top_p": 0.7, "max_new_tokens": 3}):
        answer = client.post("/generate", json={"input_ids": [5, 6], "sampling_params": params}).json()
        assert not [key for key in answer["meta_info"] if key.startswith("top_p")]


def test_openais_answers_have_them_in_meta_info(client):
    body = {"prompt": [5, 6, 7], "max_tokens": 6, "seed": 5, "top_p": 0.6, "custom_params": ASKED["custom_params"]}
    refused = client.post("/v1/completions", json=body)
    assert refused.status_code == 400 and "return_meta_info" in refused.json()["error"]["message"]
    choice = client.post(
        "/v1/completions", json={**body, "return_meta_info": True, "return_token_ids": True}
    ).json()["choices"][0]  # fmt: skip
    check(choice["meta_info"], choice["token_ids"])


def test_an_answer_ends_where_they_would_be_too_many_for_the_server(client):
    params = {**ASKED, "top_k": 127, "max_new_tokens": 200, "ignore_eos": True}
    answer = client.post("/generate", json={"input_ids": [5, 6], "sampling_params": params}).json()
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert "more than 2000 tokens" in answer["meta_info"]["finish_reason"]["message"]
    assert answer["meta_info"]["completion_tokens"] == 16
