"""Settings of a service beside its engine's: how weights may come, and how long anybody waits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ServiceConfig:
    """Raises ValueError for a limit that is not positive."""

    allow_pickle: bool = True  # take the pickled payloads of existing frameworks, through a closed table of names
    max_pickle_bytes: int = 64 << 20  # of one such payload; it holds handles, not weights
    weight_timeout_s: float = 300.0  # deadline of every wait of an update that names none
    shared_memory_folder: Path = Path("/dev/shm")  # where segments of the shared-memory wire may lie

    def __post_init__(self) -> None:
        wrong = [
            f"{name} must be positive, not {getattr(self, name)!r}"
            for name in ("max_pickle_bytes", "weight_timeout_s")
            if not getattr(self, name) > 0
        ]
        if wrong:
            raise ValueError("; ".join(wrong))
