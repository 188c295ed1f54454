"""Broadcasts of a weight group: several run at a time, each with a deadline and a name for its errors."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from ..deadline import Deadline
from ..errors import TransferFailed
from ..layout.bucket import DEFAULT_BUCKET_BYTES
from .weight_group import Running, WeightGroup

_NUM_UNDER_WAY = 8  # gloo works on two at a time; the others are ready when one finishes
_ABANDON_S = 10.0  # aborted operations end at once; this is only an upper bound


@dataclass(frozen=True)
class _Broadcast:
    """A broadcast that is running."""

    number: int  # from 1
    work: Running
    where: str
    tensor: Tensor  # keeps the tensor alive
    then: Callable[[], object] | None  # runs when the bytes have arrived


class Pipeline:
    """Broadcasts in order, several at a time, so that the network does not wait for this thread.

    At most `_NUM_UNDER_WAY` run at a time, and at most two where they have more than `max_bytes` together.
    """

    def __init__(self, group: WeightGroup, deadline: Deadline, num_broadcasts: int, max_bytes: int) -> None:
        self.group, self.deadline, self._max_bytes = group, deadline, max_bytes
        self._num_broadcasts, self._num_started = num_broadcasts, 0
        self._under_way: deque[_Broadcast] = deque()
        self._last_use: dict[int, int] = {}  # memory address -> number of the last broadcast from or to it
        self._turn = {"packed": 0, "piece": 2}

    def buffer(self, kind: Literal["packed", "piece"], num_bytes: int) -> Tensor:
        """Return staging memory, uint8 [num_bytes]: two buffers of each kind in turn, each after its last broadcast
        finished."""
        slot = self._turn[kind]
        self._turn[kind] ^= 1
        buffer = self.group.buffer(slot, num_bytes)
        self._finish_through(self._last_use.get(buffer.data_ptr(), 0))
        return buffer

    def start(self, tensor: Tensor, names: Sequence[str], then: Callable[[], object] | None = None) -> None:
        """Start a broadcast of `tensor`. `then` runs when its bytes have arrived, after the previous broadcast's
        `then`."""
        while self._is_full(tensor.nbytes):
            self._finish_through(self._under_way[0].number)
        self._num_started += 1
        which = f"{names[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
        where = self.group.at(f"broadcast {self._num_started} of {self._num_broadcasts}", which)
        if self.deadline.has_passed:
            raise TransferFailed(f"{where}: deadline of {self.deadline.timeout_s:g} s passed before it began")
        try:
            work = self.group.broadcast(tensor, self.deadline)
        except RuntimeError as error:
            raise self._failure(where, error) from error
        self._last_use[tensor.data_ptr()] = self._num_started
        self._under_way.append(_Broadcast(self._num_started, work, where, tensor, then))

    def _is_full(self, num_bytes: int) -> bool:
        under_way = len(self._under_way)
        num_bytes += sum(broadcast.tensor.nbytes for broadcast in self._under_way)
        return under_way >= _NUM_UNDER_WAY or (under_way >= 2 and num_bytes > self._max_bytes)

    def drain(self) -> None:
        """Wait until all broadcasts are finished."""
        self._finish_through(self._num_started)

    def abandon(self) -> None:
        """Wait, after the group was aborted, until no operation reads or writes the tensors any more."""
        while self._under_way:
            work = self._under_way.popleft().work
            try:
                self.group.finish(work, Deadline.after(_ABANDON_S))
            except RuntimeError:
                continue  # it ended, which is enough: the first failure is the one to report

    def _finish_through(self, number: int) -> None:
        while self._under_way and self._under_way[0].number <= number:
            oldest = self._under_way[0]
            try:
                self.group.finish(oldest.work, self.deadline)
            except RuntimeError as error:
                raise self._failure(oldest.where, error) from error
            self._under_way.popleft()
            if oldest.then is not None:
                oldest.then()

    def _failure(self, where: str, error: RuntimeError) -> TransferFailed:
        if isinstance(error, TransferFailed):
            return error
        late = f"deadline of {self.deadline.timeout_s:g} s passed: " if self.deadline.has_passed else ""
        return TransferFailed(f"{where}: {late}{error}")


@contextmanager
def open_pipeline(
    group: WeightGroup, deadline: Deadline, num_broadcasts: int, max_bytes: int = DEFAULT_BUCKET_BYTES
) -> Iterator[Pipeline]:
    """Yield a pipeline and drain it at the end. An exception breaks the group: its ranks are out of step."""
    broadcasts = Pipeline(group, deadline, num_broadcasts, max_bytes)
    finished = False
    try:
        yield broadcasts
        broadcasts.drain()
        finished = True
    finally:
        if not finished:
            group.abort("a transfer over it was interrupted")
            broadcasts.abandon()
