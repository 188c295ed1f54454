"""Tests of a trainer's module over HTTP: an update during training waits for the rollout phase, under its deadline."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lockstep.integration.push.http_target import HttpTarget
from lockstep.integration.push.pusher import WeightPusher
from lockstep.integration.service import RolloutService
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.tests.support.forked_ranks import free_port, join_group
from lockstep.tests.support.framework_sender import serialize_for_engine
from lockstep.weight_sync.deadline import Deadline
from lockstep.weight_sync.delta.encode import encode_delta
from lockstep.weight_sync.delta.stream import save_delta
from lockstep.weight_sync.digests.model_digest import model_digest
from lockstep.weight_sync.disk.folder import save_folder
from lockstep.weight_sync.transports.delta import DeltaTransport
from lockstep.weight_sync.transports.disk import DiskTransport
from lockstep.weight_sync.transports.group import DistributedTransport
from lockstep.weight_sync.transports.same_host import TensorTransport

pytestmark = pytest.mark.slow  # over real sockets

PATIENCE_S = 60.0
PROMPT = [3, 14, 15, 92, 65, 35, 89, 79]
GREEDY = SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True)
HOST = "127.0.0.1"


@pytest.fixture
def model(model) -> nn.Module:
    """Make the module that the trainer and the engine share."""
    return model.requires_grad_(False)


@pytest.fixture
def newer(model) -> nn.Module:
    """Make the weights that another client sends."""
    other, generator = copy.deepcopy(model), torch.Generator().manual_seed(5)
    for parameter in other.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)
    return other


@pytest.fixture
def service(model) -> Iterator[RolloutService]:
    service = RolloutService(Engine(model, EngineConfig(kv_cache="32 blocks", max_num_seqs=4)))
    yield service
    service.close()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as threads:
        yield threads


def named(model: nn.Module) -> list[tuple[str, Tensor]]:
    return list(model.named_parameters())


def generates(service: RolloutService, model: nn.Module) -> str:
    """Check that the engine answers as transformers does with these weights. Returns the answer's version."""
    [completion] = service.engine.generate([PROMPT], GREEDY)
    whole = model.generate(torch.tensor([PROMPT]), max_new_tokens=8, do_sample=False)[0]
    assert list(completion.token_ids) == whole[len(PROMPT) :].tolist()
    return completion.weight_version


# -- one update on each path ------------------------------------------------------------------------------------------


def by_named_tensors(old: nn.Module, new: nn.Module, folder: Path) -> tuple[str, dict[str, object]]:
    return "update_weights_from_tensor", {"serialized_named_tensors": [serialize_for_engine(named(new))]}


def by_a_flat_bucket(old: nn.Module, new: nn.Module, folder: Path) -> tuple[str, dict[str, object]]:
    payload = [serialize_for_engine(named(new), "flattened_bucket")]
    return "update_weights_from_tensor", {"serialized_named_tensors": payload, "load_format": "flattened_bucket"}


def by_a_folder(old: nn.Module, new: nn.Module, folder: Path) -> tuple[str, dict[str, object]]:
    save_folder(folder / "new", named(new), "7")
    return "update_weights_from_disk", {"model_path": str(folder / "new")}


def by_a_delta_folder(old: nn.Module, new: nn.Module, folder: Path) -> tuple[str, dict[str, object]]:
    save_delta(folder / "delta", None, "7", list(encode_delta(dict(named(old)), named(new))))
    return "update_weights_from_disk", {"model_path": str(folder / "delta")}


def by_our_own_verb(old: nn.Module, new: nn.Module, folder: Path) -> tuple[str, dict[str, object]]:
    return f"lockstep/{by_a_folder(old, new, folder)[0]}", {"model_path": str(folder / "new")}


PATHS = [by_named_tensors, by_a_flat_bucket, by_a_folder, by_a_delta_folder, by_our_own_verb]


@pytest.mark.parametrize("path", PATHS)
def test_an_update_that_comes_while_the_trainer_trains_lands_as_the_phase_opens(
    path: Callable, client, server, service, model, newer, tmp_path, threads, until
):
    verb, body = path(model, newer, tmp_path)
    before = service.model_digest()
    answer = threads.submit(client.post, f"/{verb}", json=body | {"weight_version": "7"})
    until(lambda: server.app.state.updates.age_s is not None)
    assert client.get("/state").json()["weight_version"] == "default"  # reports are answered meanwhile
    assert client.post("/pause_generation", json={"mode": "in_place"}).status_code == 200  # and commands run
    assert client.post("/continue_generation", json={}).status_code == 200
    with service.training_numerics():
        model(torch.tensor([PROMPT]))
    assert not answer.done() and service.model_digest() == before
    with service.rollout():
        said = answer.result(PATIENCE_S)
        assert said.status_code == 200, said.text
        service.continue_generation()
        assert generates(service, newer) == "7" and service.model_digest() == model_digest(newer.named_parameters())


def test_a_broadcast_waits_for_the_phase_too(client, server, service, newer, threads, until):
    port = free_port()
    joining = {"master_address": HOST, "master_port": port, "rank_offset": 1, "world_size": 2, "backend": "gloo"}
    joined = threads.submit(client.post, "/init_weights_update_group", json=joining)
    # A group is joined at once: that writes no weights.
    group = join_group(HOST, port, 0, 2, "weight_update_group", "gloo", PATIENCE_S)
    assert joined.result(PATIENCE_S).status_code == 200
    tensors = named(newer)
    plan = {
        "names": [name for name, _ in tensors], "dtypes": [str(t.dtype).removeprefix("torch.") for _, t in tensors],
        "shapes": [list(t.shape) for _, t in tensors], "weight_version": "7",
    }  # fmt: skip
    answer = threads.submit(client.post, "/update_weights_from_distributed", json=plan)
    until(lambda: server.app.state.updates.age_s is not None)

    def send() -> None:
        deadline = Deadline.after(PATIENCE_S)
        for _, tensor in tensors:
            group.finish(group.broadcast(tensor.detach().clone(), deadline), deadline)

    sending = threads.submit(send)
    before = service.model_digest()
    assert not answer.done()
    with service.rollout():
        said = answer.result(PATIENCE_S)
        assert said.status_code == 200, said.text
        sending.result(PATIENCE_S)
        assert generates(service, newer) == "7" and service.model_digest() != before
    group.destroy()


@pytest.mark.parametrize("path", PATHS)
def test_an_update_for_which_no_phase_comes_says_what_it_waited_for_and_never_runs(
    path: Callable, client, service, model, newer, tmp_path
):
    verb, body = path(model, newer, tmp_path)
    before = service.model_digest()
    said = client.post(f"/{verb}", json=body | {"weight_version": "7", "timeout_s": 0.2, "op_id": "late"})
    assert said.status_code == 408
    assert "for the rollout phase, for the module is the trainer's now" in said.json()["message"]
    with service.rollout():
        [completion] = service.engine.generate([PROMPT], GREEDY)
        assert completion.weight_version == "default"
        again = client.post(f"/{verb}", json=body | {"weight_version": "7", "timeout_s": 9, "op_id": "late"})
        assert again.status_code == 408 and service.model_digest() == before  # the same id, the same answer


# -- sessions ---------------------------------------------------------------------------------------------------------

TRANSPORTS = {
    "distributed": lambda folder: DistributedTransport(),
    "tensor": lambda folder: TensorTransport(),
    "disk": DiskTransport,
    "delta": lambda folder: DeltaTransport(TensorTransport()),
}


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_whole_session_of_a_pusher_waits_for_the_phase(
    transport: str, server, service, newer, tmp_path, threads, until
):
    target = HttpTarget(server.url)
    pusher = WeightPusher([target], TRANSPORTS[transport](tmp_path), timeout_s=PATIENCE_S)
    pushed = threads.submit(pusher.push, newer, "7")
    until(lambda: service.engine.is_paused)  # the part of the call that does not need the module
    assert not threading.Event().wait(0.2) and not pushed.done()
    with service.rollout():
        pushed.result(PATIENCE_S)
        assert generates(service, newer) == "7"
    pusher.close()
    target.close()


def test_what_belongs_to_a_session_waits_for_the_next_phase_each(client, service, newer, tmp_path, threads):
    def waits(verb: str, **body: object) -> None:
        late = client.post(f"/{verb}", json=body | {"timeout_s": 0.1})
        assert late.status_code == 408 and verb in late.json()["message"]
        answer = threads.submit(client.post, f"/{verb}", json=body)
        with service.rollout():
            said = answer.result(PATIENCE_S)
        assert said.status_code == 200, said.text

    old = service.model_digest()
    for end in ("abort_weight_update", "end_weight_update"):
        waits("begin_weight_update", weight_version="7")
        waits("update_weights_from_tensor", serialized_named_tensors=[serialize_for_engine(named(newer))])
        waits(end)
        assert (service.model_digest() == old) == (end == "abort_weight_update")
    waits("revert_weight_update")
    assert service.model_digest() == old
    waits("weights_checker", action="reset_tensors")
    assert service.model_digest() != old


def test_an_implicit_update_is_committed_by_a_continue_that_waits_for_the_phase(client, service, newer):
    with service.rollout():
        client.post("/pause_generation", json={})
        _, body = by_named_tensors(newer, newer, Path())
        assert client.post("/update_weights_from_tensor", json=body | {"weight_version": "7"}).status_code == 200
    late = client.post("/continue_generation", json={"timeout_s": 0.1})
    assert late.status_code == 408 and "continue_generation waited" in late.json()["message"]
    assert client.get("/state").json()["paused"]
    with service.rollout():
        assert client.post("/continue_generation", json={}).status_code == 200
        assert generates(service, newer) == "7"


def test_a_phase_ends_after_the_update_that_is_under_way(server, service, model, threads):
    borrowed, release = threading.Event(), threading.Event()

    def hold() -> bool:
        with service.weights_turn("an update"):
            borrowed.set()
            assert release.wait(PATIENCE_S)
            return not model.training and service.engine.model.in_rollout_phase

    model.train()
    holding = threads.submit(hold)

    def train() -> bool:
        with service.rollout():
            assert borrowed.wait(PATIENCE_S)
        return model.training

    training = threads.submit(train)
    assert borrowed.wait(PATIENCE_S) and not threading.Event().wait(0.1) and not training.done()
    release.set()
    assert holding.result(PATIENCE_S) and training.result(PATIENCE_S)
