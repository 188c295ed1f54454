"""The receiving end for other frameworks' senders, which broadcast the tensors of their request and nothing else.

The tensors may have other sizes than the request says. gloo does not report this: a broadcast that is too short leaves
the rest of the buffer unchanged, and one that is too long for the buffer ends the process from a thread of gloo.
Therefore these broadcasts are received in a buffer of twice the size with marks at the end of the expected bytes and
behind them, and reach the sink only after a check of the marks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from ..deadline import Deadline
from ..errors import TransferFailed
from ..layout.sink import Sink
from ..manifest import TensorSpec
from .broadcasts import Pipeline, open_pipeline
from .weight_group import WeightGroup

# Dtypes that gloo can broadcast as they are (tried with torch 2.13). NCCL has no complex numbers and no 16-bit integers
# either.
GLOO_DTYPES = frozenset(
    {torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool, torch.float16, torch.bfloat16}
    | {torch.float32, torch.float64, torch.complex32, torch.complex64, torch.complex128}
)
_REAL_OF = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}
NCCL_DTYPES = (GLOO_DTYPES - set(_REAL_OF)) | {torch.float8_e4m3fn, torch.float8_e5m2}

_MARK_BYTES = 16
_MIN_MARK_BYTES = 8  # the bytes of a shorter mark could be sent by chance


def real_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a backend carries tensors of this one: complex numbers as their parts."""
    return _REAL_OF.get(dtype, dtype)


def receive_tensors(group: WeightGroup, specs: Sequence[TensorSpec], sink: Sink, timeout_s: float = 300.0) -> None:
    """Receive as SGLang's engines do: one broadcast per tensor, of its own dtype, in the order of the list.

    Raises ValueError before it joins the first broadcast where the sink refuses the specs or the backend cannot carry a
    dtype, naming all; the sender is not informed, so the caller breaks the group (`GroupRegistry.in_step`). Raises
    TransferFailed naming rank, phase and tensor when a broadcast fails or has another size, or the deadline passes;
    then the group is broken. A tensor of more than twice its described size still ends the process: gloo aborts it.
    """
    deadline = Deadline.after(timeout_s)
    group.check_usable()
    carried = GLOO_DTYPES if group.backend == "gloo" else NCCL_DTYPES
    if refused := [spec.describe() for spec in specs if spec.dtype not in carried]:
        raise ValueError(f"{group.backend} cannot broadcast these as they are: {', '.join(refused)}")
    sink.expect(specs)
    with open_pipeline(group, deadline, len(specs)) as pipeline:
        for spec in specs:
            target, then = _destination(pipeline, spec.name, spec.num_bytes, partial(sink.write, spec.name, 0))
            pipeline.start(target.view(real_dtype(spec.dtype)), [spec.name], then)


def receive_flattened_bucket(
    group: WeightGroup, specs: Sequence[TensorSpec], sink: Sink, timeout_s: float = 300.0
) -> None:
    """Receive load_format "flattened_bucket": one uint8 broadcast of all tensors back to back, whatever their dtypes.

    There is no padding, so a tensor may start at an address at which its dtype could not be viewed: bytes are copied.
    Raises as `receive_tensors` does; every dtype can be carried.
    """
    deadline = Deadline.after(timeout_s)
    group.check_usable()
    sink.expect(specs)
    names = [spec.name for spec in specs] or ["(no tensors)"]

    def spread(bucket: Tensor) -> None:
        end = 0
        for spec in specs:
            sink.write(spec.name, 0, bucket[end : end + spec.num_bytes])
            end += spec.num_bytes

    with open_pipeline(group, deadline, 1) as pipeline:
        target, then = _destination(pipeline, names[0], sum(spec.num_bytes for spec in specs), spread)
        pipeline.start(target, names, then)


def _destination(
    pipeline: Pipeline, name: str, num_bytes: int, write: Callable[[Tensor], None]
) -> tuple[Tensor, Callable[[], None]]:
    """Return the uint8 tensor that receives a foreign broadcast, and the function to run when it has arrived."""
    if pipeline.group.backend != "gloo":  # NCCL fails by itself where sizes differ, or waits until the deadline
        staged = pipeline.buffer("piece", num_bytes)
        return staged, partial(write, staged)
    whole = pipeline.buffer("piece", 2 * num_bytes + _MARK_BYTES)
    # The marks are the same on every rank, because gloo's ranks forward the whole content of their buffers, marks
    # included.
    label = f"{pipeline.group.name}/{name}".encode()
    mark = torch.frombuffer(bytearray(hashlib.blake2b(label, digest_size=_MARK_BYTES).digest()), dtype=torch.uint8)
    inside = min(_MARK_BYTES, num_bytes)
    whole[num_bytes - inside : num_bytes].copy_(mark[:inside])
    whole[num_bytes : num_bytes + _MARK_BYTES].copy_(mark)
    where = pipeline.group.at("receiving", name)

    def check_and_write() -> None:
        is_short = inside >= _MIN_MARK_BYTES and torch.equal(whole[num_bytes - inside : num_bytes], mark[:inside])
        if is_short or not torch.equal(whole[num_bytes : num_bytes + _MARK_BYTES], mark):
            size = "less" if is_short else "more"
            raise TransferFailed(f"{where}: the sender's broadcast had {size} than the {num_bytes} bytes described")
        write(whole[:num_bytes])

    return whole, check_and_write
