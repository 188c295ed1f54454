"""A small training job whose first rank serves, for an attack and for a comparison with an undisturbed run."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import time
from pathlib import Path

from lockstep.integration.grpo.results.run_log import read_metrics
from lockstep.tests.support.forked_ranks import free_port
from lockstep.tests.support.job_launcher import jobs, start_agent
from lockstep.tests.support.prepared_python import rank_of
from lockstep.tests.torture.own_server import ADMIN_KEY, API_KEY
from lockstep.tests.torture.wire import Address, Answer, Verdict, exchange, request_bytes

START_S, LONGEST_S = 180.0, 3600.0
STEPS_A_MINUTE = 120  # an undisturbed run takes a part of the minute, and one under attack about all of it
COMPARED = ("step", "weight_digest", "weight_version", "reward_mean", "loss", "logprob_gap", "eval_reward_mean")


class RankJob:
    """One run of the job under torchrun, with two ranks. As a context it ends the launcher."""

    def __init__(self, folder: Path, name: str, options: argparse.Namespace) -> None:
        self.folder, self.name = folder, name
        self.num_steps = max(6, int(STEPS_A_MINUTE * options.minutes))
        self.port = free_port()
        settings = (
            f"run.num_steps={self.num_steps} run.eval_every=20 run.checkpoint_every=20 run.seed={options.seed % 1000}"
        )
        if name == "storm":
            settings += f" http.port={self.port}"
        keys = {"LOCKSTEP_API_KEY": API_KEY, "LOCKSTEP_ADMIN_KEY": ADMIN_KEY}
        before = {key: os.environ.get(key) for key in keys}
        os.environ.update(keys)
        try:
            arguments = jobs({name: settings})
            self._agent = start_agent(folder, "--standalone", "--nproc-per-node", "2", *arguments, log=f"log-{name}")
        finally:
            for key, value in before.items():
                os.environ.pop(key) if value is None else os.environ.update({key: value})

    def __enter__(self) -> RankJob:
        return self

    def __exit__(self, *_: object) -> None:
        if self._agent.poll() is None:
            self._agent.terminate()  # a launcher ends its ranks
            self._agent.wait(120)

    @property
    def metrics(self) -> Path:
        return self.folder / "runs" / self.name / "metrics.jsonl"

    def digests(self) -> list[dict[str, object]]:
        """Return what each step must have in common with another run's."""
        return [{key: line.get(key) for key in COMPARED} for line in read_metrics(self.metrics)]

    @property
    def log(self) -> Path:
        return self.folder / f"log-{self.name}"

    def log_tail(self) -> str:
        """Return the last words of the ranks, before the launcher's own."""
        return self.log.read_text(errors="replace").partition("torch/distributed/elastic/multiprocessing")[0][-2000:]

    def wait_for_server(self) -> Address:
        """Wait until the first rank answers and the second step is done. Raises RuntimeError where the job ends."""
        address = Address(f"http://127.0.0.1:{self.port}", API_KEY)
        end, pause = time.monotonic() + START_S, 0.2
        while time.monotonic() < end and self._agent.poll() is None:
            if _health(address).status == 200 and len(read_metrics(self.metrics)) >= 2:
                return address
            try:
                self._agent.wait(pause)
            except subprocess.TimeoutExpired:
                continue
        raise RuntimeError("the job's server did not answer:\n" + self.log_tail())

    def rank_pid(self) -> int:
        """Return the process id of the first rank."""
        for pid in Path(f"/proc/{self._agent.pid}/task/{self._agent.pid}/children").read_text().split():
            if rank_of(int(pid)) == 0:
                return int(pid)
        raise RuntimeError("the launcher has no first rank")

    def is_nearly_over(self) -> bool:
        """Whether the job has only its last steps to do, or has ended: then its server ends as well."""
        return self._agent.poll() is not None or len(read_metrics(self.metrics)) >= self.num_steps - 2

    def finish(self, verdict: Verdict | None = None) -> None:
        """Wait for the end of the job. An exit code other than 0 is a violation, or without a verdict an error."""
        try:
            code = self._agent.wait(LONGEST_S)
        finally:
            self.__exit__()
        if code and verdict is None:
            raise RuntimeError(f"the undisturbed job ended with {code}:\n{self.log_tail()}")
        if code and verdict is not None:
            name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            verdict.add("crash", f"the job ended with {name}: {self.log_tail()}")

    def compare(self, calm: RankJob, verdict: Verdict) -> None:
        """Compare each step with the undisturbed run's."""
        expected, found = calm.digests(), self.digests()
        if found != expected:
            first = next((i for i, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b), len(found))
            verdict.add("altered", f"the job differs from step {first + 1} on: {found[first : first + 1]} is not "
                        f"{expected[first : first + 1]}")  # fmt: skip


def _health(address: Address) -> Answer:
    try:
        return exchange(address, request_bytes("GET", "/health"), 5)
    except OSError as error:
        return Answer(0, repr(error).encode())
