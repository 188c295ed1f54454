"""The payload in which RL frameworks hand tensors to an engine on their host: base64 of multiprocessing's pickle.

It is parsed without being run (`inert`). The names it may contain stand in the tables of `payload_tensors`; sglang is
never imported. Every tensor is planned and checked before any memory is attached.

Kinds, after SGLang's `update_weights_from_tensor`: a list of (name, tensor), where a tensor may be wrapped in a
LocalSerializedTensor, a further pickle for each tensor-parallel rank; or a flattened bucket, one uint8 tensor with the
tensors back to back, without alignment, and their metadata.
"""

from __future__ import annotations

import base64
import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..layout.json_values import is_count
from ..same_host.handover import MAX_OFFENDERS, raise_if_any, shown
from .inert import MAX_NESTED_OPCODES, Budget, Call, UnsafePickle, parse
from .payload_tensors import (
    ALLOWED,
    BUCKETS,
    METADATA,
    PER_RANK,
    TensorPlan,
    counts_of,
    described_value,
    dtype_of,
    name_of,
    open_all,
    plan_tensor,
    state_of,
)

LoadFormat = Literal["direct", "flattened_bucket"]
LOAD_FORMATS: tuple[LoadFormat | None, ...] = (None, "direct", "flattened_bucket")
DEFAULT_MAX_BYTES = 64 << 20  # of pickle: a payload holds handles, not values


def read_framework_payload(
    serialized: str | bytes,
    load_format: str | None,
    tp_rank: int = 0,
    *,
    max_bytes: int = DEFAULT_MAX_BYTES,
    allow: bool = True,
    timeout_s: float = 10.0,
) -> list[tuple[str, Tensor]]:
    """Read the named tensors of one payload: base64 text, or the pickle itself as bytes.

    They are in the sender's memory (except slices of a bucket that are not aligned, which are copied): copy them, wait
    for the copies, drop them, and only then reply. allow: False refuses every payload.

    Raises UnsafePickle, a ValueError, quoting a name that is not in our tables; ValueError listing every tensor whose
    description is wrong, before any memory is attached; TransferFailed if the memory cannot be attached in time.
    """
    if not allow:
        raise UnsafePickle("pickled payloads are turned off (allow_pickle=False): send a description instead")
    if load_format not in LOAD_FORMATS:
        raise ValueError(f"load_format {shown(load_format)} is not one of None, 'direct', 'flattened_bucket'")
    problems: list[str] = []
    payload = parse_payload(serialized, max_bytes)
    if load_format == "flattened_bucket":
        flat, slices = _plan_bucket(payload, problems)
        raise_if_any(problems, "flattened bucket")
        whole = open_all([flat], timeout_s)[0]
        return [(one.name, one.cut(whole)) for one in slices]
    named = _plan_named(payload, tp_rank, max_bytes, problems)
    raise_if_any(problems, "named tensors")
    tensors = open_all([plan for _, plan in named], timeout_s)
    return [(name, tensor) for (name, _), tensor in zip(named, tensors, strict=True)]


def parse_payload(serialized: object, max_bytes: int, budget: Budget | None = None) -> object:
    """Parse base64 text, or a pickle as bytes, to plain values and records (`inert.parse`). Raises ValueError for a
    payload of more than `max_bytes`, and for one that is no base64."""
    if not isinstance(serialized, str | bytes):
        raise ValueError(f"a payload is base64 text or bytes, not {shown(serialized)}")
    num_bytes = len(serialized) * 3 // 4 if isinstance(serialized, str) else len(serialized)
    if num_bytes > max_bytes + 2:  # base64 pads up to two bytes
        raise ValueError(f"a payload of {num_bytes} bytes; the limit is {max_bytes}")
    if isinstance(serialized, bytes):
        return parse(serialized, ALLOWED, budget)
    try:
        data = base64.b64decode(serialized, validate=True)
    except ValueError as error:  # binascii.Error is one; so is text that is not ASCII
        raise ValueError(f"the payload is not base64: {error}") from error
    return parse(data, ALLOWED, budget)


def _plan_named(payload: object, tp_rank: int, max_bytes: int, problems: list[str]) -> list[tuple[str, TensorPlan]]:
    if type(payload) is not list:
        raise ValueError(f"a list of (name, tensor) was expected, not {described_value(payload)}")
    named: dict[str, TensorPlan] = {}
    # For all nested pickles together: a value with several references is parsed several times.
    left, budget = max_bytes, Budget(MAX_NESTED_OPCODES)
    for index, entry in enumerate(payload):
        if len(problems) >= MAX_OFFENDERS:
            problems.append("the rest was not read")
            break
        if type(entry) not in (tuple, list) or len(entry) != 2 or type(entry[0]) is not str:
            problems.append(f"entry {index} is not (name, tensor)")
            continue
        name, value = entry
        try:
            if name in named:
                raise ValueError("named more than once")
            if type(value) is Call and name_of(value.function) in PER_RANK:
                nested = _of_rank(value, tp_rank)
                # Charged before it is parsed: one that fails costs as much as one that does not.
                size, before = len(nested) if isinstance(nested, str | bytes) else 0, left
                left -= size
                value = parse_payload(nested, before, budget)
            named[name] = plan_tensor(value)
        except UnsafePickle:
            raise
        except ValueError as error:
            problems.append(f"{shown(name)}: {error}")
    return list(named.items())


def _of_rank(value: Call, tp_rank: int) -> object:
    values = state_of(value, PER_RANK, {"values"})["values"]
    if not isinstance(values, list | tuple) or not is_count(tp_rank, len(values)):
        raise ValueError(f"no value for tensor-parallel rank {tp_rank}")
    return values[tp_rank]


@dataclass(frozen=True)
class _Slice:
    """A tensor of a bucket: bytes `start` to `end` of the flat tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int

    def cut(self, flat: Tensor) -> Tensor:
        part = flat[self.start : self.end]
        if part.data_ptr() % self.dtype.itemsize or part.storage_offset() % self.dtype.itemsize:
            part = part.clone()
        return part.view(self.dtype).reshape(self.shape)


def _plan_bucket(payload: object, problems: list[str]) -> tuple[TensorPlan, list[_Slice]]:
    fields = payload
    if type(payload) is Call:
        fields = state_of(payload, BUCKETS, {"flattened_tensor", "metadata"})
    if type(fields) is not dict or set(fields) != {"flattened_tensor", "metadata"}:
        raise ValueError(f"a dict of flattened_tensor and metadata was expected, not {described_value(payload)}")
    flat = plan_tensor(fields["flattened_tensor"])
    if len(flat.shape) != 1 or flat.dtype != torch.uint8 or (flat.shape[0] > 1 and flat.stride[0] != 1):
        raise ValueError("the flattened tensor must be contiguous uint8 [bytes]")
    if type(fields["metadata"]) is not list:
        raise ValueError("the metadata of a flattened bucket must be a list")
    slices: dict[str, _Slice] = {}
    for index, value in enumerate(fields["metadata"]):
        if len(problems) >= MAX_OFFENDERS:
            problems.append("the rest was not read")
            break
        try:
            one = _plan_slice(value, flat.shape[0])
            if one.name in slices:
                raise ValueError(f"{shown(one.name)} is named more than once")
            slices[one.name] = one
        except ValueError as error:
            problems.append(f"metadata {index}: {error}")
    return flat, list(slices.values())


def _plan_slice(value: object, num_bytes: int) -> _Slice:
    state = state_of(value, {METADATA}, {"name", "shape", "dtype", "start_idx", "end_idx", "numel"})
    name, start, end, length = (state[key] for key in ("name", "start_idx", "end_idx", "numel"))
    if type(name) is not str:
        raise ValueError(f"name {described_value(name)}")
    if not (is_count(start) and is_count(end) and start <= end <= num_bytes):
        raise ValueError(f"{shown(name)}: bytes {shown(start)} to {shown(end)} of a bucket of {num_bytes}")
    dtype, shape = dtype_of(state["dtype"]), counts_of(state["shape"])
    if math.prod(shape) * dtype.itemsize != end - start or length != end - start:
        sizes = f"{dtype}{list(shape[:8])} in {end - start} bytes, numel {shown(length)}"
        raise ValueError(f"{shown(name)}: {sizes}")
    return _Slice(name, dtype, shape, start, end)
