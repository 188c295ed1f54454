"""Descriptors of locked files that a forked child closes: else it would hold the locks after its parent's end."""

from __future__ import annotations

import os

_held: set[int] = set()


def hold(file: int) -> None:
    """Note a descriptor that is locked, or will be."""
    _held.add(file)


def close_held(file: int) -> None:
    """Close a descriptor, and with it its lock. Does nothing in a forked child, which has closed it."""
    if file in _held:
        _held.remove(file)
        os.close(file)


def _close_in_child() -> None:
    for file in _held:
        os.close(file)
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)
