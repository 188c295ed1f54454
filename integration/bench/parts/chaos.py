"""A test of groups under random schedules: all processes must end, and no tensors may be partly written.

A schedule is two or three processes that join gloo groups and push random tensors through them, each at its own random
pace. Some are killed or stopped at a random moment, join in a wrong size or as a rank that is there already, stay away,
have their group destroyed while they join or transfer, or send another plan than the others expect. Afterwards a
process has ended or was ended on purpose, and all tensors of a receiver are the old ones or all are the new ones.
A process that has not ended after its deadlines and a grace time hangs: it is killed and counted.

A schedule follows from its seed alone, except for the machine's own timing.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import random
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import connection
from typing import Any

import torch
from torch import Tensor

from ....weight_sync.errors import TransferFailed, WeightSyncError
from ....weight_sync.group.protocol import receive_update, send_update
from ....weight_sync.group.registry import GroupRegistry
from ....weight_sync.group.rendezvous import Rendezvous
from ....weight_sync.group.weight_group import WeightGroup
from ....weight_sync.manifest import Manifest, specs_of
from ....weight_sync.transaction.transaction import WeightTransaction
from .ports import HOST, free_ports

logger = logging.getLogger(__name__)

CALL_S = 1.0  # deadline of every rendezvous and every transfer
GRACE_S = 10.0  # extra time for a loaded machine, added to all of a process's deadlines together
NUM_PARALLEL = 6  # schedules at a time: most of them wait
_BUCKET_BYTES = 4096
_GROUP = "chaos"
_FORK = multiprocessing.get_context("fork")

Named = list[tuple[str, Tensor]]


# -- processes ---------------------------------------------------------------------------------------------------------


class Forked:
    """A function that runs in a fork of this process, which starts in milliseconds because all imports are done.

    result: its return value, once `finished`; error: the traceback of its exception, or None. Its standard error goes
    to a file: torch logs a stack trace for every broken connection, and this test breaks many.
    """

    def __init__(self, run: Callable[[], object]) -> None:
        self.started = time.monotonic()
        self.pipe, theirs = _FORK.Pipe(duplex=False)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `end`
        self.process = _FORK.Process(target=self._main, args=(run, theirs, self._log.fileno()))
        self.process.start()
        theirs.close()
        self.result: Any = None
        self.error: str | None = None
        self.finished = False

    def wait(self, timeout_s: float) -> bool:
        """Wait until the function has returned or raised, or the process has ended; returns False after the timeout."""
        if not self.pipe.closed:
            if not self.pipe.poll(max(0.0, timeout_s)):
                return False
            self.read()
        return True

    def read(self) -> None:
        """Read the result from the pipe."""
        try:
            self.result, self.error = self.pipe.recv()
            self.finished = True
        except EOFError:
            pass  # it was killed
        self.pipe.close()

    def signal(self, number: signal.Signals) -> None:
        """Send the process a signal, unless it has ended."""
        if self.process.is_alive() and self.process.pid is not None:
            os.kill(self.process.pid, number)

    def log_tail(self, num_bytes: int = 2000) -> str:
        """Return the end of the process's standard error."""
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), num_bytes, max(0, size - num_bytes)).decode(errors="replace")

    def end(self) -> None:
        """Kill the process if it still runs, and join it."""
        self.process.kill()
        self.process.join()
        self.process.close()
        self.pipe.close()
        self._log.close()

    @staticmethod
    def _main(run: Callable[[], object], out: connection.Connection, log: int) -> None:
        os.dup2(log, 2)
        gc.freeze()  # the fork must not collect unreachable groups of the parent: their threads do not exist here
        torch.set_num_threads(1)
        result, error = None, None
        try:
            result = run()
        except BaseException:  # noqa: BLE001 - the process ends here: its parent gets the error
            error = traceback.format_exc()
        out.send((result, error))
        out.close()
        os._exit(0)  # skips joining threads of torch, which may wait for a stopped host


# -- schedules ---------------------------------------------------------------------------------------------------------


@dataclass
class Round:
    """The actions of one rank with one group."""

    delay_s: float  # before it joins
    update_delays_s: list[float]  # before each transfer
    world_size: int
    rank: int
    joins: bool = True
    destroyed_after_s: float | None = None  # seconds from its joining on, by another thread
    odd_plan: bool = False


@dataclass
class RankSchedule:
    """One process: its rounds, and the signal that ends it, if any."""

    rounds: list[Round]
    signal: signal.Signals | None = None
    signal_after_s: float = 0.0


@dataclass
class Schedule:
    """The actions and faults of all processes, drawn from the seed alone."""

    seed: int
    ranks: list[RankSchedule]
    faults: list[str] = field(default_factory=list)

    @property
    def longest_s(self) -> float:
        """The longest time of a process by its deadlines: every call ends at most a second after its own."""
        calls = [1 + len(r.update_delays_s) for r in self.ranks[0].rounds]
        delays = max(sum(r.delay_s + sum(r.update_delays_s) for r in rank.rounds) for rank in self.ranks)
        return sum(calls) * (CALL_S + 1.0) + delays + GRACE_S


def draw_schedule(seed: int) -> Schedule:
    """Draw the schedule of a seed. Two in five have no fault except delays."""
    draw = random.Random(seed)
    size, num_rounds = draw.choice([2, 2, 3]), draw.choice([1, 1, 2])
    num_updates = [draw.choice([1, 2, 3]) for _ in range(num_rounds)]

    def pause(longest_s: float) -> float:
        return draw.choice([0.0, draw.uniform(0, longest_s)])

    ranks = [
        RankSchedule([Round(pause(0.3), [pause(0.1) for _ in range(n)], size, rank) for n in num_updates])
        for rank in range(size)
    ]
    schedule = Schedule(seed, ranks)
    for _ in range(draw.choice([0, 0, 1, 1, 2])):
        victim, number = draw.randrange(size), draw.randrange(num_rounds)
        what = ranks[victim].rounds[number]
        fault = draw.choice(["kill", "kill", "stop", "size", "twice", "absent", "destroy", "destroy", "plan"])
        schedule.faults.append(f"{fault} rank {victim} in round {number}")
        if fault in ("kill", "stop"):
            ranks[victim].signal = signal.SIGKILL if fault == "kill" else signal.SIGSTOP
            ranks[victim].signal_after_s = draw.uniform(0, 0.6)
        elif fault == "size":
            what.world_size = draw.choice([other for other in (1, 2, 3, 4) if other not in (size, what.rank)])
        elif fault == "twice":
            what.rank = draw.choice([rank for rank in range(size) if rank != victim])
        elif fault == "absent":
            what.joins = False
        elif fault == "destroy":
            what.destroyed_after_s = draw.uniform(0, 0.4)
        else:
            what.odd_plan = True
    return schedule


# -- one rank ----------------------------------------------------------------------------------------------------------


def _model(*seed: int) -> Named:
    """Draw random tensors of awkward sizes; two span several buckets."""
    generator = torch.Generator().manual_seed(hash(seed))
    shapes = {"embed": (70, 41), "norm": (41,), "scale": (), "none": (0, 3), "head": (41, 70), "bias": (901,)}
    return [(name, torch.randn(shape, generator=generator)) for name, shape in shapes.items()]


def _run_rank(schedule: Schedule, index: int, ports: Sequence[int]) -> list[str]:
    """Run one rank; returns "" or the error of each rendezvous and each transfer.

    Raises AssertionError for partly written tensors.
    """
    mine, registry = schedule.ranks[index], GroupRegistry()
    outcomes: list[str] = []

    def send_signal() -> None:
        assert mine.signal is not None
        os.kill(os.getpid(), mine.signal)

    with _timer(mine.signal_after_s if mine.signal else None, send_signal):
        for number, what in enumerate(mine.rounds):
            threading.Event().wait(what.delay_s)
            if what.joins:
                with _timer(what.destroyed_after_s, lambda: _destroy(registry)):
                    outcomes += _run_round(schedule.seed, number, what, ports[number], registry)
                _destroy(registry)
    return outcomes


def _run_round(seed: int, number: int, what: Round, port: int, registry: GroupRegistry) -> Iterator[str]:
    try:
        group = registry.init(Rendezvous(HOST, port, what.rank, what.world_size, _GROUP, "gloo", CALL_S))
    except (TransferFailed, ValueError) as error:
        yield f"join: {error}"
        return
    yield ""
    old = _model(seed, number)
    held = [(name, tensor.clone()) for name, tensor in old]
    for update, delay_s in enumerate(what.update_delays_s):
        threading.Event().wait(delay_s)
        new = _model(seed, number, update)
        manifest = Manifest(str(update), specs_of(new))
        expected = Manifest(str(update), specs_of(new[:-1])) if what.odd_plan else manifest
        try:
            if what.rank == 0:
                send_update(group, expected, new[: len(expected.tensors)], _BUCKET_BYTES, CALL_S)
            else:
                _receive(group, held, old, new, expected)
                old = new
        except (WeightSyncError, ValueError) as error:
            yield f"update {update}: {error}"
            return
        yield ""


def _receive(group: WeightGroup, held: Named, old: Named, new: Named, expected: Manifest) -> None:
    transaction = WeightTransaction(held)
    try:
        receive_update(group, transaction, CALL_S, expected)
        transaction.commit()
    except BaseException:
        transaction.rollback()
        assert _equal(held, old), "a failed update left something"
        raise
    assert _equal(held, new), "an update that was complete is not what was sent"


def _equal(one: Named, other: Named) -> bool:
    return all(torch.equal(tensor, theirs) for (_, tensor), (_, theirs) in zip(one, other, strict=True))


def _destroy(registry: GroupRegistry) -> None:
    try:
        registry.destroy(_GROUP)
    except ValueError:
        return  # the group does not exist, or not yet


@contextmanager
def _timer(after_s: float | None, action: Callable[[], object]) -> Iterator[None]:
    timer = None if after_s is None else threading.Timer(after_s, action)
    if timer is not None:
        timer.daemon = True
        timer.start()
    try:
        yield
    finally:
        if timer is not None:
            timer.cancel()


# -- all of them -------------------------------------------------------------------------------------------------------


class _Running:
    """The processes of a schedule."""

    def __init__(self, seed: int) -> None:
        self.schedule = draw_schedule(seed)
        ports = free_ports(len(self.schedule.ranks[0].rounds))
        self.started = time.monotonic()
        self.deadline = self.started + self.schedule.longest_s
        self.ranks = [
            Forked(partial(_run_rank, self.schedule, index, ports)) for index in range(len(self.schedule.ranks))
        ]

    def awaited(self) -> list[Forked]:
        """List the processes that must end by themselves and have not."""
        pairs = zip(self.ranks, self.schedule.ranks, strict=True)
        return [rank for rank, plan in pairs if not rank.pipe.closed and plan.signal != signal.SIGSTOP]

    def is_over(self) -> bool:
        return not self.awaited() or time.monotonic() >= self.deadline

    def end(self) -> tuple[bool, bool, str]:
        """Kill the remaining processes; returns whether any hung, whether all calls succeeded, and faults as text."""
        hangs, completed = bool(self.awaited()), True
        wrong: list[str] = []
        for index, (rank, plan) in enumerate(zip(self.ranks, self.schedule.ranks, strict=True)):
            has_ended = rank.wait(0)
            if rank.error is not None:
                wrong.append(f"rank {index}:\n{rank.error}")
            elif has_ended and not rank.finished and plan.signal is None:
                wrong.append(f"rank {index} died by itself; the end of its log:\n{rank.log_tail()}")
            succeeded = rank.finished and rank.error is None and not any(rank.result)
            completed = completed and succeeded
            rank.end()
        return hangs, completed, "\n".join(wrong)


def run_chaos(num_schedules: int, seed: int = 0) -> dict[str, object]:
    """Run schedules seed, seed + 1, ...; each ends in any case.

    num_hangs: schedules with a process that did not end by its deadline, their seeds in hangs; num_completed: where
    every join and every transfer succeeded; wrong: seed and reason, where a process ended unexpectedly, raised a wrong
    exception, or found partly written tensors; num_failed_cleanly: all others. longest_s: of a schedule. Hangs and
    wrong results are logged.
    """
    ours = logging.getLogger("lockstep")
    level = ours.level
    ours.setLevel(logging.ERROR)  # forks inherit it; failures are expected here
    try:
        return _run_schedules(num_schedules, seed)
    finally:
        ours.setLevel(level)


def _run_schedules(num_schedules: int, seed: int) -> dict[str, object]:
    torch.set_num_threads(1)
    started, todo = time.monotonic(), iter(range(seed, seed + num_schedules))
    running: list[_Running] = []
    hangs, wrong, num_completed, longest_s = [], [], 0, 0.0
    while True:
        while len(running) < NUM_PARALLEL and (following := next(todo, None)) is not None:
            running.append(_Running(following))
        if not running:
            break
        pipes = {rank.pipe: rank for schedule in running for rank in schedule.awaited()}
        nearest_s = max(0.0, min(schedule.deadline for schedule in running) - time.monotonic())
        for pipe in connection.wait(list(pipes), nearest_s):
            pipes[pipe].read()  # type: ignore[index]
        for schedule in [one for one in running if one.is_over()]:
            running.remove(schedule)
            longest_s = max(longest_s, time.monotonic() - schedule.started)
            has_hung, completed, why = schedule.end()
            number, faults = schedule.schedule.seed, ", ".join(schedule.schedule.faults) or "no fault"
            if has_hung:
                hangs.append(number)
                logger.error("schedule %d (%s) hangs", number, faults)
            if why:
                wrong.append({"seed": number, "why": f"{faults}: {why}"})
                logger.error("schedule %d (%s): %s", number, faults, why)
            num_completed += completed and not has_hung
    return {
        "num_schedules": num_schedules,
        "num_hangs": len(hangs),
        "num_completed": num_completed,
        "num_failed_cleanly": num_schedules - len(hangs) - num_completed - len(wrong),
        "seconds": time.monotonic() - started,
        "longest_s": longest_s,
        "hangs": hangs,
        "wrong": wrong,
    }
