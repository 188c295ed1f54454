"""Tests of the serve benchmark: its figures are complete and belong to the requested load."""

from __future__ import annotations

import argparse

import pytest

from lockstep.integration.bench import serve


def options(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    return parser.parse_args(["--model", "tiny", "--threads", "1", *arguments])


def test_report_has_what_the_issue_asks_for(restore_threads):
    report = serve.run(
        options("--concurrency", "2", "--requests", "3", "--prompt-tokens", "8", "--new-tokens", "5", "--repeats", "2")
    )
    for key in ("direct_tok_s", "http_tok_s", "requests_s", "ttft_ms_p50", "ttft_ms_p99", "itl_ms_p50"):
        assert report[key] > 0, key
    low, high = report["http_cost_range"]
    assert low <= report["http_cost"] <= high < 1
    assert report["ttft_ms_p50"] <= report["ttft_ms_p99"]


def test_the_load_goes_through_vllms_call_too(restore_threads):
    arguments = ("--concurrency", "2", "--requests", "3", "--prompt-tokens", "8", "--new-tokens", "5", "--repeats", "1")
    report = serve.run(options(*arguments, "--route", "/inference/v1/generate"))
    assert report["route"] == "/inference/v1/generate" and report["http_tok_s"] > 0


def test_cost_is_the_median_of_pairs():
    direct = [serve.ServeRun(100, 1), serve.ServeRun(200, 2), serve.ServeRun(100, 1)]
    latencies = [((0.1, 0.3), (0.01,)), ((0.2,), (0.03,)), ((0.2,), (0.02,))]
    http = [serve.ServeRun(rate, 1, *pair) for rate, pair in zip((90, 190, 50), latencies, strict=True)]
    report = serve.report(direct, http)
    assert report["http_cost"] == pytest.approx(0.1) and report["http_cost_range"] == [0.05, 0.5]
    assert (report["direct_tok_s"], report["http_tok_s"]) == (100, 90)
    assert (report["ttft_ms_p50"], report["itl_ms_p50"]) == (200, 20)


@pytest.mark.parametrize(("gaps", "itl_ms"), [((), None), ((0.01,), 10)])
def test_answers_that_came_in_one_piece_have_no_time_between_tokens(gaps, itl_ms):
    report = serve.report([serve.ServeRun(100, 1)], [serve.ServeRun(90, 1, (0.1, 0.2), gaps)])
    assert report["itl_ms_p50"] == itl_ms and report["ttft_ms_p50"] == 150


def test_load_beyond_the_context_is_refused():
    with pytest.raises(ValueError, match="exceed the context"):
        serve.run(options("--prompt-tokens", "4000", "--new-tokens", "4000", "--concurrency", "1"))
