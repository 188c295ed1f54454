"""The interface of a group: its store and the connections of gloo listen at one address of this machine only."""

from __future__ import annotations

import os
import socket
import struct
import threading
from datetime import timedelta

import torch.distributed as dist

from ..deadline import Deadline

_BACKLOG = 4096  # as torch's own stores have
_CONNECT_S = 1.0  # for one attempt to reach the host
_PAUSE_S = 0.05  # between two of them


def listen_at(address: str, port: int) -> socket.socket:
    """Open a TCP port at this address only, for the store of a group. Port 0: any free one. Raises OSError, naming the
    address, where that is not possible."""
    failure = OSError(f"no address is known for {address!r}")
    for family, _, _, _, place in socket.getaddrinfo(address, port, type=socket.SOCK_STREAM):
        try:
            return socket.create_server((str(place[0]), port), family=family, backlog=_BACKLOG)
        except OSError as error:
            failure = error
    raise OSError(
        failure.errno, f"cannot listen at {address}:{port} ({failure}): it must be an address of this machine"
    )


def host_store(listener: socket.socket, address: str, world_size: int | None, timeout: timedelta) -> dist.TCPStore:
    """Serve a store on an open port, which belongs to the store from now on. torch itself would listen at every
    address of the machine."""
    port = listener.getsockname()[1]
    return dist.TCPStore(
        address, port, world_size, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def reach_store(
    address: tuple[str, int], world_size: int, deadline: Deadline, cancelled: threading.Event
) -> tuple[dist.TCPStore, str]:
    """Connect to the store of another process, when it is there. Returns it, and this machine's own address on the way
    to it. Raises ConnectionError at the deadline, and when `cancelled` is set."""
    host, port = address
    failure = "not tried"
    while not cancelled.is_set() and not deadline.has_passed:
        soon = deadline.at_most(_CONNECT_S)
        try:
            # A plain socket first: a TCPStore would keep trying and ignore `cancelled`. When it is connected, the
            # TCPStore counts this rank in at a host that waits for all of them (wait_for_workers, which only hosts
            # wait for).
            with socket.create_connection(address, timeout=max(0.05, soon.left_s)) as connection:
                if connection.getsockname() == connection.getpeername():
                    # The system gave this socket the very port that it looks for, and TCP connects it to itself.
                    # Reset, for after a plain close the host could not listen there for a minute.
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    raise ConnectionRefusedError(f"nobody listens at {host}:{port}")
                own_address = connection.getsockname()[0]
            return dist.TCPStore(host, port, world_size, False, timeout=soon.left), own_address
        except (OSError, RuntimeError) as error:
            failure = str(error)
            cancelled.wait(min(_PAUSE_S, deadline.left_s))
    raise ConnectionError(f"rank 0 cannot be reached: {failure}")


def gloo_group(store: dist.Store, rank: int, world_size: int, host: str, timeout: timedelta) -> dist.ProcessGroupGloo:
    """Make a gloo group whose connections listen at `host`, an address of this machine.

    GLOO_SOCKET_IFNAME, where it is set, names other interfaces.
    """
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return dist.ProcessGroupGloo(store, rank, world_size, timeout)
    # torch has no public way to choose the interface of one group; its own tests make the options so too.
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # the stubs omit it
    options._devices, options._timeout = [dist.ProcessGroupGloo.create_device(hostname=host)], timeout
    return dist.ProcessGroupGloo(store, rank, world_size, options)
