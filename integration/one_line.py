"""Errors in one line, for messages that name other errors."""

from __future__ import annotations


def in_one_line(error: BaseException) -> str:
    """Return the name of the error's class, and its message if it has one."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def in_the_last_line(error: BaseException, *, has_class: bool = False) -> str:
    """Return the message of an error that ends a command, and what its notes say of its place. has_class: the name of
    its class stands before it."""
    message = in_one_line(error) if has_class else str(error)
    return "; ".join(" ".join(text.split()) for text in (message, *getattr(error, "__notes__", ())))
