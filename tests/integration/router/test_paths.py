"""The paths of a router beside a server's: none is missing, none goes to one worker that all need."""

from __future__ import annotations

import httpx
import pytest
from starlette.routing import Match

from lockstep.integration.http import app as server
from lockstep.integration.http.admin import unsupported
from lockstep.integration.http.edge.auth import level_of
from lockstep.integration.http.edge.config import HttpConfig
from lockstep.integration.http.edge.errors import HttpError, error_body, has_openai_errors, no_path
from lockstep.integration.router.app import create_app
from lockstep.integration.router.changes.journal import UpdateJournal
from lockstep.integration.router.changes.rules import ELSEWHERE
from lockstep.integration.router.config import RouterConfig
from lockstep.integration.router.fleet.roster import Roster
from lockstep.integration.router.fleet.served import ServedFile
from lockstep.tests.support.fake_workers import WAIT_S

# Pages and reports of one engine, and calls that the workers' own addresses get: its clients do not look for them here.
OF_ONE_ENGINE = {"/", "/lockstep/rollouts", "/lockstep/rollouts/data", "/get_load", "/collective_rpc",
                 "/start_draft_weight_update"}  # fmt: skip
NOT_RELAYED = ("/score", "/rerank", "/v2/rerank", "/v2/embed", "/encode", "/pooling", "/classify", "/pd_role_switch",
               "/parallelism_config", "/hicache/storage-backend", "/load_lora_adapter_from_tensors")  # fmt: skip


def test_every_path_of_a_server_is_a_path_of_a_router(tmp_path):
    journal = UpdateJournal(tmp_path / "journal.json")
    routes = create_app(RouterConfig(), journal, Roster(None, ()), ServedFile(None)).routes
    journal.close()

    def takes(path: str, method: str) -> bool:
        scope = {"type": "http", "path": path, "method": method, "root_path": ""}
        return any(route.matches(scope)[0] is Match.FULL for route in routes)

    missing = {
        route.path
        for module in server.ROUTERS
        for route in module.router.routes
        for method in route.methods - {"HEAD"}
        if not takes(route.path.replace("{verb}", "state").replace("{rest:path}", "x"), method)
    }
    assert missing == OF_ONE_ENGINE


@pytest.mark.slow
@pytest.mark.parametrize("path", NOT_RELAYED)
def test_an_interface_that_no_worker_is_asked_for_answers_as_a_server_does(fleet, path):
    for method in ("GET", "POST", "PUT", "DELETE"):
        answer = fleet.http.request(method, path)
        if path == "/hicache/storage-backend":  # refused without an admin key
            assert answer.status_code == 403
            continue
        reason = unsupported._PATHS[path]
        error = HttpError(501, reason, code="not_implemented")
        assert (answer.status_code, answer.json()) == (501, error_body(error, openai=has_openai_errors(path)))
        assert answer.headers["x-should-retry"] == "false"
    assert not any(worker.asked(path) for worker in fleet.workers)


@pytest.mark.slow
def test_an_interface_that_a_worker_may_serve_is_relayed(fleet):
    assert fleet.post("/v1/responses", {"input": "a"}).json()["text"] in {worker.url for worker in fleet.workers}


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", ["/nowhere", "/v2/nowhere", "/workers/x/nowhere", "/v1/%2e%2e/nowhere", "/" + "x" * 900]
)
def test_a_path_that_is_none_is_told_where_generation_is(fleet, path):
    answer = fleet.http.post(path, json={})
    said = answer.request.url.path
    assert answer.status_code == 404
    assert answer.json() == error_body(no_path(said), openai=has_openai_errors(said))


@pytest.mark.slow
@pytest.mark.parametrize("path", ELSEWHERE)
def test_what_changes_workers_under_a_prefix_of_generation_reaches_all_of_them(make_fleet, path):
    """Sent as generation it would load an adapter at one worker of many."""
    fleet = make_fleet(2, http=HttpConfig(port=0, api_key="user", admin_api_key="boss"))
    with httpx.Client(base_url=fleet.router.url, timeout=WAIT_S, headers={"Authorization": "Bearer user"}) as user:
        assert user.post(path, json={}).status_code == 403 and level_of(path).value == "admin"
    answer = fleet.post(path, {"lora_name": "a"})
    assert answer.status_code == 200, answer.text
    assert [worker.asked(path) for worker in fleet.workers] == [[{"lora_name": "a"}]] * 2
