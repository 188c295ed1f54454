"""A trainer of vLLM's weight updates: rank 0 of a real group, with the calls of a client, in this process or its own.

    python -m lockstep.tests.integration.http.vllm.weight_trainer URL STEP NUM [BUFFER_BYTES]

sends NUM broadcasts of an update and kills itself.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence

import httpx
import torch
import torch.distributed as dist

from lockstep.tests.integration.http.test_sequences import _foreign_group
from lockstep.tests.support.forked_ranks import free_port
from lockstep.tests.support.random_models import random_model
from lockstep.weight_sync.group.vllm_protocol import GROUP_NAME

PATIENCE = 60
KEY = {"Authorization": "Bearer admin"}
Named = list[tuple[str, torch.Tensor]]


def model_of(step: int) -> Named:
    """Return the weights after a training step."""
    generator = torch.Generator().manual_seed(step)
    return [
        (name, parameter.detach() + step * 0.01 * torch.randn(parameter.shape, generator=generator))
        for name, parameter in random_model("qwen3").named_parameters()
    ]


def info_of(tensors: Named) -> dict:
    return {
        "names": [name for name, _ in tensors],
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors],
        "shapes": [list(tensor.shape) for _, tensor in tensors],
    }


class Trainer:
    """Rank 0 of a group, and the calls of a client."""

    def __init__(self, url: str, *, joins: bool = True, **init_info: object) -> None:
        self.client = httpx.Client(base_url=url, timeout=PATIENCE, headers=KEY)
        self.group: dist.ProcessGroup | None = None
        if joins:
            self.join(**init_info)

    def join(self, **init_info: object) -> None:
        port = free_port()
        info = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2} | init_info
        joining = self.begin("/init_weight_transfer_engine", {"init_info": info})
        self.group = _foreign_group(port, 2, GROUP_NAME)
        assert joining().json() == {"message": "Weight transfer initialized"}

    def begin(self, path: str, body: dict) -> Callable[[], httpx.Response]:
        """Post in the background; the returned function waits for the answer."""
        answers: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: answers.append(self.client.post(path, json=body)), daemon=True)
        thread.start()

        def wait() -> httpx.Response:
            thread.join(PATIENCE)
            return answers[0]

        return wait

    def post(self, path: str, body: dict | None = None, status: int = 200) -> dict:
        answer = self.client.post(path, json=body or {})
        assert answer.status_code == status, f"{path}: {answer.status_code}: {answer.text}"
        return answer.json()

    def send(self, tensors: Named, buffer_bytes: int | None = None) -> httpx.Response:
        """Announce tensors and broadcast them."""
        waiting = self.begin("/update_weights", {"update_info": info_of(tensors)})
        self.broadcast(payloads(tensors, buffer_bytes))
        return waiting()

    def broadcast(self, payloads: Sequence[torch.Tensor]) -> None:
        for payload in payloads:
            dist.broadcast(payload, group=self.group, group_src=0)

    def leave(self) -> None:
        """Leave the group at this end only."""
        if self.group is not None:
            dist.destroy_process_group(self.group)
            self.group = None

    def close(self) -> None:
        self.post("/shutdown_weight_transfer_engine")
        self.leave()
        self.client.close()


def payloads(tensors: Named, buffer_bytes: int | None = None) -> list[torch.Tensor]:
    """Return what is broadcast: each tensor, or buffers that end with the tensor that fills them."""
    if buffer_bytes is None:
        return [tensor.contiguous() for _, tensor in tensors]
    buffers, parts = [], []
    for at, (_, tensor) in enumerate(tensors, 1):
        parts.append(tensor.contiguous().view(-1).view(torch.uint8))
        if sum(map(len, parts)) > buffer_bytes or at == len(tensors):
            buffers.append(torch.cat(parts))
            parts = []
    return buffers


def main(url: str, step: str, num: str, buffer_bytes: str | None = None) -> None:
    """Send some of an update's broadcasts, then end as a process does that is killed."""
    torch.set_num_threads(1)
    size = None if buffer_bytes is None else int(buffer_bytes)
    packed = {} if size is None else {"packed": True, "packed_buffer_size_bytes": size}
    trainer, tensors = Trainer(url, **packed), model_of(int(step))
    trainer.post("/pause?mode=keep&clear_cache=false")
    trainer.post("/start_weight_update")
    trainer.begin("/update_weights", {"update_info": info_of(tensors)})
    trainer.broadcast(payloads(tensors, size)[: int(num)])
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
