"""Protocols between the loop and the calls that wait for it."""

from __future__ import annotations

from typing import Protocol

from ..completion import Completion
from ..errors import EngineStopped
from ..sequences.request import Request


class Answers(Protocol):
    """Receives the output of steps. Every method returns at once, raises nothing, and is called under the engine's
    lock."""

    def on_token(self, request: Request) -> None:
        """Take new tokens of a live request."""

    def on_answer(self, request: Request, completion: Completion) -> None:
        """Take the completion of a request that has ended."""

    def on_failure(self, error: EngineStopped) -> None:
        """Take the error that ended the loop: nothing more comes."""


class Interrupts(Protocol):
    """Says what comes before the next step."""

    def is_interrupted(self, num_steps: int) -> bool:
        """Whether a command waits for the step under way; `num_steps` have landed since the engine was made."""
        ...
