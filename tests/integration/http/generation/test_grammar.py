"""Tests of grammars over HTTP: fields, OpenAI's response_format, facts in answers, streams, and errors."""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
import time

import httpx
import jsonschema
import pytest
import torch
import transformers

from lockstep.integration.http.edge.config import HttpConfig
from lockstep.integration.http.generation.grammar_limits import check_grammar
from lockstep.integration.http.server import serve_in_background
from lockstep.integration.service import RolloutService
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.grammars.compiler import Constraint
from lockstep.rollout.grammars.process import CompilerProcess

PATIENCE = 60.0
SCHEMA = {
    "type": "object",
    "properties": {"città": {"enum": ["日本", "日本語€", "ключ"]}, "name": {"type": "string", "maxLength": 8}},
    "required": ["città", "name"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def served(bpe_tokenizer):
    config = transformers.Qwen3Config(
        vocab_size=1024, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=512, bos_token_id=None, eos_token_id=0,
        pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(2)
    module = transformers.Qwen3ForCausalLM(config).eval()
    service = RolloutService(Engine(module, EngineConfig(kv_cache="256 blocks"), tokenizer=bpe_tokenizer))
    service.engine.start()
    with (
        service.rollout(),
        serve_in_background(service, HttpConfig(port=0)) as server,
        httpx.Client(base_url=server.url, timeout=PATIENCE) as client,
    ):
        yield service.engine, client
    service.close()


def events(client: httpx.Client, path: str, body: dict) -> list[dict]:
    with client.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.parametrize("mode", ["text", "exact", "off"])
def test_generate_takes_a_schema_and_tells_what_was_forced(served, mode):
    _, client = served
    params = {"json_schema": json.dumps(SCHEMA), "jump_forward": mode, "max_new_tokens": 80, "sampling_seed": 1}
    answer = client.post("/generate", json={"text": "q", "sampling_params": params, "return_logprob": True}).json()
    jsonschema.validate(json.loads(answer["text"]), SCHEMA)
    meta = answer["meta_info"]
    assert (meta["num_jump_forward_tokens"] > 0) == (mode != "off")
    num_tokens = meta["completion_tokens"]
    assert len(meta["output_token_forced"]) == len(meta["output_token_masked_probs"]) == num_tokens
    assert len(meta["output_token_logprobs"]) == num_tokens and any(meta["output_token_forced"])


@pytest.mark.parametrize("seed", range(4))
def test_a_streams_last_chunk_is_what_the_ones_before_it_grew_to(served, seed):
    _, client = served
    params = {"json_schema": SCHEMA, "max_new_tokens": 60, "sampling_seed": seed}
    chunks = events(client, "/generate", {"text": "q", "sampling_params": params, "return_logprob": True})
    last = chunks[-1]
    for before, after in itertools.pairwise(chunks):
        assert after["text"].startswith(before["text"])
        assert len(before["output_ids"]) == len(before["meta_info"]["output_token_logprobs"])
    assert [triple[1] for triple in last["meta_info"]["output_token_logprobs"]] == last["output_ids"]


FORMATS = [
    ({"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}, SCHEMA),
    ({"type": "json_object"}, {"type": "object"}),
]


@pytest.mark.parametrize(("given", "schema"), FORMATS)
def test_response_format_constrains_a_completion(served, given, schema):
    _, client = served
    body = {"prompt": "q", "max_tokens": 80, "seed": 3, "response_format": given}
    choice = client.post("/v1/completions", json=body).json()["choices"][0]
    if choice["finish_reason"] == "stop":
        jsonschema.validate(json.loads(choice["text"]), schema)
    assert choice["text"].startswith("{")


def test_a_stream_of_pieces_never_takes_tokens_back(served):
    _, client = served
    body = {"prompt": "q", "max_tokens": 60, "seed": 3, "logprobs": 1, "return_token_ids": True,
            "response_format": FORMATS[0][0]}  # fmt: skip
    chunks = events(client, "/v1/completions", body)
    ids = [id for chunk in chunks for c in chunk["choices"] for id in c.get("token_ids") or ()]
    whole = client.post("/v1/completions", json={**body, "jump_forward": "exact"}).json()["choices"][0]
    assert ids == whole["token_ids"]
    assert "".join(c["text"] for chunk in chunks for c in chunk["choices"]) == whole["text"]
    refused = client.post("/v1/completions", json={**body, "stream": True, "jump_forward": "text"})
    assert refused.status_code == 400 and "jump_forward" in refused.text


@pytest.mark.parametrize(
    ("params", "why"),
    [
        ({"regex": "a(b"}, "position 4"),
        ({"json_schema": '{"type": '}, "line 1, column 10"),
        ({"json_schema": {"minimum": 3}}, "#/minimum"),
        ({"ebnf": 'root ::= "a" foo'}, "column 14"),
        ({"regex": "a", "ebnf": "b"}, "only one"),
        ({"regex": "a", "jump_forward": "far"}, "jump_forward"),
        ({"json_schema": "[" * 5000 + "]" * 5000}, "nested more than 64"),
    ],
)
def test_a_mistake_in_a_grammar_is_a_400_that_quotes_its_place(served, params, why):
    engine, client = served
    response = client.post("/generate", json={"text": "q", "sampling_params": params})
    assert response.status_code == 400 and why in response.text
    assert not engine.has_work


WRONG = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"minimum": 3}}}
DEEP = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"items": {"minLength": 10**6}}}}


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"response_format": WRONG}, "response_format"),
        ({"response_format": DEEP}, "response_format"),
        ({"structured_outputs": {"json": {"minimum": 3}}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a{10000000}"}}, "structured_outputs"),
        ({"response_format": {"type": "text"}, "regex": "a(b"}, "regex"),
        ({"ebnf": 'root ::= "a" foo'}, "ebnf"),
    ],
)
def test_the_error_of_a_grammar_names_the_field_that_it_came_in(served, given, param):
    engine, client = served
    for stream in (False, True, False):  # the last one finds the refusal that the first has left
        answer = client.post("/v1/completions", json={"prompt": "q", "stream": stream, **given})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert not engine.has_work


@pytest.mark.parametrize("structured", [{"json": {"minimum": 3}}, {"regex": "a{10000000}"}])
def test_so_does_that_of_vllms_call(served, structured):
    _, client = served
    body = {"token_ids": [5, 6], "sampling_params": {"structured_outputs": structured}}
    answer = client.post("/inference/v1/generate", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "sampling_params.structured_outputs")


def test_many_slow_grammars_hold_up_nobody_else(served, monkeypatch):
    _, client = served
    may_go_on, compile = threading.Event(), CompilerProcess.compile

    def slow(self, constraint):
        assert may_go_on.wait(PATIENCE)
        return compile(self, constraint)

    monkeypatch.setattr(CompilerProcess, "compile", slow)
    answers = []

    def ask(number: int) -> None:
        params = {"regex": f"name {number}", "max_new_tokens": 20}
        answers.append(httpx.post(f"{client.base_url}/generate", json={"text": "q", "sampling_params": params},
                                  timeout=PATIENCE).json()["text"])  # fmt: skip

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    free = client.post("/generate", json={"text": "q", "sampling_params": {"max_new_tokens": 3, "ignore_eos": True}})
    assert free.json()["meta_info"]["completion_tokens"] == 3 and not answers
    may_go_on.set()
    for thread in threads:
        thread.join(PATIENCE)
    assert sorted(answers) == [f"name {number}" for number in range(8)]


HOSTILE = [
    ({"json_schema": {"type": "string", "pattern": "(" * 8000 + "a" + ")" * 8000}}, "max_grammar_nesting"),
    ({"json_schema": {"type": "string", "pattern": "[^" * 9000}}, "max_pattern_bytes"),
    ({"json_schema": {"items": {"type": "string", "minLength": 10**6}}}, "max_grammar_repeats"),
    ({"json_schema": {"enum": list(range(10_001))}}, "max_grammar_alternatives"),
    ({"regex": "a" * 300_000}, "max_grammar_bytes"),
    ({"regex": "a{10000000}"}, "max_grammar_repeats"),
    ({"regex": "|".join("a" * 10_002)}, "max_grammar_alternatives"),
    ({"ebnf": "root ::= " + "(" * 65 + '"a"' + ")" * 65}, "max_grammar_nesting"),
    ({"ebnf": 'root ::= "a" root'}, "without end"),
    ({"json_schema": {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}}, "without end"),
    ({"structural_tag": {"format": {"type": "grammar", "grammar": "root ::= " + "(" * 65}}}, "max_grammar_nesting"),
    ({"structural_tag": {"format": {"type": "regex", "pattern": "a{10000000}"}}}, "max_grammar_repeats"),
    ({"stop_regex": "(?:(?:(?:x?){100}){100}){100}y"}, "repeats written out"),
]


@pytest.mark.parametrize(("params", "why"), HOSTILE)
def test_a_grammar_that_would_cost_too_much_is_a_400_that_names_the_limit(served, params, why):
    engine, client = served
    response = client.post("/generate", json={"text": "q", "sampling_params": params})
    assert response.status_code == 400 and why in response.text, response.text[:500]
    assert not engine.has_work


def test_a_regex_that_is_a_part_of_a_structural_tag_may_be_as_long_as_one_that_is_the_grammar():
    text = "a" * (HttpConfig().max_pattern_bytes + 1)
    check_grammar(Constraint("regex", text), HttpConfig())
    tag = json.dumps({"type": "structural_tag", "format": {"type": "regex", "pattern": text}})
    check_grammar(Constraint("structural_tag", tag), HttpConfig())


def test_what_looks_like_nesting_inside_texts_and_classes_is_none(served):
    _, client = served
    for params in ({"ebnf": 'root ::= "' + "(" * 99 + '"'}, {"regex": r"\(" * 99 + "[(]" * 99}):
        answer = client.post("/generate", json={"text": "q", "sampling_params": {**params, "max_new_tokens": 3}})
        assert answer.status_code == 200, answer.text


def test_too_many_waiting_grammars_are_a_503_that_says_when_to_try_again(served, monkeypatch):
    engine, client = served
    monkeypatch.setattr(engine.parts.grammars.cache, "_max_waiting", 0)
    response = client.post("/generate", json={"text": "q", "sampling_params": {"regex": "not compiled before"}})
    assert response.status_code == 503 and int(response.headers["Retry-After"]) > 0
    assert "max_waiting_grammars" in response.text


def test_a_client_that_leaves_takes_its_waiting_grammar_along(served, monkeypatch):
    engine, client = served
    may_go_on, asked, compile = threading.Event(), [], CompilerProcess.compile

    def slow(self, constraint):
        asked.append(constraint.text)
        assert may_go_on.wait(PATIENCE)
        return compile(self, constraint)

    monkeypatch.setattr(CompilerProcess, "compile", slow)
    cache = engine.parts.grammars.cache

    def wait_until(condition) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline
            threading.Event().wait(0.005)

    def ask(text: str, timeout_s: float) -> None:
        body = {"text": "q", "sampling_params": {"regex": text, "max_new_tokens": 9}}
        with contextlib.suppress(httpx.ReadTimeout):
            httpx.post(f"{client.base_url}/generate", json=body, timeout=timeout_s)

    threads = [threading.Thread(target=ask, args=(f"busy{number}", PATIENCE)) for number in range(2)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(asked) == 2)
    ask("left", 1.0)
    wait_until(lambda: not cache._waiting)
    may_go_on.set()
    for thread in threads:
        thread.join(PATIENCE)
    assert sorted(asked) == ["busy0", "busy1"]


def test_metrics_count_jumps(served):
    _, client = served
    text = client.get("/metrics").text
    for name in ("jump_forward_tokens", "forwards_saved", "retokenisations", "grammar_seconds"):
        assert f"lockstep:{name}" in text
