"""An engine that gets its weights by a push from rank 0."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import torch.distributed as dist
from transformers import PreTrainedModel

from ....rollout.ahead.group import Spans
from ....rollout.ahead.rollouts import AheadCounts, RolloutsAhead
from ....rollout.completion import Completion
from ....rollout.sampling_params import SamplingParams
from ....weight_sync.disk.claims import claimed_folder
from ....weight_sync.target import Target
from ....weight_sync.transports.delta import DeltaTransport
from ....weight_sync.transports.disk import DiskTransport
from ....weight_sync.transports.group import DistributedTransport
from ....weight_sync.transports.same_host import TensorTransport
from ....weight_sync.transports.transport import Transport
from ...failures import OtherRankFailed, file_failure, files_of
from ...push.local_target import LocalTarget, run_verb
from ...push.pusher import PushFailed, WeightPusher
from ...push.remote_engine import RemoteEngine, RemoteTarget, VerbServer
from ...ranks import Ranks
from ..backends.backend import TrainerBackend
from ..config import JobConfig
from ..run_folder import SOCKETS
from .engine import OtherModelEngine, copied_service, divided, rollouts_ahead

_GENERATE_TIMEOUT_S = 3600.0


class PushedEngine(OtherModelEngine):
    """An engine in this process or in its own. Rank 0 pushes the weights to the engines of all ranks, each a target."""

    def __init__(
        self, config: JobConfig, model: PreTrainedModel, folder: Path, ranks: Ranks, backend: TrainerBackend
    ) -> None:
        super().__init__(config, model, backend)
        self._ranks = ranks
        self._ahead: RolloutsAhead | None = None  # of an engine in this process
        with ExitStack() as self._exit:
            self._open(config, folder, ranks)
            self._exit = self._exit.pop_all()  # it is all open; an error before closes what was

    def _open(self, config: JobConfig, folder: Path, ranks: Ranks) -> None:
        sockets = self._shared_folder()
        own = _socket(sockets, ranks.rank)
        if config.engines == "separate":
            settings = {k: v for k, v in asdict(config.engine_config()).items() if v is not None}
            settings["dtype"] = config.model.dtype
            rollout = config.rollout
            on_commit = "keep" if config.run.replay_schedule else rollout.on_commit
            options = ["--on-commit", on_commit]
            options += ["--max-lag", str(rollout.max_lag)] if on_commit == "drop" else []
            self._target: RemoteEngine | LocalTarget = RemoteEngine(folder, sockets, own.stem, settings, options)
            self._exit.callback(self._target.close)
        else:
            service = self.service = copied_service(config, folder, ranks)
            self._ahead = rollouts_ahead(service.engine, config)
            self._exit.callback(service.close)
            self._target = LocalTarget(service, own.stem)
            if not ranks.is_first:  # rank 0 calls it from another process
                server = VerbServer(own, lambda verb, timeout_s, args: run_verb(service, verb, timeout_s, args))
                server.start()
                self._exit.callback(server.close)
        dist.barrier()  # from here on, every socket exists
        others = [RemoteTarget(_socket(sockets, rank)) for rank in range(1, ranks.num_ranks)]
        targets: list[Target] = [self._target, *others] if ranks.is_first else []
        pause_mode = "in_place" if config.rollout.keep_kv else "retract"
        self._pusher = WeightPusher(
            targets, make_transport(config, ranks) if targets else None, verify=config.weights.verify,
            undo=config.weights.undo, pause_mode=pause_mode, timeout_s=config.weights.timeout_s, share=self._share,
        )  # fmt: skip
        self._exit.callback(self._pusher.close)

    def generate(self, prompts: Sequence[str], params: Sequence[SamplingParams] | SamplingParams) -> list[Completion]:
        """See `JobEngine.generate`."""
        if self.service is not None:
            with self.service.rollout(release_kv=True):
                return self.service.engine.generate(prompts, params)
        assert isinstance(self._target, RemoteEngine)
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        return self._target.generate(list(prompts), [asdict(p) for p in each], _GENERATE_TIMEOUT_S)

    def begin(
        self,
        step: int,
        prompts: Sequence[str],
        params: Sequence[SamplingParams],
        schedule: Sequence[Sequence[Spans]] | None = None,
    ) -> None:
        """See `JobEngine.begin`."""
        if self._ahead is not None:
            self._ahead.begin(step, prompts, params, schedule=schedule)
        else:
            assert isinstance(self._target, RemoteEngine)
            self._target.begin(step, list(prompts), [asdict(p) for p in params], schedule, _GENERATE_TIMEOUT_S)

    def settle(self) -> None:
        """See `JobEngine.settle`."""
        if self.service is not None and self._ahead is not None:
            with self.service.rollout(release_kv=True):
                self._ahead.settle()
        else:
            assert isinstance(self._target, RemoteEngine)
            self._target.settle(_GENERATE_TIMEOUT_S)

    def groups(self, step: int, num_groups: int) -> Iterator[list[Completion]]:
        """See `JobEngine.groups`."""
        if self.service is not None and self._ahead is not None:
            with self.service.rollout(release_kv=True):
                completions = self._ahead.finish(step)
            yield from divided(completions, num_groups)
            return
        assert isinstance(self._target, RemoteEngine)
        for index in range(num_groups):
            yield self._target.finish_group(step, index, _GENERATE_TIMEOUT_S)

    def counts(self) -> AheadCounts:
        """See `JobEngine.counts`."""
        if self._ahead is not None:
            return self._ahead.counts
        assert isinstance(self._target, RemoteEngine)
        return self._target.counts(self._config.weights.timeout_s)

    def sync(self, version: str) -> int:
        """See `JobEngine.sync`. Raises FileFailed on rank 0 where there is no room for the weights on their way."""
        try:
            pushed = self._pusher.push_tensors(
                self._backend.named_tensors(), self._specs, version, in_flight=self._config.in_flight
            )
        except PushFailed as error:
            if isinstance(error.__cause__, OSError):
                raise file_failure(error.__cause__, self._config.folder, f"synced to version {version}") from error
            if not self._ranks.is_first:
                raise OtherRankFailed(str(error)) from error
            raise
        return pushed.sent.num_bytes if pushed is not None else 0

    def weight_digest(self) -> str | None:
        """See `JobEngine.weight_digest`."""
        return self._target.call("finish_digest", timeout_s=self._config.weights.timeout_s)["result"]  # type: ignore[return-value]

    def close(self) -> None:
        """See `JobEngine.close`."""
        self._exit.close()

    def _shared_folder(self) -> Path:
        """Make a folder for the sockets, the same one for every rank. Unix sockets need a short path."""
        paths: list[str | None] = [None]
        if self._ranks.is_first:
            path = Path(tempfile.gettempdir()) / f"{SOCKETS}{secrets.token_hex(4)}"
            with files_of(path):
                paths = [str(self._exit.enter_context(claimed_folder(path, 0o700)))]
        dist.broadcast_object_list(paths, src=0)
        return Path(str(paths[0]))

    def _share(self, error: str | None) -> str | None:
        shared = [error]
        dist.broadcast_object_list(shared, src=0)
        return shared[0]


def make_transport(config: JobConfig, ranks: Ranks) -> Transport:
    """Make the transport that the job's settings name, for rank 0."""
    weights = config.weights
    folder = Path(weights.folder) if weights.folder else config.folder / "weights"
    makers: dict[str, Callable[[], Transport]] = {
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


def _socket(folder: Path, rank: int) -> Path:
    return folder / f"engine-{rank}.sock"
