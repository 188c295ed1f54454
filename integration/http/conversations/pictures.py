"""The pictures in the messages of sessions: parts that name each by its digest, so that messages can be compared."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..images.pictures import SentPicture

Messages = list[dict[str, Any]]
_DIGEST = "sha256"


def num_pictures(messages: Iterable[Mapping[str, Any]]) -> int:
    """Count the parts of messages that are images."""
    return sum(part.get("type") == "image" for message in messages for part in _parts(message))


def with_digests(messages: Sequence[Mapping[str, Any]], pictures: Sequence[SentPicture]) -> Messages:
    """Return messages whose parts that are images have the SHA-256 of their pictures, given in order."""
    left = iter(pictures)

    def named(part: Mapping[str, Any]) -> dict[str, Any]:
        if part.get("type") != "image":
            return dict(part)
        return {**part, _DIGEST: hashlib.sha256(next(left).data.encode("utf-8", "surrogatepass")).hexdigest()}

    return [{**message, "content": list(map(named, parts))} if (parts := _parts(message)) else dict(message)
            for message in messages]  # fmt: skip


def without_digests(messages: Sequence[Mapping[str, Any]]) -> Messages:
    """Return messages as a chat template reads them."""

    def plain(part: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in part.items() if name != _DIGEST}

    return [{**message, "content": list(map(plain, parts))} if (parts := _parts(message)) else dict(message)
            for message in messages]  # fmt: skip


def _parts(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the parts of a message that was read; none where its content is a text."""
    content = message.get("content")
    return content if isinstance(content, list) else []
