"""Tests of the limits of generation over a real socket: counts, lengths, bodies and the queue."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator

import httpx
import pytest
from pydantic import ValidationError

from lockstep.integration.http.edge.bodies import fields_of
from lockstep.integration.http.edge.config import HttpConfig
from lockstep.integration.http.edge.errors import BadField
from lockstep.integration.http.generation import body as generate_body
from lockstep.integration.http.generation import encoding, tokenising
from lockstep.integration.http.generation.body import GenerateBody, read_generate, read_renew
from lockstep.integration.http.generation.limits import RequestLimits
from lockstep.integration.http.openai import body as openai_body
from lockstep.integration.http.openai.body import read_chat, read_completion
from lockstep.integration.http.openai.fields import ChatBody
from lockstep.integration.http.server import BackgroundServer, serve_in_background
from lockstep.integration.http.vllm import body as vllm_body
from lockstep.integration.http.vllm.body import read_inference
from lockstep.integration.service import RolloutService
from lockstep.tests.support.callers import soon, submit

MANY = 300_000  # entries: more than any context has tokens
LATEST_S = 10.0  # generous, since other tests share the cores; the torture suite measures against 2 s
SHORT = {"max_new_tokens": 2, "temperature": 0, "ignore_eos": True}
LIMITS = HttpConfig(
    port=0, max_prompts=8, max_sequences=16, max_stop_bytes=100, max_stop_token_ids=7, max_logit_bias=10,
    max_top_logprobs=5, max_listed_logprobs=6, max_logprob_entries=200, max_control_body_bytes=1000,
    max_waiting_requests=20, max_waiting_tokens=1000,
)  # fmt: skip


def bias() -> bytes:
    return b",".join(b'"%d":1' % id for id in range(2 << 20))


@pytest.fixture(scope="module")
def service(small_service) -> RolloutService:
    return small_service


@pytest.fixture(scope="module")
def served(service) -> Iterator[BackgroundServer]:
    with serve_in_background(service, LIMITS) as server:
        yield server


@pytest.fixture
def client(served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=60) as client:
        yield client


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"text": ["1"] * 9}, "text", "the 8 prompts of a request (max_prompts)"),
        ({"input_ids": [[1]] * 9}, "input_ids", "the 8 prompts of a request (max_prompts)"),
        ({"rid": ["1"] * 9}, "rid", "(max_prompts)"),
        ({"sampling_params": [SHORT] * 9}, "sampling_params", "(max_prompts)"),
        ({"sampling_params": {"n": 17}}, "n", "17 sequences are more than the 16"),
        ({"sampling_params": {"stop": ["x" * 60, "y" * 60]}}, "sampling_params", "stop has 120 bytes, more than 100"),
        (
            {"sampling_params": {"logit_bias": {str(id): 1 for id in range(11)}}},
            "sampling_params",
            "logit_bias has 11 entries, more than 10 (max_logit_bias",
        ),
        ({"rid": "x" * 1025}, "rid", "has 1025 characters, more than 1024"),
        ({"extra_key": ["x" * 1025]}, "extra_key", "more than 1024"),
        ({"sampling_params": {"stop_token_ids": [1] * 8}}, "sampling_params", "8 entries, more than 7"),
        ({"sampling_params": {"stop_token_ids": [3, 9999]}}, "sampling_params", "stop_token_ids names [9999], but the"),
        ({"return_logprob": True, "token_ids_logprob": [9999]}, "token_ids_logprob", "names [9999], but the"),
        ({"return_logprob": True, "top_logprobs_num": True}, "top_logprobs_num", "must be a number, not true"),
        ({"sampling_params": {"temperature": [1] * 100_000}}, "sampling_params", "temperature must be"),
        (
            {"return_logprob": True, "top_logprobs_num": 5, "stream": True, "sampling_params": {"max_new_tokens": 6}},
            "top_logprobs_num",
            "36 log-probabilities are more than the 25 of a stream, 1/8",
        ),
        ({"sampling_params": {"custom_params": {"a": [0] * (1 << 18)}}}, "sampling_params", "more than 262144 values"),
        ({"return_logprob": True, "top_logprobs_num": 6}, "top_logprobs_num", "6 are more than 5 (max_top_logprobs)"),
        ({"return_logprob": True, "top_logprobs_num": 10**9}, "top_logprobs_num", "(max_top_logprobs)"),
        ({"return_logprob": True, "token_ids_logprob": list(range(7))}, "token_ids_logprob", "(max_listed_logprobs)"),
        (
            {"text": ["1"], "return_logprob": True, "token_ids_logprob": [list(range(7))]},
            "token_ids_logprob",
            "7 tokens are more than 6 (max_listed_logprobs)",
        ),
        (
            {"return_logprob": True, "top_logprobs_num": 5, "sampling_params": {"max_new_tokens": 41}},
            "top_logprobs_num",
            "246 log-probabilities are more than the 200",
        ),
        (
            {"return_logprob": True, "top_logprobs_num": 5, "sampling_params": {"max_new_tokens": 20, "n": 3}},
            "top_logprobs_num",
            "360 log-probabilities",
        ),
        (
            {"input_ids": [3] * 60, "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 4,
             "sampling_params": SHORT},
            "top_logprobs_num",
            "310 log-probabilities",
        ),
        (
            {"input_ids": [3] * 60, "return_logprob": True, "logprob_start_len": 0,
             "sampling_params": {**SHORT, "n": 4}},
            "top_logprobs_num",
            "241 log-probabilities",
        ),
        ({"return_logprob": True, "sampling_params": {"max_new_tokens": 403, "n": 4}}, "top_logprobs_num", "202 log-"),
        ({"input_ids": [1] * 513}, "input_ids", "513 tokens) exceeds the maximum allowed length"),
    ],
)  # fmt: skip
def test_each_limit_of_generate_is_a_400_that_names_its_setting(client, fields, param, says):
    prompt = {} if {"text", "input_ids"} & set(fields) else {"text": "1 + 2"}
    answer = client.post("/generate", json={**prompt, **fields})
    assert answer.status_code == 400, answer.text
    assert answer.json()["param"] == param and says in answer.json()["message"]
    assert len(answer.content) < 5000


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"prompt": ["1"] * 9}, "prompt", "(max_prompts)"),
        ({"prompt": [[1]] * 9}, "prompt", "(max_prompts)"),
        ({"prompt": "1", "n": 17}, "n", "(max_sequences)"),
        ({"prompt": "1", "logprobs": 6}, "logprobs", "(max_top_logprobs)"),
        ({"prompt": "1", "logprobs": 5, "max_tokens": 41}, "logprobs", "(max_logprob_entries)"),
        ({"prompt": "1", "logprobs": 0, "max_tokens": 403, "n": 4}, "logprobs", "(max_logprob_entries)"),
        ({"prompt": "1", "return_meta_info": True, "max_tokens": 403, "n": 4}, "logprobs", "(max_logprob_entries)"),
        ({"prompt": "1", "logit_bias": {str(id): 1 for id in range(11)}}, "logit_bias", "(max_logit_bias"),
        ({"prompt": "1", "model": "x" * 1025}, "model", "more than 1024"),
        ({"prompt": "1", "stop": "x" * 101}, "stop", "(max_stop_bytes)"),
        ({"messages": [], "top_logprobs": 6, "logprobs": True}, "top_logprobs", "(max_top_logprobs)"),
        ({"input_ids": [1], "top_logprobs": 5, "logprobs": True}, "top_logprobs", "(max_logprob_entries)"),
        (
            {"messages": [{"role": "user", "content": "1" * 1000}] * 40},
            "messages",
            "Input length (40000 characters) exceeds the maximum allowed length",
        ),
    ],
)
def test_each_limit_of_openais_calls_is_a_400_that_names_its_setting(client, fields, param, says):
    path = "/v1/completions" if "prompt" in fields else "/v1/chat/completions"
    answer = client.post(path, json={"model": "", **fields})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param and says in answer.json()["error"]["message"]


def test_requests_up_to_the_limits_are_answered(client):
    body = {"text": ["1"] * 8, "sampling_params": {**SHORT, "n": 2, "stop": "x" * 100}}
    answer = client.post("/generate", json={**body, "return_logprob": True, "top_logprobs_num": 5})
    assert answer.status_code == 200 and len(answer.json()) == 16
    listed = {"return_logprob": True, "token_ids_logprob": list(range(6)), "sampling_params": SHORT}
    assert client.post("/generate", json={"text": "1", **listed}).status_code == 200


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(client, service, monkeypatch):
    longest = max(map(len, service.engine.tokenizer.get_vocab()))

    def tokenise(*_: object) -> object:
        raise AssertionError("it was tokenised")

    monkeypatch.setattr(tokenising, "prompt_ids", tokenise)
    text = "1" * (512 * longest + 1)
    answer = client.post("/generate", json={"text": text})
    assert (
        answer.status_code == 400 and f"exceeds the maximum allowed length ({512 * longest}" in answer.json()["message"]
    )
    for path, body in (
        ("completions", {"prompt": text}),
        ("chat/completions", {"messages": [{"role": "user", "content": text}]}),
    ):
        answer = client.post(f"/v1/{path}", json=body)
        assert answer.status_code == 400 and "exceeds the maximum" in answer.json()["error"]["message"]


@pytest.mark.parametrize("num_tokens", [512, 513, 600])
def test_every_refusal_of_a_long_prompt_says_the_same_longest_one(client, num_tokens):
    ids = [1] * num_tokens
    said = f"Input length ({num_tokens} tokens) exceeds the maximum allowed length (511 tokens"
    for path, body in (
        ("/generate", {"input_ids": ids}),
        ("/v1/completions", {"prompt": ids}),
        ("/inference/v1/generate", {"token_ids": ids, "sampling_params": {"max_tokens": 1}}),
    ):
        answer = client.post(path, json=body)
        assert answer.status_code == 400 and said in answer.text
    answer = client.post("/generate", json={"input_ids": ids, "sampling_params": {"max_new_tokens": 0}})
    assert answer.status_code == (200 if num_tokens == 512 else 400)
    assert num_tokens == 512 or "; 512 where none are generated)" in answer.text
    assert client.post("/generate", json={"input_ids": ids[:511], "sampling_params": SHORT}).status_code == 200


def test_too_many_samples_are_refused_before_settings_are_built(served, monkeypatch):
    limits = generate_body.RequestLimits(served.app.state.service.engine, LIMITS)
    monkeypatch.setattr(generate_body, "sampling_params", lambda given: pytest.fail("settings were built"))
    values = {"input_ids": [[1]] * 8, "sampling_params": [{"n": 3, "top_k": k} for k in range(1, 9)]}
    with pytest.raises(BadField, match="24 sequences are more than the 16"):
        generate_body.read_generate(values, served.app.state.service.engine, limits)


def test_equal_settings_of_a_batch_are_built_once(client, served):
    made = []

    limits = generate_body.RequestLimits(served.app.state.service.engine, LIMITS)
    with pytest.MonkeyPatch.context() as patched:
        params = generate_body.SamplingParams
        patched.setattr(generate_body, "sampling_params", lambda given: made.append(given) or params.from_dict(given))
        found = generate_body._all_params([{"n": 1}, {"n": 2}, {"n": 1}, {"n": 2}] * 100, limits)
    assert len(made) == 2 and [one.n for one in found[:3]] == [1, 2, 1] and found[0] is found[2]


# -- bodies ---------------------------------------------------------------------------------------------------------


def test_calls_without_data_have_a_small_limit_and_others_a_large_one(client):
    padding = {"pad": "x" * 2000}
    for path in ("/pause_generation", "/continue_generation", "/abort_request", "/flush_cache", "/start_profile"):
        answer = client.post(path, json=padding)
        assert answer.status_code == 413 and "1000 bytes" in answer.json()["message"], path
    assert client.post("/hicache/pin_blocks", json={"block_hashes": [1], **padding}).status_code == 200
    assert client.post("/generate", json={"text": "1", "sampling_params": SHORT, **padding}).status_code == 200


def test_bodies_that_are_open_together_are_limited(service):
    config = HttpConfig(port=0, max_open_body_bytes=100_000, max_body_bytes=90_000)
    with serve_in_background(service, config) as server:
        began, may_go_on = threading.Event(), threading.Event()

        def slowly() -> Iterator[bytes]:
            yield b'{"text": "1", "pad": "' + b"x" * 80_000
            began.set()
            may_go_on.wait(60)
            yield b'"}'

        first = submit(httpx.post, f"{server.url}/generate", content=slowly(), timeout=60)
        assert began.wait(60)
        bodies = server.app.state
        while getattr(bodies, "open_bodies", None) is None or bodies.open_bodies.num_bytes < 80_000:
            assert httpx.get(f"{server.url}/health").status_code == 200
        answer = httpx.post(f"{server.url}/generate", json={"text": "1", "pad": "x" * 30_000})
        assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
        assert "max_open_body_bytes" in answer.json()["message"]
        may_go_on.set()
        assert soon(first).status_code == 200
        assert server.app.state.open_bodies.num_bytes == 0


LONG_BODIES = {
    "prompts": lambda: b'{"input_ids": [' + b"[1]," * (7 << 20) + b"[1]]}",
    "bias": lambda: b'{"text": "1", "sampling_params": {"logit_bias": {' + bias() + b"}}}",
    "ids": lambda: b'{"text": "1", "rid": [' + b"{}," * (8 << 20) + b"{}]}",
    "floats": lambda: b'{"text": "1", "sampling_params": {"temperature": [' + b"1.5," * (7 << 20) + b"1]}}",
    "surrogate": lambda: b'{"text": "' + b"\\ud83d\\ude00 " * (2 << 20) + b'", "x": "\\ud800"}',
}


@pytest.mark.parametrize("body", LONG_BODIES)
@pytest.mark.slow
def test_health_and_state_are_in_time_while_a_body_of_32_mb_is_read(service, body):
    body = LONG_BODIES[body]()[: 32 << 20]
    with serve_in_background(service, HttpConfig(port=0)) as server:
        sending = [submit(httpx.post, f"{server.url}/generate", content=body, timeout=300) for _ in range(2)]
        latest = 0.0
        with httpx.Client(base_url=server.url, timeout=60) as client:
            while not all(future.done() for future in sending):
                for path in ("/health", "/state"):
                    began = time.monotonic()
                    assert client.get(path).status_code == 200
                    latest = max(latest, time.monotonic() - began)
        assert all(soon(future).status_code in (400, 413) for future in sending)
        assert latest < LATEST_S


@pytest.mark.parametrize(
    ("model", "values", "field"),
    [
        (ChatBody, {"input_ids": [None] * 50_000}, "input_ids"),
        (GenerateBody, {"rid": [None] * 50_000}, "rid"),
        (GenerateBody, {"sampling_params": [1] * 50_000}, "sampling_params"),
    ],
)
def test_a_list_of_wrong_entries_ends_at_its_first_one(model, values, field):
    with pytest.raises(ValidationError) as found:
        model.model_validate(values)
    assert found.value.error_count() <= 5  # one for each kind of value that the field may have
    with pytest.raises(BadField) as refused:
        fields_of(model, values)
    assert refused.value.param.startswith(field)


# -- the queue ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("read", "values", "says"),
    [
        (read_generate, {"input_ids": [7] * MANY}, "input_ids: Input length"),
        (read_generate, {"input_ids": [[7] * MANY]}, "input_ids: Input length"),
        (read_generate, {"input_ids": [[7]] * MANY}, "(max_prompts)"),
        (read_generate, {"input_ids": [7], "token_ids_logprob": [7] * MANY}, "token_ids_logprob: "),
        (read_generate, {"input_ids": [7], "draft_token_ids": [7] * MANY}, "draft_token_ids: "),
        (read_renew, {"input_ids": [7], "output_ids": [[7] * MANY]}, "output_ids: "),
        (read_completion, {"prompt": [7] * MANY}, "prompt: Input length"),
        (read_completion, {"prompt": ["a"] * MANY}, "(max_prompts)"),
        (read_chat, {"input_ids": [7] * MANY}, "input_ids: Input length"),
        (read_chat, {"messages": [{"role": "user", "content": "a"}] * MANY}, "messages"),
        (read_inference, {"token_ids": [7] * MANY, "sampling_params": {}}, "token_ids: Input length"),
    ],
)
def test_lists_that_no_context_has_room_for_are_refused_before_they_are_walked(
    service, monkeypatch, read, values, says
):
    """A walk over millions of entries is one call that holds all threads."""

    def walk(*_: object) -> None:
        raise AssertionError("the fields were checked one by one")

    for module in (generate_body, openai_body, vllm_body):
        monkeypatch.setattr(module, "fields_of", walk)
    limits = RequestLimits(service.engine, HttpConfig())
    args = (values, service.engine) if read in (read_generate, read_renew) else (values, service.engine, "m")
    with pytest.raises(BadField) as refused:
        read(*args, limits)
    assert says in str(refused.value)


def test_a_prompt_that_is_truncated_is_cut_before_it_is_walked(service, monkeypatch):
    seen = []

    def look(model: type, values: dict) -> object:
        seen.append(values["prompt"])
        return fields_of(model, values)

    monkeypatch.setattr(openai_body, "fields_of", look)
    limits, room = RequestLimits(service.engine, HttpConfig()), service.engine.max_model_len
    for prompt, expected in (([1] * MANY + [2, 3], room), ([[1] * MANY + [2, 3], [4]], room)):
        asked = read_completion({"prompt": prompt, "truncate_prompt_tokens": 3}, service.engine, "m", limits).asked()
        assert list(asked.prompts[0]) == [1, 2, 3]
        [cut] = [seen.pop()]
        assert len(cut if isinstance(cut[0], int) else cut[0]) == expected


def test_what_waits_is_limited_and_a_refusal_says_when_to_come_again(served, client, service, until):
    service.engine.pause_generation("in_place")
    ask = {"input_ids": [5, 6], "sampling_params": {**SHORT, "n": 10}}
    waiting = [submit(httpx.post, f"{served.url}/generate", json=ask, timeout=60) for _ in range(2)]
    until(lambda: service.engine.state()["num_waiting"] == 20)
    for path, body in (("/generate", ask), ("/v1/completions", {"prompt": [5, 6]})):
        answer = client.post(path, json=body)
        assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
        assert "max_waiting_requests" in answer.text and answer.json()["error"]["code"] == "overloaded"
    service.engine.continue_generation()
    assert [soon(one).status_code for one in waiting] == [200, 200]
    assert client.post("/generate", json=ask).status_code == 200


def test_the_tokens_that_wait_are_limited(served, client, service, until):
    service.engine.pause_generation("in_place")
    ask = {"input_ids": [5] * 450, "sampling_params": SHORT}
    waiting = [submit(httpx.post, f"{served.url}/generate", json=ask, timeout=60) for _ in range(2)]
    until(lambda: service.engine.state()["num_waiting"] == 2)
    answer = client.post("/generate", json=ask)
    assert answer.status_code == 503 and "max_waiting_tokens" in answer.text and answer.headers["retry-after"] == "1"
    service.engine.continue_generation()
    assert [soon(one).status_code for one in waiting] == [200, 200]
    assert client.post("/generate", json=ask).status_code == 200
    alone = client.post("/generate", json={**ask, "sampling_params": {**SHORT, "n": 3}})
    assert (
        alone.status_code == 400 and "1350 tokens, more than the 1000 that may wait (max_waiting_tokens)" in alone.text
    )


def test_the_logprobs_of_all_open_requests_are_limited(service, until):
    scored = {"input_ids": [5] * 60, "return_logprob": True, "logprob_start_len": 0, "sampling_params": SHORT}
    with serve_in_background(service, HttpConfig(port=0, max_open_logprob_entries=100)) as server:

        def post(**fields: object) -> httpx.Response:
            return httpx.post(f"{server.url}/generate", json={**scored, **fields}, timeout=60)

        service.engine.pause_generation("in_place")
        waiting = submit(post)
        until(lambda: service.engine.state()["num_waiting"] == 1)
        assert server.app.state.hub.entries.num == 60
        for stream in (False, True):
            answer = post(stream=stream)
            assert answer.status_code == 503 and "max_open_logprob_entries" in answer.text
            assert answer.headers["retry-after"] == "1" and answer.json()["error"]["code"] == "overloaded"
        # Plain log-probabilities of the output do not count.
        others = submit(post, logprob_start_len=-1, sampling_params={**SHORT, "n": 60})
        until(lambda: service.engine.state()["num_waiting"] == 61)
        service.engine.continue_generation()
        assert soon(waiting).status_code == soon(others).status_code == 200
        for stream in (False, True):
            assert post(top_logprobs_num=2, stream=stream).status_code == 200  # alone, a request may have more
        until(lambda: server.app.state.hub.entries.num == 0)


def test_a_large_answer_is_the_answer_that_a_small_one_would_be(client, served, service, monkeypatch):
    ask = {"text": ["1 + 2", "3"], "sampling_params": {**SHORT, "n": 2, "sampling_seed": 1}, "return_logprob": True,
           "top_logprobs_num": 5, "return_text_in_logprobs": True, "speculation": False}  # fmt: skip
    small = client.post("/generate", json=ask)
    monkeypatch.setattr(encoding, "QUICK_COST", 3)
    large = client.post("/generate", json=ask)

    def comparable(answer: httpx.Response) -> list[dict]:
        assert answer.status_code == 200 and answer.headers["content-type"] == "application/json"
        shown = json.loads(answer.content)
        for one in shown:
            for name in ("id", "e2e_latency", "cached_tokens", "cached_tokens_details", "response_sent_to_client_ts"):
                one["meta_info"].pop(name, None)
        return shown

    assert comparable(small) == comparable(large)
