"""vLLM as a rival: its worker in its own environment, driven over a pipe and stopped while it is idle."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .load import Load
from .runs import Run

_WORKER = Path(__file__).with_name("vllm_worker.py")
_SUPPRESSED = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")  # they refer to our environment
_END_SECONDS = 20.0  # time for a worker to end by itself
_GIB = 2**30


class VllmWorker:
    """A process of vLLM that has the model loaded.

    Between two loads its processes are stopped (SIGSTOP), so that they take no time from the measured engine.
    """

    def __init__(
        self, python: str, folder: str | Path, load: Load, *, dtype: str, threads: int, kv_bytes: int,
        prefix_cache: bool,
    ) -> None:  # fmt: skip
        """Start the worker and wait until the model is loaded.

        Raises ValueError with the end of its log when it does not start.
        """
        settings = {"model": str(folder), "dtype": dtype, "max_model_len": load.length, "max_num_seqs": load.batch,
                    "prefix_cache": prefix_cache}  # fmt: skip
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 -- closed by `close`
        try:
            self._process = subprocess.Popen(
                [python, str(_WORKER), json.dumps(settings)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, bufsize=1,
                env=_environment(python, threads, kv_bytes), cwd=tempfile.gettempdir(), start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            self._log.close()
            raise ValueError(f"--vllm-python: {error}") from error
        try:
            self.version = str(self._answer()["ready"])
        except BaseException:
            self.close()
            raise
        self._signal(signal.SIGSTOP)

    def run(self, load: Load, prompts: list[list[int]], repeat: int) -> Run:
        """Run one repeat. Raises ValueError with the end of the log when the worker ends."""
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "counts": load.counts(repeat)}) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        self._signal(signal.SIGSTOP)
        expected = load.num_new_tokens(repeat)
        assert answer["num_tokens"] == answer["num_logprobs"] == expected, (answer, expected)
        return Run(answer["seconds"], answer["seconds"], ())

    def close(self) -> None:
        """End the worker and all processes that it started."""
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._process.stdout.close()
        self._log.close()

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):  # all of them have ended
            os.killpg(self._process.pid, number)

    def _answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:
            answer: dict[str, float] = json.loads(line)
            return answer
        self._log.seek(0)
        log = self._log.read().decode(errors="replace")
        print(log, file=sys.stderr, flush=True)
        raise ValueError(f"vLLM's worker ended: {' | '.join(log.splitlines()[-3:]) or 'it wrote nothing'}")


@contextmanager
def unwinding_on_sigterm() -> Iterator[None]:
    """Make SIGTERM raise SystemExit, so that stopped processes do not remain after us. For the main thread."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _environment(python: str, threads: int, kv_bytes: int) -> dict[str, str]:
    """Build the environment: offline, our number of threads, each on its own core, settings of vLLM's manual."""
    cores = sorted(os.sched_getaffinity(0))
    if threads > len(cores):
        raise ValueError(f"--threads {threads}: vLLM binds each to a core, and there are {len(cores)}")
    environment = {name: value for name, value in os.environ.items() if name not in _SUPPRESSED}
    environment |= {
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores[:threads])),
        "VLLM_CPU_KVCACHE_SPACE": str(max(-(-kv_bytes // _GIB), 1)),
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "KMP_BLOCKTIME": "1",  # only Intel's OpenMP reads this and the barriers
        "KMP_TPAUSE": "0",
    }
    environment |= {f"KMP_{kind}_BARRIER_PATTERN": "dist,dist" for kind in ("FORKJOIN", "PLAIN", "REDUCTION")}
    intel_openmp = Path(python).parent.parent / "lib" / "libiomp5.so"
    if "LD_PRELOAD" not in environment and intel_openmp.exists():
        environment["LD_PRELOAD"] = str(intel_openmp)
    return environment
