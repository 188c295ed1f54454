"""Tests of the pipeline benchmark: its figures are complete and belong to the requested load."""

from __future__ import annotations

import argparse

import pytest

from lockstep.integration.bench.several_ranks import pipeline


def options(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    pipeline.add_arguments(parser)
    return parser.parse_args(["--model", "tiny", *arguments])


@pytest.mark.slow
def test_report_has_what_the_issue_asks_for(restore_threads):
    report = pipeline.run(
        options("--chunks", "3", "--chunk-tokens", "16", "--batch", "4", "--new-tokens", "6", "--repeats", "2")
    )
    for key in ("sequential_s", "pipelined_s", "single_s", "ratio", "control_bytes_per_step", "control_us_per_step",
                "control_share", "single_step_ms", "two_stage_step_ms"):  # fmt: skip
        assert report[key] > 0, key
    assert report["prompt_tokens"] == 48 and report["ideal_ratio"] == 0.6667
    low, high = report["ratio_range"]
    assert low <= report["ratio"] <= high


def test_ratio_is_the_median_of_pairs_and_overhead_is_against_one_rank():
    load = pipeline.PipelineLoad("tiny", "float32", 4, 16, 8, 16, 3)
    prompts = {"sequential": [1.0, 2.0, 1.0], "pipelined": [0.6, 1.4, 0.9], "single": [1.0, 1.0, 1.1]}
    batch, one = [pipeline.DecodeRun(0.02, 0.001, 100.0)] * 3, [pipeline.DecodeRun(0.012, 0.001, 60.0)] * 3
    single_batch, single_one = [pipeline.DecodeRun(0.01, 0, 0)] * 3, [pipeline.DecodeRun(0.0105, 0, 0)] * 3
    report = pipeline.report(load, prompts, batch, single_batch, one, single_one)
    assert (report["ratio"], report["ratio_range"], report["ideal_ratio"]) == (0.7, [0.6, 0.9], 0.625)
    assert (report["sequential_s"], report["pipelined_s"], report["single_s"]) == (1.0, 0.9, 1.0)
    assert (report["control_bytes_per_step"], report["control_us_per_step"]) == (100.0, 1000.0)
    assert (report["control_share"], report["overhead_us_per_step"]) == (0.1, 1500.0)


def test_a_model_that_is_not_there_is_refused_before_a_process_starts():
    with pytest.raises(ValueError, match="nowhere"):
        pipeline.run(options("--model", "nowhere"))
