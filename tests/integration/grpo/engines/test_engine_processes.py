"""A job whose engines have processes of their own, one of which is killed or stopped: one line, and nothing stays."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from lockstep.integration.failures import EngineFailed
from lockstep.integration.grpo.main import main
from lockstep.tests.support import prepared_python
from lockstep.tests.support.callers import has_ended
from lockstep.tests.support.job_launcher import CONFIG, SHRUNK

SEPARATE = ["sync=tensor", "engines=separate", "weights.timeout_s=4"]
# With the second step's samples, rank 1 sends its engine a signal and notes the processes.
REWARD = """
import json, os, signal
from pathlib import Path
from lockstep.tests.support.prepared_python import is_engine

def engine() -> int:
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    [found] = [int(pid) for pid in children if is_engine(int(pid))]
    return found

def by_text(prompt, completion, answer):
    rank, log = os.environ["RANK"], Path("runs/arithmetic/metrics.jsonl")
    if log.exists() and log.read_text().count("\\n") == 1 and not Path(f"{rank}.json").exists():
        Path(f"{rank}.json").write_text(json.dumps([os.getpid(), engine()]))
        if rank == "1":
            os.kill(engine(), getattr(signal, os.environ["SENDS"]))
    return float(sum(map(ord, completion)) % 3)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sends", "says"),
    [
        ("SIGKILL", "was killed by SIGKILL, as the kernel does where memory runs out"),
        ("SIGSTOP", "is stopped, as by SIGSTOP"),
    ],
)
def test_a_lost_engine_ends_the_job_in_one_line_and_no_process_or_segment_stays(tmp_path, until, sends, says):
    (tmp_path / "rewards_of_test.py").write_text(REWARD)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m",
               "lockstep.integration.grpo", str(CONFIG), *SHRUNK, *SEPARATE]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", prepared_python.FORKS_ENGINES: "1", "SENDS": sends}
    with open(tmp_path / "log", "w") as output:
        process = prepared_python.Popen(command, cwd=tmp_path, stdout=output, stderr=output, env=environment)
    try:
        code = process.wait(150)
    finally:
        process.terminate()  # a launcher ends its ranks
        process.wait(60)
    log = (tmp_path / "log").read_text()
    (first, _), (_, lost) = pids = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    said = [line for line in log.splitlines() if "lockstep: error:" in line]
    assert code == 1 and len(said) == 1, log
    assert "engine-1: " in said[0] and f"its process {lost} {says}; start the same job with --resume" in said[0]
    assert log.count("Traceback") == 1 and "ChildFailedError" in log, log  # torchrun's own
    for pid in [pid for of_rank in pids for pid in of_rank]:
        until(lambda pid=pid: has_ended(pid))
    assert not list(Path("/dev/shm").glob(f"lockstep-{first}-*"))


def test_a_lost_engine_is_one_line_and_exit_code_1(tmp_path, monkeypatch, capsys):
    def fail(*arguments: object, **options: object) -> None:
        raise EngineFailed("engine-0: its process 7 is stopped;\nstart the same job")

    monkeypatch.setattr("lockstep.integration.grpo.main.run", fail)
    assert main([str(CONFIG), f"run.dir={tmp_path}"]) == 1
    assert capsys.readouterr().err == "lockstep: error: engine-0: its process 7 is stopped; start the same job\n"
