"""The results of calls that pause the workers or release their memory, and of those by which they go on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from urllib.parse import parse_qs

from ..calls import WorkerCall
from ..fleet.pauses import Pauses
from .broadcast import Result
from .rules import Rule
from .taking_back import client_of


def note_pause(
    pauses: Pauses, verb: str, rule: Rule, call: WorkerCall, values: Mapping[str, object], results: Sequence[Result]
) -> None:
    """Note which workers are paused after a call, and whether the fleet is. Does nothing after other calls."""
    done = [result for result in results if result.success]
    going = [result for result in done if not _leaves_paused(result, values)]
    if rule.pauses is not None:
        for result in going:
            result.worker.paused = rule.pauses and pauses.is_as_asked(result.worker)
    if not done:
        return
    tags = _tags_of(verb, call, values)
    if rule.pauses or rule.releases:
        pauses.begin(verb, (result.worker for result in done), bool(rule.pauses), tags if rule.releases else ())
    elif rule.gives_back:
        is_awake = all(isinstance(result.body, dict) and result.body.get("status") == "awake" for result in done)
        pauses.give_back(None if is_awake else tags, wakes=verb == "wake_up")
        if verb == "wake_up" and not pauses.is_on:
            for result in done:
                result.worker.paused = False  # a probe knows better
    elif rule.pauses is False and going:
        pauses.go_on()


def _leaves_paused(result: Result, values: Mapping[str, object]) -> bool:
    """Return whether a worker stays paused after a client has ended its own pause: it was not that client's."""
    was_its = result.body.get("was_paused", True) if isinstance(result.body, dict) else True
    return client_of(values) is not None and was_its is False


def _tags_of(verb: str, call: WorkerCall, values: Mapping[str, object]) -> frozenset[str] | None:
    """Return the tags of the memory that a call is about; None: all."""
    query = parse_qs(call.query)
    if verb == "release_kv_cache_memory":
        return frozenset({"kv_cache"})
    if verb == "sleep" and query.get("level") == ["0"]:
        return frozenset()
    given = values.get("tags") or query.get("tags")
    tags = [given] if isinstance(given, str) else given if isinstance(given, list) else []
    return frozenset(tag for tag in tags if isinstance(tag, str)) or None
