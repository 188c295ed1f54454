"""The receiving end for the frameworks' senders, which broadcast what their request describes and say nothing more.

Their tensors may be of other sizes than the request says. gloo does not tell: what is too short leaves the rest of the
buffer as it was, and what is too long for the buffer ends the process in a thread of gloo's own. So these broadcasts
land in a buffer of twice the size with marks of ours at the end and behind it, and only then reach the sink.
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

# What gloo can broadcast as it is (tried with torch 2.13); NCCL has no complex numbers and no 16-bit integers either.
GLOO_DTYPES = frozenset(
    {torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool, torch.float16, torch.bfloat16}
    | {torch.float32, torch.float64, torch.complex32, torch.complex64, torch.complex128}
)
_REAL_OF = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}
NCCL_DTYPES = (GLOO_DTYPES - set(_REAL_OF)) | {torch.float8_e4m3fn, torch.float8_e5m2}

_MARK_BYTES = 16
_MIN_MARK_BYTES = 8  # a shorter mark could be what the sender sends, by chance


def receive_tensors(group: WeightGroup, specs: Sequence[TensorSpec], sink: Sink, timeout_s: float = 300.0) -> None:
    """Receive as SGLang's engines do: one broadcast per tensor, of its own dtype, in the order of the list.

    Raises ValueError before the first broadcast is joined where the sink refuses the specs or the backend cannot carry
    a dtype, naming all; the sender does not learn of it here and waits until its own deadline. Raises TransferFailed
    naming rank, phase and tensor when a broadcast fails, is of another size, or the deadline passes; then the group is
    broken. A tensor of more than twice its described size still ends the process: gloo aborts it.
    """
    deadline = Deadline.after(timeout_s)
    group.check_usable()
    carried = GLOO_DTYPES if group.backend == "gloo" else NCCL_DTYPES
    if refused := [spec.describe() for spec in specs if spec.dtype not in carried]:
        raise ValueError(f"{group.backend} cannot broadcast these as they are: {', '.join(refused)}")
    sink.expect(specs)
    with open_pipeline(group, deadline, len(specs)) as pipeline:
        for spec in specs:
            target, then = _landing(pipeline, spec.name, spec.num_bytes, partial(sink.write, spec.name, 0))
            pipeline.start(target.view(_REAL_OF.get(spec.dtype, spec.dtype)), [spec.name], then)


def receive_flattened_bucket(
    group: WeightGroup, specs: Sequence[TensorSpec], sink: Sink, timeout_s: float = 300.0
) -> None:
    """Receive load_format "flattened_bucket": one uint8 broadcast of all tensors back to back, whatever their dtypes.

    There is no padding, so a tensor may start at an address that its dtype could not be viewed at: bytes are copied.
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
        target, then = _landing(pipeline, names[0], sum(spec.num_bytes for spec in specs), spread)
        pipeline.start(target, names, then)


def _landing(
    pipeline: Pipeline, name: str, num_bytes: int, write: Callable[[Tensor], None]
) -> tuple[Tensor, Callable[[], None]]:
    """Where a foreign broadcast is to be received, uint8, and what is to be done when it is there."""
    if pipeline.group.backend != "gloo":  # NCCL fails by itself where sizes differ, or hangs into the deadline
        staged = pipeline.buffer("piece", num_bytes)
        return staged, partial(write, staged)
    whole = pipeline.buffer("piece", 2 * num_bytes + _MARK_BYTES)
    # The same on every rank, because gloo's ranks hand on to each other what is in their buffers, marks and all.
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
