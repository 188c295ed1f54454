"""Tests of vLLM's update of weights in four calls, with real tensors and a real group, by a trainer in this process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file

from lockstep.tests.integration.http.test_sequences import _url_of
from lockstep.tests.integration.http.vllm.weight_trainer import Named, Trainer, info_of, model_of, payloads
from lockstep.tests.support import prepared_python
from lockstep.tests.support.random_models import random_model
from lockstep.weight_sync.digests.model_digest import model_digest

pytestmark = pytest.mark.slow  # a server of its own, and groups

ASK = {"token_ids": [5, 17, 9], "sampling_params": {"max_tokens": 8, "seed": 3, "ignore_eos": True, "logprobs": 0}}


def digest_of(tensors: Named) -> str:
    return model_digest(tensors)


@pytest.fixture(scope="module")
def url(tmp_path_factory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("model")
    random_model("qwen3").save_pretrained(folder)
    with served(folder) as url:
        yield url


@contextmanager
def served(folder: Path) -> Iterator[str]:
    torch.set_num_threads(1)
    command = [sys.executable, "-m", "lockstep.integration.cli", "serve", "--model", str(folder), "--port", "0",
               "--engine", "kv_cache=96 blocks", "--admin-api-key", "admin"]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = prepared_python.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        yield _url_of(process)
    finally:
        process.terminate()
        process.communicate(timeout=30)


def answer(trainer: Trainer) -> dict:
    [choice] = trainer.post("/inference/v1/generate", ASK)["choices"]
    return choice


@pytest.mark.parametrize("buffer_bytes", [None, 1, 20_000, 1 << 30])
def test_four_calls_publish_new_weights_and_nothing_before_the_last(url, buffer_bytes):
    packed = {} if buffer_bytes is None else {"packed": True, "packed_buffer_size_bytes": buffer_bytes}
    trainer = Trainer(url, **packed)
    step = 1 if buffer_bytes is None else buffer_bytes % 97
    newer = model_of(step)
    before = trainer.post("/model_info")["weight_version"]
    trainer.post("/pause?mode=keep&clear_cache=false")
    assert trainer.post("/start_weight_update") == {"message": "Weight update started"}
    for part in (newer[:5], newer[5:]):
        assert trainer.send(part, buffer_bytes).json() == {"message": "Weights updated"}
        assert trainer.client.get("/weight_info").json() == {"weight_version": before}
    finished = trainer.post("/finish_weight_update", {"weight_version": f"step-{step}"})
    assert finished == {"message": "Weight update finished"}
    trainer.post("/resume")
    info = trainer.post("/model_info")
    assert (info["weight_version"], info["weight_digest"]) == (f"step-{step}", digest_of(newer))
    assert answer(trainer)["weight_versions"] == [{"version": f"step-{step}", "start": 0, "end": 8}]
    trainer.close()


def test_an_update_that_names_no_tensors_has_those_of_the_one_before(url):
    """Trainers of vLLM 0.33 send names, dtypes and shapes only where they have changed."""
    trainer = Trainer(url)
    none = {"names": [], "dtype_names": [], "shapes": []}
    for step, told in ((61, info_of(model_of(61))), (62, none), (63, {})):
        trainer.post("/start_weight_update")
        waiting = trainer.begin("/update_weights", {"update_info": told})
        trainer.broadcast(payloads(model_of(step)))
        assert waiting().status_code == 200
        trainer.post("/finish_weight_update", {"weight_version": str(step)})
        info = trainer.post("/model_info")
        assert (info["weight_version"], info["weight_digest"]) == (str(step), digest_of(model_of(step)))
    trainer.close()
    trainer = Trainer(url)  # a new one has told none
    trainer.post("/start_weight_update")
    refused = trainer.post("/update_weights", {"update_info": none}, 400)["error"]
    assert refused["param"] == "update_info.names"
    trainer.post("/finish_weight_update", status=400)  # the update is over
    assert trainer.post("/model_info")["weight_version"] == "63"
    trainer.leave()


def test_an_update_that_fails_leaves_no_trace(url):
    trainer = Trainer(url)
    trainer.post("/finish_weight_update", status=400)
    before, expected = trainer.post("/model_info"), answer(trainer)
    newer = model_of(50)
    trainer.post("/start_weight_update")
    assert trainer.send(newer[:4]).status_code == 200
    wrong = info_of(newer[4:6])
    wrong["shapes"][1] = [3, 3]
    refused = trainer.post("/update_weights", {"update_info": wrong}, 400)["error"]
    assert set(refused) == {"message", "type", "param", "code"}
    trainer.post("/update_weights", {"update_info": info_of(newer[:1])}, 400)  # the update is over
    trainer.post("/finish_weight_update", status=400)
    after = trainer.post("/model_info")
    assert (after["weight_version"], after["epoch"]) == (before["weight_version"], before["epoch"])
    assert answer(trainer) == expected
    trainer.leave()
    trainer.join()  # the group was broken: broadcasts could have been under way
    trainer.post("/start_weight_update")
    assert trainer.send(newer).status_code == 200
    trainer.post("/finish_weight_update", {"weight_version": "50"})
    assert trainer.post("/model_info")["weight_digest"] == digest_of(newer)
    trainer.close()


def test_calls_out_of_order_and_wrong_fields_are_refused(url):
    trainer = Trainer(url)
    tensors = model_of(1)[:1]
    assert "start_weight_update" in trainer.post("/update_weights", {"update_info": info_of(tensors)}, 400)["error"][
        "message"
    ]  # fmt: skip
    trainer.post("/start_weight_update")
    trainer.post("/start_weight_update", status=400)
    trainer.post("/shutdown_weight_transfer_engine", status=400)
    info = info_of(tensors)
    for wrong, param in (
        ({}, "update_info"),
        ({"update_info": []}, "update_info"),
        ({"update_info": {**info, "shapes": []}}, "update_info"),
        ({"update_info": {**info, "dtype_names": ["float17"]}}, "update_info.dtype_names"),
        ({"update_info": [info, {**info, "names": ["other"]}]}, "update_info"),
    ):
        refused = trainer.post("/update_weights", wrong, 400)["error"]
        assert refused["param"].startswith(param), refused
    trainer.post("/finish_weight_update", status=400)  # the first of them has ended the update
    user = httpx.post(f"{url}/start_weight_update", headers={"Authorization": "Bearer nobody"})
    assert user.status_code == 403
    trainer.close()
    base = {"rank_offset": 1, "world_size": 2}
    for info, param in (
        (base, "init_info.master_address"),
        ({"world_size": 2}, "init_info.master_address"),
        ({**base, "nccl_unique_id_b64": "AAAA"}, "init_info.nccl_unique_id_b64"),
        ({**base, "master_address": "127.0.0.1"}, "init_info.master_port"),
    ):
        answer = httpx.post(f"{url}/init_weight_transfer_engine", json={"init_info": info},
                            headers={"Authorization": "Bearer admin"})  # fmt: skip
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_tensors_have_the_names_of_the_checkpoint(tmp_path):
    """An update of a mixture of experts, with a matrix for each expert: what lacks is named, and may follow."""
    random_model("qwen3_moe").save_pretrained(tmp_path / "old")
    newer = random_model("qwen3_moe")
    for parameter in newer.parameters():
        parameter.data.mul_(0.5)
    newer.save_pretrained(tmp_path / "new")
    tensors = sorted(load_file(tmp_path / "new" / "model.safetensors").items())
    expert = "model.layers.1.mlp.experts.3.down_proj.weight"
    with served(tmp_path / "old") as url:
        trainer = Trainer(url, packed=True, packed_buffer_size_bytes=50_000)
        before = trainer.post("/model_info")
        trainer.post("/start_weight_update")
        assert trainer.send([pair for pair in tensors if pair[0] != expert], 50_000).status_code == 200
        refused = trainer.post("/finish_weight_update", {"weight_version": "1"}, 400)["error"]["message"]
        assert f"1 tensors were not wholly written: {expert}" in refused
        assert trainer.post("/model_info")["weight_version"] == before["weight_version"]
        assert trainer.send([pair for pair in tensors if pair[0] == expert], 50_000).status_code == 200
        trainer.post("/finish_weight_update", {"weight_version": "2"})
        info = trainer.post("/model_info")
        assert (info["weight_version"], info["weight_digest"]) == ("2", digest_of(list(newer.named_parameters())))
        trainer.close()
