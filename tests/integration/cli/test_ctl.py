"""`lockstep ctl` against a real server: its effects, its output and its exit codes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from lockstep.integration.cli import ctl
from lockstep.integration.cli.main import main
from lockstep.integration.http.edge.config import HttpConfig
from lockstep.integration.http.server import BackgroundServer, serve_in_background
from lockstep.integration.router.config import RouterConfig
from lockstep.integration.router.server import route_in_background
from lockstep.integration.service import RolloutService
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.weight_sync.digests.model_digest import model_digest

KEY = "an-admin-key"
PROMPT = list(range(40))
LONG = SamplingParams(max_new_tokens=400, ignore_eos=True)


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    for name in ctl.KEY_VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def server(service) -> Iterator[BackgroundServer]:
    with serve_in_background(service, HttpConfig(port=0, admin_api_key=KEY)) as server:
        yield server


@pytest.fixture
def run(server, capsys):
    """Make a function that runs a verb: run("pause", ...) returns exit code, standard output and standard error."""

    def run(*arguments: str, key: str | None = KEY) -> tuple[int, str, str]:
        keys = [] if key is None else ["--admin-key", key]
        code = main(["ctl", "--url", server.url, *keys, *arguments])
        return (code, *capsys.readouterr())

    return run


def test_pause_and_continue_do_what_they_say(run, service):
    code, out, _ = run("pause", "--mode", "in_place")
    assert code == 0 and "paused" in out and service.engine.pause_mode == "in_place"
    code, out, _ = run("state")
    assert code == 0 and "pause_mode" in out and "in_place" in out
    code, out, _ = run("continue")
    assert code == 0 and "continued" in out and not service.engine.is_paused


def test_a_pause_with_a_ttl_is_sent_along(run, service):
    assert run("pause", "--ttl", "600")[0] == 0
    state = json.loads(run("--json", "state")[1])
    assert 590 < state["pause_seconds_left"] <= 600 and state["pause_mode"] == "retract"


def test_json_is_one_line_for_every_verb(run, service):
    service.engine.generate([PROMPT], SamplingParams(max_new_tokens=1))
    for verb, *arguments in (
        ["health"], ["state"], ["sequences"], ["pause"], ["continue"], ["abort", "nobody"], ["abort", "--all"],
        ["checksum"], ["version"], ["version", "7"], ["pin", "--ids", "0,1,2"], ["cache"], ["flush"],
        ["release", "kv_cache"], ["resume", "kv_cache"],
    ):  # fmt: skip
        code, out, error = run("--json", verb, *arguments)
        assert (code, error, out.count("\n")) == (0, "", 1), (verb, out, error)
        json.loads(out)


def test_the_version_is_shown_and_named_and_nothing_is_aborted_by_it(run, service):
    assert "default" in run("version")[1]
    service.engine.add([1, 2, 3], LONG, rid="long")
    assert run("version", "7")[0] == 0
    assert service.engine.weight_version == "7" and service.state()["metrics"]["num_aborted"] == 0
    assert json.loads(run("--json", "version")[1]) == {"weight_version": "7"}


def test_the_checksum_is_that_of_the_weights(run, model):
    code, out, _ = run("checksum")
    assert code == 0 and model_digest(model.named_parameters()) in out


def test_a_live_request_is_listed_and_aborted_by_its_id(run, service):
    service.engine.pause_generation("in_place")
    service.engine.add([1, 2, 3], LONG, rid="long")
    assert "long" in run("sequences")[1]
    assert run("abort", "long")[0] == 0
    assert service.state()["num_waiting"] == 0


def test_blocks_are_pinned_by_prompt_shown_in_the_cache_and_unpinned_by_hash(run, service):
    service.engine.generate([PROMPT], SamplingParams(max_new_tokens=1))
    code, out, _ = run("--json", "pin", "--ids", ",".join(map(str, PROMPT)), "--owner", "me", "--ttl", "600")
    hashes = json.loads(out)["report"]["hashes"]
    assert code == 0 and len(hashes) == service.state()["num_pins"] == 2
    code, out, _ = run("cache")
    assert code == 0 and str(hashes[0]) in out and "pinned by me" in out
    # A hash may be negative; after -- it is not read as an option.
    assert run("unpin", "--owner", "me", "--", *map(str, hashes))[0] == 0
    assert service.state()["num_pins"] == 0
    assert run("pin", "--", str(hashes[0]))[0] == 0
    code, out, _ = run("flush")
    assert code == 0 and "flushed" in out and service.state()["num_pins"] == 0


def test_memory_is_released_and_resumed_by_tag(run, service):
    assert run("release", "kv_cache")[0] == 0
    assert service.engine.kv_bytes == 0
    assert run("resume")[0] == 0
    assert service.engine.kv_bytes > 0


def test_a_refusal_is_exit_code_1_with_the_engines_reason(run, service):
    service.engine.add([1, 2, 3], LONG, rid="long")
    deadline = time.monotonic() + 20
    while not service.state()["num_running"]:
        assert time.monotonic() < deadline
    service.engine.pause_generation("in_place")
    for verb in ("flush", "release"):
        code, out, error = run(verb)
        assert (code, out) == (1, "") and "1 running" in error
    code, out, error = run("--json", "flush")
    assert code == 1 and json.loads(out)["exit_code"] == 1 and "1 running" in json.loads(out)["message"]
    service.begin_weight_update(keep_running=True)
    assert run("continue")[0] == 1
    service.abort_weight_update()
    assert run("continue")[0] == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["sideways"],
        [],
        ["pause", "--mode", "sideways"],
        ["abort"],
        ["abort", "x", "--all"],
        ["pin"],
        ["pin", "--ids", "1,x"],
        ["unpin"],
        ["release", "disk"],
        ["--timeout", "0", "state"],
        ["--url", "localhost", "state"],
        ["--url", "http://127.0.0.1:x", "state"],
        ["--url", "http://[::1", "state"],
        ["--admin-key", "schlüssel", "state"],
        ["--admin-key", "a\nb", "state"],
    ],
)
def test_wrong_usage_is_exit_code_2_in_one_line(run, arguments, capsys):
    try:
        code, _, errors = run(*arguments)
    except SystemExit as ended:
        code, errors = ended.code, capsys.readouterr().err
    assert code == 2
    assert errors.startswith("lockstep: error: ") and errors.count("\n") == 1


def test_options_behind_the_verb_are_answered_with_their_place(capsys):
    with pytest.raises(SystemExit):
        main(["ctl", "state", "--url", "http://127.0.0.1:1"])
    assert "unrecognized arguments: --url http://127.0.0.1:1: options come before the verb" in capsys.readouterr().err


def test_nobody_there_is_exit_code_3(capsys):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        assert main(["ctl", "--url", url, "health"]) == 3
        assert url in capsys.readouterr().err


def test_no_answer_in_time_is_exit_code_3(capsys, monkeypatch):
    monkeypatch.setattr(ctl, "_GRACE_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert main(["ctl", "--url", url, "--timeout", "0.2", "health"]) == 3


def test_a_missing_or_wrong_key_is_exit_code_4_and_the_environment_has_the_right_one(run, service, monkeypatch):
    for key in (None, "wrong"):
        code, out, error = run("pause", key=key)
        assert (code, out) == (4, "") and "key" in error.lower()
    assert not service.engine.is_paused
    monkeypatch.setenv("LOCKSTEP_ADMIN_KEY", KEY)
    assert run("pause", key=None)[0] == 0 and service.engine.is_paused
    assert run("continue", key="wrong")[0] == 4  # an argument replaces the environment's key


def test_a_deadline_that_passes_is_a_refusal_and_the_verb_never_runs(run, service):
    entered, leave = threading.Event(), threading.Event()

    def block() -> None:
        entered.set()
        assert leave.wait(20)

    blocking = threading.Thread(target=service.engine.between_steps, args=("a long one", block))
    blocking.start()
    assert entered.wait(20)
    code, _, error = run("--timeout", "0.2", "pause")
    leave.set()
    blocking.join()
    assert code == 1 and "will not run" in error and not service.engine.is_paused


def test_the_installed_command_answers_without_torch(server):
    """The command must start quickly, because a shell waits for it."""
    script = (
        "import sys; from lockstep.integration.cli.main import main; "
        "sys.exit(main(sys.argv[1:]) or 'torch' in sys.modules)"
    )
    environment = {**os.environ, "LOCKSTEP_ADMIN_KEY": KEY}
    command = [sys.executable, "-c", script, "ctl", "--url", server.url, "state"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "num_running" in done.stdout


# -- over a router -----------------------------------------------------------------------------------------------------


@pytest.fixture
def pair(model, service, server, tmp_path) -> Iterator[tuple[list[RolloutService], list[BackgroundServer]]]:
    """Serve two engines over HTTP."""
    model.save_pretrained(tmp_path / "model")
    other = RolloutService(Engine(tmp_path / "model", EngineConfig(kv_cache="32 blocks", max_num_seqs=4)))
    with serve_in_background(other, HttpConfig(port=0, admin_api_key=KEY)) as second:
        yield [service, other], [server, second]
    other.close()


@pytest.fixture
def over(pair, tmp_path, capsys):
    """Make a function like `run`, with a router before the two engines."""
    urls = tuple(server.url for server in pair[1])
    http = HttpConfig(port=0, admin_api_key=KEY)
    with route_in_background(RouterConfig(urls, http, journal=tmp_path / "j.json", health_interval_s=0.1)) as router:

        def over(*arguments: str) -> tuple[int, str, str]:
            code = main(["ctl", "--url", router.url, "--admin-key", KEY, *arguments])
            return (code, *capsys.readouterr())

        deadline = time.monotonic() + 60
        while over("--json", "state")[1].count('"worker_id"') < 2:
            assert time.monotonic() < deadline
        yield over


def test_every_verb_goes_over_a_router_and_shows_what_each_worker_said(over, pair):
    services, servers = pair
    for service in services:
        service.engine.generate([PROMPT], SamplingParams(max_new_tokens=1))
    pinned = json.loads(over("--json", "pin", "--ids", ",".join(map(str, PROMPT)), "--owner", "me")[1])
    [hashes] = {tuple(one["body"]["report"]["hashes"]) for one in pinned["results"]}
    calls = [
        ["state"], ["sequences"], ["pause", "--mode", "in_place"], ["continue"], ["abort", "nobody"],
        ["abort", "--all"], ["checksum"], ["version"], ["version", "7"], ["pin", "--", str(hashes[0])],
        ["pin", "--ids", "0,1,2"], ["cache"], ["cache", "--ids", "0,1,2"],
        ["unpin", "--owner", "me", "--", *map(str, hashes)], ["flush"], ["release", "kv_cache"], ["resume", "kv_cache"],
    ]  # fmt: skip
    for verb, *arguments in calls:
        code, out, error = over(verb, *arguments)
        assert (code, error) == (0, ""), (verb, error)
        lines = out.splitlines()
        assert [line for line in lines if line.startswith("http")] == [server.url for server in servers], (verb, out)
        assert all(line.startswith("  ") for line in lines if not line.startswith("http")), (verb, out)
        assert '{"' not in out and "{'" not in out, (verb, out)
        code, out, error = over("--json", verb, *arguments)
        if verb != "unpin":  # these blocks are no longer pinned
            assert (code, error, out.count("\n")) == (0, "", 1), (verb, out, error)
            assert [one["worker"] for one in json.loads(out)["results"]] == [server.url for server in servers]
    assert over("health")[:2] == (0, "healthy\n")
    assert {service.engine.weight_version for service in services} == {"7"}
    digest = services[0].model_digest()
    assert over("checksum")[1].count(digest) == 2


def test_a_verb_that_some_workers_refuse_is_exit_code_5_with_each_ones_words(over, pair):
    services, servers = pair
    services[1].begin_weight_update()
    code, out, error = over("continue")
    assert (code, out) == (5, "")
    assert f"{servers[1].url}\n  failed: " in error and "session is open" in error and f"{servers[0].url}\n" in error
    code, out, _ = over("--json", "continue")
    told = json.loads(out)
    assert code == told["exit_code"] == 5 and [one["success"] for one in told["answer"]["results"]] == [True, False]
    services[1].abort_weight_update()
    assert over("continue")[0] == 0
    services[0].update_weight_version("other")
    code, _, error = over("version")
    assert code == 5 and "'other'" in error and "'default'" in error
    services[0].begin_weight_update()
    services[1].begin_weight_update()
    assert over("continue")[0] == 1  # all of them refuse
    for service in services:
        service.abort_weight_update()


def test_a_router_without_a_live_worker_is_exit_code_3(over, pair):
    urls = [server.url for server in pair[1]]
    for server in pair[1]:
        server.close()
    deadline = time.monotonic() + 60
    while over("health")[0] != 1:
        assert time.monotonic() < deadline
    code, _, error = over("pause")
    assert code == 3 and all(url in error for url in urls)


def test_the_exit_codes_are_in_the_help(capsys):
    with pytest.raises(SystemExit):
        main(["ctl", "--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert ctl.exit_codes() in told and "5 done by some of a router's workers" in told
