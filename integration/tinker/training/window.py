"""The adapter layers in the engine's module, and the adapter whose tensors they have at the moment.

    engine.model.module ── layers of one AdapterSpec (PEFT) ── their parameters ── memory for samples: copied into
                           kept by spec, put in by name                        └─ in a pass: the adapter's own tensors

One thread uses it, and no step runs meanwhile. Layers of another rank or on other layers are exchanged. Adapters of one
spec have the same layers: those that sample in the same memory, which recorded decode steps read, so that these stay
valid. Publishing tensors for sampling starts a KV epoch.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor, nn

from ....rollout.model.adapters.folder import AdapterFolder, AdapterLayers
from ...service import RolloutService
from .targets import AdapterSpec, Targets, first_values, peft_config

logger = logging.getLogger(__name__)

_SWITCHING = "tinker"  # the key of the refusal to sample meanwhile
Tensors = Mapping[str, Tensor]  # of an adapter, by PEFT's names


class AdapterWindow:
    """The adapters of an engine's module, one at a time."""

    def __init__(self, service: RolloutService) -> None:
        """Take over the service, whose engine has read its model from a folder and has no adapter."""
        self._service, self.model = service, service.engine.model
        self.targets = Targets(self.model.module)
        self._layers: dict[AdapterSpec, AdapterLayers] = {}  # of the specs that are not in the module
        self._kept: Collection[AdapterSpec] = frozenset()  # specs whose layers are kept
        self._spec: AdapterSpec | None = None  # of the layers in the module
        self._parameters: dict[str, nn.Parameter] = {}  # of those, by PEFT's names
        self._published: str | None = None  # the version that samples have; None: they need to be published anew

    def knows(self, spec: AdapterSpec) -> bool:
        """Return whether layers of this spec have been made."""
        return spec == self._spec or spec in self._layers

    def has(self, spec: AdapterSpec) -> bool:
        """Return whether the layers in the module are of this spec, so that a pass exchanges none."""
        return spec == self._spec

    def keep(self, specs: Collection[AdapterSpec]) -> None:
        """Drop the layers of other specs than these; those in the module when others take their place."""
        self._kept = frozenset(specs)
        self._layers = {spec: layers for spec, layers in self._layers.items() if spec in specs}

    def prepare(self, spec: AdapterSpec) -> None:
        """Make the layers of a spec, unless they are known. Raises ValueError for layers that cannot be adapted; then
        those in the module are as before."""
        self.targets.of(spec)
        if not self.knows(spec):
            self._hold()
            self._put(spec)

    def publish(self, version: str, spec: AdapterSpec | None, tensors: Tensors) -> str:
        """Give the module an adapter, or its base alone (no spec), for sampling. Returns the digest of all weights.

        Nothing happens where that version is published already. No request is live.
        """
        service = self._service
        if self._published == version and service.engine.weight_digest is not None:
            return service.engine.weight_digest
        self._hold()
        self._put(spec)
        _check_names(tensors, self._parameters)
        for name, parameter in self._parameters.items():
            parameter.data.copy_(tensors[name])
        sessions = service.sessions
        commit = sessions.change_adapter(lambda: sessions.commit_adapter(version))
        service.engine.weights.allow_sampling(_SWITCHING)
        assert commit.digest is not None
        self._published = version
        return commit.digest

    @contextmanager
    def training(self, spec: AdapterSpec, tensors: Tensors) -> Iterator[dict[str, nn.Parameter]]:
        """Give the module an adapter for forwards and backwards in the block, with the engine's numerics. Yields its
        parameters by PEFT's names; they have no gradients before it and after it.

        Afterwards the parameters have the memory that samples read again: published tensors, and KV, are as before
        where the layers are the same ones.
        """
        module = self.model.module
        if spec != self._spec:
            self._hold()
            self._put(spec)
        former = {name: parameter.data for name, parameter in self._parameters.items()}
        _check_names(tensors, self._parameters)
        self._give(tensors)
        try:
            module.train()
            with self.model.training_numerics():
                yield self._parameters
        finally:
            module.eval()
            for parameter in self._parameters.values():
                parameter.grad = None
            self._give(former)

    def _hold(self) -> None:
        """Refuse to sample until an adapter is published."""
        self._published = None
        self._service.engine.weights.hold_for_update(refusal=(_SWITCHING, "an adapter is being switched"))

    def _give(self, tensors: Tensors) -> None:
        for name, parameter in self._parameters.items():
            parameter.data = tensors[name]

    def _put(self, spec: AdapterSpec | None) -> None:
        """Put the layers of a spec into the module in place of the former ones; None: take those out."""
        if spec == self._spec:
            return
        content: AdapterFolder | AdapterLayers = {}
        if spec is not None:
            content = self._layers.get(spec) or self._made(spec)
        former = self._service.engine.weights.replace_adapter(content)
        if self._spec is not None and self._spec in self._kept:
            self._layers[self._spec] = former
        self._spec = spec
        self._service.sessions.renamed()
        names = self.model.module.named_parameters()
        self._parameters = {name.replace(".default.", "."): own for name, own in names if ".lora_" in name}
        for parameter in self._parameters.values():
            parameter.requires_grad_(True)  # for passes; and so that no digest of it is kept

    def _made(self, spec: AdapterSpec) -> AdapterFolder:
        """Return an adapter, from which the engine makes layers around those of its module."""
        logger.info("layers of a new kind of adapters: %s", spec)
        layers = self.targets.of(spec)
        dtype, device = self.model.dtype, self.model.device
        values = {name: value.to(device, dtype) for name, value in first_values(layers, spec, 0).items()}
        return AdapterFolder(Path(f"rank {spec.rank}"), peft_config(layers, spec, ""), values)


def _check_names(tensors: Tensors, parameters: Mapping[str, nn.Parameter]) -> None:
    assert tensors.keys() == parameters.keys(), "an adapter has the tensors of its layers"
