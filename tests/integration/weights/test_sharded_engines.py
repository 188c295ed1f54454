"""Engines of several ranks get new weights by every path: all ranks have them, or all have the old ones."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from transformers import PreTrainedModel

from lockstep.integration.push.adapters.trainer_tensors import trainer_tensors
from lockstep.integration.push.failures import PushFailed
from lockstep.integration.push.local_target import LocalTarget
from lockstep.integration.push.pusher import WeightPusher
from lockstep.integration.service import RolloutService
from lockstep.integration.weights import sources
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.tests.support.callers import soon, submit, wait_until
from lockstep.tests.support.random_models import with_router_biases
from lockstep.weight_sync.delta.encode import encode_delta
from lockstep.weight_sync.delta.stream import save_delta
from lockstep.weight_sync.digests.model_digest import model_digest, tensor_roots
from lockstep.weight_sync.disk.folder import save_folder
from lockstep.weight_sync.errors import DigestMismatch, WeightSyncError
from lockstep.weight_sync.manifest import Manifest, specs_of
from lockstep.weight_sync.same_host.shared_memory import SharedMemorySender
from lockstep.weight_sync.transaction.lease import LEASE_THREAD
from lockstep.weight_sync.transports.delta import DeltaTransport
from lockstep.weight_sync.transports.disk import DiskTransport
from lockstep.weight_sync.transports.group import DistributedTransport
from lockstep.weight_sync.transports.same_host import TensorTransport

MakeModel = Callable[..., PreTrainedModel]
RunWorld = Callable[..., list[object]]
PROMPTS = [[1, 2, 3, 4, 5], [7, 8, 9], list(range(30, 60))]
GREEDY = SamplingParams(max_new_tokens=6, temperature=0.0, ignore_eos=True)
PATIENCE = 60.0
LAYOUTS = [
    pytest.param("qwen2", 2, 1, id="qwen2-tp2"),  # tied, and more heads than KV heads
    pytest.param("qwen2", 1, 2, id="qwen2-pp2", marks=pytest.mark.slow),
    pytest.param("qwen3_moe", 2, 2, id="experts-tp2-pp2", marks=pytest.mark.slow),
    pytest.param("qwen2", 4, 1, id="qwen2-tp4", marks=pytest.mark.slow),  # two KV heads, each on two ranks
    pytest.param("llama", 2, 2, id="llama-tp2-pp2", marks=pytest.mark.slow),
]


def make_service(model: PreTrainedModel, tp: int, pp: int) -> RolloutService:
    config = EngineConfig(
        tp=tp, pp=pp, k_blocks=4, kv_cache="64 blocks", max_num_seqs=4, rank_timeout_s=PATIENCE
    )  # fmt: skip
    return RolloutService(Engine(model, config))


def later(model: PreTrainedModel, step: int, density: float = 1.0) -> PreTrainedModel:
    """Make the trainer's model some steps later."""
    newer, generator = copy.deepcopy(model), torch.Generator().manual_seed(step)
    with torch.no_grad():
        for parameter in newer.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.1 * parameter.std().nan_to_num(0.1)
            parameter += noise * (torch.rand(parameter.shape, generator=generator) < density)
    return newer


def greedy(model: PreTrainedModel) -> list[list[int]]:
    """Return the greedy tokens of transformers."""
    outputs = []
    for prompt in PROMPTS:
        ids = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0,
        )  # fmt: skip
        outputs.append(ids[0, len(prompt) :].tolist())
    return outputs


def said(service: RolloutService) -> list[list[int]]:
    engine = service.engine
    return [list(c.token_ids) for c in engine.generate(PROMPTS if engine.is_controller else None, GREEDY)]


def roots(model: PreTrainedModel) -> dict[str, str]:
    return {name: root.hex() for name, root in tensor_roots(model.named_parameters()).items()}


def error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except (WeightSyncError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


# -- all ranks call the same verb --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "tp", "pp"), LAYOUTS)
def test_ranks_that_call_together_all_have_the_new_weights(
    make_model: MakeModel, run_world: RunWorld, tmp_path: Path, family: str, tp: int, pp: int
) -> None:
    models = [make_model(family)]
    models += [later(models[0], step) for step in (1, 2, 3)]
    save_folder(tmp_path / "new", models[2].named_parameters(), "2")
    digests = [model_digest(model.named_parameters()) for model in models]

    def rank(rank: int) -> object:
        service = make_service(models[0], tp, pp)
        found = [(service.model_digest(), said(service))]
        stream = ((name, tensor.detach().clone()) for name, tensor in models[1].named_parameters())
        service.update_weights_from_named_tensors(stream, weight_version="1")
        found.append((said(service), service.engine.weight_version, service.engine.weight_digest))  # commits it
        service.begin_weight_update(weight_version="2")
        record = service.update_weights_from_disk(tmp_path / "new")
        commit = service.end_weight_update()
        found.append((record.verified, commit.version, commit.digest, said(service)))
        commit = service.commit_in_place("3", source=models[3].named_parameters())
        # The trainer's ranks hold all tensors: a stage's own tensors are sharded alike, those of a tp rank are not.
        found.append((commit.version, commit.digest, commit.bytes_copied > 0, said(service)))
        with service.rollout(release_kv=True):
            found.append(said(service))
        found.append(service.engine.kv_bytes)
        with service.rollout():
            found.append(said(service))
        checked = service.weights_checker()
        found.append((checked["success"], checked["model_digest"], len(checked["rank_results"]), len(checked["ranks"])))
        found.append(service.get_weights_by_name("model.layers.1.mlp.gate_proj.weight" if "moe" not in family else
                                                 "model.layers.1.mlp.experts.down_proj", 3))  # fmt: skip
        service.close()
        return found

    name = "model.layers.1.mlp.gate_proj.weight" if "moe" not in family else "model.layers.1.mlp.experts.down_proj"
    value = dict(models[3].named_parameters())[name]
    expected = [
        (digests[0], greedy(models[0])),
        (greedy(models[1]), "1", digests[1]),
        (True, "2", digests[2], greedy(models[2])),
        ("3", digests[3], tp > 1, greedy(models[3])),
        greedy(models[3]),
        0,
        greedy(models[3]),
        (True, digests[3], tp * pp, tp * pp),
        value.detach()[tuple(slice(3) for _ in value.shape)].tolist(),
    ]
    for found in run_world(tp * pp, rank):
        assert found == expected


@pytest.mark.slow
@pytest.mark.parametrize(("family", "tp", "pp"), [("nemotron_h", 2, 1), ("kimi_linear", 1, 2)])
def test_buffers_of_checkpoints_come_to_the_ranks_that_have_their_layers(
    make_model: MakeModel, run_world: RunWorld, tmp_path: Path, family: str, tp: int, pp: int
) -> None:
    models = [with_router_biases(make_model(family), step) for step in range(3)]
    digests = [model_digest(trainer_tensors(model)) for model in models]
    save_folder(tmp_path / "new", trainer_tensors(models[1]), "1")

    def rank(rank: int) -> object:
        own = copy.deepcopy(models[0])
        service = make_service(own, tp, pp)
        found = [(service.model_digest(), said(service))]
        service.update_weights_from_disk(tmp_path / "new")
        found.append((said(service), service.engine.weight_digest)[::-1])  # which commits it
        with_router_biases(own, 2)
        commit = service.commit_in_place("2", source=own.named_parameters())  # of the parameters alone
        found.append((commit.digest, said(service)))
        service.update_weights_from_named_tensors(
            [(name, tensor.clone()) for name, tensor in own.named_parameters()], weight_version="3"
        )
        found.append((said(service), service.engine.weight_digest)[::-1])  # such an update leaves buffers as they are
        service.close()
        return found

    expected = [(digest, greedy(model)) for digest, model in zip(digests, models, strict=True)]
    for found in run_world(tp * pp, rank):
        assert found == [*expected, expected[2]]


# -- the controller calls, the others follow --------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("family", "tp", "pp"), LAYOUTS)
def test_what_the_controller_is_given_by_any_path_reaches_all_ranks(
    make_model: MakeModel, run_world: RunWorld, tmp_path: Path, family: str, tp: int, pp: int
) -> None:
    first = make_model(family)
    newer = {name: later(first, step) for step, name in enumerate(("tensor", "distributed", "disk", "base"))}
    newer["delta"] = later(newer["base"], 9, density=0.05)
    digests = {name: model_digest(model.named_parameters()) for name, model in newer.items()}

    def rank(rank: int) -> object:
        service = make_service(first, tp, pp)
        if not service.engine.is_controller:
            ended = service.engine.follow()
            service.close()
            return ended
        target = LocalTarget(service)
        delta = DeltaTransport(TensorTransport(bucket_bytes=1 << 14))
        transports = {
            "tensor": TensorTransport(bucket_bytes=1 << 14), "disk": DiskTransport(tmp_path), "base": delta,
            "distributed": DistributedTransport(bucket_bytes=1 << 14), "delta": delta,
        }  # fmt: skip
        found: dict[str, object] = {}
        for name in newer:
            pusher = WeightPusher([target], transports[name], timeout_s=PATIENCE)
            pushed = pusher.push(newer[name], name)
            found[name] = (pushed.digest, service.engine.weight_digest, service.engine.weight_version, said(service))
        states = service.state()["ranks"]
        found["states"] = [(s["rank"], s["weight_update"]["state"], s["weight_update"]["version"]) for s in states]
        report = target.call("weights_checker", timeout_s=PATIENCE)
        found["checker"] = (report["model_digest"], [r["rank"] for r in report["rank_results"]])
        memory = target.call("release_memory_occupation", timeout_s=PATIENCE, tags=["weights", "kv_cache"])
        found["released"] = [memory["weights"]["bytes_after"], memory["kv_cache"]["bytes_after"]]
        found["rank_results"] = [(r["rank"], r["success"]) for r in memory["rank_results"]]
        found["weights"] = memory["weights"]["bytes_before"] >= sum(p.nbytes for p in first.parameters())
        target.call("resume_memory_occupation", timeout_s=PATIENCE)
        WeightPusher([target], transports["tensor"], timeout_s=PATIENCE).push(newer["tensor"], "again")
        found["again"] = (service.engine.weight_digest, said(service))
        for transport in transports.values():
            transport.close()
        service.close()
        return found

    found, *ended = run_world(tp * pp, rank)
    for name in newer:
        assert found[name] == (digests[name], digests[name], name, greedy(newer[name])), name
    assert found["states"] == [(rank, "committed", "delta") for rank in range(tp * pp)]
    assert found["checker"] == (digests["delta"], list(range(tp * pp)))
    assert found["released"] == [0, 0] and found["weights"]
    assert found["rank_results"] == [(rank, True) for rank in range(tp * pp)]
    assert found["again"] == (digests["tensor"], greedy(newer["tensor"]))
    assert ended == ["closed"] * (tp * pp - 1)


# -- failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_a_fault_on_one_rank_leaves_all_at_the_old_digest(
    make_model: MakeModel, run_world: RunWorld, tp: int, pp: int
) -> None:
    old = make_model("qwen3")
    new = later(old, 1)
    digest = model_digest(old.named_parameters())
    weights = [(name, tensor.detach()) for name, tensor in new.named_parameters()]

    def rank(rank: int) -> object:
        service, culprit = make_service(old, tp, pp), rank == 1

        def failing(index: int):
            for number, pair in enumerate(weights):
                if culprit and number == index:
                    raise ValueError("the gather failed")
                yield pair

        found = []
        for index in (0, 3, len(weights) - 1):
            tensors = failing(index)
            found.append(error_of(lambda tensors=tensors: service.update_weights_from_named_tensors(tensors)))
            found.append(service.model_digest() == digest)

        def corrupt():
            for name, tensor in weights:
                is_last = name == weights[-1][0]
                yield name, tensor + 1 if culprit and is_last else tensor

        found.append(error_of(lambda: service.update_weights_from_named_tensors(corrupt(), verify=roots(new))))
        found += [service.model_digest() == digest, said(service), service.engine.weight_version]
        service.close()
        return found

    results = run_world(tp * pp, rank)
    for rank_, found in enumerate(results):
        failures, (mismatch, *rest) = found[:6], found[6:]
        kind = "ValueError: " if rank_ == 1 else "PeerFailed: rank 1: ValueError: "
        assert failures == [f"{kind}the gather failed", True] * 3
        assert mismatch.startswith("DigestMismatch") and weights[-1][0] in mismatch
        assert rest == [True, greedy(old), ""] or rest[:2] == [True, greedy(old)]


@pytest.mark.slow
def test_the_first_rank_compares_the_base_of_a_delta_for_all(
    make_model: MakeModel, run_world: RunWorld, tmp_path: Path
) -> None:
    old = make_model("qwen2")
    other, new = later(old, 1), later(old, 2)
    digests = [model_digest(model.named_parameters()) for model in (old, other, new)]
    chunks = encode_delta(dict(other.named_parameters()), new.named_parameters(), chunk_digests=False)
    save_delta(tmp_path / "delta", None, "2", chunks, base_model_digest=digests[1],
               result=Manifest("2", specs_of(new.named_parameters()), roots(new)))  # fmt: skip

    def rank(rank: int) -> list[str]:
        service, said = make_service(old, 2, 1), []
        for weights in (None, old, other):
            if weights is not None:
                service.update_weights_from_named_tensors(list(weights.named_parameters()))
                service.commit_implicit_update()
            try:
                service.update_weights_from_disk(tmp_path / "delta", weight_version="2", delta_check="touched")
                service.commit_implicit_update()
            except (ValueError, WeightSyncError) as error:
                said.append(f"{type(error).__name__}: {error}")
        said.append(service.model_digest())
        service.close()
        return said

    ranks = run_world(2, rank)
    for is_first, (unknown, differs, digest) in zip((True, False), ranks, strict=True):
        assert unknown.startswith("ValueError" if is_first else "PeerFailed: rank 0: ValueError")
        assert "the digest of the present weights is not known" in unknown
        assert differs.startswith("DigestMismatch" if is_first else "PeerFailed: rank 0: DigestMismatch")
        assert f"its base is {digests[1]}, the present weights are {digests[0]}" in differs
        assert digest == digests[2]


def test_a_failed_push_to_a_replica_leaves_it_as_it_was(make_model: MakeModel, run_world: RunWorld) -> None:
    old = make_model("qwen3")
    new = later(old, 1)
    digest = model_digest(old.named_parameters())

    def rank(rank: int) -> object:
        service = make_service(old, 2, 1)
        if rank == 1:
            receiver, num_received = service._receiver.receive, iter(range(100))

            def receive(*args: object) -> object:
                if next(num_received) == 1:
                    raise DigestMismatch(["x"], "the second bucket is bad on this rank")
                return receiver(*args)

            service._receiver.receive = receive
            ended = service.engine.follow()
            service.close()
            return ended
        transport = TensorTransport(bucket_bytes=1 << 14)
        pusher = WeightPusher([LocalTarget(service)], transport, timeout_s=PATIENCE)
        with pytest.raises(PushFailed, match=r"rank 1.*the second bucket is bad on this rank") as failed:
            pusher.push(new, "1")
        found = [failed.value.stranded, service.model_digest() == digest, said(service)]
        pusher.push(new, "2")
        found.append(said(service))
        transport.close()
        service.close()
        return found

    found, ended = run_world(2, rank)
    assert found == [(), True, greedy(old), greedy(new)] and ended == "closed"


@pytest.mark.slow
def test_a_session_whose_client_died_ends_on_all_ranks(
    make_model: MakeModel, run_world: RunWorld, until: Callable[..., None]
) -> None:
    old = make_model("qwen3")
    weights = [(name, tensor.detach() * 1.5) for name, tensor in old.named_parameters()]

    def rank(rank: int) -> object:
        service = make_service(old, 1, 2)
        if rank == 1:
            ended = service.engine.follow()
            service.close()
            return ended
        sender = SharedMemorySender(1 << 14)
        manifest = Manifest("1", specs_of(weights))
        service.begin_weight_update(lease_s=2.0)
        buckets = sender.buckets(weights, manifest)
        service.update_weights_from_tensor(descriptions=[next(buckets)])

        def states() -> list[tuple[str, str | None]]:
            return [(rank["weight_update"]["state"], rank["refusal"]) for rank in service.state()["ranks"]]

        until(lambda: states() == [("rolled_back", None)] * 2)
        # A client that was only slow hears of it, and opens no session of half its weights.
        late = error_of(lambda: service.update_weights_from_tensor(descriptions=[next(buckets)]))
        buckets.close()
        sender.close()
        found = late, states(), service.model_digest() == model_digest(old.named_parameters()), said(service)
        service.close()
        return found

    found, ended = run_world(2, rank)
    late, *others = found
    assert "it expired" in late, late
    assert others == [[("rolled_back", None)] * 2, True, greedy(old)] and ended == "closed"


@pytest.mark.parametrize("slow_rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_lease_that_ends_while_a_rank_reads_is_renewed_by_its_update_and_ends_in_silence(
    make_model: MakeModel, run_world: RunWorld, until: Callable[..., None], tmp_path: Path, slow_rank: int
) -> None:
    """The other rank has read its part, and waits for the slow one's vote."""
    old = make_model("qwen3")
    old.save_pretrained(tmp_path)
    read = sources.load_folder

    def rank(rank: int) -> object:
        def read_slowly(*args: object, **options: object) -> object:
            if rank == slow_rank == 0:
                lease_thread().join(1.5)
            elif rank == slow_rank:
                threading.Event().wait(1.5)
            return read(*args, **options)

        sources.load_folder = read_slowly
        service = make_service(old, 2, 1)
        if rank == 1:
            ended = service.engine.follow()
            service.close()
            return ended
        service.begin_weight_update(weight_version="1", lease_s=0.5)
        lease = lease_thread()
        service.update_weights_from_disk(tmp_path)
        assert lease.is_alive() and service.state()["weight_update"]["seconds_left"] > 0
        until(lambda: service.state()["weight_update"]["state"] == "rolled_back")
        service.close()
        return "rolled back"

    assert run_world(2, rank) == ["rolled back", "closed"]


def test_weights_are_named_on_all_ranks_together_and_on_none_in_a_session(
    make_model: MakeModel, run_world: RunWorld
) -> None:
    model = make_model("qwen2")

    def rank(rank: int) -> object:
        service = make_service(copy.deepcopy(model), 2, 1)
        if rank == 1:
            service.engine.weights.set_weight_digest("of bytes that were written without a commit since")
            ended = service.engine.follow()
            service.close()
            return ended, service.engine.weight_digest
        service.begin_weight_update(coverage="partial")
        in_session = service.name_weights(), error_of(service.present_digest)
        service.abort_weight_update()
        named = service.name_weights()
        digests = [one["weight_digest"] for one in service.state()["ranks"]]
        service.close()
        return in_session, named, digests

    (in_session, named, digests), (ended, of_follower) = run_world(2, rank)
    assert in_session == (None, "SessionError: present_digest: a weight-update session is open")
    assert named == of_follower == model_digest(model.named_parameters()) and digests == [named, named]
    assert ended == "closed"


def lease_thread() -> threading.Thread:
    (thread,) = [thread for thread in threading.enumerate() if thread.name == LEASE_THREAD]
    return thread


# -- trainers in the same ranks ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_an_fsdp2_trainer_in_the_same_ranks_gives_each_its_part(
    make_model: MakeModel, run_world: RunWorld, tp: int, pp: int
) -> None:
    first = make_model("qwen2")

    def rank(rank: int) -> object:
        model = copy.deepcopy(first)
        service = make_service(first, tp, pp)
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        optimizer, found = torch.optim.SGD(model.parameters(), lr=0.3), []
        for step in range(2):
            model(torch.arange(20).reshape(2, 10) + rank).logits.square().mean().backward()
            with service.optimizer_step():
                optimizer.step()
            optimizer.zero_grad()
            service.begin_weight_update(weight_version=str(step))
            record = service.update_weights_from_named_tensors(trainer_tensors(model))
            commit = service.end_weight_update()
            whole = copy.deepcopy(first)
            whole.load_state_dict({n: t.clone() for n, t in trainer_tensors(model)}, strict=False)
            is_same = commit.digest == model_digest(whole.named_parameters()) != model_digest(first.named_parameters())
            found.append((record.num_tensors, is_same, said(service) == greedy(whole)))
        service.close()
        return found

    num_tensors = len(list(first.named_parameters()))
    for found in run_world(2, rank):
        assert found == [(num_tensors, True, True)] * 2


@pytest.mark.slow
def test_a_trainer_that_is_cut_as_the_engine_lends_it_its_storage(make_model: MakeModel, run_world: RunWorld) -> None:
    first = make_model("llama")
    new = later(first, 1)
    digest = model_digest(new.named_parameters())

    def rank(rank: int) -> object:
        service = make_service(first, 2, 1)
        device_mesh, shards = init_device_mesh("cpu", (2,)), service.engine.model.shards

        def place(name: str, tensor: torch.Tensor) -> torch.Tensor:
            cut = Replicate() if shards[name].is_whole else Shard(shards[name].dim)
            return distribute_tensor(tensor.detach(), device_mesh, [cut])

        source = {name: place(name, tensor) for name, tensor in new.named_parameters()}
        commit = service.commit_in_place("1", source=source.items())
        found = [commit.bytes_copied, commit.digest == digest, said(service)]
        with service.optimizer_step():
            for tensor in source.values():
                tensor.to_local().mul_(1.5)
        found.append(service.commit_in_place("2", source=source.items()).bytes_copied)
        found.append(service.model_digest() == model_digest((n, t.full_tensor()) for n, t in source.items()))
        across = {name: distribute_tensor(t.detach(), device_mesh, [Shard(t.dim() - 1)])
                  for name, t in new.named_parameters()}  # fmt: skip
        found.append(error_of(lambda: service.commit_in_place("3", source=across.items())))
        service.close()
        return found

    for copied, is_new, tokens, copied_again, follows, refused in run_world(2, rank):
        assert (copied, is_new, tokens, copied_again, follows) == (0, True, greedy(new), 0, True)
        assert refused.startswith("ValueError") and "q_proj.weight" in refused and "o_proj" not in refused


def test_a_call_from_outside_takes_no_vote_of_the_jobs_own_call(run_world: RunWorld, make_model: MakeModel) -> None:
    """A checksum over HTTP while the other rank has come to `commit_in_place` already, and this one not yet."""
    model = make_model("qwen2")

    def rank(rank: int) -> object:
        service = make_service(model, 2, 1)
        newer = later(model, 1)
        if rank:
            commit = service.commit_in_place("1", source=newer.named_parameters())
            ended = service.engine.follow()
            service.close()
            return commit.digest, ended
        ranks = service.engine.ranks
        wait_until(lambda: ranks._mail, what="the other rank's vote")

        def check() -> object:
            service.replica.note_outside_call()
            return service.model_digest()

        checking = submit(check)
        wait_until(lambda: ranks.watch._phase[0] == "waiting for ranks" or checking.done(), what="the call")
        commit = service.commit_in_place("1", source=newer.named_parameters())
        found = soon(checking)
        service.close()
        return commit.digest, found

    (first, found), (second, ended) = run_world(2, rank)
    assert first == second == found == model_digest(later(model, 1).named_parameters())
    assert ended == "closed"
