"""The adapters in training and those kept for sampling, on one engine. One thread calls it, between steps."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ....kernels.sampling.draws import derive_seed
from ...service import RolloutService
from .adapter import AdamParams, TrainedAdapter
from .checkpoints import CheckpointInfo, Checkpoints, Content, RunInfo, adapter_digest, expiry, path_of
from .config import TinkerConfig
from .data import BadInput, Datum, batch_of
from .passes import Passes, PassResult
from .targets import AdapterSpec, first_values, peft_config
from .window import AdapterWindow, Tensors

logger = logging.getLogger(__name__)

BASE = "base"  # the version of the base model without an adapter


@dataclass(frozen=True)
class SamplerWeights:
    """The weights that a sampler has. Example: `SamplerWeights("base")`."""

    version: str
    path: str | None = None  # of the checkpoint that holds them, too
    digest: str | None = None  # of the checkpoint's adapter


@dataclass(frozen=True)
class _Snapshot:
    spec: AdapterSpec | None
    tensors: Tensors


@dataclass(frozen=True)
class SaveOptions:
    """How a checkpoint is saved."""

    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: Mapping[str, str] | None = None


class Trainer:
    """The verbs of training, and the weights of samplers."""

    def __init__(self, service: RolloutService, config: TinkerConfig) -> None:
        """Publish the base, whose digest checkpoints name. The engine has read its model from a folder."""
        self._config, self.engine = config, service.engine
        self._window = AdapterWindow(service)
        self._passes = Passes(self._window, config.microbatch_bytes)
        self.checkpoints = Checkpoints(config.checkpoints)
        self.base_digest = self._window.publish(BASE, None, {})
        self._adapters: dict[str, TrainedAdapter] = {}  # by model id
        self._snapshots: OrderedDict[str, _Snapshot] = OrderedDict()  # by version, those used last at the end

    # -- models -----------------------------------------------------------------------------------------------------

    def create(self, model_id: str, spec: AdapterSpec, seed: int | None, metadata: Mapping[str, str] | None) -> None:
        """Begin an adapter whose first values follow from the seed (None: 0). Raises BadInput."""
        spec.check(self._config.max_lora_rank)
        self._window.prepare(spec)
        layers = self._window.targets.of(spec)
        values = first_values(layers, spec, derive_seed(seed or 0, spec.rank))
        self._add(model_id, TrainedAdapter(spec, values, self.engine.model.dtype, self.engine.model.device), metadata)

    def create_from(self, model_id: str, path: str, optimizer: bool, metadata: Mapping[str, str] | None) -> None:
        """Begin an adapter with a checkpoint's weights, and with `optimizer` its optimizer's state. Raises BadInput."""
        info, content = self._read(path)
        info.spec.check(self._config.max_lora_rank)
        self._window.prepare(info.spec)
        assert content.masters is not None
        model = self.engine.model
        adapter = TrainedAdapter(info.spec, content.masters, model.dtype, model.device)
        adapter.load(content.masters, content.moments if optimizer else None)
        adapter.num_steps = info.num_steps
        self._add(model_id, adapter, metadata)

    def _add(self, model_id: str, adapter: TrainedAdapter, metadata: Mapping[str, str] | None) -> None:
        self._adapters[model_id] = adapter
        self._drop_layers()
        self.checkpoints.note_run(RunInfo(model_id, self._config.model_name, adapter.spec, time.time(), metadata))

    def load(self, model_id: str, path: str, optimizer: bool) -> None:
        """Give a model a checkpoint's weights. Raises BadInput for one of another kind of adapter; the model is as
        before then."""
        adapter = self.adapter(model_id)
        info, content = self._read(path)
        if info.spec != adapter.spec:
            raise BadInput(f"{path} has {info.spec}, and the model {adapter.spec}")
        assert content.masters is not None
        adapter.load(content.masters, content.moments if optimizer else None)
        adapter.num_steps = info.num_steps

    def adapter(self, model_id: str) -> TrainedAdapter:
        """Return the adapter of a model. Raises BadInput for one that was unloaded, or could not be made."""
        if model_id not in self._adapters:
            raise BadInput(f"model {model_id} is not loaded")
        return self._adapters[model_id]

    def runs_beside_samples(self, model_id: str) -> bool:
        """Return whether passes of a model can run between the steps of samples: they exchange no layers."""
        adapter = self._adapters.get(model_id)
        return adapter is None or self._window.has(adapter.spec)

    def makes_layers(self, spec: AdapterSpec) -> bool:
        """Return whether a model of this spec needs layers that are not made yet."""
        return not self._window.knows(spec)

    def drop(self, model_id: str) -> None:
        """Forget a model, if it is there."""
        self._adapters.pop(model_id, None)
        self._drop_layers()

    def _drop_layers(self) -> None:
        """Drop the layers of specs that no model and no sampler has."""
        trained = {adapter.spec for adapter in self._adapters.values()}
        self._window.keep(trained | {kept.spec for kept in self._snapshots.values() if kept.spec is not None})

    # -- training ---------------------------------------------------------------------------------------------------

    def run_pass(
        self, model_id: str, data: Sequence[Datum], loss_fn: str, loss_config: Mapping[str, float | str], *,
        backward: bool,
    ) -> PassResult:  # fmt: skip
        """Run data forward, and with `backward` add the gradients to the model's. Raises BadInput."""
        adapter, model = self.adapter(model_id), self.engine.model
        batch = batch_of(data, loss_fn, loss_config, vocab_size=model.vocab_size, max_length=model.max_model_len)
        return self._passes.run(adapter, batch, backward=backward)

    def step(self, model_id: str, params: AdamParams) -> dict[str, float]:
        """Update a model's weights; returns metrics. Raises BadInput."""
        return self.adapter(model_id).step(params)

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def save(self, model_id: str, name: str, options: SaveOptions) -> str:
        """Save a model with its optimizer's state; returns the checkpoint's path. Raises BadInput."""
        adapter = self.adapter(model_id)
        masters, moments = adapter.state()
        content = Content(adapter.weights(), self._peft(adapter.spec), masters, moments)
        return self._write(model_id, path_of(model_id, "weights", name), adapter, content, options).path

    def save_for_sampler(self, model_id: str, name: str, options: SaveOptions) -> str:
        """Save a model's weights for sampling; returns the checkpoint's path. Raises BadInput."""
        adapter = self.adapter(model_id)
        content = Content(adapter.snapshot(), self._peft(adapter.spec))
        info = self._write(model_id, path_of(model_id, "sampler_weights", name), adapter, content, options)
        self._keep(weights_at(info).version, _Snapshot(adapter.spec, content.weights))
        return info.path

    def snapshot(self, model_id: str, version: str) -> None:
        """Keep a copy of a model's weights for sampling, under this version. Raises BadInput."""
        adapter = self.adapter(model_id)
        self._keep(version, _Snapshot(adapter.spec, adapter.snapshot()))

    def _write(
        self, model_id: str, path: str, adapter: TrainedAdapter, content: Content, options: SaveOptions
    ) -> CheckpointInfo:
        info = CheckpointInfo(
            path, self._config.model_name, self.base_digest, adapter_digest(content.weights), adapter.spec,
            time.time(), expires_at=expiry(options.ttl_seconds), user_metadata=options.user_metadata,
            num_steps=adapter.num_steps,
        )  # fmt: skip
        return self.checkpoints.write(info, content, overwrite=options.overwrite)

    def _read(self, path: str, *, training: bool = True) -> tuple[CheckpointInfo, Content]:
        info = self.checkpoints.info(path)
        if info.base_digest != self.base_digest:
            raise BadInput(f"{path} is of another base model ({info.base_model}, SHA-256 {info.base_digest[:16]}...)")
        return info, self.checkpoints.read(info, self.engine.model.device, training=training)

    def _peft(self, spec: AdapterSpec) -> dict[str, object]:
        return peft_config(self._window.targets.of(spec), spec, self._config.model_name)

    # -- samplers ---------------------------------------------------------------------------------------------------

    def publish(self, weights: SamplerWeights) -> str:
        """Give the engine a sampler's weights; returns the digest of all weights. No request is live. Raises BadInput
        for weights that are not kept any more."""
        if weights.version == BASE:
            return self._window.publish(BASE, None, {})
        found = self._snapshots.get(weights.version) or self._from_checkpoint(weights)
        self._keep(weights.version, found)
        return self._window.publish(weights.version, found.spec, found.tensors)

    def _from_checkpoint(self, weights: SamplerWeights) -> _Snapshot:
        if weights.path is None:
            raise BadInput(
                f"the weights of {weights.version} are not kept any more: a server keeps those of "
                f"{self._config.max_snapshots} samplers (--max-snapshots). Save weights by name to keep them on disk"
            )
        info, content = self._read(weights.path, training=False)
        if info.digest != weights.digest:
            raise BadInput(f"{weights.path} was overwritten since the sampler was made")
        return _Snapshot(info.spec, content.weights)

    def _keep(self, version: str, snapshot: _Snapshot) -> None:
        self._snapshots[version] = snapshot
        self._snapshots.move_to_end(version)
        while len(self._snapshots) > self._config.max_snapshots:
            dropped, _ = self._snapshots.popitem(last=False)
            logger.info("the weights of sampler %s are dropped", dropped)
        self._drop_layers()

    def drop_snapshot(self, version: str) -> None:
        """Forget the weights of a sampler, if they are there."""
        self._snapshots.pop(version, None)
        self._drop_layers()


def weights_at(info: CheckpointInfo) -> SamplerWeights:
    """Return the weights of a checkpoint, for a sampler."""
    return SamplerWeights(f"{info.path}@{info.digest[:16]}", info.path, info.digest)
