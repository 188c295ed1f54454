"""The way of one rank into a weight group, with a deadline and a way to cancel it.

Connecting to a store blocks as long as the process that hosts it is stopped, and NCCL blocks until all ranks are there.
So both run in a thread of their own (see also `shared_keys`), and the caller stops waiting at its deadline.
"""

from __future__ import annotations

import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch.distributed as dist

from ..deadline import Deadline
from ..errors import TransferFailed
from .interface import host_store, listen_at, reach_store
from .weight_group import WeightGroup

_GRACE_S = 0.5  # for a thread that was cancelled, or is late, to report its end


def check_arguments(rank: int, world_size: int, others: Mapping[str, bool]) -> None:
    """Check a rank's place in its group, and that what each text denies holds. Raises ValueError listing all faults."""
    places = {
        f"world_size {world_size} is not positive": world_size >= 1,
        f"rank {rank} is not in a group of {world_size}": 0 <= rank < world_size,
    }
    if wrong := [text for text, holds in {**places, **others}.items() if not holds]:
        raise ValueError("; ".join(wrong))


def check_places(rank_offset: int, num_ranks: int, world_size: int) -> None:
    """Check the places of all ranks of an engine, so that none joins where another one cannot. Raises ValueError."""
    if rank_offset < 1:
        raise ValueError(f"rank_offset must be at least 1, since rank 0 is the sender; it is {rank_offset}")
    if rank_offset + num_ranks > world_size:
        listed = f"{num_ranks} ranks" if num_ranks > 1 else "a rank"
        raise ValueError(f"world_size {world_size} has no place for {listed} from rank {rank_offset} on")


class Joining(ABC):
    """A rank that joins a group. `join` blocks: call it in a thread without other work; `cancel` ends it.
    `GroupRegistry` keeps groups by name. A subclass knows how the ranks find each other (`_meet`).

    Rank 0 hosts the store at `address`, an address of its machine and no other one; the others wait for it.
    """

    def __init__(
        self, group_name: str, rank: int, world_size: int, address: tuple[str, int] | None, timeout_s: float
    ) -> None:
        """Open rank 0's port, which port 0 leaves to the system. address: of the store; None: the ranks need none.
        Raises TransferFailed where rank 0 cannot listen at its address."""
        self.group_name = group_name
        self._rank, self._world_size, self._address = rank, world_size, address
        self._deadline = Deadline.after(timeout_s)
        self._cancelled = threading.Event()
        self._wake = threading.Event()
        self._lock = threading.Lock()
        self._left = False  # the caller has left: a group that is complete later is destroyed again
        self._result: WeightGroup | BaseException | None = None
        self._own_address = ""  # of this machine, as the other ranks reach it
        self._waits_for = "the process that hosts the store does not answer"  # the reason, where the thread is blocked
        self._listener = self._listen(address) if rank == 0 and address is not None else None

    @property
    def port(self) -> int:
        """The port of the store; 0 where there is none."""
        return 0 if self._address is None else self._address[1]

    def cancel(self) -> None:
        """End a `join` that waits or has not begun, from any thread; it raises TransferFailed. Does nothing after the
        join."""
        self._cancelled.set()
        with self._lock:
            if self._listener is not None:
                self._listener.close()
        self._wake.set()

    def join(self) -> WeightGroup:
        """Return the group when all ranks are there. Raises TransferFailed naming rank, group, phase and the ranks that
        had not arrived: at the deadline, and as soon as the group cannot come about."""
        threading.Thread(target=self._run, name=f"rendezvous-{self.group_name}", daemon=True).start()
        self._wake.wait(self._deadline.left_s)
        if self._result is None:
            # Cancelled or too late. The thread reports which ranks are missing, unless torch blocks it.
            self._wake.clear()
            if self._result is None:
                self._wake.wait(_GRACE_S)
        with self._lock:
            self._left = True
            result = self._result
        if isinstance(result, WeightGroup):
            return result
        if isinstance(result, TransferFailed):
            raise result
        raise self._failure(self._waits_for) from result

    def _run(self) -> None:
        group: WeightGroup | None = None
        try:
            group = self._meet()
            result: WeightGroup | BaseException = group
        except (RuntimeError, OSError, ValueError) as error:  # of torch, the socket or ours; the caller raises it
            # A new exception: a traceback would keep the store alive, and its port taken, as long as the error exists.
            result = TransferFailed(
                str(error if isinstance(error, TransferFailed) else self._failure(self._why(error)))
            )
        self._close()
        with self._lock:
            self._result = result
            abandoned = self._left
        self._wake.set()
        if abandoned and group is not None:
            group.destroy()

    def _failure(self, why: str) -> TransferFailed:
        where = f"rank {self._rank} of group {self.group_name!r}, rendezvous"
        if self._address is not None:
            where += f" at {self._address[0]}:{self._address[1]}"
        missing = self._missing()
        if self._cancelled.is_set():
            why = f"cancelled ({why})"
        elif self._deadline.has_passed:
            why = f"deadline of {self._deadline.timeout_s:g} s passed ({why})"
        return TransferFailed(f"{where}: {why}; ranks that had not arrived: {missing}")

    def _listen(self, address: tuple[str, int]) -> socket.socket:
        """Open the port of the store, before any other rank is told of it."""
        try:
            listener = listen_at(*address)
        except OSError as error:
            raise TransferFailed(f"rank 0 of group {self.group_name!r}, rendezvous: {error}") from error
        self._own_address, port = listener.getsockname()[:2]
        self._address = (address[0], port)
        return listener

    def _store(self) -> dist.TCPStore:
        """Host the store as rank 0, or wait until rank 0 does."""
        assert self._address is not None
        if self._rank == 0:
            with self._lock:
                listener, self._listener = self._listener, None
            if listener is None or listener.fileno() < 0:
                raise self._failure("its port is closed")
            return host_store(listener, self._address[0], self._world_size, self._deadline.left)
        try:
            store, self._own_address = reach_store(self._address, self._world_size, self._deadline, self._cancelled)
        except ConnectionError as error:
            raise self._failure(str(error)) from error
        return store

    def _stopped(self) -> str | None:
        return "cancelled" if self._cancelled.is_set() else None

    def _why(self, error: BaseException) -> str:
        """Return the reason of a failure."""
        return str(error)

    @abstractmethod
    def _meet(self) -> WeightGroup:
        """Find the other ranks and make the group. Raises RuntimeError, OSError or ValueError."""

    @abstractmethod
    def _missing(self) -> str:
        """Name the ranks that have not arrived."""

    @abstractmethod
    def _close(self) -> None:
        """Release the means of the rendezvous that the group does not need."""
