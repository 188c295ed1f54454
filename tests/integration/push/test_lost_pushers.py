"""Pushes that are refused, aborted by others, or whose trainer is killed: engines go on, and refusals have names."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from lockstep.integration.http.edge.config import HttpConfig
from lockstep.integration.http.server import BackgroundServer, serve_in_background
from lockstep.integration.push.failures import PushFailed
from lockstep.integration.push.http_target import HttpTarget
from lockstep.integration.push.pusher import WeightPusher
from lockstep.integration.router.config import RouterConfig
from lockstep.integration.router.server import BackgroundRouter, route_in_background
from lockstep.integration.service import RolloutService
from lockstep.integration.service_config import ServiceConfig
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.tests.support.callers import wait_until
from lockstep.tests.support.pushes import TRANSPORTS, digest_of, standing, train
from lockstep.weight_sync.same_host.segment import remove_stale_segments
from lockstep.weight_sync.target import TargetError

pytestmark = pytest.mark.slow  # many small calls over real sockets

LIMIT_S = 600.0  # of every wait of a push: what ends sooner does not end by it
SOON_S = 20.0  # far more than a closed connection takes to be noticed


@pytest.fixture
def services(model, shm, tmp_path) -> Iterator[list[RolloutService]]:
    """Make two engines with weights of their own."""
    model.save_pretrained(tmp_path / "model")
    config = EngineConfig(kv_cache="16 blocks", max_num_seqs=4)
    services = [
        RolloutService(Engine(tmp_path / "model", config), ServiceConfig(shared_memory_folder=shm)) for _ in range(2)
    ]
    yield services
    for service in services:
        service.close()


@pytest.fixture
def servers(services) -> Iterator[list[BackgroundServer]]:
    servers = [serve_in_background(service, HttpConfig(port=0)) for service in services]
    yield servers
    for server in servers:
        server.close()


@pytest.fixture
def router(servers, tmp_path) -> Iterator[BackgroundRouter]:
    config = RouterConfig(
        tuple(server.url for server in servers), HttpConfig(port=0), journal=tmp_path / "journal.json",
        health_interval_s=0.1,
    )  # fmt: skip
    with route_in_background(config) as router:
        wait_until(lambda: httpx.get(f"{router.url}/workers").json()["stats"]["num_routable"] == 2, SOON_S)
        yield router


@pytest.fixture
def make_pusher(shm):
    made: list[WeightPusher] = []

    def make(targets: list, transport: str = "tensor", **options: object) -> WeightPusher:
        made.append(WeightPusher(targets, TRANSPORTS[transport](shm), **{"timeout_s": LIMIT_S, **options}))
        return made[-1]

    yield make
    for pusher in made:
        pusher.close()


def generate(url: str) -> httpx.Response:
    body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 3, "ignore_eos": True}}
    return httpx.post(f"{url}/generate", json=body, timeout=SOON_S)


class Before(HttpTarget):
    """A target that calls something before its n-th call of a verb."""

    def __init__(self, url: str, verb: str, do: Callable[[], object], nth: int = 1) -> None:
        super().__init__(url)
        self._verb, self._do, self._left = verb, do, nth

    def call(self, verb: str, *, timeout_s: float, **arguments: object) -> dict[str, object]:
        self._left -= verb == self._verb
        if verb == self._verb and self._left == 0:
            self._do()
        return super().call(verb, timeout_s=timeout_s, **arguments)


class Killed(HttpTarget):
    """A target of a trainer that is killed before its n-th call of a verb, or after it: its connections close, and no
    call of it comes any more."""

    def __init__(self, url: str, verb: str, nth: int = 1, *, is_done: bool) -> None:
        super().__init__(url)
        self._verb, self._left, self._is_done = verb, nth, is_done
        self.is_killed = False

    def call(self, verb: str, *, timeout_s: float, **arguments: object) -> dict[str, object]:
        self._left -= verb == self._verb
        is_now = verb == self._verb and self._left == 0
        if is_now and self._is_done:
            super().call(verb, timeout_s=timeout_s, **arguments)
        if is_now:
            self.is_killed = True
            self.close()
        if self.is_killed:
            raise TargetError(self.name, verb, "the trainer is killed")
        return super().call(verb, timeout_s=timeout_s, **arguments)


# -- refused -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before the push", "behind its pause"])
@pytest.mark.parametrize("through", ["router", "two targets"])
def test_a_worker_that_refuses_a_push_goes_on_as_soon_as_its_own_session_ends(
    router, servers, services, model, make_pusher, through, when
):
    before = [standing(service) for service in services]

    def begin() -> None:
        services[1].begin_weight_update(weight_version="theirs")

    if when == "before the push":
        begin()
    verb, nth = ("flush_cache", 1) if when == "behind its pause" else ("none", 1)
    urls = [router.url] if through == "router" else [server.url for server in servers]
    targets = [Before(url, verb, begin if url == urls[-1] else list, nth) for url in urls]
    train(model)
    with pytest.raises(PushFailed, match=f"{servers[1].url}.*a weight-update session is already open"):
        make_pusher(targets).push(model, "1")
    assert [service.state()["weight_update"]["state"] for service in services][1] == "open"
    assert not any(service.engine.is_paused for service in services)
    assert generate(servers[0].url).json()["meta_info"]["weight_version"] == "default"
    services[1].abort_weight_update()
    assert generate(servers[1].url).json()["meta_info"]["weight_version"] == "default"
    assert [standing(service) for service in services] == before
    for target in targets:
        target.close()


def test_workers_of_which_some_were_paused_before_a_push_stay_so_and_the_others_go_on(
    router, services, model, make_pusher
):
    services[1].pause_generation("in_place")
    train(model)
    target = HttpTarget(router.url)
    make_pusher([target]).push(model, "1")
    assert [service.engine.is_paused for service in services] == [False, True]
    assert {standing(service) for service in services} == {("1", digest_of(model))}
    target.close()


# -- aborted by others -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("goes_on", [False, True], ids=["", "and continues"])
@pytest.mark.parametrize("through", ["router", "target"])
def test_a_bucket_behind_an_abort_of_somebody_else_is_refused_by_name(
    router, servers, services, model, make_pusher, through, goes_on
):
    before = [standing(service) for service in services]
    url = router.url if through == "router" else servers[0].url

    def abort() -> None:
        httpx.post(f"{url}/abort_weight_update", json={"why": "an operator"}, timeout=SOON_S).raise_for_status()
        if goes_on:
            httpx.post(f"{url}/continue_generation", json={}, timeout=SOON_S).raise_for_status()

    target = Before(url, "update_weights_from_tensor", abort, nth=2)
    train(model)
    with pytest.raises(PushFailed, match=r"weight-update session was rolled back \(an operator\)") as failed:
        make_pusher([target]).push(model, "1")
    assert failed.value.stranded == ()
    assert all(
        service.state()["weight_update"]["state"] == "rolled_back" for service in services[: 1 + (url == router.url)]
    )
    assert [standing(service) for service in services] == before
    assert not any(service.engine.is_paused for service in services)
    assert generate(url).status_code == 200
    target.close()


def test_a_push_leaves_the_session_and_the_commit_of_another_one_alone(servers, services, model, make_pusher):
    """Somebody aborts the first push, and another trainer's push comes to its commit before the first one's next
    bucket."""
    other, second = HttpTarget(servers[0].url), make_pusher([HttpTarget(servers[0].url)])
    theirs: list[str] = []

    def overtake() -> None:
        other.call("abort_weight_update", timeout_s=SOON_S)
        theirs.append(second.push(model, "theirs").digest)

    target = Before(servers[0].url, "update_weights_from_tensor", overtake, nth=2)
    train(model)
    with pytest.raises(PushFailed, match="rolled back") as failed:
        make_pusher([target]).push(model, "mine")
    assert failed.value.stranded == ()
    assert standing(services[0]) == ("theirs", *theirs)
    assert not services[0].engine.is_paused
    for one in (target, other, *second.targets):
        one.close()


# -- killed ------------------------------------------------------------------------------------------------------------

KILLS = [
    ("pause_generation", 1), ("flush_cache", 1), ("begin_weight_update", 1), ("update_weights_from_tensor", 1),
    ("update_weights_from_tensor", 3), ("verify_weight_update", 1), ("end_weight_update", 1),
    ("release_weight_undo", 1), ("continue_generation", 1),
]  # fmt: skip


@pytest.mark.parametrize("is_done", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("verb", "nth"), KILLS)
@pytest.mark.parametrize("through", ["router", "target"])
def test_engines_go_on_as_soon_as_the_connection_of_a_killed_trainer_closes(
    router, servers, services, model, make_pusher, through, verb, nth, is_done
):
    before = [standing(service) for service in services]
    target = Killed(router.url if through == "router" else servers[0].url, verb, nth, is_done=is_done)
    concerned = services if through == "router" else services[:1]
    train(model)
    has_committed = (verb, is_done) == ("end_weight_update", True) or verb in (
        "release_weight_undo", "continue_generation"
    )  # fmt: skip
    pusher = make_pusher([target])
    if has_committed and verb != "end_weight_update":
        pusher.push(model, "1")  # the failures are logged
    else:
        with pytest.raises(PushFailed, match="the trainer is killed"):
            pusher.push(model, "1")
    wait_until(lambda: not any(service.engine.is_paused for service in concerned), SOON_S)
    wait_until(lambda: all(service.state()["weight_update"]["state"] != "open" for service in concerned), SOON_S)
    expected = [("1", digest_of(model))] * len(concerned) if has_committed else before[: len(concerned)]
    assert [standing(service) for service in concerned] == expected
    assert generate(target.url).json()["meta_info"]["weight_version"] == ("1" if has_committed else "default")
    if through == "router":
        wait_until(lambda: httpx.get(f"{router.url}/weight_update_journal").json()["entry"] is None, SOON_S)


PUSHER = """
import os, signal, sys
from pathlib import Path
from transformers import AutoModelForCausalLM
from lockstep.integration.push.http_target import HttpTarget
from lockstep.integration.push.pusher import WeightPusher
from lockstep.weight_sync.transports.same_host import TensorTransport

folder, segments, *urls = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder)


def tensors():
    for index, pair in enumerate(model.named_parameters()):
        if index == 3:
            print("in the middle", flush=True)
            signal.pause()
        yield pair


from lockstep.weight_sync.manifest import specs_of
transport = TensorTransport(bucket_bytes=1 << 12, folder=segments)
pusher = WeightPusher([HttpTarget(url) for url in urls], transport, timeout_s=600.0)
pusher.push_tensors(tensors(), specs_of(model.named_parameters()), "1")
"""


def test_engines_go_on_with_the_old_weights_where_the_process_of_a_push_is_killed(
    router, servers, services, shm, tmp_path: Path
):
    before = [standing(service) for service in services]
    arguments = [sys.executable, "-c", PUSHER, str(tmp_path / "model"), str(shm), router.url]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, env={**os.environ}) as process:
        assert process.stdout is not None and process.stdout.readline() == "in the middle\n"
        assert all(service.engine.is_paused for service in services)
        process.send_signal(signal.SIGKILL)
    wait_until(lambda: not any(service.engine.is_paused for service in services), SOON_S)
    assert all(service.state()["weight_update"]["state"] == "rolled_back" for service in services)
    assert all("is gone" in str(service.state()["weight_update"]["why"]) for service in services)
    assert [standing(service) for service in services] == before
    assert generate(router.url).json()["meta_info"]["weight_version"] == "default"
    wait_until(lambda: httpx.get(f"{router.url}/weight_update_journal").json()["entry"] is None, SOON_S)
    remove_stale_segments(shm)  # as the next sender does
