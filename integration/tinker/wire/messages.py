"""The messages that the SDK sends and reads as Protocol Buffers: data of a forward pass, its outputs, and samples.

Source: the field numbers and types of `tinker_public.proto`, as the SDK (tinker 0.38) carries its descriptor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from ..training.data import BadInput, Datum
from .protobuf import (
    BadMessage,
    Value,
    double,
    entry,
    fields,
    numbers,
    octets,
    put_bytes,
    put_doubles_by_name,
    put_numbers,
    put_text,
    put_varint,
    signed,
    text,
    varint,
)

# By DType: FLOAT32, INT64, INT32.
_DTYPES: dict[int, np.dtype] = {1: np.dtype("<f4"), 2: np.dtype("<i8"), 3: np.dtype("<i4")}
_FLOAT32, _INT64 = 1, 2
_CHUNKS = {2: "image", 3: "dmel"}  # kinds besides encoded text
MOST_DIMENSIONS = 2
MAX_DENSE = 1 << 24  # elements of the tensors of one request that came in CSR form
NO_LOGPROB = -99999.0  # of an entry of TopkLogprobs that is none


@dataclass(frozen=True)
class PassRequest:
    """A request of a forward pass, with a backward pass unless `forward_only`."""

    model_id: str
    seq_id: int
    forward_only: bool
    loss_fn: str
    loss_fn_config: Mapping[str, float | str]
    parts: Sequence[memoryview] = field(repr=False)  # the data, not parsed yet

    def data(self) -> list[Datum]:
        """Parse the data. Raises BadInput naming the datum."""
        found, room = [], DenseRoom()
        for index, part in enumerate(self.parts):
            try:
                found.append(_datum(part, room))
            except ValueError as error:
                raise BadInput(f"data[{index}]: {error}") from None
        return found


def pass_request(body: bytes) -> PassRequest:
    """Parse a ForwardBackwardRequest but for its data. Raises BadMessage for bytes that are none."""
    model_id, seq_id, forward_only, loss_fn = "", 0, False, ""
    config: dict[str, float | str] = {}
    newer: dict[str, float | str] = {}  # the same settings, and texts
    parts: list[memoryview] = []
    for number, value in fields(body):
        match number:
            case 1:
                model_id = text(value)
            case 2:
                seq_id = signed(value)
            case 3:
                parts.append(octets(value))
            case 4:
                loss_fn = text(value)
            case 5:
                key, its = entry(value)
                config[key] = 0.0 if its is None else double(its)
            case 6:
                forward_only = bool(varint(value))
            case 7:
                key, its = entry(value)
                newer[key] = 0.0 if its is None else _setting(its)
    return PassRequest(model_id, seq_id, forward_only, loss_fn, newer or config, parts)


def call_of(body: bytes) -> tuple[str, int]:
    """Return the model's id and the seq_id of the beginning of a ForwardBackwardRequest that may be none; "" and 0 for
    what it does not have."""
    model_id, seq_id = "", 0
    with suppress(BadMessage):
        for number, value in fields(body):
            if number == 1:
                model_id = text(value)
            elif number == 2:
                seq_id = signed(value)
            if model_id and seq_id:
                break
    return model_id, seq_id


def _setting(value: Value) -> float | str:
    for number, its in fields(octets(value)):
        if number == 1:
            return double(its)
        if number == 2:
            return text(its)
    return 0.0


class DenseRoom:
    """The room of one request for the elements that its tensors in CSR form have as dense ones.

    A few bytes can declare any number of them, so each tensor is checked before it is made.
    """

    def __init__(self) -> None:
        self._num_left = MAX_DENSE

    def take(self, shape: Sequence[int] | None, num_tokens: int) -> None:
        """Take the room of a tensor. Raises BadMessage where it has other rows than its datum has tokens, or where the
        request's tensors have too many elements together."""
        check_dimensions(shape or ())
        if shape is None or len(shape) != 2 or min(shape) < 0:
            raise BadMessage(f"a tensor in CSR form has two dimensions, not {shape!s:.100}")
        if shape[0] != num_tokens:
            raise BadMessage(f"a tensor in CSR form has {shape[0]!s:.30} rows, and model_input {num_tokens} tokens")
        if max(shape[1], shape[0] * shape[1]) > self._num_left:
            raise BadMessage(f"the tensors in CSR form of a request have at most {MAX_DENSE} elements together")
        self._num_left -= shape[0] * shape[1]


def _datum(data: memoryview, room: DenseRoom) -> Datum:
    chunks: list[np.ndarray] = []
    tensors: dict[str, memoryview] = {}  # read behind the tokens, which may follow them
    for number, value in fields(data):
        if number == 1:
            chunks.append(_chunk(octets(value)))
        elif number == 2:
            key, its = entry(value)
            if its is None:
                raise BadMessage(f"loss_fn_inputs.{key[:100]} has no tensor")
            tensors[key] = octets(its)
    token_ids = np.concatenate(chunks) if chunks else np.zeros(0, np.int64)
    inputs: dict[str, np.ndarray] = {}
    for key, message in tensors.items():
        try:
            inputs[key] = tensor(message, lambda shape: room.take(shape, len(token_ids)))
        except ValueError as error:
            raise BadMessage(f"loss_fn_inputs.{key[:100]}: {error}") from None
    return Datum(token_ids, inputs)


def _chunk(data: memoryview) -> np.ndarray:
    for number, value in fields(data):
        if number in _CHUNKS:
            raise BadMessage(f"model_input has a chunk of kind {_CHUNKS[number]}: this server takes tokens only")
        if number == 1:
            for inner, tokens in fields(octets(value)):
                if inner == 1:
                    return _array(octets(tokens), np.dtype("<i4")).astype(np.int64)
    return np.zeros(0, np.int64)


def tensor(data: memoryview, before_dense: Callable[[Sequence[int] | None], object] = lambda shape: None) -> np.ndarray:
    """Return a Tensor as an int64 or float32 array; one in CSR form with 0 where it lists nothing. before_dense: called
    with the shape of such a one before it is made. Raises BadMessage for a tensor whose parts do not fit."""
    kind, shape, dense, sparse = 0, None, None, None
    for number, value in fields(data):
        if number == 1:
            dense = octets(value)
        elif number == 2:
            sparse = octets(value)
        elif number == 3:
            kind = varint(value)
        elif number == 4:
            shape = [*(shape or ()), *numbers(value)]
            check_dimensions(shape)  # with each field: there may be millions
    if kind not in _DTYPES:
        raise BadMessage(f"the dtype {kind} is not supported")
    dtype = _DTYPES[kind]
    if shape is not None and any(size < 0 for size in shape):
        raise BadMessage(f"the shape {shape} is none")
    if sparse is not None:
        before_dense(shape)
    values = _from_csr(sparse, dtype, shape) if sparse is not None else _array(dense or memoryview(b""), dtype)
    wide = values.astype(np.float32 if kind == _FLOAT32 else np.int64)
    if shape is None or sparse is not None:
        return wide
    if wide.size != math.prod(shape):
        raise BadMessage(f"the shape is {shape}, and there are {wide.size} numbers")
    return wide.reshape(shape)


def check_dimensions(shape: Sequence[int]) -> None:
    """Raise BadMessage for a shape of more dimensions than any tensor of the API has."""
    if len(shape) > MOST_DIMENSIONS:
        raise BadMessage(f"the shape has {len(shape)} entries, and a tensor at most {MOST_DIMENSIONS} dimensions")


def _from_csr(data: memoryview, dtype: np.dtype, shape: list[int] | None) -> np.ndarray:
    values, rows, columns = (memoryview(b"") for _ in range(3))
    for number, value in fields(data):
        if number == 1:
            values = octets(value)
        elif number == 2:
            rows = octets(value)
        elif number == 3:
            columns = octets(value)
    return dense_of(_array(values, dtype), _array(rows, _DTYPES[_INT64]), _array(columns, _DTYPES[_INT64]), shape, 0)


def dense_of(
    values: np.ndarray, rows: np.ndarray, columns: np.ndarray, shape: Sequence[int] | None, pad: int
) -> np.ndarray:
    """Return a tensor in CSR form as a dense one, `pad` where it lists nothing. rows: where each row begins, and the
    end. Raises BadMessage for parts that do not fit, and for more elements than anybody means."""
    check_dimensions(shape or ())
    if shape is None or len(shape) != 2 or min(shape) < 0 or max(*shape, shape[0] * shape[1]) > MAX_DENSE:
        raise BadMessage(
            f"a tensor in CSR form has two dimensions, and at most {MAX_DENSE} elements, not {shape!s:.100}"
        )
    is_whole = len(rows) == shape[0] + 1 and rows[0] == 0 and rows[-1] == len(values) == len(columns)
    if not is_whole or (np.diff(rows) < 0).any() or ((columns < 0) | (columns >= shape[1])).any():
        raise BadMessage(f"the rows and columns of a tensor in CSR form do not fit its shape {list(shape)}")
    found = np.full(tuple(shape), pad, values.dtype)
    found[np.repeat(np.arange(shape[0]), np.diff(rows)), columns] = values
    return found


def _array(data: memoryview, dtype: np.dtype) -> np.ndarray:
    if len(data) % dtype.itemsize:
        raise BadMessage(f"{len(data)} bytes are no array of {dtype.name}")
    return np.frombuffer(data, dtype)


# -- answers ---------------------------------------------------------------------------------------------------------


def pass_output(outputs: Sequence[Mapping[str, np.ndarray]], metrics: Mapping[str, float]) -> bytes:
    """Encode a ForwardBackwardOutput. outputs: float32 arrays by name, of each datum [N] or [N, K]."""
    records = []
    for data in _alike(outputs):
        arrays = b"".join(
            put_bytes(2, put_text(1, name) + put_bytes(2, _batched([one[name] for one in data]))) for name in data[0]
        )
        records.append(put_bytes(2, put_text(1, "ArrayRecord") + arrays + put_varint(3, len(data))))
    return put_text(1, "ArrayRecord") + b"".join(records) + put_doubles_by_name(3, metrics)


def _alike(outputs: Sequence[Mapping[str, np.ndarray]]) -> list[list[Mapping[str, np.ndarray]]]:
    """Divide outputs, in order, into runs whose arrays have equal trailing shapes, as a record needs."""
    runs: list[list[Mapping[str, np.ndarray]]] = []
    for one in outputs:
        shape = next(iter(one.values())).shape[1:]
        if not runs or next(iter(runs[-1][0].values())).shape[1:] != shape:
            runs.append([])
        runs[-1].append(one)
    return runs


def _batched(arrays: Sequence[np.ndarray]) -> bytes:
    """Encode a BatchedTensor of float32."""
    ends = np.cumsum([0, *(array.nbytes for array in arrays)], dtype=np.int64)
    data = b"".join(np.ascontiguousarray(array, "<f4").tobytes() for array in arrays)
    shape = put_numbers(4, arrays[0].shape[1:])
    return put_bytes(1, data) + put_bytes(2, ends.astype("<i8").tobytes()) + put_varint(3, _FLOAT32) + shape


@dataclass(frozen=True)
class Sampled:
    """One sampled sequence."""

    has_stopped: bool  # at a stop; else at its length
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    top: np.ndarray | None = None  # see `top_entries`


@dataclass(frozen=True)
class SampleAnswer:
    """The answer to a request for samples."""

    sequences: Sequence[Sampled]
    prompt_logprobs: np.ndarray | None = None  # float32 [N], NaN where there is none
    prompt_top: np.ndarray | None = None
    num_cached_tokens: int = 0
    target_prompt_logprobs: bytes | None = None  # a Tensor

    def encoded(self) -> bytes:
        """Encode a SampleResponse."""
        parts = [put_bytes(1, _sequence(one)) for one in self.sequences]
        if self.prompt_logprobs is not None:
            parts.append(put_bytes(2, np.ascontiguousarray(self.prompt_logprobs, "<f4").tobytes()))
        if self.prompt_top is not None:
            parts.append(put_bytes(3, _top(self.prompt_top)))
        parts.append(put_varint(4, self.num_cached_tokens))
        if self.target_prompt_logprobs is not None:
            parts.append(put_bytes(5, self.target_prompt_logprobs))
        return b"".join(parts)


def _sequence(one: Sampled) -> bytes:
    tokens = np.asarray(one.token_ids, "<i4").tobytes()
    logprobs = np.asarray(one.logprobs, "<f4").tobytes()
    parts = put_varint(1, 0 if one.has_stopped else 1) + put_bytes(2, tokens) + put_bytes(3, logprobs)
    return parts + (put_bytes(4, _top(one.top)) if one.top is not None else b"")


_TOP = np.dtype([("id", "<i4"), ("logprob", "<f4")])


def top_entries(rows: Sequence[Sequence[tuple[float, int]] | None], k: int) -> np.ndarray:
    """Return the k likeliest tokens of each row, (log-probability, id) most likely first, as an array [rows, k] of
    both; rows that are None, and what a row lacks, are marked as the API does."""
    found = np.empty((len(rows), k), _TOP)
    found["id"], found["logprob"] = 0, NO_LOGPROB
    for row, entries in enumerate(rows):
        for column, (logprob, token_id) in enumerate((entries or ())[:k]):
            found[row, column] = token_id, logprob
    return found


def _top(entries: np.ndarray) -> bytes:
    """Encode TopkLogprobs."""
    ids, logprobs = np.ascontiguousarray(entries["id"]), np.ascontiguousarray(entries["logprob"])
    shape = put_varint(3, entries.shape[1]) + put_varint(4, entries.shape[0])
    return put_bytes(1, ids.tobytes()) + put_bytes(2, logprobs.tobytes()) + shape


def float_tensor(values: np.ndarray, rows: np.ndarray | None = None, columns: np.ndarray | None = None,
                 shape: Sequence[int] = ()) -> bytes:  # fmt: skip
    """Encode a Tensor of float32: dense, or in CSR form with its rows and columns."""
    data = np.ascontiguousarray(values, "<f4").tobytes()
    kind = put_varint(3, _FLOAT32) + put_numbers(4, list(shape or values.shape))
    if rows is None or columns is None:
        return put_bytes(1, data) + kind
    parts = put_bytes(1, data) + b"".join(
        put_bytes(number, np.ascontiguousarray(part, "<i8").tobytes()) for number, part in ((2, rows), (3, columns))
    )
    return put_bytes(2, parts) + kind
