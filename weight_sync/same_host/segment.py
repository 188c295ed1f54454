"""A sender's segment of shared memory: its file, its header, its two halves, and the rule for its removal.

The file is a header of one page (magic, then a sequence number for each half) and the bytes of two buckets.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import secrets
import struct
import weakref
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ..layout.bucket import BucketPiece, BucketPlan
from ..locked_files import close_held, hold
from .handover import copy_bytes

HEADER_BYTES = 4096  # a page, so that the bucket starts on one
MAGIC = b"lockstep-shm-1\0\0"
_SEQUENCE = struct.Struct("=Q")
_NOTHING = 1  # odd: no description has it
FILE_NAME = re.compile(r"lockstep-[0-9]+-[0-9a-f]{16}\.shm")
_own: weakref.WeakSet[Segment] = weakref.WeakSet()  # of this process, unlinked ones among them


def _sequence_offset(half: int) -> int:
    return len(MAGIC) + half * _SEQUENCE.size


def read_sequence(mapped: mmap.mmap, half: int) -> int:
    """Read the sequence number of a half, in a mapped segment."""
    (found,) = _SEQUENCE.unpack_from(mapped, _sequence_offset(half))
    return found


@dataclass(frozen=True)
class Packed:
    """A bucket in the segment."""

    index: int
    half: int
    sequence: int
    names: tuple[str, ...]
    pieces: tuple[BucketPiece, ...]  # their bucket offsets count from the end of the header


class Segment:
    """The sender's file: created, locked and allocated at once, mapped, unlinked at the end."""

    def __init__(self, folder: Path, num_bytes: int) -> None:
        file, self.path = _create_locked(folder)
        size = HEADER_BYTES + num_bytes
        try:
            # Allocated now: a full folder is an OSError here and not a SIGBUS at the first write.
            os.posix_fallocate(file, 0, size)
            self._map = _mapped(self.path, size)
        except OSError as error:
            self.path.unlink()
            close_held(file)
            raise OSError(error.errno, error.strerror, str(folder)) from error
        self._map[: len(MAGIC)] = MAGIC
        self.data = torch.frombuffer(self._map, dtype=torch.uint8)[HEADER_BYTES:]
        self.unlink = weakref.finalize(self, _unlink, self.path, file, os.getpid())
        _own.add(self)

    def pack(self, plan: BucketPlan, sources: list[Tensor], half_bytes: int, sequence: int) -> Packed:
        """Copy a bucket's pieces into the half for its index; `sequence` marks them complete."""
        half = plan.index % 2
        start = half * half_bytes
        pieces = tuple(replace(piece, bucket_offset=start + piece.bucket_offset) for piece in plan.pieces)
        self._set_sequence(half, sequence - 1)
        for piece, source in zip(pieces, sources, strict=True):
            copy_bytes(self.data[piece.bucket_offset : piece.bucket_offset + piece.num_bytes], source)
        self._set_sequence(half, sequence)
        return Packed(plan.index, half, sequence, plan.names, pieces)

    def invalidate(self) -> None:
        """Make every earlier description stale."""
        for half in (0, 1):
            self._set_sequence(half, _NOTHING)

    def _set_sequence(self, half: int, sequence: int) -> None:
        _SEQUENCE.pack_into(self._map, _sequence_offset(half), sequence)


def _create_locked(folder: Path) -> tuple[int, Path]:
    """Create a new empty file, and hold its lock. Returns (descriptor, path)."""
    while True:
        path = folder / f"lockstep-{os.getpid()}-{secrets.token_hex(8)}.shm"
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        hold(file)
        fcntl.flock(file, fcntl.LOCK_EX)
        # Another sender may have treated the file as stale before we had the lock.
        if os.fstat(file).st_nlink:
            return file, path
        close_held(file)


def _mapped(path: Path, size: int) -> mmap.mmap:
    """Map a file, opened a second time: a map keeps the file open that it was made of, and with it its lock, also in a
    forked child."""
    file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return mmap.mmap(file, size)
    finally:
        os.close(file)


def _unlink(path: Path, file: int, owner: int) -> None:
    if os.getpid() == owner:  # a forked child inherits the finalizer, but neither the segment nor the descriptor
        path.unlink(missing_ok=True)
        close_held(file)


def unlink_own_segments() -> None:
    """Unlink this process's segments, before an end that runs no finalizer (`os._exit`)."""
    for segment in list(_own):
        segment.unlink()


def remove_stale_segments(folder: Path) -> list[Path]:
    """Unlink segments of this user whose senders have ended; returns their paths. Segments in use stay."""
    removed = []
    for path in folder.iterdir():
        if not FILE_NAME.fullmatch(path.name):
            continue
        try:
            file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:  # another user's file, a link, or just removed: not ours to remove
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file).st_uid == os.getuid():
                path.unlink(missing_ok=True)
                removed.append(path)
        except BlockingIOError:  # its sender is still running
            pass
        finally:
            os.close(file)
    return removed
