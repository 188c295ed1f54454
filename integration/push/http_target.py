"""An engine behind HTTP as a target of weight updates."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal

import httpx

from ...weight_sync.target import TargetError
from ..one_line import in_one_line
from .vllm_wire import VllmWire, report_of

logger = logging.getLogger(__name__)

Wire = Literal["lockstep", "vllm"]
_GRACE_S = 5.0  # beyond a verb's own deadline, because the engine's own error is more precise
_CONNECT_S = 10.0
# Types of errors in OpenAI's shape, as vLLM's calls have it: the error's class is their code.
_OPENAI_TYPES = frozenset({"invalid_request_error", "server_error", "authentication_error", "permission_error"})
# A proxy's answers where it cannot reach the engine: they are not the engine's.
_FROM_A_PROXY = frozenset({502, 504})


class HttpTarget:
    """A served engine; implements `weight_sync.target.Target` over POST /lockstep/VERB. Thread-safe.

    A router is one target, too: it passes each verb to all of its workers, gives each its own ranks of a process group,
    and returns the answer on which they agree. Its message names a worker that fails.

    With wire="vllm" the calls are vLLM's where it has them: /pause (mode keep or abort), /reset_prefix_cache,
    /init_weight_transfer_engine, /start_weight_update, /update_weights, /finish_weight_update, /resume, and
    /is_paused and /get_world_size for the state. The tensors then go through `VllmTransport`, whose docstring has the
    convention. vLLM has no calls to compare digests, to give an update up or to take it back: these stay
    /lockstep/VERB, so the server is one of Lockstep's.
    """

    def __init__(
        self, url: str, admin_key: str | None = None, *, name: str | None = None, wire: Wire = "lockstep"
    ) -> None:
        """Connect to a server. name: used in errors; the url by default. Raises ValueError for a url that is not http
        or https, and for an unknown wire."""
        if wire not in ("lockstep", "vllm"):
            raise ValueError(f'wire must be "lockstep" or "vllm", not {wire!r}')
        self._vllm = VllmWire() if wire == "vllm" else None
        parsed = httpx.URL(url)
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise ValueError(f"a target's url is http://HOST:PORT, not {url!r}")
        self.url = url.rstrip("/")
        self._name = name or self.url
        headers = {} if admin_key is None else {"Authorization": f"Bearer {admin_key}"}
        # An engine is never behind a proxy of the environment. Calls that wait for each other each need a connection.
        self._client = httpx.Client(
            headers=headers, trust_env=False, limits=httpx.Limits(max_connections=None, max_keepalive_connections=4)
        )

    def __repr__(self) -> str:
        return f"HttpTarget({self.url!r})"

    @property
    def name(self) -> str:
        return self._name

    def call(self, verb: str, *, timeout_s: float, **arguments: object) -> dict[str, object]:
        """Call a verb; see `Target.call`. An error's kind is its class name on the server; where the request was
        refused before the engine received it, the kind is the status in words."""
        if self._vllm is not None:
            try:
                calls = self._vllm.calls(verb, arguments)
            except ValueError as error:
                raise TargetError(self._name, verb, str(error), "ValueError") from error
            if calls is not None:
                answers: dict[str, object] = {}
                for call in calls:
                    body = None if call.body is None else {"timeout_s": timeout_s, **call.body}
                    answers |= self._ask(verb, call.method, call.path, body, timeout_s)
                return report_of(verb, answers)
        answer = self._ask(verb, "POST", f"/lockstep/{verb}", {"timeout_s": timeout_s, **arguments}, timeout_s)
        if verb == "state" and "paused" not in answer:
            raise TargetError(self._name, verb, "some of its workers are paused and some are not", "MixedWorkers")
        return answer

    def _ask(
        self, verb: str, method: str, path: str, body: Mapping[str, object] | None, timeout_s: float
    ) -> dict[str, object]:
        """Send one call and return its answer. Raises TargetError."""
        if self._client.is_closed:
            raise TargetError(self._name, verb, "this target was closed")
        timeout = httpx.Timeout(timeout_s + _GRACE_S, connect=min(timeout_s, _CONNECT_S))
        content, headers = (None, {}) if body is None else (json.dumps(body), {"Content-Type": "application/json"})
        try:
            response = self._client.request(
                method, f"{self.url}{path}", content=content, timeout=timeout, headers=headers
            )
        except httpx.HTTPError as error:
            raise TargetError(self._name, verb, f"no answer within {timeout_s:g} s: {in_one_line(error)}") from error
        answer = _json_of(response)
        if response.status_code == 200 and isinstance(answer, dict):
            return answer
        message, kind = _error_of(response, answer)
        raise TargetError(self._name, verb, message, kind)

    @contextmanager
    def attend(self, client: str, *, timeout_s: float) -> Iterator[None]:
        """Keep a connection open in the block; see `AttendedTarget.attend`."""
        if self._client.is_closed:
            raise TargetError(self._name, "attend", "this target was closed")
        limits = httpx.Timeout(timeout_s + _GRACE_S, connect=min(timeout_s, _CONNECT_S))
        request = self._client.build_request(
            "POST", f"{self.url}/lockstep/attend", json={"client": client}, timeout=limits
        )
        try:
            response = self._client.send(request, stream=True)
        except httpx.HTTPError as error:
            raise TargetError(
                self._name, "attend", f"no answer within {timeout_s:g} s: {in_one_line(error)}"
            ) from error
        try:
            if response.status_code != 200:
                raise TargetError(self._name, "attend", *self._refusal_in(response))
            yield
        finally:
            response.close()

    def _refusal_in(self, response: httpx.Response) -> tuple[str, str]:
        try:
            response.read()
        except httpx.HTTPError as error:
            return f"status {response.status_code}: {in_one_line(error)}", ""
        return _error_of(response, _json_of(response))

    @contextmanager
    def stream(self, path: str, body: bytes, timeout_s: float) -> Iterator[httpx.Response]:
        """Send a generation request and yield its answer when the head is there; the body is read inside the block.
        timeout_s: of each wait for further bytes. Raises httpx.HTTPError, also for errors inside the block."""
        timeout = httpx.Timeout(timeout_s, connect=min(timeout_s, _CONNECT_S))
        headers = {"Content-Type": "application/json"}
        with self._client.stream("POST", f"{self.url}{path}", content=body, timeout=timeout, headers=headers) as answer:
            yield answer

    def server_info(self, timeout_s: float) -> dict[str, object]:
        """Return what the server reports of itself, and have its weights' digest computed where they have none. Raises
        TargetError."""
        return self._ask("server_info", "GET", "/server_info?name_weights=1", None, timeout_s)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()


def targets_behind(
    router_url: str, admin_key: str | None = None, *, timeout_s: float = 10.0, wire: Wire = "lockstep"
) -> list[HttpTarget]:
    """List the healthy workers of a router as targets, each at its own address.

    Use it for a `WeightPusher` that calls each engine itself: every engine is then a target of its own, with its own
    name in errors. The alternative is `HttpTarget(router_url)`: one target, whose verbs the router passes on to all its
    workers.

        pusher = WeightPusher(targets_behind("http://127.0.0.1:30080", admin_key), transport)

    admin_key: of the router and of the workers. timeout_s: for the router's answer. wire: of the targets. Workers that
    are not healthy are logged and left out; a worker that returns with other weights gets no requests from the router
    before an update. The caller closes the targets. Raises TargetError with the reason where the router does not answer
    or has no healthy workers.
    """
    router = HttpTarget(router_url, admin_key)
    try:
        response = router._client.get(f"{router.url}/workers", timeout=timeout_s)
    except httpx.HTTPError as error:
        raise TargetError(router.name, "workers", f"no answer within {timeout_s:g} s: {in_one_line(error)}") from error
    finally:
        router.close()
    answer = _json_of(response)
    if response.status_code != 200 or not isinstance(answer, dict):
        raise TargetError(router.name, "workers", *_error_of(response, answer))
    healthy, unhealthy = _split_by_health(answer.get("workers"))
    if not healthy:
        found = f"none of its workers is healthy: {'; '.join(unhealthy)}" if unhealthy else "it has no workers"
        raise TargetError(router.name, "workers", found, "NoWorkers")
    for worker in unhealthy:
        logger.warning("%s: a worker is not healthy, and no target: %s", router.name, worker)
    return [HttpTarget(url, admin_key, wire=wire) for url in healthy]


def _split_by_health(workers: object) -> tuple[Sequence[str], Sequence[str]]:
    """Return the URLs of the healthy workers, and the problems of the others. A router that reports no health has only
    healthy ones."""
    healthy, unhealthy = [], []
    for entry in workers if isinstance(workers, list) else ():
        if not isinstance(entry, dict) or "url" not in entry:
            continue
        if entry.get("is_healthy", True):
            healthy.append(str(entry["url"]))
        else:
            why = entry.get("last_error") or "no reason given"
            unhealthy.append(f"{entry['url']} is {entry.get('status', 'not healthy')} ({why})")
    return healthy, unhealthy


def _json_of(response: httpx.Response) -> object:
    try:
        return response.json()
    except ValueError:
        return None


def _error_of(response: httpx.Response, answer: object) -> tuple[str, str]:
    """Return message and kind of an error answer. The kind is "" where the answer does not state that nothing was
    done."""
    error = answer.get("error") if isinstance(answer, dict) else None
    if not isinstance(error, dict) or "message" not in error:
        kind = "" if response.status_code in _FROM_A_PROXY else f"HTTP {response.status_code}"
        return f"status {response.status_code}: {response.text[:200]!r}", kind
    assert isinstance(answer, dict)
    results = answer.get("results")
    if isinstance(results, list) and any(isinstance(one, dict) and one.get("success") for one in results):
        return str(error["message"]), ""  # a router's answer: some of its workers have run the verb
    named = error.get("code") if error.get("type") in _OPENAI_TYPES else error.get("type")
    return str(error["message"]), str(named or f"HTTP {response.status_code}")
