"""Access to the paths of a server by keys: `Authorization: Bearer KEY`, or Anthropic's `x-api-key: KEY`.

| keys configured | open paths | generation and reports | all other paths |
|---|---|---|---|
| none | no key | no key | no key |
| api_key | no key | api_key | api_key |
| admin_api_key | no key | no key | admin_api_key |
| both | no key | either key | admin_api_key |

Paths that are not listed here are administrative. The levels (normal, admin optional, admin forced) are SGLang's, the
statuses SGLang-Omni's: 401 without a usable key, 403 with the wrong key.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
from enum import Enum

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from .config import HttpConfig
from .errors import HttpError, error_response

OPEN_PATHS = frozenset({"/", "/health", "/health_generate", "/ready", "/ping", "/metrics", "/lockstep/rollouts"})
NORMAL_PATHS = frozenset(
    {"/generate", "/renew", "/model_info", "/get_model_info", "/server_info", "/get_server_info", "/get_weight_version",
     "/parallelism_config", "/state", "/openapi.json", "/docs", "/get_load", "/inference/v1/generate", "/tokenize",
     "/detokenize", "/open_session", "/close_session", "/session_info", "/is_paused", "/is_sleeping",
     "/get_world_size", "/weight_info", "/encode", "/classify", "/score", "/rerank", "/v2/rerank", "/v2/embed",
     "/pooling", "/parse_function_call", "/separate_reasoning"}
)  # fmt: skip
NORMAL_PREFIX = "/v1/"
ADMIN_PATHS = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"})  # of those with that prefix
FORCED_PATHS = frozenset({"/hicache/storage-backend", "/hicache/storage-backend/clear"})  # refused without an admin key


class Level(Enum):
    """The key that a path needs."""

    OPEN = "open"
    NORMAL = "normal"
    ADMIN = "admin"
    ADMIN_FORCED = "admin forced"


def level_of(path: str) -> Level:
    """Return the level of a path; an unknown path is administrative."""
    if path in OPEN_PATHS:
        return Level.OPEN
    if path in NORMAL_PATHS or (path.startswith(NORMAL_PREFIX) and path not in ADMIN_PATHS):
        return Level.NORMAL
    return Level.ADMIN_FORCED if path in FORCED_PATHS else Level.ADMIN


def check_key(config: HttpConfig, level: Level, authorization: str | None) -> None:
    """Check that the Authorization header allows this level. Raises HttpError 401 or 403 where it does not."""
    if level is Level.OPEN:
        return
    if level is Level.ADMIN_FORCED and config.admin_api_key is None:
        raise HttpError(403, "this path needs a server that was started with an admin key", code="forbidden")
    if level is Level.NORMAL:
        accepted = [config.api_key, config.admin_api_key] if config.api_key else []
    else:
        accepted = [config.admin_api_key or config.api_key]
    keys = [key for key in accepted if key]
    if not keys:
        return
    given = _bearer(authorization)
    # Compare with every key: the time must not reveal which key is similar.
    matches = [hmac.compare_digest(given, key.encode()) for key in keys]
    if not any(matches):
        raise HttpError(403, "the key is not the one this call needs", code="forbidden")


def needs_key(config: HttpConfig, level: Level) -> bool:
    """Return whether calls of this level are refused without a key."""
    if level is Level.OPEN:
        return False
    return bool(config.api_key if level is Level.NORMAL else config.admin_api_key or config.api_key)


def check_origin(config: HttpConfig, method: str, headers: Headers, level: Level = Level.ADMIN) -> None:
    """Refuse requests from web pages of other sites: a browser on this machine can reach the loopback address, too.

    The Origin header shows such a page, and Sec-Fetch-Site also where a browser sends no Origin, as for images. Only
    the open paths answer then, and these only to be read. A page whose host name resolves to this machine is found by
    the Host header, wherever a call needs no key. Raises HttpError 403.
    """
    host, origin = headers.get("host", ""), headers.get("origin")
    is_open = level is Level.OPEN and method in ("GET", "HEAD")
    if origin is not None and not is_open and origin.partition("://")[2] != host:
        raise HttpError(403, f"a page of {origin} may not call this server", code="forbidden")
    site = headers.get("sec-fetch-site", "").lower()
    if level is not Level.OPEN and site in ("cross-site", "same-site"):
        raise HttpError(403, "a page of another site may not call this server", code="forbidden")
    name = host.rpartition(":")[0] if re.search(r":\d+$", host) else host
    has_keys = bool(config.api_key or config.admin_api_key)
    is_keyless = not has_keys if level is Level.OPEN else not needs_key(config, level)
    if config.is_loopback and is_keyless and not _is_address(name.strip("[]")):
        raise HttpError(
            403, f"this server is called by its address, not as {name!r}, unless it has keys", code="forbidden"
        )


def key_header(headers: Headers) -> str | None:
    """Return the Authorization header of a request, or what it would be for its x-api-key."""
    given, key = headers.get("authorization"), headers.get("x-api-key")
    return f"Bearer {key}" if given is None and key else given


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name in ("", "localhost")
    return True


def _bearer(authorization: str | None) -> bytes:
    scheme, _, key = (authorization or "").strip().partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        what = "an Authorization header is missing" if not authorization else "the Authorization header is malformed"
        message = f"{what}: send 'Authorization: Bearer KEY'"
        raise HttpError(401, message, code="unauthorized", headers={"WWW-Authenticate": "Bearer"})
    return key.strip().encode("latin-1")  # the received bytes: Starlette decodes headers as latin-1


class AuthMiddleware:
    """Refuse a request without the right key before its body is read."""

    def __init__(self, app: ASGIApp, config: HttpConfig) -> None:
        self._app = app
        self._config = config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] != "OPTIONS":
            headers = Headers(scope=scope)
            level = level_of(scope["path"])
            try:
                check_origin(self._config, scope["method"], headers, level)
                check_key(self._config, level, key_header(headers))
            except HttpError as refused:
                await error_response(scope["path"], refused)(scope, receive, send)
                return
        await self._app(scope, receive, send)
