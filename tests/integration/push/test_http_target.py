"""Pushes to engines behind HTTP, over every transport and real sockets, and the verbs by name that they use."""

from __future__ import annotations

import http.server
import json
import socket
import threading
import time
from collections.abc import Iterator

import httpx
import pytest
import torch

from lockstep.integration.http.admin.verbs import arguments_of
from lockstep.integration.http.edge.config import HttpConfig
from lockstep.integration.http.server import BackgroundServer, serve_in_background
from lockstep.integration.push.failures import PushFailed
from lockstep.integration.push.http_target import HttpTarget, targets_behind
from lockstep.integration.push.local_target import VERBS
from lockstep.integration.push.pusher import WeightPusher
from lockstep.integration.router.config import RouterConfig
from lockstep.integration.router.server import BackgroundRouter, route_in_background
from lockstep.integration.service import RolloutService
from lockstep.integration.service_config import ServiceConfig
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.tests.support.callers import held_between_steps
from lockstep.tests.support.pushes import TRANSPORTS, digest_of, standing, train
from lockstep.weight_sync.target import TargetError

pytestmark = pytest.mark.slow  # many small calls over real sockets

PATIENCE = 20.0  # seconds; far more than any wait here takes
KEY = "an-admin-key"
PARAMS = SamplingParams(max_new_tokens=3, temperature=0.0, ignore_eos=True)


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
    """Serve the same two engines over HTTP, with an admin key."""
    servers = [serve_in_background(service, HttpConfig(port=0, admin_api_key=KEY)) for service in services]
    yield servers
    for server in servers:
        server.close()


@pytest.fixture
def targets(servers) -> Iterator[list[HttpTarget]]:
    targets = [HttpTarget(server.url, KEY) for server in servers]
    yield targets
    for target in targets:
        target.close()


@pytest.fixture
def make_pusher(targets, shm):
    made: list[WeightPusher] = []

    def make(transport: str, to: list | None = None, **options: object) -> WeightPusher:
        made.append(WeightPusher(to or targets, TRANSPORTS[transport](shm), **{"timeout_s": PATIENCE, **options}))
        return made[-1]

    yield make
    for pusher in made:
        pusher.close()


class Failing(HttpTarget):
    """A target whose n-th call of a verb is lost: before the call or, with `is_done`, after it."""

    def __init__(self, url: str, verb: str, nth: int = 1, *, is_done: bool = False) -> None:
        super().__init__(url, KEY, name="the failing one")
        self._verb, self._left, self._is_done = verb, nth, is_done

    def call(self, verb: str, *, timeout_s: float, **arguments: object) -> dict[str, object]:
        self._left -= verb == self._verb
        if verb != self._verb or self._left != 0:
            return super().call(verb, timeout_s=timeout_s, **arguments)
        if self._is_done:
            super().call(verb, timeout_s=timeout_s, **arguments)
        raise TargetError(self.name, verb, "lost")


# -- pushes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_transport_brings_the_weights_to_all_engines(make_pusher, services, model, transport):
    pusher = make_pusher(transport)
    for version in ("1", "2"):
        train(model)
        pushed = pusher.push(model, version)
        assert pushed.digest == digest_of(model)
        for service in services:
            assert standing(service) == (version, pushed.digest)
            assert service.engine.weight_digest == pushed.digest
            assert not service.engine.is_paused
    if transport.startswith("delta"):
        assert 0 < pushed.sent.density < 0.1
    [ids] = {tuple(service.engine.generate([[1, 2, 3]], PARAMS)[0].token_ids) for service in services}
    expected = model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=3, min_new_tokens=3, do_sample=False)
    assert list(ids) == expected[0, 3:].tolist()


@pytest.mark.parametrize("is_done", [False, True], ids=["unheard", "answer lost"])
@pytest.mark.parametrize(
    ("transport", "verb", "nth"),
    [
        ("disk", "begin_weight_update", 1),
        ("disk", "update_weights_from_disk", 1),
        ("disk", "verify_weight_update", 1),
        ("disk", "end_weight_update", 1),
        ("tensor", "update_weights_from_tensor", 3),
        ("distributed", "init_weights_update_group", 1),
        ("distributed", "update_weights_from_distributed", 1),
    ],
)
def test_where_one_engine_fails_both_keep_the_old_version_and_the_next_push_lands(
    make_pusher, services, servers, targets, model, transport, verb, nth, is_done
):
    before = [standing(service) for service in services]
    failing = Failing(servers[0].url, verb, nth, is_done=is_done)
    pusher = make_pusher(transport, [failing, targets[1]])
    train(model)
    with pytest.raises(PushFailed, match="the failing one") as failed:
        pusher.push(model, "1")
    assert failed.value.stranded == ()
    assert [standing(service) for service in services] == before
    assert not any(service.engine.is_paused for service in services)
    assert pusher.push(model, "1").digest == digest_of(model)
    assert {standing(service) for service in services} == {("1", digest_of(model))}
    failing.close()


def test_an_engine_that_is_gone_is_named_and_the_other_keeps_the_old_version(
    make_pusher, services, servers, targets, model
):
    before = standing(services[1])
    servers[0].close()
    train(model)
    with pytest.raises(PushFailed) as failed:
        make_pusher("disk").push(model, "1")
    assert set(failed.value.failures) == {targets[0].name}
    assert standing(services[1]) == before and not services[1].engine.is_paused


def test_a_model_that_does_not_fit_reaches_no_engine(make_model, make_pusher, services):
    before = [standing(service) for service in services]
    with pytest.raises(PushFailed, match=r"model\.layers\.1\."):
        make_pusher("disk").push(make_model("qwen2", num_hidden_layers=1), "1")
    assert [standing(service) for service in services] == before


# -- one target --------------------------------------------------------------------------------------------------------


def test_every_error_carries_its_class_as_the_engine_named_it(targets):
    def kind(verb: str, **arguments: object) -> str:
        with pytest.raises(TargetError) as error:
            targets[0].call(verb, timeout_s=PATIENCE, **arguments)
        assert error.value.verb == verb and error.value.message
        return error.value.kind

    assert kind("abort_weight_update") == "SessionError"
    assert kind("destroy_weights_update_group", group_name="none") == "ValueError"
    targets[0].call("begin_weight_update", timeout_s=PATIENCE)
    assert kind("continue_generation") == "SessionError"
    assert kind("verify_weight_update", digests={"no such": "00"}) == "ValueError"
    assert kind("no_such_verb") == "unknown_verb"
    assert kind("pause_generation", mode="sideways") != ""
    assert kind("pause_generation", no_such_argument=1) != ""
    targets[0].call("abort_weight_update", timeout_s=PATIENCE)  # a server waits for an open session before it ends


def test_a_key_that_is_missing_or_wrong_is_refused_by_kind(servers):
    for key, status in ((None, "unauthorized"), ("wrong", "forbidden")):
        target = HttpTarget(servers[0].url, key)
        with pytest.raises(TargetError) as error:
            target.call("state", timeout_s=PATIENCE)
        assert error.value.kind == status
        assert "wrong" not in str(error.value) and KEY not in repr(target)
        target.close()


def test_one_that_cannot_be_reached_or_does_not_answer_has_no_kind():
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        target = HttpTarget(url)
        with pytest.raises(TargetError) as refused:
            target.call("state", timeout_s=1.0)
        target.close()
    assert refused.value.kind == "" and url in str(refused.value)
    for bad in ("localhost:30000", "ftp://host", "http://"):
        with pytest.raises(ValueError, match="http://HOST:PORT"):
            HttpTarget(bad)


def test_a_target_that_was_closed_says_so_and_its_pusher_can_still_be_closed(make_pusher, targets, model):
    pusher = make_pusher("distributed")
    pusher.push(model, "1")
    for target in pusher.targets:
        target.close()
    with pytest.raises(TargetError, match="state: this target was closed"):
        pusher.targets[0].call("state", timeout_s=5.0)
    pusher.close()


def test_a_verb_whose_deadline_passes_says_so_in_the_engines_words(targets, services):
    with held_between_steps(services[0].engine), pytest.raises(TargetError) as error:
        targets[0].call("pause_generation", timeout_s=0.2, mode="in_place")
    assert error.value.kind == "DeadlineExceeded"
    assert services[0].engine.is_paused is False


# -- the verbs by name -------------------------------------------------------------------------------------------------


@pytest.fixture
def client(servers) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=servers[0].url, headers={"Authorization": f"Bearer {KEY}"}) as client:
        yield client


def test_the_same_op_id_runs_a_verb_once(client, services):
    body = {"op_id": "p1", "mode": "in_place"}
    first = client.post("/lockstep/pause_generation", json=body)
    services[0].engine.continue_generation()
    again = client.post("/lockstep/pause_generation", json=body)
    assert first.status_code == again.status_code == 200 and first.json() == again.json()
    assert services[0].engine.is_paused is False
    assert client.post("/lockstep/pause_generation", json={**body, "mode": "retract"}).status_code == 409


WRONG = [
    ({"mode": 3}, "mode"),
    ({"mode": ["retract"]}, "mode"),
    ({"timeout_s": -1}, "timeout_s"),
    ({"timeout_s": "soon"}, "timeout_s"),
    ({"op_id": ""}, "op_id"),
    ({"self": 1}, "self"),
]


@pytest.mark.parametrize(("body", "field"), WRONG)
def test_a_wrong_argument_is_a_400_that_names_it(client, body, field):
    response = client.post("/lockstep/pause_generation", json=body)
    assert response.status_code == 400
    assert response.json()["param"] == field


JUNK: list[object] = [None, -1, 2**70, 1e300, "", "x", ["x"], [[]], {"x": "00"}]


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_junk_in_any_argument_is_the_callers_mistake_and_changes_nothing(client, services, verb):
    before = standing(services[0])
    for name in arguments_of(verb).model_fields:
        for value in JUNK:
            body = {"timeout_s": 0.2, name: value}
            response = client.post(f"/lockstep/{verb}", json=body)
            assert response.status_code < 500, (body, response.text)
            if response.status_code != 200:
                assert response.json()["error"]["message"], (body, response.text)
    for verb_after, body in (("abort_weight_update", {}), ("resume_memory_occupation", {"tags": ["kv_cache"]})):
        client.post(f"/lockstep/{verb_after}", json=body)
    if verb not in ("update_weight_version", "release_memory_occupation", "weights_checker"):
        assert standing(services[0]) == before


def test_live_sequences_are_listed_with_their_tokens_and_versions(client, services):
    engine = services[0].engine
    engine.add([5, 6, 7], SamplingParams(max_new_tokens=400, ignore_eos=True), rid="long")
    deadline = time.monotonic() + PATIENCE
    while engine.live_sequences()[0].num_output_tokens < 2:
        assert time.monotonic() < deadline
    engine.pause_generation("in_place")
    [entry] = client.get("/lockstep/sequences").json()["sequences"]
    assert (entry["id"], entry["num_prompt_tokens"], entry["max_new_tokens"]) == ("long", 3, 400)
    [view] = engine.live_sequences(24)
    assert tuple(entry["newest_ids"]) == view.newest_ids and len(entry["newest_ids"]) <= 24
    assert entry["weight_versions"] == [
        {"version": "default", "digest": None, "start": 0, "end": entry["num_output_tokens"]}
    ]
    engine.abort_request(abort_all=True)


@pytest.fixture
def router(servers, tmp_path) -> Iterator[BackgroundRouter]:
    """Start a router in front of the two engines, and wait until it knows them."""
    config = RouterConfig(
        workers=tuple(server.url for server in servers),
        http=HttpConfig(port=0, admin_api_key=KEY),
        journal=tmp_path / "journal.json",
        health_interval_s=0.1,
    )
    with route_in_background(config) as router:
        deadline = time.monotonic() + PATIENCE
        while httpx.get(f"{router.url}/workers", headers=AUTHORIZATION).json()["stats"]["num_routable"] < 2:
            assert time.monotonic() < deadline
        yield router


AUTHORIZATION = {"Authorization": f"Bearer {KEY}"}


def test_a_push_to_the_workers_behind_a_router_may_use_a_process_group(router, make_pusher, services, model):
    targets = targets_behind(router.url, KEY)
    train(model)
    pushed = make_pusher("distributed", targets).push(model, "1")
    assert {standing(service) for service in services} == {("1", pushed.digest)}
    for target in targets:
        target.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_router_is_one_target_for_every_transport(router, make_pusher, services, model, transport):
    target = HttpTarget(router.url, KEY)
    pusher = make_pusher(transport, [target])
    for version in ("1", "2"):
        train(model)
        pushed = pusher.push(model, version)
        assert {standing(service) for service in services} == {(version, pushed.digest)}
    assert not any(service.engine.is_paused for service in services)
    journal = httpx.get(f"{router.url}/weight_update_journal", headers=AUTHORIZATION).json()
    assert not journal.get("unresolved") and target.call("state", timeout_s=PATIENCE)["weight_version"] == "2"
    target.close()


def test_a_group_over_a_router_gives_each_worker_its_rank_and_follows_who_comes_and_goes(
    router, make_pusher, services, servers, model
):
    target = HttpTarget(router.url, KEY)
    pusher = make_pusher("distributed", [target])
    pusher.push(model, "1")
    [name] = {name for service in services for name in service.state()["weight_groups"]}
    assert {service.groups.get(name).rank for service in services} == {1, 2}
    pusher.push(model, "2")
    assert services[0].state()["weight_groups"] == {name: "ready"}  # the same one again
    httpx.post(f"{router.url}/remove_worker", params={"url": servers[0].url}, headers=AUTHORIZATION).raise_for_status()
    train(model)
    pushed = pusher.push(model, "3")
    assert standing(services[1]) == ("3", pushed.digest) and standing(services[0])[0] == "2"
    httpx.post(f"{router.url}/workers", json={"url": servers[0].url}, headers=AUTHORIZATION).raise_for_status()
    wait_until_healthy(router, servers[0].url)
    pushed = pusher.push(model, "4")
    assert {standing(service) for service in services} == {("4", pushed.digest)}
    target.close()


def wait_until_healthy(router: BackgroundRouter, url: str) -> None:
    """Wait until the router reports the worker as healthy. Each question is a call over the network."""
    deadline = time.monotonic() + PATIENCE
    while True:
        workers = httpx.get(f"{router.url}/workers", headers=AUTHORIZATION).json()["workers"]
        if any(worker["url"] == url and worker["is_healthy"] for worker in workers):
            return
        assert time.monotonic() < deadline


def test_a_push_over_a_router_that_fails_at_one_worker_leaves_both_old(router, make_pusher, services, model):
    before = [standing(service) for service in services]
    services[1].begin_weight_update(weight_version="theirs")
    target = HttpTarget(router.url, KEY)
    pusher = make_pusher("disk", [target])
    train(model)
    with pytest.raises(PushFailed, match="already open"):
        pusher.push(model, "1")
    assert [standing(service) for service in services] == before
    # The session that the one worker has begun is given up, and that of somebody else at the other one stays open.
    assert [service.state()["weight_update"]["state"] for service in services] == ["rolled_back", "open"]
    assert not services[0].engine.is_paused
    services[1].abort_weight_update()  # it generates when its owner lets it, as after every update
    services[1].engine.continue_generation()
    assert pusher.push(model, "1").digest == digest_of(model)
    assert not any(service.engine.is_paused for service in services)
    services[0].engine.pause_generation()
    services[1].engine.continue_generation()
    with pytest.raises(TargetError, match="some are not"):
        target.call("state", timeout_s=PATIENCE)
    services[0].engine.continue_generation()  # a server waits for a paused engine before it ends
    target.close()


def test_a_routers_healthy_workers_become_targets(caplog):
    """The router's reply comes from a stub, in the documented form: the router itself has its own tests."""
    workers: list[dict] = [{"id": "a", "url": "http://127.0.0.1:1/"}, {"id": "b", "url": "http://127.0.0.1:2"}]
    dead = {"url": "http://127.0.0.1:3", "is_healthy": False, "status": "dead", "last_error": "connection refused"}

    class Stub(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status = 200 if self.path == "/workers" and self.headers["Authorization"] == f"Bearer {KEY}" else 403
            body = json.dumps({"workers": workers} if status == 200 else {"error": {"message": "no"}}).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Stub) as stub:
        thread = threading.Thread(target=stub.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{stub.server_port}"
        assert [target.name for target in targets_behind(url, KEY)] == ["http://127.0.0.1:1", "http://127.0.0.1:2"]
        with pytest.raises(TargetError, match="no"):
            targets_behind(url, "wrong")
        workers.append(dead)
        with caplog.at_level("WARNING"):
            assert len(targets_behind(url, KEY)) == 2
        assert "http://127.0.0.1:3 is dead (connection refused)" in caplog.text
        workers[:] = [dead]
        with pytest.raises(TargetError, match=r"none of its workers is healthy: http://127\.0\.0\.1:3 is dead"):
            targets_behind(url, KEY)
        workers.clear()
        with pytest.raises(TargetError, match="no workers"):
            targets_behind(url, KEY)
        stub.shutdown()
        thread.join()
    with pytest.raises(TargetError, match="no answer"):
        targets_behind(url, KEY)
