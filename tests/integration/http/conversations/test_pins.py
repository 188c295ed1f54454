"""Tests of the pins of sessions: how long they stay, and what is reported of them."""

from __future__ import annotations

from typing import Any

import httpx

from lockstep.integration.http.edge.config import HttpConfig
from lockstep.integration.http.server import serve_in_background
from lockstep.tests.integration.http.conversations.conftest import BLOCK, Served
from lockstep.tests.support.callers import soon, submit

PROMPT = [(7 * i) % 300 for i in range(5 * BLOCK)]
FULL = len(PROMPT) // BLOCK


def reported(served: Served, id: str) -> dict[str, Any]:
    answer = served.client.get("/session_info", params={"session_id": id})
    assert answer.status_code == 200, answer.text
    return answer.json()


def flush(served: Served) -> None:
    assert served.post("/flush_cache").status_code == 200


def pinned(served: Served, id: str) -> tuple[int, int]:
    """Return the number of pinned blocks as the session reports it, and as the engine does."""
    told = reported(served, id)["num_pinned_blocks"]
    ledger = served.service.engine.parts.ledger
    served.service.engine.driver.look(ledger.pins.expire)
    return told, served.service.engine.state()["num_pinned_blocks"]


def test_pins_stay_while_a_request_is_open_for_longer_than_the_sessions_time(served, until):
    flush(served)
    id = served.open(pin=True, timeout=0.5)
    served.generate(id, PROMPT, 3)
    until(lambda: pinned(served, id) == (FULL, FULL))
    served.ok("/pause_generation", mode="retract")
    try:
        waiting = submit(served.generate, id, [9], 3)
        until(lambda: reported(served, id)["num_open_requests"] == 1)
        until(lambda: reported(served, id)["seconds_left"] == 0.0)
        assert pinned(served, id) == (FULL, FULL)
    finally:
        served.ok("/continue_generation")
    soon(waiting)
    served.ok("/close_session", session_id=id)
    until(lambda: served.service.engine.state()["num_pinned_blocks"] == 0)


def test_pins_stay_while_requests_that_are_refused_keep_a_session(served, until):
    flush(served)
    id = served.open(pin=True, timeout=2.0)
    served.generate(id, PROMPT, 3)
    until(lambda: pinned(served, id) == (FULL, FULL))
    for _ in range(3):
        until(lambda: reported(served, id)["seconds_left"] < 1.2)
        served.error("/generate", 400, input_ids=[5], session_params={"id": id, "offset": 999_999})
        assert pinned(served, id) == (FULL, FULL)
    served.ok("/close_session", session_id=id)
    until(lambda: served.service.engine.state()["num_pinned_blocks"] == 0)


def test_pins_end_with_a_session_that_expires_unasked(served, until):
    flush(served)
    id = served.open(pin=True, timeout=0.3)
    served.generate(id, PROMPT, 3)
    engine = served.service.engine
    until(lambda: engine.state()["num_pinned_blocks"] == FULL)
    until(lambda: engine.state()["num_pinned_blocks"] == 0)
    until(lambda: served.client.get("/session_info", params={"session_id": id}).status_code == 404)
    engine.check_integrity()


def test_pins_that_a_flush_has_lifted_are_not_reported_and_the_next_turns_are_all_set(served, until):
    flush(served)
    id = served.open(pin=True)
    served.generate(id, PROMPT, 3)
    until(lambda: pinned(served, id) == (FULL, FULL))
    flush(served)
    assert pinned(served, id) == (0, 0)
    served.generate(id, [9], 3)  # the same whole blocks
    until(lambda: pinned(served, id) == (FULL, FULL))
    until(lambda: not served.server.app.state.conversations.on_turn.__self__._running)
    assert pinned(served, id) == (FULL, FULL), "the end of the former pins lifts none of these"
    served.ok("/close_session", session_id=id)
    until(lambda: served.service.engine.state()["num_pinned_blocks"] == 0)


def test_a_server_that_ends_leaves_no_pins(served, service, until):
    flush(served)
    with (
        serve_in_background(service, HttpConfig(port=0)) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        other = Served(service, server, client)
        other.generate(other.open(pin=True), PROMPT, 3)
        until(lambda: service.engine.state()["num_pinned_blocks"] == FULL)
    assert service.engine.state()["num_pinned_blocks"] == 0
    service.engine.check_integrity()
