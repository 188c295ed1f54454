"""A worker that is removed and added again is another one to the groups and updates of before."""

from __future__ import annotations

import pytest

from lockstep.tests.support.fake_workers import FakeWorker, Fleet, refuse, wait_until

BEGIN, WRITE, END = "/begin_weight_update", "/update_weights_from_tensor", "/end_weight_update"
GROUP = {"master_address": "h", "master_port": 1, "rank_offset": 1, "world_size": 3, "group_name": "g"}


def add_again(fleet: Fleet, worker: FakeWorker, is_restarted: bool) -> None:
    fleet.http.delete(f"/workers/{fleet.report(worker)['id']}").raise_for_status()
    if is_restarted:  # the router does not see it end
        worker.stop()
        worker.answers = {WRITE: refuse("there is no session", "SessionError")}
        worker.start(worker.port)
    worker.calls.clear()
    fleet.post("/workers", {"url": worker.url}).raise_for_status()
    wait_until(lambda: fleet.report(worker)["status"] == "alive", "it is back")


def test_a_group_is_not_whole_after_a_member_was_restarted_and_added_again(fleet):
    send = "/update_weights_from_distributed"
    assert fleet.post("/init_weights_update_group", GROUP).status_code == 200
    members = fleet.post("/state").json()["members"]
    add_again(fleet, fleet.workers[1], is_restarted=True)
    assert fleet.post("/state").json()["members"] != members, "a sender would take it for a member still"
    broken = fleet.post(send, {"group_name": "g"})
    assert broken.status_code == 409 and f"{fleet.workers[1].url} left it" in broken.json()["message"]
    assert not any(worker.asked(send) for worker in fleet.workers)
    assert fleet.post("/destroy_weights_update_group", {"group_name": "g"}).status_code == 200
    assert fleet.post("/init_weights_update_group", GROUP).status_code == 200
    assert fleet.post(send, {"group_name": "g"}).status_code == 200


@pytest.mark.parametrize("is_restarted", [True, False])
def test_a_session_goes_on_without_a_worker_that_was_added_again_in_the_middle_of_it(make_fleet, is_restarted):
    """Its process, though it may be the same, may have missed a call."""
    fleet = make_fleet(3)
    again = fleet.workers[1]
    assert fleet.post(BEGIN).status_code == 200
    add_again(fleet, again, is_restarted)
    assert fleet.post(WRITE).status_code == 200
    for worker in fleet.workers[::2]:
        worker.answers[END] = lambda _, one=worker: (setattr(one, "version", "2"), (200, {"success": True}))[1]
    assert fleet.post(END).status_code == 200 and not again.asked(WRITE) and not again.asked(END)
    assert fleet.http.get("/weight_update_journal").json() == {"unresolved": False, "entry": None}
    assert fleet.stats()["num_routable"] == 2 and "'2'" in fleet.report(again)["held"]["version"]
