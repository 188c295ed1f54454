"""Both ends of the handshake against vLLM's own StatelessProcessGroup, in a process of its own.

VLLM_PYTHON=/path/of/an/environment/with/vllm/bin/python make test-exhaustive ARGS=tests/weight_sync/group
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lockstep.tests.support.callers import submit
from lockstep.tests.support.forked_ranks import free_port
from lockstep.tests.support.vllm.own_python import end, needs_vllm, start
from lockstep.tests.support.vllm.trainer import HOST, GlooCommunicators
from lockstep.weight_sync.deadline import Deadline
from lockstep.weight_sync.errors import TransferFailed
from lockstep.weight_sync.group.communicator import Connected
from lockstep.weight_sync.group.vllm_rendezvous import VllmRendezvous

ID = bytes(range(128, 256))
START_S = 240.0  # for vLLM to be imported

pytestmark = [pytest.mark.exhaustive, needs_vllm]


class _Handshake(GlooCommunicators):
    """No communicator: the join ends when both sides have the id."""

    def __init__(self) -> None:
        self.found: bytes | None = None

    def connect(self, unique_id: bytes, rank: int, world_size: int, deadline: Deadline) -> Connected:
        self.found = unique_id
        raise RuntimeError("the handshake is over")

    def host(self, publish: Callable[[bytes], None], world_size: int, deadline: Deadline) -> Connected:
        publish(ID)
        return super().host(lambda unique_id: None, world_size, deadline)  # waits for a rank that never comes


def test_a_worker_reads_the_id_of_vllms_own_trainer():
    port, handshake = free_port(), _Handshake()
    trainer = start("say", port, ID.hex())
    try:
        with pytest.raises(TransferFailed, match="the handshake is over"):
            VllmRendezvous(handshake, 1, 2, address=(HOST, port), timeout_s=START_S).join()
    finally:
        _, errors = end(trainer)
    assert handshake.found == ID and trainer.returncode == 0, errors[-4000:]


def test_vllms_own_worker_reads_the_id_of_our_rank_0():
    sender = VllmRendezvous(_Handshake(), 0, 2, address=(HOST, 0), timeout_s=START_S)
    joining = submit(sender.join)
    worker = start("read", sender.port)
    try:
        output, errors = end(worker, START_S)
    finally:
        sender.cancel()
    assert worker.returncode == 0 and output.split()[-1] == ID.hex(), errors[-4000:]
    with pytest.raises(TransferFailed, match="cancelled"):
        joining.result(timeout=60)
