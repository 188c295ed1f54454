"""The options of one weight update."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from ...rollout.errors import DeadlineExceeded
from ...rollout.loop.commands import OnCommit, check_in_flight, check_timeout
from ...weight_sync.deadline import Deadline

DigestTime = Literal["now", "later"]
MAX_CLIENT = 200  # characters of the name of a caller


def check_version(version: object) -> None:
    """Check the label of weights; None: none was given. Raises ValueError naming one that no answer could bear."""
    if version is not None:
        check_required_version(version)


def check_required_version(version: object) -> None:
    """Check the label of weights where one has to be given. Raises ValueError naming one that no answer could bear."""
    if not (isinstance(version, str) and version and _is_encodable(version)):
        raise ValueError(
            f"a weight version must be a text, not empty, that UTF-8 can encode, not {repr(version)[:100]}"
        )


def check_client(client: object) -> None:
    """Check the name of a caller; None: it has none. Raises ValueError for one that a line of a log cannot bear."""
    if client is not None and not (isinstance(client, str) and 0 < len(client) <= MAX_CLIENT and client.isprintable()):
        raise ValueError(f"client must be a text of 1 to {MAX_CLIENT} printable characters, not {ascii(client)[:100]}")


def own_time(timeout_s: float | None, most_s: float) -> float | None:
    """Return how long a call waits for another one, at most `most_s`; None: it has no time of its own. Raises
    ValueError for a time that nothing can wait for."""
    if timeout_s is None:
        return None
    check_timeout(timeout_s)
    return min(timeout_s, most_s)


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
    return True


@dataclass(frozen=True)
class UpdateOptions:
    """The common arguments of the weight verbs; see `WeightVerbs`."""

    weight_version: str | None  # published when the weights are committed
    timeout_s: float  # the deadline of every wait
    verify: Mapping[str, str] | None = None  # the sender's tensor roots in hex, by name
    abort_all_requests: bool = False  # abort running requests first
    keep_running: bool = False  # let requests that are paused in_place continue with the new weights
    in_flight: OnCommit | None = None  # what the commit does with sequences that have begun
    continue_on_expiry: bool = False  # end the pause where the session's client is lost
    client: str | None = None  # the caller's name for all calls of its update; None: it has none
    is_whole: bool = False  # all weights are replaced

    def __post_init__(self) -> None:
        check_client(self.client)
        check_version(self.weight_version)
        check_in_flight(self.in_flight, abort_all=self.abort_all_requests, keep_running=self.keep_running)

    def within(self, deadline: Deadline) -> UpdateOptions:
        """Return these options with the time that is left until then. Raises DeadlineExceeded where none is."""
        left_s = deadline.left_s
        if left_s <= 0:
            raise DeadlineExceeded(f"the {self.timeout_s:.3g} s passed before the update began, and it will not run")
        return replace(self, timeout_s=left_s)
