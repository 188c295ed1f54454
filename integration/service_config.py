"""Settings of a service beside its engine's: accepted forms of weights, time limits, and the names of memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ..rollout.loop.commands import check_timeout

MEMORY_TAGS = ("kv_cache", "weights", "cuda_graph")


@dataclass(frozen=True)
class ServiceConfig:
    """Settings of a service. Raises ValueError for a limit that is not positive."""

    allow_pickle: bool = True  # accept the pickled payloads of existing frameworks, through a closed table of names
    max_pickle_bytes: int = 64 << 20  # of one such payload; it holds handles, not weights
    weight_timeout_s: float = 300.0  # deadline of every wait of an update that gives none
    reload_on_resume: bool = True  # read released weights from their folder again, where they came from one
    lora_replaces: bool = False  # an adapter that is loaded takes the place of another one, which else is in its way
    shared_memory_folder: Path = Path("/dev/shm")  # where segments of shared memory must lie

    def __post_init__(self) -> None:
        wrong = [
            f"{name} must be positive, not {getattr(self, name)!r}"
            for name in ("max_pickle_bytes", "weight_timeout_s")
            if not getattr(self, name) > 0
        ]
        if wrong:
            raise ValueError("; ".join(wrong))

    def wait_s(self, timeout_s: float | None) -> float:
        """Return the deadline of an update's waits: the given one, else the service's. Raises ValueError for one that
        nothing can wait for."""
        if timeout_s is not None:
            check_timeout(timeout_s)
        return self.weight_timeout_s if timeout_s is None else timeout_s


def known_tags(tags: Iterable[str] | None) -> list[str]:
    """Return the known tags in the order of MEMORY_TAGS, each once; all of them for None or none. Raises ValueError
    naming every unknown one."""
    asked = set(tags or MEMORY_TAGS)
    if unknown := sorted(asked - set(MEMORY_TAGS)):
        raise ValueError(f"unknown memory tag: {', '.join(unknown)}; known: {', '.join(MEMORY_TAGS)}")
    return [tag for tag in MEMORY_TAGS if tag in asked]
