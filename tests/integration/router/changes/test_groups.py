"""Workers that did not join a weight-update group get no requests until they are known to be well."""

from __future__ import annotations

import pytest

from lockstep.tests.support.fake_workers import FakeWorker, Fleet, refuse, wait_until

INIT, DESTROY = "/init_weights_update_group", "/destroy_weights_update_group"
GROUP = {"master_address": "h", "master_port": 1, "rank_offset": 1, "world_size": 3, "group_name": "g"}
LATE = refuse("the trainer did not come within 60 s", "TimeoutError")
HANGS = 500, {"success": False, "message": "it hangs"}


def is_held(fleet: Fleet, worker: FakeWorker) -> bool:
    return "group" in fleet.report(worker)["held"]


def join_all_but_one(fleet: Fleet, name: str = "g") -> FakeWorker:
    """Init a group that the second worker refuses to join. Returns it."""
    out = fleet.workers[1]
    out.answers[INIT] = LATE
    assert fleet.post(INIT, {**GROUP, "group_name": name}).status_code == 502
    del out.answers[INIT]
    assert is_held(fleet, out) and fleet.report(fleet.workers[0])["routable"]
    return out


@pytest.mark.parametrize("answer", [LATE, HANGS])
def test_a_group_that_no_worker_joined_holds_none(fleet, answer):
    for worker in fleet.workers:
        worker.answers[INIT] = answer
    assert fleet.post(INIT, GROUP).status_code >= 400
    assert fleet.stats()["num_routable"] == 2
    for worker in fleet.workers:
        del worker.answers[INIT]
    assert fleet.post(INIT, GROUP).status_code == 200


def test_a_worker_that_joins_a_group_serves_again(fleet):
    out = join_all_but_one(fleet)
    assert fleet.post(INIT, GROUP).status_code == 200
    assert fleet.report(out)["routable"]


def test_workers_that_did_not_join_a_group_serve_again_when_it_is_destroyed(fleet):
    out = join_all_but_one(fleet)
    assert fleet.post(DESTROY, {"group_name": "other"}).status_code == 200 and is_held(fleet, out)
    out.answers[DESTROY] = HANGS
    assert fleet.post(DESTROY, {"group_name": "g"}).status_code == 502 and is_held(fleet, out)
    out.answers[DESTROY] = refuse("there is no group 'g'")
    assert fleet.post(DESTROY, {"group_name": "g"}).status_code == 502
    assert fleet.report(out)["routable"]


def test_a_worker_that_did_not_join_two_groups_serves_again_when_both_are_destroyed(fleet):
    out = join_all_but_one(fleet, "g")
    join_all_but_one(fleet, "h")
    assert fleet.post(DESTROY, {"group_name": "h"}).status_code == 200 and is_held(fleet, out)
    assert fleet.post(DESTROY, {"group_name": "g"}).status_code == 200 and fleet.report(out)["routable"]


@pytest.mark.parametrize("is_seen", [True, False])
def test_another_process_serves_though_the_one_before_did_not_join_a_group(fleet, is_seen):
    out = join_all_but_one(fleet)
    before = out.info["startup_time"]
    if is_seen:
        out.stop()
        wait_until(lambda: fleet.report(out)["status"] == "dead", "it is dead")
        out.start(out.port)
    else:  # between two probes
        out.info = {**out.info, "startup_time": before + 1}
        out.version = "2"
        wait_until(lambda: fleet.report(out)["num_deaths"] == 1, "it is seen to be another one")
    wait_until(lambda: fleet.report(out)["status"] == "alive" and not is_held(fleet, out), "it serves")


def test_a_worker_that_hung_and_is_the_same_process_stays_out(make_fleet):
    fleet = make_fleet(2)
    out = join_all_but_one(fleet)
    out.is_loading = True
    wait_until(lambda: fleet.report(out)["status"] == "dead", "it is dead")
    out.is_loading = False
    wait_until(lambda: fleet.report(out)["status"] == "alive", "it is back")
    assert is_held(fleet, out)
