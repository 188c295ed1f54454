"""Plain counters of an engine's weight updates. The HTTP server turns them into Prometheus counters."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

# The first word of an update's source, as sessions name it, to the path, as other frameworks name it.
_PATHS = {"group": "distributed", "tensor": "tensor", "folder": "disk", "this": "process"}


def path_of(source: str) -> str:
    """Return the path by which an update of that source came."""
    return _PATHS.get(source.partition(" ")[0], "other")


@dataclass
class WeightMetrics:
    """Totals since the service was made. Any thread may write."""

    num_updates: Counter[str] = field(default_factory=Counter)  # whole updates, by path
    num_bytes: Counter[str] = field(default_factory=Counter)  # of the whole updates
    seconds: dict[str, float] = field(default_factory=dict)  # of the whole updates
    last_seconds: dict[str, float] = field(default_factory=dict)  # of the newest attempt, by path
    num_digests_verified: int = 0  # tensors whose digests equal the sender's
    num_failures: Counter[tuple[str, str]] = field(default_factory=Counter)  # by operation and class of the error
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def attempt(self, operation: str) -> Iterator[None]:
        """Count the operation as failed where the block raises."""
        try:
            yield
        except BaseException as error:
            with self._lock:
                self.num_failures[operation, type(error).__name__] += 1
            raise

    @contextmanager
    def update(self, path: str) -> Iterator[None]:
        """Run an `attempt` of an update by that path, and record its seconds."""
        started = time.monotonic()
        try:
            with self.attempt(f"update_{path}"):
                yield
        finally:
            with self._lock:
                self.last_seconds[path] = time.monotonic() - started

    def written(self, path: str, num_bytes: int, seconds: float, num_verified: int) -> None:
        """Count an update that was written whole. num_verified: its tensors that were compared with the sender's
        digests."""
        with self._lock:
            self.num_updates[path] += 1
            self.num_bytes[path] += num_bytes
            self.seconds[path] = self.seconds.get(path, 0.0) + seconds
            self.num_digests_verified += num_verified

    def verified(self, num_tensors: int) -> None:
        """Count tensors that were compared with the sender's digests."""
        with self._lock:
            self.num_digests_verified += num_tensors

    def copy(self) -> WeightMetrics:
        """Return a copy of the present values."""
        with self._lock:
            return WeightMetrics(
                self.num_updates.copy(), self.num_bytes.copy(), self.seconds.copy(), dict(self.last_seconds),
                self.num_digests_verified, self.num_failures.copy(),
            )  # fmt: skip
