"""Request bodies: JSON objects with lenient reading where that is safe, and errors that name the wrong field.

Unknown top-level keys are ignored, null means the default, numbers may be sent as text. Refused are values that JSON
does not have (NaN, Infinity), values that cannot be represented (1e999, too deep nesting, lone surrogates), and bodies
longer than the limit.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Awaitable, Callable
from typing import Annotated, TypeVar

from fastapi import Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from .errors import BadField, HttpError

MAX_TIMEOUT_S = 7 * 86400.0
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")

Timeout = Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, le=2**31 - 1)]
B = TypeVar("B", bound="Body")


class Body(BaseModel):
    """Fields of a request. The defaults of a subclass are part of the API."""

    model_config = ConfigDict(extra="ignore", coerce_numbers_to_str=True, protected_namespaces=())


class AdminBody(Body):
    """Fields that every administrative call accepts."""

    op_id: Annotated[str, Field(min_length=1, max_length=256)] | None = Field(
        default=None, description="names the operation: a repeated call with it gets the answer of the first call"
    )
    timeout_s: Timeout | None = Field(
        default=None, description="seconds within which the call must begin, or it never runs"
    )
    stages: list[str] | None = Field(default=None, description="act only if the engine's stage is in this list")


async def read_bytes(request: Request, limit: int) -> bytes:
    """Read the body. Raises HttpError 413 for a body of more than `limit` bytes."""
    too_long = HttpError(413, f"the body is longer than {limit} bytes", code="too_large")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise too_long
    parts, num_bytes = [], 0
    async for part in request.stream():
        num_bytes += len(part)
        if num_bytes > limit:
            raise too_long
        parts.append(part)
    return b"".join(parts)


def parse_object(data: bytes) -> dict[str, object]:
    """Parse a JSON object; an empty body is an empty object. Raises HttpError 400 for any other value."""
    if not data.strip():
        return {}
    try:
        value = json.loads(data.decode("utf-8"), parse_constant=_refuse_constant, parse_float=_finite)
    except RecursionError:
        raise HttpError(400, "the body is nested too deeply") from None
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError are subclasses
        raise HttpError(400, f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise HttpError(400, f"the body must be a JSON object, not {_kind(value)}")
    if _SURROGATE.search(data):
        _refuse_surrogates(value)
    return value


async def read_object(request: Request, limit: int | None = None) -> dict[str, object]:
    """Read the request's JSON object. limit: bytes; None: the server's limit. Raises HttpError 400 or 413."""
    return parse_object(await read_bytes(request, limit or request.app.state.config.max_body_bytes))


def fields_of(model: type[B], values: dict[str, object]) -> B:
    """Build the body from its values. Raises BadField for the first wrong field."""
    given = {key: value for key, value in values.items() if value is not None}
    try:
        return model.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        raise BadField(".".join(map(str, first["loc"])), first["msg"]) from None


def body_of(model: type[B]) -> Callable[[Request], Awaitable[B]]:
    """Return a function that reads a request's body as `model`."""

    async def read(request: Request) -> B:
        return fields_of(model, await read_object(request))

    return read


def describe(model: type[Body]) -> dict[str, object]:
    """Return the `openapi_extra` of an operation with such a body."""
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    return {"requestBody": {"required": False, "content": {"application/json": {"schema": schema}}}}


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is no JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is larger than any number can be")
    return value


def _refuse_surrogates(value: object) -> None:
    todo: list[tuple[str, object]] = [("body", value)]
    while todo:
        where, item = todo.pop()
        if isinstance(item, str):
            try:
                item.encode()
            except UnicodeEncodeError:
                raise BadField(where, "has a lone surrogate, which is no character") from None
        elif isinstance(item, list):
            todo += [(where, entry) for entry in item]
        elif isinstance(item, dict):
            todo += [("a key", key) for key in item]
            todo += [(key if where == "body" else where, entry) for key, entry in item.items()]


def _kind(value: object) -> str:
    return {list: "a list", str: "a text", bool: "a truth value", type(None): "null"}.get(type(value), "a number")
