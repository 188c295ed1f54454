"""Tests of access: levels of paths, keys from arguments and environment, and that no key is ever shown."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import httpx
import pytest

from lockstep.integration.http.edge.auth import OPEN_PATHS, Level, check_key, level_of
from lockstep.integration.http.edge.config import HttpConfig
from lockstep.integration.http.edge.errors import HttpError
from lockstep.integration.http.server import serve_in_background
from lockstep.integration.service import RolloutService
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine

KEY, ADMIN = "plain-key-1", "admin-key-2"
OPEN = {"/", "/health", "/health_generate", "/ready", "/ping", "/metrics"}


@pytest.fixture(autouse=True)
def no_keys_around(monkeypatch):
    for name in ("LOCKSTEP_API_KEY", "LOCKSTEP_ADMIN_KEY", "SGLANG_OMNI_ADMIN_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def service(make_model):
    service = RolloutService(Engine(make_model("qwen2"), EngineConfig(kv_cache="32 blocks", max_num_seqs=4)))
    yield service
    service.close()


def test_the_page_about_security_names_all_paths_that_need_no_key():
    page = (Path(__file__).parents[4] / "SECURITY.md").read_text(encoding="utf-8")
    (sentence,) = re.findall(r"paths without a key are (.*?) only", page, re.DOTALL)
    assert set(re.findall(r"`(/[^`]*)`", sentence)) == OPEN_PATHS


def _status(config: HttpConfig, level: Level, authorization: str | None) -> int:
    try:
        check_key(config, level, authorization)
    except HttpError as refused:
        return refused.status
    return 200


@pytest.mark.parametrize(
    ("keys", "level", "none", "plain", "admin"),
    [
        ((None, None), Level.NORMAL, 200, 200, 200),
        ((None, None), Level.ADMIN, 200, 200, 200),
        ((None, None), Level.ADMIN_FORCED, 403, 403, 403),
        ((KEY, None), Level.OPEN, 200, 200, 200),
        ((KEY, None), Level.NORMAL, 401, 200, 403),
        ((KEY, None), Level.ADMIN, 401, 200, 403),
        ((KEY, None), Level.ADMIN_FORCED, 403, 403, 403),
        ((None, ADMIN), Level.NORMAL, 200, 200, 200),
        ((None, ADMIN), Level.ADMIN, 401, 403, 200),
        ((KEY, ADMIN), Level.OPEN, 200, 200, 200),
        ((KEY, ADMIN), Level.NORMAL, 401, 200, 200),
        ((KEY, ADMIN), Level.ADMIN, 401, 403, 200),
        ((KEY, ADMIN), Level.ADMIN_FORCED, 401, 403, 200),
    ],
)
def test_which_key_opens_which_level(keys, level, none, plain, admin):
    config = HttpConfig(api_key=keys[0], admin_api_key=keys[1])
    assert _status(config, level, None) == none
    assert _status(config, level, f"Bearer {KEY}") == plain
    assert _status(config, level, f"bEARER   {ADMIN} ") == admin


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer ", KEY, f"Basic {ADMIN}", f"Bearer{ADMIN}"])
def test_a_malformed_header_is_a_401_that_says_what_to_send(header):
    with pytest.raises(HttpError, match="Authorization: Bearer KEY") as caught:
        check_key(HttpConfig(admin_api_key=ADMIN), Level.ADMIN, header)
    assert (caught.value.status, caught.value.headers) == (401, {"WWW-Authenticate": "Bearer"})


@pytest.mark.parametrize("given", [ADMIN[:-1], ADMIN + "x", ADMIN.upper(), "ä\xff", "\x00"])
def test_a_key_that_is_nearly_right_is_a_403(given):
    assert _status(HttpConfig(admin_api_key=ADMIN), Level.ADMIN, f"Bearer {given}") == 403


def test_a_key_beyond_ascii_works_as_its_bytes():
    config = HttpConfig(admin_api_key="schlüssel")
    assert _status(config, Level.ADMIN, "Bearer " + "schlüssel".encode().decode("latin-1")) == 200


def test_keys_come_from_the_environment_and_arguments_win(monkeypatch):
    monkeypatch.setenv("SGLANG_OMNI_ADMIN_KEY", "omni")
    assert HttpConfig().admin_api_key == "omni"
    monkeypatch.setenv("LOCKSTEP_ADMIN_KEY", "ours")
    monkeypatch.setenv("LOCKSTEP_API_KEY", "plain")
    assert (HttpConfig().admin_api_key, HttpConfig().api_key) == ("ours", "plain")
    assert HttpConfig(admin_api_key="given").admin_api_key == "given"
    assert (HttpConfig(admin_api_key="", api_key="").admin_api_key, HttpConfig(api_key="").api_key) == (None, None)


@pytest.mark.parametrize("path", ["/pause_generation", "/abort_request", "/flush_cache", "/hicache/pin_blocks",
                                  "/weights_checker", "/get_weights_by_name", "/a/path/that/comes/later", "/health/x",
                                  "/generate/", "//generate", "/start_profile", "/lockstep/state"])  # fmt: skip
def test_what_is_not_known_to_be_harmless_is_administrative(path):
    assert level_of(path) is Level.ADMIN


def test_every_route_is_refused_without_a_key_before_its_body_is_read(service):
    config = HttpConfig(port=0, api_key=KEY, admin_api_key=ADMIN)
    with serve_in_background(service, config) as server, httpx.Client(base_url=server.url) as client:
        seen = set()
        for path, method in _operations(client):
            answer = client.request(method, path.replace("{model}", "x").replace("{verb}", "state"), content=b"{")
            seen.add((path, answer.status_code))
            if path in OPEN:
                assert answer.status_code in (200, 503), path
            else:
                assert answer.status_code == 401, path
                assert answer.headers["www-authenticate"] == "Bearer"
        assert ("/update_weights_from_disk", 401) in seen and ("/health", 200) in seen
        assert client.options("/pause_generation").status_code == 405  # not 401: preflights carry no key
        assert not service.engine.is_paused


def _operations(client: httpx.Client) -> list[tuple[str, str]]:
    described = client.get("/openapi.json", headers={"Authorization": f"Bearer {KEY}"}).json()["paths"]
    stubs = [("/update_weights_from_ipc", "POST"), ("/hicache/storage-backend", "PUT"), ("/", "GET")]
    return [(path, method.upper()) for path, methods in described.items() for method in methods] + stubs


def test_keys_appear_in_no_answer_and_no_log(service, caplog, monkeypatch):
    caplog.set_level(logging.DEBUG)
    monkeypatch.setattr("sys.argv", ["lockstep", "serve", "--api-key", KEY, f"--admin-api-key={ADMIN}", "--x", ADMIN])
    extra = {"api_key": KEY, "admin_api_key": ADMIN, "note": f"the key is {ADMIN}", "mem_fraction_static": 0.8}
    config = HttpConfig(port=0, api_key=KEY, admin_api_key=ADMIN, extra_server_args=extra)
    with serve_in_background(service, config) as server, httpx.Client(base_url=server.url) as client:
        texts = []
        for key in (KEY, ADMIN, "wrong-key"):
            for path in ("/server_info", "/get_server_info", "/model_info", "/state", "/pause_generation", "/nowhere"):
                answer = client.get(path, headers={"Authorization": f"Bearer {key}"})
                texts.append(answer.text + str(answer.headers))
        info = client.get("/server_info", headers={"Authorization": f"Bearer {KEY}"}).json()
    assert info["mem_fraction_static"] == 0.8 and "***" in info["note"] and "api_key" not in info
    assert info["launch_command"] == "lockstep serve --api-key *** --admin-api-key=*** --x ***"
    logs = [r.getMessage() for r in caplog.records if not r.name.startswith(("httpx", "httpcore"))]  # the client's own
    for text in (*texts, *logs, repr(config)):
        assert KEY not in text and ADMIN not in text


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Origin": "http://{host}"}, 200),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://127.0.0.1:1"}, 403),
        ({"Host": "evil.example:{port}"}, 403),
        ({"Host": "localhost:{port}"}, 200),
        ({"Host": "[::1]:{port}"}, 200),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Sec-Fetch-Site": "same-origin"}, 200),
        ({"Sec-Fetch-Site": "none"}, 200),
    ],
)
def test_a_web_page_of_another_site_cannot_drive_an_engine_on_loopback(service, headers, status):
    with serve_in_background(service, HttpConfig(port=0)) as server:
        host, port = server.url.removeprefix("http://"), str(server.port)
        sent = {key: value.replace("{host}", host).replace("{port}", port) for key, value in headers.items()}
        assert httpx.post(f"{server.url}/pause_generation", headers=sent).status_code == status
        assert service.engine.is_paused == (status == 200)


def test_images_of_a_web_page_cannot_act_and_open_paths_may_be_linked(service):
    with serve_in_background(service, HttpConfig(port=0)) as server:
        image = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Dest": "image", "Sec-Fetch-Mode": "no-cors"}
        for path in ("/flush_cache?timeout=604800", "/weights_checker", "/state", "/generate", "/lockstep/sequences"):
            for origin in ({}, {"Origin": "https://evil.example"}, {"Origin": server.url}):
                assert httpx.get(server.url + path, headers=image | origin).status_code == 403, path
            read = {"Origin": "https://evil.example"}  # by a browser that sends no Sec-Fetch-Site
            assert httpx.get(server.url + path, headers=read).status_code == 403, path
        assert httpx.get(server.url, headers={**image, "Sec-Fetch-Mode": "navigate"}).status_code == 200
        assert httpx.get(f"{server.url}/health", headers=image | read).status_code == 200
        own = {"Origin": server.url, "Sec-Fetch-Site": "same-origin"}
        assert httpx.get(f"{server.url}/state", headers=own).status_code == 200


@pytest.mark.parametrize(
    ("keys", "path", "status"),
    [
        ((None, ADMIN), "/state", 403),
        ((None, ADMIN), "/server_info", 403),
        ((None, ADMIN), "/health", 200),
        ((KEY, ADMIN), "/state", 200),
        ((KEY, None), "/state", 200),
        ((None, None), "/health", 403),
    ],
)
def test_a_page_whose_name_was_made_to_mean_this_machine_needs_a_key(service, keys, path, status):
    with serve_in_background(service, HttpConfig(port=0, api_key=keys[0], admin_api_key=keys[1])) as server:
        headers = {"Host": f"evil.example:{server.port}"} | ({"Authorization": f"Bearer {KEY}"} if keys[0] else {})
        assert httpx.get(server.url + path, headers=headers).status_code == status
