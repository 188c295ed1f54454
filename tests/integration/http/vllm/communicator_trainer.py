"""A trainer of weight updates that joins as vLLM's own do (`support.vllm.trainer`), in this process or its own.

    python -m lockstep.tests.integration.http.vllm.communicator_trainer URL STEP NUM

sends NUM broadcasts of an update and kills itself.
"""

from __future__ import annotations

import base64
import os
import signal
import sys
from collections.abc import Sequence

import torch

from lockstep.tests.integration.http.vllm.weight_trainer import Trainer, info_of, model_of, payloads
from lockstep.tests.support.vllm.trainer import VllmTrainer


class CommunicatorTrainer(Trainer):
    """Rank 0 of a communicator, and the calls of a client. by_id: its id goes into the call, and there is no store."""

    def join(self, *, by_id: bool = False, **init_info: object) -> None:
        self.peer = VllmTrainer()
        info = self.peer.init_info | init_info
        if by_id:
            del info["master_address"], info["master_port"]
            info["nccl_unique_id_b64"] = base64.b64encode(self.peer.unique_id).decode()
        joining = self.begin("/init_weight_transfer_engine", {"init_info": info})
        self.peer.connect() if by_id else self.peer.join()
        answer = joining()
        assert answer.json() == {"message": "Weight transfer initialized"}, answer.text

    def broadcast(self, payloads: Sequence[torch.Tensor]) -> None:
        for payload in payloads:
            self.peer.broadcast(payload)

    def leave(self) -> None:
        self.peer.close()


def main(url: str, step: str, num: str) -> None:
    torch.set_num_threads(1)
    trainer, tensors = CommunicatorTrainer(url), model_of(int(step))
    trainer.post("/pause?mode=keep")
    trainer.post("/start_weight_update")
    trainer.begin("/update_weights", {"update_info": info_of(tensors)})
    trainer.broadcast(payloads(tensors)[: int(num)])
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
