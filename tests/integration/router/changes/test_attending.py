"""The update of a client whose connection closes is taken back, whoever else has asked for one meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from lockstep.tests.integration.http.admin.test_attendance import attend
from lockstep.tests.support.callers import submit, wait_until
from lockstep.tests.support.fake_workers import WAIT_S, Fleet, SlowAnswer, refuse

pytestmark = pytest.mark.slow

BEGIN, ABORT = "/lockstep/begin_weight_update", "/lockstep/abort_weight_update"


@contextmanager
def attending(fleet: Fleet, client: str) -> Iterator[None]:
    """Keep a connection of this client open."""
    with closing(attend(fleet.router.url, client)):
        yield


def taken_back(fleet: Fleet) -> list[list[str]]:
    """Return the names of the clients whose updates each worker was told to take back."""
    return [[body["client"] for body in worker.asked(ABORT)] for worker in fleet.workers]


def test_a_refused_begin_of_another_client_leaves_the_session_to_its_own(fleet):
    with attending(fleet, "a"):
        assert fleet.post(BEGIN, {"client": "a"}).status_code == 200
        for worker in fleet.workers:
            worker.answers[BEGIN] = refuse("a session of a is open", "SessionError")
        with attending(fleet, "b"):
            assert fleet.post(BEGIN, {"client": "b"}).status_code >= 400
        assert fleet.post(BEGIN, {"client": "b"}).status_code >= 400
    wait_until(
        lambda: taken_back(fleet) == [["a"], ["a"]], WAIT_S, "the session of the client that has left is taken back"
    )


def test_the_session_of_a_client_that_leaves_while_it_begins_is_taken_back(fleet):
    slow = SlowAnswer()
    with attending(fleet, "a"):
        fleet.workers[0].answers[BEGIN] = slow
        begun = submit(fleet.post, BEGIN, {"client": "a"})
        assert slow.entered.wait(WAIT_S)
    slow.leave.set()
    assert begun.result(WAIT_S).status_code == 200
    wait_until(lambda: taken_back(fleet) == [["a"], ["a"]], WAIT_S, "it is taken back once it has begun")
