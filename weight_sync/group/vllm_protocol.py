"""vLLM's convention for broadcasts of weights: rank 0 sends each tensor by itself, or packed into buffers of bytes.

Both ends know the tensors and their order from `update_info`, so nothing but bytes travels. Packed, a buffer takes
tensors until it is longer than its size, or they are over: the last tensor of a buffer may exceed it. On GPUs the group
is vLLM's own NCCL communicator (`vllm_rendezvous`), on CPUs a torch.distributed group of gloo with the name
`GROUP_NAME`, which other trainers join as SGLang's `init_custom_process_group` does. The receiving end is
`framework_protocol`: one call for all tensors, or for each buffer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ..deadline import Deadline
from ..layout.bucket import byte_view
from ..manifest import NamedTensors, TensorSpec
from .broadcasts import Pipeline, open_pipeline
from .framework_protocol import GLOO_DTYPES, NCCL_DTYPES, real_dtype
from .weight_group import WeightGroup

GROUP_NAME = "vllm_weight_transfer"
BUFFER_BYTES = 1 << 30  # vLLM's packed_buffer_size_bytes


def packed_buffers(specs: Sequence[TensorSpec], buffer_bytes: int) -> Iterator[tuple[TensorSpec, ...]]:
    """Divide tensors into buffers: each ends with the tensor that makes it longer than `buffer_bytes`."""
    held: list[TensorSpec] = []
    num_bytes = 0
    for spec in specs:
        held.append(spec)
        num_bytes += spec.num_bytes
        if num_bytes > buffer_bytes:
            yield tuple(held)
            held, num_bytes = [], 0
    if held:
        yield tuple(held)


def send_tensors(
    group: WeightGroup,
    specs: Sequence[TensorSpec],
    tensors: NamedTensors,
    buffer_bytes: int | None = None,
    timeout_s: float = 300.0,
) -> None:
    """Send tensors as rank 0; every other rank receives them under the same specs.

    tensors: those of `specs`, in their order, on any device and of any strides; made one by one, they are held until
    their broadcast has ended. buffer_bytes: of a packed buffer; None: a broadcast for each tensor, in its own dtype.
    Raises ValueError for a dtype that the group cannot carry by itself, before anything is sent, and for tensors that
    are not those of `specs`; TransferFailed naming phase and tensor when a rank is gone, or the deadline passes. After
    a failure past the first byte the group is broken.
    """
    if group.rank != 0:
        raise ValueError(f"rank 0 sends, this is {group.at('send_tensors')}")
    carried = GLOO_DTYPES if group.backend == "gloo" else NCCL_DTYPES
    refused = [spec.describe() for spec in specs if spec.dtype not in carried]
    if refused and buffer_bytes is None:
        raise ValueError(f"{group.backend} cannot broadcast these as they are: {', '.join(refused)}; send them packed")
    deadline = Deadline.after(timeout_s)
    group.check_usable()
    buffers = [(spec,) for spec in specs] if buffer_bytes is None else list(packed_buffers(specs, buffer_bytes))
    given = iter(tensors)
    with open_pipeline(group, deadline, len(buffers)) as pipeline:
        for at, buffer in enumerate(buffers, 1):
            parts = [_next_bytes(given, spec) for spec in buffer]
            # Checked before the last broadcast, so that no receiver has everything when this fails.
            if at == len(buffers) and (extra := next(given, None)) is not None:
                raise ValueError(f"the tensors gave {extra[0]}, which is past the end of the update")
            names = [spec.name for spec in buffer]
            if buffer_bytes is None:
                whole = _on_device(pipeline, parts[0])
                pipeline.start(whole.view(real_dtype(buffer[0].dtype)), names)
            else:
                pipeline.start(_packed(pipeline, parts), names)


def _next_bytes(given: Iterator[tuple[str, torch.Tensor]], spec: TensorSpec) -> torch.Tensor:
    name, tensor = next(given, (None, None))
    found = "nothing" if name is None or tensor is None else TensorSpec.of(name, tensor).describe()
    if tensor is None or found != spec.describe():
        raise ValueError(f"the update says {spec.describe()}, the tensors gave {found}")
    return byte_view(tensor)


def _on_device(pipeline: Pipeline, part: torch.Tensor) -> torch.Tensor:
    if part.device == pipeline.group.device:
        return part
    return pipeline.buffer("piece", part.numel()).copy_(part)


def _packed(pipeline: Pipeline, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    buffer, end = pipeline.buffer("packed", sum(part.numel() for part in parts)), 0
    for part in parts:
        start, end = end, end + part.numel()
        buffer[start:end].copy_(part)
    return buffer
