"""Tests that benchmarks which repeat a load run the same steps each time: no run draws from the history of another."""

from __future__ import annotations

import argparse

import pytest

from lockstep.integration.bench import grammar, overlap, pause, serve
from lockstep.integration.bench.parts.load import Load
from lockstep.integration.bench.parts.presets import load_model
from lockstep.integration.bench.several_ranks.pipeline import PipelineLoad


def parsed(bench: object, *arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return parser.parse_args(list(arguments))


def test_a_load_over_http_or_not_takes_as_many_steps_however_often_it_ran_before(restore_threads):
    load = serve.ServeLoad(num_requests=4, concurrency=4, prompt_tokens=16, new_tokens=48)
    engine = serve.make_engine(parsed(serve, "--model", "tiny", "--threads", "1"), load)
    prompts, steps = load.prompts(engine.model.vocab_size, 0), []
    with engine.model.rollout_phase():
        engine.start()
        for _ in range(3):
            before = engine.metrics.num_sequence_forwards
            serve.run_direct(engine, load, prompts)
            steps.append(engine.metrics.num_sequence_forwards - before)
        engine.stop()
    engine.close()
    assert steps == [load.num_requests * load.new_tokens] * 3


@pytest.mark.slow
def test_the_forwards_that_jumps_save_are_the_tokens_that_they_insert(restore_threads):
    report = grammar.run(parsed(grammar, "--model", "tiny", "--batch", "3", "--free-tokens", "20", "--threads", "1"))
    forced, spans = report["tokens_forced"], report["num_spans"]
    assert report["off_forwards"] == report["num_tokens"]
    assert 0 < forced - spans <= report["forwards_saved"] <= forced


def test_engines_whose_single_steps_are_timed_have_one_row_of_each_sequence():
    tiny = load_model("tiny")
    engine = pause.make_engine(tiny, Load(2, 8, 8), overlap=False)
    assert engine.config.speculation == "off"
    engine.close()
    assert overlap.engine_config(2, overlap=False, trace=None).speculation == "off"
    assert PipelineLoad("tiny", "float32", 1, 16, 2, 8, 1).engine_config(pp=1).speculation == "off"
