"""vLLM as a rival: its worker loads the model and runs our loads."""

from __future__ import annotations

import os
from pathlib import Path

from ..parts.load import Load
from ..parts.runs import Run
from .worker_process import WorkerProcess

_WORKER = Path(__file__).with_name("vllm_worker.py")
_GIB = 2**30


class VllmWorker:
    """A process of vLLM that has the model loaded."""

    def __init__(
        self, python: str, folder: str | Path, load: Load, *, dtype: str, threads: int, kv_bytes: int,
        prefix_cache: bool,
    ) -> None:  # fmt: skip
        """Start the worker and wait until the model is loaded. Raises ValueError as `WorkerProcess`."""
        settings = {"model": str(folder), "dtype": dtype, "max_model_len": load.length, "max_num_seqs": load.batch,
                    "prefix_cache": prefix_cache}  # fmt: skip
        environment = _environment(python, threads, kv_bytes)
        self.process = WorkerProcess("vLLM", python, "--vllm-python", _WORKER, settings, environment)

    @property
    def version(self) -> str:
        """The version of vLLM."""
        return self.process.version

    def run(self, load: Load, prompts: list[list[int]], repeat: int) -> Run:
        """Run one repeat. Raises ValueError with the end of the log when the worker ends."""
        answer = self.process.ask({"prompts": prompts, "counts": load.counts(repeat)})
        expected = load.num_new_tokens(repeat)
        assert answer["num_tokens"] == answer["num_logprobs"] == expected, (answer, expected)
        return Run(answer["seconds"], answer["seconds"], ())

    def close(self) -> None:
        """End the worker and all processes that it started."""
        self.process.close()


def _environment(python: str, threads: int, kv_bytes: int) -> dict[str, str]:
    """Return our number of threads, each on its own core, and settings of vLLM's manual."""
    cores = sorted(os.sched_getaffinity(0))
    if threads > len(cores):
        raise ValueError(f"--threads {threads}: vLLM binds each to a core, and there are {len(cores)}")
    environment = {
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores[:threads])),
        "VLLM_CPU_KVCACHE_SPACE": str(max(-(-kv_bytes // _GIB), 1)),
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "KMP_BLOCKTIME": "1",  # only Intel's OpenMP reads this and the barriers
        "KMP_TPAUSE": "0",
    }
    environment |= {f"KMP_{kind}_BARRIER_PATTERN": "dist,dist" for kind in ("FORKJOIN", "PLAIN", "REDUCTION")}
    intel_openmp = Path(python).parent.parent / "lib" / "libiomp5.so"
    if "LD_PRELOAD" not in os.environ and intel_openmp.exists():
        environment["LD_PRELOAD"] = str(intel_openmp)
    return environment
