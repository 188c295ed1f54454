"""The order in which waiting sequences are taken up, and the order in which running ones give way."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from .request import Request

Priority = tuple[float, int]  # smaller goes first; the second number breaks ties by arrival


def fcfs(request: Request) -> Priority:
    """First come, first served. A preempted request keeps its arrival, so it comes back before later ones."""
    return (request.arrival_time, request.arrival_index)


POLICIES: dict[str, Callable[[Request], Priority]] = {"fcfs": fcfs}


def find_policy(name: str) -> Callable[[Request], Priority]:
    """The policy of that name. Raises ValueError listing the known ones."""
    if name not in POLICIES:
        raise ValueError(f"policy must be one of {', '.join(sorted(POLICIES))}, not {name!r}")
    return POLICIES[name]


def pick_victim(candidates: Iterable[Request], policy: Callable[[Request], Priority]) -> Request:
    """Which running request gives its blocks back: lowest policy priority, then fewest generated tokens, then longest
    input. Changes nothing."""
    return max(candidates, key=lambda r: (policy(r)[0], -r.sequence.num_output_tokens, r.sequence.num_prompt_tokens))
