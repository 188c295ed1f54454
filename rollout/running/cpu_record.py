"""The calls of a recorded step on a CPU, and their replay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any

from torch import Tensor

from ...kernels.machine.playlist import Call, Playlist, can_play


@dataclass
class Record:
    """A recorded step."""

    calls: list[Call]  # in their order; a true result is an error
    results: Sequence[Tensor]
    pieces: list[Tensor]  # the memory whose addresses the calls use
    plays: list[Callable[[], Any]] = field(init=False)  # the same calls, kernels that follow one another as one

    def __post_init__(self) -> None:
        self.plays = joined(self.calls)

    def replay(self) -> Sequence[Tensor] | None:
        """Replay the calls and return the results; None if a call refuses its input. The plain call explains why."""
        for play in self.plays:
            if play():
                return None
        return self.results

    def replay_apart(self) -> Sequence[Tensor] | None:
        """Replay the calls and return copies of the results."""
        results = self.replay()
        return None if results is None else [result.clone() for result in results]


class Keeping:
    """A native function with a reference to the memory that its arguments point into."""

    def __init__(self, function: Callable[..., Any], kept: object) -> None:
        self.function, self._kept = function, kept
        self.__name__ = function.__name__

    def __call__(self, *arguments: Any) -> Any:
        return self.function(*arguments)


def joined(calls: Sequence[Call]) -> list[Callable[[], Any]]:
    """Return functions that make the calls in their order; native ones that follow one another are one function."""
    found: list[Callable[[], Any]] = []
    for is_played, run in groupby(calls, lambda call: can_play(plain(call[0]))):
        if is_played:
            found.append(Playlist([(plain(function), arguments) for function, arguments in run]))
        else:
            found += [partial(function, *arguments) if arguments else function for function, arguments in run]
    return found


def plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function inside a `Keeping`, or the function itself."""
    return function.function if isinstance(function, Keeping) else function
