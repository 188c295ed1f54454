"""Messages of systems and developers where a chat template writes them otherwise than they were sent.

| the chat template | then |
|---|---|
| writes no message of a developer | a developer's message is a system's |
| writes a system's message only at the beginning | those at the beginning are one; later ones are a user's, |
| | and one with the user's beside them |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from ....rollout.engine import Engine
from .template import takes_developer, takes_system_within

BREAK = "\n\n"  # between texts that become one
Message = dict[str, Any]


@dataclass(frozen=True)
class Fitted:
    """Messages that a chat template writes."""

    messages: list[Message]
    sources: list[int]  # of each of them the number of the message, or of the first one, that it was


@dataclass(frozen=True)
class Roles:
    """The roles that a chat template writes, each of which is asked for only where it matters."""

    takes_developer: Callable[[], bool]
    takes_system_within: Callable[[], bool]

    @classmethod
    def of(cls, engine: Engine) -> Roles:
        """Make those of an engine's template."""
        return cls(partial(takes_developer, engine), partial(takes_system_within, engine))

    def fitted(self, messages: list[Message], *, goes_on: bool = False) -> Fitted:
        """Return the messages that the template writes. goes_on: they are not the beginning of the conversation."""
        if any(message["role"] == "developer" for message in messages) and not self.takes_developer():
            messages = [{**one, "role": "system"} if one["role"] == "developer" else one for one in messages]
        late = messages if goes_on else messages[1:]
        if all(message["role"] != "system" for message in late) or self.takes_system_within():
            return Fitted(messages, list(range(len(messages))))
        return _joined(messages, goes_on=goes_on)


def _joined(messages: list[Message], *, goes_on: bool) -> Fitted:
    found = Fitted([], [])
    texts: list[list[str]] = []  # of each message that has one text, in pieces: they are joined once
    is_beginning, was_late = not goes_on, False
    for number, message in enumerate(messages):
        is_system = message["role"] == "system"
        is_beginning = is_beginning and is_system
        is_late = is_system and not is_beginning
        own = {**message, "role": "user"} if is_late else message
        last = found.messages[-1] if found.messages else None
        joins = is_beginning or (own["role"] == "user" and (is_late or was_late))
        if last is not None and joins and last["role"] == own["role"] and _are_texts(last, own):
            texts[-1].append(own["content"])
        else:
            found.messages.append(own)
            found.sources.append(number)
            texts.append([own["content"]] if _are_texts(own) else [])
        was_late = is_late
    for number, pieces in enumerate(texts):
        if len(pieces) > 1:
            found.messages[number] = {**found.messages[number], "content": BREAK.join(pieces)}
    return found


def _are_texts(*messages: Message) -> bool:
    return all(isinstance(message["content"], str) for message in messages)
