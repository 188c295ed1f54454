"""Engines that get their weights by a push from rank 0."""

from __future__ import annotations

import secrets
import tempfile
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch.distributed as dist
from transformers import PreTrainedModel

from ....weight_sync.disk.claims import claimed_folder
from ....weight_sync.target import Target
from ....weight_sync.transports.delta import DeltaTransport
from ....weight_sync.transports.disk import DiskTransport
from ....weight_sync.transports.group import DistributedTransport
from ....weight_sync.transports.same_host import TensorTransport
from ....weight_sync.transports.transport import Transport
from ...failures import RESUME, EngineFailed, OtherRankFailed, file_failure, files_of
from ...push.failures import PushFailed
from ...push.local_target import LocalTarget, run_verb
from ...push.pusher import WeightPusher
from ...push.remote_engine import ProcessLost, RemoteEngine, RemoteTarget, VerbServer
from ...ranks import Ranks
from ..backends.backend import TrainerBackend
from ..results.run_folder import SOCKETS
from ..settings.config import JobConfig
from .engine import LocalEngine, OtherModelEngine, copied_service


@contextmanager
def reported_losses() -> Iterator[None]:
    """Turn the loss of an engine's process into EngineFailed, in a block or a function."""
    try:
        yield
    except ProcessLost as error:
        raise EngineFailed(f"{error}; {RESUME}") from error


class PushedEngine(OtherModelEngine):
    """Base class of the engines to which rank 0 pushes the weights. The engine of each rank is a target."""

    _target: RemoteEngine | LocalTarget

    def __init__(
        self, config: JobConfig, model: PreTrainedModel, folder: Path, ranks: Ranks, backend: TrainerBackend
    ) -> None:
        super().__init__(config, model, backend)
        self._ranks = ranks
        with ExitStack() as self._exit:
            sockets = self._shared_folder()
            self._open(folder, _socket(sockets, ranks.rank))
            dist.barrier()  # from here on, every socket exists
            others = [RemoteTarget(_socket(sockets, rank)) for rank in range(1, ranks.num_ranks)]
            self._pusher = self._make_pusher([self._target, *others] if ranks.is_first else [])
            self._exit.callback(self._pusher.close)
            self._exit = self._exit.pop_all()  # it is all open; an error before closes what was

    @abstractmethod
    def _open(self, folder: Path, socket: Path) -> None:
        """Open this rank's engine with the weights of a folder, as `_target`, and the socket under which other ranks
        call it."""

    def _make_pusher(self, targets: list[Target]) -> WeightPusher:
        config = self._config
        return WeightPusher(
            targets, make_transport(config, self._ranks) if targets else None, verify=config.weights.verify,
            undo=config.weights.undo, pause_mode="in_place" if config.rollout.keep_kv else "retract",
            timeout_s=config.weights.timeout_s, share=self._share,
        )  # fmt: skip

    def sync(self, version: str) -> int:
        """See `JobEngine.sync`. Raises FileFailed on rank 0 where there is no room for the weights on their way, and
        EngineFailed on the rank whose engine's process is lost."""
        try:
            pushed = self._pusher.push_tensors(
                self._backend.named_tensors(), self._specs, version, in_flight=self._config.in_flight
            )
        except PushFailed as error:
            self._report_loss(error)
            if isinstance(error.__cause__, OSError):
                raise file_failure(error.__cause__, self._config.folder, f"synced to version {version}") from error
            if not self._ranks.is_first:
                raise OtherRankFailed(str(error)) from error
            raise
        return pushed.sent.num_bytes if pushed is not None else 0

    def _report_loss(self, error: PushFailed) -> None:
        """Raise EngineFailed on the rank whose engine's process is lost, and OtherRankFailed on the others. Does
        nothing where there is none. All ranks call it together."""

    @reported_losses()
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


class PushedLocalEngine(PushedEngine, LocalEngine):
    """An engine in this process with its own copy of the weights."""

    def _open(self, folder: Path, socket: Path) -> None:
        service = self.service = copied_service(self._config, folder, self._ranks)
        self._exit.callback(service.close)
        self._target = LocalTarget(service, socket.stem)
        if not self._ranks.is_first:  # rank 0 calls it from another process
            server = VerbServer(socket, lambda verb, timeout_s, args: run_verb(service, verb, timeout_s, args))
            server.start()
            self._exit.callback(server.close)


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
