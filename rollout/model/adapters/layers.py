"""PEFT adapters in a hosted module: the module inside a PeftModel, the adapters' layers and their state.

PEFT's own verbs (`disable_adapter`, `set_adapter`, `merge_adapter`) change what a module computes without a word to the
engine. Their state is therefore part of what KV and digests are valid for. peft itself is not imported here: where no
one has imported it, no module has an adapter.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

from torch import Tensor, nn

PEFT_PREFIX = "base_model.model."  # begin of a name in a PeftModel, before the name in the module inside
_OUTSIDE = {
    "is_prompt_learning": "it learns a prompt, which a PeftModel adds outside of the module's layers",
    "is_adaption_prompt": "its attention keeps KV of its own",
    "alora_invocation_tokens": "its adapter begins at a token that a PeftModel looks for outside of the layers",
}

State = tuple[tuple[object, ...], ...]


def is_peft_model(module: nn.Module) -> bool:
    """Return whether this is PEFT's wrapper around a model."""
    return _is_a(module, "peft.peft_model", "PeftModel") or _is_a(module, "peft.mixed_model", "PeftMixedModel")


def without_peft_model(module: nn.Module) -> nn.Module:
    """Return the module inside a PeftModel, and any other module as it is.

    Raises ValueError, naming the method, for adapters that a PeftModel applies outside of the module's layers.
    """
    if not is_peft_model(module):
        return module
    wrapper = cast(Any, module)
    wrong = []
    for name, config in wrapper.peft_config.items():
        kind = getattr(config.peft_type, "value", config.peft_type)
        if kind == "XLORA":
            wrong.append(f"adapter {name!r} (XLORA) cannot be hosted: it mixes adapters outside of the layers")
        wrong += [
            f"adapter {name!r} ({kind}) cannot be hosted: {why}"
            for flag, why in _OUTSIDE.items()
            if getattr(config, flag, None)
        ]
    if wrong:
        raise ValueError("; ".join(wrong))
    return wrapper.base_model.model


class HostedAdapters:
    """The adapter layers of a module whose tree does not change. Without adapters all is empty."""

    def __init__(self, module: nn.Module) -> None:
        self._layers: list[tuple[str, Any]] = list(adapter_layers(module).items())

    def __bool__(self) -> bool:
        return bool(self._layers)

    def state(self) -> State:
        """Return the settings of each adapter layer that select and scale its weights."""
        return tuple(
            (
                layer.disable_adapters,
                tuple(layer.active_adapters),
                tuple(getattr(layer, "merged_adapters", ())),
                tuple(sorted(_scaling(layer).items())),
            )
            for _, layer in self._layers
        )

    @contextmanager
    def switched_off(self) -> Iterator[None]:
        """Run the base without the adapters in the block. Restores them, and which parameters are trained."""
        on = [layer for _, layer in self._layers if not layer.disable_adapters]
        flags = [(parameter, parameter.requires_grad) for layer in on for parameter in layer.parameters()]
        try:
            for layer in on:
                layer.enable_adapters(False)
            yield
        finally:
            for layer in on:
                layer.enable_adapters(True)
            for parameter, is_trained in flags:
                parameter.requires_grad_(is_trained)

    def merged(self) -> tuple[tuple[str, ...], ...]:
        """Return the adapters that are merged into the base weights, layer by layer."""
        return tuple(tuple(getattr(layer, "merged_adapters", ())) for _, layer in self._layers)

    def roots(self) -> dict[str, bytes]:
        """Return a root of the adapters' state, for the model digest. Empty without adapters: their digests are those
        of their tensors alone."""
        if not self._layers:
            return {}
        named = dict(zip((name for name, _ in self._layers), self.state(), strict=True))
        return {"adapters": hashlib.sha256(b"lockstep adapters " + json.dumps(named, sort_keys=True).encode()).digest()}

    def aliases(self, names: Iterator[str]) -> dict[str, str]:
        """Return the base model's own name of each of these tensors that an adapter layer has wrapped."""
        wrapped = {f"{name}.base_layer." for name, _ in self._layers}
        found = {}
        for name in names:
            head, middle, leaf = name.rpartition("base_layer.")
            if middle and head + middle in wrapped:
                found[head + leaf] = name
        return found


def bare_names(named_tensors: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors of a PeftModel, or of the module inside it, by their names in the module inside."""
    return ((name.removeprefix(PEFT_PREFIX), tensor) for name, tensor in named_tensors)


def adapter_layers(module: nn.Module) -> dict[str, nn.Module]:
    """Return the layers of adapters in a module, by name."""
    return {name: part for name, part in module.named_modules() if _is_adapter_layer(part)}


def _is_adapter_layer(module: nn.Module) -> bool:
    return _is_a(module, "peft.tuners.tuners_utils", "BaseTunerLayer") or _is_a(
        module, "peft.utils.other", "AuxiliaryTrainingWrapper"
    )


def _is_a(module: nn.Module, place: str, name: str) -> bool:
    kind = getattr(sys.modules.get(place), name, None)
    return kind is not None and isinstance(module, kind)


def _scaling(layer: Any) -> dict[str, object]:
    scaling = getattr(layer, "scaling", None)
    return {str(k): v for k, v in scaling.items()} if isinstance(scaling, Mapping) else {}
