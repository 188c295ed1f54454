"""Numbered messages between two ranks over a gloo group: sent at once, received by a thread per peer.

A message is one send of a fixed size, so that its receive can be posted before its length is known; the rest of a
longer message follows in a second send. gloo reads a tensor when its receiver is ready, so a sent tensor is kept until
the peer reports, with its next message in the other direction, the last message that it has read.
"""

from __future__ import annotations

import json
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist

_HEADER = struct.Struct("<iiqqq")  # payload bytes, kind, id, sequence number, last number read
_FRAME_BYTES = 1024
_ROOM = _FRAME_BYTES - _HEADER.size
_FRAME_TAG, _REST_TAG = 0, 1
_FOREVER = timedelta(days=30)  # of a receive: an idle peer is no failure


class Kind(IntEnum):
    """The kind of a message."""

    STEP = 1  # controller: events since the last such message, and perhaps a step to run
    CALL_OVER = 2  # controller: the follower's call ends; JSON
    CLOSE = 3  # controller: the engine is closed
    VERB = 4  # controller: a verb to run; JSON
    ANSWERS = 5  # controller: the gathered values of a collective; JSON
    LOST = 6  # controller: the replica is lost; JSON of a Cause
    HERE = 7  # follower: it follows; id: its mode, 1 (in a call) or 2 (serving)
    RESULTS = 8  # sampling rank: results of the step `id`
    STEP_FAILED = 9  # follower: the step `id` failed here; JSON
    REPLY = 10  # follower: the answer to the verb `id`; JSON
    SAYS = 11  # follower: its value in the collective `id`; JSON
    READ = 12  # follower: the header has the number of the last message read
    BYE = 13  # follower: its last message
    STANDS = 14  # follower: its status from now on; JSON
    END = 15  # controller: its last message; id: 1 where every follower has said BYE, else 0


@dataclass(frozen=True)
class Message:
    """A received message."""

    kind: Kind
    id: int
    payload: bytes
    number: int

    def json(self) -> Any:
        return json.loads(self.payload)


@dataclass(eq=False)
class _Link:
    """The state of the connection to one peer."""

    unread: deque[tuple[int, list[torch.Tensor], list[dist.Work]]] = field(default_factory=deque)
    num_sent: int = 0
    num_read: int = 0  # of the peer's messages, by this rank
    num_told: int = 0  # of the peer's messages, reported to it as read


class RankWire:
    """This rank's connections to its peers. Any thread may send."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        peers: Iterable[int],
        deliver: Callable[[int, Message], bool],
        on_gone: Callable[[int, RuntimeError], None],
    ) -> None:
        """Prepare connections; `start` begins to receive.

        peers: ranks of the group; deliver: takes a peer's message and returns whether it was the last; on_gone: called
        when a connection ends without a last message. The peer's thread calls both.
        """
        self._group, self._deliver, self._on_gone = group, deliver, on_gone
        self._links = {rank: _Link() for rank in peers}
        self._threads = [
            threading.Thread(target=self._receive, args=(rank,), name=f"lockstep-from-{rank}", daemon=True)
            for rank in self._links
        ]
        self._lock = threading.Lock()
        self.num_bytes_sent = 0
        self.num_messages_sent = 0

    def start(self) -> None:
        """Start the threads that receive."""
        for thread in self._threads:
            thread.start()

    def join(self, timeout_s: float) -> None:
        """Wait for the threads that receive, which end with the peers' last messages."""
        for thread in self._threads:
            thread.join(timeout_s)

    def num_unread(self, rank: int) -> int:
        """Return the number of messages that the peer has not reported as read."""
        return len(self._links[rank].unread)

    def num_untold(self, rank: int) -> int:
        """Return the number of the peer's messages that this rank has read and not reported."""
        return self._links[rank].num_read - self._links[rank].num_told

    def has_read(self, rank: int, message: Message) -> None:
        """Mark the peer's message as read. The next message to the peer reports it."""
        self._links[rank].num_read = message.number

    def send_out(self, ranks: Iterable[int], kind: Kind, id: int, payload: bytes, timeout_s: float) -> None:
        """Send, and wait until the messages have left this process, which may end then. Raises RuntimeError."""
        for work in [work for rank in ranks for work in self.send(rank, kind, id, payload)]:
            work.wait(timedelta(seconds=timeout_s))

    def send(self, rank: int, kind: Kind, id: int, payload: bytes) -> list[dist.Work]:
        """Send a message and return at once. Raises gloo's RuntimeError if the connection has ended."""
        link = self._links[rank]
        with self._lock:
            link.num_sent += 1
            link.num_told = link.num_read
            frame = bytearray(_FRAME_BYTES)
            _HEADER.pack_into(frame, 0, len(payload), kind, id, link.num_sent, link.num_read)
            frame[_HEADER.size : _HEADER.size + min(len(payload), _ROOM)] = payload[:_ROOM]
            tensors = [torch.frombuffer(frame, dtype=torch.uint8)]
            if len(payload) > _ROOM:
                tensors.append(torch.frombuffer(bytearray(payload[_ROOM:]), dtype=torch.uint8))
            works = [self._group.send([t], rank, tag) for tag, t in zip((_FRAME_TAG, _REST_TAG), tensors, strict=False)]
            link.unread.append((link.num_sent, tensors, works))
            self.num_messages_sent += 1
            self.num_bytes_sent += sum(t.numel() for t in tensors)
        return works

    def _receive(self, rank: int) -> None:
        """Receive the peer's messages until its last one. Runs in a thread of its own."""
        link = self._links[rank]
        frame = torch.empty(_FRAME_BYTES, dtype=torch.uint8)
        try:
            is_last = False
            while not is_last:
                self._group.recv([frame], rank, _FRAME_TAG).wait(_FOREVER)
                data = frame.numpy().tobytes()
                num_bytes, kind, id, number, num_read = _HEADER.unpack_from(data)
                payload = data[_HEADER.size : _HEADER.size + min(num_bytes, _ROOM)]
                if num_bytes > _ROOM:
                    rest = torch.empty(num_bytes - _ROOM, dtype=torch.uint8)
                    self._group.recv([rest], rank, _REST_TAG).wait(_FOREVER)
                    payload += rest.numpy().tobytes()
                while link.unread and link.unread[0][0] <= num_read:
                    link.unread.popleft()
                is_last = self._deliver(rank, Message(Kind(kind), id, payload, number))
        except RuntimeError as error:
            self._on_gone(rank, error)
