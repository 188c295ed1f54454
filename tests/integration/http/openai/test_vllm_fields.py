"""Tests of the fields of OpenAI's two calls that vLLM's clients add."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator

import httpx
import openai
import pytest
import torch

from lockstep.integration.grpo.tasks.arithmetic import build_tokenizer
from lockstep.integration.http.edge.config import HttpConfig
from lockstep.integration.http.edge.errors import BadField
from lockstep.integration.http.openai.vllm_fields import structured_settings
from lockstep.integration.http.server import serve_in_background
from lockstep.integration.service import RolloutService
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.request_options import RequestOptions
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.tests.integration.http.openai.test_openai import TEMPLATE, small_model

PROMPT = "What is 347 + 285?"
MESSAGES = [{"role": "user", "content": "1 + 2?"}]


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
    with serve_in_background(service, HttpConfig(port=0, model_name="small")) as server:
        yield server.url


BODIES: dict[str, dict[str, object]] = {
    "completions": {"model": "small", "max_tokens": 6, "prompt": PROMPT},
    "chat/completions": {"model": "small", "max_tokens": 6, "messages": MESSAGES},
}


def post(url: str, path: str, status: int = 200, **body: object) -> dict:
    answer = httpx.post(f"{url}/v1/{path}", json={**BODIES[path], **body}, timeout=60)
    assert answer.status_code == status, answer.text
    return answer.json()


PATHS = pytest.mark.parametrize("path", ["completions", "chat/completions"])


@PATHS
def test_each_choice_says_which_version_drew_its_tokens_where_that_is_asked_for(url, path):
    spans = [{"version": "default", "start": 0, "end": 6}]
    answer = post(
        url, path, n=2, temperature=1.0, ignore_eos=True, return_weight_versions=True, skip_special_tokens=None
    )
    assert [choice["weight_versions"] for choice in answer["choices"]] == [spans, spans]
    assert "weight_versions" not in post(url, path)["choices"][0]
    events = events_of(url, path, n=2, ignore_eos=True, return_weight_versions=True)
    told = [one for event in events for one in event["choices"] if "weight_versions" in one]
    assert sorted(one["index"] for one in told) == [0, 1]
    assert all(one["weight_versions"] == spans and one["finish_reason"] == "length" for one in told)


def text_of(choice: dict) -> str:
    return choice["text"] if "text" in choice else choice["message"]["content"]


@PATHS
@pytest.mark.parametrize(
    ("given", "pattern"),
    [
        ({"regex": "[0-9]{3}"}, r"[0-9]{3}"),
        ({"choice": ["12", "7 + 1"]}, r"12|7 \+ 1"),
        ({"grammar": 'root ::= "4" "2"'}, r"42"),
        ({"json": {"type": "integer", "minimum": 10, "maximum": 20}}, r"1\d|20"),
        ({"json": '{"enum": [1, 2]}'}, r"[12]"),
        ({"regex": "[0-9]", "json": None, "json_object": False}, r"[0-9]"),
    ],
)
def test_structured_outputs_constrain_the_output(url, path, given, pattern):
    for seed in range(3):
        [choice] = post(url, path, structured_outputs=given, seed=seed, max_tokens=30)["choices"]
        assert re.fullmatch(pattern, text_of(choice)), choice


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"regex": "a", "choice": ["b"]}, "structured_outputs: needs one of"),
        ({"shape": "round"}, "structured_outputs: needs one of"),
        ({"choice": []}, "structured_outputs.choice: must be a list of texts"),
        ({"choice": "abc"}, "structured_outputs.choice: must be a list of texts"),
        ({"regex": {"a": 1}}, "structured_outputs.regex: must be a text"),
        ({"json": [1]}, "structured_outputs.json: must be a text, or an object"),
        ({"regex": "a", "whitespace_pattern": " "}, "structured_outputs.whitespace_pattern: is not supported"),
    ],
)
def test_structured_outputs_that_mean_nothing_are_refused(given, says):
    with pytest.raises(BadField) as refused:
        structured_settings(given)
    assert f"{refused.value.param}: {refused.value.message}".startswith(says) or says in str(refused.value)


def test_structured_outputs_of_all_kinds_become_a_grammar():
    assert structured_settings({"json_object": True}) == {
        "json_schema": {"type": "object", "additionalProperties": True}
    }
    assert structured_settings({"structural_tag": '{"a":1}'}) == {"structural_tag": '{"a":1}'}
    assert structured_settings({"choice": ['a"b', "\n"]}) == {"ebnf": 'root ::= "a\\"b" | "\\n"'}
    assert structured_settings(None) == structured_settings({}) == structured_settings({"json": None}) == {}


@PATHS
def test_the_guided_fields_of_older_clients_are_refused_with_what_took_their_place(url, path):
    said = post(url, path, 400, guided_json={"type": "integer"})["error"]
    assert (said["param"], said["message"]) == (
        "guided_json", "guided_json: is not supported: structured_outputs has taken its place"
    )  # fmt: skip


@PATHS
def test_two_grammars_are_refused(url, path):
    body = {"structured_outputs": {"regex": "a"}}
    said = post(url, path, 400, regex="b", **body)["error"]["message"]
    assert "structured_outputs" in said and "only one grammar" in said
    format = {"type": "json_object"}
    assert "only one" in post(url, path, 400, response_format=format, **body)["error"]["message"]


@PATHS
@pytest.mark.parametrize("num_top", [0, 3])
def test_log_probabilities_of_a_prompt_are_those_of_the_engine(url, service, path, num_top):
    body = {"temperature": 0, "logprobs": 1 if path == "completions" else True, "return_token_ids": True}
    answer = post(url, path, prompt_logprobs=num_top, **body)
    [choice] = answer["choices"]
    holder = choice if path == "completions" else answer
    ids = holder["prompt_token_ids"]
    options = RequestOptions(0, max(num_top, 1))
    [expected] = service.engine.generate([ids], SamplingParams(max_new_tokens=6, temperature=0), options=options)
    positions = holder["prompt_logprobs"]
    assert len(positions) == len(ids) and positions[0] is None
    for at, position in enumerate(positions[1:], 1):
        own = position[str(ids[at])]
        assert own["logprob"] == expected.prompt_logprobs[at]
        assert own["decoded_token"] == service.engine.tokenizer.decode([ids[at]])
        ranked = [(entry["rank"], entry["logprob"], int(id)) for id, entry in position.items() if entry["rank"]]
        top = expected.prompt_top_logprobs[at][:num_top]
        assert sorted(ranked) == [(rank, logprob, id) for rank, (logprob, id) in enumerate(top, 1)]
        assert len(position) == len(ranked) + (own["rank"] is None)
    if path == "completions":  # as many alternatives of the output as were asked for
        assert all(len(at) == 1 for at in choice["logprobs"]["top_logprobs"])
    else:
        assert all(at["top_logprobs"] == [] for at in choice["logprobs"]["content"])
    plain = post(url, path, **body)
    assert text_of(plain["choices"][0]) == text_of(choice)
    assert "prompt_logprobs" not in plain


@PATHS
def test_what_prompt_logprobs_cannot_be_is_refused(url, path):
    for body, says in (
        ({"prompt_logprobs": -2}, "-1 (all tokens) or more"),
        ({"prompt_logprobs": 1000}, "max_top_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "cannot be streamed"),
    ):
        assert says in post(url, path, 400, **body)["error"]["message"]
    assert post(url, path, prompt_logprobs=-1, max_tokens=1)


@PATHS
def test_a_prompt_is_truncated_to_its_last_tokens(url, service, path):
    whole = post(url, path, return_token_ids=True)
    ids = (whole["choices"][0] if path == "completions" else whole)["prompt_token_ids"]
    cut = post(url, path, return_token_ids=True, truncate_prompt_tokens=4, temperature=0)
    assert (cut["choices"][0] if path == "completions" else cut)["prompt_token_ids"] == ids[-4:]
    assert cut["usage"]["prompt_tokens"] == 4
    [expected] = service.engine.generate([ids[-4:]], SamplingParams(max_new_tokens=6, temperature=0))
    assert text_of(cut["choices"][0]) == expected.text
    assert "at least 1" in post(url, path, 400, truncate_prompt_tokens=0)["error"]["message"]
    # What does not fit is cut to what does, texts and token ids.
    field = "input_ids" if path != "completions" else "prompt"
    others = {"messages": None} if field == "input_ids" else {}
    long = post(url, path, truncate_prompt_tokens=-1, max_tokens=1, **{field: [3] * 5000}, **others)
    assert long["usage"]["prompt_tokens"] == service.engine.max_model_len - 1
    if path == "completions":
        text = post(url, path, truncate_prompt_tokens=-1, max_tokens=1, prompt="1 + 2 = 3. " * 60, echo=True)
        assert text["usage"]["prompt_tokens"] == service.engine.max_model_len - 1
        assert len(text["choices"][0]["text"]) < 11 * 60, "the echo is of the tokens that were kept"


@PATHS
def test_tokens_are_named_by_their_ids(url, path):
    top = {"logprobs": 2} if path == "completions" else {"logprobs": True, "top_logprobs": 2}
    [choice] = post(url, path, return_tokens_as_token_ids=True, return_token_ids=True, **top)["choices"]
    names = [f"token_id:{id}" for id in choice["token_ids"]]
    if path == "completions":
        assert choice["logprobs"]["tokens"] == names
        assert all(re.fullmatch(r"token_id:\d+", name) for at in choice["logprobs"]["top_logprobs"] for name in at)
    else:
        assert [at["token"] for at in choice["logprobs"]["content"]] == names
        assert all(re.fullmatch(r"token_id:\d+", o["token"]) for at in choice["logprobs"]["content"]
                   for o in at["top_logprobs"])  # fmt: skip


def test_the_bytes_of_a_token_that_is_named_by_its_id_are_its_own(service, url):
    asked = {"logprobs": True, "top_logprobs": 2, "return_tokens_as_token_ids": True, "return_token_ids": True}
    [choice] = post(url, "chat/completions", **asked)["choices"]
    texts = [service.engine.tokenizer.decode([id]) for id in choice["token_ids"]]
    assert [bytes(at["bytes"]).decode() for at in choice["logprobs"]["content"]] == texts
    for other in (other for at in choice["logprobs"]["content"] for other in at["top_logprobs"]):
        id = int(other["token"].removeprefix("token_id:"))
        assert bytes(other["bytes"]).decode() == service.engine.tokenizer.decode([id])


@PATHS
def test_known_fields_that_are_not_supported_are_refused_by_name_and_unknown_ones_pass(url, path):
    for name, value in (("allowed_token_ids", [1]), ("bad_words", ["a"]), ("logits_processors", ["x"]),
                        ("vllm_xargs", {"a": 1}), ("prompt_embeds", "x"), ("length_penalty", 2.0),
                        ("thinking_token_budget", 5), ("detokenize", False), ("truncation_side", "right"),
                        ("return_spec_tokens_details", True), ("sampling_logprobs_mode", "support"),
                        ("include_reasoning", False), ("watermarking", True), ("logprob_token_ids", [1]),
                        ("return_token_offsets", True), ("return_prompt_text", True), ("task", "title"),
                        ("media_io_kwargs", {"image": {"num_frames": 1}}), ("images_config", {"a": 1}),
                        ("add_special_tokens", path != "completions")):  # fmt: skip
        refused = post(url, path, 400, **{name: value})["error"]
        assert (refused["param"], name in refused["message"]) == (name, True)
    assert post(url, path, allowed_token_ids=None, bad_words=[], vllm_xargs={}, length_penalty=1.0, priority=3,
                add_special_tokens=path == "completions", some_field_of_tomorrow=[1])  # fmt: skip
    assert post(url, path, top_k=0, stop="", include_stop_str_in_output=True)


def test_the_stop_stays_in_the_text_where_it_is_asked_for(url):
    ask = {"temperature": 1, "seed": 5, "max_tokens": 40, "ignore_eos": True}
    stop = text_of(post(url, "completions", **ask)["choices"][0])[3]
    trimmed = text_of(post(url, "completions", **ask, stop=stop)["choices"][0])
    kept = post(url, "completions", **ask, stop=stop, include_stop_str_in_output=True)
    assert text_of(kept["choices"][0]) == trimmed + stop


def test_answers_are_what_the_models_of_the_openai_package_hold(url):
    """An answer's metadata is a dict of texts; what is none stands beside it."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client, warnings.catch_warnings():
        warnings.simplefilter("error")
        chat = client.chat.completions.create(
            model="small", messages=MESSAGES, max_tokens=3, extra_body={"return_token_ids": True, "ignore_eos": True}
        )
        plain = client.completions.create(model="small", prompt=PROMPT, max_tokens=3, extra_body={"ignore_eos": True})
        for answer in (chat.model_dump(), plain.model_dump()):
            assert all(isinstance(value, str) for value in answer["metadata"].values())
            assert answer["metadata"]["weight_version"] == "default"
            assert answer["weight_versions"] == [{"version": "default", "start": 0, "end": 3}]
        assert chat.prompt_token_ids == chat.choices[0].prompt_token_ids


@PATHS
def test_an_answer_has_the_id_that_its_client_gave_in_vllms_form(url, path):
    prefix = "cmpl-" if path == "completions" else "chatcmpl-"
    assert post(url, path, request_id="one")["id"] == f"{prefix}one"
    assert post(url, path, request_id="one", rid="two")["id"] == "two"
    assert post(url, path, 400, request_id="x" * 300)["error"]["param"] == "request_id"


def test_a_model_that_is_not_served_is_not_found(url):
    for path in ("completions", "chat/completions"):
        refused = post(url, path, 404, model="gpt-4")["error"]
        assert (refused["code"], refused["param"]) == ("model_not_found", "model")
        assert post(url, path, model=None)["model"] == "small"  # as where it is left out
        empty = post(url, path, 400, model="")["error"]  # a client whose setting is not set
        assert empty["param"] == "model" and "'small'" in empty["message"]
    assert httpx.get(f"{url}/v1/models/small").status_code == 200
    assert httpx.get(f"{url}/v1/models/gpt-4").status_code == 404


def test_texts_are_tokenised_for_a_model_that_is_named_by_its_root(url):
    """`vllm bench serve` asks for the tokens of the model that /v1/models shows as root."""
    [card] = httpx.get(f"{url}/v1/models").json()["data"]
    assert card["root"] != card["id"]
    for path, body in (("tokenize", {"prompt": "1 + 2"}), ("detokenize", {"tokens": [3, 4]})):
        expected = httpx.post(f"{url}/{path}", json=body | {"model": card["id"]})
        assert expected.status_code == 200
        assert httpx.post(f"{url}/{path}", json=body | {"model": card["root"]}).json() == expected.json()
        assert httpx.post(f"{url}/{path}", json=body | {"model": "gpt-4"}).status_code == 404


def events_of(url: str, path: str, **fields: object) -> list[dict]:
    """Return the events of a stream that has come to its end."""
    answer = httpx.post(f"{url}/v1/{path}", json=BODIES[path] | fields | {"stream": True}, timeout=60)
    assert answer.status_code == 200, answer.text
    *events, last = [line.removeprefix("data: ") for line in answer.text.split("\n") if line]
    assert last == "[DONE]"
    return [json.loads(one) for one in events]


@PATHS
def test_every_chunk_counts_the_tokens_of_its_sequence_where_it_is_asked_for(url, path):
    """guidellm and aiperf ask for continuous_usage_stats."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = events_of(url, path, n=2, max_tokens=6, return_token_ids=True, stream_options=options)
    num_prompt = last["usage"]["prompt_tokens"]
    num_new = [0, 0]
    for chunk in chunks:
        [choice] = chunk["choices"]
        num_new[choice["index"]] += len(choice.get("token_ids", ()))
        counted = num_new[choice["index"]]
        expected = {"prompt_tokens": num_prompt, "completion_tokens": counted, "total_tokens": num_prompt + counted}
        assert chunk["usage"] == expected
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], sum(num_new))
    assert all(chunk["usage"] is None for chunk in events_of(url, path, stream_options={"include_usage": True})[:-1])
    assert all("usage" not in chunk for chunk in events_of(url, path, stream_options={"continuous_usage_stats": True}))


@PATHS
@pytest.mark.parametrize("options", [None, {}, {"include_usage": None, "continuous_usage_stats": None}])
def test_options_of_a_stream_that_are_null_are_those_that_were_not_given(url, path, options):
    assert all("usage" not in chunk for chunk in events_of(url, path, stream_options=options))


@PATHS
def test_answers_say_where_cached_tokens_were_where_it_is_asked_for(url, service, path):
    """sglang.bench_serving --cache-report reads them of the first event that has them, which has a choice."""
    service.engine.flush_cache()
    long = {"completions": {"prompt": PROMPT * 3}, "chat/completions": {"messages": MESSAGES * 4}}[path]
    asked = long | {"return_cached_tokens_details": True}
    assert post(url, path, **asked)["sglext"] == {"cached_tokens_details": {"device": 0, "host": 0}}
    again = post(url, path, **asked)
    num_cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert num_cached >= 16
    assert again["sglext"] == {"cached_tokens_details": {"device": num_cached, "host": 0}}
    events = events_of(url, path, **asked)
    assert [(event["sglext"], len(event["choices"])) for event in events if "sglext" in event] == [(again["sglext"], 1)]
    assert "sglext" not in post(url, path, **long)


def test_a_served_name_is_no_path_and_any_name_passes_where_none_was_given(make_model, tmp_path):
    make_model("qwen3").save_pretrained(tmp_path / "my-model")
    service = RolloutService(Engine(tmp_path / "my-model", EngineConfig(kv_cache="32 blocks")))
    with serve_in_background(service, HttpConfig(port=0)) as server:
        [card] = httpx.get(f"{server.url}/v1/models").json()["data"]
        assert (card["id"], card["root"]) == ("my-model", str(tmp_path / "my-model"))
        assert httpx.get(f"{server.url}/model_info").json()["served_model_name"] == "my-model"
        for name in ("my-model", "gpt-4"):
            body = {"model": name, "prompt": [3, 4], "max_tokens": 2}
            answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
            assert (answer.status_code, answer.json()["model"]) == (200, name)
    service.close()


def test_null_content_of_an_earlier_answer_is_an_empty_text(url):
    history = [*MESSAGES, {"role": "assistant", "content": None}, {"role": "user", "content": "4?"}]
    answer = post(url, "chat/completions", messages=history, return_token_ids=True)
    empty = [*MESSAGES, {"role": "assistant", "content": ""}, {"role": "user", "content": "4?"}]
    assert answer["prompt_token_ids"] == post(url, "chat/completions", messages=empty, return_token_ids=True)[
        "prompt_token_ids"
    ]  # fmt: skip


def test_health_routes_answer_head(url):
    for path in ("health", "health_generate", "ping", "ready"):
        answer = httpx.head(f"{url}/{path}")
        assert (answer.status_code, answer.content) == (200, b"")
    schema = httpx.get(f"{url}/openapi.json").json()["paths"]
    assert set(schema["/health"]) == {"get"}


def test_the_load_in_the_form_of_older_clients(url):
    [load] = httpx.get(f"{url}/get_load").json()
    assert load == {"dp_rank": 0, "num_reqs": 0, "num_waiting_reqs": 0, "num_tokens": load["num_tokens"]}


def test_ranges_of_other_servers_mean_off():
    assert SamplingParams(top_k=0).top_k == -1
    assert SamplingParams(stop="").stop == SamplingParams.from_dict({"stop": ""}).stop == ()
    with pytest.raises(ValueError, match="top_k"):
        SamplingParams(top_k=False)
    with pytest.raises(ValueError, match="stop"):
        SamplingParams(stop=[""])
    assert json.loads(json.dumps(SamplingParams.from_dict({"top_k": 0}).top_k)) == -1
