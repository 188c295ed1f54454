"""A log of events in time, in the format of Chrome traces, which chrome://tracing and Perfetto open.

The file is a JSON array that may end without its bracket, which viewers accept: a killed run leaves a readable trace.
A trace must not disturb what it describes: where its file cannot be written, the trace ends and the engine goes on.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import TextIO

from ..nothing import NOTHING

logger = logging.getLogger(__name__)

_FLUSH_EVERY = 512  # events between writes


class Trace:
    """Append events to a file; does nothing without one. Thread-safe.

    A file that cannot be written ends the trace: the error is logged, counted and kept for `report`, and not raised.
    """

    def __init__(self, path: str | Path | None) -> None:
        self._file: TextIO | None = None
        self.is_on = False  # whether a file is open: an attribute, which each step reads
        self._lock = threading.Lock()
        self._events: list[dict[str, object]] = []
        self._path: str | None = None  # of the newest file
        self._failure: str | None = None  # the error that ended the newest trace
        self.num_failures = 0  # traces that ended because their file could not be written
        if path is not None:
            self.open(path)

    def open(self, path: str | Path) -> None:
        """Write to this file until `close`. Raises ValueError while another is open, OSError if it cannot be
        created."""
        with self._lock:
            if self._file is not None:
                raise ValueError("a trace is being written already")
            self._events = []
            self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115 - until `close`
            self._path, self._failure, self.is_on = str(path), None, True
            self._write("[\n")

    def start(self, path: str | Path) -> bool:
        """Do as `open`, but return False if a file is open already."""
        if self.is_on:
            return False
        self.open(path)
        return True

    def span(self, name: str, *, since: float | None = None, **args: object) -> AbstractContextManager[None]:
        """Record an event with a duration, on the lane of this thread. since: its start, if earlier than now."""
        return NOTHING if self._file is None else self._span(name, since, args)

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
            events, self._events = self._events, []
            self._write("".join(json.dumps(event) + ",\n" for event in events))

    def close(self) -> None:
        """Write the buffered events and the end of the file."""
        self.flush()
        with self._lock:
            self._write("{}]\n", is_last=True)

    def report(self) -> dict[str, object]:
        """Return the newest file, whether it is being written, and the failures. Changes nothing."""
        return {"path": self._path, "is_on": self.is_on, "failure": self._failure, "num_failures": self.num_failures}

    def _write(self, text: str, *, is_last: bool = False) -> None:
        """Write to the file, or end the trace where that fails. The caller holds the lock."""
        file = self._file
        if file is None:
            return
        try:
            file.write(text)
            file.flush()
            if is_last:
                file.close()
                self._file, self.is_on = None, False
        except OSError as error:
            with suppress(OSError):  # closing tries to write the rest again
                file.close()
            self._file, self.is_on = None, False
            self._failure = f"{self._path} cannot be written: {error.strerror or error}"
            self.num_failures += 1
            logger.error("the trace has ended, the engine goes on: %s", self._failure)

    def _add(self, event: dict[str, object]) -> None:
        event["pid"], event["tid"] = os.getpid(), threading.get_native_id()
        with self._lock:
            self._events.append(event)
            is_full = len(self._events) >= _FLUSH_EVERY
        if is_full:
            self.flush()
