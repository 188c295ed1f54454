"""Gathers and sums over processes of one host through memory that they share.

Letters: P processes, B partial products of each.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..machine import native

SOURCE = "collectives/exchange.cpp"
SLOT_BYTES = 1 << 20  # of a process; larger tensors are exchanged in pieces
_STOPPED, _TIMED_OUT = 1, 2
Tape = list[bytes]  # the results of exchanges, in their order


class ExchangeFailed(RuntimeError):
    """An exchange that not all processes took part in. Whatever these processes share cannot be used any more."""


class _Exchange(ctypes.Structure):
    """The struct Exchange of exchange.cpp."""

    _fields_ = (
        *(("memory", ctypes.c_void_p), ("stop", ctypes.c_void_p)),
        *((name, ctypes.c_int64) for name in ("num_ranks", "rank", "slot_bytes", "timeout_ns", "late_rank")),
        ("count", ctypes.c_uint32),
    )


def exchange_bytes(num_ranks: int) -> int | None:
    """Return the bytes of memory that so many processes share, or None where there is no C++ compiler."""
    function = native.function(SOURCE, "lockstep_exchange_bytes", [ctypes.c_int64] * 2, ctypes.c_int64)
    return None if function is None else int(function(num_ranks, SLOT_BYTES))


class SharedMemory:
    """Exchanges between processes that share memory. All of them make the same calls in the same order, one at a time.

    A call waits for the others at most `timeout_s`, and less once `stop()` was called, which another thread may do.
    """

    def __init__(self, memory: mmap.mmap, num_ranks: int, rank: int, timeout_s: float) -> None:
        """Take the shared memory of `exchange_bytes`, which is zero before the first process takes it."""
        self.num_ranks, self.rank, self.timeout_s = num_ranks, rank, timeout_s
        self._memory = memory
        self._view = ctypes.c_char.from_buffer(memory)
        self._stop = ctypes.c_int64(0)
        self._exchange = _Exchange(
            ctypes.addressof(self._view), ctypes.addressof(self._stop), num_ranks, rank, SLOT_BYTES,
            round(timeout_s * 1e9), 0, 0,
        )  # fmt: skip
        self._address = ctypes.addressof(self._exchange)  # the struct counts the exchanges: no call may copy it
        self._recording: Tape | None = None
        self._playing: Iterator[bytes] | None = None
        self._gather_call, self._add_call = self._call_of(_gather()), self._call_of(_add())

    def stop(self) -> None:
        """Let this process wait no longer: an exchange that another process has not joined fails."""
        self._stop.value = 1

    def gather(self, part: Tensor) -> Tensor:
        """Gather every process's part, equal in shape and dtype: [P, *part.shape]. Raises ExchangeFailed."""
        part = part.contiguous()
        out = part.new_empty(self.num_ranks, *part.shape)
        native.run(self._gather_call, out.nbytes, out.data_ptr(), part.data_ptr(), part.nbytes, out.data_ptr())
        return out

    def add(self, partials: Tensor, bias: Tensor | None) -> Tensor:
        """Add partials [B, ..., N] of all processes in order, in fp32, then bias [N] or [..., N]; rounds once.

        The bits are those of `add_blocks` over the gathered partials. float32 and bfloat16. Raises ExchangeFailed.
        """
        partials = partials.contiguous()
        out = partials.new_empty(partials.shape[1:])
        wide = None if bias is None else bias.float().expand(out.shape).contiguous()
        native.run(
            self._add_call, out.nbytes, out.data_ptr(), partials.data_ptr(), len(partials), out.numel(),
            None if wide is None else wide.data_ptr(), out.data_ptr(), partials.dtype is torch.bfloat16,
        )  # fmt: skip
        return out

    @contextmanager
    def recorded(self) -> Iterator[Tape]:
        """Yield a tape that keeps the results of the exchanges in the context."""
        self._recording = tape = Tape()
        try:
            yield tape
        finally:
            self._recording = None

    @contextmanager
    def played(self, tape: Tape) -> Iterator[None]:
        """Give the results of the recorded exchanges again, in their order, without the other processes."""
        self._playing = iter(tape)
        try:
            yield
        finally:
            self._playing = None

    def _call_of(self, function: Callable[..., int]) -> Callable[..., None]:
        """Return a function of the bytes and the address of the results, and of the arguments of `function`."""

        def call(num_bytes: int, results: int, *arguments: Any) -> None:
            if self._playing is not None:
                ctypes.memmove(results, next(self._playing), num_bytes)
                return
            if failed := function(self._address, *arguments):
                raise self._error(failed)
            if self._recording is not None:
                self._recording.append(ctypes.string_at(results, num_bytes))

        call.__name__ = function.__name__
        return call

    def _error(self, failed: int) -> ExchangeFailed:
        late = f"process {self._exchange.late_rank} of {self.num_ranks}"
        if failed == _STOPPED:
            return ExchangeFailed(f"{late} did not take part in an exchange before it was stopped")
        if failed == _TIMED_OUT:
            return ExchangeFailed(f"{late} did not take part in an exchange for {self.timeout_s:.1f} s")
        return ExchangeFailed(f"{late} takes part in another exchange than process {self.rank}")


@cache
def _gather() -> Callable[..., int]:
    pointer = ctypes.c_void_p
    return _function("lockstep_exchange_gather", [pointer, pointer, ctypes.c_int64, pointer])


@cache
def _add() -> Callable[..., int]:
    number, pointer = ctypes.c_int64, ctypes.c_void_p
    return _function("lockstep_exchange_add", [pointer, pointer, number, number, pointer, pointer, number])


def _function(name: str, argument_types: list[Any]) -> Callable[..., int]:
    function = native.function(SOURCE, name, argument_types, ctypes.c_int64)
    if function is None:
        raise ValueError(f"shared memory was asked for, but {native.why_unavailable(SOURCE)}")
    return function
