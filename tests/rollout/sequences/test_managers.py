"""Tests of events and states: the controller's manager and a worker's agree after the same log."""

from __future__ import annotations

import pytest

from lockstep.rollout.completion import FinishReason
from lockstep.rollout.request_options import RequestOptions
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.rollout.sequences.engine_manager import EngineSequenceManager
from lockstep.rollout.sequences.event_log import Event, ManagerPair
from lockstep.rollout.sequences.manager import SequenceManager
from lockstep.rollout.sequences.request import Request
from lockstep.rollout.sequences.sequence import Sequence, State
from lockstep.rollout.sequences.step import ScheduledSequence, ScheduleOutput, SequenceResult
from lockstep.rollout.sequences.worker_manager import WorkerSequenceManager

EOS = 99


def a_request(id: str = "a", prompt: tuple[int, ...] = (1, 2, 3), **params: object) -> Request:
    return Request(Sequence(id, prompt), SamplingParams(**params), RequestOptions(), 0, 0, 0.0, 0, None)


def run(id: str, start: int, num_tokens: int, token_ids=None, blocks=(), incarnation: int = 0) -> ScheduledSequence:
    return ScheduledSequence(id, incarnation, start, num_tokens, tuple(blocks), token_ids)


def step(*scheduled: ScheduledSequence, **lists: tuple) -> ScheduleOutput:
    return ScheduleOutput(1, scheduled, **lists)


def got(id: str, num_tokens: int, token_id: int | None = None, incarnation: int = 0) -> SequenceResult:
    logprob = None if token_id is None else -0.5
    return SequenceResult(id, incarnation, num_tokens, token_id, logprob)


def both(*requests: Request, num_stages: int = 1) -> tuple[EngineSequenceManager, WorkerSequenceManager]:
    engine = EngineSequenceManager(frozenset({EOS}), 4096, num_stages)
    for request in requests:
        engine.add(request)
    return engine, WorkerSequenceManager(num_stages)


def progress(manager: SequenceManager, id: str = "a") -> tuple[int, int]:
    sequence = manager.sequence(id)
    return sequence.num_tokens_step_processed, sequence.num_tokens_stage_processed


# -- the two-stage example of 1000 tokens ----------------------------------------------------------


def test_thousand_tokens_flow_through_two_stages_as_in_the_published_example():
    prompt = tuple(range(1000))
    controller, first = both(a_request(prompt=prompt), num_stages=2)
    second = WorkerSequenceManager(num_stages=2)

    def counters() -> tuple[int, int, int]:  # fully processed, through stage 0, through stage 1
        assert progress(controller) == progress(first)
        assert controller.state_hash() == first.state_hash()
        in_second = progress(second)[1] if "a" in second else 0
        return progress(controller)[0], progress(first)[1], in_second

    def schedule(chunk: ScheduledSequence, *managers: SequenceManager) -> None:
        for manager in managers:
            manager.on_schedule(step(chunk))

    chunk_0, chunk_1 = run("a", 0, 500, prompt), run("a", 500, 500)

    schedule(chunk_0, controller, first)  # time 0: stage 0 starts tokens 0-500
    assert counters() == (0, 0, 0)
    assert controller.sequence("a").state is State.RUNNING

    for manager in (controller, first):  # time 1: stage 0 is through with them, stage 1 starts them
        manager.on_stage_completed([chunk_0])
    assert controller.sequence("a").state is State.PAUSED  # so that the next chunk may enter stage 0
    schedule(chunk_0, second)
    assert counters() == (0, 500, 0)

    schedule(chunk_1, controller, first)  # time 2: stage 0 runs 500-1000 while stage 1 ends 0-500
    second.on_stage_completed([chunk_0])
    for manager in (controller, first, second):
        assert manager.on_step_completed([got("a", 500)]) == []
    assert controller.sequence("a").state is State.RUNNING  # its second chunk is still in stage 0
    for manager in (controller, first):
        manager.on_stage_completed([chunk_1])
    assert counters() == (500, 1000, 500)
    assert controller.sequence("a").state is State.RUNNING  # nothing known is left to schedule

    schedule(chunk_1, second)  # time 3: stage 1 ends 500-1000
    second.on_stage_completed([chunk_1])
    for manager in (controller, first, second):
        manager.on_step_completed([got("a", 500, token_id=7)])
    assert counters() == (1000, 1000, 1000)
    assert controller.sequence("a").state is State.PAUSED
    assert controller.sequence("a").output_ids == [7]
    assert second.state_hash() == controller.state_hash()


def test_three_chunks_may_be_on_their_way_through_three_stages():
    prompt = tuple(range(30))
    controller, first = both(a_request(prompt=prompt), num_stages=3)
    chunks = [run("a", 0, 10, prompt), run("a", 10, 10), run("a", 20, 10)]
    for manager in (controller, first):
        manager.on_schedule(step(chunks[0]))
        manager.on_stage_completed([chunks[0]])
        manager.on_schedule(step(chunks[1]))
        manager.on_stage_completed([chunks[1]])
        manager.on_schedule(step(chunks[2]))
        manager.on_step_completed([got("a", 10)])  # the first is through all stages before the third is through one
        manager.on_stage_completed([chunks[2]])
        manager.on_step_completed([got("a", 10)])
        assert manager.sequence("a").state is State.RUNNING
        manager.on_step_completed([got("a", 10, token_id=4)])
        assert progress(manager) == (30, 30)
        assert manager.sequence("a").state is State.PAUSED
    assert controller.state_hash() == first.state_hash()


def test_stop_conditions_wait_until_all_stages_are_through():
    controller, _ = both(a_request(max_new_tokens=1), num_stages=2)
    chunk = run("a", 0, 3, (1, 2, 3))
    controller.on_schedule(step(chunk))
    controller.on_stage_completed([chunk])
    assert controller.request("a").finish_reason is None
    assert controller.on_step_completed([got("a", 3, token_id=5)]) == ["a"]


# -- one stage -------------------------------------------------------------------------------------


def test_with_one_stage_a_step_counts_both_and_a_stage_event_counts_nothing():
    controller, worker = both(a_request())
    chunk = run("a", 0, 2, (1, 2, 3))
    for manager in (controller, worker):
        manager.on_schedule(step(chunk))
        manager.on_stage_completed([chunk])
        assert progress(manager) == (0, 0)
        manager.on_step_completed([got("a", 2)])
        assert progress(manager) == (2, 2)
        assert manager.sequence("a").state is State.PAUSED


def test_cached_prefix_counts_as_processed_when_it_is_scheduled():
    controller, worker = both(a_request(prompt=tuple(range(40))))
    for manager in (controller, worker):
        manager.on_schedule(step(run("a", 32, 8, tuple(range(40)), blocks=(4, 2, 7))))
        assert progress(manager) == (32, 32)
    assert worker.block_table("a") == [4, 2, 7]
    assert controller.state_hash() == worker.state_hash()


def test_block_tables_grow_with_the_schedule_and_empty_with_preemption():
    _, worker = both()
    worker.on_schedule(step(run("a", 0, 16, tuple(range(20)), blocks=(3,))))
    worker.on_step_completed([got("a", 16)])
    worker.on_schedule(step(run("a", 16, 4, blocks=(9,))))
    assert worker.block_table("a") == [3, 9]
    worker.preempt("a")
    assert worker.block_table("a") == []


def test_late_result_of_a_preempted_sequence_is_dropped():
    controller, worker = both(a_request())
    for manager in (controller, worker):
        manager.on_schedule(step(run("a", 0, 3, (1, 2, 3))))
        manager.preempt("a")
        before = manager.state_hash()
        assert manager.on_step_completed([got("a", 3, token_id=7)]) == []
        assert manager.state_hash() == before
    assert controller.request("a").record.logprobs == []


def test_late_result_does_not_reach_the_next_incarnation():
    controller, worker = both(a_request())
    for manager in (controller, worker):
        manager.on_schedule(step(run("a", 0, 3, (1, 2, 3))))
        manager.preempt("a")
        manager.on_schedule(step(run("a", 0, 3, incarnation=1)))
        manager.on_step_completed([got("a", 3, token_id=7, incarnation=0)])
        assert manager.sequence("a").output_ids == []
        assert manager.sequence("a").state is State.RUNNING
        manager.on_step_completed([got("a", 3, token_id=8, incarnation=1)])
        assert manager.sequence("a").output_ids == [8]
    assert controller.state_hash() == worker.state_hash()


def test_late_stage_event_of_a_preempted_chunk_is_dropped():
    controller, _ = both(a_request(), num_stages=2)
    chunk = run("a", 0, 2, (1, 2, 3))
    controller.on_schedule(step(chunk))
    controller.preempt("a")
    controller.on_stage_completed([chunk])
    assert progress(controller) == (0, 0)


def test_result_of_a_sequence_that_is_gone_or_ended_is_dropped():
    controller, worker = both(a_request())
    for manager in (controller, worker):
        manager.on_schedule(step(run("a", 0, 3, (1, 2, 3))))
        manager.free("a")
        assert manager.on_step_completed([got("a", 3, token_id=7)]) == []
        assert "a" not in manager and len(manager) == 0


def test_preemption_keeps_tokens_boundary_and_logprobs():
    controller, _ = both(a_request())
    controller.on_schedule(step(run("a", 0, 3, (1, 2, 3))))
    controller.on_step_completed([got("a", 3, token_id=7)])
    controller.preempt("a")
    request = controller.request("a")
    assert (request.sequence.token_ids, request.sequence.num_prompt_tokens) == ([1, 2, 3, 7], 3)
    assert (request.record.logprobs, request.num_retractions, progress(controller)) == ([-0.5], 1, (0, 0))


def test_a_schedule_preempts_before_it_runs_so_blocks_can_change_hands():
    controller, worker = both(a_request("a"), a_request("b"))
    for manager in (controller, worker):
        manager.on_schedule(step(run("a", 0, 3, (1, 2, 3), blocks=(0,)), run("b", 0, 3, (1, 2, 3), blocks=(1,))))
        manager.on_step_completed([got("a", 3, 5), got("b", 3, 6)])
        manager.on_schedule(step(run("a", 3, 1, blocks=(1,)), preempted=("b",)))
        assert manager.sequence("b").state is State.WAITING_PREEMPT
    assert controller.state_hash() == worker.state_hash()


def test_ignored_sequence_is_answered_by_the_controller_and_unknown_to_workers():
    controller, worker = both(a_request())
    for manager in (controller, worker):
        manager.on_schedule(step(ignored=(("a", "far too long"),)))
    assert controller.sequence("a").state is State.IGNORED
    reason = controller.request("a").finish_reason
    assert (reason.type, reason.message) == ("ignored", "far too long")
    assert "a" not in worker


def test_exhausted_sequence_ends_with_length_and_the_reason():
    controller, worker = both(a_request())
    for manager in (controller, worker):
        manager.on_schedule(step(run("a", 0, 3, (1, 2, 3))))
        manager.on_step_completed([got("a", 3, 7)])
        manager.on_schedule(step(exhausted=(("a", "the pool is full"),)))
        assert manager.sequence("a").state is State.FINISHED
    reason = controller.request("a").finish_reason
    assert (reason.type, reason.length, reason.message) == ("length", 1, "the pool is full")


def test_replaying_one_log_gives_equal_state_and_a_changed_log_does_not():
    log = [
        ("on_schedule", step(run("a", 0, 3, (1, 2, 3), (0,)), run("b", 0, 2, (4, 5, 6), (1,)))),
        ("on_step_completed", [got("a", 3, 7), got("b", 2)]),
        ("on_schedule", step(run("a", 3, 1), preempted=("b",))),
        ("on_step_completed", [got("a", 1, 8), got("b", 1, 9)]),
        ("on_schedule", step(run("a", 4, 1), run("b", 0, 3, blocks=(1,), incarnation=1))),
        ("on_step_completed", [got("a", 1, 9), got("b", 3, 2, incarnation=1)]),
    ]
    controller, worker = both(a_request("a"), a_request("b", (4, 5, 6)))
    other = WorkerSequenceManager()
    for name, event in log:
        for manager in (controller, worker):
            getattr(manager, name)(event)
        assert controller.state_hash() == worker.state_hash()
    for name, event in log[:-1]:
        getattr(other, name)(event)
    other.on_step_completed([got("a", 1, 9), got("b", 3, 3, incarnation=1)])
    assert other.state_hash() != worker.state_hash()


def test_a_request_is_copied_only_for_a_log_or_a_listener():
    """Thousands may arrive at once, under the lock that steps need."""

    class Counted(Request):
        num_made = 0

        def __post_init__(self) -> None:
            super().__post_init__()
            Counted.num_made += 1

    def num_made(pair: ManagerPair) -> int:
        Counted.num_made = 0
        pair.add(Counted(Sequence("a", (1, 2)), SamplingParams(), RequestOptions(), 0, 0, 0.0, 0, None))
        return Counted.num_made

    events: list[Event] = []
    logged = ManagerPair(*both())
    logged.log = []
    assert num_made(ManagerPair(*both())) == 1
    assert num_made(ManagerPair(*both(), events.append)) == num_made(logged) == 2
    assert [name for name, _ in events] == [name for name, _ in logged.log] == ["add"]


def test_requests_that_wait_do_not_make_the_two_managers_disagree():
    controller, worker = both(a_request("a"), a_request("waits"))
    for manager in (controller, worker):
        manager.on_schedule(step(run("a", 0, 3, (1, 2, 3))))
        manager.on_step_completed([got("a", 3, 7)])
    assert controller.state_hash() == worker.state_hash()


# -- stop conditions -------------------------------------------------------------------------------


def finish_of(token_ids: list[int], **params: object):
    controller, _ = both(a_request(**params))
    start = 0
    for token_id in token_ids:
        num_rows = controller.sequence("a").num_tokens - start
        controller.on_schedule(step(run("a", start, num_rows, (1, 2, 3))))
        start += num_rows
        if controller.on_step_completed([got("a", num_rows, token_id)]):
            break
    request = controller.request("a")
    return request.finish_reason, request.sequence.output_ids


def test_eos_stops_and_stands_in_the_output():
    reason, output = finish_of([5, EOS, 6])
    assert (reason.type, reason.matched, output) == ("stop", EOS, [5, EOS])


def test_ignored_eos_runs_to_the_length():
    reason, output = finish_of([5, EOS, 6], ignore_eos=True, max_new_tokens=3)
    assert (reason.type, reason.length, output) == ("length", 3, [5, EOS, 6])


def test_stop_token_stops_also_where_eos_is_ignored_and_also_at_the_last_allowed_token():
    reason, _ = finish_of([5, 42], ignore_eos=True, stop_token_ids=[42], max_new_tokens=2)
    assert (reason.type, reason.matched) == ("stop", 42)


class ComparedId(int):
    """A token id that counts its comparisons."""

    num_compared = 0

    def __eq__(self, other: object) -> bool:
        ComparedId.num_compared += 1
        return int(self) == other

    __hash__ = int.__hash__


def test_a_token_is_not_compared_with_each_of_many_stop_tokens():
    ComparedId.num_compared = 0
    assert finish_of([7, 8, 9], max_new_tokens=3, stop_token_ids=[ComparedId(id) for id in range(100, 1100)])
    assert ComparedId.num_compared < 10


def test_context_length_ends_a_sequence():
    controller = EngineSequenceManager(frozenset(), max_model_len=4)
    controller.add(a_request())
    controller.on_schedule(step(run("a", 0, 3, (1, 2, 3))))
    assert controller.on_step_completed([got("a", 3, 7)]) == ["a"]
    assert controller.request("a").finish_reason.type == "length"


def test_zero_new_tokens_ends_with_the_prompt_and_no_token():
    reason, output = finish_of([5], max_new_tokens=0)
    assert (reason.type, reason.length, output) == ("length", 0, [])


def test_spans_say_which_weights_made_which_token():
    controller, _ = both(a_request())
    controller.weight_version, controller.weight_digest = "v1", "d1"
    controller.on_schedule(step(run("a", 0, 3, (1, 2, 3))))
    controller.on_step_completed([got("a", 3, 7)])
    controller.on_schedule(step(run("a", 3, 1)))
    controller.on_step_completed([got("a", 1, 8)])
    controller.weight_version, controller.weight_digest = "v2", None
    controller.on_schedule(step(run("a", 4, 1)))
    controller.on_step_completed([got("a", 1, 9)])
    spans = [(s.version, s.digest, s.start, s.end) for s in controller.request("a").record.spans]
    assert spans == [("v1", "d1", 0, 2), ("v2", None, 2, 3)]


# -- registry --------------------------------------------------------------------------------------


def test_duplicate_id_is_refused_and_the_first_stays():
    controller, _ = both(a_request())
    with pytest.raises(ValueError, match="'a'"):
        controller.add(a_request())
    assert len(controller) == 1


def test_unknown_id_is_named():
    with pytest.raises(ValueError, match="'zzz'"):
        both()[0].sequence("zzz")


@pytest.mark.parametrize("events", [0, 1, 2, 3], ids=["waiting", "running", "paused", "preempted"])
def test_abort_ends_a_sequence_in_any_live_state(events):
    controller, _ = both(a_request())
    todo = [
        lambda: controller.on_schedule(step(run("a", 0, 3, (1, 2, 3)))),
        lambda: controller.on_step_completed([got("a", 3, 7)]),
        lambda: controller.preempt("a"),
    ]
    for event in todo[:events]:
        event()
    controller.finish("a", FinishReason("abort"))
    assert controller.sequence("a").state is State.FINISHED
    controller.free("a")
    assert "a" not in controller


# -- requests by name ------------------------------------------------------------------------------


def test_samples_are_found_by_their_own_ids_and_by_the_id_of_their_request_while_they_live():
    engine = EngineSequenceManager(frozenset({EOS}), 4096)
    for number, (id, base_id) in enumerate([("x-0", "x"), ("y", "y"), ("x-1", "x"), ("x", "x"), ("alone", "")]):
        request = a_request(id)
        request.base_id, request.arrival_index = base_id, number
        engine.add(request)

    def named(rid: str) -> list[str]:
        return [request.id for request in engine.requests_named(rid)]

    assert [named(rid) for rid in ("x", "x-1", "y", "alone", "", "x-")] == [
        ["x-0", "x-1", "x"], ["x-1"], ["y"], ["alone"], [], [],
    ]  # fmt: skip
    engine.free("x-0")
    assert (named("x"), named("x-0")) == (["x-1", "x"], [])
    engine.free("x")
    assert named("x") == ["x-1"]
    for id in ("x-1", "y", "alone"):
        engine.free(id)
    assert named("x") == [] and not engine._samples
