"""Tests of subscriptions between the engine's thread and the event loop: delivery, failures, and withdrawn requests."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from lockstep.integration.http.edge.config import HttpConfig
from lockstep.integration.http.edge.disconnect import first_of
from lockstep.integration.http.generation.admission import Size
from lockstep.integration.http.generation.asked import Asked
from lockstep.integration.http.generation.subscriptions import Hub, Subscription
from lockstep.rollout.completion import Completion, StreamChunk
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.errors import EngineStopped, Overloaded
from lockstep.rollout.request_options import RequestOptions
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.rollout.sequences.request import fresh_ids

PATIENCE = 30.0
PROMPTS = [[5, 6, 7], [8, 9]]
SIZE = Size.of(PROMPTS, [1, 1])
PARAMS = SamplingParams(temperature=0, max_new_tokens=6, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_new_tokens=400, ignore_eos=True)


@pytest.fixture
def engine(make_model) -> Iterator[Engine]:
    """Yield a started engine, which must be idle at the end, without leaked blocks."""
    torch.set_num_threads(1)
    engine = Engine(make_model("qwen3"), EngineConfig(kv_cache=64))
    with engine.model.rollout_phase():
        engine.start()
        yield engine
        engine.abort_request(abort_all=True)
        engine.continue_generation()
        engine.check_integrity()
        assert engine.state()["num_held_blocks"] == 0
    engine.close()


class Told:
    """A listener that keeps chunks and failures."""

    def __init__(self) -> None:
        self.chunks: list[StreamChunk] = []
        self.failure: EngineStopped | None = None
        self.num_ended = 0
        self._news = threading.Condition()

    def on_chunk(self, chunk: StreamChunk) -> None:
        with self._news:
            self.chunks.append(chunk)
            self.num_ended += chunk.completion is not None
            self._news.notify_all()

    def on_failure(self, error: EngineStopped) -> None:
        with self._news:
            self.failure = error
            self._news.notify_all()

    def wait(self, num_ended: int) -> list[Completion]:
        with self._news:
            assert self._news.wait_for(lambda: self.num_ended >= num_ended or self.failure is not None, PATIENCE)
        return [chunk.completion for chunk in self.chunks if chunk.completion is not None]


def asked(params: SamplingParams = PARAMS, num_top: int = 0) -> Asked:
    return Asked(PROMPTS, [params] * 2, [RequestOptions(top_logprobs_num=num_top)] * 2, ["a", "b"])


@pytest.mark.parametrize("streamed", [False, True])
def test_listener_is_told_of_answers_and_of_every_step_where_it_wants_them(engine, streamed):
    expected = engine.generate(PROMPTS, PARAMS)
    told = Told()
    groups = engine.requests.submit(PROMPTS, [PARAMS] * 2, told, rids=["a", "b"], streamed=streamed)
    assert groups == [["a"], ["b"]]
    answers = {completion.id: completion.token_ids for completion in told.wait(2)}
    assert answers == {"a": expected[0].token_ids, "b": expected[1].token_ids}
    assert (len(told.chunks) > 2) == streamed
    for id, completion in zip("ab", expected, strict=True):
        mine = [chunk for chunk in told.chunks if chunk.id == id]
        assert sum((chunk.token_ids for chunk in mine), ()) == completion.token_ids
        assert all(chunk.num_prompt_tokens == len(completion.prompt_ids) for chunk in mine)


def test_one_bad_prompt_or_an_id_twice_and_nothing_is_queued(engine):
    told = Told()
    engine.pause_generation("in_place")
    with pytest.raises(ValueError, match="duplicate request ID detected: a"):
        engine.requests.submit(PROMPTS, [PARAMS] * 2, told, rids=["a", "a"])
    with pytest.raises(ValueError, match="prompt is empty"):
        engine.requests.submit([[1], []], [PARAMS] * 2, told)
    with pytest.raises(ValueError, match="2 prompts, but 1 sampling_params"):
        engine.requests.submit(PROMPTS, [PARAMS], told)
    assert not engine.has_work and told.chunks == []
    engine.requests.submit(PROMPTS[:1], [PARAMS], told, rids=["a"])
    with pytest.raises(ValueError, match="duplicate request ID detected: a"):
        engine.requests.submit(PROMPTS[:1], [PARAMS], told, rids=["a"])


def test_withdrawn_listener_hears_nothing_more_and_others_are_not_touched(engine):
    mine, others = Told(), Told()
    engine.pause_generation("in_place")
    engine.requests.submit(PROMPTS, [LONG] * 2, mine, rids=["a", "b"])
    engine.requests.submit(PROMPTS[:1], [PARAMS], others, rids=["c"])
    assert sorted(engine.requests.withdraw([mine])) == ["a", "b"] and engine.requests.withdraw([mine]) == []
    engine.requests.submit(PROMPTS[:1], [PARAMS], others, rids=["a"])  # the id is free again: another request has it
    assert engine.requests.withdraw([mine]) == []
    engine.continue_generation()
    assert {completion.id for completion in others.wait(2)} == {"a", "c"}
    assert mine.chunks == []


def test_listener_is_told_when_the_loop_ends(engine, monkeypatch):
    def fail(most: int) -> None:
        raise RuntimeError("planned")

    told = Told()
    engine.pause_generation("in_place")
    engine.requests.submit(PROMPTS, [PARAMS] * 2, told)
    monkeypatch.setattr(engine.gate, "step", fail)
    engine.continue_generation()
    assert told.wait(2) == [] and isinstance(told.failure, EngineStopped)
    with pytest.raises(EngineStopped):
        engine.requests.submit(PROMPTS, [PARAMS] * 2, told)


class Slow(list[int]):
    """A prompt whose tokens are read only when they may be."""

    def __init__(self, ids: list[int]) -> None:
        super().__init__(ids)
        self.is_read, self.may_go_on = threading.Event(), threading.Event()

    def __iter__(self) -> Iterator[int]:
        self.is_read.set()
        assert self.may_go_on.wait(PATIENCE)
        return super().__iter__()


async def cancelled(opening: asyncio.Task[Subscription], has_begun: threading.Event) -> None:
    """Cancel a task that opens a subscription once it has come so far."""
    await asyncio.to_thread(has_begun.wait, PATIENCE)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():
        await asyncio.sleep(0)


def test_subscription_that_is_cancelled_while_it_is_queued_leaves_nothing(engine):
    """The thread that queues the requests cannot be stopped, so they are withdrawn afterwards."""
    prompt = Slow(PROMPTS[0])

    async def leave() -> None:
        hub, before = Hub(engine), engine.metrics.num_aborted
        slow = replace(asked(LONG, num_top=2), prompts=[prompt, PROMPTS[1]])
        await cancelled(asyncio.ensure_future(hub.subscribe(lambda: slow, streamed=True, size=SIZE)), prompt.is_read)
        assert not hub.open and hub.entries.num > 0 and hub.admission.num_sequences == 2
        prompt.may_go_on.set()
        await until(lambda: not hub.entries.num)
        assert engine.metrics.num_aborted == before + 2
        assert hub.admission.num_sequences == hub.admission.num_tokens == 0

    asyncio.run(asyncio.wait_for(leave(), PATIENCE))
    assert engine.state()["num_running"] == engine.state()["num_waiting"] == 0


def test_a_client_that_leaves_before_its_requests_are_made_has_none_made(engine):
    """Clients that ask and leave at once would otherwise keep the threads, the lock and the memory busy."""
    began, go_on, num_prepared = threading.Event(), threading.Event(), []

    def prepare() -> Asked:
        num_prepared.append(1)
        began.set()
        assert go_on.wait(PATIENCE)
        return asked(LONG)

    async def leave() -> None:
        hub, before = Hub(engine), engine.metrics.num_requests
        asking = [asyncio.ensure_future(hub.subscribe(prepare, streamed=True, size=SIZE)) for _ in range(9)]
        for opening in asking:
            await cancelled(opening, began)
        assert hub.admission.num_sequences == 18
        go_on.set()
        await until(lambda: not hub.admission.num_sequences)
        assert len(num_prepared) <= 4  # those that had a thread
        assert engine.metrics.num_requests == before and engine.state()["num_waiting"] == 0

    asyncio.run(asyncio.wait_for(leave(), PATIENCE))


def test_a_client_that_has_left_counts_in_the_queues_limits_until_its_requests_are_withdrawn(engine):
    async def leave() -> None:
        hub = Hub(engine, HttpConfig(max_waiting_requests=3))
        subscription = await hub.subscribe(lambda: asked(LONG), streamed=True, size=SIZE)
        with engine.driver.lock:  # nothing can be withdrawn
            hub.leave(subscription)
            assert not hub.open
            with pytest.raises(Overloaded, match="max_waiting_requests"):
                hub.admission.take(object(), SIZE)
        await until(lambda: not hub.admission.num_sequences)
        hub.leave(await hub.subscribe(lambda: asked(LONG), streamed=True, size=SIZE))
        await until(lambda: not hub.admission.num_sequences)

    engine.pause_generation("in_place")
    asyncio.run(asyncio.wait_for(leave(), PATIENCE))
    assert engine.state()["num_waiting"] == 0


def test_event_loop_that_has_closed_does_not_disturb_the_engine(engine):
    async def begin() -> None:
        await Hub(engine).subscribe(asked, streamed=True, size=SIZE)

    engine.pause_generation("in_place")
    asyncio.run(begin())
    engine.continue_generation()
    assert len(engine.generate(PROMPTS, PARAMS)) == 2


def test_first_of_cancels_the_other_one():
    async def forever() -> None:
        await asyncio.get_running_loop().create_future()

    async def at_once() -> None:
        return None

    async def both() -> None:
        working = asyncio.ensure_future(forever())
        assert not await first_of(working, at_once()) and working.cancelled()
        working = asyncio.ensure_future(at_once())
        assert await first_of(working, forever())

    asyncio.run(asyncio.wait_for(both(), PATIENCE))


def test_requests_that_need_no_digest_do_not_wait_for_those_that_do(engine, monkeypatch):
    """More of them wait than there are threads; the digest is computed once for all."""
    naming, may_end, num_named = threading.Event(), threading.Event(), []

    def name_weights() -> None:
        num_named.append(1)
        naming.set()
        assert may_end.wait(PATIENCE)
        engine.parts.sequences.weight_digest = "d"

    def with_receipts() -> Asked:
        return replace(asked(), options=[RequestOptions(return_receipt=True)] * 2, rids=fresh_ids(2))

    async def ask(hub: Hub, prepare: Callable[[], Asked]) -> list[Completion]:
        subscription = await hub.subscribe(prepare, streamed=False, size=SIZE)
        return await subscription.completions()

    async def several() -> None:
        hub = Hub(engine, name_weights=name_weights)
        waiting = [asyncio.ensure_future(ask(hub, with_receipts)) for _ in range(6)]
        assert await asyncio.to_thread(naming.wait, PATIENCE)
        assert len(await asyncio.wait_for(ask(hub, asked), PATIENCE)) == 2
        waiting[0].cancel()
        assert not any(one.done() for one in waiting)
        may_end.set()
        answers = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), PATIENCE)
        assert isinstance(answers[0], asyncio.CancelledError)
        assert all(one.receipt is not None for given in answers[1:] for one in given)

    asyncio.run(several())
    assert num_named == [1]


def test_a_noted_abort_is_carried_out_with_the_queueing_and_a_client_that_leaves_leaves_no_sequence(
    engine, monkeypatch, until
):
    """One of its two requests is aborted before the engine has them: it ends at once, and no further call does it."""
    may_prepare = threading.Event()

    def prepare() -> Asked:
        assert may_prepare.wait(PATIENCE)
        return asked(LONG)

    async def leave() -> Hub:
        hub = Hub(engine)
        task = asyncio.ensure_future(hub.subscribe(prepare, streamed=True, size=SIZE))
        while not hub.open:
            await asyncio.sleep(0)
        await asyncio.sleep(0)  # the thread prepares
        hub.early_aborts.note("a", None)
        may_prepare.set()
        subscription = await task
        [chunk] = await subscription.take()
        assert chunk.id == "a" and chunk.completion.finish_reason.type == "abort"
        assert [one.id for one in engine.live_sequences()] == ["b"]
        hub.leave(subscription)
        until(lambda: not engine.live_sequences() and len(engine.mailboxes) == 0)
        return hub

    engine.pause_generation("in_place")  # so that no sequence ends by itself
    monkeypatch.setattr(engine, "abort_request", lambda *_, **__: pytest.fail("it is aborted already"))
    hub = asyncio.run(leave())
    until(lambda: not hub.open and hub.admission.num_sequences == 0)
