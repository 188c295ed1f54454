"""Interruption at any step: no request is lost, and the answers equal an uninterrupted run's, bit for bit."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import pytest
import torch

from lockstep.kernels.sampling.logprobs import scaled_logprobs
from lockstep.rollout.completion import Completion
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.loop.commands import PauseReport
from lockstep.rollout.sampling_params import SamplingParams

MODES = ("abort", "retract", "in_place")
PATIENCE = 30.0  # seconds that nothing here comes near
# Ways of an engine to run steps: one after another, one planned while another runs, or several in flight.
WAYS: dict[str, dict[str, object]] = {
    "plain": {}, "overlap": {"overlap": True}, "2 stages": {"stages": 2}, "4 stages": {"stages": 4},
    "ahead": {"overlap": True, "cuda_graph_batch_sizes": (2, 3)},  # a decode step begins before the last is committed
}  # fmt: skip
WAY = pytest.mark.parametrize("way", ["plain", "overlap", "ahead", "2 stages"])


@pytest.fixture(autouse=True)
def _one_thread(restore_threads):
    torch.set_num_threads(1)


@pytest.fixture
def make_engine(make_model, in_stages):
    """Make engines in their rollout phase until the end of the test: its end waits for the steps in flight."""
    with ExitStack() as phases:

        def make(stages: int = 1, **config: object) -> Engine:
            settings = {"kv_cache": "32 blocks", "max_num_seqs": 3, "max_num_batched_tokens": 256, **config}
            engine = Engine(
                make_model("qwen3").train(),
                EngineConfig(**{"speculation": "off"} | settings),
                make_runner=in_stages(stages),
            )
            phases.callback(engine.parts.runner.close)
            phases.enter_context(engine.model.rollout_phase())
            return engine

        yield make


def params(seed: int, num_new: int = 8, **others: object) -> SamplingParams:
    return SamplingParams(max_new_tokens=num_new, sampling_seed=seed, **others)


# -- a scripted run --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arrival:
    """One request of the script."""

    at: int  # steps run before it arrives
    prompt: tuple[int, ...]
    num_new: int
    stop: tuple[int, ...] = ()


# Three places for four requests: the first steps have one that waits, others in mid-prompt, others that decode.
SCRIPT = (
    Arrival(0, tuple(range(5)), 9),
    Arrival(0, tuple((7 * i) % 250 for i in range(37)), 6),
    Arrival(0, tuple((3 * i + 1) % 250 for i in range(20)), 4),
    Arrival(3, tuple((11 * i + 3) % 250 for i in range(18)), 12),
)


class ByHand:
    """Run an engine step by step and keep every answer; checks that there is one per request."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.num_steps = 0
        self.ids: list[str] = []

    def add(self, prompt, its_params: SamplingParams, rid: str | None = None) -> list[str]:
        ids = self.engine.add(list(prompt), its_params, rid=rid)
        self.engine.mailboxes.open(ids, streamed=False)
        self.ids += ids
        return ids

    def step(self) -> None:
        self.engine.step()
        self.num_steps += 1

    def step_of_nothing(self) -> None:
        """Try a step during a pause, as any caller may."""
        before = self._state()
        self.engine.step()
        assert self._state() == before

    def _state(self) -> dict[str, object]:
        """Return the state without the time to note requests that came in a replica: a step takes them up."""
        state = self.engine.state()
        return {**state, "metrics": {k: v for k, v in state["metrics"].items() if k != "control_seconds"}}

    def steps(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.step()

    def drain(self) -> None:
        limit = self.num_steps + 2000
        while self.engine.has_work:
            self.step()
            assert self.num_steps < limit, self.engine.state()

    def is_answered(self, id: str) -> bool:
        return self.engine.mailboxes.when_done([id])()

    def answer(self, id: str) -> Completion:
        [completion] = self.engine.mailboxes.completions([id])
        return completion

    def answers(self) -> list[Completion]:
        """Return all answers in order of arrival; checks that no request or block is left."""
        for id in self.ids:
            [chunk] = self.engine.mailboxes.take([id])
            assert chunk.completion is not None
            self.engine.mailboxes._boxes[id].chunks.append(chunk)
        completions = self.engine.mailboxes.completions(self.ids)
        for id in self.ids:
            self.engine.mailboxes.close(id)
        assert all(len(c.logprobs) == len(c.token_ids) for c in completions)
        state = self.engine.state()
        assert (state["num_running"], state["num_waiting"], state["num_held_blocks"]) == (0, 0, 0)
        self.engine.check_integrity()
        return completions


def play(
    engine: Engine, temperature: float, interrupt: Callable[[ByHand], None] | None = None, at: int = -1
) -> tuple[list[Completion], int]:
    """Run the script from an empty cache, with `interrupt` before step `at`; returns answers and number of steps."""
    assert engine.flush_cache().success
    run, arrivals = ByHand(engine), list(SCRIPT)
    while True:
        while arrivals and arrivals[0].at <= run.num_steps:
            a = arrivals.pop(0)
            run.add(a.prompt, params(len(run.ids), a.num_new, temperature=temperature, stop_token_ids=a.stop))
        if run.num_steps == at:
            at = -1
            assert interrupt is not None
            interrupt(run)
        if not arrivals and not engine.has_work:
            return run.answers(), run.num_steps
        run.step()


def outcome(completion: Completion) -> tuple:
    return completion.token_ids, completion.logprobs, completion.finish_reason


def assert_begins(part: Completion, whole: Completion) -> None:
    num = part.num_completion_tokens
    assert (part.token_ids, part.logprobs) == (whole.token_ids[:num], whole.logprobs[:num])


def assert_is_whole_or_an_aborted_part(answer: Completion, whole: Completion) -> None:
    if answer.finish_reason.type == "abort":
        assert_begins(answer, whole)
    else:
        assert outcome(answer) == outcome(whole)


def pause_and_continue(mode: str, reports: list[PauseReport]) -> Callable[[ByHand], None]:
    def interrupt(run: ByHand) -> None:
        engine = run.engine
        live = [id for id in run.ids if not run.is_answered(id)]
        report = engine.pause_generation(mode)
        reports.append(report)
        engine.check_integrity()
        state = engine.state()
        left = [id for id in run.ids if not run.is_answered(id)]
        assert sorted(state["running_ids"] + state["waiting_ids"]) == sorted(left)
        assert (state["paused"], state["pause_mode"], engine.is_paused) == (True, mode, True)
        assert (report.mode, report.num_running, report.num_waiting) == (
            mode,
            state["num_running"],
            state["num_waiting"],
        )
        finished = [id for id in set(live) - set(left) if run.answer(id).finish_reason.type != "abort"]
        assert report.num_running + report.num_waiting + report.num_aborted == len(live) - len(finished)
        assert (report.num_running == 0) or mode == "in_place"
        assert (report.num_retracted == 0) or mode == "retract"
        assert (report.num_aborted == 0) or mode == "abort"
        is_in_flight = engine.config.overlap or engine.parts.runner.num_stages > 1
        assert not finished or is_in_flight  # by the steps that were under way
        assert (state["num_held_blocks"] == 0) or mode == "in_place"
        run.step_of_nothing()
        again = engine.continue_generation()
        assert (again.was_paused, again.num_running, again.num_waiting) == (
            True,
            report.num_running,
            report.num_waiting,
        )
        assert not engine.is_paused

    return interrupt


# Any two values of two settings meet in one of these, each pausing in one mode before a step and in the next one before
# the next. One row of each way is slow and pauses in all modes before each step; the rest of the product is exhaustive.
QUICK = [
    (16, 7, "plain", 0.0), (16, 16, "plain", 1.0), (16, 128, "overlap", 0.0),
    (64, 7, "overlap", 1.0), (64, 16, "overlap", 0.0), (64, 128, "plain", 1.0), (16, 7, "ahead", 1.0),
]  # fmt: skip
SLOW = [(16, 7, "plain", 1.0), (64, 16, "overlap", 1.0)]
TABLE = [
    pytest.param(
        *row,
        id="block{}-chunk{}-{}-t{:.0f}".format(*row),
        marks=[]
        if row in QUICK
        else [pytest.mark.slow if row in SLOW or row[2] not in ("plain", "overlap") else pytest.mark.exhaustive],
    )
    for row in (
        *itertools.product((16, 64), (7, 16, 128), ("plain", "overlap"), (0.0, 1.0)),
        (16, 7, "ahead", 1.0),
        (64, 16, "ahead", 0.0),
        (16, 7, "2 stages", 1.0),
        (64, 16, "2 stages", 0.0),
        (16, 128, "2 stages", 1.0),
        (16, 7, "4 stages", 0.0),
    )
]


@pytest.mark.parametrize(("block_size", "chunk", "way", "temperature"), TABLE)
def test_pausing_before_any_step_in_any_mode_changes_no_bit(make_engine, block_size, chunk, way, temperature):
    engine = make_engine(block_size=block_size, chunked_prefill_size=chunk, **WAYS[way])
    whole, num_steps = play(engine, temperature)
    assert [c.num_completion_tokens for c in whole] == [a.num_new for a in SCRIPT] and num_steps >= 15
    reports: list[PauseReport] = []
    row = (block_size, chunk, way, temperature)
    for at, mode in itertools.product(range(num_steps), MODES):
        if row in QUICK and (at + QUICK.index(row)) % len(MODES) != MODES.index(mode):
            continue
        answers, _ = play(engine, temperature, pause_and_continue(mode, reports), at)
        for answer, expected in zip(answers, whole, strict=True):
            assert_is_whole_or_an_aborted_part(answer, expected)
        assert sum(c.finish_reason.type == "abort" for c in answers) == reports[-1].num_aborted
        assert sum(c.num_retractions for c in answers) == reports[-1].num_retracted
    for counts in ("num_retracted", "num_aborted"):  # the table has met full and empty engines
        found = {getattr(report, counts) for report in reports}
        assert {0, 3} <= found or (row in QUICK and 0 in found and max(found) >= 2)
    assert {1, 2, 3} <= {report.num_running for report in reports} or row in QUICK


@WAY
def test_blocks_chunks_and_overlap_change_no_bit_without_a_pause(make_engine, way):
    [plain, _] = play(make_engine(), 1.0)
    for block_size, chunk in ((16, 1), (64, 7), (16, 16), (64, None), (64, 1), (16, None)):
        answers, _ = play(make_engine(block_size=block_size, chunked_prefill_size=chunk, **WAYS[way]), 1.0)
        assert list(map(outcome, answers)) == list(map(outcome, plain))


@WAY
def test_pausing_around_a_stop_token_changes_no_bit(make_engine, way):
    """Pause around a stop, which is known only after its step: with overlap the next one is scheduled by then."""
    engine = make_engine(**WAYS[way])
    [free] = engine.generate([1, 2, 3], params(4, 12))
    stop = {"stop_token_ids": [free.token_ids[5]]}
    num_tokens = free.token_ids.index(free.token_ids[5]) + 1
    for at, mode in itertools.product(range(10), MODES):
        if way != "ahead" and (at + MODES.index(mode)) % 2:
            continue  # the way that knows of a stop latest is paused in every mode before each step
        run = ByHand(engine)
        run.add([1, 2, 3], params(4, 12, **stop))
        run.add([9] * 20, params(5, 12))
        run.steps(at)
        engine.pause_generation(mode)
        engine.continue_generation()
        run.drain()
        stopped, other = run.answers()
        assert_begins(stopped, free)
        if stopped.finish_reason.type == "stop":
            assert (stopped.num_completion_tokens, stopped.finish_reason.matched) == (num_tokens, free.token_ids[5])
        else:
            assert mode == "abort" and stopped.num_completion_tokens < num_tokens
        assert other.num_completion_tokens == 12 or mode == "abort"


# -- order and moment ------------------------------------------------------------------------------


BETWEEN = ("nothing", "continue", "continue and step", "twice continue")
# Each of them once, on one way or the other; on stages they are slow, the rest are exhaustive.
QUICK_BETWEEN = set(zip(BETWEEN, ("overlap", "plain", "overlap", "plain"), strict=True))
BETWEEN_AND_WAY = [
    pytest.param(
        *row, marks=[] if row in QUICK_BETWEEN else [pytest.mark.slow if "stages" in row[1] else pytest.mark.exhaustive]
    )
    for row in itertools.product(BETWEEN, ("plain", "overlap", "2 stages"))
]


@pytest.mark.parametrize(("between", "way"), BETWEEN_AND_WAY)
def test_any_mode_may_follow_any_other(make_engine, way, between):
    engine = make_engine(**WAYS[way], chunked_prefill_size=7)
    whole, _ = play(engine, 1.0)
    for number, (first, second, at) in enumerate(itertools.product(MODES, MODES, (0, 2, 5, 8))):
        if (between, way) in QUICK_BETWEEN and number % 4 != (number // 4 + BETWEEN.index(between)) % 4:
            continue  # a pair of modes at one moment here, at the next one in the next row

        def interrupt(run: ByHand, first=first, second=second) -> None:
            live = sum(not run.is_answered(id) for id in run.ids)
            before = engine.pause_generation(first)
            if between.startswith(("continue", "twice")):
                assert engine.continue_generation().was_paused
            if between == "continue and step":
                run.step()
            if between == "twice continue":
                assert not engine.continue_generation().was_paused
            after = engine.pause_generation(second)
            assert engine.state()["pause_mode"] == second
            if between == "nothing":
                assert (before.num_running + before.num_waiting) == (
                    after.num_running + after.num_waiting + after.num_aborted
                )
                assert after.num_retracted == (before.num_running if second == "retract" else 0)
            if second == "abort":
                assert (after.num_running, after.num_waiting) == (0, 0)
                assert before.num_aborted + after.num_aborted <= live
            engine.check_integrity()
            engine.continue_generation()

        answers, _ = play(engine, 1.0, interrupt, at)
        for answer, expected in zip(answers, whole, strict=True):
            assert_is_whole_or_an_aborted_part(answer, expected)
            assert answer.finish_reason.type == "length" or "abort" in (first, second)


@pytest.mark.parametrize("mode", MODES)
def test_the_same_pause_twice_does_nothing_the_second_time(make_engine, mode):
    engine = make_engine()
    run = ByHand(engine)
    for index in range(4):
        run.add([index] * 20, params(index))
    run.steps(2)
    first, second = engine.pause_generation(mode), engine.pause_generation(mode)
    assert second == PauseReport(mode, first.num_running, first.num_waiting, 0, 0)
    expected = {
        "abort": (0, 0, 0, 4),
        "retract": (0, 4, 3, 0),
        "in_place": (3, 1, 0, 0),
    }
    assert first == PauseReport(mode, *expected[mode])


@WAY
@pytest.mark.parametrize("mode", MODES)
def test_idle_engine_can_be_paused_and_continued(make_engine, mode, way):
    engine = make_engine(**WAYS[way])
    report = engine.continue_generation()
    assert (report.was_paused, report.num_running, report.num_waiting) == (False, 0, 0)
    assert engine.pause_generation(mode) == PauseReport(mode, 0, 0, 0, 0)
    assert engine.step() == [] and engine.is_paused
    engine.continue_generation()
    [completion] = engine.generate([1, 2], params(0))
    assert completion.num_completion_tokens == 8 and not engine.is_paused


@pytest.mark.parametrize("mode", ["in-place", "", "RETRACT", None, 3])
def test_unknown_mode_is_refused_naming_the_others_and_pauses_nothing(make_engine, mode):
    engine = make_engine()
    with pytest.raises(ValueError, match=r"abort, retract, in_place"):
        engine.pause_generation(mode)
    assert not engine.is_paused and engine.state()["pause_mode"] is None


def test_the_default_mode_retracts(make_engine):
    assert make_engine().pause_generation().mode == "retract"


@WAY
def test_pausing_right_before_a_finish_lets_it_finish_once(make_engine, way):
    engine = make_engine(**WAYS[way])
    [whole] = engine.generate([1, 2, 3], params(0, 5))
    for at, mode in itertools.product((3, 4, 5), ("retract", "in_place")):
        run = ByHand(engine)
        run.add([1, 2, 3], params(0, 5))
        run.steps(at)
        engine.pause_generation(mode)
        engine.continue_generation()
        run.drain()
        [answer] = run.answers()
        assert outcome(answer) == outcome(whole)


@WAY
def test_in_place_then_abort_finishes_promptly_without_another_forward(make_engine, way):
    engine = make_engine(**WAYS[way], chunked_prefill_size=7)
    whole, _ = play(engine, 1.0)

    def interrupt(run: ByHand) -> None:
        kept = engine.pause_generation("in_place")
        assert (kept.num_running, kept.num_waiting) == (3, 1)
        before = engine.state()["num_forwards"]
        report = engine.pause_generation("abort")
        assert (report.num_aborted, report.num_running, report.num_waiting) == (4, 0, 0)
        assert all(run.is_answered(id) for id in run.ids)
        assert engine.state()["num_forwards"] == before
        assert engine.state()["num_held_blocks"] == 0
        engine.continue_generation()

    answers, _ = play(engine, 1.0, interrupt, 3)
    assert [c.finish_reason.type for c in answers] == ["abort"] * 4
    assert sum(c.num_completion_tokens for c in answers) > 0
    for answer, expected in zip(answers, whole, strict=True):
        assert_begins(answer, expected)


def test_in_place_then_abort_answers_a_caller_that_waits_on_another_thread(make_engine):
    engine = make_engine(kv_cache="100 blocks")
    engine.start()
    answers: list[Completion] = []
    caller = threading.Thread(
        target=lambda: answers.extend(engine.generate([[1], [2], [3], [4]], params(0, 400))), daemon=True
    )
    try:
        caller.start()
        deadline, pulse = time.monotonic() + PATIENCE, threading.Event()
        while engine.state()["num_forwards"] < 3 and time.monotonic() < deadline:
            pulse.wait(0.001)
        report = engine.pause_generation("in_place", timeout_s=PATIENCE)
        assert (report.num_running, report.num_waiting) == (3, 1)
        engine.pause_generation("abort", timeout_s=PATIENCE)
        caller.join(PATIENCE)
        assert not caller.is_alive()
    finally:
        engine.stop()
    assert [c.finish_reason.type for c in answers] == ["abort"] * 4
    assert answers[0].num_completion_tokens >= 3


# -- while paused ----------------------------------------------------------------------------------


@WAY
@pytest.mark.parametrize("mode", MODES)
def test_request_that_arrives_while_paused_queues_and_can_be_aborted(make_engine, mode, way):
    engine = make_engine(**WAYS[way])
    [alone] = engine.generate([7, 8, 9], params(3))
    engine.flush_cache()
    run = ByHand(engine)
    run.add([1] * 20, params(0), rid="early")
    run.steps(2)
    engine.pause_generation(mode)
    run.add([7, 8, 9], params(3), rid="stays")
    run.add([7, 8, 9], params(4), rid="goes")
    assert {"stays", "goes"} <= set(engine.state()["waiting_ids"])
    run.step_of_nothing()
    assert not run.is_answered("stays")
    assert engine.abort_request("goes").aborted == ("goes",)
    assert run.is_answered("goes") and not run.is_answered("stays")
    engine.continue_generation()
    run.drain()
    early, stays, goes = run.answers()
    assert outcome(stays) == outcome(alone)
    assert (goes.token_ids, goes.logprobs, goes.finish_reason.type) == ((), (), "abort")
    assert early.finish_reason.type == ("abort" if mode == "abort" else "length")


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_paused_requests_can_be_aborted_one_by_one(make_engine, mode):
    engine = make_engine()
    whole, _ = play(engine, 1.0)

    def interrupt(run: ByHand) -> None:
        engine.pause_generation(mode)
        report = engine.abort_request(run.ids[1], message="no longer wanted")
        assert (report.aborted, report.unknown) == ((run.ids[1],), ())
        assert run.is_answered(run.ids[1]) and run.ids[1] not in engine.state()["running_ids"]
        engine.check_integrity()
        engine.continue_generation()

    answers, _ = play(engine, 1.0, interrupt, 4)
    assert (answers[1].finish_reason.type, answers[1].finish_reason.message) == ("abort", "no longer wanted")
    assert_begins(answers[1], whole[1])
    for index in (0, 2, 3):
        assert outcome(answers[index]) == outcome(whole[index])


def test_abort_takes_exact_ids_and_reports_unknown_ones(make_engine):
    engine = make_engine()
    run = ByHand(engine)
    for rid in ("req-1", "req-10", "req"):
        run.add([1, 2], params(0), rid=rid)
    run.step()
    report = engine.abort_request("req-1")
    assert (report.aborted, report.unknown) == (("req-1",), ())
    assert [run.is_answered(id) for id in run.ids] == [True, False, False]
    report = engine.abort_request("nobody")
    assert (report.aborted, report.unknown) == ((), ("nobody",))
    assert engine.abort_request("req-1").unknown == ("req-1",)
    assert sorted(engine.abort_request(abort_all=True).aborted) == ["req", "req-10"]
    assert engine.abort_request(abort_all=True).aborted == ()
    run.answers()


def test_base_id_of_n_samples_aborts_them_all_and_one_samples_id_only_that_one(make_engine):
    engine = make_engine(max_num_seqs=8)
    run = ByHand(engine)
    ids = run.add([1, 2], params(0, n=3), rid="x")
    run.add([1, 2], params(0), rid="x-10")
    run.add([1, 2], params(0), rid="xy")
    run.step()
    assert engine.abort_request(ids[1]).aborted == (ids[1],)
    assert sorted(engine.abort_request("x").aborted) == sorted((ids[0], ids[2]))
    assert engine.abort_request("x").unknown == ("x",)
    run.drain()
    assert [c.finish_reason.type for c in run.answers()] == ["abort"] * 3 + ["length"] * 2


def test_abort_by_id_does_not_look_at_the_other_live_requests(make_engine, monkeypatch):
    engine = make_engine()
    run = ByHand(engine)
    for rid in ("a", "b", "c"):
        run.add([1, 2], params(0), rid=rid)
    run.step()
    monkeypatch.setattr(engine.parts.sequences, "requests", lambda: pytest.fail("every live request was read"))
    assert engine.abort_request("b").aborted == ("b",) and engine.abort_request("z").unknown == ("z",)
    monkeypatch.undo()
    assert sorted(engine.abort_request(abort_all=True).aborted) == ["a", "c"]
    run.answers()


# -- flush under a pause ---------------------------------------------------------------------------


def oversubscribe(engine: Engine) -> tuple[ByHand, list[Completion]]:
    """Add 12 requests for 3 places and run a few steps; returns also the answers of an undisturbed run."""
    load = [([(17 * i + j) % 250 for j in range(25)], params(i, 6)) for i in range(12)]
    whole = engine.generate([prompt for prompt, _ in load], [its_params for _, its_params in load])
    assert engine.flush_cache().success
    run = ByHand(engine)
    for prompt, its_params in load:
        run.add(prompt, its_params)
    run.steps(8)
    state = engine.state()
    assert state["num_running"] == 3 and state["num_waiting"] >= 6
    return run, whole


@WAY
@pytest.mark.parametrize("mode", ["abort", "retract"])
def test_flush_empties_the_pool_however_many_wait(make_engine, mode, way):
    engine = make_engine(**WAYS[way])
    fresh = engine.state()
    run, whole = oversubscribe(engine)
    num_free = engine.state()["num_free_blocks"]
    report = engine.pause_generation(mode)
    num_cached = engine.state()["num_cached_blocks"]
    assert num_cached > 0 and report.num_waiting >= (9 if mode == "retract" else 0)
    flush = engine.flush_cache()
    assert (flush.success, flush.flushed_items, flush.error_msg) == (True, num_cached, "")
    state = engine.state()
    assert num_free < state["num_free_blocks"] == state["num_blocks"] == 32
    assert (state["num_cached_blocks"], state["num_held_blocks"], state["num_forwards"]) == (0, 0, 0)
    assert state["admission_ratio"] == fresh["admission_ratio"]
    assert engine.flush_cache().flushed_items == 0
    engine.continue_generation()
    run.drain()
    for answer, expected in zip(run.answers(), whole, strict=True):
        assert_is_whole_or_an_aborted_part(answer, expected)
        assert (answer.finish_reason.type == "abort") is (mode == "abort" and answer.token_ids != expected.token_ids)


@WAY
def test_flush_under_an_in_place_pause_is_refused_while_sequences_hold_blocks(make_engine, way):
    engine = make_engine(**WAYS[way])
    run, whole = oversubscribe(engine)
    report = engine.pause_generation("in_place")
    before = engine.state()
    flush = engine.flush_cache()
    assert (flush.success, flush.flushed_items) == (False, 0)
    assert f"{report.num_running} running" in flush.error_msg
    assert {**engine.state(), "metrics": None} == {**before, "metrics": None}
    engine.pause_generation("retract")
    assert engine.flush_cache().success
    assert engine.state()["num_free_blocks"] == 32
    engine.continue_generation()
    run.drain()
    assert list(map(outcome, run.answers())) == list(map(outcome, whole))


def test_flush_works_under_an_in_place_pause_when_all_wait(make_engine):
    engine = make_engine()
    engine.generate([1] * 40, params(0))
    run = ByHand(engine)
    run.add([1] * 40, params(0))
    engine.pause_generation("in_place")
    assert engine.flush_cache().flushed_items == 2
    engine.continue_generation()
    run.drain()
    assert run.answers()[0].num_cached_tokens == 0


def test_flush_without_a_pause_is_refused_while_sequences_run(make_engine):
    engine = make_engine()
    run = ByHand(engine)
    run.add([1] * 20, params(0))
    run.step()
    flush = engine.flush_cache()
    assert not flush.success and "1 running" in flush.error_msg
    run.drain()
    assert engine.flush_cache().success
    run.answers()


# -- weights change under a pause ------------------------------------------------------------------


def change_weights(engine: Engine, version: str) -> None:
    with torch.no_grad():
        engine.model.module.model.layers[0].mlp.down_proj.weight.mul_(1.5)
    engine.weights.commit_weights(version, None)


def trainer_logprobs(engine: Engine, completion: Completion) -> list[float]:
    """Return the log-probabilities of the output tokens by the trainer's forward with the current weights."""
    ids = torch.tensor([completion.prompt_ids + completion.token_ids])
    with engine.model.training_numerics():
        logits = engine.model.module(ids, use_cache=False).logits[0, :-1]
    return scaled_logprobs(logits, 1.0).gather(-1, ids[0, 1:, None])[completion.num_prompt_tokens - 1 :, 0].tolist()


@WAY
@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_tokens_after_a_commit_under_a_pause_carry_its_version(make_engine, mode, way):
    engine = make_engine(**WAYS[way])
    engine.weights.commit_weights("v1", None)
    run, prompt = ByHand(engine), [(5 * i) % 250 for i in range(40)]
    run.add(prompt, params(0, 12))
    run.steps(6)
    engine.pause_generation(mode)
    change_weights(engine, "v2")
    if mode == "retract":
        assert engine.state()["num_free_blocks"] == 32
    engine.continue_generation()
    run.drain()
    [answer] = run.answers()
    old, new = answer.weight_versions
    assert (old.version, old.start, new.version, new.end) == ("v1", 0, "v2", 12)
    assert 5 <= old.end == new.start <= 7
    on_new_weights = trainer_logprobs(engine, answer)
    # Retracted, everything known is computed again by the new weights; in place, older KV stays under newer tokens.
    is_recomputed = list(answer.logprobs[new.start :]) == on_new_weights[new.start :]
    assert is_recomputed is (mode == "retract")
    assert list(answer.logprobs[: old.end]) != on_new_weights[: old.end]


@WAY
def test_kv_that_older_weights_computed_never_matches_though_its_sequence_ran_on(make_engine, way):
    engine = make_engine(**WAYS[way])
    run, prompt = ByHand(engine), [(5 * i) % 250 for i in range(40)]
    engine.generate(prompt, params(0))  # in the cache
    run.add(prompt, params(1, 20))
    run.steps(4)
    engine.pause_generation("in_place")
    assert not engine.flush_cache().success  # the flush is refused; the new epoch drops the blocks
    change_weights(engine, "v2")
    engine.continue_generation()
    run.step()
    run.add(prompt, params(2), rid="fresh")
    run.drain()
    old, fresh = run.answers()
    assert fresh.num_cached_tokens == 0
    assert list(fresh.logprobs) == trainer_logprobs(engine, fresh)
    longer = [*old.prompt_ids, *old.token_ids]
    [after] = engine.generate(longer, params(3))
    assert after.num_cached_tokens == 32  # of `fresh`, not of `old`
    assert list(after.logprobs) == trainer_logprobs(engine, after)


# -- a pool too small for its load -----------------------------------------------------------------


@pytest.mark.parametrize(
    "way",
    [
        "plain",
        pytest.param("overlap", marks=pytest.mark.slow),
        "ahead",
        pytest.param("2 stages", marks=pytest.mark.slow),
    ],
)
def test_pool_for_8_of_64_requests_answers_what_an_ample_one_does(make_engine, way):
    load = [[(i * j + j) % 250 for j in range(20 + i % 7)] for i in range(64)]
    settings = [params(i, 22 - i % 7) for i in range(64)]  # 42 tokens each: 3 blocks
    config = {"max_num_seqs": 64, **WAYS[way]}
    ample = make_engine(kv_cache="400 blocks", **config)
    whole = ample.generate(load, settings)
    assert ample.metrics.num_retractions == 0
    scarce = make_engine(kv_cache="24 blocks", **config)
    run = ByHand(scarce)
    for prompt, its_params in zip(load, settings, strict=True):
        run.add(prompt, its_params)
    most = 0
    while scarce.has_work:
        run.step()
        state = scarce.state()
        most = max(most, state["num_running"])
        assert state["num_free_blocks"] + state["num_cached_blocks"] + state["num_held_blocks"] == 24
    squeezed = run.answers()
    assert list(map(outcome, squeezed)) == list(map(outcome, whole))
    assert sum(c.num_retractions for c in squeezed) == scarce.metrics.num_retractions
    assert most >= 6  # it did not get by with one at a time


@WAY
def test_retractions_are_counted_per_request_and_change_nothing(make_engine, way):
    engine = make_engine(**WAYS[way])
    whole, _ = play(engine, 1.0)
    for num_pauses in (1, 2, 3):

        def interrupt(run: ByHand, num_pauses: int = num_pauses) -> None:
            for _ in range(num_pauses):
                engine.pause_generation("retract")
                engine.continue_generation()
                run.step()

        answers, _ = play(engine, 1.0, interrupt, 2)
        assert list(map(outcome, answers)) == list(map(outcome, whole))
        assert answers[0].num_retractions == max(c.num_retractions for c in answers) == num_pauses


def test_lone_sequence_that_outgrows_the_pool_ends_with_length_and_says_so(make_engine):
    engine = make_engine(kv_cache="2 blocks")
    [whole] = make_engine().generate([1, 2], params(0, 60))
    [grown, never] = engine.generate([[1, 2], [3] * 33], [params(0, 60), params(1)])
    assert grown.finish_reason.type == "length" and "pool of 2 blocks" in grown.finish_reason.message
    assert grown.num_completion_tokens == grown.finish_reason.length >= 30
    assert_begins(grown, whole)
    assert (never.finish_reason.type, never.token_ids) == ("ignored", ())
    assert "pool of 2 blocks" in never.finish_reason.message
