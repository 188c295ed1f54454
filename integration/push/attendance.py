"""The name of one push at its targets, and the connections by whose end they know that it is gone."""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from ...weight_sync.target import AttendedTarget, Target
from ...weight_sync.transports.transport import on_all
from .failures import PushFailed

# Verbs that belong to one update, from its pause to its end.
_OF_AN_UPDATE = frozenset(
    {"pause_generation", "continue_generation", "begin_weight_update", "verify_weight_update", "end_weight_update",
     "abort_weight_update", "revert_weight_update", "update_weights_from_distributed", "update_weights_from_tensor",
     "update_weights_from_disk", "update_weights"}
)  # fmt: skip


@contextmanager
def attended(targets: Sequence[Target], version: str, timeout_s: float) -> Iterator[list[Target]]:
    """Yield the targets with the name of one push of `version`, and keep a connection open to each that has such. Where
    this process ends in the block they take the push back, and go on. Raises PushFailed naming the targets that cannot
    be reached."""
    client = _new_client()
    with ExitStack() as connections:

        def attend(target: Target) -> None:
            if isinstance(target, AttendedTarget):
                connections.enter_context(target.attend(client, timeout_s=timeout_s))

        if failures := on_all(targets, attend):
            raise PushFailed(version, {name: str(error) for name, error in failures.items()})
        yield [OfClient(target, client) for target in targets]


def _new_client() -> str:
    """Return a name for one push, by which people find its process."""
    return f"push {uuid.uuid4().hex[:8]} of process {os.getpid()} on {socket.gethostname()}"


class OfClient:
    """A target whose calls for an update name their client; implements `weight_sync.target.Target`."""

    def __init__(self, target: Target, client: str) -> None:
        self.target, self.client = target, client

    @property
    def name(self) -> str:
        return self.target.name

    def call(self, verb: str, *, timeout_s: float, **arguments: object) -> dict[str, object]:
        """Call a verb; see `Target.call`."""
        if verb in _OF_AN_UPDATE:
            arguments = {**arguments, "client": self.client}
        return self.target.call(verb, timeout_s=timeout_s, **arguments)

    def close(self) -> None:
        """Do nothing: the owner closes the target."""
