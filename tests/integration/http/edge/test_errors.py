"""Tests of what answers say that are errors: statuses, headers, shapes and words."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterator

import httpx
import pytest
import torch
from fastapi import FastAPI
from starlette.requests import ClientDisconnect

from lockstep.integration.http.admin.unsupported import router as unsupported
from lockstep.integration.http.edge.auth import Level, level_of
from lockstep.integration.http.edge.config import HttpConfig
from lockstep.integration.http.edge.errors import as_http_error, error_body, error_response, install
from lockstep.integration.http.server import serve_in_background
from lockstep.integration.service import RolloutService
from lockstep.rollout import errors as rollout_errors
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.errors import (
    BrokenLogits,
    EngineStopped,
    GrammarsUnavailable,
    LedgerError,
    NotIdle,
    RankFailure,
)
from lockstep.tests.support.random_models import random_model
from lockstep.weight_sync.errors import SessionBusy, SessionError

PATIENCE = 30.0
GENERATION = ("/v1/chat/completions", "/v1/responses", "/v1/completions", "/inference/v1/generate", "/generate")


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    torch.set_num_threads(1)
    service = RolloutService(Engine(random_model("qwen3"), EngineConfig(kv_cache=16)))
    with (
        serve_in_background(service, HttpConfig(port=0)) as server,
        httpx.Client(base_url=server.url, timeout=PATIENCE) as client,
    ):
        yield client
    service.close()


def test_a_client_that_leaves_is_no_error_of_the_server(caplog):
    app = FastAPI()
    install(app)

    @app.get("/flush_cache")
    async def wait() -> None:
        raise ClientDisconnect

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:
            return await client.get("/flush_cache")

    assert asyncio.run(ask()).status_code == 499
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("POST", "/health", "GET, HEAD"),
        ("OPTIONS", "/health", "GET, HEAD"),
        ("GET", "/generate", "POST, PUT"),
        ("PATCH", "/model_info", "GET, POST"),
        ("GET", "/v1/chat/completions", "POST"),
        ("DELETE", "/v1/models/small", "GET"),
        ("BREW", "/state", "GET"),
    ],
)
def test_a_method_that_a_path_does_not_take_is_told_all_that_it_takes(client, method, path, allowed):
    answer = client.request(method, path)
    assert answer.status_code == 405 and answer.headers["allow"] == allowed
    assert f"{path} takes {allowed}, not {method}" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "path",
    ["/v1/embeddings", "/v1/score", "/score", "/rerank",
     "/v1/rerank", "/v2/rerank", "/pooling", "/v2/embed", "/v1/audio/transcriptions"],
)  # fmt: skip
def test_an_interface_that_is_not_served_says_in_openais_shape_where_generation_is(client, path):
    for method in ("POST", "GET"):
        answer = client.request(method, path)
        error = answer.json()["error"]
        assert (answer.status_code, set(error)) == (501, {"message", "type", "param", "code"})
        assert error["code"] == "not_implemented" and all(route in error["message"] for route in GENERATION)
        assert level_of(path) is Level.NORMAL  # else a client with the API key would hear that its key is wrong
        assert answer.headers["x-should-retry"] == "false"  # else OpenAI's client calls twice more


def test_a_path_that_is_none_is_told_where_generation_is(client):
    for path in ("/nowhere", "/v1/nowhere", "/api/chat"):
        answer = client.post(path, json={})
        message = answer.json()["error"]["message"]
        assert answer.status_code == 404 and path in message and all(route in message for route in GENERATION)
    assert client.get(f"/{'x' * 9000}").json()["message"].count("x") < 500


def test_the_paths_of_generation_that_are_named_are_served(client):
    served = client.get("/openapi.json").json()["paths"]
    assert set(GENERATION) <= set(served) and not {route.path for route in unsupported.routes} & set(served)


# -- words ------------------------------------------------------------------------------------------------------------

CONDITIONS = [*vars(rollout_errors).values(), SessionError]
CONDITIONS = [one for one in CONDITIONS if isinstance(one, type) and issubclass(one, Exception)]
PYTHONS_NAME = re.compile("[A-Z][a-z]+[A-Z]")


@pytest.mark.parametrize("path", [*GENERATION, "/renew", "/open_session", "/update_weights"])
def test_errors_of_generation_have_words_of_the_wire_and_no_classes_of_python(path):
    for condition in (*CONDITIONS, ValueError, FileNotFoundError, KeyError):
        told = error_response(path, condition("it went wrong")).body.decode()
        found = re.findall(r'"(?:type|code)":"([^"]*)"', told)
        assert found and not any(map(PYTHONS_NAME.search, found)), told


def test_conditions_are_named_by_words():
    for error, code in (
        (EngineStopped("it has ended"), "engine_stopped"),
        (RankFailure("rank 1 is lost"), "rank_failure"),
        (BrokenLogits("NaN"), "broken_logits"),
        (GrammarsUnavailable("xgrammar 9 is not known here"), "grammars_unavailable"),
        (SessionBusy("an update is under way"), "session_busy"),
        (LedgerError("a sum"), "internal_error"),
        (KeyError("a bug"), "internal_error"),
        (ValueError("top_p: must be 1"), None),
    ):
        assert as_http_error(error).code == code


def test_a_call_that_another_one_kept_waiting_is_told_to_come_again():
    assert as_http_error(SessionBusy("an update is under way")).status == 409


def test_errors_of_administration_keep_the_class_that_weight_pushers_and_routers_read():
    for error in (SessionError("no session is open"), SessionBusy("an update is under way"), NotIdle("2 requests run")):
        told = error_body(as_http_error(error), openai=False)["error"]
        assert told["type"] == type(error).__name__


def test_a_generation_that_is_refused_by_the_engine_names_no_class(client):
    body = {"input_ids": [5], "sampling_params": {"logit_bias": {"999999": 1}}}
    error = client.post("/generate", json=body).json()["error"]
    assert "logit_bias" in error["message"] and (error["type"], error["code"]) == ("Bad Request", None)
