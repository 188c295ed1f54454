"""A rank is lost in a weight update: the others keep the old weights and name the lost rank."""

from __future__ import annotations

import copy
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from lockstep.integration.push.failures import PushFailed
from lockstep.integration.push.local_target import LocalTarget
from lockstep.integration.push.pusher import WeightPusher
from lockstep.integration.service import RolloutService
from lockstep.integration.service_config import ServiceConfig
from lockstep.integration.weights import rank_weights
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.errors import RankFailure, SamplingRefused
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.tests.support.forked_ranks import run_survivors
from lockstep.weight_sync.digests.model_digest import model_digest, tensor_roots
from lockstep.weight_sync.digests.shard_digest import local_digests
from lockstep.weight_sync.errors import DigestMismatch, WeightSyncError
from lockstep.weight_sync.transports.same_host import TensorTransport

MakeModel = Callable[..., PreTrainedModel]
RunWorld = Callable[..., list[object]]
TIMEOUT_S = 8.0  # of a wait for a rank
PATIENCE = 120.0


def make_service(model: PreTrainedModel, tp: int, pp: int) -> RolloutService:
    config = EngineConfig(tp=tp, pp=pp, k_blocks=2, kv_cache="64 blocks", max_num_seqs=4, rank_timeout_s=TIMEOUT_S)
    return RolloutService(Engine(model, config), ServiceConfig(weight_timeout_s=TIMEOUT_S))


def bits(service: RolloutService) -> dict[str, object]:
    model = service.engine.model
    return local_digests(dict(model.resident_tensors()), model.shards)


CASES = [
    pytest.param(2, 1, 1, signal.SIGKILL, id="tp-rank-killed"),
    pytest.param(1, 2, 1, signal.SIGSTOP, id="second-stage-stopped", marks=pytest.mark.slow),
    pytest.param(2, 1, 0, signal.SIGKILL, id="controller-killed", marks=pytest.mark.slow),
    pytest.param(1, 2, 0, signal.SIGSTOP, id="controller-stopped", marks=pytest.mark.slow),
    *(pytest.param(2, 2, v, signal.SIGKILL, id=f"rank-{v}-of-4-killed", marks=pytest.mark.slow) for v in range(4)),
]


@pytest.mark.parametrize(("tp", "pp", "victim", "kind"), CASES)
def test_survivors_of_an_update_have_the_old_weights_and_name_the_rank(
    make_model: MakeModel, tmp_path: Path, tp: int, pp: int, victim: int, kind: signal.Signals
) -> None:
    old = make_model("qwen3")
    new = [(name, tensor.detach() * 1.5) for name, tensor in old.named_parameters()]

    def rank(rank: int) -> object:
        service = make_service(old, tp, pp)
        before = bits(service)

        def tensors() -> Iterator[tuple[str, torch.Tensor]]:
            for number, pair in enumerate(new):
                if rank == victim and number == len(new) // 2:
                    os.kill(os.getpid(), kind)
                yield pair

        began = time.monotonic()
        try:
            service.update_weights_from_named_tensors(tensors())
            said, ranks = "it was committed", ()
        except RankFailure as failure:
            said, ranks = str(failure), failure.ranks
        seconds = time.monotonic() - began
        try:
            service.engine.generate([[1, 2, 3]])
            sampled = "it sampled"
        except RankFailure as failure:
            sampled = f"refused: {failure}"
        return said, ranks, bits(service) == before, sampled, seconds

    for said, ranks, is_old, sampled, seconds in run_survivors(tp * pp, tmp_path, rank, victim).values():
        assert ranks == (victim,) and f"rank {victim} (stage" in said
        assert is_old and sampled.startswith("refused")
        assert seconds < 60 + 3 * TIMEOUT_S  # the deadline, on a machine that is busy


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["receive", "digest", "commit"])
def test_a_follower_killed_in_a_push_is_named_and_the_controller_has_the_old_weights(
    make_model: MakeModel, tmp_path: Path, verb: str
) -> None:
    old = make_model("qwen3")
    new = copy.deepcopy(old)
    with torch.no_grad():
        for parameter in new.parameters():
            parameter *= 1.5

    def rank(rank: int) -> object:
        service = make_service(old, 2, 1)
        if rank == 1:
            place = {"receive": (service._receiver, "receive"), "digest": (service.sessions._roots, "_roots_now"),
                     "commit": (service.sessions._host, "publish")}[verb]  # fmt: skip
            setattr(*place, lambda *args: os.kill(os.getpid(), signal.SIGKILL))
            return service.engine.follow()
        before, version = bits(service), service.engine.weight_version
        transport = TensorTransport(bucket_bytes=1 << 14)
        try:
            WeightPusher([LocalTarget(service)], transport, timeout_s=TIMEOUT_S).push(new, "7")
            said = "it was committed"
        except PushFailed as failed:
            said = str(failed)
        finally:
            transport.close()
        return said, bits(service) == before, service.engine.weight_version == version

    [(said, is_old, keeps_version)] = run_survivors(2, tmp_path, rank, 1).values()
    assert "rank 1 (stage 0, tp 1)" in said
    assert is_old and keeps_version


def test_ranks_whose_trainers_differ_sample_nothing_before_a_commit_that_is_whole(
    make_model: MakeModel, run_world: RunWorld
) -> None:
    model = make_model("qwen3")
    params = SamplingParams(max_new_tokens=4, temperature=0.0, ignore_eos=True)

    def rank(rank: int) -> object:
        service = make_service(model, 2, 1)
        engine = service.engine
        prompts = [[5, 6, 7]] if engine.is_controller else None
        service.commit_in_place("0", source=model.named_parameters())
        with torch.no_grad():
            model.model.norm.weight.mul_(2 + rank)  # which both ranks hold
        with pytest.raises(DigestMismatch):
            service.commit_in_place("1", source=model.named_parameters())
        assert (engine.weight_version, engine.weight_digest) == ("0", None)
        with service.rollout(), pytest.raises(SamplingRefused, match="version '1' was written and not committed"):
            engine.generate(prompts, params)
        with torch.no_grad():
            model.model.norm.weight.fill_(0.5)
        committed = service.commit_in_place("2", source=model.named_parameters())
        with service.rollout():
            [completion] = engine.generate(prompts, params)
        service.close()
        return committed.digest == completion.weight_digest == model_digest(model.named_parameters())

    assert run_world(2, rank) == [True, True]


def test_a_replica_of_which_one_stage_is_partly_written_samples_nothing_on_any_rank(
    make_model: MakeModel, run_world: RunWorld
) -> None:
    model = make_model("qwen3")
    new = [(name, tensor.detach() * 1.5) for name, tensor in copy.deepcopy(model).named_parameters()]

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield next(pair for pair in new if pair[0] == "model.norm.weight")  # of the last stage, a follower
        raise OSError("the wire broke")

    def rank(rank: int) -> object:
        service = make_service(model, 1, 2)
        prompts = [[5, 6, 7]] if service.engine.is_controller else None
        service.begin_weight_update(undo="none")
        with pytest.raises(OSError, match="the wire broke"):
            service.update_weights_from_named_tensors(broken())
        state = service.state()["weight_update"]["state"]
        with service.rollout(), pytest.raises(SamplingRefused, match=r"rank 1: the weights are partly written"):
            service.engine.generate(prompts)
        service.begin_weight_update(weight_version="2")
        service.update_weights_from_named_tensors(new, verify={n: t.hex() for n, t in tensor_roots(new).items()})
        healed = service.end_weight_update()
        with service.rollout():
            [completion] = service.engine.generate(prompts)
        service.close()
        return state, healed.digest == completion.weight_digest == model_digest(new)

    assert run_world(2, rank) == [("poisoned", True)] * 2


def test_digests_that_fail_on_one_rank_fail_on_all_and_leave_the_ranks_together(
    make_model: MakeModel, run_world: RunWorld
) -> None:
    model = make_model("qwen3")
    new = [(name, tensor.detach() * 1.5) for name, tensor in copy.deepcopy(model).named_parameters()]
    proof = {name: root.hex() for name, root in tensor_roots(new).items()}

    def rank(rank: int) -> object:
        service, digest = make_service(model, 2, 1), rank_weights.local_digests
        before, failures = bits(service), []

        def fail(*args: object) -> dict[str, object]:
            rank_weights.local_digests = digest
            raise MemoryError("no memory to digest with")

        def failing(call: Callable[[], object]) -> None:
            if rank == 1:
                rank_weights.local_digests = fail
            try:
                call()
            except (MemoryError, WeightSyncError) as error:
                failures.append(f"{type(error).__name__}: {error}")

        failing(service.model_digest)
        service.begin_weight_update(weight_version="7")
        service.update_weights_from_named_tensors(new)
        failing(lambda: service.verify_weight_update(proof))
        state = service.state()["weight_update"]["state"]
        service.begin_weight_update(weight_version="7")
        service.update_weights_from_named_tensors(new)
        failing(service.end_weight_update)  # no digest was asked for yet
        kept = bits(service) == before, state, service.engine.weight_version, service.replica.peers.are_apart
        service.begin_weight_update(weight_version="8")
        service.update_weights_from_named_tensors(new, verify=proof)
        digest_now = service.end_weight_update().digest
        service.close()
        return failures, kept, digest_now == model_digest(new)

    first, second = run_world(2, rank)
    assert second[0] == ["MemoryError: no memory to digest with"] * 3
    assert first[0] == ["PeerFailed: rank 1: MemoryError: no memory to digest with"] * 3
    assert first[1:] == second[1:] == ((True, "rolled_back", "default", False), True)
