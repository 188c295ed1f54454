"""Frames between an engine and the process that compiles its grammars: a length, and so many bytes.

The first frame holds the vocabulary and the limits, each further one a grammar. Each is answered by one frame.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import BinaryIO

from .shortest_text import NO_TEXT, ForcedBound

_LENGTH = struct.Struct("<Q")
_HEAD_END = b"\n"


@dataclass(frozen=True)
class CompilerSetup:
    """Vocabulary and limits, which a process needs before the first grammar."""

    pieces: Sequence[bytes]
    stop_token_ids: Sequence[int]
    any_whitespace: bool
    timeout_s: float  # processor time for one grammar
    num_bytes: int  # memory for all of its work, beyond that of its start
    max_grammar_bytes: int  # of a compiled grammar

    def packed(self) -> bytes:
        """Return the bytes of the frame."""
        head = {**asdict(self), "pieces": [len(piece) for piece in self.pieces]}
        return json.dumps(head).encode() + _HEAD_END + b"".join(self.pieces)

    @classmethod
    def unpacked(cls, frame: bytes) -> CompilerSetup:
        """Read the bytes of a frame."""
        head, _, data = frame.partition(_HEAD_END)
        fields = json.loads(head)
        ends = [0]
        for length in fields["pieces"]:
            ends.append(ends[-1] + length)
        return cls(**{**fields, "pieces": [data[start:end] for start, end in pairwise(ends)]})


@dataclass(frozen=True)
class CompilerAnswer:
    """The result of one grammar: an error, or a serialised grammar with its bound."""

    error: str | None = None
    bound: ForcedBound = NO_TEXT
    serialized: str = ""
    is_last: bool = False  # the process ends: its memory is used up
    nests: bool = False  # see `Rules.nests`

    def packed(self) -> bytes:
        """Return the bytes of the frame."""
        head = {"error": self.error, "bound": asdict(self.bound), "is_last": self.is_last, "nests": self.nests}
        return json.dumps(head).encode() + _HEAD_END + self.serialized.encode()

    @classmethod
    def unpacked(cls, frame: bytes) -> CompilerAnswer:
        """Read the bytes of a frame."""
        head, _, serialized = frame.partition(_HEAD_END)
        fields = json.loads(head)
        return cls(
            fields["error"], ForcedBound(**fields["bound"]), serialized.decode(), fields["is_last"], fields["nests"]
        )


def write_frame(file: BinaryIO, frame: bytes) -> None:
    """Write one frame. Raises OSError if the reader has gone."""
    file.write(_LENGTH.pack(len(frame)))
    file.write(frame)
    file.flush()


def read_frame(read: Callable[[int], bytes]) -> bytes | None:
    """Read one frame; None at the end. `read` returns at most so many bytes, none at the end."""
    head = _read(read, _LENGTH.size)
    return None if head is None else _read(read, _LENGTH.unpack(head)[0])


def _read(read: Callable[[int], bytes], num_bytes: int) -> bytes | None:
    parts: list[bytes] = []
    while num_bytes:
        if not (part := read(min(num_bytes, 2**20))):
            return None
        parts.append(part)
        num_bytes -= len(part)
    return b"".join(parts)
