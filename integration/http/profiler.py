"""One profile at a time, as two Chrome traces: torch's of every operation, and the engine's own of its steps."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from ...rollout.engine import Engine
from .errors import Busy, HttpError

ACTIVITIES = {"CPU": ProfilerActivity.CPU, "GPU": ProfilerActivity.CUDA}


class Profiler:
    """Starts and stops torch's profiler between two steps of an engine. Any thread may call.

    torch records the thread that starts it, and threads that began after it; so the profile is of the process with
    `profile_all_threads`, which covers the engine's loop.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._profile: profile | None = None
        self._path = Path()
        self._has_trace = False  # whether the engine's trace was begun by us

    @property
    def is_running(self) -> bool:
        return self._profile is not None

    def start(
        self,
        folder: str | None = None,
        activities: Sequence[str] = ("CPU", "GPU"),
        *,
        prefix: str = "",
        profile_id: str | None = None,
        with_stack: bool = False,
        record_shapes: bool = False,
    ) -> Path:
        """Begin; returns the file of torch's that `stop` will write. The engine's lies beside it, as .engine.json,
        unless it writes one already. Raises Busy where one runs, ValueError for an unknown activity, OSError for a
        folder that cannot be made."""
        if unknown := sorted(set(activities) - set(ACTIVITIES)):
            raise ValueError(f"activities: unknown {', '.join(unknown)}; known: {', '.join(ACTIVITIES)}")
        chosen = [ACTIVITIES[name] for name in activities]
        if not torch.cuda.is_available():
            chosen = [ProfilerActivity.CPU]
        target = Path(folder or os.environ.get("SGLANG_TORCH_PROFILER_DIR") or tempfile.gettempdir())
        target.mkdir(parents=True, exist_ok=True)
        name = f"{prefix}{profile_id or time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.trace.json"
        with self._lock:
            if self._profile is not None:
                raise Busy("a profile is being taken: stop_profile first")
            config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
            running = profile(
                activities=chosen, with_stack=with_stack, record_shapes=record_shapes, experimental_config=config
            )
            self._has_trace = self._engine.start_trace(target / name.replace(".trace.json", ".engine.json"))
            self._engine.between_steps("start_profile", running.start)
            self._profile, self._path = running, target / name
            return self._path

    def stop(self) -> Path:
        """End and write; returns the file. Raises HttpError 400 where none runs."""
        with self._lock:
            running, self._profile = self._profile, None
            if running is None:
                raise HttpError(400, "no profile is being taken: start_profile first")
            self._engine.between_steps("stop_profile", running.stop)
            if self._has_trace:
                self._engine.stop_trace()
            running.export_chrome_trace(str(self._path))
            return self._path
