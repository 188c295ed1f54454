"""The rules by which administrative verbs are broadcast to the workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Rule:
    """The rule of one verb."""

    is_change: bool = False  # waits for the change before it
    holds: bool = False  # its targets get no requests meanwhile
    journal: str = ""  # of an update: "opens" or "closes" a session, "writes", or "mends" after a failed update
    one_version: bool = False  # answers 409 where the weight versions differ


_UPDATE = Rule(is_change=True, holds=True, journal="writes")
_CHANGE = Rule(is_change=True, holds=True)
_READ = Rule()
_VERSION = Rule(one_version=True)
# By the last part of the path, so that /lockstep/VERB follows the same rule. Other verbs are not broadcast.
RULES: dict[str, Rule] = {
    "pause_generation": _CHANGE,
    "continue_generation": Rule(is_change=True),
    "update_weights_from_disk": _UPDATE,
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
    "release_memory_occupation": _CHANGE,
    "resume_memory_occupation": _CHANGE,
    "pull_weights": Rule(is_change=True),
    "weights_checker": _READ,  # but see `rule_for`
    "flush_cache": _READ,
    "abort_request": _READ,
    "finish_digest": _READ,
    "state": _READ,
    "sequences": _READ,
    "server_info": _READ,
    "get_server_info": _READ,
    "get_weights_by_name": _READ,
    "start_profile": _READ,
    "stop_profile": _READ,
    "pin_blocks": _READ,
    "unpin_blocks": _READ,
    "pin_prefix": _READ,
    "unpin_prefix": _READ,
    "evict_descendants": _READ,
    "cache_tree": _READ,
    "model_info": _VERSION,
    "get_model_info": _VERSION,
    "get_weight_version": _VERSION,
}


def rule_for(verb: str, values: Mapping[str, object]) -> Rule:
    """Find the rule of a verb. `weights_checker` is a change if it overwrites the weights."""
    if verb == "weights_checker" and values.get("action") == "reset_tensors":
        return _CHANGE
    return RULES[verb]
