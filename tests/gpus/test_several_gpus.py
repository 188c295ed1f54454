"""Tests on several GPUs of one machine, each rank a process of torchrun: NCCL, CUDA IPC, engines divided over ranks.

They skip where there are fewer GPUs. docs/guides/gpus.md lists them with the commands that run them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lockstep.tests.support import prepared_python
from lockstep.tests.support.forked_ranks import free_port
from lockstep.tests.support.random_models import random_model
from lockstep.tests.support.vllm.own_python import end, needs_vllm, start
from lockstep.weight_sync.digests.model_digest import model_digest

NUM_GPUS = torch.cuda.device_count()
PROGRAM = """
import sys
import torch
import torch.distributed as dist
from lockstep.integration.ranks import process_group, this_rank
from lockstep.tests.gpus import several

ranks = this_rank(sys.argv[2])
with process_group(ranks, 120):
    getattr(several, sys.argv[1])(ranks)
    dist.barrier()
sys.stdout.write(f"rank {ranks.rank} is done\\n")
"""


def run(part: str, num_ranks: int, folder: Path, device: str = "cuda") -> None:
    script = folder / "ranks.py"
    script.write_text(PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    done = prepared_python.run(
        [*command, str(script), part, device], capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "NCCL_DEBUG": "WARN"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("is done") == num_ranks


def gpus(num: int) -> pytest.MarkDecorator:
    return pytest.mark.skipif(num > NUM_GPUS, reason=f"needs {num} CUDA devices, and there are {NUM_GPUS}")


BY_NUMBER = pytest.mark.parametrize("num", [pytest.param(2, marks=gpus(2)), pytest.param(8, marks=gpus(8))])


@pytest.mark.gpu
@BY_NUMBER
def test_a_weight_group_broadcasts_over_nccl(num: int, tmp_path: Path) -> None:
    run("broadcast", num, tmp_path)


@pytest.mark.gpu
@BY_NUMBER
def test_an_engine_divided_over_gpus_has_the_bits_of_one_gpu(num: int, tmp_path: Path) -> None:
    run("divided_engine", num, tmp_path)


@pytest.mark.gpu
@BY_NUMBER
def test_stages_over_gpus_have_the_bits_of_one_gpu(num: int, tmp_path: Path) -> None:
    run("staged_engine", num, tmp_path)


@pytest.mark.gpu
@gpus(2)
def test_a_tensor_arrives_by_handle_from_another_gpu(tmp_path: Path) -> None:
    run("handle_of_another_gpu", 2, tmp_path)


@pytest.mark.gpu
@BY_NUMBER
def test_ranks_meet_over_nccl_as_vllms_trainers_and_workers_do(num: int, tmp_path: Path) -> None:
    run("communicator_of_a_trainer", num, tmp_path)


@pytest.mark.gpu
@gpus(2)
@needs_vllm
@pytest.mark.parametrize("packed", ["plain", "packed"])
def test_vllms_own_trainer_sends_to_a_server_over_nccl(packed: str, tmp_path: Path) -> None:
    """The trainer on the first GPU, in vLLM's environment, the server on the second one."""
    httpx = pytest.importorskip("httpx")
    from lockstep.tests.integration.http.test_sequences import _url_of

    random_model("qwen3", torch.bfloat16).save_pretrained(tmp_path / "model")
    newer = {name: p.detach() * 0.5 for name, p in random_model("qwen3", torch.bfloat16).named_parameters()}
    save_file(newer, tmp_path / "newer.safetensors")
    command = [sys.executable, "-m", "lockstep.integration.cli", "serve", "--model", str(tmp_path / "model"),
               "--port", "0", "--engine", "kv_cache=64 blocks", "device=cuda"]  # fmt: skip
    server = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env=os.environ | {"CUDA_VISIBLE_DEVICES": "1"}
    )
    try:
        url = _url_of(server)
        httpx.post(f"{url}/pause?mode=keep", timeout=60).raise_for_status()
        trainer = start("send", free_port(), url, tmp_path / "newer.safetensors", packed, CUDA_VISIBLE_DEVICES="0")
        _, errors = end(trainer, 240)
        assert trainer.returncode == 0, errors[-4000:]
        assert httpx.get(f"{url}/model_info", timeout=60).json()["weight_digest"] == model_digest(newer.items())
    finally:
        server.terminate()
        server.communicate(timeout=60)


@pytest.mark.slow
@pytest.mark.parametrize("part", ["broadcast", "communicator_of_a_trainer", "divided_engine", "staged_engine"])
def test_what_the_ranks_do_holds_on_a_cpu(part: str, tmp_path: Path) -> None:
    run(part, 2, tmp_path, "cpu")


def test_the_guide_lists_each_of_these_tests() -> None:
    guide = (Path(__file__).resolve().parents[2] / "docs/guides/gpus.md").read_text()
    tests = [value for name, value in globals().items() if name.startswith("test_")]
    on_gpus = [t.__name__ for t in tests if any(mark.name == "gpu" for mark in getattr(t, "pytestmark", ()))]
    assert len(on_gpus) == 6 and [name for name in on_gpus if name not in guide] == []
