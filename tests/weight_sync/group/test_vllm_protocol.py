"""Tests of vLLM's convention: how buffers are divided, and that every tensor arrives, plain and packed."""

from __future__ import annotations

import threading

import pytest
import torch

from lockstep.tests.support.callers import soon, submit
from lockstep.weight_sync.errors import TransferFailed
from lockstep.weight_sync.group.framework_protocol import receive_flattened_bucket, receive_tensors
from lockstep.weight_sync.group.rendezvous import Rendezvous
from lockstep.weight_sync.group.vllm_protocol import GROUP_NAME, packed_buffers, send_tensors
from lockstep.weight_sync.group.weight_group import WeightGroup
from lockstep.weight_sync.manifest import specs_from_lists, specs_of
from lockstep.weight_sync.transaction.transaction import WeightTransaction

TENSORS = [
    ("a", torch.arange(6, dtype=torch.float32).reshape(2, 3)),
    ("b", torch.arange(3, dtype=torch.int64)),
    ("c", torch.tensor([1.5, -2.0], dtype=torch.bfloat16)),
    ("d", torch.arange(40, dtype=torch.float32)[::2]),  # not contiguous
    ("e", torch.tensor(7, dtype=torch.uint8)),
]


@pytest.fixture
def ends():
    """Yield the sender's and the receiver's end of a group."""
    sender = Rendezvous("127.0.0.1", 0, 0, 2, GROUP_NAME, timeout_s=20)
    receiver = Rendezvous("127.0.0.1", sender.port, 1, 2, GROUP_NAME, timeout_s=20)
    joining = submit(receiver.join)
    made: list[WeightGroup] = [sender.join(), soon(joining)]
    yield made
    for group in made:
        group.destroy()


def test_buffers_end_with_the_tensor_that_fills_them():
    specs = specs_from_lists(list("abcde"), ["float32"] * 5, [[2], [2], [5], [1], []])

    def names(buffer_bytes: int) -> list[str]:
        return ["".join(spec.name for spec in buffer) for buffer in packed_buffers(specs, buffer_bytes)]

    assert names(16) == ["abc", "de"]
    assert names(1) == ["a", "b", "c", "d", "e"]
    assert names(1000) == ["abcde"]
    assert list(packed_buffers((), 16)) == []


@pytest.mark.parametrize("buffer_bytes", [None, 1, 30, 1 << 20])
def test_every_tensor_arrives(ends, buffer_bytes):
    sender, receiver = ends
    resident = [(name, torch.zeros(tensor.shape, dtype=tensor.dtype)) for name, tensor in TENSORS]
    sink, specs = WeightTransaction(resident, coverage="partial", undo="tensors"), specs_of(TENSORS)

    def receive() -> None:
        if buffer_bytes is None:
            receive_tensors(receiver, specs, sink, 20)
        for buffer in () if buffer_bytes is None else packed_buffers(specs, buffer_bytes):
            receive_flattened_bucket(receiver, buffer, sink, 20)

    receiving = submit(receive)
    send_tensors(sender, specs, iter(TENSORS), buffer_bytes, 20)
    soon(receiving)
    for (name, sent), (_, arrived) in zip(TENSORS, resident, strict=True):
        assert torch.equal(sent, arrived), name


@pytest.mark.parametrize(
    ("tensors", "why"),
    [
        (TENSORS[:-1], "gave nothing"),
        ([*TENSORS, ("f", torch.zeros(1))], "past the end"),
        ([("z", TENSORS[0][1]), *TENSORS[1:]], "says a float32"),
    ],
)
def test_tensors_that_are_not_those_of_the_update_break_the_group_before_all_have_arrived(ends, tensors, why):
    sender, receiver = ends
    resident = [(name, torch.zeros(tensor.shape, dtype=tensor.dtype)) for name, tensor in TENSORS]
    sink, specs = WeightTransaction(resident, coverage="partial", undo="tensors"), specs_of(TENSORS)
    receiving = submit(receive_tensors, receiver, specs, sink, 20)
    with pytest.raises(ValueError, match=why):
        send_tensors(sender, specs, tensors, None, 20)
    with pytest.raises(TransferFailed):
        soon(receiving)
    assert sender.broken is not None


def test_a_dtype_that_gloo_does_not_carry_is_sent_only_packed(ends):
    tensors = [("short", torch.zeros(2, dtype=torch.int16))]
    with pytest.raises(ValueError, match="send them packed"):
        send_tensors(ends[0], specs_of(tensors), tensors)
    assert ends[0].broken is None
    with pytest.raises(ValueError, match="rank 0 sends"):
        send_tensors(ends[1], (), ())


def test_a_broken_off_group_ends_the_broadcasts_of_its_other_rank_at_once(ends):
    sender, receiver = ends
    specs = specs_of(TENSORS)
    began = threading.Event()

    def tensors():
        began.set()
        yield from TENSORS

    sending = submit(send_tensors, sender, specs, tensors(), None, 50)
    assert began.wait(20)
    receiver.abort("an update was refused")
    with pytest.raises(TransferFailed):
        sending.result(timeout=20)
