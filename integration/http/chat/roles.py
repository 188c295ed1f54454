"""Messages of systems and developers where a chat template writes them otherwise than they were sent.

The template is asked for the roles of a conversation. If it leaves a message out, or moves it elsewhere, the next row
holds. What messages are does not depend on later ones, so that a conversation that goes on begins as it began.

| row | those at the beginning | later ones, by their role |
|---|---|---|
| 1 | are as they were sent | are as they were sent |
| 2 | are all of systems | are of systems |
| 3 | and one message | are a user's, and one with the user's beside them |
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

BREAK = "\n\n"  # between texts that become one
_ROLES = frozenset({"system", "developer"})
Message = dict[str, Any]


@dataclass(frozen=True)
class Fitted:
    """Messages that a chat template writes."""

    messages: list[Message]
    sources: list[int]  # of each of them the number of the message, or of the first one, that it was


@dataclass(frozen=True)
class Roles:
    """The roles that a chat template writes."""

    writes: Callable[[Sequence[str], Collection[str]], bool]  # at the beginning, and later: see `writes_roles`

    def fitted(self, messages: list[Message], *, goes_on: bool = False) -> Fitted:
        """Return the messages that the template writes. goes_on: they are not the beginning of the conversation."""
        roles = [message["role"] for message in messages]
        first = [] if goes_on else list(takewhile(_ROLES.__contains__, roles))
        late = _ROLES.intersection(roles[len(first) :])
        if not late and first in ([], ["system"]):
            return Fitted(messages, list(range(len(messages))))
        asked = [role for at, role in enumerate(first) if first[max(at - 2, 0) : at] != [role, role]]
        joins, own = False, dict[str, str]()  # the roles that messages at the beginning get
        if first not in ([], ["system"]) and not self.writes(asked, ()):
            own, asked = dict.fromkeys(_ROLES, "system"), ["system"] * len(asked)
            joins = len(first) > 1 and not self.writes(asked, ())
            asked = asked[:1] if joins else asked
        later = {role: self._later(role, asked) for role in late}
        told = [{**one, "role": (own if at < len(first) else later).get(one["role"], one["role"])}
                for at, one in enumerate(messages)]  # fmt: skip
        moved = [role in _ROLES and one["role"] == "user" for role, one in zip(roles, told, strict=True)]
        return _joined(told, moved, len(first) if joins else 0)

    def _later(self, role: str, first: Sequence[str]) -> str:
        """Return the role of later messages of a system or a developer, behind these at the beginning."""
        for own in dict.fromkeys((role, "system")):
            if self.writes(first, (own,)):
                return own
        return "user"


def _joined(messages: list[Message], moved: list[bool], num_first: int) -> Fitted:
    """Return the messages with the first ones as one, and with each that was moved as one with the user's beside it."""
    found = Fitted([], [])
    texts: list[list[str]] = []  # of each message that has one text, in pieces: they are joined once
    for number, own in enumerate(messages):
        last = found.messages[-1] if found.messages else None
        joins = number < num_first or (own["role"] == "user" and any(moved[max(number - 1, 0) : number + 1]))
        if last is not None and joins and last["role"] == own["role"] and _are_texts(last, own):
            texts[-1].append(own["content"])
        else:
            found.messages.append(own)
            found.sources.append(number)
            texts.append([own["content"]] if _are_texts(own) else [])
    for number, pieces in enumerate(texts):
        if len(pieces) > 1:
            found.messages[number] = {**found.messages[number], "content": BREAK.join(pieces)}
    return found


def _are_texts(*messages: Message) -> bool:
    return all(isinstance(message.get("content"), str) for message in messages)
