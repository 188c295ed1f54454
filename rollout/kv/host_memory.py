"""The memory of the host that a pool of automatic size may take a share of."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class _Names(NamedTuple):
    """The files of a control group's memory."""

    limit: str
    used: str
    reclaimable: str  # the line of memory.stat with the bytes of files that the kernel drops first


_VERSION_1 = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2 = _Names("memory.max", "memory.current", "inactive_file")


def available_host_bytes(root: Path = Path("/")) -> int:
    """Return the bytes that this process can still take without swapping, within the limits of its control groups.

    Cached files count as available: the kernel drops them for a process that needs their memory. root: of the file
    system that has /proc and /sys.
    """
    available = _line(root / "proc/meminfo", "MemAvailable:")
    if available is None:  # not Linux
        pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
        available = os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")
    else:
        available *= 1024
    left = (_left(folder, names) for folder, names in _groups(root))
    return max(min([available, *(num for num in left if num is not None)]), 0)


def _groups(root: Path) -> Iterator[tuple[Path, _Names]]:
    """Yield the folders of the control groups that limit this process: its own and those above it."""
    mounted = root / "sys/fs/cgroup"
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            places, names = [mounted / "memory"], _VERSION_1
        elif not controllers:
            places, names = [mounted, mounted / "unified"], _VERSION_2
        else:
            continue
        # In a container the path may be the host's, and the mounted folder the container's own: then only that exists.
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for place in places:
            for num_parts in range(len(parts) + 1):
                yield place.joinpath(*parts[:num_parts]), names


def _left(folder: Path, names: _Names) -> int | None:
    """Return the bytes that a control group may still take; None where it has no limit, or is none."""
    limit, used = _number(folder / names.limit), _number(folder / names.used)
    if limit is None or used is None:
        return None
    return limit - used + (_line(folder / "memory.stat", names.reclaimable) or 0)


def _number(path: Path) -> int | None:
    text = (_read(path) or "").strip()
    return int(text) if text.isdecimal() else None  # "max": no limit


def _line(path: Path, name: str) -> int | None:
    """Return the number in the line that begins with this word; None without it."""
    for line in (_read(path) or "").splitlines():
        words = line.split()
        if len(words) > 1 and words[0] == name and words[1].isdecimal():
            return int(words[1])
    return None


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None
