"""Errors as statuses and bodies: for SGLang's clients, in OpenAI's shape under /v1 and on vLLM's paths, and in
Anthropic's under /v1/messages.

| status | cause |
|---|---|
| 400 | ValueError (naming the field if there is one), and every condition that a caller may handle |
| 401, 403 | no usable key; the wrong key |
| 404, 405, 413, 501 | no such path; not with this method; too long; not supported here |
| 408 | DeadlineExceeded: the call's own deadline passed before it began, and it will not run |
| 409 | Busy: another update is in progress; SessionBusy: another call of the session ran for too long; OpIdTaken: the |
|     | op_id belongs to another operation |
| 500 | a bug in Lockstep; GrammarsUnavailable: no grammar can be compiled on this machine |
| 503 | EngineStopped: the loop has ended, or is ending; RankFailure: a rank of the replica is lost; Overloaded: too |
|     | much waits already; Draining: the server ends. Retry-After says when to try again; |
|     | OutOfMemory: the machine has no memory for the KV pool |
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections.abc import Mapping

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ....rollout.errors import (
    DeadlineExceeded,
    EngineStopped,
    GrammarsUnavailable,
    IllegalTransition,
    LedgerError,
    LockstepError,
    OpIdTaken,
    OutOfMemory,
    Overloaded,
    RankFailure,
)
from ....weight_sync.errors import SessionBusy, WeightSyncError

logger = logging.getLogger(__name__)

SERVER_ENDED = "the server ended"  # why open requests are aborted at the end of a drain
# The paths of generation, for clients that look for it elsewhere.
SERVED = (
    "generation is served at /v1/chat/completions, /v1/messages, /v1/responses, /v1/completions, "
    "/inference/v1/generate and /generate"
)
_OPENAI_PREFIXES = ("/v1/", "/v2/", "/inference/")  # of paths with OpenAI's errors
_OPENAI_PATHS = frozenset(
    {"/tokenize", "/detokenize", "/pause", "/resume", "/is_paused", "/abort_requests", "/reset_prefix_cache", "/sleep",
     "/wake_up", "/is_sleeping", "/get_world_size", "/weight_info", "/init_weight_transfer_engine",
     "/shutdown_weight_transfer_engine", "/start_weight_update", "/start_draft_weight_update", "/update_weights",
     "/finish_weight_update", "/weight_checker", "/release_kv_cache_memory", "/collective_rpc", "/rerank", "/score",
     "/pooling"}
)  # fmt: skip
# Of the paths with SGLang's errors, those of administration also have the exception's class, see `error_body`.
_WITHOUT_KIND = frozenset({"/generate", "/renew", "/open_session", "/close_session", "/session_info"})
_OF_SESSION = re.compile(r"^/sessions/[^/]*+(?=/)")
_MAX_MESSAGE = 10_000  # characters about a wrong field; the message may quote it
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
_MAX_PATH = 200  # characters of a path or method that a message quotes
_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error"}
_ANTHROPIC_PATH = "/v1/messages"
_ANTHROPIC_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 408: "timeout_error",
    413: "request_too_large", 503: "overloaded_error",
}  # fmt: skip
_TITLES = {
    400: "Bad Request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    409: "Conflict",
    413: "Content Too Large",
    415: "Unsupported Media Type",
    500: "Internal Server Error",
    501: "Not Implemented",
    503: "Service Unavailable",
}


TOO_LONG = "context_length_exceeded"  # OpenAI's code of a prompt for which the context has no room


class HttpError(Exception):
    """An error with its HTTP status. Its message is sent to the client."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        extra: Mapping[str, object] | None = None,
        kind: str | None = None,
    ) -> None:
        """Set the parts of the answer. param: the wrong field. code: a machine-readable word. extra: further keys of
        the body. kind: the class of the exception that it answers."""
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.kind = status, message, param, code, kind
        self.headers, self.extra = dict(headers or {}), dict(extra or {})


class BadField(HttpError):
    """The error of a wrong field in the request."""

    def __init__(self, param: str, message: str) -> None:
        message = f"{param}: {message}"
        short = message if len(message) <= _MAX_MESSAGE else f"{message[:_MAX_MESSAGE]} ..."
        super().__init__(400, short, param=param[:_MAX_MESSAGE])


class TooLong(BadField):
    """The error of a prompt that the context has no room for."""

    def __init__(self, param: str, num_tokens: str, room: int, context: int, *, why: str = "") -> None:
        """Name the prompt's field. num_tokens: of the prompt, in words. room: the most tokens that it may have.
        context: tokens of the model's. why: in other words, for what comes first."""
        said = why or f"Input length ({num_tokens} tokens) exceeds the maximum allowed length ({room} tokens)"
        # Agents look for these words of OpenAI's, and shorten their history.
        super().__init__(param, f"{said}. This model's maximum context length is {context} tokens")
        self.num_tokens, self.room, self.code = num_tokens, room, TOO_LONG


class Busy(HttpError):
    """The error while another operation runs: the client waits and tries again."""

    def __init__(self, message: str, **extra: object) -> None:
        super().__init__(409, message, code="busy", extra=extra)


class Draining(HttpError):
    """The error for a new request while the server finishes the open ones before it ends."""

    def __init__(self) -> None:
        message = "the server is draining: it finishes its open requests and takes no new ones"
        super().__init__(503, message, code="draining", headers={"Retry-After": "1"})


class NotSupported(HttpError):
    """The error for a part of another server's API that this engine does not have."""

    def __init__(self, message: str) -> None:
        # The clients of OpenAI and Anthropic call again after a 5xx, unless this header says that it has no use.
        super().__init__(501, message, code="not_implemented", headers={"X-Should-Retry": "false"})


def no_path(path: str) -> HttpError:
    """Make the error of a path that is none."""
    return HttpError(404, f"there is no path {path[:_MAX_PATH]}: {SERVED}")


def is_expected(error: BaseException) -> bool:
    """Return whether a caller may cause this error; any other is a bug of ours."""
    if isinstance(error, LedgerError | IllegalTransition):
        return False
    return isinstance(error, HttpError | ValueError | LockstepError | WeightSyncError | OSError)


def as_http_error(error: Exception) -> HttpError:
    """Convert an exception of Lockstep to its answer; any other becomes 500 without its text."""
    if isinstance(error, HttpError):
        return error
    kind = type(error).__name__
    code = _word_of(error)
    if isinstance(error, DeadlineExceeded):
        return HttpError(408, str(error), code=code, kind=kind)
    if isinstance(error, Overloaded):
        after = str(max(math.ceil(error.retry_after_s), 1))
        return HttpError(503, str(error), code="overloaded", headers={"Retry-After": after})
    if isinstance(error, GrammarsUnavailable):  # no 503: a router would take the worker for lost
        return HttpError(500, str(error), code=code, kind=kind)
    if isinstance(error, OutOfMemory):
        return HttpError(503, str(error), code=code, kind=kind)
    if isinstance(error, SessionBusy):
        return HttpError(409, str(error), code=code, kind=kind)
    if isinstance(error, OpIdTaken):
        return HttpError(409, str(error), param="op_id", code="busy")
    if isinstance(error, EngineStopped | RankFailure):
        lost = error.__cause__
        why = f"{error}: {lost}" if isinstance(lost, RankFailure) else str(error)
        return HttpError(503, why, code=code, kind=kind)
    if is_expected(error):
        return HttpError(400, str(error), code=code, kind=kind)
    logger.error("a call failed", exc_info=error)
    message = f"internal error ({kind}); the server's log has the details"
    return HttpError(500, message, code="internal_error", kind=kind)


def _word_of(error: Exception) -> str | None:
    """Return the word that names one of Lockstep's conditions to clients, as engine_stopped; None for a mistake of the
    caller, which has its message and its field."""
    if not isinstance(error, LockstepError | WeightSyncError):
        return None
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(error).__name__).lower()


def error_body(error: HttpError, *, openai: bool, has_kind: bool = True) -> dict[str, object]:
    """Make the body of an error: OpenAI's, or a body with every key that SGLang's clients read. has_kind: the latter's
    type is the class of the exception, by which weight pushers and routers tell the errors of administration apart."""
    if openai:
        kind = _OPENAI_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
        what = {"message": error.message, "type": kind, "param": error.param, "code": error.code}
        return {"error": what, **error.extra}
    return {
        "success": False,
        "object": "error",
        "message": error.message,
        "type": _TITLES.get(error.status, str(error.status)),
        "param": error.param,
        "code": error.status,
        "error": {
            "message": error.message,
            "type": (has_kind and error.kind) or error.code or _TITLES.get(error.status, ""),
            "param": error.param,
            "code": error.code,
        },
        **error.extra,
    }


def message_error_body(error: HttpError) -> dict[str, object]:
    """Make the body of an error as Anthropic's clients read it, with the wrong field and the word beside it."""
    kind = _ANTHROPIC_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    what = {"type": kind, "message": error.message, "param": error.param, "code": error.code}
    return {"type": "error", "error": what, **error.extra}


def error_response(path: str, error: Exception) -> JSONResponse:
    """Make the answer to a request for `path` that failed with `error`."""
    answer = as_http_error(error)
    forget_frames(error)
    if _OF_SESSION.sub("", path).startswith(_ANTHROPIC_PATH):
        body = message_error_body(answer)
    else:
        body = error_body(answer, openai=has_openai_errors(path), has_kind=path not in _WITHOUT_KIND)
    return JSONResponse(body, answer.status, answer.headers)


def has_openai_errors(path: str) -> bool:
    """Return whether errors of this path have OpenAI's shape. An unknown path of a session has that of the path behind
    its id."""
    path = _OF_SESSION.sub("", path)
    return path.startswith(_OPENAI_PREFIXES) or path in _OPENAI_PATHS


def forget_frames(error: BaseException | None) -> None:
    """Let go of the variables of the calls that failed, request bodies among them: an error may be kept as the answer
    of its op_id."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


class EndingMiddleware:
    """Answer 503 to a request that the server's shutdown cancels before its answer has begun."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def watched(message: Message) -> None:
            nonlocal has_begun
            has_begun = has_begun or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except asyncio.CancelledError:
            if has_begun or scope["type"] != "http":
                raise
            ending = HttpError(503, "the server is ending; the operation may still happen", code="ending")
            await error_response(scope["path"], ending)(scope, receive, send)


def _methods_of(request: Request) -> list[str]:
    """List the methods of a request's path, of which each may be a route of its own."""
    scope = {"type": "http", "path": request.scope["path"], "root_path": request.scope.get("root_path", "")}
    return [
        method
        for method in _METHODS
        if any(route.matches({**scope, "method": method})[0] is Match.FULL for route in request.app.routes)
    ]


def install(app: FastAPI) -> None:
    """Register handlers that answer Lockstep's exceptions, and the framework's own, in these shapes."""

    async def answer(request: Request, error: Exception) -> Response:
        return error_response(request.scope["path"], error)

    async def answer_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        headers, path, message = dict(error.headers or {}), request.scope["path"], str(error.detail)
        if error.status_code == 404:
            message = no_path(path).message
        elif error.status_code == 405:
            headers["Allow"] = ", ".join(_methods_of(request))
            message = f"{path[:_MAX_PATH]} takes {headers['Allow']}, not {request.method[:_MAX_PATH]}"
        return error_response(path, HttpError(error.status_code, message, headers=headers))

    async def answer_validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"][1:])
        return error_response(request.scope["path"], BadField(field, first["msg"]))

    async def answer_gone(request: Request, error: Exception) -> Response:
        return Response(status_code=499)  # which has no reader

    app.add_exception_handler(ClientDisconnect, answer_gone)
    app.add_exception_handler(HTTPException, answer_http)
    app.add_exception_handler(RequestValidationError, answer_validation)
    for kind in (HttpError, ValueError, OSError, LockstepError, WeightSyncError, Exception):
        app.add_exception_handler(kind, answer)
