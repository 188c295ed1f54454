"""Updates while requests run: refused, or with a remedy that was asked for."""

from __future__ import annotations

from functools import partial

import pytest
from safetensors.torch import save_file

from lockstep.integration.service import RolloutService
from lockstep.rollout.errors import NotIdle
from lockstep.tests.integration.weights.sessions.callers import (
    LONG,
    NORM,
    PROMPT,
    answer,
    digest_of,
    greedy,
    named,
    standing,
)


@pytest.fixture
def busy(service) -> RolloutService:
    service.engine.add(PROMPT, LONG, rid="long")
    for _ in range(3):
        service.engine.step()
    assert service.state()["num_running"] == 1
    return service


def drive(service: RolloutService):
    done = []
    while not done:
        done = service.engine.step()
    return done[0]


@pytest.mark.parametrize("explicit", [False, True])
def test_an_update_is_refused_while_requests_run_and_names_the_remedies(busy, newer, explicit):
    before = standing(busy)
    update = busy.begin_weight_update if explicit else partial(busy.update_weights_from_named_tensors, named(newer))
    with pytest.raises(NotIdle, match=r"1 requests are running.*abort_all_requests.*retract"):
        update()
    assert standing(busy) == before and busy.state()["num_running"] == 1
    assert busy.state()["weight_update"]["state"] == "idle"
    assert drive(busy).weight_version == "default"


def test_a_refused_begin_leaves_the_last_commit_revertible(service, newer):
    service.update_weights_from_named_tensors(named(newer), weight_version="5")
    service.engine.add(PROMPT, LONG)
    service.engine.step()
    with pytest.raises(NotIdle):
        service.begin_weight_update()
    service.engine.abort_request(abort_all=True)
    service.engine.step()
    assert service.revert_weight_update() == "default"


def test_an_update_may_abort_everything(busy, newer):
    busy.update_weights_from_named_tensors(named(newer), weight_version="5", abort_all_requests=True)
    [aborted] = busy.engine.step()
    assert aborted.finish_reason.type == "abort" and "weight update" in aborted.finish_reason.message
    assert not busy.engine.is_paused
    assert answer(busy) == greedy(newer)


@pytest.mark.parametrize("kind", ["none", "part"])
def test_a_folder_that_cannot_be_loaded_aborts_nothing(busy, newer, tmp_path, kind):
    folder = tmp_path / "folder"
    if kind == "part":
        folder.mkdir()
        save_file({NORM: dict(named(newer))[NORM]}, folder / "model.safetensors")
    before = standing(busy)
    with pytest.raises(ValueError, match="is not a folder" if kind == "none" else "lacks"):
        busy.update_weights_from_disk(folder, abort_all_requests=True)
    assert standing(busy) == before and busy.state()["num_running"] == 1
    assert drive(busy).finish_reason.type == "length"


def test_retracted_requests_go_on_with_the_new_weights_and_stay_paused_until_then(busy, newer):
    busy.engine.pause_generation("retract")
    busy.update_weights_from_named_tensors(named(newer), weight_version="5")
    assert busy.engine.pause_mode == "retract" and busy.state()["weight_update"]["state"] == "open"
    assert busy.engine.step() == []
    busy.continue_generation()
    completion = drive(busy)
    assert [span.version for span in completion.weight_versions] == ["default", "5"]
    assert completion.num_completion_tokens == 60


@pytest.mark.parametrize("explicit", [False, True])
def test_paused_in_place_requests_go_on_only_where_that_was_asked_for(busy, newer, explicit):
    busy.engine.pause_generation("in_place")
    with pytest.raises(NotIdle, match="keep_running"):
        busy.update_weights_from_named_tensors(named(newer))
    if explicit:
        report = busy.begin_weight_update(weight_version="5", keep_running=True)
        assert (report.num_running, report.num_aborted) == (1, 0)
        busy.update_weights_from_named_tensors(named(newer))
        busy.end_weight_update()
    else:
        busy.update_weights_from_named_tensors(named(newer), weight_version="5", keep_running=True)
    assert busy.engine.pause_mode == "in_place"
    busy.continue_generation()
    spans = drive(busy).weight_versions
    found = [(span.version, span.digest, span.start, span.end) for span in spans]
    assert found == [("default", None, 0, 3), ("5", digest_of(newer), 3, 60)]


@pytest.mark.parametrize("keep_running", [True, False])
def test_requests_that_went_on_with_a_commit_go_on_with_its_revert(busy, newer, keep_running):
    busy.engine.pause_generation("in_place" if keep_running else "retract")
    busy.begin_weight_update(weight_version="5", keep_running=keep_running)
    busy.update_weights_from_named_tensors(named(newer))
    busy.end_weight_update()
    if keep_running:
        assert busy.revert_weight_update() == "default"
    else:
        busy.continue_generation()
        busy.engine.step()
        busy.engine.pause_generation("in_place")
        with pytest.raises(NotIdle, match="keep_running"):
            busy.revert_weight_update()
        return
    busy.continue_generation()
    assert [span.version for span in drive(busy).weight_versions] == ["default"]
