"""Tests of the benchmarks of the prefix cache, on small loads: they test the logic, not the speed."""

from __future__ import annotations

import argparse
import itertools
import json
import statistics

import pytest
import torch

from lockstep.integration.bench import cache, pin
from lockstep.integration.bench.parts import presets
from lockstep.integration.bench.parts.budget import Budget
from lockstep.integration.cli import main as cli

DEPTHS = (0, 2, 6, 10, 16)
TINY_SCALE = 0.02  # prompts of 63 to 300 tokens


@pytest.fixture(autouse=True)
def one_thread(restore_threads):
    """Run with one thread: these models are too small for more."""
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def tiny():
    return presets.load_model("tiny", dtype="float32")


def probe(ms: float, num_cached: int, token: int = 5) -> pin.PinProbe:
    return pin.PinProbe(ms / 1e3, num_cached, 7, token)


# -- pin -------------------------------------------------------------------------------------------


def test_the_conversation_has_the_lengths_of_the_seeds_scaled_to_the_model():
    talk = pin.conversation(16384)
    assert [talk.num_prompt_tokens[depth] for depth in DEPTHS] == [474, 722, 1102, 1624, 2250]
    assert [talk.num_prompt_tokens[depth] - talk.num_warm_tokens[depth] for depth in DEPTHS] == [19, 144, 119, 102, 90]
    assert 0.93 <= talk.num_warm_tokens[16] // 16 * 16 / 2250 <= 0.97


def test_each_depth_goes_on_where_the_one_before_ended():
    talk = pin.conversation(16384)
    for depth, deeper in itertools.pairwise(DEPTHS):
        assert talk.num_prompt_tokens[depth] < talk.num_warm_tokens[deeper]
        assert talk.measured(deeper)[: talk.num_prompt_tokens[depth]] == talk.measured(depth)
    for depth in DEPTHS:
        assert talk.measured(depth)[: talk.num_warm_tokens[depth]] == talk.warmed(depth)


def test_the_flood_would_fill_the_cache_three_times():
    assert pin.num_flood_requests(6400) == 120
    assert [pin.num_flood_requests(tokens) for tokens in (160, 161, 213, 214)] == [3, 4, 4, 5]


@pytest.mark.parametrize("depth", [pytest.param(0, marks=pytest.mark.slow), 16])
def test_a_flood_leaves_nothing_of_the_conversation_but_what_is_pinned(tiny, depth):
    talk = pin.conversation(16384, TINY_SCALE)
    arms = [pin.measure(tiny, talk, depth, 800, pinned=pinned, repetition=0) for pinned in (False, True)]
    num_blocks = talk.num_warm_tokens[depth] // 16
    assert [arm.num_cached_tokens for arm in arms] == [0, num_blocks * 16]
    assert [arm.num_pinned for arm in arms] == [0, num_blocks]
    assert arms[0].first_token == arms[1].first_token
    assert min(arm.ttft_s for arm in arms) > 0


def test_a_pool_that_cannot_keep_the_pinned_prompt_is_refused(tiny):
    with pytest.raises(ValueError, match=r"--capacity 320 must be twice the 300 tokens of the deepest prompt"):
        pin.run(options(pin, "--model", "tiny", "--scale", str(TINY_SCALE), "--capacity", "320"))
    with pytest.raises(ValueError, match=r"--scale 0\.001 leaves nothing of a turn"):
        pin.run(options(pin, "--model", "tiny", "--scale", "0.001"))


def test_a_row_has_the_medians_and_the_cached_shares():
    talk = pin.conversation(16384)
    baseline = [probe(ms, 0) for ms in (2000, 9000, 2200)]
    pinned = [probe(ms, 2160) for ms in (150, 200, 900)]
    assert pin.row(16, talk, baseline, pinned) == {
        "depth": 16,
        "prompt_tokens": 2250,
        "baseline_ttft_ms": 2200.0,
        "pinned_ttft_ms": 200.0,
        "speedup": 11.0,
        "baseline_cached": 0.0,
        "pinned_cached": 0.96,
        "num_pinned": 7,
    }


def test_the_summary_is_of_the_deepest_and_flatness_begins_at_depth_two():
    rows = [{"depth": d, "speedup": 9.0 + d, "pinned_ttft_ms": ms} for d, ms in ((0, 10.0), (2, 100.0), (16, 125.0))]
    probes = {
        (d, arm): [probe(1000 if not arm else 100, 0), probe(3000 if not arm else 100, 0)]
        for d in (0, 2, 16)
        for arm in (False, True)
    }
    expected = {"speedup": 25.0, "speedup_range": [10.0, 30.0], "pinned_growth": 1.25, "same_tokens": True}
    assert pin.summary(rows, probes) == expected
    probes[2, True].append(probe(1, 0, token=6))
    assert pin.summary(rows, probes) == {**expected, "same_tokens": False}


@pytest.mark.slow
def test_the_pin_command_prints_a_line_for_each_depth_and_writes_a_chart(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    chart = tmp_path / "pin.png"
    arguments = [
        "bench",
        "pin",
        "--model",
        "tiny",
        "--dtype",
        "float32",
        "--scale",
        str(TINY_SCALE),
        "--capacity",
        "640",
        "--repetitions",
        "1",
        "--depths",
    ]
    assert cli.main([*arguments, "0", "16", "--plot", str(chart), "--json"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [list(row) for row in report["depths"]] == [
        [
            "depth",
            "prompt_tokens",
            "baseline_ttft_ms",
            "pinned_ttft_ms",
            "speedup",
            "baseline_cached",
            "pinned_cached",
            "num_pinned",
        ]
    ] * 2
    assert [row["baseline_cached"] for row in report["depths"]] == [0, 0] and report["same_tokens"] is True
    assert chart.stat().st_size > 1000
    assert cli.main([*arguments, "0", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    at = lines.index(next(line for line in lines if line.split()[:2] == ["depth", "prompt_tokens"]))
    assert [line.split()[:2] for line in lines[at + 1 : at + 3]] == [["0", "63"], ["2", "96"]]
    assert len({len(line) for line in lines[at : at + 3]}) == 1  # columns are aligned


# -- cache -----------------------------------------------------------------------------------------


def test_the_filled_cache_is_full_and_stays_so():
    load = cache.FilledCache(700, 1024)
    usage = load.ledger.usage
    assert (usage.num_blocks, usage.num_free, usage.num_cached) == (700, 0, 700)
    for num_tokens in (128, 1024):
        assert min(load.times_ms(num_tokens, 3, Budget(60))) > 0
        load.ledger.check()
    assert load.ledger.usage.num_cached >= 699 and load.ledger.cache.num_evicted >= 3 * (8 + 64)


def test_the_repeats_of_a_report_are_those_that_there_was_time_for():
    given = ("--blocks", "200", "--prompt-tokens", "256", "--repeats", "3")
    assert cache.run(options(cache, *given))["repeats"] == 3
    assert cache.run(options(cache, *given, "--max-seconds", "0"))["repeats"] == 1


@pytest.mark.slow
def test_the_cache_command_prints_the_agreed_keys(capsys):
    assert cli.main(["bench", "cache", "--blocks", "500", "--prompt-tokens", "1024", "--repeats", "2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["insert_match_ms"] > 0 and (report["num_blocks"], report["prompt_tokens"]) == (500, 1024)
    assert [row["prompt_tokens"] for row in report["by_prompt"]] == [128, 256, 512, 1024]
    assert [row["num_blocks"] for row in report["by_cache"]] == [64, 500]
    assert report["by_prompt"][-1]["insert_match_ms"] == report["insert_match_ms"]


@pytest.mark.slow
def test_insert_and_match_cost_no_more_per_token_in_a_longer_prompt_or_a_larger_cache():
    """Check a loose form of the benchmark's bar, in CPU time of this thread: a quadratic step would fail it."""
    small, large = cache.FilledCache(600, 8192), cache.FilledCache(6000, 8192)
    short, long = (statistics.median(large.times_ms(num_tokens, 9, Budget(60))) for num_tokens in (1024, 8192))
    assert long < 2.5 * 8 * short
    assert long < 3 * statistics.median(small.times_ms(8192, 9, Budget(60)))


def options(module, *arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    return parser.parse_args(arguments)
