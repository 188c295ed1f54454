"""Tests of the rival process of `lockstep bench rollout --against vllm`, with a small stand-in for vLLM."""

import json
import os
import signal
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from lockstep.integration.bench.parts.load import Load
from lockstep.integration.bench.rivals import vllm_process, worker_process
from lockstep.integration.cli import main as cli

LOAD = Load(batch=4, prompt_tokens=6, new_tokens=3, group=2, lengths="lognormal")

# The part of vLLM that the worker uses. It answers at once and records its calls.
VLLM = """
import json, os, pathlib, sys
from types import SimpleNamespace

__version__ = "0.0-stand-in"
SamplingParams = lambda **settings: SimpleNamespace(**settings)
notes = pathlib.Path(__file__).with_name("notes.jsonl")

class LLM:
    def __init__(self, **settings):
        print("loading, as vLLM does, to standard output")
        if settings["max_model_len"] > 1000:
            sys.exit("ValueError: too long for me")
        names = ("OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_KVCACHE_SPACE", "PYTHONPATH")
        environment = {name: os.environ.get(name) for name in names}
        notes.write_text(json.dumps([settings, environment]) + "\\n")

    def generate(self, prompts, params, use_tqdm):
        with notes.open("a") as file:
            print(json.dumps([prompts, [vars(one) for one in params]]), file=file)
        tokens = [list(range(one.max_tokens)) for one in params]
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=ids, logprobs=ids)]) for ids in tokens]
"""


@pytest.fixture
def python(tmp_path, monkeypatch):
    """Make a Python whose `vllm` is the stand-in."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "vllm.py").write_text(VLLM)
    executable = tmp_path / "bin" / "python"
    executable.write_text(f'#!/bin/sh\nPYTHONPATH="{tmp_path}" exec "{sys.executable}" "$@"\n')
    executable.chmod(0o755)
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", "") or "/nowhere")
    return executable


def start(python, load=LOAD):
    return vllm_process.VllmWorker(
        str(python), "/models/m", load, dtype="bfloat16", threads=1, kv_bytes=2**30 + 1, prefix_cache=True
    )


def state_of(worker):
    return Path(f"/proc/{worker.process._process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


def test_the_worker_runs_the_same_load_and_is_stopped_in_between(python, tmp_path):
    worker = start(python)
    assert worker.version == "0.0-stand-in"
    prompts = LOAD.prompts(100, 0)
    for _ in range(2):
        os.waitid(os.P_PID, worker.process._process.pid, os.WSTOPPED | os.WNOWAIT)
        assert state_of(worker) == "T"
        assert worker.run(LOAD, prompts, 0).seconds > 0
    worker.close()
    assert worker.process._process.returncode == 0
    (settings, environment), (asked, params), _ = map(json.loads, (tmp_path / "notes.jsonl").read_text().splitlines())
    assert settings["model"] == "/models/m" and settings["enable_prefix_caching"] is True
    assert settings["max_model_len"] == LOAD.length and settings["max_num_seqs"] == 4
    assert environment["OMP_NUM_THREADS"] == "1" and environment["VLLM_CPU_KVCACHE_SPACE"] == "2"
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == str(min(os.sched_getaffinity(0)))
    assert environment["PYTHONPATH"] == str(tmp_path)  # ours does not reach it
    assert [one["prompt_token_ids"] for one in asked] == prompts
    assert [one["max_tokens"] for one in params] == LOAD.counts(0)
    assert {"temperature": 1.0, "logprobs": 0, "ignore_eos": True}.items() <= params[0].items()


def test_a_worker_that_does_not_come_up_is_told_with_the_end_of_its_log(python):
    with pytest.raises(ValueError, match=r"vLLM's worker ended: .*too long for me"):
        start(python, Load(1, 900, 200))
    with pytest.raises(ValueError, match=r"--vllm-python: .*No such file"):
        start(python.with_name("missing"))


def test_the_log_is_read_after_a_worker_has_ended(tmp_path):
    script = tmp_path / "worker.py"
    script.write_text("import os, sys\nos.close(1)\nsys.stdin.read()\nos.write(2, b'the last word')\n")
    with pytest.raises(ValueError, match="the rival's worker ended: the last word"):
        worker_process.WorkerProcess("the rival", sys.executable, "--python", script, {}, {})


def test_a_benchmark_that_is_terminated_leaves_no_stopped_worker_behind(python):
    workers = []

    def benchmark():
        with ExitStack() as stack:
            stack.enter_context(worker_process.unwinding_on_sigterm())
            workers.append(start(python))
            stack.callback(workers[0].close)
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit):
        benchmark()
    assert workers[0].process._process.returncode is not None
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_benchmark_reports_both_engines_and_their_ratio(python, capsys):
    arguments = ["--model", "tiny", "--batch", "2", "--prompt-tokens", "8", "--new-tokens", "3", "--repeats", "1"]
    arguments += ["--threads", "1", "--against", "vllm", "--json"]
    assert cli.main(["bench", "rollout", *arguments, "--vllm-python", str(python)]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["invariant"] is True
    assert min(report["ours_tok_s"], report["vllm_tok_s"], report["ratio_vllm"]) > 0
    assert set(report["spread"]) == {"ours_tok_s", "vllm_tok_s", "ratio_vllm"}
    assert cli.main(["bench", "rollout", *arguments]) == 2
