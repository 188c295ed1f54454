"""Tests of the whole server: start and end, bodies, errors, deadlines and repeated calls."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref

import httpx
import pytest

from lockstep.integration.http.admin.operations import Operations, UpdateGate
from lockstep.integration.http.edge.bodies import Body, fields_of, parse_object
from lockstep.integration.http.edge.config import HttpConfig
from lockstep.integration.http.edge.errors import BadField, Busy, HttpError
from lockstep.integration.http.edge.threads import Threads
from lockstep.integration.http.server import serve_in_background
from lockstep.integration.service import RolloutService
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.control.once_per_id import OncePerId
from lockstep.rollout.engine import Engine
from lockstep.rollout.errors import DeadlineExceeded, LedgerError, OpIdTaken
from lockstep.tests.support.forked_ranks import free_port

pytestmark = pytest.mark.slow  # many small calls over real sockets


@pytest.fixture
def service(make_model):
    service = RolloutService(Engine(make_model("qwen2"), EngineConfig(kv_cache="32 blocks", max_num_seqs=4)))
    yield service
    service.close()


# -- starting and ending ----------------------------------------------------------------------------------------------


def test_the_server_drives_the_engine_and_leaves_it_as_it_was(service):
    assert not service.engine.is_started
    with serve_in_background(service, HttpConfig(port=0)) as server:
        assert service.engine.is_started
        url = server.url
        assert httpx.get(f"{url}/health").status_code == 200
    assert not service.engine.is_started
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")
    server.close()  # idempotent
    service.engine.start()
    serve_in_background(service, HttpConfig(port=0)).close()
    assert service.engine.is_started


def test_a_port_that_is_taken_is_named(service):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port}"):
            serve_in_background(service, HttpConfig(port=port))
    assert not service.engine.is_started


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "example.org", ""])
def test_a_bind_beyond_loopback_without_an_admin_key_is_refused_with_the_remedy(service, host, monkeypatch):
    for name in ("LOCKSTEP_ADMIN_KEY", "SGLANG_OMNI_ADMIN_KEY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="LOCKSTEP_ADMIN_KEY"):
        serve_in_background(service, HttpConfig(host=host, port=0, api_key="k"))
    assert not service.engine.is_started
    HttpConfig(host=host, admin_api_key="a").check_bind()


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "localhost"])
def test_a_bind_to_loopback_needs_no_key(host):
    HttpConfig(host=host).check_bind()


def test_every_wrong_setting_is_named_and_no_key_is_quoted():
    with pytest.raises(ValueError, match="port") as caught:
        HttpConfig(port=70000, api_key="a secret", max_body_bytes=0)
    for name in ("api_key", "port", "max_body_bytes"):
        assert name in str(caught.value)
    assert "secret" not in str(caught.value)
    assert "hush" not in repr(HttpConfig(api_key="hush", admin_api_key="hush2"))


def test_a_request_that_never_ends_does_not_keep_the_server_from_closing(service, until):
    server = serve_in_background(service, HttpConfig(port=0, shutdown_timeout_s=1))
    # No other member joins: without an end it would wait for the rendezvous' own deadline.
    group = {"master_address": "127.0.0.1", "master_port": free_port(), "rank_offset": 1, "world_size": 2}
    group |= {"backend": "gloo"}
    answers = []
    thread = threading.Thread(
        target=lambda: answers.append(httpx.post(f"{server.url}/init_weights_update_group", json=group, timeout=60))
    )
    thread.start()
    until(lambda: service.groups.state())
    started = time.monotonic()
    server.close()
    assert time.monotonic() - started < 10
    thread.join(10)
    assert answers[0].status_code == 503 and "the server is ending" in answers[0].json()["message"]


@pytest.mark.slow
def test_lockstep_serve_answers_and_ends_on_sigterm(make_model, tmp_path):
    make_model("qwen2").save_pretrained(tmp_path / "model")
    config = tmp_path / "serve.toml"
    config.write_text('[engine]\nkv_cache = "32 blocks"\n[http]\nport = 0\nstage = "actor"\n')
    command = [sys.executable, "-m", "lockstep.integration.cli", "serve", "--model", str(tmp_path / "model")]
    command += ["--config", str(config), "--admin-api-key", "hush-hush", "--sglang-arg", "mem_fraction_static=0.8"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ)
    try:
        lines = []
        for line in process.stderr:
            lines.append(line)
            if " at http" in line:
                break
        url = lines[-1].split()[-1]
        info = httpx.get(f"{url}/server_info").text
        assert "hush-hush" not in info and "hush-hush" not in "".join(lines)
        assert json.loads(info)["mem_fraction_static"] == 0.8
        assert httpx.post(f"{url}/pause_generation").status_code == 401
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert "leak" not in process.stderr.read()  # of objects that the server froze, which Triton's library names
    finally:
        process.kill()
        process.communicate()


# -- bodies -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"{", "not JSON"),
        (b"[1]", "must be a JSON object, not a list"),
        (b"null", "must be a JSON object, not null"),
        (b'"\xff"', "not JSON"),
        (b'{"a": NaN}', "NaN is no JSON number"),
        (b'{"a": -Infinity}', "Infinity is no JSON number"),
        (b'{"a": 1e999}', "1e999 is larger than any number can be"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not JSON"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        (b'{"a": {"b": ["\\ud800"]}}', "a: has a lone surrogate"),
        (b'{"\\uDC00": 1}', "a key: has a lone surrogate"),
        (b"\x00\x01\x02", "not JSON"),
    ],
)
def test_a_body_that_is_no_object_of_sound_values_is_a_400(body, says):
    with pytest.raises(HttpError) as caught:
        parse_object(body)
    assert caught.value.status == 400 and says in caught.value.message


def test_a_body_that_is_refused_changes_nothing(client):
    for body in (b"{", b"[]", b'{"mode": "\xff"}', b"[" * 100_000, b'{"mode": "in_place", "ttl": NaN}', b"\x00"):
        answer = client.post("/pause_generation", content=body)
        assert answer.status_code == 400 and answer.json()["error"]["message"] == answer.json()["message"]
    assert not client.get("/state").json()["paused"]


def test_escaped_pairs_of_surrogates_are_characters():
    assert parse_object(b'{"a": "\\ud83d\\ude00"}') == {"a": "\U0001f600"}
    assert parse_object(b"") == parse_object(b" \n") == {}


def test_fields_are_read_leniently_and_refused_by_name():
    class Example(Body):
        number: int = 3
        text: str = ""
        flag: bool = True

    assert fields_of(Example, {"number": "12", "text": 5, "new": object()}) == Example(number=12, text="5")
    assert fields_of(Example, {"number": None, "flag": None}) == Example()
    for field, value in {"number": "x", "text": [1], "flag": "perhaps"}.items():
        with pytest.raises(BadField) as caught:
            fields_of(Example, {field: value})
        assert (caught.value.status, caught.value.param) == (400, field) and field in caught.value.message


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_beyond_the_limit_is_a_413_and_the_server_lives_on(service, chunked):
    with serve_in_background(service, HttpConfig(port=0, max_body_bytes=1000)) as server:
        content = (b"x" * 100 for _ in range(30)) if chunked else b"x" * 3000
        answer = httpx.post(f"{server.url}/pause_generation", content=content)
        assert answer.status_code == 413 and "1000 bytes" in answer.json()["error"]["message"]
        assert httpx.post(f"{server.url}/continue_generation", content=b"{}").status_code == 200


def test_a_deadline_that_is_none_is_a_400_naming_it(client):
    for timeout_s in (0, -1, 1e300, "soon", []):
        answer = client.post("/pause_generation", json={"timeout_s": timeout_s})
        assert (answer.status_code, answer.json()["param"]) == (400, "timeout_s")


# -- errors -----------------------------------------------------------------------------------------------------------


def test_errors_have_sglangs_keys_and_under_v1_openais(client):
    answer = client.get("/nowhere")
    assert answer.status_code == 404
    assert answer.json()["object"] == "error" and answer.json()["code"] == 404 and not answer.json()["success"]
    assert answer.json()["error"]["message"] == answer.json()["message"]
    answer = client.get("/v1/models/other")
    expected = {"type": "invalid_request_error", "param": "model", "code": "model_not_found"}
    assert answer.status_code == 404
    assert answer.json() == {"error": {"message": "the model 'other' does not exist", **expected}}


@pytest.mark.parametrize(
    "path", ["/update_weights_from_ipc", "/load_lora_adapter_from_tensors", "/hicache/storage-backend"]
)
def test_what_is_not_supported_says_so(service, path):
    with serve_in_background(service, HttpConfig(port=0, admin_api_key="k")) as server:
        answer = httpx.post(f"{server.url}{path}", json={}, headers={"Authorization": "Bearer k"})
        assert answer.status_code == 501 and "not supported" in answer.json()["message"]
        assert answer.json()["error"]["type"] == "not_implemented"


def test_a_bug_of_ours_is_a_500_without_its_text(client, service, monkeypatch):
    def fail() -> None:
        raise LedgerError("block 7 was freed twice: hush")

    monkeypatch.setattr(service, "state", fail)
    answer = client.get("/server_info")
    assert answer.status_code == 500 and "LedgerError" in answer.json()["message"] and "hush" not in answer.text
    monkeypatch.undo()
    assert client.get("/server_info").status_code == 200


def test_every_operation_of_the_description_can_be_told_from_the_others(client):
    description = client.get("/openapi.json").json()
    ids = [what["operationId"] for methods in description["paths"].values() for what in methods.values()]
    assert len(ids) == len(set(ids))
    mode = description["paths"]["/pause_generation"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert mode["properties"]["mode"]["default"] == "abort"


# -- operations -------------------------------------------------------------------------------------------------------


def test_the_same_op_id_runs_once_and_its_answer_is_given_again(client, service):
    body = {"op_id": "pin-1", "block_hashes": [1], "owner": "a"}
    first = client.post("/hicache/pin_blocks", json=body)
    again = client.post("/hicache/pin_blocks", json=body | {"timeout_s": 5})
    assert first.status_code == again.status_code == 200 and first.json() == again.json()
    other = client.post("/hicache/pin_blocks", json=body | {"block_hashes": [2]})
    assert other.status_code == 409 and "stands for another operation" in other.json()["message"]
    paused = client.post("/pause_generation", json={"op_id": "p", "mode": "in_place"})
    client.post("/continue_generation", json={})
    assert client.post("/pause_generation", json={"op_id": "p", "mode": "in_place"}).json() == paused.json()
    assert not service.engine.is_paused  # the answer came again, the pause did not


def test_an_op_id_stands_for_one_call_whether_it_came_over_http_or_from_python(client, service):
    service.engine.pause_generation("in_place", op_id="x")
    answer = client.post("/continue_generation", json={"op_id": "x"})
    assert answer.status_code == 409 and "pause_generation" in answer.json()["message"]
    assert service.engine.is_paused
    client.post("/continue_generation", json={"op_id": "y"}).raise_for_status()
    with pytest.raises(OpIdTaken, match="op_id 'y' stands for another operation: /continue_generation"):
        service.engine.flush_cache(op_id="y")


def test_an_error_is_the_answer_of_its_op_id_too(client):
    body = {"op_id": "e", "group_name": "nobody"}
    first, again = (client.post("/destroy_weights_update_group", json=body) for _ in range(2))
    assert first.status_code == 400 and first.json() == again.json()


@pytest.mark.parametrize("is_wrong", [False, True])
def test_the_arguments_of_a_call_with_an_op_id_are_not_kept(client, server, until, is_wrong):
    path, body = "/hicache/pin_blocks", {"op_id": "a", "block_hashes": [1]}
    if is_wrong:
        path, body = "/destroy_weights_update_group", {"op_id": "a", "group_name": "nobody"}
    kept = []
    operations = server.app.state.operations
    run = operations.run

    class Arguments(dict):
        """Arguments that a weak reference can follow."""

    async def watched(path: str, call: object, *, arguments: dict, **options: object) -> object:
        followed = Arguments(arguments)
        kept.append(weakref.ref(followed))

        def with_arguments(seconds_left: float | None, held: Arguments = followed) -> object:
            return call(seconds_left)

        return await run(path, with_arguments, arguments=followed, **options)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(operations, "run", watched)
        assert client.post(path, json=body).status_code == (400 if is_wrong else 200)
    until(lambda: gc.collect() >= 0 and kept[0]() is None)  # the server's task ends after its answer
    assert client.post(path, json=body).status_code == (400 if is_wrong else 200)


def test_calls_of_one_op_id_that_overlap_run_once():
    async def scenario() -> tuple[list[int], int]:
        operations, runs, hold = Operations(Threads(4), OncePerId()), [], threading.Event()

        def call(seconds_left: float | None) -> int:
            runs.append(1)
            hold.wait(10)
            return len(runs)

        calls = [asyncio.ensure_future(operations.run("/x", call, op_id="a")) for _ in range(5)]
        while not runs:
            await asyncio.sleep(0)
        hold.set()
        return await asyncio.gather(*calls), len(runs)

    assert asyncio.run(scenario()) == ([1] * 5, 1)


def test_a_call_whose_deadline_passes_before_it_begins_never_runs():
    async def scenario() -> bool:
        operations, hold, ran = Operations(Threads(1), OncePerId()), threading.Event(), threading.Event()
        first = asyncio.ensure_future(operations.run("/slow", lambda _: hold.wait(10)))
        second = asyncio.ensure_future(operations.run("/late", lambda _: ran.set(), timeout_s=0.05))
        await asyncio.sleep(0.1)
        hold.set()
        await first
        with pytest.raises(DeadlineExceeded, match=r"/late did not begin within 0\.05 s and will not run"):
            await second
        return ran.is_set()

    assert not asyncio.run(scenario())


def test_a_command_that_waits_for_the_engine_in_vain_is_a_408_and_never_runs(client, service):
    engaged, release = threading.Event(), threading.Event()

    def hold() -> None:
        engaged.set()
        release.wait(10)

    holder = threading.Thread(target=service.engine.between_steps, args=("hold", hold))
    holder.start()
    engaged.wait()
    answer = client.post("/pause_generation", json={"timeout_s": 0.1, "op_id": "late"})
    assert answer.status_code == 408 and "will not run" in answer.json()["message"]
    assert client.get("/health").status_code == 200  # while the engine's lock is held
    release.set()
    holder.join()
    assert client.post("/pause_generation", json={"timeout_s": 0.1, "op_id": "late"}).status_code == 408
    assert not client.get("/state").json()["paused"]


def test_one_update_at_a_time_and_a_second_is_told_the_age_of_the_first():
    gate = UpdateGate()
    with gate.enter("update_weights_from_disk"):
        with pytest.raises(Busy, match="update_weights_from_disk") as caught, gate.enter("other"):
            pass
        assert caught.value.status == 409 and 0 <= caught.value.extra["age_s"] < 5 and gate.age_s is not None
    with gate.enter("other"):
        pass
    assert gate.age_s is None


def test_stages_select(client):
    elsewhere = client.post("/pause_generation", json={"stages": ["talker"]}).json()
    assert elsewhere["success"] and elsewhere["skipped"]
    assert not client.get("/state").json()["paused"]
    assert "skipped" not in client.post("/pause_generation", json={"stages": ["talker", "rollout"]}).json()
    assert client.get("/state").json()["paused"]
