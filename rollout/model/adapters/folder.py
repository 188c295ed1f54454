"""Adapter folders in PEFT's layout (adapter_config.json, adapter_model.safetensors), put around an engine's own layers.

The former layers are kept, so putting them back cannot fail: a change happens whole or leaves no trace.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor, nn
from transformers import PreTrainedModel

from .layers import PEFT_PREFIX, adapter_layers

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
# The one adapter of a module. It is PEFT's default, so that tensors have the names that they have in a trainer.
ADAPTER = "default"
_IN_A_FOLDER = re.compile(rf"(\.lora_\w+)\.{ADAPTER}(?=\.|$)")
_FROZEN = ".base_layer."  # in the names of the weights below adapters
AdapterLayers = dict[str, nn.Module]  # an adapter's layers, by the names of the layers that they are around
_UNSUPPORTED = (
    *("modules_to_save", "trainable_token_indices", "alora_invocation_tokens", "use_dora", "lora_bias"),
    "layer_replication",  # changes the number of layers
)
# Beginnings of adapters for which PEFT leaves the base weights as they are. Others (PiSSA, OLoRA, CorDA, LoftQ) write
# them when the layers are made, and again at the next load.
_BEGINNINGS = ("true", "false", "none", "gaussian", "orthogonal", "eva")  # in small letters, as PEFT compares


@dataclass(frozen=True)
class AdapterFolder:
    """A LoRA adapter as its folder has it, in main memory."""

    path: Path
    config: dict[str, Any]
    tensors: dict[str, Tensor]  # by PEFT's names

    @classmethod
    def read(cls, path: str | Path) -> AdapterFolder:
        """Read a folder. Raises ValueError that names a missing or broken file, or features that are not supported."""
        folder = Path(path)
        if missing := [name for name in (CONFIG_FILE, WEIGHTS_FILE) if not (folder / name).is_file()]:
            raise ValueError(f"adapter folder {str(folder)!r} holds no {' and no '.join(missing)}")
        try:
            config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"{folder / CONFIG_FILE} cannot be read: {error}") from error
        try:
            # Not load_file, which maps the file: one that becomes shorter meanwhile would end the process.
            tensors = load((folder / WEIGHTS_FILE).read_bytes())
        except (OSError, SafetensorError, KeyError) as error:
            raise ValueError(f"{folder / WEIGHTS_FILE} cannot be read: {error}") from error
        kind = config.get("peft_type") if isinstance(config, dict) else None
        if kind != "LORA":
            raise ValueError(f"{folder} holds an adapter of type {kind}: only LORA is supported")
        wrong = [name for name in _UNSUPPORTED if config.get(name)]
        wrong += ["bias"] if config.get("bias", "none") != "none" else []
        beginning = config.get("init_lora_weights", True)
        if str(beginning).lower() not in _BEGINNINGS:
            raise ValueError(
                f"{folder / CONFIG_FILE} has init_lora_weights={beginning!r}, with which PEFT writes the base weights: "
                "save the adapter as one of the weights before (PEFT's path_initial_model_for_weight_conversion)"
            )
        if wrong:
            raise ValueError(f"{folder / CONFIG_FILE} asks for {', '.join(wrong)}: not supported")
        return cls(folder, config, {name.removeprefix(PEFT_PREFIX): tensor for name, tensor in tensors.items()})

    def by_names_of(self, names: Iterable[str]) -> list[tuple[str, Tensor]]:
        """List the adapter's tensors by the names that a module's parameters have around which its layers are: PEFT
        leaves the adapter's own name out of a folder."""
        saved = {name: _IN_A_FOLDER.sub(r"\1", name) for name in names}
        return [(name, self.tensors[of]) for name, of in saved.items() if of != name and of in self.tensors]

    def layers_for(self, module: PreTrainedModel) -> AdapterLayers:
        """Make the adapter's layers around the module's own ones, by the names of these. The module is as before.

        Raises ValueError, naming them, for tensors that do not fit the module, and where PEFT is not installed.
        """
        peft = _peft()
        known = {key: value for key, value in self.config.items() if key not in ("inference_mode", "auto_mapping")}
        try:
            config = peft.PeftConfig.from_peft_type(**{**known, "inference_mode": True})
            with _own_randomness(module):
                peft.inject_adapter_in_model(config, module, adapter_name=ADAPTER)
            self._fill(module, peft)
            return take_out(module)
        except (TypeError, KeyError) as error:
            raise ValueError(f"{self.path / CONFIG_FILE} cannot be used: {error}") from error
        finally:
            take_out(module)
            if hasattr(module, "peft_config"):
                del module.peft_config

    def _fill(self, module: PreTrainedModel, peft: Any) -> None:
        """Give the injected layers the folder's values, in the folder's dtypes: the trainer computed in these."""
        expected = peft.get_peft_model_state_dict(module, adapter_name=ADAPTER, save_embedding_layers=False)
        wrong = [f"{name} is missing" for name in sorted(expected.keys() - self.tensors.keys())]
        # PEFT saves the frozen weights below adapters of embeddings and heads along.
        frozen = {name: weight for name, weight in module.named_parameters(remove_duplicate=False) if _FROZEN in name}
        others = sorted(self.tensors.keys() - expected.keys())
        wrong += [f"{name} has no place in the model" for name in others if name not in frozen]
        wrong += [
            f"{name} is not the model's: the adapter was trained on another one"
            for name in others
            if name in frozen and not torch.equal(self.tensors[name].to(frozen[name]), frozen[name])
        ]
        for name in sorted(expected.keys() & self.tensors.keys()):
            have, need = list(self.tensors[name].shape), list(expected[name].shape)
            wrong += [f"{name} is {have}, but the layer needs {need}"] if have != need else []
        if wrong:
            more = f"; and {len(wrong) - 8} more" if len(wrong) > 8 else ""
            raise ValueError(f"{self.path} does not fit {type(module).__name__}: {'; '.join(wrong[:8])}{more}")
        at = {id_of(tensor): name for name, tensor in expected.items()}
        for parameter in module.parameters():
            if (name := at.get(id_of(parameter))) is not None:
                value = self.tensors[name].to(device=parameter.device, copy=True)
                parameter.data = value  # not copy_: the dtype is the folder's
                parameter.requires_grad_(False)


def id_of(tensor: Tensor) -> tuple[int, object]:
    return tensor.data_ptr(), tensor.shape


def put_in(module: nn.Module, layers: AdapterLayers) -> None:
    """Put adapter layers into the module, in place of its own layers of these names, around which they were made."""
    for name, layer in layers.items():
        parent, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(parent), leaf, layer)


def take_out(module: nn.Module) -> AdapterLayers:
    """Take the adapter layers out of the module, so that it has its own ones again. Returns them by name; of those of
    several parameters of one layer, which are around each other, the outermost."""
    layers = adapter_layers(module)
    inside = {name for name in layers for other in layers if name.startswith(f"{other}.base_layer")}
    found = {name: layer for name, layer in layers.items() if name not in inside}
    put_in(module, {name: cast(Any, layer).get_base_layer() for name, layer in found.items()})
    return found


@contextmanager
def _own_randomness(module: nn.Module) -> Iterator[None]:
    """Leave torch's generators as they are: PEFT draws values for new layers, which the folder's ones replace."""
    device = next(module.parameters()).device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ValueError(f"adapters need PEFT, the extra `lora`: pip install -e '.[lora]' ({error})") from error
    return peft
