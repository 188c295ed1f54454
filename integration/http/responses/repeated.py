"""The fields of a request that its answer repeats. They have limits of their own, because each event with the whole
response has them, and the chat reads most of them not at all or in another form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..edge.errors import BadField
from ..generation.limits import RequestLimits
from ..generation.sse import dumps
from .fields import ResponsesBody

_TEXTS = ("prompt_cache_key", "safety_identifier", "user")
_MAX_TEXT = 1024  # characters of each of these, as of other names, and of reasoning.effort
_MAX_PAIRS, _MAX_KEY, _MAX_VALUE = 16, 64, 512  # of metadata: number, and characters, as OpenAI's


def repeated_fields(values: Mapping[str, object], body: ResponsesBody, limits: RequestLimits) -> dict[str, Any]:
    """Return the fields of the answer that are the request's, or that no request can change. Raises BadField for those
    that are too long."""
    texts = {name: value for name in _TEXTS if isinstance(value := values.get(name), str)}
    effort = None if body.reasoning is None else body.reasoning.effort
    given_format = None if body.text is None else body.text.format
    for name, text in (texts | {"reasoning.effort": effort or ""}).items():
        _check_length(text, _MAX_TEXT, name)
    _check_metadata(body.metadata or {})
    for name, value in (("tools", body.tools), ("tool_choice", body.tool_choice), ("text.format", given_format)):
        limits.repeated(value, name)
    return {
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": effort, "summary": None},
        "service_tier": "default",
        "store": False,
        "temperature": body.temperature,
        "text": {"format": given_format or {"type": "text"}},
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "tools": body.tools or [],
        "top_logprobs": body.top_logprobs,
        "top_p": body.top_p,
        "truncation": "disabled",
        **texts,
    }


def num_chars(repeated: Mapping[str, Any]) -> int:
    """Count the characters of the JSON of fields that were checked."""
    return len(dumps(repeated))


def _check_metadata(metadata: Mapping[str, str]) -> None:
    if len(metadata) > _MAX_PAIRS:
        raise BadField("metadata", f"has {len(metadata)} pairs, more than {_MAX_PAIRS}")
    for key, value in metadata.items():
        _check_length(key, _MAX_KEY, "metadata", "a key has")
        _check_length(value, _MAX_VALUE, f"metadata.{key}")


def _check_length(text: str, limit: int, place: str, what: str = "has") -> None:
    if len(text) > limit:
        raise BadField(place, f"{what} {len(text)} characters, more than {limit}")
