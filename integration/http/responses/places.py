"""The places of a request's values. Its errors name them as the client sent them, not as the chat has them."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..edge.errors import HttpError

_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
}
_IN_TEXTS = ("response_format",)  # names that messages about other fields hold


@dataclass(frozen=True)
class MessagePlace:
    """The place of one message of the chat."""

    item: str  # input.3; of an assistant's message the first of its items
    content: str = ""
    calls: list[str] = field(default_factory=list)  # the items of its calls


class Places:
    """The places of one request, which its reading fills."""

    def __init__(self) -> None:
        """Begin without messages."""
        self.is_translated = False  # errors name fields of the chat from then on
        self.messages: list[MessagePlace] = []
        self.names = dict(_NAMES)  # of fields, by those of the chat

    def of(self, param: str) -> str:
        """Return the place of a field of the chat."""
        head, *rest = param.split(".")
        if head == "messages" and rest and rest[0].isdigit() and int(rest[0]) < len(self.messages):
            return _inside(self.messages[int(rest[0])], rest[1:])
        return self.names.get(param) or ".".join([self.names.get(head, head), *rest])

    def renamed(self, error: HttpError) -> HttpError:
        """Return the error with the place that the client knows."""
        if error.param is None or not self.is_translated:
            return error
        place, message = self.of(error.param), error.message
        if message.startswith(f"{error.param}:"):
            message = place + message[len(error.param) :]
        for name in _IN_TEXTS:
            message = message.replace(name, self.names.get(name, name))
        return HttpError(
            error.status, message, param=place, code=error.code, headers=error.headers, extra=error.extra,
            kind=error.kind,
        )  # fmt: skip


def _inside(place: MessagePlace, rest: list[str]) -> str:
    """Return the place of a part of a message."""
    match rest:
        case ["tool_calls", number, *inner] if number.isdigit() and int(number) < len(place.calls):
            return place.calls[int(number)] + (".arguments" if inner[-1:] == ["arguments"] else "")
        case ["content", *inner]:
            inner = inner[:-1] if inner[-1:] == ["url"] else inner  # an image's address has no object around it
            return ".".join([place.content or place.item, *inner])
        case ["tool_call_id"]:
            return f"{place.item}.call_id"
        case ["role"]:
            return f"{place.item}.role"
    return place.item
