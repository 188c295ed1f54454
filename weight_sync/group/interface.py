"""The interface of a group: its store and the connections of gloo listen at one address of this machine only."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import torch.distributed as dist

_BACKLOG = 4096  # as torch's own stores have


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
