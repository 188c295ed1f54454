"""Byte buffers that are sent as if they were tensors: the stream of a delta, before it is applied."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..errors import TransferFailed
from ..layout.flat_bytes import Ranges, add_range, gaps
from ..layout.shard_bytes import ShardBytes
from ..layout.sink import Sink
from ..manifest import TensorSpec
from .apply import Check, apply_delta
from .stream import unpack_chunks

MAX_BYTES = 64 << 30  # of one stream: limits the memory that a request can allocate


class BufferSink:
    """A `Sink` that allocates the expected buffers and keeps them in that order."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._arrived: dict[str, Ranges] = {}

    def expect(self, specs: Sequence[TensorSpec]) -> None:
        """Allocate buffers; see `Sink.expect`. Takes uint8 vectors only and ignores those that are known already."""
        wrong = [spec.describe() for spec in specs if spec.dtype != torch.uint8 or len(spec.shape) != 1]
        if wrong:
            raise ValueError(f"not byte buffers: {', '.join(wrong)}")
        if sum(spec.num_bytes for spec in specs) > MAX_BYTES:
            raise ValueError(f"buffers of more than {MAX_BYTES} bytes")
        for spec in specs:
            if spec.name not in self._buffers:
                self._buffers[spec.name] = torch.empty(spec.num_bytes, dtype=torch.uint8)
                self._arrived[spec.name] = ()

    def destination(self, name: str, offset: int, num_bytes: int) -> Tensor | None:
        """Return a range of a buffer; see `Sink.destination`. Raises TransferFailed for a buffer that is not known, as
        where its first bucket went to a process that has ended since, and for a range outside of it."""
        buffer, stop = self._buffer(name), offset + num_bytes
        if not 0 <= offset <= stop <= buffer.numel():
            raise TransferFailed(f"delta: bytes [{offset}, {stop}) of {name}, which has {buffer.numel()} bytes")
        self._arrived[name] = add_range(self._arrived[name], offset, stop)
        return buffer[offset:stop]

    def write(self, name: str, offset: int, data: Tensor) -> None:
        """Write into a buffer; see `Sink.write`. Raises as `destination`."""
        lent = self.destination(name, offset, data.numel())
        assert lent is not None
        lent.copy_(data)

    def write_elements(self, name: str, positions: Tensor, values: Tensor) -> None:
        """Raise ValueError: buffers are sent as whole ranges of bytes."""
        raise ValueError(f"{name}: a byte buffer takes no single elements")

    def held(self, name: str) -> ShardBytes:
        """Return a buffer; see `Sink.held`."""
        return ShardBytes(name, self._buffer(name))

    def leave_unchecked(self, name: str, why: str) -> None:
        """Raise ValueError: buffers hold all their bytes."""
        raise ValueError(f"{name}: {why}")

    @property
    def is_complete(self) -> bool:
        """Whether all expected bytes have arrived."""
        return bool(self._buffers) and not any(
            gaps(self._arrived[name], 0, buffer.numel()) for name, buffer in self._buffers.items()
        )

    def buffers(self) -> Iterator[Tensor]:
        """Return the buffers in the order in which they were expected."""
        yield from self._buffers.values()

    def _buffer(self, name: str) -> Tensor:
        if name not in self._buffers:
            raise TransferFailed(f"delta: bytes of {name} came, and its first bucket did not: send the delta anew")
        return self._buffers[name]


def apply_stream(
    buffers: Iterator[Tensor], sink: Sink, *, check: Check = "pre", timeout_s: float | None = None
) -> tuple[TensorSpec, ...]:
    """Apply a delta that came as buffers (`stream.pack_chunks`) and return its tensors.

    Raises as `unpack_chunks`, before the first byte is written, and as `apply_delta`.
    """
    chunks = list(unpack_chunks(buffers))
    specs = tuple(dict.fromkeys(chunk.header.spec for chunk in chunks))
    apply_delta(specs, chunks, sink, check=check, timeout_s=timeout_s)
    return specs
