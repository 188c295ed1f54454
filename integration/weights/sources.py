"""The sources of an update's bytes. Each function returns a function that fills a sink and returns the written tensors.

Reading begins when the session calls it, while the engine's sampling is stopped; wrong arguments are refused before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel

from ...weight_sync.delta.apply import Check, apply_delta
from ...weight_sync.delta.packed import BufferSink, apply_stream
from ...weight_sync.delta.stream import DELTA_MANIFEST_FILE, DeltaManifest, load_delta
from ...weight_sync.disk.folder import load_folder, read_folder
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
    check: Check, timeout_s: float, have_arrived: Callable[[], None] | None,
) -> Receive:  # fmt: skip
    """Receive broadcasts of rank 0, in our own sender's protocol ("lockstep", "delta") or in other frameworks' formats,
    which need specs: names, dtypes and shapes. have_arrived: called when all broadcasts of the latter were received.
    Raises ValueError for an unknown format."""
    expected = None if manifest is None else Manifest.from_json(manifest)

    def whole(sink: Sink) -> Sequence[TensorSpec]:
        return receive_update(group, sink, timeout_s, expected).tensors

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
    """Buckets of our own sender (`SharedMemorySender`) in shared memory. Keeps the buckets of a delta until the last
    one."""

    def __init__(self, receiver: TensorReceiver) -> None:
        self._receiver = receiver
        self._packed = BufferSink()

    def source(
        self, description: Mapping[str, object], load_format: str | None, check: Check, timeout_s: float
    ) -> Receive:
        """Read a bucket, or with load_format "delta" a bucket of changes, which are applied with the last one."""

        def whole(sink: Sink) -> Sequence[TensorSpec]:
            return self._receiver.receive(description, sink)

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


def from_named_tensors(named_tensors: NamedTensors, to_the_end: bool) -> Receive:
    """Write tensors of this process, one at a time as the iterator yields them. to_the_end: read the iterator to its
    end also after a failure, since gathering may be a collective."""
    if isinstance(named_tensors, Mapping):
        raise ValueError("named tensors are pairs, not a mapping: pass its items(), or model.named_parameters()")
    tensors = named_tensors if isinstance(named_tensors, Sequence) else iter(named_tensors)

    def receive(sink: Sink) -> Sequence[TensorSpec]:
        try:
            return _write_all(tensors, sink)
        finally:
            for _ in tensors if to_the_end else ():
                pass

    return receive


def from_folder(
    path: Path,
    digests: dict[str, str] | None,
    check: Check,
    timeout_s: float,
    refuse_part: Callable[[Sequence[TensorSpec]], None],
    skeleton_for: Callable[[Sequence[TensorSpec]], PreTrainedModel | None],
    require_base: Callable[[DeltaManifest, Check, Path], None],
) -> Receive:
    """Read a folder in Hugging Face layout, or a delta folder. digests, if given, is filled with the folder's
    digests. refuse_part: called with the tensors of the former before anything is written; may raise ValueError.
    skeleton_for: returns the module that names of these tensors have to be converted for, if so. require_base: called
    with the manifest of a delta before anything is written; may raise DigestMismatch."""

    def receive(sink: Sink) -> Sequence[TensorSpec]:
        if (path / DELTA_MANIFEST_FILE).is_file():
            delta = load_delta(path)
            require_base(delta.manifest, check, path)
            apply_delta(delta.specs, delta.chunks(), sink, check=check, timeout_s=timeout_s)
            manifest: Manifest | None = delta.manifest.manifest
            specs = delta.specs
        else:
            plan = read_folder(path)
            if (skeleton := skeleton_for(plan.specs)) is not None:
                return load_published(plan, skeleton, sink, refuse_part, timeout_s, verify=digests is not None)
            refuse_part(plan.specs)
            load_folder(plan, sink, timeout_s=timeout_s)
            manifest, specs = plan.manifest, plan.specs
        if digests is not None and manifest is not None:
            digests.update(manifest.digests)
        return specs

    return receive


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
