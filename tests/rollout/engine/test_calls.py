"""Streams, async twins, threads, and an engine that is stepped by hand."""

from __future__ import annotations

import asyncio
import threading

import pytest

from lockstep.rollout.errors import SamplingRefused
from lockstep.rollout.request_options import RequestOptions
from lockstep.tests.rollout.engine.callers import LONG, PROMPTS, assert_idle, sampled

# -- streams and async twins -----------------------------------------------------------------------


@pytest.mark.parametrize("interval", [None, 3])
def test_streamed_chunks_add_up_to_what_generate_returns(talker, interval):
    params = sampled(n=2, max_new_tokens=25, stop=["zz", "su"], min_new_tokens=12, stream_interval=interval)
    whole = talker.generate("the sum", params)
    chunks = list(talker.stream("the sum", params))
    for index in range(2):
        mine = [chunk for chunk in chunks if chunk.index == index]
        assert sum((chunk.token_ids for chunk in mine), ()) == whole[index].token_ids
        assert sum((chunk.logprobs for chunk in mine), ()) == whole[index].logprobs
        assert "".join(chunk.text for chunk in mine) == whole[index].text
        assert [chunk.completion is not None for chunk in mine] == [False] * (len(mine) - 1) + [True]
        assert mine[-1].completion.token_ids == whole[index].token_ids
        assert all(len(chunk.token_ids) >= (interval or 1) for chunk in mine[:-1])
        assert len(mine) > 2
    assert_idle(talker)


def test_abandoned_stream_aborts_and_gives_its_blocks_back(make_engine):
    engine = make_engine()
    stream = engine.stream(LONG, sampled(max_new_tokens=400))
    next(stream)
    assert engine.state()["num_held_blocks"] > 0
    stream.close()
    assert_idle(engine)
    assert engine.metrics.num_aborted == 1


def test_module_is_the_trainers_between_two_chunks(make_engine):
    engine = make_engine()
    for _ in engine.stream([1, 2], sampled()):
        assert not engine.model.in_rollout_phase
        assert engine.model.module.training


def test_async_twins_answer_like_the_others_and_share_their_steps(make_engine):
    engine = make_engine(max_num_seqs=32)
    prompts = [[i, i + 1] for i in range(24)]
    alone = [c.token_ids for c in engine.generate(prompts, sampled())]
    before = engine.state()["num_forwards"]

    async def all_at_once() -> list:
        return await asyncio.gather(*(engine.agenerate(prompt, sampled()) for prompt in prompts))

    assert [c.token_ids for [c] in asyncio.run(all_at_once())] == alone
    assert engine.state()["num_forwards"] - before < 24  # one after the other takes 192
    assert_idle(engine)


def test_short_async_call_is_answered_though_many_long_ones_run(make_engine):
    engine = make_engine(max_num_seqs=80, kv_cache="200 blocks")

    async def steps_of(prompt: list[int], num_new: int) -> int:
        before = engine.state()["num_forwards"]
        await engine.agenerate(prompt, sampled(max_new_tokens=num_new))
        return engine.state()["num_forwards"] - before

    async def all_at_once() -> int:
        longs = [asyncio.create_task(steps_of([i], 60)) for i in range(60)]
        while engine.state()["num_running"] < 60:
            await asyncio.sleep(0)
        num_steps = await steps_of([99], 2)
        await asyncio.gather(*longs)
        return num_steps

    assert asyncio.run(all_at_once()) <= 8


def test_failing_step_reaches_every_coroutine_that_waits(make_engine):
    engine = make_engine()
    engine.weights.refuse_sampling("torn")

    async def all_at_once() -> list:
        return await asyncio.gather(*(engine.agenerate([i], sampled()) for i in range(5)), return_exceptions=True)

    assert [type(error) for error in asyncio.run(all_at_once())] == [SamplingRefused] * 5
    assert_idle(engine)


def test_async_stream_gives_the_same_chunks(talker):
    async def collect() -> list:
        return [chunk async for chunk in talker.astream("the sum", sampled(), options=options)]

    options = RequestOptions(speculation=False)  # a step has one token
    plain = list(talker.stream("the sum", sampled(), options=options))
    assert [(c.token_ids, c.text) for c in asyncio.run(collect())] == [(c.token_ids, c.text) for c in plain]


def test_cancelled_coroutine_aborts_its_request(make_engine):
    engine = make_engine()

    async def cancel_midway() -> None:
        task = asyncio.create_task(engine.agenerate(LONG, sampled(max_new_tokens=400)))
        while engine.state()["num_running"] == 0:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel_midway())
    assert_idle(engine)


def test_coroutine_cancelled_while_it_queues_leaves_nothing_behind(make_engine):
    engine = make_engine()
    cancelled = threading.Event()

    async def cancel_at_once() -> None:
        task = asyncio.create_task(engine.agenerate(LONG, sampled(max_new_tokens=400)))
        await asyncio.sleep(0)  # it begins to queue, on a thread that has to wait for the lock
        task.cancel()
        cancelled.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    caller = threading.Thread(target=asyncio.run, args=(cancel_at_once(),))
    with engine.driver.lock:
        caller.start()
        assert cancelled.wait(timeout=30)
    caller.join(timeout=30)
    assert not caller.is_alive()
    assert_idle(engine)


def test_the_end_of_an_event_loop_leaves_no_request_that_was_being_queued(make_engine):
    engine = make_engine()
    queueing = threading.Event()

    async def leave() -> None:
        task = asyncio.ensure_future(engine.agenerate(LONG, sampled(max_new_tokens=400)))
        await asyncio.sleep(0)
        queueing.set()
        assert not task.done()

    caller = threading.Thread(target=asyncio.run, args=(leave(),))
    with engine.driver.lock:
        caller.start()
        assert queueing.wait(timeout=30)
    caller.join(timeout=30)
    assert not caller.is_alive()
    assert_idle(engine)


def test_two_threads_that_generate_at_once_get_what_one_gets(make_engine):
    engine = make_engine()
    expected = [c.token_ids for c in engine.generate(PROMPTS, sampled(max_new_tokens=20))]
    answers: dict[int, list] = {}

    def work(index: int) -> None:
        answers[index] = engine.generate(PROMPTS[index], sampled(max_new_tokens=20 - 6 * index))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert [answers[i][0].token_ids for i in range(3)] == [expected[i][: 20 - 6 * i] for i in range(3)]
    assert not engine.model.in_rollout_phase
    assert engine.model.module.training
    assert_idle(engine)


def test_overlapping_phases_of_two_threads_end_with_the_last(make_engine):
    model = make_engine().model
    first, second = model.rollout_phase(), model.rollout_phase()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert model.in_rollout_phase and not model.module.training
    assert model.module.config._attn_implementation.startswith("lockstep")
    second.__exit__(None, None, None)
    assert not model.in_rollout_phase and model.module.training
    assert not model.module.config._attn_implementation.startswith("lockstep")


# -- driving the loop by hand ----------------------------------------------------------------------


def test_added_requests_are_answered_by_the_step_that_ends_them(make_engine):
    engine = make_engine()
    [long], [short] = engine.add([1, 2], sampled(max_new_tokens=5)), engine.add([3], sampled(max_new_tokens=2), rid="s")
    answers = [[c.id for c in engine.step()] for _ in range(5)]
    assert answers == [[], ["s"], [], [], [long]] and short == "s"
    assert engine.step() == []


def test_joining_a_running_batch_changes_nobodys_tokens(make_engine):
    engine = make_engine(speculation="off")  # a step has one token
    alone, other = engine.generate([LONG, PROMPTS[0]], sampled(max_new_tokens=12))
    engine.flush_cache()
    engine.add(LONG, sampled(max_new_tokens=12), rid="a")
    for _ in range(4):
        engine.step()
    engine.add(PROMPTS[0], sampled(max_new_tokens=12), rid="b")
    answers = {}
    while engine.has_work:
        answers |= {c.id: c for c in engine.step()}
    assert (answers["a"].token_ids, answers["a"].logprobs) == (alone.token_ids, alone.logprobs)
    assert (answers["b"].token_ids, answers["b"].logprobs) == (other.token_ids, other.logprobs)


def test_n_samples_get_ids_of_their_own(make_engine):
    engine = make_engine()
    assert engine.add([1], sampled(n=3), rid="x") == ["x-0", "x-1", "x-2"]
    engine.abort_request(abort_all=True)
    assert_idle(engine)


def test_abort_answers_with_what_was_generated(make_engine):
    engine = make_engine(speculation="off")  # a step has one token
    [whole] = engine.generate([1, 2], sampled())
    ids = [*engine.add([1, 2], sampled(), rid="runs"), *engine.add([1] * 9, sampled(), rid="stays")]
    for _ in range(3):
        engine.step()
    engine.add([5], sampled(), rid="waits")
    assert engine.abort_request("unknown").unknown == ("unknown",)
    assert engine.abort_request("waits").aborted == ("waits",)
    stream = engine.stream([1, 2], sampled())
    chunk = next(stream)
    assert engine.abort_request(chunk.id, message="enough").aborted == (chunk.id,)
    last = list(stream)[-1].completion
    assert (last.finish_reason.type, last.finish_reason.message) == ("abort", "enough")
    assert last.token_ids == whole.token_ids[: len(last.token_ids)] and len(last.token_ids) == 1
    assert engine.abort_request(abort_all=True).aborted == tuple(ids)
    assert_idle(engine)
