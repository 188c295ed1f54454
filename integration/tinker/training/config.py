"""Settings of a server of the Tinker API."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

_COUNTS = ("max_lora_rank", "max_models", "max_snapshots", "max_open_samples", "max_requests_ahead")
_SECONDS = ("session_timeout_s", "poll_s", "result_s", "gap_s")


@dataclass(frozen=True)
class TinkerConfig:
    """Settings of the server besides its engine's and its HTTP server's. Raises ValueError naming each wrong one."""

    model_name: str  # by which clients name the base model; a folder's path lets them find its tokenizer
    checkpoints: Path  # folder of the checkpoints of all training runs
    max_lora_rank: int = 64
    max_models: int = 16  # adapters in training at a time; beyond: 429, which clients wait for
    max_snapshots: int = 64  # adapters kept for sampling; the one not used for longest goes first
    max_open_samples: int = (
        1 << 15
    )  # samples and other requests whose answers are not there or not fetched; beyond: 429
    max_requests_ahead: int = 1024  # requests of a model that may wait for one with a smaller seq_id
    session_timeout_s: float = 300.0  # a session without a heartbeat for so long ends; the SDK sends one each 10 s
    poll_s: float = 20.0  # a question for an answer waits so long for it; the SDK gives up after 45 s and asks again
    result_s: float = 60.0  # a fetched answer is kept so long, for a client that has not received it
    gap_s: float = 300.0  # requests of a model that wait so long for one with a smaller seq_id fail
    microbatch_bytes: float = 2 * 2.0**30  # of the activations of a micro-batch; a larger datum is one by itself

    def __post_init__(self) -> None:
        wrong = [
            f"{name} must be a whole number of 1 or more, not {value!r}"
            for name in _COUNTS
            if type(value := getattr(self, name)) is not int or value < 1
        ]
        wrong += [
            f"{name} must be a positive number, not {value!r}"
            for name in (*_SECONDS, "microbatch_bytes")
            if type(value := getattr(self, name)) not in (int, float) or not 0 < value < math.inf
        ]
        if not self.model_name:
            wrong.append("model_name must not be empty")
        if wrong:
            raise ValueError("; ".join(wrong))
