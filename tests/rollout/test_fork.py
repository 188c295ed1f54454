"""A fork of an engine's process: the child is refused at once, and changes nothing of the parent's."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import pickle
import select
import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from lockstep.integration.push.remote_engine import VerbServer
from lockstep.integration.service import RolloutService
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.errors import ForkedProcess
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.weight_sync.manifest import Manifest, specs_of
from lockstep.weight_sync.same_host.shared_memory import SharedMemorySender

CONFIG = EngineConfig(kv_cache="64 blocks", max_num_seqs=4, max_num_batched_tokens=64)
PROMPT = [(7 * i) % 250 for i in range(40)]
LONG = SamplingParams(max_new_tokens=40, sampling_seed=3, temperature=1.0)


@pytest.fixture(autouse=True)
def _one_thread(restore_threads):
    torch.set_num_threads(1)


def in_a_fork(run: Callable[[], object], timeout_s: float = 20.0) -> object:
    """Run a function in a forked child; returns its result. Fails, and kills the child, where it hangs."""
    out, into = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.write(into, json.dumps(run()).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(into)
    try:
        ready, _, _ = select.select([out], [], [], timeout_s)
        if not ready:
            os.kill(child, signal.SIGKILL)
        assert ready, "the child hangs"
        return json.loads(os.read(out, 1 << 16))
    finally:
        os.close(out)
        os.waitpid(child, 0)


def test_a_fork_is_refused_by_every_verb_and_the_parent_goes_on_bit_by_bit(make_model) -> None:
    alone = Engine(make_model("qwen3"), CONFIG)
    [wanted] = alone.generate([PROMPT], [LONG])
    alone.close()
    service = RolloutService(Engine(make_model("qwen3"), CONFIG))
    engine = service.engine
    phase = ExitStack()
    phase.enter_context(engine.model.rollout_phase())
    engine.start()
    stream = engine.stream(PROMPT, LONG)
    chunks = [next(stream)]  # the loop runs; its locks may be held when the fork copies them

    calls: dict[str, Callable[[], object]] = {
        "generate": lambda: engine.generate([PROMPT], [LONG]),
        "agenerate": lambda: asyncio.run(engine.agenerate([PROMPT], [LONG])),
        "stream": lambda: list(engine.stream(PROMPT, LONG)),
        "the parent's stream": lambda: list(stream),
        "add": lambda: engine.add(PROMPT),
        "step": engine.step,
        "start": engine.start,
        "stop": engine.stop,
        "pause": engine.pause_generation,
        "abort": lambda: engine.abort_request(abort_all=True),
        "flush": engine.flush_cache,
        "state": engine.state,
        "service state": service.state,
        "release": service.release_memory_occupation,
        "session": service.begin_weight_update,
    }

    def child() -> dict[str, str]:
        said = {}
        for name, call in calls.items():
            try:
                call()
                said[name] = "nothing"
            except ForkedProcess as error:
                said[name] = str(error)
        engine.close()
        service.close()
        return said

    said = in_a_fork(child)
    assert isinstance(said, dict) and set(said) == set(calls)
    wrong = {name: text for name, text in said.items() if f"this engine belongs to process {os.getpid()}" not in text}
    assert wrong == {}
    chunks += stream
    assert tuple(id for chunk in chunks for id in chunk.token_ids) == wanted.token_ids
    assert tuple(p for chunk in chunks for p in chunk.logprobs) == wanted.logprobs
    engine.check_integrity()
    phase.close()
    service.close()


def test_a_fork_that_closes_what_it_holds_leaves_the_parents_files_and_sockets(make_model, tmp_path: Path) -> None:
    server = VerbServer(tmp_path / "verbs.sock", lambda verb, timeout_s, arguments: {})
    server.start()
    sender = SharedMemorySender(1 << 20, tmp_path)
    tensors = [("w", torch.arange(10.0))]
    buckets = sender.buckets(tensors, Manifest(None, specs_of(tensors)))
    next(buckets)
    before = sorted(path.name for path in tmp_path.iterdir())
    assert len(before) == 2

    def child() -> str:
        sender.close()
        server.close()
        return "closed"

    assert in_a_fork(child) == "closed"
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    buckets.close()
    sender.close()
    server.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("duplicate", [pickle.dumps, copy.copy, copy.deepcopy])
def test_engine_and_service_refuse_to_be_pickled_or_copied(make_model, duplicate: Callable[[object], object]) -> None:
    service = RolloutService(Engine(make_model("qwen2"), CONFIG))
    for each in (service, service.engine):
        with pytest.raises(TypeError, match=rf"{type(each).__name__} cannot be pickled or copied.*one in each process"):
            duplicate({"closure": [each]} if duplicate is not copy.copy else each)
    service.close()
