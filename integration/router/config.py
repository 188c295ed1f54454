"""Settings of the router."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args
from urllib.parse import urlsplit

import httpx

from ..http.edge.config import HttpConfig

_POSITIVE = (
    "health_interval_s", "health_timeout_s", "dead_after", "lock_limit_s", "admin_timeout_s", "queue_timeout_s",
    "request_timeout_s", "connect_timeout_s", "drain_timeout_s", "max_attempts", "max_prefixes", "max_held_requests",
    "max_body_bytes", "max_open_body_bytes", "max_kept_answer_bytes", "max_admin_body_bytes", "max_admin_answer_bytes",
)  # fmt: skip


MovedStreams = Literal["proven", "trusted", "off"]


@dataclass(frozen=True)
class RouterConfig:
    """Settings of one router. Raises ValueError naming every wrong setting."""

    workers: tuple[str, ...] = ()  # URLs of the workers; more may be added later
    http: HttpConfig = field(default_factory=lambda: HttpConfig(port=30080))  # address, keys and limits of its server
    journal: Path | None = None  # file of the update in progress, beside two more; None: in the state folder, by port
    forget_served: bool = False  # at this start, forget which weights the fleet served last: workers serve with any
    health_interval_s: float = 2.0  # time between two probes of a worker
    health_timeout_s: float = 5.0  # longest wait for a probe
    dead_after: int = 3  # failed probes in a row after which a worker is dead; one refused connection is enough
    connect_timeout_s: float = 5.0  # longest time to open a connection to a worker
    queue_timeout_s: float = 60.0  # longest wait for a worker: while workers start, or an update holds them
    max_held_requests: int = 10_000  # requests that wait for a worker; further ones get 503
    request_timeout_s: float = 3600.0  # longest time of a generation, all attempts together
    max_attempts: int = 3  # workers that one request may reach, so that a request that kills workers does not kill all
    moved_streams: MovedStreams = "proven"  # a stream goes on elsewhere: "proven" draws its tokens again, "trusted" not
    hedge_after_s: float | None = None  # a request without output for so long goes to a second worker too; None: never
    affinity_slack: int = 8  # a worker that knows the prompt may run this many sequences more than the least loaded
    max_prefixes: int = 1 << 16  # number of pieces of prompts whose workers are remembered
    lock_limit_s: float = 300.0  # longest wait of a pause, an update or a group call for the one before it
    admin_timeout_s: float = 300.0  # longest time of an administrative call without a timeout_s
    allow_mixed_versions: bool = False  # also route to a worker that returned with other weights than the rest
    drain_timeout_s: float = 30.0  # seconds in which open requests may end after SIGTERM; then they end with an error
    max_body_bytes: int = 32 << 20  # largest body of a generation request
    max_open_body_bytes: int = 1 << 30  # bodies of all open generation requests and reports; beyond it 503
    max_kept_answer_bytes: int = 256 << 20  # answers kept until they are complete, together; more is passed on in parts
    max_admin_body_bytes: int = 1 << 30  # largest body of an administrative call
    max_admin_answer_bytes: int = 256 << 20  # largest answer of a worker to an administrative call

    def __post_init__(self) -> None:
        settings = {name: getattr(self, name) for name in _POSITIVE}
        wrong = [f"{name} must be positive, not {value!r}" for name, value in settings.items() if not value > 0]
        if self.moved_streams not in get_args(MovedStreams):
            wrong.append(
                f"moved_streams must be one of {', '.join(get_args(MovedStreams))}, not {self.moved_streams!r}"
            )
        if self.hedge_after_s is not None and not self.hedge_after_s > 0:
            wrong.append(f"hedge_after_s must be positive, not {self.hedge_after_s!r}")
        if self.affinity_slack < 0:
            wrong.append(f"affinity_slack must not be negative: {self.affinity_slack}")
        urls = []
        for url in self.workers:
            try:
                urls.append(worker_url(url))
            except ValueError as error:
                wrong.append(str(error))
        if wrong:
            raise ValueError("; ".join(wrong))
        object.__setattr__(self, "workers", tuple(dict.fromkeys(urls)))

    @property
    def journal_path(self) -> Path:
        """The path of the journal."""
        if self.journal is not None:
            return self.journal
        state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
        return Path(state) / "lockstep" / f"router-{self.http.port}.json"

    @property
    def roster_path(self) -> Path | None:
        """The file of the changes to the workers, beside the journal. None for a router on any free port without a
        named journal, because a later router like it is not the same one."""
        return self._beside("workers")

    @property
    def served_path(self) -> Path | None:
        """The file of the weights that the fleet last served, beside the journal. It counts for a router with one of
        the workers that served them. None as `roster_path`."""
        return self._beside("served")

    def _beside(self, name: str) -> Path | None:
        if self.journal is None and self.http.port == 0:
            return None
        return self.journal_path.with_name(f"{self.journal_path.name}.{name}.json")


def worker_url(text: object) -> str:
    """Normalise a worker's URL to scheme, host and port. Raises ValueError for anything else."""
    if not isinstance(text, str):
        raise ValueError(f"url must be a text, not {text!r}")
    try:
        parts = urlsplit(text.strip() if "//" in text else f"http://{text.strip()}")
        port = parts.port
    except ValueError as error:
        raise ValueError(f"url {text!r}: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or any(map(str.isspace, parts.hostname)):
        raise ValueError(f"url {text!r} must be http://HOST:PORT")
    if parts.username is not None or parts.path not in ("", "/") or parts.query or parts.fragment:
        raise ValueError(f"url {text!r} must be http://HOST:PORT and nothing more")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    url = f"{parts.scheme}://{host}" + (f":{port}" if port is not None else "")
    try:
        httpx.URL(url)  # the HTTP client must accept it
    except httpx.InvalidURL as error:
        raise ValueError(f"url {text!r}: {error}") from None
    return url
