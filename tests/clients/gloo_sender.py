"""Rank 0 of vLLM's convention over gloo, for programs of other packages: new weights of a served folder."""

from __future__ import annotations

import torch
import transformers

from lockstep.weight_sync.digests.model_digest import model_digest
from lockstep.weight_sync.group.rendezvous import Rendezvous
from lockstep.weight_sync.group.vllm_protocol import BUFFER_BYTES, GROUP_NAME, send_tensors
from lockstep.weight_sync.manifest import dtype_name, specs_of


class GlooSender:
    """Weights that differ from those of the folder, and the group that they travel over."""

    def __init__(self, folder: str, packed: bool) -> None:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        self._tensors = [(name, p.detach() * (0.5 + packed)) for name, p in model.named_parameters()]
        self._packed, self.digest = packed, model_digest(self._tensors)
        self.group_name = GROUP_NAME
        self._rendezvous = Rendezvous("127.0.0.1", 0, 0, 2, GROUP_NAME, timeout_s=60)
        self.init_info = {
            "master_address": "127.0.0.1", "master_port": self._rendezvous.port, "rank_offset": 1, "world_size": 2,
            "packed": packed,
        }  # fmt: skip
        self._specs = specs_of(self._tensors)
        self.update_info = {
            "names": [spec.name for spec in self._specs],
            "dtype_names": [dtype_name(spec.dtype) for spec in self._specs],
            "shapes": [list(spec.shape) for spec in self._specs],
        }

    def join(self) -> None:
        self._group = self._rendezvous.join()

    def send(self) -> None:
        with torch.no_grad():
            send_tensors(self._group, self._specs, self._tensors, BUFFER_BYTES if self._packed else None, 60)

    def close(self) -> None:
        self._group.destroy()
