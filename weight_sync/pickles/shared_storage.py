"""CPU storages that torch.multiprocessing shares: by name in /dev/shm, or by descriptor over a socket.

Their descriptions come from another process. `problem` checks one without opening anything; `attach` maps it. Torch's
own `rebuild_storage_filename` and `rebuild_storage_fd` do the mapping, because they also keep torch's count of users.
"""

from __future__ import annotations

import os
import re
import socket
import stat
import struct
from dataclasses import dataclass
from multiprocessing import AuthenticationError, connection, process, reduction
from pathlib import Path
from typing import Protocol

import torch
from torch.multiprocessing import reductions

from ..errors import TransferFailed
from ..layout.json_values import is_count
from ..same_host.handover import shown

SHM_FOLDER = Path("/dev/shm")
_SHARED_NAME = re.compile(rb"/torch_[0-9]+_[0-9]+_[0-9]+")
_MANAGER = "torch_shm_manager"  # torch's program that removes the memory of a sender that has died
_CREDENTIALS = struct.Struct("3i")  # of the process at the other end of a socket: its id, user and group
_COUNTER_BYTES = 64  # torch keeps its count of users before the storage


class StoragePlan(Protocol):
    """A storage to attach to."""

    @property
    def num_bytes(self) -> int: ...

    def problem(self) -> str | None:
        """Return the reason why it must not be attached, or None. Changes nothing."""

    def attach(self, timeout_s: float) -> torch.UntypedStorage:
        """Map the storage. Raises TransferFailed if its sender is gone or does not answer in time."""


@dataclass(frozen=True)
class EmptyStorage:
    """A storage without bytes."""

    num_bytes: int = 0

    def problem(self) -> str | None:
        return None

    def attach(self, timeout_s: float) -> torch.UntypedStorage:
        return torch.UntypedStorage(0)


@dataclass(frozen=True)
class NamedStorage:
    """A storage shared under the strategy file_system: a file, and the socket of the process that manages it."""

    manager: bytes
    handle: bytes
    num_bytes: int
    sent: object  # its place in a payload: torch counts one user per place, and attaching takes over that count

    @property
    def memory(self) -> tuple[object, object]:
        """The shared memory that this names."""
        return self.handle, self.manager

    def problem(self) -> str | None:
        if not isinstance(self.handle, bytes) or not _SHARED_NAME.fullmatch(self.handle):
            return f"shared-memory name {shown(self.handle)} is not one of torch's"
        if not is_count(self.num_bytes):
            return f"storage size {shown(self.num_bytes)}"
        if not isinstance(self.manager, bytes):
            return f"manager {shown(self.manager)}"
        return _socket_problem(self.manager) or self._file_problem()

    def _file_problem(self) -> str | None:
        path = SHM_FOLDER / os.fsdecode(self.handle[1:])
        try:
            found = path.lstat()
        except OSError as error:
            return f"{path}: {error.strerror}"
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid():
            return f"{path} is not a regular file of this user"
        if found.st_size < self.num_bytes + _COUNTER_BYTES:
            return f"{path} has {found.st_size} bytes, less than the storage's {self.num_bytes}"
        return None

    def attach(self, timeout_s: float) -> torch.UntypedStorage:
        try:
            _check_manager(self.manager, timeout_s)
            return reductions.rebuild_storage_filename(torch.UntypedStorage, self.manager, self.handle, self.num_bytes)
        except RuntimeError as error:
            raise TransferFailed(f"attaching to shared memory {shown(self.handle)}: {error}") from error


@dataclass(frozen=True)
class DescriptorStorage:
    """A storage shared under file_descriptor, torch's default: the sender passes a descriptor over a socket.

    The sender requires multiprocessing's authentication key, which only its own children and forks have.
    """

    address: str
    key: int
    num_bytes: int

    @property
    def memory(self) -> tuple[object, object]:
        """The shared memory that this names."""
        return self.key, self.address

    def problem(self) -> str | None:
        if not isinstance(self.address, str) or not is_count(self.key):
            return f"descriptor {shown(self.key)} at {shown(self.address)}"
        if not is_count(self.num_bytes):
            return f"storage size {shown(self.num_bytes)}"
        return _socket_problem(self.address.encode("utf-8", "replace"))

    def attach(self, timeout_s: float) -> torch.UntypedStorage:
        descriptor = self._fetch(timeout_s)
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_size < self.num_bytes:
            os.close(descriptor)
            raise ValueError(f"the descriptor from {self.address} is not a file of {self.num_bytes} bytes")
        return reductions.rebuild_storage_fd(torch.UntypedStorage, _Fetched(descriptor), self.num_bytes)

    def _fetch(self, timeout_s: float) -> int:
        # multiprocessing.connection.Client without its unbounded waits: each read ends by the socket's own time limit.
        with socket.socket(socket.AF_UNIX) as raw:
            raw.settimeout(timeout_s)
            try:
                raw.connect(self.address)
                raw.setblocking(True)
                limit = struct.pack("@ll", int(timeout_s), int(timeout_s % 1 * 1e6) or 1)
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
                with connection.Connection(os.dup(raw.fileno())) as peer:
                    secret = process.current_process().authkey
                    connection.answer_challenge(peer, secret)
                    connection.deliver_challenge(peer, secret)
                    peer.send((self.key, os.getpid()))
                    return reduction.recv_handle(peer)
            except (OSError, EOFError, AuthenticationError) as error:
                advice = 'let the sender call torch.multiprocessing.set_sharing_strategy("file_system")'
                reason = str(error) or type(error).__name__
                raise TransferFailed(
                    f"no descriptor from {self.address} within {timeout_s} s: {reason}; {advice}"
                ) from error


@dataclass(frozen=True)
class _Fetched:
    """A received descriptor, as `rebuild_storage_fd` takes it: it detaches the descriptor, and closes it after
    mapping."""

    descriptor: int

    def detach(self) -> int:
        return self.descriptor


def _check_manager(path: bytes, timeout_s: float) -> None:
    """Check that torch's own manager answers a socket: torch waits for its answer without a deadline, and all threads
    of this process with it. Raises TransferFailed."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(timeout_s)
        try:
            probe.connect(path)
        except OSError as error:
            reason = str(error) or type(error).__name__
            raise TransferFailed(
                f"no manager of shared memory at {shown(path)} within {timeout_s} s: {reason}"
            ) from error
        credentials = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, _user, _group = _CREDENTIALS.unpack(credentials)
    try:
        program = os.readlink(f"/proc/{pid}/exe").removesuffix(" (deleted)")
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:  # a process of another namespace
        return
    if os.path.basename(program) != _MANAGER or state in "Tt":
        what = "stands still" if os.path.basename(program) == _MANAGER else f"is {program}"
        raise TransferFailed(f"{shown(path)} is no {_MANAGER} that answers: process {pid} {what}")


def _socket_problem(path: bytes) -> str | None:
    try:
        found = os.lstat(path)
    except (OSError, ValueError) as error:  # ValueError: a null byte
        return f"socket {shown(path)}: {error}"
    if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.getuid():
        return f"{shown(path)} is not a socket of this user"
    return None
