"""Tests of GET /metrics: every number equals the engine's own, and a scrape changes none."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import httpx
import pytest
import torch
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from lockstep.integration.http.edge.config import HttpConfig
from lockstep.integration.http.server import BackgroundServer, serve_in_background
from lockstep.rollout.reports.latencies import REQUEST_BOUNDS, TOKEN_BOUNDS, Histogram
from lockstep.rollout.request_options import RequestOptions
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.rollout.speculation.lengths import WholeDrafts
from lockstep.tests.support.callers import PATIENCE, soon, submit
from lockstep.weight_sync.digests.model_digest import tensor_roots
from lockstep.weight_sync.errors import DigestMismatch, SessionError

# Of the contract's table for /metrics.
CONTRACT = [
    "num_running_reqs", "num_queue_reqs", "token_usage", "gen_throughput", "cache_hit_rate", "num_used_tokens",
    "num_paused_reqs", "num_retracted_reqs", "prompt_tokens_total", "generation_tokens_total", "cached_tokens_total",
    "num_requests_total", "num_aborted_requests_total", "time_to_first_token_seconds", "inter_token_latency_seconds",
    "e2e_request_latency_seconds", "queue_time_seconds", "weight_load_duration_seconds",
]  # fmt: skip
HISTOGRAMS = (
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "e2e_request_latency_seconds",
    "queue_time_seconds",
)
PROMPT = list(range(40))
LONG = SamplingParams(max_new_tokens=400, ignore_eos=True)


def wait_for(is_so: Callable[[], object]) -> None:
    """Wait until the condition is true; fail after PATIENCE seconds."""
    deadline = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < deadline


def params(num_tokens: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=num_tokens, ignore_eos=True)


@pytest.fixture
def server(service) -> Iterator[BackgroundServer]:
    config = HttpConfig(port=0, api_key="a-key", admin_api_key="an-admin-key", model_name="tiny")
    with serve_in_background(service, config) as server:
        yield server


class Scrape:
    """The samples of one scrape."""

    def __init__(self, url: str) -> None:
        response = httpx.get(f"{url}/metrics")  # without a key: it is open
        assert response.status_code == 200 and response.headers["content-type"].startswith("text/plain")
        self.types: dict[str, str] = {}
        self.samples: dict[tuple[str, frozenset], float] = {}
        for family in parse_text(response.text):
            self.types[family.name] = family.type
            for sample in family.samples:
                assert sample.labels["model_name"] == "tiny"
                key = (sample.name, frozenset((k, v) for k, v in sample.labels.items() if k != "model_name"))
                assert key not in self.samples
                self.samples[key] = sample.value

    def __call__(self, name: str, **labels: str) -> float:
        name = name if ":" in name else f"sglang:{name}"
        return self.samples[name, frozenset(labels.items())]


@pytest.fixture
def scrape(server):
    return lambda: Scrape(server.url)


def test_every_name_of_the_contract_is_there_before_the_first_request(scrape):
    names = scrape().types
    assert {f"sglang:{name.removesuffix('_total')}" for name in CONTRACT} <= names.keys()
    assert {names[f"sglang:{name}"] for name in HISTOGRAMS} == {"histogram"}
    assert all(names[f"sglang:{name.removesuffix('_total')}"] == "counter" for name in CONTRACT if "_total" in name)


def test_counters_are_those_of_the_requests_that_ran(scrape, service):
    for _ in range(2):
        service.engine.generate([PROMPT], params(5))
    got = scrape()
    assert got("num_requests_total") == 2
    assert (got("prompt_tokens_total"), got("generation_tokens_total"), got("cached_tokens_total")) == (80, 10, 32)
    assert got("lockstep:answers_total", how="completed") == 2
    # Looked up are whole blocks, and the second time two of them were there.
    state = service.state()
    assert got("cache_hit_rate") == pytest.approx(state["num_hit_tokens"] / state["num_looked_up_tokens"])
    assert got("num_running_reqs") == got("num_queue_reqs") == got("gen_throughput") == got("token_usage") == 0
    assert got("lockstep:kv_blocks", state="free") + got("lockstep:kv_blocks", state="cached") == 32


def test_tokens_of_earlier_answers_are_counted_by_whether_they_stayed(scrape, service):
    [answer] = service.engine.generate([PROMPT], params(20))
    assert scrape()("lockstep:verified_tokens_total") == 0
    service.engine.generate([PROMPT], params(20), options=RequestOptions(renewal=answer))
    others = [*answer.token_ids[:12], (answer.token_ids[12] + 1) % 250, *answer.token_ids[13:]]
    service.engine.generate([PROMPT], params(20), options=RequestOptions(renewal=replace(answer, token_ids=others)))
    got, counted = scrape(), service.engine.metrics
    assert (got("lockstep:kept_tokens_total"), got("lockstep:parted_tokens_total")) == (32, 8)
    assert got("lockstep:verified_tokens_total") == counted.num_verified_tokens > 0


def test_drafts_are_counted_by_source_and_reason(scrape, service):
    assert scrape()("spec_accept_length") == scrape()("spec_accept_rate") == 0
    service.engine.parts.speculation.lengths = WholeDrafts()
    greedy = SamplingParams(max_new_tokens=20, ignore_eos=True, temperature=0.0)
    [plain] = service.engine.generate([PROMPT], greedy, options=RequestOptions(speculation=False))
    [drafted] = service.engine.generate([PROMPT], greedy, options=RequestOptions(draft_token_ids=plain.token_ids))
    assert drafted.num_accepted_tokens > 0
    got, state = scrape(), service.state()
    for source, counts in state["speculation"]["sources"].items():
        assert got("lockstep:drafts_total", source=source) == counts["num_drafts"]
        assert got("lockstep:draft_tokens_total", source=source) == counts["num_drafted"]
        assert got("lockstep:accepted_draft_tokens_total", source=source) == counts["num_accepted"]
        assert got("lockstep:refused_draft_tokens_total", source=source) == 0
    metrics = state["metrics"]
    assert got("spec_accept_rate") == metrics["num_accepted_tokens"] / metrics["num_drafted_tokens"]
    assert got("spec_accept_length") > 1
    assert got("lockstep:sequences_without_draft_total", why="refused") == 20
    assert got("lockstep:speculation_seconds_total") == metrics["speculation_seconds"] > 0
    assert got("lockstep:draft_history_bytes") == state["speculation"]["history_bytes"] > 0


def test_tokens_of_one_step_share_its_time(scrape, service):
    service.engine.parts.speculation.lengths = WholeDrafts()
    greedy = SamplingParams(max_new_tokens=20, ignore_eos=True, temperature=0.0)
    [plain] = service.engine.generate([PROMPT], greedy, options=RequestOptions(speculation=False))
    before = scrape()
    [drafted] = service.engine.generate([PROMPT], greedy, options=RequestOptions(draft_token_ids=plain.token_ids))
    assert drafted.num_accepted_tokens > 0
    got = scrape()
    num_first = 20 - (got("inter_token_latency_seconds_count") - before("inter_token_latency_seconds_count"))
    assert 1 <= num_first <= 1 + max(counts.num_drafted_tokens for counts in drafted.drafts)
    between = got("e2e_request_latency_seconds_sum") - got("time_to_first_token_seconds_sum")
    assert 0 < got("inter_token_latency_seconds_sum") <= between


def test_latencies_count_each_request_and_each_token_once(scrape, service):
    service.engine.generate([PROMPT, [1, 2], [3]], [params(5), params(1), params(2)])
    got = scrape()
    assert got("time_to_first_token_seconds_count") == got("queue_time_seconds_count") == 3
    assert got("e2e_request_latency_seconds_count") == 3
    assert got("inter_token_latency_seconds_count") == 4 + 0 + 1
    assert 0 < got("queue_time_seconds_sum") < got("time_to_first_token_seconds_sum")
    assert got("time_to_first_token_seconds_sum") <= got("e2e_request_latency_seconds_sum")
    # From the first token to the answer there is nothing but the time between tokens, and delivery.
    between = got("e2e_request_latency_seconds_sum") - got("time_to_first_token_seconds_sum")
    assert 0 < got("inter_token_latency_seconds_sum") <= between


def test_scraping_changes_nothing(scrape, service):
    service.engine.generate([PROMPT], params(3))
    before = service.state()
    first, second = scrape(), scrape()
    assert first.samples == second.samples
    assert service.state() == before


def test_running_paused_and_retracted_sequences_are_told_apart(scrape, service):
    service.engine.add(PROMPT, LONG, rid="long")
    wait_for(lambda: service.state()["num_running"])
    service.engine.weights.refuse_sampling("held still")
    got = scrape()
    assert (got("num_running_reqs"), got("num_paused_reqs"), got("lockstep:paused")) == (1, 0, 0)
    assert got("lockstep:refusing") == 1
    assert got("token_usage") > 0 and got("num_used_tokens") >= 40 and got("gen_throughput") > 0
    service.engine.pause_generation("in_place")
    got = scrape()
    assert (got("num_running_reqs"), got("num_paused_reqs"), got("num_retracted_reqs")) == (1, 1, 0)
    assert got("gen_throughput") == 0
    service.engine.pause_generation("retract")
    got = scrape()
    assert (got("num_running_reqs"), got("num_queue_reqs"), got("num_retracted_reqs")) == (0, 1, 1)
    assert got("num_retracted_requests_total") == 1 and got("lockstep:pauses_total") == 2
    service.engine.abort_request("long")
    got = scrape()
    assert got("num_aborted_requests_total") == got("lockstep:answers_total", how="aborted") == 1
    assert got("e2e_request_latency_seconds_count") == 0


def test_a_retracted_request_reached_its_first_step_and_token_once(scrape, service):
    service.engine.add([1, 2, 3], LONG, rid="long")
    wait_for(lambda: service.engine.live_sequences()[0].num_output_tokens)
    service.engine.pause_generation("retract")
    service.engine.continue_generation()
    wait_for(lambda: service.engine.live_sequences()[0].num_output_tokens >= 20)
    service.engine.abort_request("long")
    got = scrape()
    assert got("queue_time_seconds_count") == got("time_to_first_token_seconds_count") == 1
    assert got("inter_token_latency_seconds_count") == got("generation_tokens_total") - 1


def test_updates_are_counted_by_path_with_bytes_seconds_and_verified_digests(scrape, service, model, tmp_path):
    with torch.no_grad():
        model.model.norm.weight.add_(1)
    tensors = list(model.named_parameters())
    num_bytes = sum(t.numel() * t.element_size() for _, t in tensors)
    roots = {name: root.hex() for name, root in tensor_roots(tensors).items()}
    service.begin_weight_update(weight_version="2")
    service.update_weights_from_named_tensors(tensors)
    service.verify_weight_update(roots)
    service.end_weight_update()
    got = scrape()
    assert got("lockstep:weight_updates_total", source="process") == 1
    assert got("lockstep:weight_update_bytes_total", source="process") == num_bytes
    assert got("lockstep:weight_digests_verified_total") == len(roots)
    assert got("lockstep:weight_commits_total") == 1
    assert got("lockstep:weights_info", version="2", digest=service.engine.weight_digest) == 1
    assert got("lockstep:weight_update_seconds_total", source="process") > 0
    assert got("weight_load_duration_seconds", source="process") > 0
    model.save_pretrained(tmp_path / "next")
    service.update_weights_from_disk(tmp_path / "next")
    service.update_weights_from_named_tensors(tensors[:2], verify=roots)
    got = scrape()
    assert got("lockstep:weight_updates_total", source="disk") == 1
    assert got("lockstep:weight_updates_total", source="process") == 2
    assert got("lockstep:weight_digests_verified_total") == len(roots) + 2


def test_failures_are_counted_by_operation_and_reason(scrape, service, model):
    with pytest.raises(ValueError, match="no_such"):
        service.update_weights_from_named_tensors([("no_such", torch.zeros(3))])
    service.begin_weight_update()
    with pytest.raises(SessionError):
        service.begin_weight_update()
    with pytest.raises(ValueError, match="not wholly written"):
        service.end_weight_update()
    tensors = copy.deepcopy(list(model.named_parameters()))
    service.update_weights_from_named_tensors(tensors)
    with pytest.raises(DigestMismatch):
        service.verify_weight_update({tensors[0][0]: "00" * 32})
    service.abort_weight_update()
    got = scrape()
    for operation, reason in (
        ("update_process", "ValueError"),
        ("begin", "SessionError"),
        ("commit", "ValueError"),
        ("verify", "DigestMismatch"),
    ):
        assert got("lockstep:weight_failures_total", operation=operation, reason=reason) == 1
    assert got("lockstep:weight_digests_verified_total") == got("lockstep:weight_commits_total") == 0
    assert got("weight_load_duration_seconds", source="process") > 0


def test_a_scraper_may_ask_for_openmetrics(server, service):
    service.engine.generate([PROMPT], params(2))
    accept = {"Accept": "application/openmetrics-text; version=1.0.0"}
    response = httpx.get(f"{server.url}/metrics", headers=accept)
    assert response.headers["content-type"].startswith("application/openmetrics-text")
    families = {family.name: family for family in parse_openmetrics(response.text)}
    assert families["sglang:num_requests"].type == "counter"
    assert {sample.name for sample in families["sglang:num_requests"].samples} == {"sglang:num_requests_total"}
    asked_by_prometheus = "application/openmetrics-text;version=1.0.0;q=0.8,text/plain;version=0.0.4;q=0.5"
    for accept in (asked_by_prometheus, "application/openmetrics-text;version=abc", "text/plain;version=1.0.0x", "*/*"):
        text = httpx.get(f"{server.url}/metrics", headers={"Accept": accept}).raise_for_status().text
        assert "\nsglang:num_requests_total{" in text


def test_a_label_cannot_break_out_of_its_line(service):
    with serve_in_background(service, HttpConfig(port=0, model_name='a"b\n\\x{y="1"} 2')) as server:
        text = httpx.get(f"{server.url}/metrics").text
    [sample] = [s for f in parse_text(text) if f.name == "sglang:num_running_reqs" for s in f.samples]
    assert sample.labels == {"model_name": 'a"b\n\\x{y="1"} 2'}


def test_a_histogram_counts_each_bound_inclusively():
    histogram = Histogram((0.1, 1.0))
    for seconds in (0.05, 0.1, 0.2, 1.0, 1.1):
        histogram.observe(seconds)
    assert histogram.counts == [2, 2, 1] and histogram.total == pytest.approx(2.45)
    for bounds in (TOKEN_BOUNDS, REQUEST_BOUNDS):
        assert list(bounds) == sorted(set(bounds))


# -- HTTP traffic -----------------------------------------------------------------------------------------------------


def test_answers_are_counted_by_path_method_and_status_and_timed_by_path(scrape, server):
    with httpx.Client(base_url=server.url, headers={"Authorization": "Bearer a-key"}) as client:
        body = {"input_ids": [PROMPT, [1, 2]], "sampling_params": {"max_new_tokens": 4}}
        for _ in range(2):
            assert client.post("/generate", json=body).status_code == 200
        assert client.post("/generate", json=body | {"stream": True}).status_code == 200
        assert client.post("/generate", json={"text": 3}).status_code == 400
        assert client.get("/v1/models/nobody").status_code == 404
        assert client.post("/pause_generation", json={}).status_code == 403
        assert client.get("/generate").status_code == 405
    got = scrape()
    count = partial(got, "lockstep:http_requests_total")
    assert count(path="/generate", method="POST", status="200") == 3
    assert count(path="/generate", method="POST", status="400") == 1
    assert count(path="/generate", method="GET", status="405") == 1
    assert count(path="/v1/models/{model}", method="GET", status="404") == 1
    assert count(path="/pause_generation", method="POST", status="403") == 1  # refused before it was routed
    assert got("lockstep:http_request_seconds_count", path="/generate") == 5
    assert 0 < got("lockstep:http_request_seconds_sum", path="/generate") < 60
    assert got("lockstep:http_request_seconds_bucket", path="/generate", le="+Inf") == 5
    assert got("lockstep:http_requests_open") == 0


def test_labels_are_as_many_as_there_are_routes_whatever_is_asked_for(scrape, server):
    with httpx.Client(base_url=server.url, headers={"Authorization": "Bearer an-admin-key"}) as client:
        for index in range(40):
            client.get(f"/nowhere/{index}")
            client.request(f"BREW{index}", "/generate", json={})
            client.post(f"/lockstep/verb{index}", json={})
            client.get(f"/v1/models/{index}")
    got = scrape()
    labels = [dict(labels) for name, labels in got.samples if name == "lockstep:http_requests_total"]
    assert {entry["path"] for entry in labels} == {"other", "/generate", "/lockstep/{verb}", "/v1/models/{model}"}
    assert {entry["method"] for entry in labels} == {"GET", "POST", "other"}
    assert got("lockstep:http_requests_total", path="other", method="GET", status="404") == 40
    assert got("lockstep:http_requests_total", path="/generate", method="other", status="405") == 40


def test_scrapes_of_a_moment_share_one_reading_and_leave_reports_their_turns(server, service):
    readings, release = [], threading.Event()
    service_state = service.state

    def slow_at_first() -> dict:
        readings.append(1)
        if len(readings) == 1:
            release.wait(PATIENCE)
        return service_state()

    with pytest.MonkeyPatch.context() as patched, httpx.Client(base_url=server.url, timeout=PATIENCE) as client:
        patched.setattr(service, "state", slow_at_first)
        scrapes = [submit(client.get, "/metrics") for _ in range(20)]
        wait_for(lambda: server.app.state.connections.num_open >= 20 and readings)
        report = client.get("/model_info", headers={"Authorization": "Bearer an-admin-key"})
        assert report.status_code == 200 and not release.is_set()
        release.set()
        assert all(soon(scrape).status_code == 200 for scrape in scrapes)
    assert len(readings) < 10
