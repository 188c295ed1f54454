"""Faults at every message of vLLM's weight updates: the weights are the old ones or the new ones, and nothing hangs.

The server is a process of its own. After each fault its digest is that of one training step, `/weight_checker` agrees
with it, generation gives the tokens and log-probabilities of an engine with these weights, and a whole update lands.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from lockstep.tests.integration.http.test_sequences import _url_of
from lockstep.tests.integration.http.vllm.weight_faults import ALL, QUICK, Fault
from lockstep.tests.integration.http.vllm.weight_stage import References, Stage
from lockstep.tests.support import prepared_python
from lockstep.tests.support.random_models import random_model

IDLE_S, DEADLINE_S = 1.5, 8.0  # of the server's settings: without a call, and of a wait inside one
CONFIG = """
[http]
port = 0
admin_api_key = "admin"
update_idle_s = {idle}
[service]
weight_timeout_s = {deadline}
[engine]
kv_cache = "96 blocks"
max_num_seqs = 4
"""


@pytest.fixture(scope="module")
def stage(tmp_path_factory) -> Iterator[Stage]:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("model")
    random_model("qwen3").save_pretrained(folder / "model")
    (folder / "server.toml").write_text(CONFIG.format(idle=IDLE_S, deadline=DEADLINE_S))
    command = [sys.executable, "-m", "lockstep.integration.cli", "serve", "--model", str(folder / "model"),
               "--config", str(folder / "server.toml")]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = prepared_python.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    references = References(str(folder / "model"))
    stage = Stage(_url_of(process), references)
    try:
        stage.land()  # a server knows the digest of weights that it was sent
        yield stage
        assert process.poll() is None, "the server has ended"
    finally:
        stage.client.close()
        references.close()
        process.terminate()
        process.communicate(timeout=30)


def _run(stage: Stage, fault: Fault) -> None:
    stage.next()
    stage.check(fault(stage))
    stage.next()
    stage.land()
    stage.check("new")


def test_a_handful_of_faults_leave_old_weights_or_new_and_the_next_update_lands(stage):
    for name, fault in QUICK.items():
        try:
            _run(stage, fault)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ALL if name not in QUICK])
def test_every_fault_leaves_old_weights_or_new_and_the_next_update_lands(stage, name):
    _run(stage, ALL[name])
