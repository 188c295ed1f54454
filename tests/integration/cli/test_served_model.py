"""Tests of what `lockstep serve` prepares before it serves."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

SCRIPT = """
import json, sys
from lockstep.integration.cli.served_model import compile_kernels
from lockstep.integration.service import RolloutService
from lockstep.kernels.machine import native
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.request_options import RequestOptions
from lockstep.rollout.sampling_params import SamplingParams

service = RolloutService(Engine(sys.argv[1], EngineConfig(kv_cache="32 blocks")))
compile_kernels(service)
before = set(native._loaded)
for params in (SamplingParams(max_new_tokens=4, top_p=0.9, top_k=5, min_p=0.01, frequency_penalty=0.1, n=3),
               SamplingParams(max_new_tokens=4, temperature=0)):
    service.engine.generate([[3, 4, 5]], params, options=RequestOptions(0, 2, (1,)))
service.weights_checker("checksum")
print(json.dumps([sorted(before), sorted(set(native._loaded) - before)]))
service.close()
"""


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5", "lfm2", "mamba"])
def test_no_request_or_checksum_waits_for_a_compiler(make_model, tmp_path, family):
    make_model(family).save_pretrained(tmp_path / "model")
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "model")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    loaded, later = json.loads(run.stdout.splitlines()[-1])
    assert "sha256/sha256_tiles.cpp" in loaded
    assert later == []
