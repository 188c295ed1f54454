"""The invariance table: a token's log-probability equals the trainer's in every bit, in any batch.

Rows: batch mates, chunk sizes, prefix hits, thread counts, preemption. Columns: float32 and bfloat16, the native and
the PyTorch attention. The reference is the trainer's forward over the whole sequence, alone, with gradients enabled.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys

import pytest
import torch

from lockstep.kernels.attention.cpp import SOURCE
from lockstep.kernels.machine import native
from lockstep.kernels.machine.native import ISA_LEVELS
from lockstep.kernels.sampling.logprobs import scaled_logprobs
from lockstep.rollout.completion import Completion
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.request_options import RequestOptions
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.tests.support.covering import covering

TEMPERATURE = 0.7
# Contexts that cross several KV tiles, start at odd places, and share a stem of 40 tokens.
STEM = [(11 * i + 3) % 250 for i in range(40)]
PROMPTS = [
    [5],
    [*STEM, 1, 2, 3],
    [*STEM, *((7 * i) % 250 for i in range(250))],
    [(3 * i + 1) % 250 for i in range(127)],
    STEM[:33],
    [9] * 200,
]
CHUNKS = [1, 7, 16, 64, 1000]


def params(index: int, num_new: int = 10, **others: object) -> SamplingParams:
    return SamplingParams(max_new_tokens=num_new, temperature=TEMPERATURE, sampling_seed=index, **others)


def make_engine(model, **config: object) -> Engine:
    settings = {"kv_cache": "128 blocks", "max_num_seqs": 8, "max_num_batched_tokens": 1024, **config}
    return Engine(model.train(), EngineConfig(**settings))


def trainer_logprobs(engine: Engine, completion: Completion) -> list[float]:
    """Return the log-probabilities of all tokens after the first, prompt included, by the trainer's forward."""
    ids = torch.tensor([completion.prompt_ids + completion.token_ids], device=engine.model.device)
    with engine.model.training_numerics():
        logits = engine.model.module(ids, use_cache=False).logits[0, :-1]
    assert logits.requires_grad
    return scaled_logprobs(logits, TEMPERATURE).gather(-1, ids[0, 1:, None])[:, 0].tolist()


def assert_trainers_bits(engine: Engine, completions: list[Completion]) -> None:
    for completion in completions:
        whole = [None, *trainer_logprobs(engine, completion)]
        assert completion.num_completion_tokens > 0
        assert list(completion.logprobs) == whole[completion.num_prompt_tokens :]
        if completion.prompt_logprobs is not None:
            start = completion.num_prompt_tokens - len(completion.prompt_logprobs)
            assert list(completion.prompt_logprobs) == whole[start : completion.num_prompt_tokens]


@pytest.fixture
def make(make_model):
    return functools.partial(make_model, "qwen3", max_position_embeddings=1024)


@pytest.fixture
def one_thread(restore_threads):
    torch.set_num_threads(1)


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@covering(2, rest="slow", chunk=CHUNKS, family=["qwen3", "gemma2"], dtype=[torch.float32, torch.bfloat16])
def test_chunk_size_changes_no_bit(make_model, one_thread, family, dtype, chunk):
    model = make_model(family, dtype, max_position_embeddings=1024)
    engine = make_engine(model, chunked_prefill_size=chunk)
    prompts = PROMPTS if chunk > 1 else [p[:70] for p in PROMPTS]  # row by row is slow
    options = RequestOptions(logprob_start_len=0)
    assert_trainers_bits(engine, engine.generate(prompts, [params(i) for i in range(6)], options=options))


@DTYPES
def test_batch_mates_change_no_bit(make, one_thread, dtype):
    engine = make_engine(make(dtype), prefix_cache=False)
    together = engine.generate(PROMPTS, [params(i) for i in range(6)])
    alone = [engine.generate(prompt, params(i))[0] for i, prompt in enumerate(PROMPTS)]
    pairs = engine.generate(PROMPTS[::-1], [params(5 - i) for i in range(6)])[::-1]
    for a, b, c in zip(together, alone, pairs, strict=True):
        assert a.token_ids == b.token_ids == c.token_ids
        assert a.logprobs == b.logprobs == c.logprobs
    assert_trainers_bits(engine, together)


@DTYPES
def test_joining_and_leaving_in_mid_generation_changes_no_bit(make, one_thread, dtype):
    engine = make_engine(make(dtype), chunked_prefill_size=50)
    answers: list[Completion] = []
    for index, prompt in enumerate(PROMPTS * 2):
        engine.add(prompt, params(index, 4 + 3 * (index % 5)), rid=str(index))
        answers += [c for _ in range(1 + index % 3) for c in engine.step()]
    while engine.has_work:
        answers += engine.step()
    assert len(answers) == 12
    assert_trainers_bits(engine, answers)


@DTYPES
def test_prefix_hit_changes_no_bit(make, one_thread, dtype):
    engine = make_engine(make(dtype), chunked_prefill_size=64)
    cold = engine.generate(PROMPTS, [params(i, 20) for i in range(6)])
    hit = engine.generate(PROMPTS, [params(i, 20) for i in range(6)])
    assert [c.num_cached_tokens for c in hit] == [(len(p) - 1) // 16 * 16 for p in PROMPTS]
    for a, b in zip(cold, hit, strict=True):
        assert (a.token_ids, a.logprobs) == (b.token_ids, b.logprobs)
    assert_trainers_bits(engine, hit)
    longer = [[*c.prompt_ids, *c.token_ids, 8] for c in hit]  # the KV of decoded tokens is read as a prefix
    next_turn = engine.generate(longer, [params(i) for i in range(6)])
    assert next_turn[2].num_cached_tokens > len(PROMPTS[2])
    assert_trainers_bits(engine, next_turn)


@DTYPES
@pytest.mark.parametrize("num_threads", [1, 2])
def test_thread_count_keeps_engine_and_trainer_together(make, restore_threads, dtype, num_threads):
    torch.set_num_threads(num_threads)
    engine = make_engine(make(dtype, num_hidden_layers=1), chunked_prefill_size=100)
    options = RequestOptions(logprob_start_len=0)
    assert_trainers_bits(engine, engine.generate(PROMPTS, [params(i, 4) for i in range(6)], options=options))


@DTYPES
def test_preemption_under_kv_pressure_changes_no_token_and_no_bit(make, one_thread, dtype):
    model = make(dtype)
    settings = [params(i, 60) for i in range(6)]
    ample = make_engine(model).generate(PROMPTS, settings)
    scarce = make_engine(model, kv_cache="24 blocks", chunked_prefill_size=50, admission_ratio=0)
    squeezed = scarce.generate(PROMPTS, settings)
    assert sum(c.num_retractions for c in squeezed) >= 1
    for a, b in zip(ample, squeezed, strict=True):
        assert (a.token_ids, a.logprobs, a.finish_reason) == (b.token_ids, b.logprobs, b.finish_reason)
    assert_trainers_bits(scarce, squeezed)
    scarce.check_integrity()


@DTYPES
def test_preempted_prompt_scoring_changes_no_bit(make, one_thread, dtype):
    engine = make_engine(make(dtype), kv_cache="24 blocks", chunked_prefill_size=30, admission_ratio=0)
    options = RequestOptions(logprob_start_len=0, top_logprobs_num=2)
    ids = [engine.add(p, params(i, 30), options=options)[0] for i, p in enumerate(PROMPTS)]
    answers = {}
    while engine.has_work:
        answers |= {c.id: c for c in engine.step()}
    assert sum(c.num_retractions for c in answers.values()) >= 1
    assert_trainers_bits(engine, [answers[id] for id in ids])
    assert all(len(c.prompt_top_logprobs) == c.num_prompt_tokens for c in answers.values())


@DTYPES
def test_samples_of_a_group_have_the_trainers_bits(make, one_thread, dtype):
    engine = make_engine(make(dtype))
    completions = engine.generate(PROMPTS[2], params(3, 20, n=6))
    assert len({c.token_ids for c in completions}) == 6
    assert_trainers_bits(engine, completions)


def test_the_comparison_can_fail_one_ulp_or_another_temperature_shows(make, one_thread):
    engine = make_engine(make())
    [completion] = engine.generate(PROMPTS[1], params(0))
    before = trainer_logprobs(engine, completion)
    weight = engine.model.module.model.layers[0].self_attn.v_proj.weight
    with torch.no_grad():
        weight[0, 0] = torch.nextafter(weight[0, 0], torch.tensor(float("inf")))
    assert trainer_logprobs(engine, completion) != before


def test_without_our_numerics_the_trainer_differs_so_the_table_is_not_trivial(make, one_thread):
    engine = make_engine(make())
    [completion] = engine.generate(PROMPTS[2], params(0, 30))
    ids = torch.tensor([completion.prompt_ids + completion.token_ids])
    logits = engine.model.module(ids, use_cache=False).logits[0, len(PROMPTS[2]) - 1 : -1]
    plain = scaled_logprobs(logits, TEMPERATURE).gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
    assert plain.tolist() != list(completion.logprobs)
    torch.testing.assert_close(plain, torch.tensor(completion.logprobs), atol=1e-4, rtol=1e-4)


ON_ANOTHER_PATH = """
import json, sys
import torch
torch.set_num_threads(1)
from lockstep.tests.rollout import test_invariance_table as table
from lockstep.tests.support.random_models import random_model as make_model

report = {}
for case in sys.argv[1:]:
    family, dtype = case.split()
    model = make_model(family, getattr(torch, dtype), max_position_embeddings=1024)
    engine = table.make_engine(model, chunked_prefill_size=64)
    report[str(engine.model.module.config.model_type)] = engine.model.numerics.guarantee.attention
    options = table.RequestOptions(logprob_start_len=0)
    settings = [table.params(i) for i in range(6)]
    missed, hit = (engine.generate(table.PROMPTS, settings) for _ in range(2))
    assert [(c.token_ids, c.logprobs) for c in missed] == [(c.token_ids, c.logprobs) for c in hit]
    assert all(c.num_cached_tokens > 0 for c in hit if c.num_prompt_tokens > 16)
    table.assert_trainers_bits(engine, hit)
    table.assert_trainers_bits(engine, engine.generate(table.PROMPTS[:3], settings[:3], options=options))
print(json.dumps(report))
"""


CPU_PATHS = [({"LOCKSTEP_NATIVE": "0"}, "torch")]
CPU_PATHS += [({"LOCKSTEP_MAX_ISA": level}, "native") for level in ISA_LEVELS if native.load(SOURCE) is not None]


# Each path meets both dtypes and both families, and each pair of these meets on every other path.
CASES = (("qwen3 float32", "gpt_oss bfloat16"), ("gpt_oss float32", "qwen3 bfloat16"))
PATHS_AND_CASES = [
    pytest.param(path, attention, cases, id=f"{'-'.join(path.values())}-{cases[0].replace(' ', '-')}",
                 marks=[] if (place + number) % 2 == 0 else [pytest.mark.exhaustive])
    for place, (path, attention) in enumerate(CPU_PATHS) for number, cases in enumerate(CASES)
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("path", "attention", "cases"), PATHS_AND_CASES)
def test_every_path_of_this_processor_keeps_the_trainers_bits_too(path, attention, cases):
    environment = {**os.environ, **path}
    done = subprocess.run(
        [sys.executable, "-c", ON_ANOTHER_PATH, *cases],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {"qwen3": attention, "gpt_oss": attention}
