"""The rendezvous of vLLM's trainers and workers: a communicator of NCCL, made without torch.distributed's groups.

Rank 0, the trainer, hosts a TCPStore (vLLM's StatelessProcessGroup), makes NCCL's unique id and sets it as the first
object that it broadcasts: the key `broadcast_from/0/0`, with a pickled ncclUniqueId (`pickles.unique_id`). The others
read it there; a trainer without torch tells them the id by other means. All then call ncclCommInitRank, and after it
sum one float32 of every rank (vLLM's PyNcclCommunicator warms up so): a rank that left that out would take its first
broadcast for the sum.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from ..pickles.unique_id import read_unique_id, write_unique_id
from .communicator import Communicators, Connected
from .joining import Joining, check_arguments
from .shared_keys import SharedKeys
from .vllm_protocol import GROUP_NAME
from .weight_group import Lane, WeightGroup

ID_KEY = "broadcast_from/0/0"


class VllmRendezvous(Joining):
    """One rank's way into the communicator of a trainer of vLLM: of a worker, or as rank 0 in the trainer's place."""

    def __init__(
        self,
        communicators: Communicators,
        rank: int,
        world_size: int,
        *,
        address: tuple[str, int] | None = None,
        unique_id: bytes | None = None,
        timeout_s: float = 300.0,
        group_name: str = GROUP_NAME,
    ) -> None:
        """Check the arguments; rank 0 opens its port, which port 0 leaves to the system. address: of the trainer's
        store; unique_id: the id, where the trainer has none.

        Raises ValueError listing every bad argument, TransferFailed where rank 0 cannot listen at its address.
        """
        has_port = address is None or (address[1] < 65536 and (address[1] > 0 or rank == 0))
        check_arguments(rank, world_size, {
            "pass the address of the trainer's store or the unique id": (address is None) != (unique_id is None),
            "rank 0 makes the unique id": rank != 0 or unique_id is None,
            f"master_port {address and address[1]} is not a port": has_port,
        })  # fmt: skip
        super().__init__(group_name, rank, world_size, address, timeout_s)
        self._communicators, self._id = communicators, unique_id
        self._keys: SharedKeys | None = None
        self._connecting = unique_id is not None  # all that is known of the other ranks is that NCCL waits for some

    def _meet(self) -> WeightGroup:
        store = None if self._address is None else self._store()
        if store is not None:
            self._keys = SharedKeys(store)
        connected = self._host() if self._rank == 0 else self._connect()
        self._warm_up(connected.lane)
        stores = (connected.store,) if store is None else (store, connected.store)
        return WeightGroup(
            self.group_name, self._rank, self._world_size, self._communicators.backend, self._communicators.device,
            (connected.lane,), stores,
        )  # fmt: skip

    def _connect(self) -> Connected:
        unique_id = self._id if self._id is not None else self._read_id()
        self._waits_for = "NCCL waits for other ranks"
        self._connecting = True
        return self._communicators.connect(unique_id, self._rank, self._world_size, self._deadline)

    def _read_id(self) -> bytes:
        assert self._keys is not None
        self._waits_for = "the trainer's store does not answer"
        try:
            found = self._keys.get_bytes(ID_KEY, self._deadline, self._stopped)
        except RuntimeError as error:
            raise RuntimeError(f"the trainer has not set its NCCL id (key {ID_KEY!r}): {error}") from error
        try:
            return read_unique_id(found)
        except ValueError as error:
            raise ValueError(f"the trainer's NCCL id (key {ID_KEY!r}) cannot be read: {error}") from error

    def _host(self) -> Connected:
        keys = self._keys
        assert keys is not None
        self._waits_for = "NCCL waits for other ranks"
        self._connecting = True
        return self._communicators.host(
            lambda unique_id: keys.put(ID_KEY, write_unique_id(unique_id), self._deadline),
            self._world_size,
            self._deadline,
        )

    def _warm_up(self, lane: Lane) -> None:
        self._waits_for = "summing a number with the other ranks, as vLLM's do at first"
        options = dist.AllreduceOptions()
        options.timeout = self._deadline.left
        done = False
        try:
            if stopped := self._stopped() or ("connected too late" if self._deadline.has_passed else None):
                raise RuntimeError(stopped)
            number = torch.zeros(1, dtype=torch.float32, device=self._communicators.device)
            done = lane.allreduce([number], options).wait(self._deadline.left)
        except RuntimeError as error:
            raise RuntimeError(f"{self._waits_for}: {error}") from error
        finally:
            if not done:
                lane.abort()
        if not done:
            raise RuntimeError(self._waits_for)

    def _close(self) -> None:
        if self._keys is not None:
            self._keys.close()

    def _missing(self) -> str:
        others = [str(rank) for rank in range(self._world_size) if rank != self._rank]
        if not self._connecting:
            return "0" if self._rank else ", ".join(others) or "none"
        if len(others) > 1:
            return f"some of {', '.join(others)} (NCCL does not say which)"
        return ", ".join(others) or "none"
