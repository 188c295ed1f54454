"""Tests of vLLM's token-in, token-out call, its abort, and of tokenize and detokenize, over a real socket."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator

import httpx
import pytest
import torch

from lockstep.integration.grpo.tasks.arithmetic import build_tokenizer
from lockstep.integration.http.edge.config import HttpConfig
from lockstep.integration.http.server import serve_in_background
from lockstep.integration.service import RolloutService
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.request_options import RequestOptions
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.tests.integration.http.openai.test_openai import TEMPLATE, small_model
from lockstep.tests.support.random_models import random_model

PROMPT = [5, 17, 9, 31]
ROUTE = "/inference/v1/generate"


@pytest.fixture(scope="module")
def service() -> Iterator[RolloutService]:
    torch.set_num_threads(1)
    tokenizer = build_tokenizer()
    tokenizer.chat_template = TEMPLATE
    service = RolloutService(Engine(small_model(), EngineConfig(kv_cache=64), tokenizer=tokenizer))
    with service.rollout():
        yield service
        service.engine.stop()


@pytest.fixture(scope="module")
def url(service: RolloutService) -> Iterator[str]:
    config = HttpConfig(port=0, model_name="small", api_key="user", admin_api_key="admin")
    with serve_in_background(service, config) as server:
        yield server.url


def post(url: str, path: str, body: dict, status: int = 200, key: str = "user") -> httpx.Response:
    answer = httpx.post(f"{url}{path}", json=body, timeout=60, headers={"Authorization": f"Bearer {key}"})
    assert answer.status_code == status, answer.text
    return answer


def generate(url: str, status: int = 200, **fields: object) -> dict:
    params = {"max_tokens": 6, "seed": 3} | fields.pop("sampling_params", {})
    return post(url, ROUTE, {"token_ids": PROMPT, "sampling_params": params, **fields}, status).json()


def streamed(url: str, **fields: object) -> list[dict]:
    params = {"max_tokens": 6, "seed": 3} | fields.pop("sampling_params", {})
    body = {"token_ids": PROMPT, "sampling_params": params, "stream": True, **fields}
    lines = [line for line in post(url, ROUTE, body).text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_the_answer_is_that_of_the_python_api(url, service):
    params = SamplingParams(n=2, max_new_tokens=6, sampling_seed=3)
    expected = service.engine.generate([PROMPT], params, options=RequestOptions(-1, 2))
    answer = generate(url, sampling_params={"n": 2, "logprobs": 2}, request_id="mine", return_token_ids=True)
    assert (answer["request_id"], answer["model"], answer["output_mode"]) == ("generate-tokens-mine", "small", "tokens")
    assert answer["prompt_token_ids"] == PROMPT
    num_new = sum(len(one.token_ids) for one in expected)
    counts = {"prompt_tokens": 4, "completion_tokens": num_new, "total_tokens": 4 + num_new}
    assert answer["usage"] == counts
    for index, (choice, one) in enumerate(zip(answer["choices"], expected, strict=True)):
        assert choice["index"] == index
        assert (choice["token_ids"], choice["finish_reason"]) == (list(one.token_ids), one.finish_reason.type)
        content = choice["logprobs"]["content"]
        assert [(at["token_id"], at["logprob"]) for at in content] == [*zip(one.token_ids, one.logprobs, strict=True)]
        # As `renderers` 0.1.12 demands it, the client of verifiers and prime-rl.
        assert [at["token"] for at in content] == [f"token_id:{id}" for id in one.token_ids]
        for at, top in zip(content, one.top_logprobs, strict=True):
            ranked = [(entry["logprob"], entry["token_id"]) for entry in at["top_logprobs"]]
            assert ranked == [tuple(entry) for entry in top]
            assert [entry["rank"] for entry in at["top_logprobs"]] == [1, 2]
            assert at["rank"] == next((rank for rank, (_, id) in enumerate(top, 1) if id == at["token_id"]), None)
        assert choice["weight_versions"] == [{"version": "default", "start": 0, "end": len(one.token_ids)}]
        assert "text" not in choice


def test_text_mode_has_texts(url, service):
    [choice] = generate(url, output_mode="text", sampling_params={"logprobs": 0})["choices"]
    [expected] = service.engine.generate([PROMPT], SamplingParams(max_new_tokens=6, sampling_seed=3))
    assert choice["text"] == expected.text
    decoded = [service.engine.tokenizer.decode([id]) for id in expected.token_ids]
    assert [at["token"] for at in choice["logprobs"]["content"]] == decoded
    assert all(at["top_logprobs"] == [] for at in choice["logprobs"]["content"])
    assert generate(url)["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("mode", ["tokens", "text"])
def test_a_stream_adds_up_to_the_whole_answer(url, mode):
    fields = {"sampling_params": {"n": 3, "logprobs": 1}, "output_mode": mode}
    whole = generate(url, **fields)
    events = streamed(url, **fields, stream_options={"include_usage": True}, return_token_ids=True)
    assert events[0]["prompt_token_ids"] == PROMPT and "prompt_token_ids" not in events[1]
    assert events[-1]["choices"] == [] and events[-1]["usage"] == whole["usage"]
    for choice in whole["choices"]:
        parts = [part for event in events for part in event["choices"] if part["index"] == choice["index"]]
        assert [id for part in parts for id in part["token_ids"]] == choice["token_ids"]
        content = [at for part in parts for at in part["logprobs"]["content"]]
        assert content == choice["logprobs"]["content"]
        if mode == "text":
            assert "".join(part["text"] for part in parts) == choice["text"]
        assert parts[-1]["finish_reason"] == choice["finish_reason"]
        assert parts[-1]["weight_versions"] == choice["weight_versions"]
        assert not any("weight_versions" in part for part in parts[:-1])


def test_every_chunk_counts_its_sequences_tokens_where_it_is_asked_for(url):
    options = {"include_usage": True, "continuous_usage_stats": True}
    num_new = [0, 0]
    *chunks, last = streamed(url, sampling_params={"n": 2}, stream_options=options)
    for chunk in chunks:
        [choice] = chunk["choices"]
        num_new[choice["index"]] += len(choice["token_ids"])
        counted = num_new[choice["index"]]
        total = len(PROMPT) + counted
        assert chunk["usage"] == {"prompt_tokens": len(PROMPT), "completion_tokens": counted, "total_tokens": total}
    assert last["usage"]["completion_tokens"] == sum(num_new)
    assert "usage" not in streamed(url, stream_options={"include_usage": True})[0]


def test_without_max_tokens_an_answer_fills_the_context(url, service):
    params = {"max_tokens": None, "ignore_eos": True}
    [choice] = generate(url, sampling_params=params)["choices"]
    assert len(choice["token_ids"]) == service.engine.max_model_len - len(PROMPT)
    assert choice["finish_reason"] == "length"


def test_prompt_and_named_log_probabilities(url, service):
    answer = generate(url, sampling_params={"prompt_logprobs": 1, "logprob_token_ids": [7, 8], "temperature": 0})
    options = RequestOptions(0, 1, (7, 8))
    greedy = SamplingParams(max_new_tokens=6, temperature=0)
    [expected] = service.engine.generate([PROMPT], greedy, options=options)
    assert answer["prompt_logprobs"][0] is None
    warm = generate(url, sampling_params={"prompt_logprobs": 1, "logprob_token_ids": [7, 8], "temperature": 1.7})
    assert warm["prompt_logprobs"] == answer["prompt_logprobs"], "vLLM's does not scale them"
    for at in (1, 2, 3):
        position = answer["prompt_logprobs"][at]
        assert position[str(PROMPT[at])]["logprob"] == expected.prompt_logprobs[at]
        listed = answer["prompt_token_id_logprobs"][at]
        assert listed == {str(id): logprob for logprob, id in expected.prompt_listed_logprobs[at]}
    [choice] = answer["choices"]
    for at, listed in zip(choice["logprobs"]["content"], expected.listed_logprobs, strict=True):
        assert [(e["logprob"], e["token_id"], e["rank"]) for e in at["top_logprobs"]] == [
            (logprob, id, None) for logprob, id in listed
        ]


def test_structured_outputs_stops_and_salts(url):
    params = {"structured_outputs": {"choice": ["12", "34"]}, "max_tokens": 8}
    [choice] = generate(url, output_mode="text", sampling_params=params)["choices"]
    assert choice["text"] in ("12", "34")
    [free] = generate(url, sampling_params={"temperature": 0})["choices"]
    stop = free["token_ids"][1]
    [choice] = generate(url, sampling_params={"temperature": 0, "stop_token_ids": [stop]})["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    [salted] = generate(url, cache_salt="a", priority=7, sampling_params={"temperature": 0})["choices"]
    assert salted["token_ids"] == free["token_ids"]


def test_a_stream_under_a_grammar_has_the_tokens_of_the_whole_answer(bpe_tokenizer):
    """Jumps by text replace tokens, which no event of this wire can say."""
    model = random_model("qwen3", vocab_size=len(bpe_tokenizer))
    service = RolloutService(Engine(model, EngineConfig(kv_cache=200), tokenizer=bpe_tokenizer))
    names = {"name": {"type": "string", "maxLength": 4}, "object of the city": {"type": "integer"}}
    schema = {"type": "object", "properties": names, "required": [*names], "additionalProperties": False}
    with service.rollout(), serve_in_background(service, HttpConfig(port=0)) as server:
        for seed in range(8):
            params = {"max_tokens": 60, "seed": seed, "structured_outputs": {"json": schema}}
            [whole] = generate(server.url, sampling_params=params)["choices"]
            parts = [event["choices"][0] for event in streamed(server.url, sampling_params=params)]
            assert [id for part in parts for id in part["token_ids"]] == whole["token_ids"]
    service.close()


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"token_ids": []}, 400, "token_ids"),
        ({"token_ids": [-1]}, 400, "token_ids.0"),
        ({"token_ids": ["a"]}, 400, "token_ids.0"),
        ({"token_ids": [5] * 5000}, 400, "token_ids"),
        ({"token_ids": [10**7]}, 400, None),
        ({"sampling_params": {"top_p": 7}}, 400, "sampling_params"),
        ({"sampling_params": {"bad_words": ["x"]}}, 400, "sampling_params.bad_words"),
        ({"sampling_params": {"logprobs": "many"}}, 400, "sampling_params.logprobs"),
        ({"sampling_params": {"logprobs": 10**6}}, 400, "sampling_params.logprobs"),
        ({"sampling_params": {"logprob_token_ids": "x"}}, 400, "sampling_params.logprob_token_ids"),
        ({"sampling_params": {"logprob_token_ids": False}}, 400, "sampling_params.logprob_token_ids"),
        ({"sampling_params": {"prompt_logprobs": 1}, "stream": True}, 400, "sampling_params.prompt_logprobs"),
        ({"sampling_params": {"n": 10**4}}, 400, "n"),
        ({"sampling_params": {"n": 10**6}}, 400, "sampling_params"),
        ({"sampling_params": {"structured_outputs": 3}}, 400, "sampling_params.structured_outputs"),
        ({"sampling_params": {"flat_logprobs": True}}, 400, "sampling_params.flat_logprobs"),
        ({"sampling_params": {"watermarking": True}}, 400, "sampling_params.watermarking"),
        ({"sampling_params": {"prompt_logprob_start": 3}}, 400, "sampling_params.prompt_logprob_start"),
        ({"sampling_params": {"prompt_logprob_token_ids": [1]}}, 400, "sampling_params.prompt_logprob_token_ids"),
        ({"reasoning_ended": False}, 400, "reasoning_ended"),
        ({"output_mode": "speech"}, 400, "output_mode"),
        ({"cache_salt": ""}, 400, "cache_salt"),
        ({"features": {"image": 1}}, 400, "features.mm_hashes"),
        ({"features": {"mm_hashes": {"image": ["x"]}, "mm_placeholders": {"image": []}}}, 400, "features"),
        ({"content_parts": [{"type": "image_url", "url": "data:,"}]}, 400, "content_parts.0.url"),
        ({"model": "other"}, 404, "model"),
        ({"model": "small:other"}, 404, "model"),
        ({"model": 3}, 404, "model"),
        ({"sampling_params": {"stop_token_ids": [128]}}, 400, "sampling_params"),
        ({"sampling_params": {"logprob_token_ids": [128]}}, 400, "sampling_params.logprob_token_ids"),
        ({"sampling_params": {"max_tokens": True}}, 400, "sampling_params"),
        ({"priority": True}, 400, "priority"),
    ],
)
def test_wrong_fields_are_refused_by_name_in_the_shape_of_the_wire(url, fields, status, param):
    error = generate(url, status, **fields)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert param is None or error["param"] == param, error
    body = {"sampling_params": {}} | fields
    if "token_ids" not in fields:
        assert post(url, ROUTE, body, 404 if status == 404 else 400).json()["error"]["message"]


# The fields of vLLM's SamplingParams (0.32) that no other test here asks for, with values other than their defaults.
CHANGE_NO_TOKEN = {
    "output_kind": 2, "skip_clone": True, "skip_reading_prefix_cache": True, "output_text_buffer_length": 3,
    "routed_experts_prompt_start": 2, "detokenize": False, "thinking_token_budget": -1,
    "repetition_detection": {"max_pattern_size": 0}, "an_unknown_one": 1,
}  # fmt: skip
REFUSED = {
    "allowed_token_ids": [5], "extra_args": {"a": 1}, "thinking_token_budget": 5, "trace_decode_token_ids": [5],
    "repetition_detection": {"max_pattern_size": 3, "min_count": 2},
    # Of earlier versions, and of SGLang and OpenAI:
    "best_of": 4, "use_beam_search": True, "length_penalty": 2.0, "truncate_prompt_tokens": 2, "guided_regex": "a",
    "vllm_xargs": {"a": 1}, "max_new_tokens": 3, "sampling_seed": 4, "json_schema": "{}", "stop_regex": "a",
    "response_format": {"type": "json_object"},
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_sampling_parameters_that_would_change_the_answer_are_refused_by_name(url, name):
    error = generate(url, 400, sampling_params={name: REFUSED[name]})["error"]
    assert error["param"] == f"sampling_params.{name}" and name in error["message"]
    assert generate(url, sampling_params={name: None})["choices"]


def test_sampling_parameters_that_change_no_token_are_taken(url):
    [expected] = generate(url)["choices"]
    for name, value in CHANGE_NO_TOKEN.items():
        [choice] = generate(url, sampling_params={name: value})["choices"]
        assert choice["token_ids"] == expected["token_ids"], name


def test_a_stream_has_as_many_tokens_in_each_event_as_it_asks_for(url):
    events = streamed(url, sampling_params={"stream_interval": 3, "ignore_eos": True})
    lengths = [len(event["choices"][0]["token_ids"]) for event in events]
    assert sum(lengths) == 6 and min(lengths[:-1], default=6) >= 3  # more where the reader is behind
    error = generate(url, 400, sampling_params={"stream_interval": 0})["error"]
    assert "stream_interval" in error["message"]


def test_requests_are_aborted_by_the_ids_of_their_clients(url, service, until):
    answers: list[dict] = []
    params = {"max_tokens": None, "ignore_eos": True, "n": 2}
    with service.engine.driver.lock:  # no step before all are there
        threads = [
            threading.Thread(target=lambda id=id: answers.append(generate(url, request_id=id, sampling_params=params)))
            for id in ("a", "b")
        ]
        for thread in threads:
            thread.start()
    until(lambda: service.engine.state()["num_running"] + service.engine.state()["num_waiting"] == 4)
    post(url, "/inference/v1/abort_requests", {"request_ids": ["a"]}, 403)
    body = {"request_ids": ["a", "generate-tokens-b", "nobody"]}
    answer = post(url, "/inference/v1/abort_requests", body, key="admin")
    assert answer.content == b""
    for thread in threads:
        thread.join(60)
    assert len(answers) == 2
    assert {choice["finish_reason"] for answer in answers for choice in answer["choices"]} == {"abort"}
    assert post(url, "/inference/v1/abort_requests", {}, 400, key="admin").json()["error"]["param"] == "request_ids"


def test_special_tokens_are_left_out_of_a_text_where_sglangs_client_asks_for_it(url, service):
    tokenizer = service.engine.tokenizer
    ids = [*tokenizer("1 + 2?")["input_ids"], tokenizer.eos_token_id]
    for skips in (False, True):
        text = tokenizer.decode(ids, skip_special_tokens=skips)
        assert text.endswith("2?") == skips
        body = {"tokens": ids, "skip_special_tokens": skips}
        assert post(url, "/detokenize", body).json() == {"prompt": text, "text": text}


def test_texts_and_conversations_are_tokenised_and_back(url, service):
    tokenizer = service.engine.tokenizer
    text = "1 + 2?"
    answer = post(url, "/tokenize", {"prompt": text, "return_token_strs": True}).json()
    ids = tokenizer(text)["input_ids"]
    assert answer == {"count": len(ids), "max_model_len": service.engine.max_model_len, "tokens": ids,
                      "token_strs": tokenizer.convert_ids_to_tokens(ids)}  # fmt: skip
    whole = tokenizer.decode(ids)
    assert post(url, "/detokenize", {"tokens": ids}).json() == {"prompt": whole, "text": whole}
    messages = [{"role": "user", "content": text}]
    chat = post(url, "/tokenize", {"messages": messages, "model": "small"}).json()
    assert chat["token_strs"] is None
    body = {"messages": messages, "max_tokens": 1, "return_token_ids": True}
    assert chat["tokens"] == post(url, "/v1/chat/completions", body).json()["prompt_token_ids"]
    without = post(url, "/tokenize", {"messages": messages, "add_generation_prompt": False}).json()
    assert without["count"] < chat["count"]
    for path, body, param in (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": messages}, "prompt"),
        ("/tokenize", {"messages": [{"content": "x"}]}, "messages.0.role"),
        ("/detokenize", {"tokens": [10**7]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens.0"),
        ("/detokenize", {"tokens": [[5], [6]]}, "tokens"),
        ("/detokenize", {"tokens": [5] * (service.engine.max_model_len + 1)}, "tokens"),
        ("/detokenize", {}, "tokens"),
    ):
        error = post(url, path, body, 400).json()["error"]
        assert error["param"] == param
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [5]})):
        for model in ("other", "small:other", 3):
            assert post(url, path, body | {"model": model}, 404).json()["error"]["param"] == "model"
