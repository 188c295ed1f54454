"""Protocols between the loop and the calls that wait for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..completion import Completion
from ..errors import BrokenLogits, EngineStopped
from ..sequences.request import Request


class Answers(Protocol):
    """The receiver of the steps' output. Each method is called under the engine's lock, returns at once and raises
    nothing."""

    def on_token(self, request: Request) -> None:
        """Take new tokens of a live request."""

    def wants_tokens(self, request: Request) -> bool:
        """Return whether the request's call is given each token as it comes."""
        ...

    def on_answer(self, request: Request, completion: Completion) -> None:
        """Take the completion of a request that has ended."""

    def keep_id(self, id: str) -> None:
        """Let no other request take the id, which its sequence gives up now, until `on_answer` or `free_id`."""

    def free_id(self, id: str) -> None:
        """Let others take a kept id, if it is kept still."""

    def on_broken(self, error: BrokenLogits, ids: Sequence[str]) -> Sequence[str]:
        """Take the error of a step for the calls that wait for these broken requests; return the ids of those that have
        such a call."""
        ...

    def on_failure(self, error: EngineStopped) -> None:
        """Take the error that ended the loop. It is the last call."""


class Interrupts(Protocol):
    """The source of interruptions between steps."""

    def is_interrupted(self, num_steps: int) -> bool:
        """Return whether a command waits for the current step; `num_steps`: committed since the engine was made."""
        ...

    def is_awaited(self, num_steps: int) -> bool:
        """Return whether anything waits for the current step: a command, a request, or a thread that wants the lock."""
        ...
