"""The common interface of the sending side of an update.

A transport reads the tensors once, in the manifest's order, and sends them to all targets. The iterator that the caller
passes computes the digests on the way. A transport that raises leaves it to the caller to end the sessions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from ..errors import TransferFailed
from ..manifest import Manifest, NamedTensors
from ..target import Target, TargetError


@dataclass(frozen=True)
class Sent:
    """The amount of data that was sent to each target."""

    num_bytes: int
    density: float | None = None  # share of the elements that a delta changes; None: sent in full


class Transport(Protocol):
    """One way for weights to travel."""

    @property
    def takes_pieces(self) -> bool:
        """Whether an update may be sent in several calls, each with the manifest of its piece."""

    def prepare(self, targets: Sequence[Target], timeout_s: float) -> None:
        """Prepare the targets before their sessions begin, where the wire wants that. Raises as `send`."""

    def send(self, targets: Sequence[Target], manifest: Manifest, tensors: NamedTensors, timeout_s: float) -> Sent:
        """Send the tensors to every target. Raises TargetError, TargetsFailed or TransferFailed naming the failed
        targets."""

    def committed(self) -> None:
        """Note that every target now has the weights that were sent last."""

    def rejected(self) -> None:
        """Note that the weights that were sent last were not committed."""

    def close(self) -> None:
        """Release groups, segments and folders."""


class TargetsFailed(TransferFailed):
    """More than one target failed, some perhaps because of others. failures: each target's error, by name."""

    def __init__(self, failures: Mapping[str, Exception]) -> None:
        super().__init__("; ".join(f"{name}: {error}" for name, error in failures.items()))
        self.failures = dict(failures)


def on_all(targets: Sequence[Target], call: Callable[[Target], object]) -> dict[str, Exception]:
    """Run `call` on every target at the same time and return the failures by target name."""
    failures: dict[str, Exception] = {}

    def failure(target: Target) -> BaseException | None:
        try:
            call(target)
        except BaseException as error:  # noqa: BLE001 - sorted below, when all have ended
            return error
        return None

    if len(targets) <= 1:  # a thread costs as much as the copy of a small bucket
        errors = [failure(target) for target in targets]
    else:
        with ThreadPoolExecutor(len(targets), thread_name_prefix="target") as pool:
            errors = list(pool.map(failure, targets))
    for target, error in zip(targets, errors, strict=True):
        if isinstance(error, TargetError | TransferFailed | ValueError):
            failures[target.name] = error
        elif error is not None:
            raise error
    return failures


def raise_failures(failures: Mapping[str, Exception]) -> None:
    """Raise the only failure, or TargetsFailed for several."""
    if len(failures) == 1:
        raise next(iter(failures.values()))
    if failures:
        raise TargetsFailed(failures)
