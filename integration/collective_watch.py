"""A watch over the collectives of a job's ranks, which finds the rank that does not come to one.

gloo's own timeouts go on while a process is stopped, so that a job which is suspended as a whole (SIGSTOP, a SLURM job,
a frozen container) would be lost when it is continued. So the default group gets a long one, and a thread of each rank
counts the time in which this rank itself ran. It publishes how many collectives of the default group the rank has
begun, what it does and how far that has come (`activity`), in the store by which the ranks met, and reads those of the
others. A rank that does work of its own, such as to write a checkpoint, is waited for as long as the work goes on.

NCCL has deadlines of its own, which know of no such work. There the ranks meet through the store before a collective
that one of them may come to late (`CollectiveWatch.meet`), and the watch judges while they do.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import astuple, dataclass
from datetime import timedelta
from typing import NoReturn

import torch.distributed as dist

from ..kernels.machine.running_time import running_time
from ..rollout.errors import RankFailure
from .activity import Activity
from .lost_ranks import leave

logger = logging.getLogger(__name__)

BACKSTOP_S = 86400  # gloo's own timeout, for a rank that gives signs of life and whose packets are lost
_LOOK_S = 0.05  # between two looks whether all ranks have come to a meeting


@dataclass(frozen=True)
class Life:
    """The content of a sign of life: facts of the rank that gives it."""

    begun: int  # collectives, and meetings
    has_left: bool = False  # in order
    step: int = 0  # of its job
    progress: int = 0  # see `Activity.progress`
    doing: str = ""


@dataclass
class _Sign:
    """The last sign of life of another rank. Times are those in which this rank ran."""

    text: bytes = b""
    life: Life = Life(0)
    heard: float = 0.0  # when the text last changed
    moved: float = 0.0  # when it last began a collective or went on with its work
    missed: tuple[int, float] | None = None  # collectives of this rank that it has not begun, and when this rank had


class Lags:
    """The signs of life of the other ranks, as one rank sees them."""

    def __init__(self, rank: int, num_ranks: int, timeout_s: float, now: float, setting: str = "") -> None:
        """Begin. setting: the name of the timeout for the people who can change it."""
        self._timeout_s, self._setting = timeout_s, setting
        self._own, self._begun_at, self._moved = Life(0), now, now
        self._signs = {other: _Sign(heard=now, moved=now) for other in range(num_ranks) if other != rank}

    def still_s(self, now: float) -> float:
        """Return for how long this rank has begun no collective."""
        return now - self._begun_at

    def find(self, own: Life, texts: Mapping[int, bytes], now: float) -> RankFailure | None:
        """Note what this rank and the others say of themselves. Returns the failure of a rank that has neither come to
        a collective nor gone on with its work for the timeout, that is silent while this rank begins no collective, or
        that waits in another collective than this rank."""
        if own.begun != self._own.begun:
            self._begun_at = now
        if _goes_on(self._own, own):
            self._moved = now
        self._own = own
        for rank, text in texts.items():
            sign = self._signs[rank]
            if text != sign.text:
                said = Life(*json.loads(text)[1:])
                if _goes_on(sign.life, said):
                    sign.moved = now
                sign.text, sign.life, sign.heard = text, said, now
            if (found := self._judge(rank, sign, now)) is not None:
                return found
        return None

    def _judge(self, rank: int, sign: _Sign, now: float) -> RankFailure | None:
        own, other = self._own, sign.life
        if sign.missed is None or other.begun >= sign.missed[0]:  # what it says of itself is older than `own`
            sign.missed = (own.begun, now) if other.begun < own.begun else None
        if other.has_left:  # in order only if it has come to all that this rank has
            ended_s = 0.0 if sign.missed is None else now - sign.missed[1]
            return (
                failure(rank, "has ended, and comes to no collective", ended_s) if ended_s > self._timeout_s else None
            )
        if sign.missed is not None and (late_s := now - max(sign.missed[1], sign.moved)) > self._timeout_s:
            work = f" ({other.doing})" if other.doing else ""
            why = "hangs, or is stopped"
            if self._setting:
                why = f"hangs, is stopped, or takes longer than {self._setting}={self._timeout_s:g} allows"
            return failure(rank, f"has not come to a collective for {late_s:.1f} s{work}: it {why}", late_s)
        if min(silent_s := now - sign.heard, self.still_s(now)) > self._timeout_s:
            return failure(rank, f"gives no sign of life for {silent_s:.1f} s: stopped, or blocked", silent_s)
        # Equal counts do not tell ranks apart whose jobs began at different steps.
        still_s = now - max(sign.moved, self._moved)
        if own.begun == other.begun and own.step != other.step and still_s > self._timeout_s:
            why = f"is in step {other.step} and this one in step {own.step}: they wait in different collectives"
            return failure(rank, why, still_s)
        return None


def _goes_on(before: Life, now: Life) -> bool:
    return (before.begun, before.progress) != (now.begun, now.progress)


def failure(rank: int, why: str, seconds: float) -> RankFailure:
    """Return the failure of a rank. why: the predicate of its sentence."""
    return RankFailure(f"rank {rank} {why}", (rank,), "collective", -1, round(seconds, 3))


class CollectiveWatch:
    """The watch of this rank over the default group. It ends this process where another rank does not come."""

    def __init__(
        self, rank: int, num_ranks: int, timeout_s: float, activity: Activity | None = None, *, setting: str = "",
        has_deadlines: bool = False,
    ) -> None:  # fmt: skip
        """Begin, with the default group open: all its ranks come here. timeout_s: of a rank that does not come.
        setting: its name for people. activity: of this rank. has_deadlines: the group's collectives have their own, and
        are not counted."""
        self._rank, self._others = rank, [other for other in range(num_ranks) if other != rank]
        self._timeout_s, self._interval_s = timeout_s, min(max(timeout_s / 20, 0.05), 2.0)
        self._lags = Lags(rank, num_ranks, timeout_s, running_time(), setting)
        self._activity = activity or Activity()
        self._group = None if has_deadlines else dist.distributed_c10d._get_default_group()
        self._num_meetings, self._meets = 0, False
        self._threads: list[threading.Thread] = []
        # Connections of their own: another thread may wait in the ranks' own for minutes.
        self._address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self._store, self._meetings = self._connect("collectives"), self._connect("meetings")
        self._num_beats, self._closed = 0, threading.Event()
        self._beat()
        self._last_round = running_time()  # when the store last answered
        self.meet()  # every key exists now: no read waits
        self._last_round = running_time()
        self._threads = [
            threading.Thread(target=run, name=f"lockstep-collectives-{run.__name__.strip('_')}", daemon=True)
            for run in (self._follow, self._judge)
        ]
        for thread in self._threads:
            thread.start()

    def _connect(self, prefix: str) -> dist.Store:
        limit = timedelta(seconds=max(self._timeout_s, 1.0))
        store = dist.TCPStore(*self._address, None, False, limit, wait_for_workers=False)
        store.set_timeout(timedelta(seconds=BACKSTOP_S))  # it too goes on while this process is stopped
        return dist.PrefixStore(f"lockstep/{prefix}", store)

    def meet(self) -> None:
        """Wait until all ranks have come here, for as long as the work of those that have not goes on."""
        if self._group is not None:
            dist.barrier()
            return
        self._num_meetings += 1
        name, everybody = str(self._num_meetings), len(self._others) + 1
        self._meets, began = True, running_time()
        try:
            if self._meetings.add(name, 1) == everybody:
                self._meetings.set(f"{name}/all", "")
            # No wait of the store's: handlers of signals would not run meanwhile.
            while not self._meetings.check([f"{name}/all"]):
                if not self._threads and running_time() - began > self._timeout_s:
                    raise RankFailure(f"not all of {everybody} ranks have come within {self._timeout_s:g} s")
                self._closed.wait(_LOOK_S)
        finally:
            self._meets = False

    def close(self) -> None:
        """End the watch, and tell the other ranks."""
        self._closed.set()
        for thread in self._threads:
            thread.join(self._timeout_s)
        with suppress(RuntimeError):  # the store's host has ended before
            self._beat(has_left=True)

    def _beat(self, *, has_left: bool = False) -> Life:
        begun: int = self._num_meetings
        if self._group is not None:
            begun = self._group._get_sequence_number_for_group()  # type: ignore[attr-defined]  # not in its stubs
        activity = self._activity
        life = Life(begun, has_left, activity.step, activity.progress, activity.doing)
        self._num_beats += 1
        self._store.set(str(self._rank), json.dumps([self._num_beats, *astuple(life)]))
        return life

    @property
    def _judges(self) -> bool:
        """Whether this rank may wait in a collective that has no deadline of its own, or in a meeting."""
        return self._group is not None or self._meets

    def _follow(self) -> None:
        """Exchange signs of life with the other ranks."""
        try:
            while not self._closed.wait(self._interval_s):
                own = self._beat()
                texts = self._store.multi_get([str(rank) for rank in self._others])
                self._last_round = now = running_time()
                found = self._lags.find(own, dict(zip(self._others, texts, strict=True)), now)
                if found is not None and self._judges and not self._closed.is_set():
                    self._leave(found)
        except RuntimeError as error:  # its host has ended, and with it the launcher or the first rank
            logger.debug("the store of the ranks: %s", error)
            self._closed.set()

    def _judge(self) -> None:
        """End this process where the store's host is stopped: an operation of the store never returns then."""
        while not self._closed.wait(self._interval_s):
            now = running_time()
            silent_s = now - self._last_round
            if self._judges and min(silent_s, self._lags.still_s(now)) > self._timeout_s:
                host = "the launcher" if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else "rank 0"
                why = f"the store at {':'.join(map(str, self._address))} does not answer for {silent_s:.1f} s: "
                self._leave(RankFailure(f"{why}{host} is stopped, or its machine is gone"))

    def _leave(self, found: RankFailure) -> NoReturn:
        leave(found, self._rank, "in a collective of the job")
