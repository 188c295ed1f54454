"""Tests of thousands of requests that arrive or leave at once: no thread and no step waits for all of them."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from lockstep.rollout.completion import Completion, FinishReason, StreamChunk
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.control.desk.intake import Intake
from lockstep.rollout.control.driver import SLICE
from lockstep.rollout.engine import Engine
from lockstep.rollout.errors import EngineStopped
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.rollout.sequences.request import Request, fresh_ids
from lockstep.tests.support.callers import PATIENCE, soon, submit, wait_until

MANY = 3 * SLICE + 5


class Nobody:
    """A listener that counts the answers."""

    def __init__(self) -> None:
        self.num_answers = 0

    def on_chunk(self, chunk: StreamChunk) -> None:
        self.num_answers += chunk.completion is not None

    def on_failure(self, error: EngineStopped) -> None:
        raise AssertionError(error)


class Told(Nobody):
    """A listener that keeps the answers by their ids."""

    def __init__(self) -> None:
        super().__init__()
        self.ended: dict[str, Completion] = {}

    def on_chunk(self, chunk: StreamChunk) -> None:
        if chunk.completion is not None:
            self.ended[chunk.id] = chunk.completion


@pytest.fixture
def engine(make_model):
    torch.set_num_threads(1)
    engine = Engine(make_model("qwen3"), EngineConfig(kv_cache="80 blocks", max_num_seqs=4))
    with engine.model.rollout_phase():
        yield engine
        engine.stop()


def ask(engine: Engine, listener: Nobody, num: int = MANY, rid: str = "many") -> list[str]:
    [ids] = engine.requests.submit([[5, 6]], [SamplingParams(n=num, max_new_tokens=400)], listener, rids=[rid])
    return ids


def test_a_step_takes_up_a_bounded_number_of_requests_in_their_order(engine):
    ids = ask(engine, Nobody())
    for num_steps in (1, 2, 3):
        engine.step()
        assert len(engine.parts.sequences.requests()) == num_steps * SLICE
        assert len(engine.driver.inbox) == MANY - num_steps * SLICE
    assert [request.id for request in engine.parts.sequences.requests()] == ids[: 3 * SLICE]
    assert engine.state()["num_waiting"] + engine.state()["num_running"] == MANY  # a report counts all


@pytest.mark.parametrize("is_started", [False, True])
def test_requests_that_are_aborted_when_they_come_are_answered_and_never_run(engine, is_started):
    told = Told()
    if is_started:
        engine.start()
    params = [SamplingParams(n=2, max_new_tokens=3, ignore_eos=True)] * 3
    reason = FinishReason("abort", message="enough")
    engine.requests.submit([[5, 6]] * 3, params, told, rids=["a", "b", "c"], aborted=lambda: {"a": reason, "c": None})
    if not is_started:
        engine.step()
        assert {view.id for view in engine.live_sequences()} == {"b-0", "b-1"}
    while not is_started and len(told.ended) < 6:
        engine.step()
    wait_until(lambda: len(told.ended) == 6)
    assert {id: len(one.token_ids) for id, one in told.ended.items()} == {
        "a-0": 0, "a-1": 0, "b-0": 3, "b-1": 3, "c-0": 0, "c-1": 0,
    }  # fmt: skip
    assert [told.ended[id].finish_reason.message for id in ("a-1", "c-1")] == ["enough", "Abort in waiting queue"]
    engine.requests.submit([[5, 6]], [SamplingParams(max_new_tokens=0)], told, rids=["a-0"])  # the id is free again
    engine.check_integrity()


def test_reports_take_no_requests_from_the_inbox_and_sort_those_that_wait_once(engine, monkeypatch):
    """A report that queued them would keep the lock from the steps for as long as thousands take."""
    ids, scheduler = ask(engine, Nobody()), engine.parts.scheduler
    engine.step()
    num_left, num_sorted, sort = len(engine.driver.inbox), [], scheduler.waiting

    def counted() -> list[Request]:
        num_sorted.append(1)
        return sort()

    monkeypatch.setattr(scheduler, "waiting", counted)
    state = engine.state()
    assert len(num_sorted) == 1 and len(engine.driver.inbox) == num_left == MANY - SLICE
    assert [*state["running_ids"], *state["waiting_ids"]] == ids
    assert (
        state["num_waiting"] == MANY - state["num_running"] and state["num_waiting_tokens"] == 2 * state["num_waiting"]
    )
    assert [view.id for view in engine.live_sequences()] == ids
    engine.check_integrity()
    assert len(engine.driver.inbox) == num_left


def test_a_step_begins_while_thousands_of_requests_are_made(engine, monkeypatch):
    """The lock that a step needs to begin is free meanwhile, and their ids and numbers are theirs already."""
    begun, may_go_on, make = threading.Event(), threading.Event(), Intake.requests

    def slowly(intake: Intake, *arguments) -> list[Request]:
        if len(arguments[3]) > 1:
            begun.set()
            assert may_go_on.wait(PATIENCE)
        return make(intake, *arguments)

    monkeypatch.setattr(Intake, "requests", slowly)
    asking = submit(ask, engine, Nobody(), 100)
    assert begun.wait(PATIENCE)
    assert engine.driver.inbox.lock.acquire(timeout=PATIENCE)
    engine.driver.inbox.lock.release()
    with pytest.raises(ValueError, match="duplicate request ID detected: many-7"):
        ask(engine, Nobody(), 1, "many-7")
    [later] = ask(engine, Nobody(), 1, "later")
    engine.step()
    assert engine.parts.sequences.request(later).arrival_index == 101
    may_go_on.set()
    soon(asking)
    engine.step()
    assert engine.parts.sequences.request("many-0").arrival_index == 1


def test_ids_of_requests_that_cannot_be_made_are_free_again(engine, monkeypatch):
    def fail(*_: object) -> list[Request]:
        raise ValueError("no such request")

    with monkeypatch.context() as patched:
        patched.setattr(Intake, "requests", fail)
        with pytest.raises(ValueError, match="no such request"):
            ask(engine, Nobody(), 3)
    assert len(ask(engine, Nobody(), 3)) == 3


def test_requests_of_a_caller_that_leaves_are_aborted_a_bounded_number_at_a_time(engine, monkeypatch):
    listener, sizes = Nobody(), []
    ids, abort = ask(engine, listener), engine.requests._between_steps.abort_listed
    for _ in range(4):
        engine.step()
    assert len(engine.parts.sequences.requests()) == MANY

    def counted(these: list[str], reason: object) -> None:
        sizes.append(len(these))
        abort(these, reason)

    monkeypatch.setattr(engine.requests._between_steps, "abort_listed", counted)
    assert sorted(engine.requests.withdraw({listener})) == sorted(ids)
    assert sizes == [SLICE, SLICE, SLICE, 5] and listener.num_answers == 0
    assert not engine.parts.sequences.requests() and len(engine.mailboxes) == 0


def test_requests_of_a_caller_that_leaves_are_not_queued_before_they_are_aborted(engine, monkeypatch):
    """Thousands were, under the lock that a report waits for."""
    listener, other = Nobody(), Nobody()
    ids, [kept] = ask(engine, listener), ask(engine, other, 1, "other")
    monkeypatch.setattr(engine.driver._loop, "queue", lambda request: pytest.fail(f"{request.id} is queued"))
    assert engine.requests.withdraw({listener}) == ids
    assert [request.id for request in engine.driver.inbox.posted()] == [kept]
    assert len(engine.mailboxes) == 1 and listener.num_answers == 0


def test_a_sequence_that_ends_before_its_caller_has_left_is_passed_over(engine, monkeypatch):
    listener, abort = Nobody(), engine.requests._between_steps.abort_listed
    ids = ask(engine, listener, 3)
    engine.step()

    def after_another(these: list[str], reason: object) -> None:
        engine.abort_request(ids[0])
        abort(these, reason)

    monkeypatch.setattr(engine.requests._between_steps, "abort_listed", after_another)
    assert engine.requests.withdraw({listener}) == ids
    assert not engine.parts.sequences.requests() and len(engine.mailboxes) == 0


@pytest.mark.parametrize("when", ["before the mailboxes are closed", "before the abort", "after the abort"])
def test_a_retry_of_the_same_id_is_answered_though_its_first_caller_leaves_late(engine, monkeypatch, when):
    """The first request ends by itself while its caller leaves, and the second comes in between."""
    first, second, desk = Nobody(), Nobody(), engine.requests
    [id] = ask(engine, first, 1, "again")
    engine.step()

    def end_and_ask_again() -> None:
        engine.abort_request(id)
        ask(engine, second, 1, "again")

    def around(owner: object, name: str, *, after: bool) -> None:
        original = getattr(owner, name)

        def run(*arguments: object) -> None:
            monkeypatch.setattr(owner, name, original)
            if not after:
                end_and_ask_again()
            original(*arguments)
            if after:
                ask(engine, second, 1, "again")

        monkeypatch.setattr(owner, name, run)

    if when == "before the mailboxes are closed":
        around(desk, "let_go", after=False)
    else:
        around(desk._between_steps, "abort_listed", after=when == "after the abort")
    assert desk.withdraw({first}) == [id]
    while engine.has_work:
        engine.step()
    assert second.num_answers == 1 and len(engine.mailboxes) == 0


class Asking(Nobody):
    """A listener that asks again under the same id as soon as it has its answer."""

    def __init__(self, engine: Engine, then: Nobody) -> None:
        super().__init__()
        self._engine, self._then = engine, then

    def on_chunk(self, chunk: StreamChunk) -> None:
        super().on_chunk(chunk)
        if chunk.completion is not None:
            ask(self._engine, self._then, 1, chunk.id)


@pytest.mark.parametrize("how", ["an answer", "a commit that verifies"])
def test_an_id_is_taken_until_its_answer_is_delivered(engine, monkeypatch, how):
    """A retry was accepted when the sequence was freed: the first answer went to its listener, its own to nobody; at
    a commit the loop ended."""
    last = Nobody()
    first, managers = Asking(engine, last), engine.parts.managers
    [id] = ask(engine, first, 1, "again")
    engine.step()
    free, refused = managers.free, []

    def freed(id: str) -> None:
        free(id)
        with pytest.raises(ValueError, match="duplicate request ID detected: again"):
            ask(engine, Nobody(), 1, "again")
        refused.append(id)

    with monkeypatch.context() as patched:
        patched.setattr(managers, "free", freed)
        if how == "an answer":
            engine.abort_request(id)
        else:
            engine.weights.commit_weights("1", None, in_flight="verify")
    assert refused == [id]
    while engine.has_work:
        engine.step()
    assert first.num_answers == last.num_answers == 1
    assert len(engine.mailboxes) == 0 and not engine.mailboxes.take_unclaimed()


def test_an_id_whose_receipt_cannot_be_made_is_free_again(engine, monkeypatch):
    def fail(*_: object) -> object:
        raise RuntimeError("no receipt")

    engine.add([5, 6], SamplingParams(max_new_tokens=4), rid="again")
    with monkeypatch.context() as patched:
        patched.setattr(engine.gate.loop._receipts, "with_receipt", fail)
        with pytest.raises(RuntimeError, match="no receipt"):
            engine.abort_request("again")
    assert engine.add([5, 6], SamplingParams(max_new_tokens=4), rid="again") == ["again"]


def test_a_request_that_cannot_be_queued_does_not_stay_in_the_inbox(engine, monkeypatch):
    """It made every later step and command fail as well."""
    ids, queue = ask(engine, Nobody(), 3), engine.driver._loop.queue

    def fail(request: Request) -> None:
        if request.id == ids[1]:
            raise ValueError("no such request")
        queue(request)

    monkeypatch.setattr(engine.driver._loop, "queue", fail)
    with pytest.raises(ValueError, match="no such request"):
        engine.step()
    assert [request.id for request in engine.driver.inbox.posted()] == [ids[2]]
    assert set(engine.abort_request(abort_all=True).aborted) == {ids[0], ids[2]}


def test_a_report_is_made_between_slices_of_the_requests_that_a_command_queues(engine, monkeypatch):
    """The command took up all that were posted in one go, with the lock held."""
    ask(engine, Nobody())
    reports, queue = [], engine.driver._loop.queue

    def first_starts_a_report(request: Request) -> None:
        if not reports:
            reports.append(submit(engine.driver.look, lambda: len(engine.parts.sequences.requests())))
            wait_until(lambda: engine.driver.lock.is_wanted())
        queue(request)

    monkeypatch.setattr(engine.driver._loop, "queue", first_starts_a_report)
    assert len(engine.abort_request(abort_all=True).aborted) == MANY
    assert soon(reports[0]) == SLICE


@pytest.mark.parametrize("how", ["abort", "pause", "hold"])
def test_a_report_comes_between_while_thousands_of_requests_are_aborted(engine, how):
    """An abort of all took the lock for seconds, and reports waited."""
    reports = []

    class Reporter(Nobody):
        def on_chunk(self, chunk: StreamChunk) -> None:
            super().on_chunk(chunk)
            if self.num_answers == 1:
                reports.append(submit(engine.state))
                wait_until(lambda: engine.driver.lock.is_wanted())  # it waits for the lock

    listener = Reporter()
    ask(engine, listener)
    if how == "abort":
        assert len(engine.abort_request(abort_all=True).aborted) == MANY
    elif how == "pause":
        assert engine.pause_generation("abort").num_aborted == MANY
    else:
        assert (
            engine.weights.hold_for_update(refusal=("here", "weights are written"), abort_all=True).num_aborted == MANY
        )
    assert soon(reports[0])["num_waiting"] == MANY - SLICE
    assert engine.state()["num_waiting"] == 0 and listener.num_answers == MANY


def test_a_hold_ends_however_fast_requests_come_while_it_aborts(engine, monkeypatch):
    """It aborted again until none was left, and let others in each time."""
    listener, between = Nobody(), engine.requests._between_steps
    num_waves = 0

    def another_wave() -> None:
        nonlocal num_waves
        num_waves += 1
        assert num_waves < 20, "as long as others come, no weights are written"
        ask(engine, listener, rid=f"wave {num_waves}")
        engine.driver.take_inbox()

    ask(engine, listener)
    monkeypatch.setattr(between, "give_way", another_wave)
    report = engine.weights.hold_for_update(refusal=("here", "weights are written"), abort_all=True)
    assert report.num_aborted == listener.num_answers == (1 + num_waves) * MANY
    assert engine.state()["num_waiting"] == 0


def test_a_command_inside_another_ones_block_lets_nobody_in(engine):
    ask(engine, Nobody())
    with engine.driver.lock:
        reporting = submit(engine.state)
        wait_until(lambda: engine.driver.lock.is_wanted())
        assert len(engine.abort_request(abort_all=True).aborted) == MANY and not reporting.done()
    assert soon(reporting)["num_waiting"] == 0


def test_the_ids_of_many_prompts_cost_one_call_of_the_system(monkeypatch):
    """Such a call gives the interpreter's lock up, and thousands of them would take seconds beside other threads."""
    calls, real = [], os.urandom

    def counted(num_bytes: int) -> bytes:
        calls.append(num_bytes)
        return real(num_bytes)

    monkeypatch.setattr(os, "urandom", counted)
    ids = fresh_ids(MANY)
    assert len(calls) == 1 and len(set(ids)) == MANY and {len(id) for id in ids} == {32}
    assert fresh_ids(0) == []
