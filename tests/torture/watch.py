"""A watch over a server, in a process of its own: latency of its reports, progress of its loop, memory, descriptors.

Prints one JSON object a line: answers that took a while, excesses and bad answers as they come, a sample of the process
each quarter of a second. Ends with its standard input. Imports nothing beyond the standard library and the requests, so
that it starts at once and its own thread is never late for long.

A machine that others use makes every answer late, and so do the attackers themselves. Two spans are therefore taken off
before a limit is applied: `late_s`, the largest lateness of a thread of the watch that only sleeps, and `taken_s`, for
which other processes kept the server's threads from a processor (`processor.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

from lockstep.tests.torture.processor import Reading, descendants, read, taken_s
from lockstep.tests.torture.wire import Address, Answer, exchange, request_bytes

PERIOD_S = 0.1  # between two probes of a path
SAMPLE_S = 0.25
TICK_S = 0.02
AGAIN_S = 5.0  # between two reports of a server that stays without health
PATIENCE_S = 60.0
TOLD_S = 0.05  # shorter answers are not told
QUICK_S = 0.5  # no look at what others took of a shorter answer


class Metronome:
    """A thread that sleeps and notes how late it wakes up."""

    def __init__(self, over: threading.Event) -> None:
        self._over, self._late = over, deque[tuple[float, float]](maxlen=5000)
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            began = time.monotonic()
            if self._over.wait(TICK_S):
                return
            late_s = time.monotonic() - began - TICK_S
            if late_s > TICK_S:
                self._late.append((began, late_s))

    def late_s(self, began: float) -> float:
        """Return the largest lateness since that time."""
        return max((late for at, late in list(self._late) if at >= began - 1), default=0.0)


class Watch:
    """The threads of a watch."""

    def __init__(self, address: Address, limit_s: float, pid: int | None) -> None:
        self.address, self.limit_s, self.pid = address, limit_s, pid
        self.over = threading.Event()
        self._metronome, self._lock = Metronome(self.over), threading.Lock()
        self._progress: tuple[object, float, Reading | None] = (None, time.monotonic(), None)

    def run(self, paths: list[str]) -> None:
        """Watch until standard input ends."""
        threads = [threading.Thread(target=self._probe, args=(path,), daemon=True) for path in paths]
        threads += [threading.Thread(target=self._sample, daemon=True)] * (self.pid is not None)
        for thread in threads:
            thread.start()
        sys.stdin.read()
        self.over.set()
        for thread in threads:
            thread.join(PATIENCE_S + 5)

    def _print(self, line: dict[str, Any]) -> None:
        with self._lock:
            print(json.dumps(line), flush=True)

    def _probe(self, path: str) -> None:
        data, told = request_bytes("GET", path, key=self.address.api_key), -AGAIN_S
        while not self.over.wait(PERIOD_S):
            before, began = self._read(), time.monotonic()
            try:
                answer = exchange(self.address, data, PATIENCE_S)
            except OSError as error:
                answer = Answer(0, repr(error).encode())
            ended = time.monotonic()
            late_s = self._metronome.late_s(began)
            is_quick = ended - began < min(self.limit_s, QUICK_S)
            taken_s = 0.0 if is_quick else self._taken_s(before)
            seconds = max(0.0, ended - began - late_s - taken_s)
            if seconds > TOLD_S:
                self._print({"event": "answered", "path": path, "began": began, "ended": ended,
                             "seconds": round(seconds, 3)})  # fmt: skip
            line = {"path": path, "began": began, "ended": ended, "seconds": round(seconds, 3),
                    "late_s": round(late_s, 3), "taken_s": round(taken_s, 3), "status": answer.status}  # fmt: skip
            if answer.status != 200:
                if ended >= told + AGAIN_S:
                    told = ended
                    self._print({"event": "unhealthy", "said": answer.body[:200].decode(errors="replace"), **line})
            elif seconds > self.limit_s:
                self._print({"event": "late", **line})
            elif path == "/state":
                self._look_at(answer, ended, before)

    def _read(self) -> Reading | None:
        """Read the server's counters; None where its process is unknown or has ended, which others report."""
        try:
            return read(self.pid) if self.pid is not None else None
        except OSError:
            return None

    def _taken_s(self, before: Reading | None) -> float:
        after = self._read()
        return taken_s(before, after) if before is not None and after is not None else 0.0

    def _look_at(self, answer: Answer, now: float, before: Reading | None) -> None:
        """Report a loop that has sequences to run and runs no step."""
        state: Any = answer.json()
        if not isinstance(state, dict) or "num_forwards" not in state:
            return
        may_wait = state["paused"] or state["refusal"] or not state["num_running"] or not state["holds_weights"]
        may_wait = may_wait or (state.get("weight_update") or {}).get("state") not in (None, "none", "closed", "idle")
        forwards, since, at_last = self._progress
        if may_wait or forwards != state["num_forwards"]:
            self._progress = (state["num_forwards"], now, before)
            return
        seconds = now - since - self._metronome.late_s(since)
        if seconds > self.limit_s and seconds - self._taken_s(at_last) > self.limit_s:
            self._print({"event": "stalled", "began": since, "ended": now, "num_running": state["num_running"]})
            self._progress = (forwards, now, before)

    def _sample(self) -> None:
        assert self.pid is not None
        while not self.over.wait(SAMPLE_S):
            try:
                line = sample(self.pid)
            except OSError:
                continue  # the process has ended, which others report
            self._print({"event": "sample", "at": time.monotonic(), **line})


def sample(pid: int) -> dict[str, int]:
    """Read resident bytes (of helper processes their own pages), descriptors and threads. Raises OSError."""
    status = _status(pid)
    helpers = sum(_kib(_status(child).get("RssAnon", "0")) for child in descendants(pid))
    return {"rss": (_kib(status["VmRSS"]) + helpers) << 10, "helpers": helpers << 10,
            "descriptors": len(os.listdir(f"/proc/{pid}/fd")), "threads": int(status["Threads"])}  # fmt: skip


def _status(pid: int) -> dict[str, str]:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except ProcessLookupError as error:
        raise FileNotFoundError(str(error)) from error
    return dict(line.split(":", 1) for line in lines)


def _kib(text: str) -> int:
    return int(text.split()[0])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--limit-s", type=float, default=2.0)
    parser.add_argument("--pid", type=int)
    parser.add_argument("--path", nargs="+", default=["/health", "/state"])
    options = parser.parse_args()
    address = Address(options.url, os.environ.get("TORTURE_API_KEY", ""))
    Watch(address, options.limit_s, options.pid).run(options.path)


if __name__ == "__main__":
    main()
