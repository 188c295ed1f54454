"""Broadcasts that other frameworks' trainers start beside the call of an update, where the call is refused."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from lockstep.integration.bench.parts.ports import HOST
from lockstep.integration.service import RolloutService
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.errors import NotIdle
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.weight_sync.deadline import Deadline
from lockstep.weight_sync.digests.model_digest import tensor_roots
from lockstep.weight_sync.errors import DigestMismatch, TransferFailed
from lockstep.weight_sync.group.rendezvous import Rendezvous
from lockstep.weight_sync.group.weight_group import WeightGroup

PATIENCE = 20.0  # seconds; far more than any wait here takes
NORM = "model.norm.weight"


@pytest.fixture
def service(model) -> Iterator[RolloutService]:
    service = RolloutService(Engine(copy.deepcopy(model), EngineConfig(kv_cache="16 blocks", max_num_seqs=4)))
    yield service
    service.close()


@pytest.fixture
def join(service) -> Iterator[Callable[[], WeightGroup]]:
    """Return a function that joins a group "slime" of the service and this trainer, which it returns."""
    groups: list[WeightGroup] = []

    def together() -> WeightGroup:
        rendezvous = Rendezvous(HOST, 0, 0, 2, "slime", "gloo", PATIENCE)
        arguments = (HOST, rendezvous.port, 1, 2, "slime", "gloo")
        thread = threading.Thread(target=service.init_weights_update_group, args=arguments, daemon=True)
        thread.start()
        groups.append(rendezvous.join())
        thread.join(PATIENCE)
        return groups[-1]

    yield together
    for group in groups:
        group.destroy()


REFUSED = {
    "it did not pause": ({}, NotIdle),
    "an unknown tensor": ({"names": ["model.nobody"]}, ValueError),
    "a shape": ({"shapes": [[3]]}, ValueError),
    "lists of different lengths": ({"dtypes": []}, ValueError),
    "an unknown format": ({"load_format": "flat"}, ValueError),
    "a dtype that gloo cannot carry": ({"dtypes": ["float8_e4m3fn"]}, ValueError),
    "a deadline": ({"timeout_s": -1.0}, ValueError),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_the_broadcast_of_a_refused_update_is_not_taken_for_that_of_the_next_one(service, join, reason):
    norm, before = dict(service.engine.weights.resident_tensors())[NORM], service.model_digest()
    group, deadline = join(), Deadline.after(PATIENCE)
    wrong, error = REFUSED[reason]

    def update(value: float, **fields: object) -> None:
        """Call as a trainer does: the broadcast has begun."""
        sent = torch.full_like(norm, value)
        work = group.broadcast(sent, deadline)
        right = {"names": [NORM], "dtypes": ["float32"], "shapes": [list(norm.shape)], "timeout_s": PATIENCE}
        service.update_weights_from_distributed(**right | fields, group_name="slime", weight_version=f"{value:g}")
        group.finish(work, deadline)

    if error is NotIdle:
        service.engine.add([1, 2, 3], SamplingParams(max_new_tokens=50, ignore_eos=True))
        service.engine.step()
    with pytest.raises(error) as refused:
        update(1.0, **wrong)
    assert "group 'slime' is broken: destroy the group and join a new one" in refused.value.__notes__
    service.engine.abort_request(abort_all=True)
    with pytest.raises((TransferFailed, RuntimeError)):  # the trainer's own broadcast fails, or the engine refuses
        update(2.0)
    with pytest.raises(TransferFailed, match="before its broadcasts were received; destroy the group and join a new"):
        service.update_weights_from_distributed([NORM], ["float32"], [list(norm.shape)], "slime")
    assert service.model_digest() == before
    service.destroy_weights_update_group("slime")
    group = join()
    update(3.0)
    service.commit_implicit_update()
    assert service.engine.weight_version == "3" and norm[0] == 3.0


def test_tensors_that_arrived_and_differ_are_sent_again_over_the_same_group(service, join):
    norm, group, deadline = dict(service.engine.weights.resident_tensors())[NORM], join(), Deadline.after(PATIENCE)
    wanted = torch.full_like(norm, 2.0)
    roots = {NORM: tensor_roots([(NORM, wanted)])[NORM].hex()}
    service.begin_weight_update(coverage="partial")
    for sent in (wanted + 1, wanted):
        work = group.broadcast(sent, deadline)
        lists = ([NORM], ["float32"], [list(norm.shape)])
        with pytest.raises(DigestMismatch) if sent is not wanted else contextlib.nullcontext():
            service.update_weights_from_distributed(*lists, "slime", verify=roots, timeout_s=PATIENCE)
        group.finish(work, deadline)
        assert service.state()["weight_groups"] == {"slime": "ready"}
    service.end_weight_update()
    assert torch.equal(norm, wanted)
