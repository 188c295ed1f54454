"""vLLM's calls in place of the verbs that a push needs. A verb that vLLM has no call for has none here either."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import urlencode

_PAUSE_MODES = {"retract": "keep", "abort": "abort"}


@dataclass(frozen=True)
class VllmCall:
    """A call over HTTP."""

    method: str
    path: str
    body: Mapping[str, object] | None = None  # None: none is sent


@dataclass
class VllmWire:
    """The calls of one target. Remembers the version of the update that has begun, which vLLM takes at its end."""

    version: str | None = None

    def calls(self, verb: str, arguments: Mapping[str, object]) -> list[VllmCall] | None:
        """Return vLLM's calls for a verb, whose answers together are its report; None where vLLM has none. Raises
        ValueError for arguments that vLLM's calls cannot express."""
        make = _CALLS.get(verb)
        return None if make is None else make(self, arguments)


def report_of(verb: str, answers: Mapping[str, object]) -> dict[str, object]:
    """Return a verb's report from the merged answers of its calls."""
    if verb == "state":  # weights that an update left half written are not known to vLLM's calls
        return {
            "paused": bool(answers.get("is_paused")), "num_ranks": answers.get("world_size", 1),
            "weight_update": {"state": "unknown"},
        }  # fmt: skip
    return dict(answers)


def _state(wire: VllmWire, arguments: Mapping[str, object]) -> list[VllmCall]:
    return [VllmCall("GET", "/is_paused"), VllmCall("GET", "/get_world_size")]


def _pause(wire: VllmWire, arguments: Mapping[str, object]) -> list[VllmCall]:
    mode = _PAUSE_MODES.get(str(arguments.get("mode", "abort")))
    if mode is None:
        raise ValueError(
            f"vLLM's wire has no pause {arguments['mode']!r}; pause_mode is one of {', '.join(_PAUSE_MODES)}"
        )
    own = {name: arguments[name] for name in ("ttl", "keeps_other", "client") if arguments.get(name) is not None}
    return [VllmCall("POST", f"/pause?{urlencode({'mode': mode, 'clear_cache': 'false', **own})}")]


def _begin(wire: VllmWire, arguments: Mapping[str, object]) -> list[VllmCall]:
    only = {"undo": "tensors", "digest": "now", "keep_running": False}
    if wrong := [name for name, value in only.items() if arguments.get(name, value) != value]:
        raise ValueError(f"vLLM's wire has no {', '.join(wrong)}: leave the default")
    version = arguments.get("weight_version")
    wire.version = None if version is None else str(version)
    return [
        VllmCall("POST", "/start_weight_update", _own(arguments))
    ]  # its lease is the server's setting update_idle_s


def _end(wire: VllmWire, arguments: Mapping[str, object]) -> list[VllmCall]:
    if arguments.get("in_flight") is not None:
        raise ValueError("vLLM's wire has no in_flight")
    version = arguments.get("weight_version") or wire.version
    body: dict[str, object] = {
        "keep_undo": True,
        **_own(arguments),
    }  # so that a push can be taken back from every target
    return [VllmCall("POST", "/finish_weight_update", body if version is None else body | {"weight_version": version})]


def _own(arguments: Mapping[str, object]) -> dict[str, object]:
    """Return the name of the caller, a field of Lockstep's own."""
    return {"client": arguments["client"]} if arguments.get("client") is not None else {}


_CALLS: dict[str, Callable[[VllmWire, Mapping[str, object]], list[VllmCall]]] = {
    "state": _state,
    "pause_generation": _pause,
    "continue_generation": lambda wire, arguments: [
        VllmCall("POST", f"/resume?{urlencode(own)}" if (own := _own(arguments)) else "/resume")
    ],
    "flush_cache": lambda wire, arguments: [VllmCall("POST", "/reset_prefix_cache")],
    "begin_weight_update": _begin,
    "end_weight_update": _end,
    "init_weight_transfer_engine": lambda wire, arguments: [
        VllmCall("POST", "/init_weight_transfer_engine", arguments)
    ],
    "update_weights": lambda wire, arguments: [VllmCall("POST", "/update_weights", arguments)],
    "shutdown_weight_transfer_engine": lambda wire, arguments: [
        VllmCall("POST", "/shutdown_weight_transfer_engine", {})
    ],
}
