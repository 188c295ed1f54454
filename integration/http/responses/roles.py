"""Messages of systems and developers where a chat template writes them otherwise than they stand in the input.

| the chat template | then |
|---|---|
| writes no message of a developer | a developer's message is a system's |
| writes a system's message only at the beginning | those at the beginning are one; later ones are a user's, |
| | and one with the user's beside them |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .places import MessagePlace, Places

BREAK = "\n\n"  # between texts that become one
Message = dict[str, Any]


@dataclass(frozen=True)
class Roles:
    """The roles that a chat template writes, each of which is asked for only where it matters."""

    takes_developer: Callable[[], bool]
    takes_system_within: Callable[[], bool]

    def fitted(self, messages: list[Message], places: Places, *, goes_on: bool) -> list[Message]:
        """Return the messages that the template writes. places: of these; are changed along. goes_on: they are not the
        beginning of the conversation."""
        if any(message["role"] == "developer" for message in messages) and not self.takes_developer():
            messages = [{**one, "role": "system"} if one["role"] == "developer" else one for one in messages]
        late = [one for one in messages if one["role"] == "system"] if goes_on else _late(messages)
        if not late or self.takes_system_within():
            return messages
        return _joined(messages, places, goes_on=goes_on)


def _late(messages: list[Message]) -> list[Message]:
    """List the messages of a system that are not the first message."""
    return [one for one in messages[1:] if one["role"] == "system"]


def _joined(messages: list[Message], places: Places, *, goes_on: bool) -> list[Message]:
    found: list[Message] = []
    kept: list[MessagePlace] = []
    is_beginning, was_late = not goes_on, False
    for message, place in zip(messages, places.messages, strict=True):
        is_system = message["role"] == "system"
        is_beginning = is_beginning and is_system
        is_late = is_system and not is_beginning
        own = {**message, "role": "user"} if is_late else message
        last = found[-1] if found else None
        joins = is_beginning or (own["role"] == "user" and (is_late or was_late))
        if last is not None and joins and last["role"] == own["role"] and _are_texts(last, own):
            found[-1] = {**last, "content": last["content"] + BREAK + own["content"]}
        else:
            found.append(own)
            kept.append(place)
        was_late = is_late
    places.messages[:] = kept
    return found


def _are_texts(*messages: Message) -> bool:
    return all(isinstance(message["content"], str) for message in messages)
