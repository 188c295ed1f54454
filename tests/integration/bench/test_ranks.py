"""Tests of the benchmark of several ranks: its figures are complete and belong to the requested load."""

from __future__ import annotations

import argparse

import pytest

from lockstep.integration.bench.parts.load import Load
from lockstep.integration.bench.parts.runs import Run
from lockstep.integration.bench.several_ranks import ranks
from lockstep.kernels.collectives.exchange import SOURCE
from lockstep.kernels.machine import native


def options(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    ranks.add_arguments(parser)
    return parser.parse_args(["--model", "tiny", *arguments])


@pytest.mark.slow
@pytest.mark.skipif(native.load(SOURCE) is None, reason="needs a C++ compiler")
def test_the_report_is_of_a_replica_that_replays_its_steps(restore_threads):
    report = ranks.run(
        options("--batch", "2", "--prompt-tokens", "8", "--new-tokens", "16", "--repeats", "9", "--max-seconds", "0")
    )
    for key in ("replica_tok_s", "single_tok_s", "replica_step_ms", "single_step_ms", "ratio", "step_ratio"):
        assert report[key] > 0, key
    assert report["has_memory"] and report["replays"] and report["repeats"] == 1


def test_ratios_are_medians_of_the_pairs():
    load = Load(2, 8, 10)
    replica, single = ([Run(s, 0.1, (s / 10,)) for s in seconds] for seconds in ((2.0, 1.0, 4.0), (1.0, 1.0, 3.0)))
    report = ranks.report(load, {"replica": replica, "single": single})
    assert (report["replica_tok_s"], report["single_tok_s"]) == (10.0, 20.0)
    assert (report["ratio"], report["ratio_range"], report["step_ratio"]) == (0.75, [0.5, 1.0], 0.75)
    assert report["replica_step_ms"] == 200.0


def test_a_single_rank_is_refused():
    with pytest.raises(ValueError, match="nothing to compare"):
        ranks.run(options("--tp", "1"))
