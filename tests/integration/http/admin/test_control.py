"""Tests of pause, continue, abort, flush and profiles over a socket, with requests that run."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import socket
import threading
import time

import httpx
import pytest

from lockstep.integration.http.edge.config import HttpConfig
from lockstep.integration.http.server import serve_in_background
from lockstep.integration.service import RolloutService
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.tests.support.callers import soon, submit

LONG = SamplingParams(max_new_tokens=400, temperature=0.0, ignore_eos=True)
ENDLESS = SamplingParams(max_new_tokens=4000, temperature=0.0, ignore_eos=True)
PROMPT = list(range(1, 40))


@pytest.fixture
def service(make_model, tmp_path):
    make_model("qwen2", max_position_embeddings=4096).save_pretrained(tmp_path)
    service = RolloutService(Engine(tmp_path, EngineConfig(kv_cache="1000 blocks", max_num_seqs=4)))
    yield service
    service.close()


class Asked:
    """A completion requested by a thread, and the number of its chunks so far."""

    def __init__(self, engine: Engine, prompt: list[int] = PROMPT, params: SamplingParams = LONG) -> None:
        self._stream = engine.stream(prompt, params)
        self.num_chunks, self.completion = 0, None
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        for chunk in self._stream:
            self.num_chunks += 1
            self._begun.set()
            self.completion = chunk.completion

    def begun(self) -> Asked:
        assert self._begun.wait(10)
        return self

    def result(self):
        self._thread.join(20)
        assert not self._thread.is_alive()
        return self.completion


@pytest.fixture
def expected(service):
    [completion] = service.engine.generate([PROMPT], LONG)
    service.engine.flush_cache()
    return completion


# -- pause and continue -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_paused_request_goes_on_with_the_same_tokens(client, service, expected, mode, until):
    asked = Asked(service.engine).begun()
    paused = client.post("/pause_generation", json={"mode": mode})
    assert paused.status_code == 200
    assert (paused.json()["message"], paused.json()["status"]) == ("Generation paused successfully.", "ok")
    assert (paused.json()["num_paused_requests"], paused.json()["engine_paused"]) == (1, True)
    assert paused.json()["report"]["num_retracted"] == (mode == "retract")
    num_steps = service.engine.metrics.num_steps
    waiting = Asked(service.engine, [7, 8, 9], SamplingParams(max_new_tokens=2, ignore_eos=True))
    until(lambda: client.get("/state").json()["num_waiting"] == 1 + (mode == "retract"))
    flushed = client.get("/flush_cache")
    assert flushed.status_code == (200 if mode == "retract" else 400)
    assert service.engine.metrics.num_steps == num_steps and waiting.num_chunks == 0
    continued = client.post("/continue_generation", json={})
    assert (continued.json()["message"], continued.json()["status"]) == ("Generation continued successfully.", "ok")
    assert asked.result().token_ids == expected.token_ids
    assert len(waiting.result().token_ids) == 2


def test_a_pause_without_a_mode_aborts_and_the_engine_is_idle_when_it_answers(client, service):
    asked = Asked(service.engine).begun()
    assert client.post("/pause_generation", json={}).json()["mode"] == "abort"
    state = client.get("/state").json()
    assert (state["num_running"], state["num_waiting"], state["paused"]) == (0, 0, True)
    assert asked.result().finish_reason.type == "abort"
    assert client.get("/flush_cache").status_code == 200
    assert client.post("/pause_generation", json={}).status_code == 200  # again
    assert client.post("/continue_generation", json={}).json()["report"]["was_paused"]
    assert not client.post("/continue_generation").json()["report"]["was_paused"]  # harmless, and without a body


def test_a_mode_that_there_is_not_is_a_400_and_pauses_nothing(client):
    for mode in ("freeze", "", ["abort"], {"a": 1}):
        answer = client.post("/pause_generation", json={"mode": mode})
        assert (answer.status_code, answer.json()["param"]) == (400, "mode")
    assert not client.get("/state").json()["paused"]


def test_a_null_mode_is_the_default(client):
    assert client.post("/pause_generation", json={"mode": None, "unknown": [1]}).json()["mode"] == "abort"


def test_a_pause_with_a_ttl_ends_by_itself_with_a_reason_in_the_log(client, service, caplog, until):
    caplog.set_level(logging.WARNING)
    asked = Asked(service.engine).begun()
    client.post("/pause_generation", json={"mode": "in_place", "ttl": 0.3})
    assert 0 < client.get("/state").json()["pause_seconds_left"] <= 0.3
    until(lambda: not client.get("/state").json()["paused"])
    assert asked.result().finish_reason.type == "length"
    assert "the pause expired after 0.3 s (ttl): generation continues" in caplog.text
    assert client.get("/state").json()["pause_seconds_left"] is None


def test_the_last_pause_decides_whether_it_ends_by_itself(client, service):
    client.post("/pause_generation", json={"mode": "in_place", "ttl": 0.2})
    client.post("/pause_generation", json={"mode": "in_place"})
    assert client.get("/state").json()["pause_seconds_left"] is None
    client.post("/pause_generation", json={"mode": "in_place", "ttl": 60})
    client.post("/continue_generation", json={})
    assert client.get("/state").json()["pause_seconds_left"] is None
    [lease] = [t for t in threading.enumerate() if t.name == "lockstep-pause-lease"] or [None]
    if lease is not None:  # cancelled: it ends without anything
        lease.join(5)
        assert not lease.is_alive()


def test_a_pause_that_expires_in_the_middle_of_an_update_waits_for_its_end(client, caplog, until):
    client.post("/pause_generation", json={"mode": "retract", "ttl": 2})
    first = pause_timer()
    assert client.post("/begin_weight_update", json={}).status_code == 200
    until(lambda: pause_timer() not in (None, first))  # it has fired, and waits
    assert client.get("/state").json()["paused"] and not caplog.text
    assert client.post("/end_weight_update", json={}).status_code == 200
    until(lambda: not client.get("/state").json()["paused"])


def pause_timer() -> threading.Timer | None:
    timers = [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
    found = [timer for timer in timers if timer.name == "lockstep-pause-lease" and not timer.finished.is_set()]
    return found[0] if found else None


@pytest.mark.parametrize("verb", ["begin_weight_update", "end_weight_update"])
def test_a_session_starts_the_time_of_its_clients_pause_anew(client, verb):
    client.post("/lockstep/pause_generation", json={"mode": "retract", "ttl": 60})
    if verb == "end_weight_update":
        client.post("/lockstep/begin_weight_update", json={"coverage": "partial"})
    pause_timer().join(0.2)  # so much of its time passes
    before = client.get("/state").json()["pause_seconds_left"]
    coverage = {"coverage": "partial"} if verb == "begin_weight_update" else {}
    assert client.post(f"/lockstep/{verb}", json=coverage).status_code == 200
    assert before < client.get("/state").json()["pause_seconds_left"] <= 60
    if verb == "begin_weight_update":  # a server waits for an open session before it ends
        assert client.post("/lockstep/abort_weight_update", json={}).status_code == 200


@pytest.mark.parametrize("ttl", [None, 60])
@pytest.mark.parametrize("path", ["/lockstep/pause_generation", "/pause?mode=keep&ttl=5&keeps_other=true"])
def test_a_pause_of_a_guest_leaves_the_time_of_the_pause_that_there_is(client, path, ttl):
    def guest() -> None:
        body = {"mode": "retract", "ttl": 5, "keeps_other": True} if path.startswith("/lockstep") else {}
        assert client.post(path, json=body).status_code == 200

    client.post("/pause_generation", json={"mode": "in_place", "ttl": ttl})
    guest()
    left = client.get("/state").json()["pause_seconds_left"]
    assert left is None if ttl is None else 5 < left <= 60
    client.post("/continue_generation", json={})
    guest()  # the only one: its own time counts
    assert 0 < client.get("/state").json()["pause_seconds_left"] <= 5


@pytest.mark.parametrize("ttl", [0, -1, "soon", 1e12])
def test_a_time_of_a_pause_that_is_none_is_refused_and_pauses_nothing(client, service, ttl):
    for path in ("/pause_generation", "/lockstep/pause_generation"):
        answer = client.post(path, json={"mode": "in_place", "ttl": ttl})
        assert answer.status_code == 400 and "ttl" in answer.json()["message"]
    answer = client.post(f"/pause?mode=keep&ttl={ttl}")
    assert 400 <= answer.status_code < 500 and "ttl" in answer.text
    assert not service.engine.is_paused


# -- abort ------------------------------------------------------------------------------------------------------------


def test_abort_ends_one_or_all_and_answers_nothing(client, service):
    [one] = service.engine.add(PROMPT, ENDLESS)
    others = [Asked(service.engine, params=ENDLESS).begun() for _ in range(2)]
    answer = client.post("/abort_request", json={"rid": one, "abort_message": "enough"})
    assert (answer.status_code, answer.content) == (200, b"")
    assert one not in client.get("/state").json()["running_ids"]
    assert client.post("/abort_request", json={"abort_all": True}).content == b""
    for other in others:
        reason = other.result().finish_reason
        assert (reason.type, reason.message) == ("abort", "Aborted")
    assert [c.finish_reason.message for c in service.engine.step() if c.id == one] == ["enough"]


def test_an_abort_of_nobody_is_ignored(client, service):
    asked = Asked(service.engine, params=SamplingParams(max_new_tokens=100, ignore_eos=True)).begun()
    for body in ({}, {"rid": ""}, {"rid": "nobody"}, {"rid": None, "abort_all": False}):
        answer = client.post("/abort_request", json=body)
        assert (answer.status_code, answer.content) == (200, b"")
    assert asked.result().finish_reason.type == "length"


def test_a_pause_whose_time_passes_while_another_call_holds_the_lease_never_runs(client, server, service):
    lease, held, release = service.pause_lease, threading.Event(), threading.Event()

    def hold() -> None:
        with lease.changing():
            held.set()
            release.wait(30)

    holder = submit(hold)
    assert held.wait(30)
    answer = client.post("/pause_generation", json={"mode": "in_place", "timeout_s": 0.2})
    said = re.fullmatch(
        r"another pause or its end took longer than the (\S+) s that were left", answer.json()["message"]
    )
    assert answer.status_code == 408 and said and 0 < float(said[1]) <= 0.2
    other = client.post("/lockstep/pause_generation", json={"mode": "in_place", "timeout_s": 0.2})
    assert other.status_code == 408
    release.set()
    soon(holder)
    assert not service.engine.is_paused


def test_a_pause_is_not_held_up_by_a_continue_that_waits_for_an_update(client, service, monkeypatch):
    waits, may_end = threading.Event(), threading.Event()

    def commit(timeout_s: float | None) -> None:
        waits.set()
        may_end.wait(30)

    monkeypatch.setattr(service, "commit_implicit_update", commit)
    goes_on = submit(client.post, "/continue_generation", json={})
    assert waits.wait(30)
    assert client.post("/pause_generation", json={"mode": "in_place", "timeout_s": 20}).status_code == 200
    assert service.engine.is_paused
    may_end.set()
    assert soon(goes_on).status_code == 200


# -- flush ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_flush_empties_the_cache_and_answers_text(client, service, method):
    service.engine.generate([PROMPT], SamplingParams(max_new_tokens=1))
    assert client.get("/state").json()["num_cached_blocks"] > 0
    answer = client.request(method, "/flush_cache")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain")
    assert client.get("/state").json()["num_cached_blocks"] == 0


def test_a_flush_of_a_busy_engine_fails_at_once_or_after_its_time(client, service):
    asked = Asked(service.engine).begun()
    client.post("/pause_generation", json={"mode": "in_place"})
    answer = client.get("/flush_cache")
    assert answer.status_code == 400 and answer.text.startswith("Flush cache failed. 1 running")
    started = time.monotonic()
    answer = client.get("/flush_cache", params={"timeout": 0.3})
    assert answer.status_code == 400 and answer.text.startswith("Timed out waiting for idle state.")
    assert time.monotonic() - started >= 0.3
    client.post("/continue_generation", json={})
    assert client.post("/flush_cache", params={"timeout": 15}).status_code == 200  # it ends in the meantime
    assert asked.result().finish_reason.type == "length"


def test_flushes_that_wait_share_the_wait_and_one_that_does_not_wait_is_answered_at_once(
    client, server, service, until
):
    asked = Asked(service.engine).begun()
    client.post("/pause_generation", json={"mode": "in_place"})
    waiting = [submit(client.get, "/flush_cache", params={"timeout": 30}) for _ in range(2)]
    until(lambda: server.app.state.flushes.num_waiting == 2)
    assert client.get("/flush_cache").text.startswith("Flush cache failed. 1 running")
    client.post("/abort_request", json={"abort_all": True})
    assert [soon(flush).status_code for flush in waiting] == [200, 200]
    assert asked.result().finish_reason.type == "abort"
    assert client.get("/flush_cache").status_code == 200


def test_a_flush_that_waits_ends_with_its_client(client, server, service, until):
    asked = Asked(service.engine).begun()
    client.post("/pause_generation", json={"mode": "in_place"})
    flushes = server.app.state.flushes
    with socket.create_connection(("127.0.0.1", server.port)) as page:
        page.sendall(b"GET /flush_cache?timeout=604800 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        until(lambda: flushes.num_waiting == 1)
    until(lambda: flushes.num_waiting == 0)
    client.post("/abort_request", json={"abort_all": True})
    assert asked.result().finish_reason.type == "abort"


def test_a_flush_timeout_that_is_none_is_a_400(client):
    for timeout in ("-1", "nan", "inf", "soon", "1e9"):
        answer = client.get("/flush_cache", params={"timeout": timeout})
        assert (answer.status_code, answer.json()["param"]) == (400, "timeout")


def test_what_changes_state_is_never_get(client):
    for path in ("/pause_generation", "/continue_generation", "/abort_request", "/start_profile", "/stop_profile"):
        assert client.get(path).status_code == 405


# -- profiles ---------------------------------------------------------------------------------------------------------


def test_a_profile_covers_the_loops_thread_and_is_written_when_stop_answers(client, service, tmp_path):
    body = {"output_dir": str(tmp_path / "p"), "profile_id": "run-1", "profile_prefix": "a.", "activities": ["CPU"]}
    answer = client.post("/start_profile", json=body)
    assert (answer.status_code, answer.text) == (200, "Start profiling.\n")
    again = client.post("/start_profile", json=body)
    assert again.status_code == 409
    service.engine.generate([PROMPT], SamplingParams(max_new_tokens=4))
    answer = client.post("/stop_profile")
    assert (answer.status_code, answer.text) == (200, "Stop profiling. This will take some time.\n")
    ours, file = sorted((tmp_path / "p").iterdir())
    assert {"schedule", "forward", "commit", "deliver"} <= {e.get("name") for e in json.loads(ours.read_text())}
    assert file.name.startswith("a.run-1") and answer.headers["x-profile-path"] == str(file)
    names = {event.get("name") for event in json.loads(file.read_text())["traceEvents"]}
    assert any(str(name).startswith("aten::") for name in names)
    assert client.post("/stop_profile").status_code == 400


@pytest.mark.parametrize("name", ["a\r\nSet-Cookie: x=1", "a\x00", "a\x7f", "a\u2028b"])
def test_a_profile_whose_folder_no_header_can_name_is_refused_and_does_not_begin(client, tmp_path, name):
    answer = client.post("/start_profile", json={"output_dir": f"{tmp_path}/{name}"})
    assert (answer.status_code, answer.json()["param"]) == (400, "output_dir") and "set-cookie" not in answer.headers
    assert client.post("/stop_profile").status_code == 400
    assert list(tmp_path.glob("a*")) == []


def test_a_profile_into_a_folder_that_the_environment_names_is_told_escaped(client, tmp_path, monkeypatch):
    monkeypatch.setenv("SGLANG_TORCH_PROFILER_DIR", f"{tmp_path}/a b: é")
    answer = client.post("/start_profile", json={"activities": ["CPU"]})
    assert answer.status_code == 200 and f"{tmp_path}/a b: \\xe9" in answer.headers["x-profile-path"]
    stopped = client.post("/stop_profile")
    assert stopped.status_code == 200, stopped.text
    monkeypatch.setenv("SGLANG_TORCH_PROFILER_DIR", f"{tmp_path}/a\r\nb: c")  # torch would write to another folder
    answer = client.post("/start_profile", json={"activities": ["CPU"]})
    assert answer.status_code == 400 and "control characters" in answer.text and "b" not in answer.headers
    assert client.post("/stop_profile").status_code == 400


def test_a_profile_into_what_is_no_folder_does_not_begin(client, tmp_path):
    (tmp_path / "file").touch()
    assert client.post("/start_profile", json={"output_dir": f"{tmp_path}/file"}).status_code == 400
    assert client.post("/stop_profile").status_code == 400


@pytest.mark.parametrize("overlap", [False, True])
def test_a_profile_begins_at_its_step_and_ends_after_so_many(make_model, tmp_path, overlap):
    config = EngineConfig(kv_cache="80 blocks", max_num_seqs=4, overlap=overlap, speculation="off")  # a step a token
    engine = Engine(make_model("qwen2"), config)
    service = RolloutService(engine)
    with (
        service.rollout(),
        serve_in_background(service, HttpConfig(port=0)) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        engine.generate([PROMPT], SamplingParams(max_new_tokens=3, ignore_eos=True))
        first = engine.metrics.num_steps + 4
        body = {"output_dir": str(tmp_path), "activities": ["CPU"], "start_step": first, "num_steps": 5,
                "record_shapes": True, "with_stack": True}  # fmt: skip
        assert client.post("/start_profile", json=body).text == "Start profiling.\n"
        assert client.post("/start_profile", json=body).status_code == 409  # it has not begun, and is the one
        assert list(tmp_path.iterdir()) == []
        [alone] = engine.generate([PROMPT], SamplingParams(max_new_tokens=30, ignore_eos=True, temperature=0.0))
        assert engine.metrics.num_steps >= first + 20
        answer = client.post("/stop_profile")
        assert answer.status_code == 200
        ours, file = sorted(tmp_path.iterdir())
        assert answer.headers["x-profile-path"] == str(file)
        spans = json.loads(ours.read_text())
        assert len([event for event in spans if event.get("name") == "forward"]) == 5
        events = json.loads(file.read_text())["traceEvents"]
        assert any(str(event.get("name")).startswith("aten::") for event in events)
        assert any("Input Dims" in event.get("args", {}) for event in events)
        assert client.post("/stop_profile").status_code == 400  # its file was asked for
        [again] = engine.generate([PROMPT], SamplingParams(max_new_tokens=30, ignore_eos=True, temperature=0.0))
        assert again.token_ids == alone.token_ids
        engine.stop()


def test_a_profile_that_has_not_begun_is_called_off_and_one_that_cannot_begin_harms_no_step(client, service, tmp_path):
    folder = tmp_path / "profiles"
    body = {"output_dir": str(folder), "start_step": 10**9}
    assert client.post("/start_profile", json=body).status_code == 200
    said = client.post("/stop_profile")
    assert said.status_code == 400 and "had not begun" in said.json()["message"]
    steps = service.engine.metrics.num_steps
    assert client.post("/start_profile", json=body | {"start_step": steps + 2}).status_code == 200
    folder.rmdir()  # where the engine's trace was to lie
    [completion] = service.engine.generate([PROMPT], SamplingParams(max_new_tokens=8, ignore_eos=True))
    assert len(completion.token_ids) == 8
    assert client.post("/stop_profile").status_code == 400
    assert client.post("/start_profile", json={"output_dir": str(tmp_path / "next")}).status_code == 200
    stopped = client.post("/stop_profile")
    assert stopped.status_code == 200, stopped.text


def test_a_profile_that_cannot_be_written_is_an_error_and_the_engine_goes_on(client, service, tmp_path):
    folder = tmp_path / "profiles"
    assert client.post("/start_profile", json={"output_dir": str(folder), "activities": ["CPU"]}).status_code == 200
    shutil.rmtree(folder)
    said = client.post("/stop_profile")
    assert said.status_code == 400 and "torch could not write" in said.json()["message"]
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / f"x-{os.getpid()}.engine.json").symlink_to("/dev/full")  # where the engine's trace will lie
    body = {"output_dir": str(tmp_path / "full"), "profile_id": "x", "activities": ["CPU"]}
    assert client.post("/start_profile", json=body).status_code == 200
    [completion] = service.engine.generate([PROMPT], SamplingParams(max_new_tokens=8, ignore_eos=True))
    assert len(completion.token_ids) == 8
    stopped = client.post("/stop_profile")
    assert stopped.status_code == 200, stopped.text
    assert client.get("/state").json()["trace"]["num_failures"] == 1
    assert re.search(r"lockstep:trace_failures_total\{[^}]*\} 1\.0", client.get("/metrics").text)
    assert client.get("/health").status_code == 200


def test_a_profile_that_cannot_be_is_a_400_naming_the_field(client):
    wrong = {"activities": ["RPD"], "num_steps": 0, "start_step": -1, "profile_by_stage": True, "profile_id": "../x",
             "profile_stages": ["decode"], "merge_profiles": True, "detailed_annotations": True}  # fmt: skip
    for field, value in wrong.items():
        answer = client.post("/start_profile", json={field: value})
        assert answer.status_code == 400 and field in answer.json()["message"]
    assert client.post("/stop_profile").status_code == 400
