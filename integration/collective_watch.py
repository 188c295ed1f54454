"""A watch over the collectives of a job's ranks, which finds the rank that does not come to one.

gloo's own timeouts go on while a process is stopped, so that a job which is suspended as a whole (SIGSTOP, a SLURM job,
a frozen container) would be lost when it is continued. So the default group gets a long one, and a thread of each rank
counts the time in which this rank itself ran. It publishes how many collectives of the default group the rank has
begun, in the store by which the ranks met, and reads those of the others.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn

import torch.distributed as dist

from ..kernels.machine.running_time import running_time
from ..rollout.errors import RankFailure
from .lost_ranks import leave

logger = logging.getLogger(__name__)

BACKSTOP_S = 86400  # gloo's own timeout, for a rank that gives signs of life and whose packets are lost


@dataclass
class _Sign:
    """The last sign of life of another rank. Times are those in which this rank ran."""

    text: bytes = b""
    begun: int = 0  # collectives
    heard: float = 0.0  # when the text last changed
    missed: tuple[int, float] | None = None  # collectives of this rank that it has not begun, and when this rank had
    has_left: bool = False  # in order


class Lags:
    """The signs of life of the other ranks, as one rank sees them."""

    def __init__(self, rank: int, num_ranks: int, timeout_s: float, now: float) -> None:
        self._timeout_s, self._begun, self._moved = timeout_s, 0, now
        self._signs = {other: _Sign(heard=now) for other in range(num_ranks) if other != rank}

    def still_s(self, now: float) -> float:
        """Return for how long this rank has begun no collective."""
        return now - self._moved

    def find(self, begun: int, texts: Mapping[int, bytes], now: float) -> RankFailure | None:
        """Note how many collectives this rank has begun, and the signs of the others. Returns the failure of a rank
        that has not come to a collective for the timeout, or that is silent while this rank begins none."""
        if begun != self._begun:
            self._begun, self._moved = begun, now
        for rank, text in texts.items():
            sign = self._signs[rank]
            if text != sign.text:
                sign.text, sign.heard = text, now
                _, sign.begun, sign.has_left = json.loads(text)
            if sign.has_left:
                continue
            if sign.missed is None or sign.begun >= sign.missed[0]:  # what it says of itself is older than `begun`
                sign.missed = (begun, now) if sign.begun < begun else None
            if sign.missed is not None and (late_s := now - sign.missed[1]) > self._timeout_s:
                return failure(
                    rank, f"has not come to a collective for {late_s:.1f} s: it hangs, or is stopped", late_s
                )
            if min(silent_s := now - sign.heard, self.still_s(now)) > self._timeout_s:
                return failure(rank, f"gives no sign of life for {silent_s:.1f} s: stopped, or blocked", silent_s)
        return None


def failure(rank: int, why: str, seconds: float) -> RankFailure:
    """Return the failure of a rank. why: the predicate of its sentence."""
    return RankFailure(f"rank {rank} {why}", (rank,), "collective", -1, round(seconds, 3))


class CollectiveWatch:
    """The watch of this rank over the default group. It ends this process where another rank does not come."""

    def __init__(self, rank: int, num_ranks: int, timeout_s: float) -> None:
        """Begin, with the default group open: a collective of its ranks. timeout_s: of a rank that does not come."""
        self._rank, self._others = rank, [other for other in range(num_ranks) if other != rank]
        self._timeout_s, self._interval_s = timeout_s, min(max(timeout_s / 20, 0.05), 2.0)
        self._lags = Lags(rank, num_ranks, timeout_s, running_time())
        self._group = dist.distributed_c10d._get_default_group()
        # A connection of its own: another thread may wait in the ranks' own for minutes.
        self._address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        limit = timedelta(seconds=max(timeout_s, 1.0))
        store = dist.TCPStore(*self._address, None, False, limit, wait_for_workers=False)
        store.set_timeout(timedelta(seconds=BACKSTOP_S))  # it too goes on while this process is stopped
        self._store = dist.PrefixStore("lockstep/collectives", store)
        self._num_beats, self._closed = 0, threading.Event()
        self._beat()
        dist.barrier()  # every key exists now: no read waits
        self._last_round = running_time()  # when the store last answered
        self._threads = [
            threading.Thread(target=run, name=f"lockstep-collectives-{run.__name__.strip('_')}", daemon=True)
            for run in (self._follow, self._judge)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End the watch, and tell the other ranks."""
        self._closed.set()
        for thread in self._threads:
            thread.join(self._timeout_s)
        with suppress(RuntimeError):  # the store's host has ended before
            self._beat(has_left=True)

    def _beat(self, *, has_left: bool = False) -> int:
        begun: int = self._group._get_sequence_number_for_group()  # type: ignore[attr-defined]  # not in its stubs
        self._num_beats += 1
        self._store.set(str(self._rank), json.dumps([self._num_beats, begun, has_left]))
        return begun

    def _follow(self) -> None:
        """Exchange signs of life with the other ranks."""
        try:
            while not self._closed.wait(self._interval_s):
                begun = self._beat()
                texts = self._store.multi_get([str(rank) for rank in self._others])
                self._last_round = now = running_time()
                found = self._lags.find(begun, dict(zip(self._others, texts, strict=True)), now)
                if found is not None and not self._closed.is_set():
                    self._leave(found)
        except RuntimeError as error:  # its host has ended, and with it the launcher or the first rank
            logger.debug("the store of the ranks: %s", error)
            self._closed.set()

    def _judge(self) -> None:
        """End this process where the store's host is stopped: an operation of the store never returns then."""
        while not self._closed.wait(self._interval_s):
            now = running_time()
            silent_s = now - self._last_round
            if min(silent_s, self._lags.still_s(now)) > self._timeout_s:
                host = "the launcher" if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else "rank 0"
                why = f"the store at {':'.join(map(str, self._address))} does not answer for {silent_s:.1f} s: "
                self._leave(RankFailure(f"{why}{host} is stopped, or its machine is gone"))

    def _leave(self, found: RankFailure) -> NoReturn:
        leave(found, self._rank, "in a collective of the job")
