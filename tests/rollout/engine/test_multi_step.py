"""Several decode steps from one schedule: the answers of single steps, and an early end for whatever waits."""

from __future__ import annotations

import threading

import pytest
import torch

from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.errors import BrokenLogits
from lockstep.rollout.request_options import RequestOptions
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.rollout.speculation.no_draft import NoDraft
from lockstep.tests.rollout.engine.callers import PROMPTS, assert_idle, sampled

MOST = EngineConfig.num_scheduler_steps


class Launches:
    """Note how many steps each schedule of an engine may have, and how many of them have run."""

    def __init__(self, engine: Engine) -> None:
        self.allowed: list[int] = []
        self.run: list[int] = []
        runner, launch = engine.parts.runner, engine.parts.runner.launch

        def noted(output, requests):
            before = runner.num_forwards
            handle = launch(output, requests)
            self.allowed.append(output.num_steps)
            self.run.append(runner.num_forwards - before)
            return handle

        runner.launch = noted


@pytest.fixture
def wait_in_steps(monkeypatch):
    """Return a function that calls another one after so many decode steps of the first schedule with several."""

    def arrange(engine: Engine, num_steps: int, call) -> None:
        goes_on = engine.parts.runner.goes_on

        def asked(num: int) -> bool:
            if num == num_steps:
                call()
            return goes_on(num)

        monkeypatch.setattr(engine.parts.runner, "goes_on", asked)

    return arrange


def answers_of(completions):
    return [(c.token_ids, c.logprobs, c.finish_reason, c.weight_versions) for c in completions]


@pytest.mark.parametrize("kv_cache", ["64 blocks", "14 blocks"], ids=["room", "blocks run out"])
@pytest.mark.parametrize("speculation", ["off", "auto"])
def test_answers_are_those_of_single_steps(make_engine, kv_cache, speculation):
    """Lengths, stop tokens and requests that wait end the steps of a schedule anywhere."""
    prompts = [[(5 * i + j) % 250 for j in range(3 + 5 * i)] for i in range(10)]
    drawn = make_engine(num_scheduler_steps=1).generate(prompts, sampled(max_new_tokens=40))
    stops = [(c.token_ids[7 + 2 * i],) for i, c in enumerate(drawn)]
    params = [sampled(max_new_tokens=9 + 7 * i, stop_token_ids=stops[i] if i % 2 else ()) for i in range(10)]
    runs, metrics = [], []
    for most in (1, MOST):
        engine = make_engine(num_scheduler_steps=most, kv_cache=kv_cache, max_num_seqs=4, speculation=speculation)
        launches = Launches(engine)
        runs.append(answers_of(engine.generate(prompts, params)))
        metrics.append((sum(launches.run), engine.metrics.num_steps, max(launches.run)))
        assert engine.metrics.num_steps >= len(launches.run)
        assert_idle(engine)
    assert runs[0] == runs[1]
    assert metrics[0][2] == 1 and metrics[1][2] > 1
    assert all(num_forwards == num_steps for num_forwards, num_steps, _ in metrics)


def test_a_schedule_holds_as_many_steps_as_are_set_and_none_beyond_the_end(make_engine):
    engine = make_engine(num_scheduler_steps=6)
    launches = Launches(engine)
    [answer] = engine.generate(PROMPTS[0], sampled(max_new_tokens=22))
    assert answer.num_completion_tokens == 22
    assert launches.run == [1, 6, 6, 6, 3]  # the prompt's step draws the first token
    assert engine.metrics.num_steps == engine.metrics.num_sequence_forwards == 22
    assert engine.metrics.num_rows == len(PROMPTS[0]) + 21


def test_no_step_follows_a_stop_token(make_engine):
    [longest] = make_engine().generate(PROMPTS[0], sampled(max_new_tokens=30))
    stop = longest.token_ids[11]
    num = longest.token_ids.index(stop) + 1
    engine = make_engine()
    launches = Launches(engine)
    [answer] = engine.generate(PROMPTS[0], sampled(max_new_tokens=30, stop_token_ids=(stop,)))
    assert answer.token_ids == longest.token_ids[:num] and answer.finish_reason.matched == stop
    assert sum(launches.run) == num
    assert_idle(engine)


@pytest.mark.parametrize(
    ("params", "options"),
    [
        ({"stop": "q"}, {}),
        ({"repetition_penalty": 1.1}, {}),
        ({"logit_bias": {"3": 1.0}}, {}),
        ({"min_new_tokens": 4}, {}),
        ({"regex": "[a-z ]{60}"}, {}),
        ({}, {"logprob_start_len": 0}),
        ({}, {"top_logprobs_num": 2}),
        ({}, {"token_ids_logprob": (4,)}),
        ({"top_k": 5}, {"max_kept_ids": 500}),
    ],
    ids=lambda value: ",".join(value),
)
def test_what_needs_the_host_runs_step_by_step(talker, params, options):
    launches = Launches(talker)
    prompts = [[1, 2, 3], [4, 5]]
    talker.generate(prompts, [sampled(), sampled(**params)], options=[RequestOptions(), RequestOptions(**options)])
    assert set(launches.allowed) == {1}


def test_tokens_that_a_caller_is_given_as_they_come_are_drawn_step_by_step(make_engine):
    engine = make_engine()
    launches = Launches(engine)
    chunks = list(engine.stream(PROMPTS[0], sampled(max_new_tokens=12)))
    assert [len(chunk.token_ids) for chunk in chunks] == [1] * 12
    assert set(launches.allowed) == {1}
    when_final = list(
        engine.stream(PROMPTS[0], sampled(max_new_tokens=12), options=RequestOptions(stream_when_final=True))
    )
    assert [chunk.token_ids for chunk in when_final] == [tuple(i for chunk in chunks for i in chunk.token_ids)]
    assert max(launches.run) == MOST


def test_a_call_of_step_runs_one(make_engine):
    engine = make_engine()
    engine.add(PROMPTS[0], sampled(max_new_tokens=5))
    with engine.model.rollout_phase():
        for num_steps in range(1, 5):
            assert engine.step() == []
            assert engine.metrics.num_steps == num_steps
        [answer] = engine.step()
    assert answer.num_completion_tokens == 5


def test_a_call_of_step_runs_several_where_it_is_told(make_engine):
    engine = make_engine()
    [id] = engine.add(PROMPTS[0], sampled(max_new_tokens=7))
    with engine.model.rollout_phase():
        assert engine.step(4) == engine.step(4) == []
        assert engine.metrics.num_steps == 5
        [answer] = engine.step(4)
        for wrong in (0, 2.5, True):
            with pytest.raises(ValueError, match=f"most must be a positive integer, not {wrong}"):
                engine.step(wrong)
    assert answer.id == id and engine.metrics.num_steps == 7


def test_a_command_ends_the_steps_after_the_running_one(make_engine, wait_in_steps):
    engine, reports = make_engine(), []
    thread = threading.Thread(
        target=lambda: reports.extend([engine.pause_generation("retract"), engine.continue_generation()])
    )

    def pause() -> None:
        if thread.ident is None:
            thread.start()
        while not engine.driver.inbox.is_interrupted(0):  # it has not asked for the lock yet
            assert thread.is_alive()

    launches = Launches(engine)
    wait_in_steps(engine, 3, pause)
    with engine.model.rollout_phase():
        engine.add(PROMPTS[0], sampled(max_new_tokens=20))
        for _ in range(2):
            engine.step(MOST)
    thread.join()
    assert launches.run == [1, 3]
    assert reports[0].num_retracted == 1 and reports[1].num_waiting == 1
    with engine.model.rollout_phase():
        while not (answers := engine.step()):
            pass
    assert answers[0].num_retractions == 1
    assert answers[0].token_ids == make_engine().generate(PROMPTS[0], sampled(max_new_tokens=20))[0].token_ids


@pytest.mark.parametrize("waits", ["request", "thread"])
def test_a_request_and_a_thread_that_wait_end_the_steps(make_engine, wait_in_steps, waits):
    engine, threads = make_engine(), []

    def come() -> None:
        if waits == "request":
            if not engine.driver.inbox and len(engine.parts.sequences) == 1:
                engine.add(PROMPTS[1], sampled(max_new_tokens=3))
            return
        threads.append(threading.Thread(target=engine.driver.look, args=(lambda: None,)))
        threads[-1].start()
        while not engine.driver.lock.is_wanted():
            assert threads[-1].is_alive()

    launches = Launches(engine)
    wait_in_steps(engine, 5, come)
    [answer] = engine.generate(PROMPTS[0], sampled(max_new_tokens=20))
    assert launches.run[:2] == [1, 5]
    assert answer.token_ids == make_engine().generate(PROMPTS[0], sampled(max_new_tokens=20))[0].token_ids
    for thread in threads:
        thread.join()


def test_the_alarm_rings_after_its_step(make_engine):
    engine, rung = make_engine(), []
    engine.driver.at_step(5, lambda: rung.append(engine.metrics.num_steps))
    engine.generate(PROMPTS[0], sampled(max_new_tokens=20))
    assert rung == [5]


def test_every_step_is_a_sign_of_life(make_engine, wait_in_steps):
    engine, beats = make_engine(), []
    for num_steps in range(2, 5):
        wait_in_steps(engine, num_steps, lambda: beats.append(engine.driver.heartbeat))
    engine.generate(PROMPTS[0], sampled(max_new_tokens=6))
    assert len(beats) == len(set(beats)) == 3 and beats == sorted(beats)


def test_broken_logits_in_a_later_step_are_refused(make_engine, wait_in_steps):
    engine = make_engine()
    head = engine.model.module.get_output_embeddings().weight

    def spoil() -> None:
        with torch.no_grad():
            head.fill_(float("nan"))

    launches = Launches(engine)
    wait_in_steps(engine, 2, spoil)
    with pytest.raises(BrokenLogits):
        engine.generate(PROMPTS[0], sampled(max_new_tokens=20))
    assert launches.run == [1, 3]  # none runs on with a token that no logits gave


def test_blocks_that_were_taken_for_steps_that_did_not_run_are_given_back(make_engine, wait_in_steps):
    engine, held = make_engine(), []

    def come() -> None:
        engine.driver.inbox.between_steps = lambda: True

    wait_in_steps(engine, 1, come)
    engine.add(list(range(12)), sampled(max_new_tokens=40))
    with engine.model.rollout_phase():
        for _ in range(6):
            engine.step(MOST)
            held.append(engine.state()["num_held_blocks"])
            engine.check_integrity()
    assert held == [1, 1, 1, 1, 1, 2]  # 12 tokens have KV after the first step, one more after each other one
    engine.abort_request(abort_all=True)
    assert_idle(engine)


def test_the_number_of_steps_is_checked():
    for wrong in (0, True, 1.5):
        with pytest.raises(ValueError, match="num_scheduler_steps must be a positive integer"):
            EngineConfig(num_scheduler_steps=wrong)


def test_rests_of_drafts_count_every_step(make_engine):
    """Sources of drafts rest for a number of steps, however many of them a schedule holds."""
    engine = make_engine(speculation={"past": 4}, max_num_seqs=32, kv_cache="400 blocks")
    speculation = engine.parts.speculation
    launches, asked = Launches(engine), []

    def resting(size):
        asked.append(engine.metrics.num_steps)
        rest = speculation._rests._class(size.num_tokens)
        speculation._rests._newest = rest
        rest.left = rest.left - 1 if rest.left else 7
        return NoDraft.RESTING

    speculation.why_none = resting
    engine.generate([[i, 2 * i, 3 * i] for i in range(32)], SamplingParams(max_new_tokens=61, sampling_seed=1))
    counts = speculation.reasons.counts[NoDraft.RESTING]
    assert max(launches.run) == 7
    assert counts == 32 * engine.metrics.num_steps == 32 * 61


def test_steps_of_a_padded_batch(make_engine):
    """A batch of nine is padded to ten rows, of which the last follows one of the others."""
    prompts = [[3 * i + j for j in range(3 + i)] for i in range(9)]
    runs = []
    for most in (1, MOST):
        engine = make_engine(max_num_seqs=16, num_scheduler_steps=most)
        launches = Launches(engine)
        runs.append(answers_of(engine.generate(prompts, sampled(max_new_tokens=40))))
        assert max(launches.run) == most and engine.parts.runner.computed_rows(9) == 10
    assert runs[0] == runs[1]


def test_a_batch_that_is_not_recorded_runs_step_by_step(make_engine):
    engine = make_engine(cuda_graph_batch_sizes=(2,))
    launches = Launches(engine)
    engine.generate(PROMPTS, sampled(max_new_tokens=12))
    assert set(launches.allowed) == {1}


def test_an_error_in_a_later_step_loses_nothing(make_engine, wait_in_steps):
    engine, raised = make_engine(), []

    def fail() -> None:
        if not raised:
            raised.append(True)
            raise KeyboardInterrupt

    wait_in_steps(engine, 3, fail)
    engine.add(PROMPTS[0], sampled(max_new_tokens=20))
    with engine.model.rollout_phase():
        engine.step(MOST)
        with pytest.raises(KeyboardInterrupt):
            engine.step(MOST)
        engine.check_integrity()
        while not (answers := engine.step(MOST)):
            pass
    assert answers[0].token_ids == make_engine().generate(PROMPTS[0], sampled(max_new_tokens=20))[0].token_ids
    assert answers[0].num_retractions == 1
    assert_idle(engine)
