"""Request bodies: JSON objects with lenient reading where that is safe, and errors that name the wrong field.

Unknown top-level keys are ignored, null means the default, numbers may be sent as text. Refused are values that JSON
does not have (NaN, Infinity), values that cannot be represented (1e999, too deep nesting, lone surrogates), and bodies
longer than the limit.

Bodies that may take long to parse or to check are parsed and checked on a thread, long ones in slices: the event loop
and the other threads of the process run meanwhile.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

from fastapi import Request
from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, ValidationError
from pydantic_core import CoreSchema
from starlette.requests import ClientDisconnect

from ....rollout.errors import Overloaded
from ....rollout.giving_way import give_way
from ....rollout.sampling_params import MOST_TEMPERATURE
from .config import HttpConfig
from .disconnect import unless_gone
from .errors import BadField, HttpError
from .field_kinds import entries_of, numbers_of, several_kinds_of
from .json_slices import TooManyLists, parse_in_slices
from .nesting import MAX_NESTING, TooDeep, check_nesting
from .surrogates import may_have_surrogates, refuse_surrogates
from .threads import run_giving_way, start_pool

MAX_TIMEOUT_S = 7 * 86400.0
QUICK_BYTES = 1 << 12  # a body up to this length, with few lists and objects, is parsed and checked on the event loop
_QUICK_LISTS = 32
_WHOLE_BYTES = 1 << 16  # a body up to this length is not parsed in slices
_LONG_BYTES = 1 << 20  # longer bodies wait for each other, and shorter ones not for them
_ENTRIES_A_SLICE = 1 << 12

Timeout = Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S, allow_inf_nan=False)]
Divisor = Annotated[float, Field(gt=0, le=MOST_TEMPERATURE, allow_inf_nan=False)]  # of logits
Count = Annotated[int, Field(ge=0, le=2**31 - 1)]
ReceiptKind = bool | Literal["digests"]  # of a receipt that is asked for
B = TypeVar("B", bound="Body")
T = TypeVar("T")


class _Parsers:
    """The threads that parse bodies: one for medium and one for long ones, because bodies that are parsed at the same
    time would only share the interpreter's lock."""

    def __init__(self) -> None:
        self.make()
        os.register_at_fork(after_in_child=self.make)  # a forked process has no thread of its parent

    def make(self) -> None:
        self._medium: ThreadPoolExecutor | None = None
        self._long: ThreadPoolExecutor | None = None

    @property
    def medium(self) -> ThreadPoolExecutor:
        """The thread for bodies up to a length of `_LONG_BYTES`; starts with its first use."""
        if self._medium is None:
            self._medium = start_pool(1, "lockstep-bodies")
        return self._medium

    @property
    def long(self) -> ThreadPoolExecutor:
        """The thread for longer bodies; starts with its first use."""
        if self._long is None:
            self._long = start_pool(1, "lockstep-long-bodies")
        return self._long


_PARSERS = _Parsers()


def start_parsers() -> tuple[ThreadPoolExecutor, ThreadPoolExecutor]:
    """Start the threads that parse bodies, so that no request has to. Idempotent."""
    return _PARSERS.medium, _PARSERS.long


def _end_lists_at_first_error(schema: Any) -> None:
    """Set `fail_fast` in each list of a core schema."""
    if isinstance(schema, dict):
        if schema.get("type") == "list":
            schema["fail_fast"] = True
        schema = list(schema.values())
    if isinstance(schema, list | tuple):
        for part in schema:
            _end_lists_at_first_error(part)


class Body(BaseModel):
    """Fields of a request. The defaults of a subclass are part of the API."""

    model_config = ConfigDict(extra="ignore", coerce_numbers_to_str=True, protected_namespaces=())

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Let lists end at their first wrong entry: an error for each of millions takes gigabytes, and seconds in which
        no other thread runs."""
        schema = handler(source)
        _end_lists_at_first_error(schema)
        return schema


class AdminBody(Body):
    """Fields that every administrative call accepts."""

    op_id: Annotated[str, Field(min_length=1, max_length=256)] | None = Field(
        default=None, description="names the operation: a repeated call with it gets the answer of the first call"
    )
    timeout_s: Timeout | None = Field(
        default=None, description="seconds within which the call must begin, or it never runs"
    )
    stages: list[str] | None = Field(default=None, description="act only if the engine's stage is in this list")


class OpenBodies:
    """The number of bytes in all bodies that arrive or are parsed at the moment. Used by one event loop."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def add(self, num_bytes: int, limit: int) -> None:
        """Count further bytes. Raises Overloaded where that would be more than the limit."""
        if self.num_bytes + num_bytes > limit:
            raise Overloaded(f"the open bodies together are longer than {limit} bytes (max_open_body_bytes)")
        self.num_bytes += num_bytes


@asynccontextmanager
async def arrived(request: Request, limit: int) -> AsyncIterator[bytes]:
    """Read the body, and count it among the open ones until the block ends. Raises HttpError 415 for a compressed body,
    413 for one of more than `limit` bytes, 408 for one that does not arrive within `body_timeout_s`, and Overloaded
    where all open bodies together are longer than `max_open_body_bytes`."""
    state = request.app.state
    config: HttpConfig = state.config
    if not hasattr(state, "open_bodies"):
        state.open_bodies = OpenBodies()
    open_bodies: OpenBodies = state.open_bodies
    refuse_compressed(request)
    too_long = HttpError(413, f"the body is longer than {limit} bytes", code="too_large")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise too_long
    parts, num_bytes = [], 0
    try:
        try:
            async with asyncio.timeout(config.body_timeout_s):
                async for part in request.stream():
                    if num_bytes + len(part) > limit:
                        raise too_long
                    open_bodies.add(len(part), max(config.max_open_body_bytes, limit))
                    num_bytes += len(part)
                    parts.append(part)
        except TimeoutError:
            raise late_body(config.body_timeout_s) from None
        except ClientDisconnect:
            raise HttpError(400, "the client left before its body had arrived") from None
        data = b"".join(parts)
        parts.clear()
        yield data
    finally:
        open_bodies.num_bytes -= num_bytes


def refuse_compressed(request: Request) -> None:
    """Raise HttpError 415 for a body that is not sent as it is."""
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", ""):
        raise HttpError(415, f"Content-Encoding: {encoding!r:.100} is not supported: send the body as it is")


def late_body(timeout_s: float) -> HttpError:
    """Make the error of a body that did not arrive in time."""
    message = f"the body did not arrive within {timeout_s:g} s (body_timeout_s)"
    return HttpError(408, message, code="body_timeout", headers={"Connection": "close"})


async def read_bytes(request: Request, limit: int) -> bytes:
    """Read the body. Raises as `arrived`."""
    async with arrived(request, limit) as data:
        return data


def parse_object(data: bytes, max_lists: int | None = None) -> dict[str, object]:
    """Parse a JSON object; an empty body is an empty object. Raises HttpError 400 for any other value, 413 for more
    lists and objects than `max_lists` in a long body."""
    if not data.strip():
        return {}
    try:
        text = data.decode("utf-8")
        if len(data) <= _WHOLE_BYTES:
            value = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
            check_nesting(value, text)
        else:
            value = parse_in_slices(
                text, max_lists or len(data), parse_constant=_refuse_constant, parse_float=_finite,
                max_nesting=MAX_NESTING,
            )  # fmt: skip
    except (RecursionError, TooDeep):
        raise HttpError(400, f"the body is {TooDeep()}") from None
    except TooManyLists:
        message = f"the body has more than {max_lists} lists and objects (max_body_lists)"
        raise HttpError(413, message, code="too_large") from None
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError are subclasses
        raise HttpError(400, f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise HttpError(400, f"the body must be a JSON object, not {_kind(value)}")
    if may_have_surrogates(data):
        try:
            refuse_surrogates(value)
        except BadField:
            let_go(value)
            raise
    return value


def is_quick(data: bytes) -> bool:
    """Return whether a body takes so little time to parse and to check that the event loop can do it."""
    return len(data) <= QUICK_BYTES and data.count(b"[") + data.count(b"{") <= _QUICK_LISTS


def _no(values: Mapping[str, object]) -> bool:
    return False


async def parsed(
    data: bytes,
    max_lists: int,
    then: Callable[[dict[str, object]], T],
    is_slow: Callable[[Mapping[str, object]], bool] = _no,
) -> T:
    """Return `then` of the object in a body, on a thread unless the body is quick to check and not `is_slow`. Raises as
    `parse_object`."""
    loop = asyncio.get_running_loop()
    if is_quick(data):
        values = parse_object(data)
        if not is_slow(values):
            return then(values)
        return await loop.run_in_executor(_PARSERS.medium, run_giving_way, loop, lambda: then(values))
    thread = _PARSERS.medium if len(data) <= _LONG_BYTES else _PARSERS.long
    return await loop.run_in_executor(thread, run_giving_way, loop, partial(_parse_and, data, max_lists, then))


async def off_loop(call: Callable[[], T]) -> T:
    """Return or raise the result of a long computation, on the thread for long bodies. Other requests go on wherever it
    gives way."""
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_PARSERS.long, run_giving_way, loop, call)


async def parse_object_off_loop(data: bytes, max_lists: int) -> dict[str, object]:
    """Parse a JSON object as `parse_object`, a long one on a thread, so that other requests go on meanwhile."""
    return await parsed(data, max_lists, lambda values: values)


async def read_as(
    request: Request,
    then: Callable[[dict[str, object]], T],
    limit: int | None = None,
    *,
    is_slow: Callable[[Mapping[str, object]], bool] = _no,
    ends_with_client: bool = False,
) -> T:
    """Return `then` of the request's JSON object. limit: bytes; None: `max_body_bytes`. is_slow: see `parsed`.
    ends_with_client: a body that waits for a thread is not read any more when its client has left. Raises HttpError
    400, 408 or 413, Overloaded, and the errors of `then`."""
    config: HttpConfig = request.app.state.config
    async with arrived(request, limit or config.max_body_bytes) as data:
        reading = parsed(data, config.max_body_lists, then, is_slow)
        if not ends_with_client or is_quick(data):
            return await reading
        try:
            return await unless_gone(request, reading)
        except ClientDisconnect:
            raise HttpError(400, "the client left before its body was read") from None


async def read_object(request: Request, limit: int | None = None) -> dict[str, object]:
    """Read the request's JSON object. limit and errors as in `read_as`."""
    return await read_as(request, lambda values: values, limit)


def fields_of(model: type[B], values: dict[str, object]) -> B:
    """Build the body from its values. Raises BadField for the first wrong field. A truth value is no number."""
    given = {key: value for key, value in values.items() if value is not None}
    for name, value in given.items():
        if name not in numbers_of(model):
            continue
        entries = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
        if bool in set(map(type, entries)):  # in one pass without a Python call, since a list may be long
            at, one = next((at, one) for at, one in entries_of(value) if isinstance(one, bool))
            raise BadField(f"{name}{at}", f"must be a number, not {'true' if one else 'false'}")
    try:
        return model.model_validate(given)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False, include_input=False)
        first, name = found[0], str(found[0]["loc"][0])
        if name not in several_kinds_of(model):
            raise BadField(".".join(map(str, first["loc"])), first["msg"]) from None
        # Each kind that the field may have has found an error, and has put its own name into the place.
        whys = dict.fromkeys(one["msg"] for one in found if one["loc"][0] == name)
        raise BadField(name, "; or: ".join(whys)) from None


def body_of(model: type[B], *, carries_data: bool = True) -> Callable[[Request], Awaitable[B]]:
    """Return a function that reads a request's body as `model`. carries_data: the body may have `max_body_bytes`, not
    only `max_control_body_bytes`."""

    async def read(request: Request) -> B:
        config: HttpConfig = request.app.state.config
        limit = config.max_body_bytes if carries_data else min(config.max_body_bytes, config.max_control_body_bytes)
        return await read_as(request, lambda values: fields_of(model, values), limit)

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


def let_go(values: dict[str, object]) -> None:
    """Empty the long lists of a body in slices: to let go of millions of entries at once would hold all threads."""
    for value in values.values():
        while isinstance(value, list) and value:
            del value[-_ENTRIES_A_SLICE:]
            give_way()


def _parse_and(data: bytes, max_lists: int, then: Callable[[dict[str, object]], T]) -> T:
    """Return `then` of the object in a long body. What is refused is let go in slices."""
    values = parse_object(data, max_lists)
    try:
        return then(values)
    except Exception:
        let_go(values)
        raise


def _kind(value: object) -> str:
    return {list: "a list", str: "a text", bool: "a truth value", type(None): "null"}.get(type(value), "a number")
