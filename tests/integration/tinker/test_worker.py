"""The thread that trains and samples: cancellations that come while it takes a request up."""

from __future__ import annotations

import asyncio
import json
import threading
from types import SimpleNamespace

import pytest

from lockstep.integration.tinker.serving.promises import Promise
from lockstep.integration.tinker.serving.worker import SampleJob, Worker
from lockstep.integration.tinker.training.trainer import SamplerWeights

WEIGHTS = SamplerWeights("a")


class Engine:
    """An engine whose requests run until they are aborted. `on_add` is called when one comes."""

    def __init__(self, on_add=lambda: None) -> None:
        self.live, self.aborted, self._on_add = [], [], on_add

    def add(self, prompt_ids, params, options):
        if prompt_ids == "wrong":
            raise ValueError("none such")
        self._on_add()
        self.live.append(f"sequence of {prompt_ids}")
        return self.live[-1:]

    def abort_request(self, rid=None, *, abort_all=False, message=""):
        self.aborted += self.live if abort_all else [rid]

    def step(self, most):
        ended = [rid for rid in self.live if rid in self.aborted]
        assert ended, "nothing would end these requests"
        self.live = [rid for rid in self.live if rid not in ended]
        return [SimpleNamespace(id=rid, index=0) for rid in ended]


class Trainer:
    """A trainer of such an engine. `on_publish` is called when weights are wanted."""

    def __init__(self, engine: Engine, on_publish=lambda: None) -> None:
        self.engine, self._on_publish = engine, on_publish

    def publish(self, weights):
        self._on_publish()
        return "digest"


def job(name: str) -> SampleJob:
    request = SimpleNamespace(prompt_ids=name, params=None, options=None)
    return SampleJob(WEIGHTS, request, Promise(f"id of {name}"))


def said(promise: Promise) -> str:
    answer = asyncio.run(promise.wait(30))
    assert answer is not None
    return json.loads(answer.body)["error"]


@pytest.mark.parametrize("when", ["publish", "add"])
@pytest.mark.parametrize("how", ["cancel", "close"])
def test_a_request_that_is_cancelled_while_the_thread_takes_it_up_ends(when, how):
    def stop() -> None:
        if how == "cancel":
            worker.cancel(lambda request_id: request_id == "id of one")
        else:
            ending = threading.Thread(target=worker.close, args=[0.0])
            ending.start()
            ending.join(30)

    engine = Engine(stop if when == "add" else lambda: None)
    worker = Worker(Trainer(engine, stop if when == "publish" else lambda: None))
    one = job("one")
    worker.put(one)
    worker.start()
    assert "cancelled, or its session has ended" in said(one.promise)
    worker.close(30.0)
    assert not engine.live and not worker._cancelled


def test_one_that_joins_others_and_is_cancelled_meanwhile_ends(monkeypatch):
    def stop() -> None:
        if not engine.live:
            worker.put(two)
        else:
            worker.cancel(lambda request_id: True)

    engine, two = Engine(stop), job("two")
    worker, one = Worker(Trainer(engine)), job("one")
    step = engine.step
    monkeypatch.setattr(engine, "step", lambda most: step(most) if engine.aborted else [])
    worker.put(one)
    worker.start()
    for either in (one, two):
        assert "cancelled, or its session has ended" in said(either.promise)
    worker.close(30.0)
    assert not engine.live and not worker._cancelled


def test_a_refused_request_that_was_cancelled_leaves_nothing():
    worker = Worker(Trainer(Engine(), lambda: worker.cancel(lambda request_id: True)))
    wrong = job("wrong")
    worker.put(wrong)
    worker.start()
    assert said(wrong.promise)
    worker.close(30.0)
    assert not worker._cancelled


def test_a_request_that_ends_all_others_is_answered_as_they_are():
    def stop() -> None:
        if not engine.live:
            worker.put(two)
        else:
            raise OSError("no memory")

    engine, two = Engine(stop), job("two")
    engine.step = lambda most: []
    worker, one = Worker(Trainer(engine)), job("one")
    worker.put(one)
    worker.start()
    assert said(one.promise) == said(two.promise)
    worker.close(30.0)
