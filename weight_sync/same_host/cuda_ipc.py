"""The same-host hand-over between processes that share a GPU: CUDA IPC handles as JSON, no copy on the sender's side.

A handle names an allocation of the sender's; the receiver opens it, copies into the sink, waits for the copies, and
drops it before it replies. Devices are named by UUID, so both ends may number them differently. Handles are made and
opened by `torch.multiprocessing.reductions` (`reduce_tensor`, `rebuild_cuda_tensor`), whose argument list the
frameworks send too; these use torch's private `_share_cuda_` and `_new_shared_cuda`, which have no public form.

CUDA does not report the size of a foreign allocation: a sender that gives a wrong storage size makes the receiver read
other memory of that GPU, or fail.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from ..errors import TransferFailed
from ..layout.bucket import DEFAULT_BUCKET_BYTES, byte_view
from ..layout.json_values import is_count
from ..layout.sink import Sink
from ..manifest import Manifest, NamedTensors, TensorSpec
from .handover import described, in_manifest_order, raise_if_any, read_described, shown, strided_problem

KIND = "cuda_ipc"
_MAX_HANDLE_BYTES = 16 << 10  # real ones have 64 bytes, or a few hundred for expandable segments
_UUID_PREFIX = "GPU-"


def visible_uuids() -> list[str]:
    """Return the UUIDs of this process's CUDA devices, by its own index."""
    return [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]


def device_index(device: str | int, uuids: Sequence[str]) -> int:
    """Return the index of a device given by UUID (with or without "GPU-", in any case) or by index among `uuids`.

    Raises ValueError for a device that this process does not see.
    """
    if is_count(device) and device < len(uuids):
        return device
    if isinstance(device, str):
        wanted = _bare(device)
        for index, uuid in enumerate(uuids):
            if _bare(uuid) == wanted:
                return index
    raise ValueError(f"device {shown(device)} is not visible here; visible: {', '.join(uuids) or 'none'}")


def _bare(uuid: str) -> str:
    return uuid.removeprefix(_UUID_PREFIX).lower()


@dataclass(frozen=True)
class CudaHandle:
    """One CUDA tensor of another process. Fields are unchecked until `problem` returns None."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # elements
    offset: int  # elements, in the storage
    device: str | int  # UUID, or index in this process
    handle: bytes | None  # of the allocation; None for an empty storage
    storage_bytes: int
    storage_offset: int  # bytes, of the storage in the allocation
    ref_counter: bytes | None  # informs the sender when the last receiver dropped the storage
    ref_counter_offset: int
    event: bytes | None  # recorded by the sender after its last write
    wait_for_event: bool

    @classmethod
    def of(cls, tensor: Tensor) -> CudaHandle:
        """Create a handle of a CUDA tensor. Each one is to be opened once; the sender keeps the tensor until then."""
        _, arguments = reductions.reduce_tensor(tensor.detach())
        device = visible_uuids()[arguments[6]]
        return cls.from_arguments((*arguments[:6], device, *arguments[7:]))

    @classmethod
    def from_arguments(cls, arguments: Sequence[Any]) -> CudaHandle:
        """Read the 15 arguments of `rebuild_cuda_tensor`; tensor and storage class and requires_grad are ignored."""
        _, shape, stride, offset, _, dtype, device, handle, num_bytes, start, _, counter, at, event, wait = arguments
        if handle is None and wait is None:  # as torch describes an empty storage
            wait = False
        return cls(
            dtype, tuple(shape), tuple(stride), offset, device, handle, num_bytes, start, counter, at, event, wait
        )

    def problem(self, uuids: Sequence[str]) -> str | None:
        """Return the reason why this cannot be opened, or None. Opens nothing."""
        for what, value in (("handle", self.handle), ("reference counter", self.ref_counter), ("event", self.event)):
            if value is not None and not (isinstance(value, bytes) and len(value) <= _MAX_HANDLE_BYTES):
                return f"{what} {shown(value)} is not bytes of a handle"
        counts = (self.storage_bytes, self.storage_offset, self.ref_counter_offset)
        if not all(is_count(value) for value in counts) or not isinstance(self.wait_for_event, bool):
            return "storage size, offset and reference counter must be counts, and waiting a truth value"
        if not isinstance(self.dtype, torch.dtype):
            return f"dtype {shown(self.dtype)}"
        if self.handle is None and self.storage_bytes:
            return f"no handle for {self.storage_bytes} bytes"
        try:
            device_index(self.device, uuids)
        except ValueError as error:
            return str(error)
        return strided_problem(self.shape, self.stride, self.offset, self.dtype.itemsize, self.storage_bytes)

    def open(self, uuids: Sequence[str], name: str) -> Tensor:
        """Return the sender's tensor itself, not a copy. Dropping the last reference to it closes the handle.

        Raises TransferFailed, with the tensor's name, if CUDA cannot open it.
        """
        arguments = (
            torch.Tensor,
            torch.Size(self.shape),
            self.stride,
            self.offset,
            torch.storage.TypedStorage,
            self.dtype,
            device_index(self.device, uuids),
            self.handle,
            self.storage_bytes,
            self.storage_offset,
            False,  # requires_grad
            self.ref_counter,
            self.ref_counter_offset,
            self.event,
            self.wait_for_event,
        )
        try:
            return reductions.rebuild_cuda_tensor(*arguments)
        except RuntimeError as error:
            raise TransferFailed(f"opening the CUDA handle of {name}: {error}") from error

    def to_json(self) -> dict[str, object]:
        """Return plain values, bytes as base64. Dtype and shape are in the description's lists."""
        return {
            "stride": list(self.stride),
            "offset": self.offset,
            "device": self.device,
            "handle": _encode(self.handle),
            "storage_bytes": self.storage_bytes,
            "storage_offset": self.storage_offset,
            "ref_counter": _encode(self.ref_counter),
            "ref_counter_offset": self.ref_counter_offset,
            "event": _encode(self.event),
            "wait_for_event": self.wait_for_event,
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any], spec: TensorSpec) -> CudaHandle:
        """Read the values of `to_json`.

        Raises ValueError for missing or unknown keys, a stride that is no list and bytes that are no base64.
        """
        own = {"stride", "offset", "device", "storage_bytes", "storage_offset", "ref_counter_offset", "wait_for_event"}
        encoded = {"handle", "ref_counter", "event"}
        if not isinstance(values, dict) or set(values) != own | encoded:
            raise ValueError(f"a handle has the keys {', '.join(sorted(own | encoded))}")
        if not isinstance(values["stride"], list):
            raise ValueError(f"stride {shown(values['stride'])} is not a list")
        return cls(
            dtype=spec.dtype,
            shape=spec.shape,
            stride=tuple(values["stride"]),
            offset=values["offset"],
            device=values["device"],
            handle=_decode(values["handle"]),
            storage_bytes=values["storage_bytes"],
            storage_offset=values["storage_offset"],
            ref_counter=_decode(values["ref_counter"]),
            ref_counter_offset=values["ref_counter_offset"],
            event=_decode(values["event"]),
            wait_for_event=values["wait_for_event"],
        )


def _encode(value: bytes | None) -> str | None:
    return None if value is None else base64.b64encode(value).decode()


def _decode(value: object) -> bytes | None:
    if value is None:
        return None
    if not isinstance(value, str):
        raise ValueError(f"{shown(value)} is not base64")
    try:
        return base64.b64decode(value, validate=True)
    except binascii.Error as error:
        raise ValueError(f"{shown(value)} is not base64: {error}") from error


class CudaIpcSender:
    """Hand CUDA tensors to receivers on this host, about `bucket_bytes` of them at a time, without a copy."""

    def __init__(self, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> None:
        self.bucket_bytes = bucket_bytes

    def buckets(self, tensors: NamedTensors, manifest: Manifest) -> Generator[dict[str, object], None, None]:
        """Yield descriptions of whole tensors; their memory is kept until the generator is resumed.

        Resume it after the receiver's reply. Raises ValueError if the tensors are not the manifest's, in its order.
        """
        held: list[tuple[TensorSpec, Tensor]] = []
        num_buckets = num_bytes = 0
        for spec, tensor in in_manifest_order(tensors, manifest):
            if held and num_bytes + spec.num_bytes > self.bucket_bytes:
                yield self._describe(num_buckets, held, manifest)
                held, num_buckets, num_bytes = [], num_buckets + 1, 0
            held.append((spec, tensor))
            num_bytes += spec.num_bytes
        if held:
            yield self._describe(num_buckets, held, manifest)

    def close(self) -> None:
        """Release memory that receivers have dropped."""
        torch.cuda.ipc_collect()

    def _describe(self, index: int, held: list[tuple[TensorSpec, Tensor]], manifest: Manifest) -> dict[str, object]:
        fields = described(KIND, index, [spec for spec, _ in held], manifest)
        fields["handles"] = [CudaHandle.of(tensor).to_json() for _, tensor in held]
        for device in {tensor.device for _, tensor in held}:
            torch.cuda.current_stream(device).synchronize()  # pending writes must be complete before the hand-over
        return fields


def read_cuda_description(
    description: Mapping[str, object], uuids: Sequence[str]
) -> tuple[list[tuple[TensorSpec, CudaHandle]], Manifest | None]:
    """Check a description without opening a handle. Raises ValueError listing every error."""
    problems: list[str] = []
    specs, manifest = read_described(description, KIND, {"handles"}, problems)
    values = description.get("handles")
    handles: list[tuple[TensorSpec, CudaHandle]] = []
    if not isinstance(values, list) or len(values) != len(specs):
        problems.append(f"handles must be a list of {len(specs)}, one for each tensor")
    else:
        for spec, fields in zip(specs, values, strict=True):
            try:
                handle = CudaHandle.from_json(fields, spec)
            except ValueError as error:
                problems.append(f"{spec.name}: {error}")
                continue
            if problem := handle.problem(uuids):
                problems.append(f"{spec.name}: {problem}")
            handles.append((spec, handle))
    raise_if_any(problems, "description of CUDA handles")
    return handles, manifest


def receive_cuda(description: Mapping[str, object], sink: Sink) -> tuple[TensorSpec, ...]:
    """Copy the described tensors into the sink; returns their specs when the copies are complete and the handles
    dropped.

    `sink.expect` is called with the whole manifest at the first bucket of an update, then with each bucket's tensors.
    Raises ValueError for an invalid description before any handle is opened, and TransferFailed if a handle cannot be
    opened.
    """
    uuids = visible_uuids()
    handles, manifest = read_cuda_description(description, uuids)
    sink.expect(manifest.tensors if manifest is not None else [spec for spec, _ in handles])
    devices: set[torch.device] = set()
    for spec, handle in handles:
        source = handle.open(uuids, spec.describe())
        data = byte_view(source)
        destination = sink.destination(spec.name, 0, spec.num_bytes)
        if destination is None:
            sink.write(spec.name, 0, data)
        else:
            destination.copy_(data)
            devices.add(destination.device)
        devices.add(data.device)
    for device in devices:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
    # `source` and `data` are dropped with this frame, after the copies and before the reply.
    return tuple(spec for spec, _ in handles)
