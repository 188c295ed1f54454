"""A sender of the frameworks' pickled payloads, as an SGLang engine's trainer has one."""

from __future__ import annotations

import base64
import io
import pickle
import struct
from multiprocessing import reduction

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from lockstep.weight_sync.layout.bucket import byte_view
from lockstep.weight_sync.manifest import NamedTensors, dtype_name
from lockstep.weight_sync.pickles.payload import LOAD_FORMATS, LoadFormat
from lockstep.weight_sync.pickles.payload_tensors import METADATA
from lockstep.weight_sync.same_host.cuda_ipc import visible_uuids


def serialize_for_engine(named_tensors: NamedTensors, load_format: LoadFormat | None = None) -> str:
    """Return the payload of one rank as base64 text, which `read_framework_payload` or an SGLang engine reads.

    CPU tensors are copied into named shared memory, which torch frees after they were read once. CUDA tensors travel as
    IPC handles, with their device's UUID: keep them unchanged until the reply. Raises ValueError for a load format that
    is unknown, names that come twice, and a flattened bucket of tensors on several devices.
    """
    if load_format not in LOAD_FORMATS:
        raise ValueError(f"load_format {load_format!r} is not one of None, 'direct', 'flattened_bucket'")
    tensors = [(name, tensor.detach()) for name, tensor in named_tensors]
    names = [name for name, _ in tensors]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"tensors named more than once: {', '.join(twice)}")
    if load_format != "flattened_bucket":
        data = _dump([(name, tensor if tensor.is_cuda else tensor.clone()) for name, tensor in tensors])
    else:
        data = _dump_bucket(tensors)
    return base64.b64encode(data).decode()


class _Pickler(reduction.ForkingPickler):
    """Pickle CUDA devices by UUID, as SGLang's patch of torch does."""

    def reducer_override(self, value: object) -> object:
        if not isinstance(value, Tensor) or not value.is_cuda:
            return NotImplemented
        rebuild, arguments = reductions.reduce_tensor(value)
        return rebuild, (*arguments[:6], visible_uuids()[arguments[6]], *arguments[7:])


def _dump(value: object) -> bytes:
    strategy = torch.multiprocessing.get_sharing_strategy()
    buffer = io.BytesIO()
    # By name: descriptors can be fetched by this process's children only.
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        _Pickler(buffer, 3).dump(value)
    finally:
        torch.multiprocessing.set_sharing_strategy(strategy)
    return buffer.getvalue()


def _dump_bucket(tensors: list[tuple[str, Tensor]]) -> bytes:
    """Pickle a flattened bucket with metadata of SGLang's class, by hand-written opcodes: SGLang need not be there."""
    devices = {tensor.device for _, tensor in tensors}
    if len(devices) > 1:
        raise ValueError(f"a flattened bucket of tensors on several devices: {', '.join(sorted(map(str, devices)))}")
    pieces = [byte_view(tensor) for _, tensor in tensors]
    flat = torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.uint8)
    end, metadata = 0, []
    for (name, tensor), piece in zip(tensors, pieces, strict=True):
        start, end = end, end + piece.numel()
        fields = {
            "name": _text(name),
            "shape": b"ctorch\nSize\n(" + b"".join(map(_number, tensor.shape)) + b"t\x85R",
            "dtype": f"ctorch\n{dtype_name(tensor.dtype)}\n".encode(),
            "start_idx": _number(start),
            "end_idx": _number(end),
            "numel": _number(end - start),
        }
        state = b"".join(_text(key) + value for key, value in fields.items())
        metadata.append("c{}\n{}\n".format(*METADATA).encode() + b")\x81}(" + state + b"ub")
    # PROTO 3, a dict; the tensor's pickle without its own PROTO and STOP; a list of new objects; STOP.
    tensor_part = _text("flattened_tensor") + _dump(flat)[2:-1]
    return b"\x80\x03}(" + tensor_part + _text("metadata") + b"](" + b"".join(metadata) + b"eu."


def _text(value: str) -> bytes:
    raw = value.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def _number(value: int) -> bytes:
    return pickle.dumps(value, protocol=2)[2:-1]
