"""The end of an engine: every request is answered or refused, and a close that failed is made again."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch

from lockstep.rollout.completion import Completion, StreamChunk
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.errors import EngineStopped

PROMPT = list(range(1, 40))
LONG = {"temperature": 0.0, "max_new_tokens": 400, "ignore_eos": True}
CLOSED = "the engine is closed: make another one"


@pytest.fixture
def engine(make_model, tmp_path) -> Engine:
    make_model("qwen3").save_pretrained(tmp_path)
    return Engine(tmp_path, EngineConfig(kv_cache="64 blocks", speculation="off"))


class Successor:
    """A listener that sends another request when its own is aborted."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.ends: list[Completion] = []
        self.refusals: list[EngineStopped] = []

    def on_chunk(self, chunk: StreamChunk) -> None:
        if chunk.completion is not None:
            self.ends.append(chunk.completion)
            try:
                self.engine.requests.submit([PROMPT], [LONG], self)
            except EngineStopped as refusal:
                self.refusals.append(refusal)

    def on_failure(self, error: EngineStopped) -> None:
        raise AssertionError(error)


@pytest.mark.parametrize("is_started", [True, False])
def test_a_request_that_arrives_while_the_engine_closes_is_refused(engine, is_started):
    if is_started:
        engine.start()
    listener = Successor(engine)
    engine.requests.submit([PROMPT], [LONG], listener)
    engine.close()
    assert [end.finish_reason.type for end in listener.ends] == ["abort"]
    assert [str(refusal) for refusal in listener.refusals] == [CLOSED]
    assert not engine.has_work and not len(engine.mailboxes)


@pytest.mark.parametrize("is_started", [True, False])
@pytest.mark.parametrize("call", ["stream", "astream", "generate", "agenerate"])
def test_calls_that_wait_while_the_engine_closes_get_what_they_have(engine, is_started, call):
    if is_started:
        engine.start()
    has_begun, found = threading.Event(), []

    async def chunks() -> None:
        async for chunk in engine.astream(PROMPT, LONG):
            has_begun.set()
            found.append(chunk.completion)

    def use() -> None:
        if call == "stream":
            for chunk in engine.stream(PROMPT, LONG):
                has_begun.set()
                found.append(chunk.completion)
        elif call == "astream":
            asyncio.run(chunks())
        elif call == "generate":
            found.extend(engine.generate([PROMPT], LONG))
        else:
            found.extend(asyncio.run(engine.agenerate([PROMPT], LONG)))

    thread = threading.Thread(target=use)
    if "stream" not in call:
        engine.driver.at_step(engine.metrics.num_steps + 3, has_begun.set)
    thread.start()
    assert has_begun.wait(30)
    engine.close()
    thread.join(30)
    assert not thread.is_alive()
    assert found[-1].finish_reason.type == "abort" and found[-1].finish_reason.message == "the engine was closed"


def test_a_close_that_failed_takes_no_request_and_is_made_again(engine, monkeypatch):
    def fail() -> None:
        raise torch.OutOfMemoryError("no memory to free memory")

    with monkeypatch.context() as patch:
        patch.setattr(engine.parts.runner, "release_memory", fail)
        with pytest.raises(torch.OutOfMemoryError):
            engine.close()
    for use in (lambda: engine.add(PROMPT, LONG), lambda: engine.generate([PROMPT], LONG), engine.start):
        with pytest.raises(EngineStopped, match=CLOSED):
            use()
    assert engine.kv_bytes > 0
    engine.close()
    assert engine.kv_bytes == 0 and engine.driver.is_closed
    engine.close()


class Told:
    """A listener that keeps the error that ended the loop."""

    def __init__(self) -> None:
        self.has_ended = threading.Event()

    def on_chunk(self, chunk: StreamChunk) -> None:
        pass

    def on_failure(self, error: EngineStopped) -> None:
        self.has_ended.set()


def test_mailboxes_are_listed_while_no_call_opens_one(engine, monkeypatch):
    """At the end of the loop too. A call opens its mailbox under the inbox's lock alone."""
    was_locked = []

    class Watched(dict):
        def items(self):
            was_locked.append(engine.driver.inbox.is_locked_by_me)
            return super().items()

    def fail(most: int) -> None:
        raise RuntimeError("the step broke")

    told = Told()
    engine.requests.submit([PROMPT], [LONG], told)
    monkeypatch.setattr(engine.mailboxes, "_boxes", Watched(engine.mailboxes._boxes))
    monkeypatch.setattr(engine.gate, "step", fail)
    assert len(engine.mailboxes.of({told})) == 1
    engine.start()
    assert told.has_ended.wait(30)
    assert was_locked == [True, True] and not len(engine.mailboxes)
