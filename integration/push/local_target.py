"""A service in this process as a target, and the verbs that every target answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ...rollout.errors import LockstepError
from ...weight_sync.errors import WeightSyncError
from ...weight_sync.target import TargetError
from ..plain_values import plain
from ..service import RolloutService

# Verbs that may be called by name, and whether each takes `timeout_s`.
VERBS: dict[str, bool] = {
    "pause_generation": True,
    "continue_generation": True,
    "abort_request": True,
    "flush_cache": True,
    "begin_weight_update": True,
    "verify_weight_update": True,
    "end_weight_update": True,
    "abort_weight_update": True,
    "revert_weight_update": True,
    "release_weight_undo": False,
    "init_weights_update_group": True,
    "destroy_weights_update_group": False,
    "update_weights_from_distributed": True,
    "update_weights_from_tensor": True,
    "update_weights_from_disk": True,
    "pull_weights": True,
    "load_lora_adapter": True,
    "unload_lora_adapter": True,
    "update_weight_version": True,
    "get_weight_version": False,
    "weights_checker": False,
    "release_memory_occupation": False,
    "resume_memory_occupation": False,
    "finish_digest": False,
    "state": False,
}


def run_verb(
    service: RolloutService, verb: str, timeout_s: float, arguments: Mapping[str, object]
) -> dict[str, object]:
    """Run a verb by name and return its report as a JSON object, with `rank_results` where several ranks ran it.

    Raises ValueError for an unknown verb, and the verb's own exceptions.
    """
    if verb not in VERBS:
        raise ValueError(f"unknown verb {verb!r}")
    call = find_verb(service, verb)
    service.replica.take_results()  # drops the results of an earlier verb
    report = plain(call(**arguments, timeout_s=timeout_s) if VERBS[verb] else call(**arguments))
    report = report if isinstance(report, dict) else {"result": report}
    results = service.replica.take_results()
    return {"rank_results": results, **report} if results else report


def find_verb(service: RolloutService, verb: str) -> Callable[..., object]:
    """Find the service's method of that name, or else its engine's."""
    return getattr(service, verb, None) or getattr(service.engine, verb)


class LocalTarget:
    """A service in this process; implements `weight_sync.target.Target`."""

    def __init__(self, service: RolloutService, name: str = "this process") -> None:
        self.service = service
        self._name = name

    @property
    def name(self) -> str:
        return self._name

    def call(self, verb: str, *, timeout_s: float, **arguments: object) -> dict[str, object]:
        """Call a verb; see `Target.call`."""
        try:
            return run_verb(self.service, verb, timeout_s, arguments)
        except (LockstepError, WeightSyncError, ValueError, OSError) as error:
            raise TargetError(self._name, verb, str(error), type(error).__name__) from error

    def close(self) -> None:
        """Do nothing: the owner closes the service."""
