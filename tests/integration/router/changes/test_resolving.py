"""An operator resolves updates that are unresolved, and not one in progress unless told to."""

from __future__ import annotations

BEGIN, WRITE, END = "/begin_weight_update", "/update_weights_from_tensor", "/end_weight_update"
RESOLVE, WELL = "/weight_update_journal/resolve", {"acknowledge": True, "enable": False}


def test_an_open_session_is_not_resolved(fleet):
    assert fleet.post(BEGIN).status_code == 200
    before = fleet.http.get("/weight_update_journal").json()
    answer = fleet.post(RESOLVE, WELL)
    assert answer.status_code == 409 and answer.json()["error"]["type"] == "update_in_progress"
    assert "/abort_weight_update" in answer.json()["message"] and '"force": true' in answer.json()["message"]
    assert fleet.http.get("/weight_update_journal").json() == before and fleet.stats()["num_routable"] == 2
    assert fleet.post(WRITE).status_code == fleet.post(END).status_code == 200
    assert fleet.post(RESOLVE, WELL).json()["message"] == "nothing was unresolved"


def test_an_operator_clears_an_open_session_by_force(fleet):
    assert fleet.post(BEGIN).status_code == 200
    assert fleet.post(RESOLVE, {**WELL, "force": True}).status_code == 200
    assert fleet.http.get("/weight_update_journal").json() == {"unresolved": False, "entry": None}
    assert all(fleet.report(worker)["disabled"] for worker in fleet.workers)
