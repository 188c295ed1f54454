"""A log of events in time, in the format of Chrome traces, which chrome://tracing and Perfetto open.

The file is a JSON array that may end without its bracket, which viewers accept: a killed run leaves a readable trace.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TextIO

_FLUSH_EVERY = 512  # events between writes
_NO_SPAN: AbstractContextManager[None] = nullcontext()  # reusable: it holds nothing


class Trace:
    """Append events to a file; does nothing without one. Thread-safe."""

    def __init__(self, path: str | Path | None) -> None:
        self._file: TextIO | None = None
        self._lock = threading.Lock()
        self._events: list[dict[str, object]] = []
        if path is not None:
            self.open(path)

    @property
    def is_on(self) -> bool:
        return self._file is not None

    def open(self, path: str | Path) -> None:
        """Write to this file until `close`. Raises ValueError while another is open, OSError if it cannot be
        created."""
        with self._lock:
            if self._file is not None:
                raise ValueError("a trace is being written already")
            self._events = []
            self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115 - until `close`
            self._file.write("[\n")

    def start(self, path: str | Path) -> bool:
        """Do as `open`, but return False if a file is open already."""
        if self.is_on:
            return False
        self.open(path)
        return True

    def span(self, name: str, *, since: float | None = None, **args: object) -> AbstractContextManager[None]:
        """Record an event with a duration, on the lane of this thread. since: its start, if earlier than now."""
        return _NO_SPAN if self._file is None else self._span(name, since, args)

    @contextmanager
    def _span(self, name: str, since: float | None, args: dict[str, object]) -> Iterator[None]:
        started = time.perf_counter() if since is None else since
        try:
            yield
        finally:
            duration = time.perf_counter() - started
            self._add({"ph": "X", "name": name, "ts": started * 1e6, "dur": duration * 1e6, "args": args})

    def instant(self, name: str, **args: object) -> None:
        """Record an event without a duration."""
        if self._file is not None:
            self._add({"ph": "i", "s": "t", "name": name, "ts": time.perf_counter() * 1e6, "args": args})

    def counter(self, name: str, **values: float) -> None:
        """Record numbers that a viewer draws as a curve."""
        if self._file is not None:
            self._add({"ph": "C", "name": name, "ts": time.perf_counter() * 1e6, "args": values})

    def flush(self) -> None:
        """Write the buffered events."""
        with self._lock:
            if self._file is not None:
                self._file.writelines(json.dumps(event) + ",\n" for event in self._events)
                self._file.flush()
            self._events = []

    def close(self) -> None:
        self.flush()
        with self._lock:
            if self._file is not None:
                self._file.write("{}]\n")
                self._file.close()
                self._file = None

    def _add(self, event: dict[str, object]) -> None:
        event["pid"], event["tid"] = os.getpid(), threading.get_native_id()
        with self._lock:
            self._events.append(event)
            is_full = len(self._events) >= _FLUSH_EVERY
        if is_full:
            self.flush()
