"""Errors in one line, for messages that name other errors."""

from __future__ import annotations


def in_one_line(error: BaseException) -> str:
    """Name the error's class, and what it says where it says something."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
