"""The sources of an update's bytes. Each function returns a function that fills a sink and returns the written tensors.

Reading begins when the session calls it, while the engine's sampling is stopped; wrong arguments are refused before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...weight_sync.delta.apply import Check, apply_delta
from ...weight_sync.delta.packed import BufferSink, apply_stream
from ...weight_sync.delta.stream import DELTA_MANIFEST_FILE, DeltaManifest, StoredDelta, load_delta
from ...weight_sync.disk.folder import DiskPlan, load_folder, read_folder
from ...weight_sync.group.framework_protocol import receive_flattened_bucket, receive_tensors
from ...weight_sync.group.protocol import receive_update
from ...weight_sync.group.weight_group import WeightGroup
from ...weight_sync.layout.bucket import byte_view
from ...weight_sync.layout.sink import Sink
from ...weight_sync.manifest import Manifest, NamedTensors, TensorSpec, specs_from_lists, specs_of
from ...weight_sync.pickles.ipc_handles import read_ipc_handles
from ...weight_sync.pickles.payload import read_framework_payload
from ...weight_sync.same_host.shared_memory import TensorReceiver
from ...weight_sync.transaction.receiving import Receive
from ..service_config import ServiceConfig
from .published_folder import load_published

OWN_FORMATS = ("lockstep", "delta")  # of updates over a group; other formats are those of other frameworks' senders
_FOREIGN = {None: receive_tensors, "flattened_bucket": receive_flattened_bucket}


def from_group(
    group: WeightGroup, load_format: str | None, specs: tuple[Sequence, Sequence, Sequence], manifest: str | None,
    check: Check, timeout_s: float, have_arrived: Callable[[], None] | None, digests: dict[str, str],
) -> Receive:  # fmt: skip
    """Receive broadcasts of rank 0, in our own sender's protocol ("lockstep", "delta") or in other frameworks' formats,
    which need specs: names, dtypes and shapes. have_arrived: called when all broadcasts of the latter were received.
    digests: filled with those of the sender's manifest, and of the given one. Raises ValueError for an unknown
    format."""
    expected = None if manifest is None else Manifest.from_json(manifest)

    def whole(sink: Sink) -> Sequence[TensorSpec]:
        sent = receive_update(group, sink, timeout_s, expected)
        digests.update({**sent.digests, **({} if expected is None else expected.digests)})
        return sent.tensors

    def delta(sink: Sink) -> Sequence[TensorSpec]:
        packed = BufferSink()
        receive_update(group, packed, timeout_s, expected)
        return apply_stream(packed.buffers(), sink, check=check, timeout_s=timeout_s)

    if load_format in OWN_FORMATS:
        return whole if load_format == "lockstep" else delta
    wanted = specs_from_lists(*specs)
    take_foreign = _FOREIGN.get(load_format)
    if take_foreign is None:
        raise ValueError(f"unknown load_format {load_format!r} of a distributed update")

    def foreign(sink: Sink) -> Sequence[TensorSpec]:
        take_foreign(group, wanted, sink, timeout_s)
        if have_arrived is not None:
            have_arrived()
        return wanted

    return foreign


class SharedMemory:
    """Buckets of our own sender (`SharedMemorySender`) in shared memory. Keeps the buckets of a delta, and the digests
    of an update, until the last one."""

    def __init__(self, receiver: TensorReceiver) -> None:
        self._receiver = receiver
        self._packed = BufferSink()
        self._segment: object = None  # of the sender whose update has come last
        self._digests: Mapping[str, str] = {}  # of the manifest of that update

    def forget(self) -> None:
        """Free the buckets of a delta that does not go on, and the memory of its sender."""
        self._packed, self._segment, self._digests = BufferSink(), None, {}
        self._receiver.close()

    def source(
        self,
        description: Mapping[str, object],
        load_format: str | None,
        check: Check,
        timeout_s: float,
        digests: dict[str, str],
    ) -> Receive:
        """Read a bucket, or with load_format "delta" a bucket of changes, which are applied with the last one. digests:
        filled with those of the update's manifest, which comes with its first bucket."""

        def whole(sink: Sink) -> Sequence[TensorSpec]:
            specs = self._receiver.receive(description, sink)
            segment, manifest = description.get("path"), description.get("manifest")
            if manifest is not None:
                self._segment, self._digests = segment, Manifest.from_values(manifest).digests
            if segment == self._segment:
                digests.update(self._digests)
            return specs

        def delta(sink: Sink) -> Sequence[TensorSpec]:
            if description.get("manifest") is not None:  # the first bucket of an update
                self._packed = BufferSink()
            self._receiver.receive(description, self._packed)
            if not self._packed.is_complete:
                return ()
            packed, self._packed = self._packed, BufferSink()
            return apply_stream(packed.buffers(), sink, check=check, timeout_s=timeout_s)

        return delta if load_format == "delta" else whole


def from_payload(payload: str, load_format: str | None, config: ServiceConfig) -> Receive:
    """Read other frameworks' pickled tensors."""

    def receive(sink: Sink) -> Sequence[TensorSpec]:
        tensors = read_framework_payload(
            payload, load_format, max_bytes=config.max_pickle_bytes, allow=config.allow_pickle
        )
        return _write_all(tensors, sink)

    return receive


def from_ipc(
    specs: Sequence[TensorSpec], handles: str, tensor_sizes: Sequence[int] | None, device: torch.device,
    config: ServiceConfig,
) -> Receive:  # fmt: skip
    """Read tensors behind vLLM's pickled IPC handles."""

    def receive(sink: Sink) -> Sequence[TensorSpec]:
        sink.expect(specs)  # before any memory is attached
        tensors = read_ipc_handles(
            handles, specs, device, tensor_sizes=tensor_sizes, max_bytes=config.max_pickle_bytes,
            allow=config.allow_pickle,
        )  # fmt: skip
        return _write_all(tensors, sink)

    return receive


def from_named_tensors(
    named_tensors: NamedTensors, to_the_end: bool, memory_of_others: Callable[[], Callable[[str, Tensor], bool]]
) -> Receive:
    """Write tensors of this process, one at a time as the iterator yields them. to_the_end: read the iterator to its
    end also after a failure, since gathering may be a collective. memory_of_others: see `ReplicaWeights`; of a list
    such tensors are copied before the first is written, of an iterator they are refused by ValueError."""
    if isinstance(named_tensors, Mapping):
        raise ValueError("named tensors are pairs, not a mapping: pass its items(), or model.named_parameters()")
    tensors = named_tensors if isinstance(named_tensors, Sequence) else iter(named_tensors)

    def in_memory_of_its_own() -> NamedTensors:
        is_of_others = memory_of_others()
        if isinstance(tensors, Sequence):
            return [(name, tensor.clone() if is_of_others(name, tensor) else tensor) for name, tensor in tensors]
        return _refused_of_others(tensors, is_of_others)

    def receive(sink: Sink) -> Sequence[TensorSpec]:
        try:
            return _write_all(in_memory_of_its_own(), sink)
        finally:
            for _ in tensors if to_the_end else ():
                pass

    return receive


def _refused_of_others(tensors: NamedTensors, is_of_others: Callable[[str, Tensor], bool]) -> NamedTensors:
    for name, tensor in tensors:
        if is_of_others(name, tensor):
            raise ValueError(
                f"{name}: it lies in memory of other weights of the engine, which are written: pass a copy"
            )
        yield name, tensor


class FolderSource:
    """A folder in Hugging Face layout, or a delta folder, as the source of an update."""

    def __init__(
        self,
        path: Path,
        digests: dict[str, str] | None,
        check: Check,
        timeout_s: float,
        refuse_part: Callable[[Sequence[TensorSpec]], None],
        skeleton_for: Callable[[Sequence[TensorSpec]], PreTrainedModel | None],
        require_base: Callable[[DeltaManifest, Check, Path], None],
    ) -> None:
        """Read nothing yet. digests, if given, is filled with the folder's digests. refuse_part: called with the
        tensors of the former before anything is written; may raise ValueError. skeleton_for: returns the module that
        names of these tensors have to be converted for, if so. require_base: called with the manifest of a delta before
        anything is written; may raise DigestMismatch."""
        self._path, self._digests, self._check, self._timeout_s = path, digests, check, timeout_s
        self._refuse_part, self._skeleton_for, self._require_base = refuse_part, skeleton_for, require_base
        self._found: StoredDelta | DiskPlan | None = None

    def look(self) -> None:
        """Read the heads of the files. Raises ValueError where the folder cannot be read, before any request is aborted
        for its update."""
        is_delta = (self._path / DELTA_MANIFEST_FILE).is_file()
        self._found = found = load_delta(self._path) if is_delta else read_folder(self._path)
        if isinstance(found, DiskPlan) and self._skeleton_for(found.specs) is None:
            self._refuse_part(found.specs)

    def receive(self, sink: Sink) -> Sequence[TensorSpec]:
        """Read the folder into the sink, after `look` or by itself, and return its tensors."""
        if self._found is None:
            self.look()
        found, timeout_s, digests = self._found, self._timeout_s, self._digests
        if isinstance(found, StoredDelta):
            self._require_base(found.manifest, self._check, self._path)
            apply_delta(found.specs, found.chunks(), sink, check=self._check, timeout_s=timeout_s)
            manifest: Manifest | None = found.manifest.manifest
        else:
            assert found is not None
            if (skeleton := self._skeleton_for(found.specs)) is not None:
                return load_published(found, skeleton, sink, self._refuse_part, timeout_s, verify=digests is not None)
            load_folder(found, sink, timeout_s=timeout_s)
            manifest = found.manifest
        if digests is not None and manifest is not None:
            digests.update(manifest.digests)
        return found.specs


def _write_all(named_tensors: NamedTensors, sink: Sink) -> Sequence[TensorSpec]:
    """Write whole tensors as they come. A list of tensors is checked as a whole before the first byte. Raises
    ValueError for a name that comes twice, before its second tensor is written."""
    is_whole = isinstance(named_tensors, Sequence)
    if is_whole:
        sink.expect(specs_of(named_tensors))
    specs, seen = [], set()
    for name, tensor in named_tensors:
        spec = TensorSpec.of(name, tensor)
        if name in seen:
            raise ValueError(f"the update does not fit: {name}: named more than once")
        seen.add(name)
        if not is_whole:
            sink.expect([spec])
        sink.write(name, 0, byte_view(tensor))
        specs.append(spec)
    return specs
