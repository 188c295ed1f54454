"""Ports of this machine for what listens later: benchmarks, and tests that name a port before its owner begins."""

from __future__ import annotations

import random
import socket
from pathlib import Path

HOST = "127.0.0.1"
_GIVEN_OUT = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST = 10_000  # services that people run have lower ones
_pick = random.SystemRandom()  # forks share the state of any other generator, and would draw the same ports


def free_ports(count: int) -> list[int]:
    """Find different ports of `HOST` that are free now and that no other socket gets by chance: they are outside the
    range from which the system takes a port where none is named, as for every connection and every gloo listener."""
    first, last = map(int, _GIVEN_OUT.read_text().split()) if _GIVEN_OUT.exists() else (32_768, 60_999)
    candidates = [port for port in range(_LOWEST, 65_536) if not first <= port <= last]
    start, found = _pick.randrange(len(candidates)), list[int]()
    for port in candidates[start:] + candidates[:start]:
        if len(found) == count:
            return found
        try:
            socket.create_server((HOST, port)).close()
        except OSError:  # in use
            continue
        found.append(port)
    raise OSError(f"{HOST} has not {count} free ports outside {first} to {last}, which the system gives out itself")
