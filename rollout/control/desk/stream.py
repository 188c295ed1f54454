"""The chunks of one prompt as an iterator, and the end of its requests wherever it ends.

The garbage collector ends a stream that no one has any more between two instructions of any thread: in the middle of a
step, under the inbox's lock, or in a thread that the holder of the engine's lock waits for.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence

from ...completion import StreamChunk
from ..fair_lock import FairLock
from .inbox import Inbox


class Abandoned:
    """Let go of streams' requests at once where that is safe, else before the next step or command."""

    def __init__(self, lock: FairLock, inbox: Inbox, let_go: Callable[[Sequence[str]], None]) -> None:
        """Create it. lock: the engine's; let_go: aborts requests and closes their mailboxes, and takes both locks."""
        self._lock, self._inbox, self._let_go = lock, inbox, let_go
        self._left: deque[Sequence[str]] = deque()
        inbox.before_next = self._let_go_of_left

    def leave(self, ids: Sequence[str], *, may_wait: bool = True) -> None:
        """Let go of a stream's requests, now or later. may_wait: whether this thread may wait for a step."""
        if may_wait and not self._lock.is_mine_or_next and not self._inbox.is_locked_by_me:
            self._let_go(ids)
        else:
            self._left.append(ids)  # no lock is needed for that

    def _let_go_of_left(self) -> None:
        while self._left:
            try:
                ids = self._left.popleft()
            except IndexError:  # another thread had the last ones
                return
            self._let_go(ids)


class Stream(Iterator[StreamChunk]):
    """Chunks until the answers are there. It may be closed before, or dropped: its requests are aborted then."""

    def __init__(self, chunks: Generator[StreamChunk], ids: list[str], abandoned: Abandoned) -> None:
        """Create it. ids: filled by `chunks`, which asks for its requests with the first one."""
        self._chunks, self._ids, self._abandoned = chunks, ids, abandoned
        self._thread = threading.get_ident()  # that has taken the newest chunk

    def __next__(self) -> StreamChunk:
        self._thread = threading.get_ident()
        try:
            return next(self._chunks)
        except BaseException:  # also its end
            self.close()
            raise

    def close(self) -> None:
        """End it, in any thread, while none takes a chunk: no chunk follows."""
        self._chunks.close()
        if ids := self._take_ids():
            self._abandoned.leave(ids)

    def __del__(self) -> None:
        if ids := self._take_ids():  # in another thread only the collector comes here
            self._abandoned.leave(ids, may_wait=self._thread == threading.get_ident())

    def _take_ids(self) -> list[str]:
        ids: list[str] = getattr(self, "_ids", [])  # without them where an interrupt came first
        taken = ids[:]
        ids.clear()
        return taken
