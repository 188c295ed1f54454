"""Tests of engines of several ranks: the same bits as one rank, one controller, and calls that end together."""

from __future__ import annotations

import os
import random
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from lockstep.rollout.completion import Completion
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.errors import BrokenLogits
from lockstep.rollout.request_options import RequestOptions
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.tests.support import prepared_python
from lockstep.tests.support.callers import soon, submit

COMMON = {"k_blocks": 4, "kv_cache": 64, "max_num_batched_tokens": 256, "chunked_prefill_size": 32,
          "rank_timeout_s": 60.0, "state_check_steps": 3}  # fmt: skip
PROMPTS = [list(range(3, 40)), [5, 6, 7], list(range(100, 180)), [9] * 20]
PARAMS = [
    SamplingParams(max_new_tokens=12, temperature=1.0, sampling_seed=0, n=2),
    SamplingParams(max_new_tokens=9, temperature=0.0, logit_bias={7: 2.0}, min_new_tokens=3),
    SamplingParams(max_new_tokens=7, temperature=0.7, sampling_seed=2, frequency_penalty=0.5, top_k=20),
    SamplingParams(max_new_tokens=12, temperature=1.2, sampling_seed=-3, top_p=0.9),
]
OPTIONS = RequestOptions(logprob_start_len=0, top_logprobs_num=2, token_ids_logprob=(3, 4))
MakeModel = Callable[..., PreTrainedModel]
RunWorld = Callable[..., list[object]]
RunReplica = Callable[..., list[object]]


def outcome(completions: list[Completion]) -> list[tuple[object, ...]]:
    """Return the fields of the completions that do not depend on names and clocks."""
    return [
        (c.index, c.prompt_ids, c.token_ids, c.logprobs, c.finish_reason, c.weight_versions, c.top_logprobs,
         c.prompt_logprobs, c.prompt_top_logprobs, c.listed_logprobs, c.prompt_listed_logprobs)
        for c in completions
    ]  # fmt: skip


def alone(model: PreTrainedModel) -> list[tuple[object, ...]]:
    return outcome(Engine(model, EngineConfig(**COMMON)).generate(PROMPTS, PARAMS, options=OPTIONS))


@pytest.fixture(params=[(1, 2), (2, 1), (2, 2)], ids=["pp2", "tp2", "tp2-pp2"])
def run_replica(run_world: RunWorld, request: pytest.FixtureRequest) -> RunReplica:
    """run_replica(model, call): return `call(engine)` of each rank of a replica, the controller's first."""
    tp, pp = request.param

    def run(model: PreTrainedModel, call: Callable[[Engine], object], **config: object) -> list[object]:
        def rank(rank: int) -> object:
            engine = Engine(model, EngineConfig(tp=tp, pp=pp, **{**COMMON, **config}))
            found = call(engine)
            engine.close()
            return found

        return run_world(tp * pp, rank)

    return run


@pytest.mark.slow
def test_a_replica_gives_every_rank_the_bits_of_one_rank(make_model: MakeModel, run_replica: RunReplica) -> None:
    model = make_model("llama", num_hidden_layers=4)
    expected = alone(model)

    def call(engine: Engine) -> object:
        prompts = PROMPTS if engine.is_controller else None
        return [outcome(engine.generate(prompts, PARAMS, options=OPTIONS)) for _ in range(2)]

    for calls in run_replica(model, call):
        assert calls == [expected, expected]


@pytest.mark.slow
def test_begun_answers_and_kept_ids_of_a_replica_are_those_of_one_rank(
    make_model: MakeModel, run_replica: RunReplica
) -> None:
    model = make_model("llama", num_hidden_layers=4)
    settings = [
        SamplingParams(max_new_tokens=16, sampling_seed=seed, frequency_penalty=1.1, min_new_tokens=6, top_k=50)
        for seed in range(4)
    ]

    def cut(answer: Completion) -> Completion:
        spans = tuple(replace(span, end=3) for span in answer.weight_versions)
        return replace(answer, token_ids=answer.token_ids[:3], logprobs=answer.logprobs[:3], weight_versions=spans)

    def answers(engine: Engine) -> object:
        prompts = PROMPTS if engine.is_controller else None
        whole = engine.generate(prompts, settings, options=RequestOptions(max_kept_ids=10_000, logprob_start_len=0))
        begun = [RequestOptions(begun=cut(answer), logprob_start_len=0) for answer in whole]
        assert all(answer.kept_ids.ends[-1] == len(answer.kept_ids.ids) > 0 for answer in whole)
        return [outcome(whole), outcome(engine.generate(prompts, settings, options=begun)),
                [answer.kept_ids for answer in whole]]  # fmt: skip

    one = Engine(model, EngineConfig(**COMMON))
    expected = answers(one)
    assert [answer[2:4] for answer in expected[0]] == [answer[2:4] for answer in expected[1]]
    for found in run_replica(model, answers):
        assert found == expected


def test_commands_are_the_controllers_and_followers_name_it(make_model: MakeModel, run_world: RunWorld) -> None:
    model = make_model("llama")
    expected = alone(model)

    def rank(rank: int) -> object:
        engine = Engine(model, EngineConfig(pp=2, **COMMON))
        if rank == 1:
            with pytest.raises(ValueError, match="follows the controller, rank 0"):
                engine.pause_generation("retract")
            with pytest.raises(ValueError, match="follows the controller, rank 0"):
                engine.add([1, 2, 3])
            ended = engine.follow()
            engine.close()
            return ended
        chunks = []
        for mode in ("retract", "in_place"):
            begun = threading.Event()
            caller = threading.Thread(target=_stream, args=(engine, begun, chunks))
            caller.start()
            assert begun.wait(60)
            report = engine.pause_generation(mode)
            assert report.mode == mode and engine.is_paused
            engine.continue_generation()
            caller.join(60)
        results = outcome(engine.generate(PROMPTS, PARAMS, options=OPTIONS))  # while the follower serves
        engine.close()
        return results, chunks

    (results, chunks), ended = run_world(2, rank)
    assert results == expected and ended == "closed"
    assert chunks[0] == chunks[1] and len(chunks[0]) == 60


def _stream(engine: Engine, begun: threading.Event, streamed: list[tuple[int, ...]]) -> None:
    params = SamplingParams(max_new_tokens=60, sampling_seed=5)
    token_ids: tuple[int, ...] = ()
    for chunk in engine.stream([1, 2, 3], params):
        token_ids += chunk.token_ids
        begun.set()
    streamed.append(token_ids)


@pytest.mark.slow
def test_an_error_of_the_controllers_caller_ends_the_call_everywhere(
    make_model: MakeModel, run_replica: RunReplica
) -> None:
    def call(engine: Engine) -> object:
        with pytest.raises(ValueError, match="the prompt is empty"):
            engine.generate([[]] if engine.is_controller else None)
        return outcome(engine.generate([[5, 6, 7]], SamplingParams(max_new_tokens=4, temperature=0.0)))

    first, *others = run_replica(make_model("llama"), call)
    assert len(first[0][2]) == 4 and all(other == first for other in others)


@pytest.mark.slow
def test_broken_logits_reach_every_caller_and_the_replica_goes_on(
    make_model: MakeModel, run_replica: RunReplica
) -> None:
    params = SamplingParams(max_new_tokens=4, temperature=0.0)

    def call(engine: Engine) -> object:
        before = outcome(engine.generate([[5, 6, 7]], params))
        norms = [t for name, t in engine.weights.resident_tensors() if name == "model.norm.weight"]
        kept = [t.clone() for t in norms]
        with torch.no_grad():
            for t in norms:
                t.fill_(float("nan"))
        with pytest.raises(BrokenLogits, match="NaN"):
            engine.generate([[5, 6, 7]], params)
        with torch.no_grad():
            for t, old in zip(norms, kept, strict=True):
                t.copy_(old)
        return before, outcome(engine.generate([[5, 6, 7]], params))

    for before, after in run_replica(make_model("llama"), call):
        assert before == after


@pytest.mark.slow
def test_a_started_controller_serves_threads_verbs_and_a_dismissal(
    make_model: MakeModel, run_replica: RunReplica
) -> None:
    model = make_model("llama", num_hidden_layers=4)
    expected = alone(model)

    def call(engine: Engine) -> object:
        commit = engine.weights.commit_weights
        engine.ranks.handlers["version"] = lambda version: (commit(version, None), engine.epoch)[1]
        if not engine.is_controller:
            return [engine.follow(), engine.follow()], engine.weight_version
        engine.start()
        callers = [submit(engine.generate, PROMPTS, PARAMS, options=OPTIONS) for _ in range(3)]
        answers = [outcome(soon(caller)) for caller in callers]
        run = engine.ranks.run_everywhere
        results = engine.between_steps("version", lambda: run("version", {"version": "v2"}))
        engine.dismiss()
        after = engine.generate(PROMPTS, PARAMS, options=OPTIONS)  # waits until they follow again
        return answers, [(r.success, r.data) for r in results], {c.weight_version for c in after}

    (answers, results, versions), *followers = run_replica(model, call)
    num_ranks = 1 + len(followers)
    assert answers == [expected] * 3
    assert results == [(True, 1)] * num_ranks and versions == {"v2"}
    assert followers == [(["call over", "closed"], "v2")] * len(followers)


@pytest.mark.slow
def test_random_commands_and_a_small_pool_change_no_token_of_a_replica(
    make_model: MakeModel, run_replica: RunReplica
) -> None:
    model = make_model("llama", num_hidden_layers=4)
    prompts = [[i + 1] * (9 + 7 * i) for i in range(6)]
    params = [SamplingParams(max_new_tokens=24, sampling_seed=i, presence_penalty=0.3) for i in range(6)]
    expected = [c.token_ids for c in Engine(model, EngineConfig(**COMMON)).generate(prompts, params)]

    def call(engine: Engine) -> object:
        if not engine.is_controller:
            return engine.follow()
        dice = random.Random(10 * engine.config.tp + engine.config.pp)
        for _ in range(4):
            ids = [engine.add(prompt, its)[0] for prompt, its in zip(prompts, params, strict=True)]
            aborted, done = dice.choice(ids), {}
            while engine.has_work:
                done.update((completion.id, completion) for completion in engine.step())
                if dice.random() < 0.2:
                    engine.pause_generation(dice.choice(["retract", "in_place"]))
                    engine.flush_cache()
                    engine.check_integrity()
                    engine.continue_generation()
                if dice.random() < 0.02:
                    engine.abort_request(aborted)
            done.update((completion.id, completion) for completion in engine.step())
            for id, tokens in zip(ids, expected, strict=True):
                found = done[id].token_ids
                assert found == (tokens[: len(found)] if id == aborted else tokens)
        return engine.metrics.num_retractions

    # Blocks of 16 tokens: sequences must be preempted.
    retractions, *ends = run_replica(model, call, kv_cache=14, state_check_steps=1)
    assert retractions > 10 and ends == ["closed"] * len(ends)


_JOB = """
import sys, torch, torch.distributed as dist, transformers
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.tests.support.callers import soon, submit

torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
config = transformers.LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                                  num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128)
engine = Engine(transformers.LlamaForCausalLM(config), EngineConfig(pp=2, kv_cache=32))
assert engine.ranks.watch.address.owner == -1, "the launcher's store, not a rank's"
replica = dist.get_rank() // 2
prompts = [[3 + replica, 4, 5]] if engine.is_controller else None
[completion] = engine.generate(prompts, SamplingParams(max_new_tokens=8, ignore_eos=True))
assert completion.prompt_ids[0] == 3 + replica and len(completion.token_ids) == 8
engine.close()
dist.barrier()
sys.stdout.write(f"rank {dist.get_rank()} is done\\n")
"""


@pytest.mark.slow
def test_two_replicas_under_torchrun_meet_at_the_launchers_store(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(_JOB)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = prepared_python.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr
    assert sorted(line for line in done.stdout.splitlines() if "is done" in line) == [
        f"rank {rank} is done" for rank in range(4)
    ]


PLAIN = [
    SamplingParams(max_new_tokens=8, temperature=0.8, sampling_seed=4),
    SamplingParams(max_new_tokens=8, temperature=0),
]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_ranks_draw_from_their_parts_of_the_vocabulary_and_gather_it_only_where_they_must(
    make_model: MakeModel, run_world: RunWorld, family: str
) -> None:
    """The parts lie on the grid of blocks. Where a request wants more than its tokens, a step has the whole logits."""
    model = make_model(family, vocab_size=1024)
    batches = [
        (PLAIN * 2, None, True),
        (PLAIN * 2, OPTIONS, False),
        (PARAMS, None, False),
    ]  # fmt: skip

    def results(engine: Engine) -> list[object]:
        found = []
        for params, options, _ in batches:
            stage = getattr(engine.parts.runner, "stage", None)
            before = stage.num_divided_draws if stage else 0
            prompts = PROMPTS if engine.is_controller else None
            answers = outcome(engine.generate(prompts, params, options=options or RequestOptions()))
            found.append((answers, (stage.num_divided_draws if stage else 0) - before))
        return found

    alone = results(Engine(model, EngineConfig(**COMMON)))

    def rank(rank: int) -> object:
        engine = Engine(model, EngineConfig(tp=2, **COMMON))
        found = results(engine)
        engine.close()
        return found

    for found in run_world(2, rank):
        assert [answers for answers, _ in found] == [answers for answers, _ in alone]
        for (_, num_divided), (_, _, divided) in zip(found, batches, strict=True):
            assert (num_divided >= 8) == divided
