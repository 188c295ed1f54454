"""Streams through a router whose workers are killed and stopped: all end with the bits of the undisturbed run."""

from __future__ import annotations

import itertools
import json
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from lockstep.integration.http.edge.config import HttpConfig
from lockstep.integration.router.config import RouterConfig
from lockstep.integration.router.server import BackgroundRouter, route_in_background
from lockstep.tests.integration.router.test_engines import START_S, Process, num_routable, wait_until, workers
from lockstep.tests.integration.router.test_moving import assert_equal, events_of, merged
from lockstep.tests.integration.router.test_rolling_restart import folder, two_engines  # noqa: F401  a fixture

pytestmark = pytest.mark.slow

NUM_CLIENTS = 8
NUM_TOKENS = 300
PATIENCE_S = 120.0
SETTINGS = {
    "proven": {"moved_streams": "proven"},
    "trusted": {"moved_streams": "trusted"},
    "hedging": {"moved_streams": "proven", "hedge_after_s": 0.05},
}


def ask(number: int) -> tuple[str, dict]:
    """Return the path and the body of one seeded stream: the wires take turns."""
    prompt = [1 + number % 200, 2, 3 + number % 7]
    own = {"max_tokens": NUM_TOKENS, "seed": number, "n": 1 + number % 2}
    kind = number % 4
    if kind in (0, 1):
        params = {"max_new_tokens": NUM_TOKENS, "ignore_eos": True, "sampling_seed": number, "n": 1 + kind}
        body = {"input_ids": prompt, "sampling_params": params, "return_logprob": True, "speculation": False}
        return "/generate", {**body, "stream": True, "rid": f"stream-{number}"}
    if kind == 2:
        ours = {"return_token_ids": True, "logprobs": 1, "ignore_eos": True, "stream_options": {"include_usage": True}}
        return "/v1/completions", {"prompt": prompt, "stream": True, **own, **ours}
    params = {**own, "ignore_eos": True, "logprobs": 0}
    return "/inference/v1/generate", {"token_ids": prompt, "stream": True, "sampling_params": params}


def answer_of(path: str, events: list[dict]) -> dict[int, dict]:
    """Return the whole answer of each sample. Checks that /generate's events only grow."""
    if path != "/generate":
        return merged([event for event in events if event["choices"]])
    ends: dict[int, dict] = {}
    for event in events:
        before = ends.get(event.get("index", 0))
        assert before is None or event["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        assert before is None or len(event["output_ids"]) > len(before["output_ids"])
        ends[event.get("index", 0)] = event
    return ends


def stream(url: str, number: int) -> dict[int, dict]:
    path, body = ask(number)
    return answer_of(path, events_of(httpx.post(f"{url}{path}", json=body, timeout=PATIENCE_S)))


class Chaos:
    """A thread that kills or stops one of two workers, starts it again, and goes on with the other one."""

    def __init__(self, router: BackgroundRouter, engines: list[Process]) -> None:
        self.num_killed = self.num_stopped = 0
        self._router, self._engines = router, engines
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._failure: BaseException | None = None

    def __enter__(self) -> Chaos:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(START_S)
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            for engine in itertools.cycle(self._engines):
                self._wait_for_streams(engine)
                if self._over.is_set():
                    return
                self._end(engine)
        except BaseException as error:
            self._failure = error
            raise

    def _wait_for_streams(self, engine: Process) -> None:
        wait_until(lambda: num_routable(self._router.url) == 2, "both engines are routable")
        before = workers(self._router.url)[engine.url]["num_routed"]

        def is_busy() -> bool:
            now = workers(self._router.url)[engine.url]
            return now["load"] > 1 and now["num_routed"] > before + 3

        wait_until(lambda: self._over.is_set() or is_busy(), "it has streams")

    def _end(self, engine: Process) -> None:
        if self.num_killed > self.num_stopped:
            self.num_stopped += 1
            engine.signal(signal.SIGSTOP)
            wait_until(lambda: workers(self._router.url)[engine.url]["status"] == "dead", "it is seen to be stopped")
        else:
            self.num_killed += 1
        engine.kill()
        engine.start()
        engine.ready()


@pytest.fixture
def engines(folder: Path) -> Iterator[list[Process]]:  # noqa: F811
    with two_engines(folder, "kv_cache=1000 blocks", "max_num_seqs=16") as engines:
        yield engines


def check(engines: list[Process], journal: Path, num_streams: int, settings: dict[str, object]) -> Chaos:
    """Run the streams undisturbed and under chaos, and compare them."""
    config = RouterConfig(
        tuple(engine.url for engine in engines), HttpConfig(port=0), journal=journal, health_interval_s=0.1,
        health_timeout_s=0.5, dead_after=2, queue_timeout_s=START_S, affinity_slack=0, **settings,
    )  # fmt: skip
    pids = {engine.process.pid for engine in engines}
    with ThreadPoolExecutor(NUM_CLIENTS) as pool, route_in_background(config) as router:
        wait_until(lambda: num_routable(router.url) == 2, "both engines are routable")
        undisturbed = list(pool.map(lambda number: stream(router.url, number), range(num_streams)))
        with Chaos(router, engines) as chaos:
            answers = list(pool.map(lambda number: stream(router.url, number), range(num_streams)))
        pids |= {engine.process.pid for engine in engines}
        lines = httpx.get(f"{router.url}/metrics").text.splitlines()
        counts = [line for line in lines if "moved_streams_total" in line or "hedged" in line]
        assert all(worker["load"] == 0 for worker in workers(router.url).values())
    for expected, found in zip(undisturbed, answers, strict=True):
        assert expected.keys() == found.keys()
        for index, one in expected.items():
            assert_equal(found[index], one)
    print(json.dumps({"killed": chaos.num_killed, "stopped": chaos.num_stopped, "counts": counts}))
    ports = [int(engine.url.rpartition(":")[2]) for engine in engines]
    for engine in engines:
        engine.kill()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert not [name for name in os.listdir("/dev/shm") if any(str(pid) in name.split("_") for pid in pids)]
    for port in (*ports, int(router.url.rpartition(":")[2])):
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"http://127.0.0.1:{port}/health")
    return chaos


def test_sixty_streams_survive_workers_that_are_killed_and_stopped(engines, tmp_path):
    chaos = check(engines, tmp_path / "journal.json", 60, {"moved_streams": "proven"})
    assert chaos.num_killed >= 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_three_hundred_streams_survive_workers_that_are_killed_and_stopped(engines, tmp_path, settings):
    chaos = check(engines, tmp_path / "journal.json", 300, settings)
    assert chaos.num_killed >= 2 and chaos.num_stopped >= 1
