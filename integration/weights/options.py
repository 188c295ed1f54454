"""The options of one weight update."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ...rollout.loop.commands import OnCommit, check_in_flight

DigestTime = Literal["now", "later"]


@dataclass(frozen=True)
class UpdateOptions:
    """The common arguments of the weight verbs; see `WeightVerbs`."""

    weight_version: str | None  # published when the weights are committed
    timeout_s: float  # the deadline of every wait
    verify: Mapping[str, str] | None = None  # the sender's tensor roots in hex, by name
    abort_all_requests: bool = False  # abort running requests first
    keep_running: bool = False  # let requests that are paused in_place continue with the new weights
    in_flight: OnCommit | None = None  # what the commit does with sequences that have begun

    def __post_init__(self) -> None:
        check_in_flight(self.in_flight, abort_all=self.abort_all_requests, keep_running=self.keep_running)
