"""A replica of several ranks joins a trainer of vLLM: every rank is one of the communicator's."""

from __future__ import annotations

from collections.abc import Callable

from transformers import PreTrainedModel

from lockstep.integration.service import RolloutService
from lockstep.integration.service_config import ServiceConfig
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.tests.support.callers import soon, submit
from lockstep.tests.support.vllm.trainer import HOST, GlooCommunicators, VllmTrainer
from lockstep.weight_sync.digests.model_digest import model_digest
from lockstep.weight_sync.group.vllm_protocol import GROUP_NAME

RunWorld = Callable[..., list[object]]


def service_of(model: PreTrainedModel) -> RolloutService:
    config = EngineConfig(tp=2, k_blocks=4, kv_cache="32 blocks", max_num_seqs=4, rank_timeout_s=60.0)
    service = RolloutService(Engine(model, config), ServiceConfig(weight_timeout_s=20.0))
    service.groups.communicators = GlooCommunicators()
    return service


def test_all_ranks_join_and_receive_their_parts(make_model: Callable[..., PreTrainedModel], run_world: RunWorld):
    model = make_model("qwen2")
    newer = [(name, p.detach() * 0.5) for name, p in model.named_parameters()]
    lists = (
        [name for name, _ in newer],
        [str(tensor.dtype).removeprefix("torch.") for _, tensor in newer],
        [list(tensor.shape) for _, tensor in newer],
    )

    def rank(rank: int) -> object:
        service = service_of(model)
        if rank:
            ended = service.engine.follow()
            service.close()
            return ended

        def join_group(rank_offset: int, world_size: int, **options: object) -> None:
            service.init_weights_update_group(
                rank_offset=rank_offset, world_size=world_size, group_name="other", backend="gloo", **options
            )

        said = []
        for join in (service.join_vllm_trainer, join_group):
            for rank_offset in (1, 0):  # there is no place for the second rank, and rank 0 is the sender
                try:
                    join(rank_offset, 2, master_address=HOST, master_port=1, timeout_s=3.0)
                except ValueError as error:
                    said.append(str(error))
        trainer = VllmTrainer(3)
        joining = submit(trainer.join)
        service.join_vllm_trainer(1, 3, master_address=HOST, master_port=trainer.port)
        soon(joining)
        sending = submit(lambda: [trainer.broadcast(tensor.contiguous()) for _, tensor in newer])
        service.update_weights_from_distributed(*lists, GROUP_NAME, weight_version="1")
        soon(sending)
        service.commit_implicit_update()
        service.destroy_weights_update_group(GROUP_NAME)
        found = said, service.model_digest(), service.engine.weight_version, service.groups.state()
        service.close()
        return found

    found, _ = run_world(2, rank)
    refused = [
        "world_size 2 has no place for 2 ranks from rank 1 on",
        "rank_offset must be at least 1, since rank 0 is the sender; it is 0",
    ]
    assert found == (2 * refused, model_digest(newer), "1", {})
