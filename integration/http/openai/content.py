"""The texts in a chat: contents of messages, and a predicted answer."""

from __future__ import annotations

from typing import Any

from ..edge.errors import BadField


def read_message(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message with one text as content. Raises BadField for content that is no text."""
    if not isinstance(message.get("role"), str):
        raise BadField("messages", "each needs a role")
    return {**message, "content": _text(message["content"], "messages")} if "content" in message else message


def read_prediction(prediction: dict[str, Any] | None) -> str | None:
    """Return the text of a prediction. Raises BadField."""
    if prediction is None:
        return None
    if prediction.get("type") != "content" or prediction.get("content") is None:
        raise BadField("prediction", 'needs the type "content", and content')
    return _text(prediction["content"], "prediction")


def _text(content: Any, field: str) -> str | None:
    """Return content, a text or parts that are texts, as one text. Raises BadField."""
    if content is None or isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    kinds = [part.get("type") if isinstance(part, dict) else type(part).__name__ for part in parts]
    if other := sorted({str(kind) for kind in kinds if kind != "text"}):
        raise BadField(field, f"content of the type {', '.join(other)}: only the type text is supported")
    texts = [text for part in parts if isinstance(text := part.get("text"), str)]
    if len(texts) < len(parts):
        raise BadField(field, "content of the type text without a text")
    return "".join(texts)
