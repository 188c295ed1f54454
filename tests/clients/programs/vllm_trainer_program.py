"""vLLM's own ends of its handshake, for an interpreter that has vLLM (0.32), and nothing of Lockstep.

python vllm_trainer_program.py say PORT HEX     rank 0 of a StatelessProcessGroup, which broadcasts this id
python vllm_trainer_program.py read PORT        rank 1, which prints the id that rank 0 broadcasts
python vllm_trainer_program.py send PORT URL FILE PACKED
                                                vLLM's trainer on the first GPU: sends the tensors of FILE over NCCL
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
from safetensors.torch import load_file
from vllm.distributed.device_communicators.pynccl_wrapper import ncclUniqueId
from vllm.distributed.utils import StatelessProcessGroup

HOST = "127.0.0.1"


def say(port: str, text: str) -> None:
    group = StatelessProcessGroup.create(HOST, int(port), rank=0, world_size=2)
    group.broadcast_obj(ncclUniqueId.from_buffer_copy(bytes.fromhex(text)), src=0)
    sys.stdin.read()  # the store ends with this process


def read(port: str) -> None:
    group = StatelessProcessGroup.create(HOST, int(port), rank=1, world_size=2)
    unique_id = group.broadcast_obj(None, src=0)
    assert type(unique_id) is ncclUniqueId
    print(bytes(unique_id).hex(), flush=True)


def send(port: str, url: str, file: str, packed: str) -> None:
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
    from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine

    torch.cuda.set_device(0)
    tensors = load_file(file, device="cuda:0")

    class Source(WeightSource):
        def metadata(self) -> list[ParamMeta]:
            return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            return iter(tensors.items())

    info = NCCLTrainerInitInfo(
        rank=0, master_address=HOST, master_port=int(port), world_size=2, packed=packed == "packed",
        packed_buffer_size_bytes=20_000,
    )  # fmt: skip
    trainer = NCCLTrainerWeightTransferEngine.trainer_init(
        info, client=HTTPVLLMWeightSyncClient(url, timeout=120), source=Source()
    )
    trainer.send_weights()
    trainer.shutdown()


{"say": say, "read": read, "send": send}[sys.argv[1]](*sys.argv[2:])
