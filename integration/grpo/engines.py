"""The engine of one rank of the main job, and how the trainer's weights get into it.

    sync        engines     the engine                                the weights
    in_place    local       aliases the trainer's module              stay where they are
    in_place    local       a copy, where the trainer shards          are gathered into it, on every rank
    others      local       a copy in each rank                       rank 0 pushes to all, over Unix sockets
    others      separate    a process of its own for each rank        likewise

With `parallel` settings several ranks share one engine, and each of them copies its part of the trainer's weights.
"""

from __future__ import annotations

import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict
from pathlib import Path

import torch.distributed as dist
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...rollout.completion import Completion, FinishReason
from ...rollout.engine import Engine
from ...rollout.model.hosted_model import HostedModel
from ...rollout.ranks.channel import RankChannel
from ...rollout.sampling_params import SamplingParams
from ...weight_sync.target import Target
from ...weight_sync.transports.delta import DeltaTransport
from ...weight_sync.transports.disk import DiskTransport
from ...weight_sync.transports.group import DistributedTransport
from ...weight_sync.transports.same_host import TensorTransport
from ...weight_sync.transports.transport import Transport
from ..push.adapters.named_tensors import outgoing_specs, unwrapped
from ..push.local_target import LocalTarget, run_verb
from ..push.pusher import WeightPusher
from ..push.remote_engine import RemoteEngine, RemoteTarget, VerbServer
from ..ranks import Ranks
from ..service import RolloutService
from .backends import TrainerBackend
from .config import JobConfig
from .plan import engine_config

_GENERATE_TIMEOUT_S = 3600.0


class JobEngine(ABC):
    """What the job asks of its engine. Every rank calls `sync` together."""

    hosted: HostedModel  # the trainer's module with the engine's numerics
    service: RolloutService | None = None  # of the engine in this process; None: it is in one of its own
    ranks: RankChannel | None = None  # among the ranks of an engine of several

    @abstractmethod
    def generate(self, prompts: Sequence[str], params: Sequence[SamplingParams] | SamplingParams) -> list[Completion]:
        """Complete every prompt with the weights that were synced last."""

    @abstractmethod
    def sync(self, version: str) -> int:
        """Bring the trainer's weights into the engine as `version`; returns the bytes that this rank moved."""

    @abstractmethod
    def weight_digest(self) -> str | None:
        """The model digest of what the engine holds."""

    def announce_step(self) -> AbstractContextManager[None]:
        """The optimizer's step runs in here."""
        return nullcontext()

    @abstractmethod
    def close(self) -> None:
        """End what this engine started."""


class LocalEngine(JobEngine):
    """Base of the engines that are in this process."""

    service: RolloutService  # type: ignore[assignment]

    def generate(self, prompts: Sequence[str], params: Sequence[SamplingParams] | SamplingParams) -> list[Completion]:
        """See `JobEngine.generate`."""
        with self.service.rollout(release_kv=True):
            return self.service.engine.generate(prompts, params)

    def weight_digest(self) -> str | None:
        """See `JobEngine.weight_digest`."""
        return self.service.engine.weight_digest

    def close(self) -> None:
        """See `JobEngine.close`."""
        self.service.close()


class AliasedEngine(LocalEngine):
    """Samples with the trainer's own module; a sync moves nothing."""

    def __init__(
        self, config: JobConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, backend: TrainerBackend
    ) -> None:
        self.service = RolloutService(Engine(model, engine_config(config), tokenizer=tokenizer))
        self.hosted = self.service.engine.model
        self._backend = backend

    def sync(self, version: str) -> int:
        """See `JobEngine.sync`."""
        commit = self.service.commit_in_place(version, source=self._backend.named_tensors())
        return commit.bytes_copied

    def announce_step(self) -> AbstractContextManager[None]:
        """See `JobEngine.announce_step`."""
        return self.service.optimizer_step()


class _OtherModel(JobEngine):
    """Base of the engines with weights of their own. The trainer's module is hosted for its numerics alone."""

    def __init__(self, config: JobConfig, model: PreTrainedModel, backend: TrainerBackend) -> None:
        self.hosted = HostedModel.adopt(
            model, dtype=None, device=None, invariant=config.engine.invariant, k_blocks=config.engine.k_blocks
        )
        self._specs = outgoing_specs(unwrapped(model))  # before it is sharded
        self._backend = backend
        self._config = config


class GatheredEngine(_OtherModel, LocalEngine):
    """A copy in this rank, into which every rank writes what all of them gather."""

    def __init__(
        self, config: JobConfig, model: PreTrainedModel, folder: Path, ranks: Ranks, backend: TrainerBackend
    ) -> None:
        super().__init__(config, model, backend)
        self.service = copied_service(config, folder, ranks)

    def sync(self, version: str) -> int:
        """See `JobEngine.sync`."""
        return _write_gathered(self.service, self._backend, self._config, version)


class ShardedEngine(LocalEngine):
    """One engine of several ranks: each holds its part of the model, and brings its prompts to the first of them."""

    ranks: RankChannel  # type: ignore[assignment]

    def __init__(
        self, config: JobConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, backend: TrainerBackend
    ) -> None:
        self.service = RolloutService(Engine(model, engine_config(config), tokenizer=tokenizer))
        self.hosted = self.service.engine.model  # this rank's part; its `trained_module` is the whole model
        self.ranks = self.service.engine.ranks
        self._backend, self._config = backend, config

    def generate(self, prompts: Sequence[str], params: Sequence[SamplingParams] | SamplingParams) -> list[Completion]:
        """See `JobEngine.generate`; all ranks of the replica call it together."""
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        own = {"prompts": list(prompts), "params": [asdict(p) for p in each]}
        # Others may come late: rank 0 writes logs and checkpoints.
        brought = self.ranks.gather_json(own, timeout_s=self._config.run.timeout_s)
        all_params = [SamplingParams(**plain) for of_rank in brought for plain in of_rank["params"]]
        if not all_params:
            return []
        with self.service.rollout(release_kv=True):
            all_prompts = [prompt for of_rank in brought for prompt in of_rank["prompts"]]
            completions = self.service.engine.generate(all_prompts, all_params)
        num_samples = [sum(plain["n"] for plain in of_rank["params"]) for of_rank in brought]
        first = sum(num_samples[: self.ranks.mesh.local_rank])
        return completions[first : first + num_samples[self.ranks.mesh.local_rank]]

    def sync(self, version: str) -> int:
        """See `JobEngine.sync`."""
        with self.ranks.watch.phase("weight update"):
            return _write_gathered(self.service, self._backend, self._config, version)


def _write_gathered(service: RolloutService, backend: TrainerBackend, config: JobConfig, version: str) -> int:
    """Update an engine that has a copy, or a part, with the whole tensors that all ranks gather one after another;
    returns the bytes that were written here."""
    service.begin_weight_update(weight_version=version, undo=config.weights.undo)  # type: ignore[arg-type]
    record = service.update_weights_from_named_tensors(backend.named_tensors())
    service.end_weight_update()
    service.release_weight_undo()
    return record.num_bytes


class PushedEngine(_OtherModel):
    """An engine that rank 0 pushes to, as one target among those of all ranks: here, or in a process of its own."""

    def __init__(
        self, config: JobConfig, model: PreTrainedModel, folder: Path, ranks: Ranks, backend: TrainerBackend
    ) -> None:
        super().__init__(config, model, backend)
        self._ranks = ranks
        self._exit = ExitStack()
        sockets = self._shared_folder()
        own = _socket(sockets, ranks.rank)
        if config.engines == "separate":
            settings = {k: v for k, v in asdict(engine_config(config)).items() if v is not None}
            settings["dtype"] = config.model.dtype
            self._target: RemoteEngine | LocalTarget = RemoteEngine(folder, sockets, own.stem, settings)
            self._exit.callback(self._target.close)
        else:
            service = self.service = copied_service(config, folder, ranks)
            self._exit.callback(service.close)
            self._target = LocalTarget(service, own.stem)
            if not ranks.is_first:  # rank 0 reaches it from its own process
                server = VerbServer(own, lambda verb, timeout_s, args: run_verb(service, verb, timeout_s, args))
                server.start()
                self._exit.callback(server.close)
        dist.barrier()  # every socket is there
        others = [RemoteTarget(_socket(sockets, rank)) for rank in range(1, ranks.num_ranks)]
        targets: list[Target] = [self._target, *others] if ranks.is_first else []
        self._pusher = WeightPusher(
            targets, make_transport(config, ranks) if targets else None, verify=config.weights.verify,
            undo=config.weights.undo, timeout_s=config.weights.timeout_s, share=self._share,
        )  # fmt: skip
        self._exit.callback(self._pusher.close)

    def generate(self, prompts: Sequence[str], params: Sequence[SamplingParams] | SamplingParams) -> list[Completion]:
        """See `JobEngine.generate`."""
        if self.service is not None:
            with self.service.rollout(release_kv=True):
                return self.service.engine.generate(prompts, params)
        assert isinstance(self._target, RemoteEngine)
        plain_params = asdict(params) if isinstance(params, SamplingParams) else [asdict(p) for p in params]
        answers = self._target.generate(list(prompts), plain_params, _GENERATE_TIMEOUT_S)
        return [completion_from_plain(answer) for answer in answers]

    def sync(self, version: str) -> int:
        """See `JobEngine.sync`."""
        pushed = self._pusher.push_tensors(self._backend.named_tensors(), self._specs, version)
        return pushed.sent.num_bytes if pushed is not None else 0

    def weight_digest(self) -> str | None:
        """See `JobEngine.weight_digest`."""
        return self._target.call("finish_digest", timeout_s=self._config.weights.timeout_s)["result"]  # type: ignore[return-value]

    def close(self) -> None:
        """See `JobEngine.close`."""
        self._exit.close()

    def _shared_folder(self) -> Path:
        """A folder for the sockets, the same on every rank; Unix sockets need a short path."""
        paths = [tempfile.mkdtemp(prefix="lockstep-") if self._ranks.is_first else None]
        dist.broadcast_object_list(paths, src=0)
        folder = Path(str(paths[0]))
        if self._ranks.is_first:
            self._exit.callback(shutil.rmtree, folder, ignore_errors=True)
        return folder

    def _share(self, error: str | None) -> str | None:
        shared = [error]
        dist.broadcast_object_list(shared, src=0)
        return shared[0]


def make_engine(
    config: JobConfig, model: PreTrainedModel, folder: Path, tokenizer: PreTrainedTokenizerBase, ranks: Ranks,
    backend: TrainerBackend,
) -> JobEngine:  # fmt: skip
    """The engine that a job's settings name. folder: where the model was loaded from; call it before the backend wraps
    the model. Every rank calls it together."""
    if config.parallel.num_ranks > 1:
        return ShardedEngine(config, model, tokenizer, backend)
    if config.sync != "in_place":
        return PushedEngine(config, model, folder, ranks, backend)
    if backend.shares_storage:
        return AliasedEngine(config, model, tokenizer, backend)
    return GatheredEngine(config, model, folder, ranks, backend)


def make_transport(config: JobConfig, ranks: Ranks) -> Transport:
    """How rank 0 sends."""
    weights = config.weights
    folder = Path(weights.folder) if weights.folder else config.folder / "weights"
    makers = {
        "distributed": lambda: DistributedTransport(
            bucket_bytes=weights.num_bucket_bytes,
            backend="nccl" if ranks.device.type == "cuda" else "gloo",
            device=ranks.device,
        ),
        "tensor": lambda: TensorTransport(bucket_bytes=weights.num_bucket_bytes, cuda=ranks.device.type == "cuda"),
        "disk": lambda: DiskTransport(folder),
        "delta": lambda: DeltaTransport(
            TensorTransport(bucket_bytes=weights.num_bucket_bytes), check="touched" if weights.verify else "pre"
        ),
    }
    return makers[config.sync]()


def copied_service(config: JobConfig, folder: Path, ranks: Ranks) -> RolloutService:
    """An engine with weights of its own, in this process."""
    settings = asdict(engine_config(config)) | {"dtype": config.model.dtype, "device": str(ranks.device)}
    return RolloutService(Engine(folder, type(engine_config(config)).from_dict(settings)))


def completion_from_plain(values: dict[str, object]) -> Completion:
    """The fields that the job reads of a completion that came as JSON."""
    reason = values["finish_reason"]
    kept = {
        "finish_reason": None if reason is None else FinishReason(**reason),  # type: ignore[arg-type]
        "weight_versions": (),
        **{name: tuple(values[name]) for name in ("prompt_ids", "token_ids", "logprobs")},  # type: ignore[call-overload]
    }
    names = ("id", "index", "text", "num_cached_tokens", "num_retractions", "weight_version", "weight_digest")
    return Completion(**{name: values[name] for name in names}, **kept)  # type: ignore[arg-type]


def _socket(folder: Path, rank: int) -> Path:
    return folder / f"engine-{rank}.sock"
