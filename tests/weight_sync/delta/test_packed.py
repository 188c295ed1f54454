"""Tests of the byte buffers in which the stream of a delta travels, whatever of it arrives."""

from __future__ import annotations

import pytest
import torch

from lockstep.weight_sync.delta.packed import BufferSink
from lockstep.weight_sync.errors import TransferFailed
from lockstep.weight_sync.manifest import TensorSpec

SPECS = [TensorSpec(name, torch.uint8, (size,)) for name, size in (("delta.0", 128), ("delta.1", 64))]


def filled(sink: BufferSink, name: str, offset: int, num_bytes: int) -> None:
    lent = sink.destination(name, offset, num_bytes)
    assert lent is not None
    lent.fill_(1)


@pytest.mark.parametrize("put", ["destination", "write"])
@pytest.mark.parametrize(("offset", "num_bytes"), [(64, 128), (-64, 64), (192, 0)])
def test_bytes_of_unknown_buffers_and_outside_of_them_are_refused(put, offset, num_bytes):
    def send(sink: BufferSink, name: str, offset: int, num_bytes: int) -> None:
        if put == "destination":
            sink.destination(name, offset, num_bytes)
        else:
            sink.write(name, offset, torch.ones(num_bytes, dtype=torch.uint8))

    sink = BufferSink()
    with pytest.raises(TransferFailed, match=r"delta\.0 .* its first bucket did not: send the delta anew"):
        send(sink, "delta.0", 64, 64)  # as to an engine that has started again in the middle of a delta
    sink.expect(SPECS)
    with pytest.raises(TransferFailed, match=rf"bytes \[{offset}, {offset + num_bytes}\) of delta\.0, .* 128 bytes"):
        send(sink, "delta.0", offset, num_bytes)
    with pytest.raises(TransferFailed, match=r"delta\.2"):
        sink.held("delta.2")
    assert not sink.is_complete


def test_a_range_that_comes_twice_stands_for_no_other_one():
    sink = BufferSink()
    sink.expect(SPECS)
    for name, offset in (("delta.0", 0), ("delta.0", 0), ("delta.1", 0)):
        filled(sink, name, offset, 64)
    assert not sink.is_complete
    sink.write("delta.0", 64, torch.full((64,), 2, dtype=torch.uint8))
    assert sink.is_complete
    assert [buffer.tolist() for buffer in sink.buffers()] == [[1] * 64 + [2] * 64, [1] * 64]


def test_empty_buffers_are_complete():
    sink = BufferSink()
    assert not sink.is_complete  # nothing was expected yet
    sink.expect([TensorSpec("delta.0", torch.uint8, (0,))])
    assert sink.is_complete
