"""What the ranks of test_several_gpus.py do, on GPUs or, to know that this code works, on the CPU."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from lockstep.integration.ranks import Ranks
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.tests.support.forked_ranks import join_group
from lockstep.tests.support.random_models import random_model
from lockstep.tests.support.vllm.trainer import HOST, GlooCommunicators
from lockstep.weight_sync.deadline import Deadline
from lockstep.weight_sync.group.communicator import Communicators, NcclCommunicators
from lockstep.weight_sync.group.vllm_rendezvous import VllmRendezvous
from lockstep.weight_sync.same_host.cuda_ipc import CudaHandle, visible_uuids

PROMPTS = [[3 + i, *range(10, 10 + 7 * i)] for i in range(4)]
PARAMS = [SamplingParams(max_new_tokens=12, sampling_seed=i, ignore_eos=True) for i in range(4)]
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 8, "num_hidden_layers": 8}  # of ranks up to eight


def broadcast(ranks: Ranks) -> None:
    """Send a tensor from the first rank to all, in a weight group of their own."""
    port: list[int | None] = [None]
    if ranks.is_first:
        from lockstep.tests.support.forked_ranks import free_port

        port = [free_port()]
    dist.broadcast_object_list(port, device=ranks.device)
    backend = "nccl" if ranks.device.type == "cuda" else "gloo"
    group = join_group("127.0.0.1", port[0], ranks.rank, ranks.num_ranks, "g", backend=backend, device=ranks.device,
                       timeout_s=60)  # fmt: skip
    tensor = torch.full((1 << 20,), float(ranks.rank + 7), device=ranks.device)
    deadline = Deadline.after(60)
    group.finish(group.broadcast(tensor, deadline), deadline)
    assert tensor.unique().tolist() == [7.0]
    group.destroy()


def communicator_of_a_trainer(ranks: Ranks) -> None:
    """Send a tensor from the first rank to all, which meet as vLLM's trainers and workers do."""
    communicators: Communicators = GlooCommunicators()
    if ranks.device.type == "cuda":
        communicators = NcclCommunicators(ranks.device)
    port: list[int | None] = [None]
    if ranks.is_first:
        trainer = VllmRendezvous(communicators, 0, ranks.num_ranks, address=(HOST, 0), timeout_s=60)
        port = [trainer.port]
    dist.broadcast_object_list(port, device=ranks.device)
    if not ranks.is_first:
        address = (HOST, int(port[0] or 0))
        trainer = VllmRendezvous(communicators, ranks.rank, ranks.num_ranks, address=address, timeout_s=60)
    group = trainer.join()
    deadline = Deadline.after(60)
    for value in (7.0, 9.0):
        tensor = torch.full((1 << 20,), value + ranks.rank, device=ranks.device)
        group.finish(group.broadcast(tensor, deadline), deadline)
        assert tensor.unique().tolist() == [value]
    dist.barrier()
    if not ranks.is_first:  # the trainer sends nothing any more: a receive ends at its deadline, and the process lives
        late = Deadline.after(2)
        try:
            group.finish(group.broadcast(torch.zeros(4, device=ranks.device), late), late)
        except RuntimeError:
            group.abort("the trainer was silent")
        else:
            raise AssertionError("a broadcast that was never sent has arrived")
    dist.barrier()
    group.destroy()


def divided_engine(ranks: Ranks) -> None:
    """Compare a replica whose ranks share each layer with one rank that computes the same K-blocks."""
    _compare(ranks, {"tp": ranks.num_ranks, "k_blocks": ranks.num_ranks}, {"k_blocks": ranks.num_ranks})


def staged_engine(ranks: Ranks) -> None:
    """Compare a replica whose ranks hold some layers each with one rank."""
    _compare(ranks, {"pp": ranks.num_ranks}, {})


def _compare(ranks: Ranks, divided: dict[str, int], alone: dict[str, int]) -> None:
    model = random_model("qwen3", torch.bfloat16, **HEADS)
    common = {"kv_cache": "64 blocks", "max_num_seqs": 4, "device": str(ranks.device)}
    replica = Engine(model, EngineConfig(**common, **divided))
    found = replica.generate(PROMPTS if replica.is_controller else None, PARAMS)
    replica.close()
    if ranks.is_first:
        single = Engine(random_model("qwen3", torch.bfloat16, **HEADS), EngineConfig(**common, **alone))
        expected = single.generate(PROMPTS, PARAMS)
        single.close()
        assert [(c.token_ids, c.logprobs) for c in found] == [(c.token_ids, c.logprobs) for c in expected]


def handle_of_another_gpu(ranks: Ranks) -> None:
    """Open on each GPU the tensor of the other one."""
    mine = torch.arange(1000.0, device=ranks.device) + ranks.rank
    handles: list[CudaHandle | None] = [None] * ranks.num_ranks
    dist.all_gather_object(handles, CudaHandle.of(mine))
    other = (ranks.rank + 1) % ranks.num_ranks
    handle = handles[other]
    assert handle is not None
    opened = handle.open(visible_uuids(), f"of rank {other}, for process {os.getpid()}")
    assert torch.equal(opened.to(ranks.device), torch.arange(1000.0, device=ranks.device) + other)
    dist.barrier()
