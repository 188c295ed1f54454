"""Tests of several steps in flight: real layers in stages of one process answer as one stage does, bit for bit."""

from __future__ import annotations

import itertools
import threading
from contextlib import ExitStack

import pytest
import torch

from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.errors import BrokenLogits
from lockstep.rollout.request_options import RequestOptions
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.tests.support.callers import soon, submit, wait_until

STAGES = pytest.mark.parametrize("num_stages", [2, pytest.param(4, marks=pytest.mark.slow)])
PATIENCE = 60.0  # seconds, far longer than any test here takes


@pytest.fixture(autouse=True)
def _one_thread(restore_threads):
    torch.set_num_threads(1)


@pytest.fixture
def make_engine(make_model, in_stages):
    """make_engine(2, kv_cache=...): make an engine of so many stages, in its rollout phase until the test ends."""
    with ExitStack() as phases:

        def make(num_stages: int = 1, *, layers: int = 4, context: int = 512, **config: object) -> Engine:
            model = make_model("qwen3", num_hidden_layers=layers, max_position_embeddings=context)
            settings = EngineConfig(**{"kv_cache": "64 blocks", "max_num_seqs": 16, **config})
            engine = Engine(model.train(), settings, make_runner=in_stages(num_stages))
            phases.callback(engine.parts.runner.close)
            phases.enter_context(engine.model.rollout_phase())
            return engine

        yield make


def params(seed: int, num_new: int = 8, **others: object) -> SamplingParams:
    return SamplingParams(max_new_tokens=num_new, sampling_seed=seed, **others)


def outcome(completion) -> tuple:
    return completion.token_ids, completion.logprobs, completion.finish_reason, completion.prompt_logprobs


PROMPTS = [[(7 * i + j) % 250 for i in range(length)] for j, length in enumerate((3, 70, 1, 18, 33, 5, 120, 16, 9))]
MIXED = [params(j, 3 + 5 * j % 17, temperature=float(j % 3 > 0)) for j in range(len(PROMPTS))]


def generate(engine: Engine, options: RequestOptions | None = None) -> list[tuple]:
    answers = engine.generate(PROMPTS, MIXED, options=options)
    engine.check_integrity()
    assert engine.state()["num_held_blocks"] == 0
    return [outcome(answer) for answer in answers]


# -- bits ------------------------------------------------------------------------------------------


@STAGES
@pytest.mark.parametrize("sequence_pipelining", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_stages_answer_a_mixed_batch_as_one_stage_does(make_engine, num_stages, sequence_pipelining):
    scored = RequestOptions(logprob_start_len=0, top_logprobs_num=2)
    settings = {"chunked_prefill_size": 16, "max_num_batched_tokens": 48}
    expected, expected_scores = generate(make_engine(**settings)), generate(make_engine(**settings), scored)
    engine = make_engine(num_stages, sequence_pipelining=sequence_pipelining, **settings)
    assert generate(engine) == expected
    assert engine.parts.runner.most_in_flight == num_stages
    engine.flush_cache()
    assert generate(engine, scored) == expected_scores


@STAGES
def test_stages_that_run_out_of_blocks_answer_as_one_stage_with_plenty_does(make_engine, num_stages):
    expected = generate(make_engine())
    engine = make_engine(num_stages, kv_cache="11 blocks", chunked_prefill_size=16, admission_ratio=0.0)
    air = Air(engine)
    assert generate(engine) == expected
    assert engine.state()["metrics"]["num_retractions"] > 0
    assert air.num_preempted > 0, "no sequence was preempted in flight"


@STAGES
def test_a_block_that_changed_hands_in_flight_is_not_written_by_its_former_owner(make_engine, num_stages):
    """Hold the last stage back until later steps, in which other sequences own the victims' blocks, wait for it."""
    expected = generate(make_engine())
    engine = make_engine(num_stages, kv_cache="11 blocks", chunked_prefill_size=16, admission_ratio=0.0)
    runner, launched = engine.parts.runner, threading.Semaphore(0)
    launch = runner.launch

    def count_launches(output, requests):
        step = launch(output, requests)
        launched.release()
        return step

    def hold_back(stage: int, output) -> None:
        if stage == num_stages - 1:
            launched.acquire(timeout=0.005)  # mostly until the next step has been launched; at the end there is none

    runner.launch, runner.before_stage = count_launches, hold_back
    assert generate(engine) == expected
    assert engine.state()["metrics"]["num_retractions"] > 0


@STAGES
def test_equal_prompts_samples_and_penalties_are_as_with_one_stage(make_engine, num_stages):
    """Check that samples of one prompt wait until its blocks are through all stages, and hit them."""
    asked = params(3, 12, n=5, temperature=1.0, repetition_penalty=1.3, frequency_penalty=0.5)
    answers = {}
    for stages in (1, num_stages):
        engine = make_engine(stages, chunked_prefill_size=16)
        completions = engine.generate([list(range(50)), list(range(50))], asked)
        answers[stages] = [outcome(c) for c in completions]
        assert sorted(c.num_cached_tokens for c in completions) == [0] + [48] * 9
        engine.check_integrity()
    assert answers[num_stages] == answers[1]


# -- steps in flight -------------------------------------------------------------------------------


class Air:
    """A record of an engine's steps in flight: the rows of each step, and the steps in flight at its launch."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.steps: list[list[tuple[str, int, int]]] = []  # (id, start, rows)
        self.at_once: list[list[int]] = []  # for each launch the steps in flight, itself included
        self.num_preempted = 0  # sequences that were preempted with rows in flight
        launch = engine.parts.runner.launch

        def watch(output, requests):
            self.steps.append([(item.id, item.start, item.num_tokens) for item in output.scheduled])
            flights = [*(f.output.step for f in engine.gate.loop._flights), output.step]
            self.at_once.append(flights)
            self.check(output)
            return launch(output, requests)

        engine.parts.runner.launch = watch

    def check(self, output) -> None:
        """Check that a sequence with a token in flight is in no other step."""
        for flight in self.engine.gate.loop._flights:
            for item in flight.output.scheduled:
                self.num_preempted += item.id in output.preempted
                again = [i for i in output.scheduled if (i.id, i.incarnation) == (item.id, item.incarnation)]
                num_known = flight.requests[item.id].sequence.num_tokens
                assert not again or item.start + item.num_tokens < num_known
                assert all(i.start >= item.start + item.num_tokens for i in again)


@STAGES
def test_decodes_are_shared_out_so_that_every_stage_has_a_step(make_engine, num_stages):
    engine = make_engine(num_stages)
    air = Air(engine)
    engine.generate([[j] * 3 for j in range(10)], [params(j, 20) for j in range(10)])
    share = -(-10 // num_stages)
    decodes = [step for step in air.steps if all(rows == 1 for _, _, rows in step)]
    assert max(map(len, decodes)) == share
    full = [flights for flights in air.at_once if len(flights) == num_stages]
    assert len(full) >= 0.8 * len(air.steps), "the stages were idle"
    assert max(len(flights) for flights in air.at_once) == num_stages


@pytest.mark.parametrize("num_stages", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_nobody_is_left_out_of_two_rounds_of_shares(make_engine, num_stages):
    """Check that between two steps of one sequence no other sequence is in more than two, for any number of them."""
    engine = make_engine(num_stages, kv_cache="128 blocks")
    air = Air(engine)
    for count in (3, 4, 5, 7):
        air.steps.clear()
        ids = [engine.add([j] * 3, params(j, 25), rid=f"{count}-{j}")[0] for j in range(count)]
        while engine.has_work:
            engine.step()
        rounds = [[id for id, *_ in step] for step in air.steps]
        for id in ids:
            at = [index for index, step in enumerate(rounds) if id in step]
            for before, after in itertools.pairwise(at):
                between = [other for step in rounds[before + 1 : after] for other in step]
                assert all(between.count(other) <= 2 for other in set(between))


@STAGES
def test_chunks_of_one_prompt_follow_each_other_through_the_stages_if_they_may(make_engine, num_stages):
    for sequence_pipelining in (True, False):
        engine = make_engine(num_stages, chunked_prefill_size=16, sequence_pipelining=sequence_pipelining)
        air = Air(engine)
        [answer] = engine.generate([list(range(100))], params(0, 2))
        assert [start for step in air.steps for _, start, _ in step] == [0, 16, 32, 48, 64, 80, 96, 100]
        most = max(len(flights) for flights in air.at_once)
        assert most == (num_stages if sequence_pipelining else 1)
        assert answer.num_completion_tokens == 2


def test_thousand_tokens_pass_two_real_stages_as_in_the_published_example(make_engine):
    """Check (rows through all stages, through the first, through the second) at the four times of the example.

    The test holds the stages at the points that the example shows: a stage ends when the test releases it.
    """
    engine = make_engine(
        2, layers=2, context=1024, kv_cache="64 blocks", chunked_prefill_size=500,
        max_num_batched_tokens=500,
    )  # fmt: skip
    runner = engine.parts.runner
    trace: list[tuple[int, int, int]] = []
    second_may_run = [threading.Event(), threading.Event()]

    def counters() -> None:
        controller, second = engine.parts.sequences.sequence("a"), runner.managers[1]
        in_second = second.sequence("a").num_tokens_stage_processed if "a" in second else 0
        trace.append((controller.num_tokens_step_processed, controller.num_tokens_stage_processed, in_second))

    second_began = [threading.Event(), threading.Event()]

    def before_stage(stage: int, output) -> None:
        [item] = output.scheduled
        chunk = item.start // 500
        if stage == 1:
            second_began[chunk].set()
            assert second_may_run[chunk].wait(PATIENCE)
        elif chunk == 0:
            counters()  # time 0: the first stage starts tokens 0-500
        else:
            assert second_began[0].wait(PATIENCE)
            counters()  # time 1: it starts 500-1000, and the second stage runs 0-500
            second_may_run[0].set()

    runner.before_stage = before_stage
    engine.add([i % 250 for i in range(1000)], params(0, 1), rid="a")
    engine.step()  # both chunks are launched, and have left the first stage; the first lands
    assert second_began[1].wait(PATIENCE)
    counters()  # time 2: the second stage runs 500-1000
    request = engine.parts.sequences.request("a")
    assert request.sequence.num_output_tokens == 0 and request.finish_reason is None
    second_may_run[1].set()
    free = engine.parts.managers.free
    engine.parts.managers.free = lambda id: (counters(), free(id))  # time 3: as the answer leaves
    engine.step()
    assert trace == [(0, 0, 0), (0, 500, 0), (500, 1000, 500), (1000, 1000, 1000)]
    assert not engine.has_work


# -- faults ----------------------------------------------------------------------------------------


@STAGES
@pytest.mark.parametrize("stage", [0, -1])
def test_a_step_that_fails_in_a_stage_drops_all_in_flight_and_the_answers_stay_the_same(make_engine, num_stages, stage):
    expected = generate(make_engine())
    engine = make_engine(num_stages, chunked_prefill_size=16)
    runner, countdown = engine.parts.runner, [12]

    def fail_once(at: int, output) -> None:
        if at == stage % num_stages:
            countdown[0] -= 1
            if countdown[0] == 0:
                raise BrokenLogits("a stage broke")

    runner.before_stage = fail_once
    ids = [engine.add(p, s, rid=f"r{j}")[0] for j, (p, s) in enumerate(zip(PROMPTS, MIXED, strict=True))]
    answers, num_failures = {}, 0
    while engine.has_work:
        try:
            for completion in engine.step():
                answers[completion.id] = completion
        except BrokenLogits:
            num_failures += 1
            state = engine.state()
            assert (state["num_running"], state["num_held_blocks"]) == (0, 0)
            assert not engine.gate.loop._flights and runner._num_in_flight == 0
            engine.check_integrity()
    assert num_failures == 1
    assert [outcome(answers[id]) for id in ids] == expected


def test_overlap_and_stages_do_not_go_together_and_the_error_says_why(make_engine):
    with pytest.raises(ValueError, match=r"overlap plans .* there are 2, which"):
        make_engine(2, overlap=True)


def test_a_caller_hears_of_its_answer_also_where_another_finished_the_step(make_engine):
    engine = make_engine(2, max_num_batched_tokens=64)
    engine.start()
    with engine.driver.lock:  # both are queued before the first step, which has room for one prompt
        calls = [submit(engine.generate, [i] * 64, params(i, 1)) for i in (1, 2)]
        wait_until(lambda: len(engine.driver.inbox) == 2)
    engine.driver.drain()  # as the end of a call of several ranks does; the loop's thread has nothing to run afterwards
    assert [len(soon(call)[0].token_ids) for call in calls] == [1, 1]
    engine.stop()
