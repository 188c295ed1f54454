"""Tests of /generate over a real socket: fields of requests, shapes of answers, streams, aborts, and disconnects."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import pytest
import torch
from transformers import PreTrainedModel

from lockstep.integration.grpo.tasks.arithmetic import build_tokenizer
from lockstep.integration.http.edge.config import HttpConfig
from lockstep.integration.http.generation.sse import GrowingList, GrowingText
from lockstep.integration.http.server import serve_in_background
from lockstep.integration.service import RolloutService
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.tests.support.random_models import random_model

PATIENCE = 30.0  # seconds; no test comes near them
CONTEXT = 512
NUM_BLOCKS = 24  # of 16 tokens: fewer than one whole context
GREEDY = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
PROMPT = "What is 347 + 285?\n"
LONG = {"temperature": 0, "max_new_tokens": 340, "ignore_eos": True}


def small_model() -> PreTrainedModel:
    """Make a model with every token of the tokenizer."""
    return random_model("qwen3", vocab_size=128, max_position_embeddings=CONTEXT)


class Server:
    """A service behind HTTP, and its client."""

    def __init__(self, service: RolloutService, url: str) -> None:
        self.service, self.engine, self.url = service, service.engine, url
        self.client = httpx.Client(base_url=url, timeout=PATIENCE)

    def post(self, **body: object) -> httpx.Response:
        return self.client.post("/generate", json=body)

    def ok(self, **body: object):
        response = self.post(**body)
        assert response.status_code == 200, response.text
        return response.json()

    def stream(self, **body: object) -> list[dict]:
        """Return every chunk of a stream, and check its end."""
        with self.client.stream("POST", "/generate", json={**body, "stream": True}) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"].startswith("text/event-stream")
            lines = [line for line in response.iter_lines() if line]
        assert lines[-1] == "data: [DONE]" and all(line.startswith("data: ") for line in lines)
        return [json.loads(line[6:]) for line in lines[:-1]]


@contextmanager
def serving(model: PreTrainedModel) -> Iterator[Server]:
    torch.set_num_threads(1)
    engine = Engine(model, EngineConfig(kv_cache=NUM_BLOCKS), tokenizer=build_tokenizer())
    service = RolloutService(engine)
    with service.rollout(), serve_in_background(service, HttpConfig(port=0)) as background:
        server = Server(service, background.url)
        yield server
        server.client.close()
        engine.stop()


@pytest.fixture(scope="module")
def running() -> Iterator[Server]:
    with serving(small_model()) as server:
        yield server


@pytest.fixture
def server(running: Server) -> Iterator[Server]:
    """Yield a server that is idle before and after the test, with an empty cache and no leaked block."""
    running.engine.flush_cache()
    yield running
    eventually(lambda: running.engine.state()["num_running"] + running.engine.state()["num_waiting"] == 0)
    running.engine.check_integrity()
    assert running.engine.state()["num_held_blocks"] == 0


def eventually(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    tick = threading.Event()
    while not is_so():
        assert time.monotonic() < deadline, "it never came about"
        tick.wait(0.005)


def ids_of(server: Server, text: str = PROMPT) -> list[int]:
    return server.engine.tokenizer(text)["input_ids"]


def reference_logprobs(server: Server, token_ids: list[int]) -> torch.Tensor:
    """Return transformers' log-probabilities, [len(token_ids), V]: row i is for token i + 1."""
    with torch.no_grad():
        return torch.log_softmax(small_model()(torch.tensor([token_ids])).logits[0], -1)


# -- one answer -----------------------------------------------------------------------------------------------------


def test_answer_is_that_of_the_python_api_and_tells_all_about_itself(server):
    answer = server.ok(text=PROMPT, sampling_params=GREEDY, rid="mine", return_logprob=True)
    prompt_ids = ids_of(server)
    [expected] = server.engine.generate([prompt_ids], GREEDY)
    assert answer["output_ids"] == list(expected.token_ids) and answer["text"] == expected.text
    meta = answer["meta_info"]
    assert meta["id"] == "mine" and meta["finish_reason"] == {"type": "length", "length": 6}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (len(prompt_ids), 6, 0)
    assert meta["cached_tokens_details"] == {"device": 0, "host": 0}
    assert meta["num_retractions"] == 0 and meta["weight_version"] == "default"
    assert [(s["version"], s["start"], s["end"]) for s in meta["weight_versions"]] == [("default", 0, 6)]
    assert 0 < meta["e2e_latency"] < PATIENCE and meta["response_sent_to_client_ts"] > 0 and meta["dp_rank"] == 0
    pairs = zip(expected.logprobs, expected.token_ids, strict=True)
    assert meta["output_token_logprobs"] == [[logprob, id, None] for logprob, id in pairs]
    assert meta["output_token_logprobs_length"] == 6 and meta["input_token_logprobs"] == []
    assert "output_top_logprobs" not in meta and "prompt_token_ids" not in answer


def test_without_return_logprob_there_are_none(server):
    meta = server.ok(text=PROMPT, sampling_params=GREEDY, logprob_start_len=0, top_logprobs_num=2)["meta_info"]
    assert not [key for key in meta if "logprobs" in key]


def test_put_and_ids_and_prompt_token_ids(server):
    ids = ids_of(server)
    body = {"input_ids": ids, "sampling_params": GREEDY, "return_prompt_token_ids": True}
    answer = server.client.put("/generate", json=body).json()
    assert answer["prompt_token_ids"] == ids
    assert answer["output_ids"] == server.ok(text=PROMPT, sampling_params=GREEDY)["output_ids"]


def test_batch_answers_a_list_prompt_by_prompt_and_sample_by_sample(server):
    texts = ["one", "two 2"]
    params = [{**GREEDY, "n": 2, "temperature": 1, "sampling_seed": 5}, {**GREEDY, "max_new_tokens": 3}]
    answers = server.ok(text=texts, sampling_params=params, rid="batch", return_logprob=[True, False])
    assert [a["meta_info"]["id"] for a in answers] == ["batch_0-0", "batch_0-1", "batch_1"]
    assert [len(a["output_ids"]) for a in answers] == [6, 6, 3]
    assert answers[0]["output_ids"] != answers[1]["output_ids"]
    assert ["output_token_logprobs" in a["meta_info"] for a in answers] == [True, True, False]
    [alone] = server.ok(text=texts[1:], sampling_params=params[1:])
    assert alone["output_ids"] == answers[2]["output_ids"]


def test_one_prompt_in_a_list_or_with_n_answers_a_list(server):
    assert isinstance(server.ok(text=["a"], sampling_params=GREEDY), list)
    assert isinstance(server.ok(input_ids=[[5]], sampling_params=GREEDY), list)
    assert len(server.ok(text="a", sampling_params={**GREEDY, "n": 3})) == 3


def test_sampling_seed_makes_an_answer_repeatable(server):
    params = {"max_new_tokens": 8, "sampling_seed": 11, "ignore_eos": True}
    first = server.ok(text=PROMPT, sampling_params=params)
    assert server.ok(text=PROMPT, sampling_params=params)["output_ids"] == first["output_ids"]
    other = server.ok(text=PROMPT, sampling_params={**params, "sampling_seed": 12})
    assert other["output_ids"] != first["output_ids"]


def test_stop_string_is_trimmed_and_named(server):
    whole = server.ok(text=PROMPT, sampling_params=GREEDY)
    stop = whole["text"][2:4]
    trimmed = server.ok(text=PROMPT, sampling_params={**GREEDY, "stop": stop})
    assert trimmed["text"] == whole["text"][: whole["text"].index(stop)]
    assert trimmed["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    kept = server.ok(text=PROMPT, sampling_params={**GREEDY, "stop": [stop], "no_stop_trim": True})
    assert stop in kept["text"] and whole["text"].startswith(kept["text"])
    id = whole["output_ids"][1]
    by_id = server.ok(text=PROMPT, sampling_params={**GREEDY, "stop_token_ids": [id]})
    assert by_id["meta_info"]["finish_reason"] == {"type": "stop", "matched": id}
    assert by_id["output_ids"][-1] == id, "the stop token is in the output"


# -- log-probabilities ----------------------------------------------------------------------------------------------


def test_log_probabilities_of_every_kind_are_those_of_transformers(server):
    listed = [3, 77]
    answer = server.ok(
        text=PROMPT, sampling_params=GREEDY, return_logprob=True, logprob_start_len=0, top_logprobs_num=2,
        token_ids_logprob=listed, return_text_in_logprobs=True,
    )  # fmt: skip
    prompt, meta = ids_of(server), answer["meta_info"]
    tokens = prompt + answer["output_ids"]
    rows = reference_logprobs(server, tokens)
    for name, first in (("input", 0), ("output", len(prompt))):
        chosen, top = meta[f"{name}_token_logprobs"], meta[f"{name}_top_logprobs"]
        of_listed = meta[f"{name}_token_ids_logprobs"]
        count = len(prompt) if name == "input" else len(answer["output_ids"])
        assert len(chosen) == len(top) == len(of_listed) == count
        for at in range(count):
            logprob, id, text = chosen[at]
            assert id == tokens[first + at] and text == server.engine.tokenizer.decode([id])
            if first + at == 0:
                assert logprob is None and top[at] is None and of_listed[at] is None
                continue
            row = rows[first + at - 1]
            assert logprob == pytest.approx(row[id].item(), abs=1e-4)
            best = row.topk(2)
            assert [entry[1] for entry in top[at]] == best.indices.tolist()
            assert [entry[0] for entry in top[at]] == pytest.approx(best.values.tolist(), abs=1e-4)
            assert [entry[1] for entry in of_listed[at]] == listed
            assert [entry[0] for entry in of_listed[at]] == pytest.approx(row[listed].tolist(), abs=1e-4)


def test_prompt_log_probabilities_start_where_asked_and_the_first_is_null(server):
    prompt = ids_of(server)
    ask = {"input_ids": prompt, "sampling_params": GREEDY, "return_logprob": True}
    whole = server.ok(**ask, logprob_start_len=0)["meta_info"]["input_token_logprobs"]
    part = server.ok(**ask, logprob_start_len=7)["meta_info"]["input_token_logprobs"]
    assert part == [[None, *whole[7][1:]], *whole[8:]]
    assert server.ok(**ask, logprob_start_len=len(prompt))["meta_info"]["input_token_logprobs"] == []


def test_a_prompts_log_probabilities_do_not_depend_on_the_temperature_unless_asked_to(server):
    ask = {"input_ids": ids_of(server), "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}

    def scored(temperature: float, **fields: object) -> list[object]:
        params = {"max_new_tokens": 0, "temperature": temperature}
        meta = server.ok(**ask, token_ids_logprob=[1], sampling_params=params, **fields)["meta_info"]
        return [meta[f"input_{name}"] for name in ("token_logprobs", "top_logprobs", "token_ids_logprobs")]

    plain = scored(0.0)
    assert scored(0.5) == scored(2.0) == scored(1.0) == plain
    scaled = scored(0.5, input_logprob_temperature=0.5)
    assert scaled[0][1][0] != plain[0][1][0] and scaled == scored(0.0, input_logprob_temperature=0.5)
    for wrong in (0, -1, "warm", [1.0, 2.0]):
        answer = server.post(**ask, input_logprob_temperature=wrong)
        assert answer.status_code == 400 and "input_logprob_temperature" in answer.text


def test_rescoring_gives_no_token_and_one_log_probability_of_what_would_have_come(server):
    prompt = ids_of(server)
    would = server.ok(input_ids=prompt, sampling_params=GREEDY, return_logprob=True, top_logprobs_num=3)
    [answer] = server.ok(
        input_ids=[prompt],
        sampling_params={"max_new_tokens": 0, "temperature": 0, "skip_special_tokens": False},
        return_logprob=True, logprob_start_len=len(prompt) - 1, top_logprobs_num=3, token_ids_logprob=[1],
    )  # fmt: skip
    meta = answer["meta_info"]
    assert answer["output_ids"] == [] and answer["text"] == "" and meta["completion_tokens"] == 0
    assert meta["finish_reason"] == {"type": "length", "length": 0}
    assert meta["output_token_logprobs"] == would["meta_info"]["output_token_logprobs"][:1]
    assert meta["output_top_logprobs"] == would["meta_info"]["output_top_logprobs"][:1]
    assert meta["output_token_logprobs_length"] == 1 and len(meta["output_token_ids_logprobs"]) == 1
    assert meta["input_token_logprobs"] == [[None, prompt[-1], None]]


# -- refused and ignored fields -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"sampling_params": {"max_tokens": 3}}, "max_tokens"),
        ({"sampling_params": {"temperature": -1, "top_p": 2}}, "top_p"),
        ({"sampling_params": {"temperature": 10**400}}, "temperature"),
        ({"sampling_params": {"json_schema": "{"}}, "json_schema"),
        ({"sampling_params": {"regex": "a("}}, "regex"),
        ({"sampling_params": {"regex": "a", "ebnf": "b"}}, "regex, ebnf"),
        ({"sampling_params": {"custom_params": {"return_top_p_token_ids": "yes"}}}, "return_top_p_token_ids"),
        ({"sampling_params": {"n": 10**6}}, "n"),
        ({"sampling_params": [GREEDY, GREEDY]}, "sampling_params"),
        ({"sampling_params": 3}, "sampling_params"),
        ({"sampling_params": {"logit_bias": {"128": 1}}}, "logit_bias"),
        ({"input_ids": [1]}, "input_ids"),
        ({"text": None}, "text"),
        ({"text": []}, "text"),
        ({"text": {}}, "text"),
        ({"text": None, "input_ids": [1, [2]]}, "input_ids"),
        ({"text": None, "input_ids": [1, 128]}, "input_ids"),
        ({"text": None, "input_ids": [1, True]}, "input_ids"),
        ({"text": None, "input_ids": [1, "x"]}, "input_ids"),
        ({"text": None, "input_ids": [[]]}, "input_ids"),
        ({"text": None, "input_ids": [1] * (CONTEXT + 1)}, "exceeds the maximum allowed length"),
        ({"text": None, "input_ids": [1] * (CONTEXT - 1)}, "the KV pool has room for no more"),
        ({"logprob_start_len": 99, "return_logprob": True}, "logprob_start_len"),
        ({"logprob_start_len": -2, "return_logprob": True}, "logprob_start_len"),
        ({"logprob_start_len": "x"}, "logprob_start_len"),
        ({"top_logprobs_num": -1, "return_logprob": True}, "top_logprobs_num"),
        ({"token_ids_logprob": [500], "return_logprob": True}, "token_ids_logprob"),
        ({"token_ids_logprob": ["x"], "return_logprob": True}, "token_ids_logprob"),
        ({"return_logprob": [True, False]}, "return_logprob"),
        ({"stream": "perhaps"}, "stream"),
        ({"text": ["a", "b"], "rid": ["x", "x"]}, "Duplicate request ID detected"),
        ({"text": ["a", "b"], "rid": ["x"]}, "rid"),
        ({"image_data": "x.png"}, "image_data"),
        ({"lora_path": "adapter"}, "lora_path"),
        ({"return_hidden_states": True}, "return_hidden_states"),
        ({"custom_logit_processor": "code"}, "custom_logit_processor"),
        ({"input_embeds": [[0.5]]}, "input_embeds"),
        ({"return_flat_raw_top_logprobs": True}, "return_flat_raw_top_logprobs"),
        ({"max_thinking_tokens": 8}, "max_thinking_tokens"),
        ({"watermark": {"key": 1}}, "watermark"),
        ({"mm_processor_kwargs": {"max_pixels": 9}}, "mm_processor_kwargs"),
        ({"modalities": ["multi-images"]}, "modalities"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_mistake_is_a_400_that_names_the_field(server, body, named, stream):
    response = server.post(**{"text": "abc", "stream": stream, **body})
    assert response.status_code == 400, response.text
    assert named in response.json()["error"]["message"], response.text
    assert response.json()["object"] == "error"


def test_unknown_keys_nulls_and_false_are_ignored(server):
    nothing = {"lora_path": None, "return_hidden_states": False, "image_data": [], "input_ids": None}
    extra = {"log_metrics": True, "model": None, "priority": 3, "no_such_key": {"deep": [1]}, "routing_key": "x"}
    plain = server.ok(text=PROMPT, sampling_params=GREEDY)
    assert server.ok(text=PROMPT, sampling_params=GREEDY, **nothing, **extra)["text"] == plain["text"]


@pytest.mark.parametrize(
    "params",
    [{"temperature": 1e6}, {"top_k": 2**62}, {"max_new_tokens": 2**62, "stop_token_ids": list(range(128))},
     {"min_p": 1, "logit_bias": {"5": 1e308, "6": -1e308}}, {"stop_regex": "(a+)+$", "max_new_tokens": 20},
     {"temperature": 1e-5}, {"seed": None, "sampling_seed": -(2**63)}],
)  # fmt: skip
def test_extreme_settings_do_not_stop_the_loop(server, params):
    params.pop("seed", None)
    server.ok(text=PROMPT, sampling_params={"max_new_tokens": 3, **params})
    server.ok(text=PROMPT, sampling_params=GREEDY)


def test_live_request_id_is_refused_and_its_owner_unharmed(server):
    expected = server.ok(text=PROMPT, sampling_params=GREEDY)["text"]
    server.engine.pause_generation("in_place")
    with ThreadPoolExecutor() as threads:
        first = threads.submit(server.ok, text=PROMPT, sampling_params=GREEDY, rid="same")
        eventually(lambda: server.engine.state()["num_waiting"] == 1)
        second = server.post(text="b", sampling_params=GREEDY, rid="same")
        server.engine.continue_generation()
        assert second.status_code == 400 and "duplicate request id detected" in second.json()["message"].lower()
        assert first.result()["text"] == expected


# -- streams --------------------------------------------------------------------------------------------------------


def test_stream_is_cumulative_and_ends_as_the_whole_answer(server):
    ask = {
        "text": PROMPT, "sampling_params": {**GREEDY, "sampling_seed": 1}, "return_logprob": True,
        "top_logprobs_num": 2, "token_ids_logprob": [9], "logprob_start_len": 0,
        "speculation": False,  # the second answer would come in one step
    }  # fmt: skip
    whole, chunks = server.ok(**ask), server.stream(**ask)
    last = chunks[-1]
    for key in ("text", "output_ids"):
        assert last[key] == whole[key]
    for key in whole["meta_info"]:
        if key not in ("id", "e2e_latency", "response_sent_to_client_ts", "cached_tokens", "cached_tokens_details"):
            assert last["meta_info"][key] == whole["meta_info"][key], key
    assert len(chunks) > 1
    for chunk in chunks[:-1]:
        meta, count = chunk["meta_info"], len(chunk["output_ids"])
        assert chunk["output_ids"] == whole["output_ids"][:count] and whole["text"].startswith(chunk["text"])
        assert meta["finish_reason"] is None and "weight_versions" not in meta
        assert meta["completion_tokens"] == count == meta["output_token_logprobs_length"]
        for key in ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs"):
            assert meta[key] == whole["meta_info"][key][:count]
        assert meta["prompt_tokens"] == whole["meta_info"]["prompt_tokens"]
    counts = [len(chunk["output_ids"]) for chunk in chunks]
    assert counts == sorted(counts) and "index" not in last


def test_chunks_of_a_batch_carry_their_index(server):
    params = {**GREEDY, "n": 2, "temperature": 1, "sampling_seed": 3}
    whole = server.ok(text=["one", "two"], sampling_params=params)
    last = {}
    for chunk in server.stream(text=["one", "two"], sampling_params=params):
        last[chunk["index"]] = chunk
    assert [last[index]["text"] for index in range(4)] == [answer["text"] for answer in whole]
    assert all(last[index]["meta_info"]["finish_reason"] for index in range(4))


def test_stream_interval_and_held_back_stop(server):
    whole = server.ok(text=PROMPT, sampling_params=GREEDY)
    stop = whole["text"][3:5]
    chunks = server.stream(text=PROMPT, sampling_params={**GREEDY, "stop": stop, "stream_interval": 2})
    assert all(stop[0] not in chunk["text"][3:] for chunk in chunks)
    assert chunks[-1]["text"] == whole["text"][: whole["text"].index(stop)]
    assert len(chunks[0]["output_ids"]) >= 2


def test_growing_json_is_that_of_the_whole():
    text, numbers = GrowingText(), GrowingList()
    pieces = ['"quoted"', "é\n", "", "\U0001f600", "\\"]
    for piece in pieces:
        text.append(piece)
        numbers.extend([piece, 1.5, None])
        numbers.extend([])
    assert json.loads(b"".join(text.pieces)) == "".join(pieces)
    assert json.loads(b"".join(numbers.pieces)) == [entry for piece in pieces for entry in (piece, 1.5, None)]
    assert json.loads(b"".join(GrowingList().pieces)) == []


@pytest.mark.parametrize("num", [0, 1, 256, 257, 600])
def test_any_number_of_entries_can_be_taken_back(num):
    numbers = GrowingList()
    numbers.extend(range(600))
    numbers.take_back(num)
    numbers.extend(["new"])
    assert json.loads(b"".join(numbers.pieces)) == [*range(600 - num), "new"]


# -- pauses, aborts, versions ---------------------------------------------------------------------------------------


def test_paused_server_lets_requests_wait(server):
    expected = server.ok(text=PROMPT, sampling_params=GREEDY)["text"]
    server.engine.pause_generation("retract")
    with ThreadPoolExecutor() as threads:
        waiting = [threads.submit(server.ok, text=PROMPT, sampling_params=GREEDY) for _ in range(4)]
        eventually(lambda: server.engine.state()["num_waiting"] == 4)
        assert not any(future.done() for future in waiting)
        server.engine.continue_generation()
        assert {future.result()["text"] for future in waiting} == {expected}


def test_request_aborted_in_the_queue_or_half_way_is_answered_with_what_it_has(server):
    server.engine.pause_generation("in_place")
    with ThreadPoolExecutor() as threads:
        queued = threads.submit(server.ok, text=PROMPT, sampling_params=GREEDY, rid="queued", return_logprob=True)
        eventually(lambda: server.engine.state()["num_waiting"] == 1)
        server.engine.abort_request("queued")
        meta = queued.result()["meta_info"]
        server.engine.continue_generation()
    reason = {"type": "abort", "message": "Abort in waiting queue", "status_code": None, "err_type": None}
    assert meta["finish_reason"] == reason and meta["output_token_logprobs"] == []
    assert [(span["start"], span["end"]) for span in meta["weight_versions"]] == [(0, 0)]
    with half_way(server, rid="half", return_logprob=True) as stream:
        server.engine.abort_request("half")
        last = stream.rest()[-1]
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    assert last["meta_info"]["finish_reason"]["message"] == "Aborted"
    assert len(last["output_ids"]) == last["meta_info"]["output_token_logprobs_length"] >= 1


def test_retracted_request_goes_on_as_if_nothing_had_been(server):
    whole = server.ok(text=PROMPT, sampling_params=LONG, return_logprob=True)
    with half_way(server, return_logprob=True) as stream:
        server.engine.pause_generation("retract")
        server.engine.flush_cache()
        server.engine.continue_generation()
        last = stream.rest()[-1]
    assert last["output_ids"] == whole["output_ids"] and last["meta_info"]["num_retractions"] == 1
    assert last["meta_info"]["output_token_logprobs"] == whole["meta_info"]["output_token_logprobs"]


def test_version_that_changes_half_way_makes_a_span(server):
    with half_way(server) as stream:
        server.engine.pause_generation("in_place")
        server.engine.weights.relabel_weights("7")
        server.engine.continue_generation()
        chunks = stream.rest()
    server.engine.weights.relabel_weights("default")
    meta = chunks[-1]["meta_info"]
    first, second = meta["weight_versions"]
    assert (first["version"], second["version"], meta["weight_version"]) == ("default", "7", "7")
    assert first["start"] == 0 and first["end"] == second["start"] and second["end"] == LONG["max_new_tokens"]


def test_equal_prefixes_are_reused_under_equal_keys_only(server):
    def cached(**keys: str) -> int:
        return server.ok(text=PROMPT * 3, sampling_params=GREEDY, **keys)["meta_info"]["cached_tokens"]

    assert cached() == 0 and cached() > 0
    assert cached(extra_key="a") == 0 and cached(cache_salt="b") == 0 and cached(extra_key="a", cache_salt="b") == 0
    assert cached(extra_key="a") > 0 and cached(cache_salt="b") > 0 and cached(extra_key="a", cache_salt="b") > 0


# -- disconnects ----------------------------------------------------------------------------------------------------


class HalfWay:
    def __init__(self, lines: Iterator[str]) -> None:
        self._lines = lines

    def rest(self) -> list[dict]:
        lines = [line for line in self._lines if line]
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line[6:]) for line in lines[:-1]]


@contextmanager
def half_way(server: Server, **body: object) -> Iterator[HalfWay]:
    """Begin a long stream."""
    ask = {"text": PROMPT, "sampling_params": LONG, "stream": True, **body}
    with (
        httpx.Client(base_url=server.url, timeout=PATIENCE) as client,
        client.stream("POST", "/generate", json=ask) as response,
    ):
        lines = response.iter_lines()
        assert json.loads(next(lines)[6:])["output_ids"]
        yield HalfWay(lines)


def num_live(server: Server) -> int:
    state = server.engine.state()
    return state["num_running"] + state["num_waiting"]


def test_stream_whose_client_leaves_is_aborted(server):
    before = server.engine.metrics.num_aborted
    with half_way(server):
        pass
    eventually(lambda: num_live(server) == 0)
    assert server.engine.metrics.num_aborted == before + 1


@pytest.mark.parametrize("stream", [False, True])
def test_client_that_leaves_while_the_engine_is_paused_is_aborted_in_the_queue(server, stream):
    before = server.engine.metrics.num_aborted
    server.engine.pause_generation("retract")
    body = {"text": ["a", "b"], "sampling_params": {**LONG, "n": 2}, "stream": stream}
    client = httpx.Client(base_url=server.url, timeout=httpx.Timeout(PATIENCE, read=0.5))
    with client, pytest.raises(httpx.ReadTimeout):
        client.post("/generate", json=body)
    eventually(lambda: num_live(server) == 0)
    assert server.engine.metrics.num_aborted == before + 4
    server.engine.continue_generation()
    server.ok(text=PROMPT, sampling_params=GREEDY)


def test_many_waiting_requests_do_not_keep_others_from_being_served(server):
    """No thread waits for a request: while forty requests wait, the engine still answers others."""
    expected = server.ok(text=PROMPT, sampling_params=GREEDY)["text"]
    server.engine.pause_generation("in_place")
    with ThreadPoolExecutor(40) as threads:
        waiting = [threads.submit(server.ok, text=PROMPT, sampling_params=GREEDY) for _ in range(40)]
        eventually(lambda: num_live(server) == 40)
        assert server.client.get("/health").status_code == 200
        response = server.client.post("/continue_generation", json={})
        assert response.status_code == 200
        assert {future.result()["text"] for future in waiting} == {expected}


def test_loop_that_has_ended_is_a_503_for_those_who_wait_and_those_who_come(monkeypatch):
    def fail(most: int) -> None:
        raise RuntimeError("planned")

    with serving(small_model()) as server, ThreadPoolExecutor() as threads:
        server.engine.pause_generation("in_place")
        waiting = threads.submit(server.post, text=PROMPT, sampling_params=GREEDY)
        streaming = threads.submit(server.stream, text=PROMPT, sampling_params=GREEDY)
        eventually(lambda: num_live(server) == 2)
        monkeypatch.setattr(server.engine.gate, "step", fail)
        server.engine.continue_generation()
        assert waiting.result().status_code == 503
        [error] = streaming.result()
        assert error["error"]["code"] == 503
        assert server.post(text=PROMPT, sampling_params=GREEDY).status_code == 503
