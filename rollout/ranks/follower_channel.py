"""A follower's side of the channel: it receives the controller's messages and answers them."""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Mapping
from typing import Any, NoReturn

from .channel import RankChannel
from .mesh import Mesh
from .remote_verbs import VERB_TIMEOUT_S, question_from, result_bytes
from .watch import Cause
from .wire import Kind, Message

logger = logging.getLogger(__name__)

_TELL_EVERY = 32  # messages that are read between two reports to the controller


class FollowerChannel(RankChannel):
    """A follower's side."""

    def __init__(self, mesh: Mesh, timeout_s: float) -> None:
        self._inbox: deque[Message] = deque()
        self._have_all_left: bool | None = None  # None: the controller has not said so yet
        super().__init__(mesh, timeout_s)

    def gather_json(self, value: Any, timeout_s: float | None = None) -> list[Any]:
        """Gather a value from every rank (see `RankChannel.gather_json`)."""
        self._num_collectives += 1
        number, timeout_s = self._num_collectives, timeout_s or self.timeout_s
        with self.watch.phase("waiting for ranks"):
            self.send(Kind.SAYS, number, json.dumps(value).encode())
            return self._await_answers(number, timeout_s).json()

    def run_everywhere(self, verb: str, arguments: Mapping[str, Any], timeout_s: float = VERB_TIMEOUT_S) -> NoReturn:
        """Raise ValueError: only the controller may run verbs."""
        raise self._refusal(verb)

    def answer_verb(self, message: Message) -> None:
        """Run the verb of this message here and send its result. Raises RankFailure."""
        verb, arguments = question_from(message.payload)
        self.send(Kind.REPLY, message.id, result_bytes(self._run_verb(verb, arguments)))

    def say_how_it_stands(self, facts: Mapping[str, Any]) -> None:
        """Send this rank's status to the controller. It arrives before any message sent later. Does nothing once the
        channel is closed or the replica lost."""
        if not (self._is_closed or self.watch.failure is not None):
            self.send(Kind.STANDS, 0, json.dumps(facts).encode())

    @property
    def is_over(self) -> bool:
        """Whether the controller has closed the engine. Its process may end from then on."""
        return self.watch.is_over

    def next_message(self) -> Message:
        """Wait for the controller's next message, however long that takes. Raises RankFailure."""
        with self._changed:
            self._wait(lambda: bool(self._inbox), None)
            message = self._take(0)
        if self._wire.num_untold(0) >= _TELL_EVERY:
            self.send(Kind.READ)
        return message

    def await_close(self) -> None:
        """Wait until the controller closes the engine, or for the timeout. Drops other messages."""
        with self._changed:
            if not self._wait(lambda: self.is_over, self.timeout_s):
                logger.warning("the controller did not close the engine in %g s", self.timeout_s)

    def _await_answers(self, number: int, timeout_s: float) -> Message:
        def place() -> int | None:
            found = (i for i, m in enumerate(self._inbox) if m.kind is Kind.ANSWERS and m.id == number)
            return next(found, None)

        with self._changed:
            # A moment longer than the controller waits: it knows which rank is missing.
            if self._wait(lambda: place() is not None, timeout_s + self.timeout_s / 4):
                return self._take(place() or 0)
        raise self.explain([0], f"brought no vote of the ranks to its end in {timeout_s:g} s")

    def _take(self, place: int) -> Message:
        message = self._inbox[place]
        del self._inbox[place]
        self._wire.has_read(0, message)
        return message

    def _before_send(self, rank: int) -> None:
        """Return at once: the controller receives every message without delay."""

    def _take_in(self, rank: int, message: Message) -> None:
        if message.kind is Kind.END:
            self._have_all_left = bool(message.id)
            return
        self._inbox.append(message)
        if message.kind is Kind.CLOSE:
            self.watch.is_over = True

    def _on_gone(self, rank: int, error: RuntimeError) -> None:
        if not self.is_over:
            super()._on_gone(rank, error)
            return
        with self._changed:
            self._have_all_left = False
            self._changed.notify_all()

    def _tell_of_loss(self, cause: Cause) -> None:
        """Do nothing: the controller reports the loss."""

    def _say_goodbye(self) -> bool:
        try:
            self._wire.send(0, Kind.BYE, 0, b"")
        except RuntimeError as error:  # gloo's: the controller waits for it no longer
            logger.debug("the controller has ended: %s", error)
            return False
        with self._changed:
            if self.is_over:
                self._wait(lambda: self._have_all_left is not None, self.timeout_s)
            return self._have_all_left is True
