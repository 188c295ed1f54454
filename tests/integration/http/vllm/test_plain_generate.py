"""Tests of vLLM's plain call at /generate, beside SGLang's."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from lockstep.integration.http.edge.config import HttpConfig
from lockstep.integration.http.server import serve_in_background
from lockstep.integration.service import RolloutService
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.tests.support.bpe_tokenizer import train_tokenizer

IDS = [5, 17, 9]
PLAIN = {"prompt": {"prompt_token_ids": IDS}, "temperature": 1.0, "seed": 3, "ignore_eos": True}


@pytest.fixture(scope="module")
def client(tmp_path_factory) -> Iterator[httpx.Client]:
    from lockstep.tests.support.random_models import random_model

    folder = tmp_path_factory.mktemp("model")
    random_model("qwen3", vocab_size=1000).save_pretrained(folder)
    train_tokenizer().save_pretrained(folder)
    service = RolloutService(Engine(folder, EngineConfig(kv_cache="32 blocks", max_num_seqs=4)))
    server = serve_in_background(service, HttpConfig(port=0))
    with server as running, httpx.Client(base_url=running.url, timeout=60) as client:
        yield client
    service.close()


def ask(client: httpx.Client, status: int = 200, **fields: object) -> dict:
    answer = client.post("/generate", json=fields)
    assert answer.status_code == status, answer.text
    return answer.json()


def test_samples_are_those_of_the_other_calls_with_log_probabilities_by_id(client):
    made = ask(client, **PLAIN, n=2, logprobs=0, max_tokens=4)
    params = {"max_new_tokens": 4, "n": 2, "temperature": 1.0, "sampling_seed": 3, "ignore_eos": True}
    others = ask(client, input_ids=IDS, sampling_params=params, return_logprob=True)
    assert made["prompt_token_ids"] == IDS and made["finish_reasons"] == ["length"] * 2
    for text, ids, logprobs, spans, other in zip(
        made["text"], made["token_ids"], made["logprobs"], made["weight_versions"], others, strict=True
    ):
        triples = other["meta_info"]["output_token_logprobs"]
        assert (text, ids) == (other["text"], [id for _, id, *_ in triples])
        assert logprobs == [[{str(id): logprob}] for logprob, id, *_ in triples]
        assert spans == [{"version": "default", "start": 0, "end": 4}]
    assert len(ask(client, **PLAIN)["token_ids"][0]) == 16  # by default
    likeliest = ask(client, **PLAIN, logprobs=2, max_tokens=4)
    for id, [at] in zip(likeliest["token_ids"][0], likeliest["logprobs"][0], strict=True):
        assert next(iter(at)) == str(id) and len(at) in (2, 3)


def test_prompts_are_scored_by_position(client):
    made = ask(client, **PLAIN, prompt_logprobs=2, max_tokens=1)
    assert "logprobs" not in made
    first, *rest = made["prompt_logprobs"]
    scored = ask(client, input_ids=IDS, sampling_params={"max_new_tokens": 1}, return_logprob=True,
                 logprob_start_len=0)["meta_info"]["input_token_logprobs"]  # fmt: skip
    assert first is None and [next(iter(at.items())) for at in rest] == [(str(id), one) for one, id, *_ in scored[1:]]
    assert all(len(at) in (2, 3) for at in rest)


def test_fields_that_a_router_adds_are_no_sampling_parameters(client):
    assert ask(client, default_seed=3, progress=True, **{**PLAIN, "seed": None}, max_tokens=4)["token_ids"]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"prompt": "text"}, "prompt_token_ids"),
        ({"prompt": {"prompt_token_ids": []}}, "token_ids"),
        ({**PLAIN, "stream": True}, "/v1/completions streams"),
        ({**PLAIN, "use_beam_search": True}, "use_beam_search"),
    ],
)
def test_what_it_does_not_take_is_refused_by_name(client, fields, named):
    assert named in ask(client, 400, **fields)["message"]
