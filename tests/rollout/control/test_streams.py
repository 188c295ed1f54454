"""Streams that are dropped anywhere, as by the garbage collector: their requests end, and no lock is waited for."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from lockstep.rollout.completion import StreamChunk
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.tests.support.callers import soon, submit

PARAMS = SamplingParams(max_new_tokens=40, sampling_seed=3, ignore_eos=True)


def assert_left(engine: Engine, num_live: int = 1) -> None:
    """Assert that so many abandoned requests are live still, and that the next step aborts them."""
    assert len(engine.parts.sequences.requests()) == num_live and engine.has_work
    assert engine.step() == []
    assert not engine.has_work and len(engine.mailboxes) == 0
    assert engine.metrics.num_aborted == num_live
    engine.check_integrity()


def test_a_stream_that_is_dropped_is_aborted_at_once(engine):
    stream = engine.stream([1, 2, 3], PARAMS)
    next(stream)
    del stream
    assert not engine.has_work and len(engine.mailboxes) == 0 and engine.metrics.num_aborted == 1


def test_a_stream_that_is_collected_while_a_request_is_posted_waits_for_no_lock(engine, monkeypatch):
    """The collector runs at any allocation, and ended the stream in a thread that waited for itself."""

    def in_one_thread() -> list[str]:
        stream = engine.stream([1, 2, 3], PARAMS)
        next(stream)
        cycle: list[object] = [stream]
        cycle.append(cycle)
        del stream, cycle
        numbers = engine.requests.intake.numbers

        def collected(num: int) -> int:
            gc.collect()
            return numbers(num)

        with monkeypatch.context() as patched:
            patched.setattr(engine.requests.intake, "numbers", collected)
            return engine.add([4, 5], PARAMS)

    gc.disable()
    try:
        [id] = soon(submit(in_one_thread))
    finally:
        gc.enable()
    assert {request.id for request in engine.parts.sequences.requests()} != {id}
    engine.abort_request(id)  # a command aborts the other one too
    assert [answer.id for answer in engine.step()] == [id]
    assert not engine.has_work and len(engine.mailboxes) == 0 and engine.metrics.num_aborted == 2


def test_a_stream_that_is_collected_in_another_thread_waits_for_no_lock(engine):
    """The thread may be one that the holder of the engine's lock waits for, as the model's."""
    streams = [engine.stream([1, 2, 3], PARAMS)]
    next(streams[0])
    with engine.driver.lock:
        soon(submit(streams.clear))
    assert_left(engine)


def test_a_generator_over_a_stream_that_is_closed_under_the_lock_waits_for_the_next_step(engine):
    def around() -> Iterator[StreamChunk]:
        yield from engine.stream([1, 2, 3], PARAMS)

    stream = around()
    next(stream)
    with engine.driver.lock:
        stream.close()
    assert_left(engine)


def test_a_closed_stream_has_no_chunk_and_one_that_never_began_asks_for_nothing(engine):
    stream, other = engine.stream([1, 2, 3], PARAMS), engine.stream([1, 2, 3], PARAMS)
    assert not engine.has_work and len(list(engine.stream([4, 5], PARAMS))) > 1
    next(stream)
    stream.close()
    other.close()
    assert list(stream) == list(other) == [] and not engine.has_work and engine.metrics.num_aborted == 1
    with pytest.raises(ValueError, match="empty"):
        next(engine.stream([], PARAMS))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("started", [False, True])
def test_a_stream_that_ends_in_the_middle_of_a_step_changes_no_answer(make_model, restore_threads, started, overlap):
    """With overlap it ends in the model's thread, which the step waits for."""
    torch.set_num_threads(1)
    engine = Engine(make_model("qwen3"), EngineConfig(kv_cache="80 blocks", overlap=overlap))
    with engine.model.rollout_phase():
        expected = engine.generate([[4, 5, 6]], PARAMS)[0]
        streams = [engine.stream([1, 2, 3], PARAMS)]
        next(streams[0])

        def end(*_: object) -> None:
            streams.clear()

        if started:
            engine.start()
        hook = engine.model.module.model.layers[0].register_forward_pre_hook(end)
        [answer] = soon(submit(engine.generate, [[4, 5, 6]], PARAMS))
        hook.remove()
        assert (answer.token_ids, answer.logprobs) == (expected.token_ids, expected.logprobs)
        assert not engine.has_work and len(engine.mailboxes) == 0 and engine.metrics.num_aborted == 1
        engine.close()
