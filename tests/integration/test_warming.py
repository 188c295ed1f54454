"""Tests of decode steps that are recorded ahead: the same answers, and requests are served in between."""

from __future__ import annotations

import pytest
import torch

from lockstep.integration.cli import main as cli
from lockstep.integration.warming import record_in_background, record_sizes, say_progress
from lockstep.kernels.attention.cpp import SOURCE
from lockstep.kernels.machine import native
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.sampling_params import SamplingParams

pytestmark = pytest.mark.skipif(native.load(SOURCE) is None, reason="needs a C++ compiler")
SIZES = (1, 2, 4)
PROMPTS = [[5, 6, 7], [8] * 20, [9, 10]]


def make(model, **config: object) -> Engine:
    settings = {"kv_cache": "16 blocks", "max_num_seqs": 4, "cuda_graph_batch_sizes": SIZES, "speculation": "off"}
    return Engine(model, EngineConfig(**settings | config))


def answers(engine: Engine) -> list[tuple]:
    params = [SamplingParams(max_new_tokens=6, sampling_seed=i, ignore_eos=True) for i in range(len(PROMPTS))]
    return [(c.token_ids, c.logprobs) for c in engine.generate(PROMPTS, params)]


def test_sizes_recorded_ahead_give_the_answers_of_sizes_recorded_when_needed(model) -> None:
    expected, told = answers(make(model)), []
    engine = make(model)
    assert record_sizes(engine, lambda *its: told.append(its)) == len(SIZES)
    assert told == [(1, 3, 4), (2, 3, 2), (3, 3, 1)]
    assert engine.parts.runner.unrecorded_sizes == []
    assert answers(engine) == expected == answers(engine)
    assert record_sizes(engine) == 0
    engine.check_integrity()


def test_a_record_writes_to_no_block_that_is_remembered(model) -> None:
    engine = make(model)
    first = answers(engine)  # its blocks are cached
    engine.parts.runner.release_memory()
    caches = [t.clone() for t in (*engine.parts.kv_cache.keys, *engine.parts.kv_cache.values)]
    free = sorted(engine.parts.ledger.free_blocks())
    record_sizes(engine)
    for before, now in zip(caches, (*engine.parts.kv_cache.keys, *engine.parts.kv_cache.values), strict=True):
        changed = (before != now).flatten(1).any(1).nonzero().flatten().tolist()
        assert set(changed) <= set(free)
    assert answers(engine) == first


def test_a_size_is_left_to_its_step_while_no_block_is_free(model) -> None:
    engine = make(model, kv_cache="2 blocks", prefix_cache=False)
    engine.add([3] * 20, SamplingParams(max_new_tokens=8, ignore_eos=True))
    engine.step()
    assert not engine.parts.ledger.free_blocks()
    assert record_sizes(engine) == 0 and len(engine.parts.runner.unrecorded_sizes) == len(SIZES)
    while engine.has_work:
        engine.step()


def test_requests_are_served_while_sizes_are_recorded(model, capsys) -> None:
    expected, engine = answers(make(model)), make(model, overlap=True)
    with engine.model.rollout_phase():
        engine.start()
        thread = record_in_background(engine)
        params = [SamplingParams(max_new_tokens=6, sampling_seed=i, ignore_eos=True) for i in range(len(PROMPTS))]
        found = engine.generate(PROMPTS, params)
        thread.join(60)
        assert not thread.is_alive()
        engine.stop()
    assert [(c.token_ids, c.logprobs) for c in found] == expected
    assert engine.parts.runner.unrecorded_sizes == []
    assert "recorded" in capsys.readouterr().err
    engine.close()


def test_progress_is_a_line_for_every_eighth_size_and_the_last(capsys) -> None:
    for done in range(1, 19):
        say_progress(done, 18, 99)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[2] for line in lines] == ["8", "16", "18"]


def test_warm_records_and_compiles_for_a_folder(model, tmp_path, capsys) -> None:
    model.save_pretrained(tmp_path / "model")
    settings = ["--engine", "kv_cache=64", "--engine", "max_num_seqs=2", "--engine", "max_num_batched_tokens=64"]
    assert cli.main(["warm", "--model", str(tmp_path / "model"), *settings]) == 0
    printed = capsys.readouterr()
    assert "decode sizes recorded; torch.float32 on cpu" in printed.out and "warm in" in printed.out
    assert "decode steps (the last has 1 rows)" in printed.err
    assert cli.main(["warm", "--model", str(tmp_path / "nowhere")]) == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_graphs_captured_ahead_give_the_answers_of_plain_steps(model) -> None:
    engine = make(model.cuda(), overlap=True)
    record_sizes(engine)
    assert answers(engine) == answers(make(model, cuda_graph_batch_sizes=()))
