"""The layers of a model that adapters are put on, by the API's kinds: attention, MLP, unembedding."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ....kernels.sampling.draws import derive_seed
from .data import BadInput

ALPHA = 32  # of every adapter, whatever its rank: Schulman et al., "LoRA Without Regret", Thinking Machines, 2025
_OF_MLP = ("mlp", "feed_forward", "ffn", "moe", "expert", "fc1", "fc2")  # in names of MLP layers and of what holds them
# Parts of names of layers that choose experts or keys, which are not adapted.
_CHOOSING = ("gate", "router", "shared_expert_gate", "indexer")


@dataclass(frozen=True)
class AdapterSpec:
    """The shape of an adapter: its rank, and the kinds of layers that it is on."""

    rank: int
    train_mlp: bool = True
    train_attn: bool = True
    train_unembed: bool = True

    def check(self, max_rank: int) -> None:
        """Raise BadInput for a rank that is out of range, and for an adapter on no layers."""
        if not 1 <= self.rank <= max_rank:
            raise BadInput(f"lora_config: rank must be from 1 to {max_rank} (--max-lora-rank), not {self.rank}")
        if not (self.train_mlp or self.train_attn or self.train_unembed):
            raise BadInput("lora_config: one of train_mlp, train_attn and train_unembed must be true")


class Targets:
    """The linear layers of a model without adapters, by kind."""

    def __init__(self, module: PreTrainedModel) -> None:
        """Find the layers. The module has no adapter."""
        head = module.get_output_embeddings()
        self._class = type(module).__name__
        self._of_kind: dict[str, dict[str, nn.Linear]] = {"train_attn": {}, "train_mlp": {}, "train_unembed": {}}
        for name, layer in module.named_modules():
            if type(layer) is not nn.Linear:
                continue
            if layer is head:
                self._of_kind["train_unembed"][name] = layer
            elif _in_layers(name) and not set(name.split(".")) & set(_CHOOSING):
                kind = "train_mlp" if any(part in name for part in _OF_MLP) else "train_attn"
                self._of_kind[kind][name] = layer
        self._experts = [name for name, own in module.named_parameters() if own.dim() == 3 and "expert" in name]

    def of(self, spec: AdapterSpec) -> dict[str, nn.Linear]:
        """Return the layers that an adapter is on, by name. Raises BadInput naming a kind that the model lacks."""
        wanted = [kind for kind in self._of_kind if getattr(spec, kind)]
        if "train_mlp" in wanted and self._experts:
            raise BadInput(
                f"lora_config: the experts of {self._class} are one tensor ({self._experts[0]}), on which this server "
                "puts no adapter: pass train_mlp=False"
            )
        if lacking := [kind for kind in wanted if not self._of_kind[kind]]:
            raise BadInput(
                f"lora_config: {self._class} has no linear layers for {', '.join(lacking)}: pass False for it"
            )
        return {name: layer for kind in wanted for name, layer in self._of_kind[kind].items()}


def _in_layers(name: str) -> bool:
    """Return whether a layer is one of the decoder's, which are numbered."""
    return any(part.isdecimal() for part in name.split("."))


def first_values(layers: dict[str, nn.Linear], spec: AdapterSpec, seed: int) -> dict[str, Tensor]:
    """Draw the first values of an adapter, float32 on the CPU, by PEFT's names. They change no output.

    Rows of A are uniform within 1 / sqrt(inputs), B is zero, as PEFT begins them (Hu et al., "LoRA", 2021, section 4.1,
    with Kaiming's range). Each layer's values follow from the seed and its place.
    """
    found = {}
    for place, (name, layer) in enumerate(layers.items()):
        bound = 1 / math.sqrt(layer.in_features)
        generator = torch.Generator().manual_seed(derive_seed(seed, place))
        values = torch.rand(spec.rank, layer.in_features, generator=generator, dtype=torch.float32)
        found[f"{name}.lora_A.weight"] = values.mul_(2 * bound).sub_(bound)
        found[f"{name}.lora_B.weight"] = torch.zeros(layer.out_features, spec.rank, dtype=torch.float32)
    return found


def peft_config(layers: dict[str, nn.Linear], spec: AdapterSpec, base: str) -> dict[str, object]:
    """Return the settings of an adapter folder in PEFT's layout (adapter_config.json)."""
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "r": spec.rank,
        "lora_alpha": ALPHA, "lora_dropout": 0.0, "bias": "none", "target_modules": sorted(layers),
        "inference_mode": True,
    }  # fmt: skip
