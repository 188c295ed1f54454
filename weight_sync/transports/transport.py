"""The sending side of every path: from the trainer's tensors to targets that have a session open.

A transport draws the tensors once, in the manifest's order, and hands them to all targets; the digests are taken on the
way by whoever made the iterator. What it raises leaves the sessions to the caller.
"""

from __future__ import annotations

import shutil
import socket
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from ..delta.chunk import DeltaChunk, DeltaStats, stats_by_tensor
from ..delta.difference import Check, encode_delta
from ..delta.stream import pack_chunks, save_delta
from ..disk.folder import save_folder
from ..errors import TransferFailed, WeightSyncError
from ..group.protocol import send_update
from ..group.rendezvous import Rendezvous
from ..group.weight_group import WeightGroup
from ..layout.bucket import DEFAULT_BUCKET_BYTES, byte_view
from ..manifest import Manifest, NamedTensors, TensorSpec
from ..same_host.cuda_ipc import CudaIpcSender
from ..same_host.shared_memory import SharedMemorySender
from ..target import Target, TargetError


@dataclass(frozen=True)
class Sent:
    """What travelled to each target."""

    num_bytes: int
    density: float | None = None  # share of the elements that a delta changes; None: sent in full


class Transport(Protocol):
    """One way for weights to travel."""

    def send(self, targets: Sequence[Target], manifest: Manifest, tensors: NamedTensors, timeout_s: float) -> Sent:
        """Bring the tensors to every target. Raises TargetError, TargetsFailed or TransferFailed naming who failed."""

    def committed(self) -> None:
        """What was sent last is what every target has."""

    def rejected(self) -> None:
        """What was sent last was given up."""

    def close(self) -> None:
        """Give back groups, segments and folders."""


class TargetsFailed(TransferFailed):
    """More than one target failed, some perhaps because others had. failures: what each said, by name."""

    def __init__(self, failures: Mapping[str, Exception]) -> None:
        super().__init__("; ".join(f"{name}: {error}" for name, error in failures.items()))
        self.failures = dict(failures)


def on_all(targets: Sequence[Target], call: Callable[[Target], object]) -> dict[str, Exception]:
    """Run `call` on every target at the same time; returns the failures by target name."""
    failures: dict[str, Exception] = {}

    def failure(target: Target) -> BaseException | None:
        try:
            call(target)
        except BaseException as error:  # noqa: BLE001 - sorted below, when all have ended
            return error
        return None

    if len(targets) <= 1:  # a thread costs as much as a small bucket's copy
        errors = [failure(target) for target in targets]
    else:
        with ThreadPoolExecutor(len(targets), thread_name_prefix="target") as pool:
            errors = list(pool.map(failure, targets))
    for target, error in zip(targets, errors, strict=True):
        if isinstance(error, TargetError | TransferFailed | ValueError):
            failures[target.name] = error
        elif error is not None:
            raise error
    return failures


def raise_failures(failures: Mapping[str, Exception]) -> None:
    """Raise the only failure, or TargetsFailed for several."""
    if len(failures) == 1:
        raise next(iter(failures.values()))
    if failures:
        raise TargetsFailed(failures)


class DistributedTransport:
    """One broadcast for all targets, over a process group of its own with this process as rank 0."""

    def __init__(
        self, *, backend: str = "gloo", bucket_bytes: int = DEFAULT_BUCKET_BYTES, host: str = "127.0.0.1",
        device: torch.device | None = None,
    ) -> None:  # fmt: skip
        """host: the address under which the targets reach this process."""
        self._backend, self._bucket_bytes, self._host, self._device = backend, bucket_bytes, host, device
        self._group: WeightGroup | None = None
        self._members: tuple[_Member, ...] = ()

    def send(self, targets: Sequence[Target], manifest: Manifest, tensors: NamedTensors, timeout_s: float) -> Sent:
        """See `Transport.send`."""
        self.send_as("lockstep", targets, manifest, tensors, timeout_s)
        return Sent(manifest.num_bytes)

    def send_as(
        self, load_format: str, targets: Sequence[Target], manifest: Manifest, tensors: NamedTensors,
        timeout_s: float, **options: object,
    ) -> None:  # fmt: skip
        """Broadcast tensors in our own protocol to receivers that read them as `load_format`."""
        group = self._joined(targets, timeout_s)

        def receive(target: Target) -> object:
            try:
                return target.call(
                    "update_weights_from_distributed", timeout_s=timeout_s, group_name=group.name,
                    load_format=load_format, manifest=manifest.to_json(), **options,
                )  # fmt: skip
            except BaseException:
                # Or the sender would wait for it until the deadline.
                group.abort(f"{target.name} failed")
                group.keys.close()
                raise

        with ThreadPoolExecutor(1, thread_name_prefix="receive") as pool:
            receiving = pool.submit(on_all, targets, receive)
            try:
                send_update(group, manifest, tensors, self._bucket_bytes, timeout_s)
            except WeightSyncError:
                self._leave(targets)
                raise_failures(receiving.result())  # they know more of it
                raise
            except BaseException:
                self._leave(targets)
                raise
            failures = receiving.result()
        if failures:
            self._leave(targets)
            raise_failures(failures)

    def committed(self) -> None:
        """Nothing is kept."""

    def rejected(self) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Leave the group; the targets leave when they are asked to join another."""
        if self._group is not None:
            self._group.destroy()
            self._group = None

    def _joined(self, targets: Sequence[Target], timeout_s: float) -> WeightGroup:
        members = _members_of(targets, timeout_s, self._members if self._group is not None else ())
        if self._group is not None and self._members == members and self._group.broken is None:
            return self._group
        if self._group is not None:
            self._leave(targets)
        name, port = f"lockstep-{uuid.uuid4().hex[:12]}", free_port(self._host)
        offsets, size = {}, 1
        for member in members:
            offsets[member.target], size = size, size + member.num_ranks

        rendezvous = Rendezvous(
            self._host,
            port,
            0,
            size,
            name,
            self._backend,
            timeout_s,
            self._device,  # type: ignore[arg-type]
        )

        def join(target: Target) -> object:
            try:
                return target.call(
                    "init_weights_update_group", timeout_s=timeout_s, master_address=self._host, master_port=port,
                    rank_offset=offsets[target.name], world_size=size, group_name=name, backend=self._backend,
                )  # fmt: skip
            except BaseException:
                rendezvous.cancel()  # the others need not wait for this one
                raise

        with ThreadPoolExecutor(1, thread_name_prefix="join") as pool:
            joining = pool.submit(on_all, targets, join)
            try:
                self._group = rendezvous.join()
            except WeightSyncError:
                _leave_group(name, targets)
                raise_failures(joining.result())
                raise
            failures = joining.result()
        if failures:
            self._leave(targets)
            raise_failures(failures)
        self._members = members
        return self._group

    def _leave(self, targets: Sequence[Target]) -> None:
        """Destroy the group at both ends."""
        if self._group is not None:
            name = self._group.name
            self.close()
            _leave_group(name, targets)


@dataclass(frozen=True)
class _Member:
    """What one target is to a group."""

    target: str
    num_ranks: int = 1
    engines: str = ""  # behind a router: which, so that a change is noticed


def _members_of(targets: Sequence[Target], timeout_s: float, known: Sequence[_Member]) -> tuple[_Member, ...]:
    """How many ranks each target takes: those that hold its model, or a router's those of its workers. Raises as
    `raise_failures`.

    known: what the last update found. An engine's ranks stay as many; a router's workers come and go.
    """
    found = {member.target: member for member in known if not member.engines}

    def ask(target: Target) -> None:
        state = target.call("state", timeout_s=timeout_s)
        engines = state.get("members")
        found[target.name] = _Member(target.name, int(state.get("num_ranks", 1)))  # type: ignore[call-overload]
        if isinstance(engines, list):
            found[target.name] = _Member(target.name, sum(one["num_ranks"] for one in engines), repr(engines))

    raise_failures(on_all([target for target in targets if target.name not in found], ask))
    return tuple(found[target.name] for target in targets)


def _leave_group(name: str, targets: Sequence[Target]) -> None:
    """Let targets leave a group, or end their wait for it; one that is gone, or has left already, is passed over."""
    on_all(targets, lambda target: target.call("destroy_weights_update_group", timeout_s=10.0, group_name=name))


class TensorTransport:
    """Memory of this host, bucket by bucket; each target answers when its copy is complete."""

    def __init__(
        self, *, bucket_bytes: int = DEFAULT_BUCKET_BYTES, folder: Path | str = "/dev/shm", cuda: bool = False
    ) -> None:
        """cuda: hand over CUDA tensors by IPC handles, instead of copies in shared memory under `folder`."""
        self._sender = CudaIpcSender(bucket_bytes) if cuda else SharedMemorySender(bucket_bytes, folder)

    def send(self, targets: Sequence[Target], manifest: Manifest, tensors: NamedTensors, timeout_s: float) -> Sent:
        """See `Transport.send`."""
        self.send_as(None, targets, manifest, tensors, timeout_s)
        return Sent(manifest.num_bytes)

    def send_as(
        self, load_format: str | None, targets: Sequence[Target], manifest: Manifest, tensors: NamedTensors,
        timeout_s: float, **options: object,
    ) -> None:  # fmt: skip
        """Hand over buckets to receivers that read them as `load_format`."""
        buckets = self._sender.buckets(tensors, manifest)
        try:
            for description in buckets:
                failures = on_all(
                    targets,
                    lambda target, description=description: target.call(
                        "update_weights_from_tensor", timeout_s=timeout_s, descriptions=[description],
                        load_format=load_format, **options,
                    ),
                )  # fmt: skip
                raise_failures(failures)
        finally:
            buckets.close()

    def committed(self) -> None:
        """Nothing is kept."""

    def rejected(self) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Unlink the segment."""
        self._sender.close()


class DiskTransport:
    """A folder of safetensors that every target reads; it is removed once they have."""

    def __init__(self, folder: Path | str) -> None:
        self._folder = Path(folder)

    def send(self, targets: Sequence[Target], manifest: Manifest, tensors: NamedTensors, timeout_s: float) -> Sent:
        """See `Transport.send`."""
        with self.new_folder() as path:
            save_folder(path, tensors, manifest.version)
            read_from(path, targets, timeout_s)
        return Sent(manifest.num_bytes)

    @contextmanager
    def new_folder(self) -> Iterator[Path]:
        """A path that is free, for as long as it is needed."""
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"update-{uuid.uuid4().hex[:12]}"
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)

    def committed(self) -> None:
        """Nothing is kept."""

    def rejected(self) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing is kept."""


def read_from(path: Path, targets: Sequence[Target], timeout_s: float, **options: object) -> None:
    """Let every target read a folder. Raises TargetError, or TargetsFailed for several."""

    def read(target: Target) -> object:
        # The whole session is verified in the end; the folder's digests would be the same ones.
        return target.call(
            "update_weights_from_disk", timeout_s=timeout_s, model_path=str(path), verify=False, **options
        )

    raise_failures(on_all(targets, read))


class DeltaTransport:
    """Only what changed since the last committed push, over another transport; the first time everything.

    Keeps a copy of the weights that the targets have, in host memory.
    """

    def __init__(self, inner: DistributedTransport | TensorTransport | DiskTransport, *, check: Check = "pre") -> None:
        """check: how closely targets look at what they hold; "touched" is enough where the result is verified."""
        self._inner = inner
        self._check = check
        self._base: dict[str, Tensor] = {}  # overwritten by each push as it goes; whole where somebody holds it
        self._holders: tuple[str, ...] = ()  # the targets that have the base
        self._sending_to: tuple[str, ...] = ()

    def send(self, targets: Sequence[Target], manifest: Manifest, tensors: NamedTensors, timeout_s: float) -> Sent:
        """See `Transport.send`."""
        holders, self._holders = self._holders, ()
        self._sending_to = tuple(target.name for target in targets)
        if holders != self._sending_to:
            return self._inner.send(targets, manifest, self._keeping(tensors), timeout_s)
        chunks = [self._kept(chunk) for chunk in self._encode(tensors)]
        stats = sum(stats_by_tensor(chunk.header for chunk in chunks).values(), DeltaStats())
        if isinstance(self._inner, DiskTransport):
            with self._inner.new_folder() as path:
                save_delta(path, None, manifest.version, chunks)
                read_from(path, targets, timeout_s, delta_check=self._check)
        else:
            named = [(f"delta {index}", buffer) for index, buffer in enumerate(pack_chunks(chunks))]
            packed = Manifest(manifest.version, tuple(TensorSpec.of(name, buffer) for name, buffer in named))
            self._inner.send_as("delta", targets, packed, named, timeout_s, delta_check=self._check)
        return Sent(stats.bytes_moved, stats.density)

    def committed(self) -> None:
        """What was sent is the base of the next delta."""
        self._holders = self._sending_to

    def rejected(self) -> None:
        """The next one is sent in full: it mends a target that does not have what it should have."""
        self._holders = ()

    def _keeping(self, tensors: NamedTensors) -> Iterator[tuple[str, Tensor]]:
        """The tensors as the base keeps them, in the memory of the base before where they fit."""
        before, self._base = self._base, {}
        for name, tensor in tensors:
            held = before.get(name)
            if held is None or TensorSpec.of(name, held) != TensorSpec.of(name, tensor):
                held = torch.empty(tensor.shape, dtype=tensor.dtype)
            self._base[name] = held.copy_(tensor.detach())
            yield name, held

    def _encode(self, tensors: NamedTensors) -> Iterator[DeltaChunk]:
        """Chunks against the base, which becomes the tensors, one after the other, as they are encoded."""

        def passing() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in tensors:
                on_host = tensor.detach().cpu()
                yield name, on_host
                held = self._base.get(name)
                if held is not None and TensorSpec.of(name, held) == TensorSpec.of(name, on_host):
                    held.copy_(on_host)  # else the encoder raises, once it has listed all that do not fit

        return encode_delta(self._base, passing(), chunk_digests=self._check != "touched")

    def _kept(self, chunk: DeltaChunk) -> DeltaChunk:
        """The chunk without memory of the trainer's, where it is to be sent after the tensor was let go."""
        header = chunk.header
        if header.kind != "full":
            return chunk
        held = byte_view(self._base[header.name])
        return DeltaChunk(header, held[header.offset : header.offset + header.num_bytes])

    def close(self) -> None:
        """Forget the base."""
        self._base, self._holders = {}, ()
        self._inner.close()


def free_port(host: str) -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]
