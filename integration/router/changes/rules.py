"""The rules by which administrative verbs are broadcast to the workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import parse_qs

from ..calls import WorkerCall
from ..fleet.aborted import Abort, inference_name


@dataclass(frozen=True)
class Rule:
    """The rule of one verb."""

    is_change: bool = False  # waits for the change before it
    acts: bool = False  # does something at the workers, as every change does: never a GET
    holds: bool = False  # its targets get no requests meanwhile
    journal: str = ""  # of an update: "opens" or "closes" a session, "writes", or "mends" after a failed update
    is_whole: bool = False  # replaces all weights in one call, so that it settles an update that only some refused
    one_version: bool = False  # answers 409 where the weight versions differ
    pauses: bool | None = None  # whether generation is paused after it, or goes on; None: it stays as it is
    releases: bool = False  # memory of the workers, also as a part of a pause
    gives_back: bool = False  # such memory
    ends_if_refused: bool = False  # its session is over where all workers refuse it, as vLLM's updates are
    merge: tuple[str, Callable[[list[Any]], object]] | None = None  # a field of the answers, made one by this function


_UPDATE = Rule(is_change=True, holds=True, journal="writes")
_CHANGE = Rule(is_change=True, holds=True)
_READ = Rule()
_ACT = Rule(acts=True)
_VERSION = Rule(one_version=True)
# By the last part of the path, so that /lockstep/VERB follows the same rule. Other verbs are not broadcast.
RULES: dict[str, Rule] = {
    "pause_generation": replace(_CHANGE, pauses=True),
    "continue_generation": Rule(is_change=True, pauses=False),
    "update_weights_from_disk": replace(_UPDATE, is_whole=True),
    "update_weights_from_distributed": _UPDATE,
    "update_weights_from_tensor": _UPDATE,
    "update_weights_from_ipc": _UPDATE,
    "load_lora_adapter": _UPDATE,
    "unload_lora_adapter": _UPDATE,
    "update_weight_version": _UPDATE,
    "post_process_weights": _UPDATE,
    "verify_weight_update": _UPDATE,
    "begin_weight_update": replace(_UPDATE, journal="opens"),
    "end_weight_update": replace(_UPDATE, journal="closes"),
    "abort_weight_update": replace(_UPDATE, journal="mends"),
    "revert_weight_update": replace(_UPDATE, journal="mends"),
    "release_weight_undo": Rule(is_change=True),
    "init_weights_update_group": _CHANGE,
    "destroy_weights_update_group": _CHANGE,
    "release_memory_occupation": replace(_CHANGE, releases=True),
    "resume_memory_occupation": replace(_CHANGE, gives_back=True),
    "pull_weights": Rule(is_change=True),
    "weights_checker": _READ,  # but see `rule_for`
    "flush_cache": _READ,
    "abort_request": _ACT,
    "finish_digest": _ACT,
    "state": _READ,
    "sequences": _READ,
    "server_info": _READ,
    "get_server_info": _READ,
    "get_weights_by_name": _READ,
    "start_profile": _ACT,
    "stop_profile": _ACT,
    "pin_blocks": _ACT,
    "unpin_blocks": _ACT,
    "pin_prefix": _ACT,
    "unpin_prefix": _ACT,
    "evict_descendants": _ACT,
    "cache_tree": _READ,
    "model_info": _VERSION,
    "get_model_info": _VERSION,
    "get_weight_version": _VERSION,
    # vLLM's
    "pause": replace(_CHANGE, pauses=True),
    "resume": Rule(is_change=True, pauses=False),
    "sleep": replace(_CHANGE, pauses=True, releases=True),
    "wake_up": replace(_CHANGE, gives_back=True),  # the probes find out whether generation goes on
    "release_kv_cache_memory": replace(_CHANGE, releases=True),
    "is_paused": Rule(merge=("is_paused", all)),
    "is_sleeping": Rule(merge=("is_sleeping", all)),
    "get_world_size": Rule(merge=("world_size", sum)),
    "abort_requests": Rule(acts=True, merge=("aborted", sum)),
    "reset_prefix_cache": Rule(acts=True, merge=("success", all)),
    "weight_info": _VERSION,
    "weight_checker": _READ,  # but see `rule_for`
    "init_weight_transfer_engine": _CHANGE,
    "shutdown_weight_transfer_engine": _CHANGE,
    "start_weight_update": replace(_UPDATE, journal="opens"),
    "update_weights": replace(_UPDATE, ends_if_refused=True),
    "finish_weight_update": replace(_UPDATE, journal="closes", ends_if_refused=True),
    # AReaL's
    "areal_set_update_weight_meta": Rule(is_change=True),
    "areal_update_weights_xccl": _UPDATE,
}
# Further names of verbs, under which AReaL's trainers call them.
SAME = {
    "areal_pause_generation": "pause_generation",
    "areal_continue_generation": "continue_generation",
    "areal_init_weights_update_group": "init_weights_update_group",
    "areal_update_weights": "update_weights_from_disk",
}

# Paths of these verbs under prefixes whose other paths go to one worker.
ELSEWHERE = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/inference/v1/abort_requests")


def verb_of(path: str) -> str:
    """Return the verb that a path asks for, by its name in RULES."""
    last = path.rpartition("/")[2]
    return SAME.get(last, last)


def rule_for(verb: str, values: Mapping[str, object]) -> Rule:
    """Find the rule of a verb. The checkers are a change if they overwrite the weights."""
    if (verb, values.get("action")) in (("weights_checker", "reset_tensors"), ("weight_checker", "reset")):
        return _CHANGE
    return RULES[verb]


def aborted_by(call: WorkerCall, values: Mapping[str, object]) -> Abort | None:
    """Return which requests a call aborts at the workers; None where it aborts none, or no worker takes it."""
    if call.method != "POST":
        return None
    if call.path in ("/abort_request", "/lockstep/abort_request"):
        reason = values.get("finished_reason")
        said = values.get("abort_message") or values.get("message")
        said = said or (reason.get("message") if isinstance(reason, Mapping) else None)
        rid, message = values.get("rid"), said if isinstance(said, str) and said else "Aborted"
        if values.get("abort_all"):
            return Abort(None, message)
        return Abort(frozenset({rid}), message) if isinstance(rid, str) and rid else None
    if call.path in ("/abort_requests", "/inference/v1/abort_requests"):
        given = values.get("request_ids")
        rids = [one for one in given if isinstance(one, str)] if isinstance(given, list) else []
        if call.path == "/inference/v1/abort_requests":
            return Abort(frozenset(map(inference_name, rids)), "aborted by abort_requests")
        return Abort(frozenset(rids) if given else None, "aborted by abort_requests")
    return Abort(None) if _pause_mode(call, values) == "abort" else None


def _pause_mode(call: WorkerCall, values: Mapping[str, object]) -> object:
    """Return the mode of a pause, where none is given that of its path; None for another call."""
    if call.path == "/pause":
        return parse_qs(call.query).get("mode", ["abort"])[0]
    if call.path == "/lockstep/pause_generation":
        return values.get("mode", "retract")
    if call.path == "/areal_pause_generation":  # reads none
        return "abort"
    given = values.get("mode")
    return ("abort" if given is None else given) if call.path == "/pause_generation" else None
