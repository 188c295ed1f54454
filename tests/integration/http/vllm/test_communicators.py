"""Updates by trainers that join as vLLM's own do: handshake, four calls and faults over HTTP, with gloo for NCCL."""

from __future__ import annotations

import base64
import sys
import time
from collections.abc import Iterator

import httpx
import pytest
import torch

from lockstep.integration.http.edge.config import HttpConfig
from lockstep.integration.http.edge.errors import BadField
from lockstep.integration.http.server import serve_in_background
from lockstep.integration.http.vllm.transfers import Broadcasts, Handles, InitInfo, Place, way_of
from lockstep.integration.push.http_target import HttpTarget
from lockstep.integration.push.pusher import WeightPusher
from lockstep.integration.service import RolloutService
from lockstep.integration.service_config import ServiceConfig
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.tests.integration.http.vllm.communicator_trainer import CommunicatorTrainer
from lockstep.tests.integration.http.vllm.weight_trainer import KEY, PATIENCE, info_of, model_of
from lockstep.tests.support import prepared_python
from lockstep.tests.support.callers import submit, wait_until
from lockstep.tests.support.random_models import random_model
from lockstep.tests.support.vllm.trainer import HOST, GlooCommunicators, VllmTrainer, id_of
from lockstep.weight_sync.digests.model_digest import model_digest
from lockstep.weight_sync.transports.vllm import VllmTransport

WAIT_S = 4.0  # of the servers: the longest wait of a call for weights
ASK = {"token_ids": [5, 17, 9], "sampling_params": {"max_tokens": 8, "seed": 3, "ignore_eos": True, "logprobs": 0}}


@pytest.fixture(scope="module")
def urls(tmp_path_factory) -> Iterator[list[str]]:
    """Serve two engines of the same weights, which join trainers as if their models were on GPUs."""
    torch.set_num_threads(1)
    folder = str(tmp_path_factory.mktemp("model"))
    random_model("qwen3").save_pretrained(folder)
    servers, services = [], []
    for _ in range(2):
        engine = Engine(folder, EngineConfig(kv_cache="32 blocks", max_num_seqs=4))
        services.append(RolloutService(engine, ServiceConfig(weight_timeout_s=WAIT_S)))
        services[-1].groups.communicators = GlooCommunicators()
        servers.append(serve_in_background(services[-1], HttpConfig(port=0, admin_api_key="admin")))
    yield [server.url for server in servers]
    for server, service in zip(servers, services, strict=True):
        server.close()
        service.close()


@pytest.fixture
def url(urls: list[str]) -> str:
    return urls[0]


def post(url: str, path: str, body: dict | None = None) -> httpx.Response:
    return httpx.post(url + path, json=body or {}, headers=KEY, timeout=PATIENCE)


def standing(url: str) -> tuple[str, str]:
    info = post(url, "/model_info").json()
    return info["weight_version"], info["weight_digest"]


def answer(url: str) -> dict:
    [choice] = post(url, "/inference/v1/generate", ASK).json()["choices"]
    return choice


def land(url: str, step: int, buffer_bytes: int | None = None, **options: object) -> None:
    """Bring the weights of a step, from init to shutdown."""
    packed = {} if buffer_bytes is None else {"packed": True, "packed_buffer_size_bytes": buffer_bytes}
    trainer, newer = CommunicatorTrainer(url, **packed, **options), model_of(step)
    trainer.post("/pause?mode=keep")
    trainer.post("/start_weight_update")
    before = standing(url)[0]
    for part in (newer[:5], newer[5:]):
        assert trainer.send(part, buffer_bytes).json() == {"message": "Weights updated"}
        assert trainer.client.get("/weight_info").json() == {"weight_version": before}
    trainer.post("/finish_weight_update", {"weight_version": f"step-{step}"})
    trainer.post("/resume")
    trainer.close()
    assert standing(url) == (f"step-{step}", model_digest(newer))


@pytest.mark.parametrize(
    ("buffer_bytes", "by_id"), [(None, False), (20_000, False), (1 << 30, True)], ids=["plain", "packed", "id"]
)
def test_four_calls_of_a_trainer_of_vllm_publish_new_weights(url, buffer_bytes, by_id):
    step = 3 + (buffer_bytes or 0) % 97
    land(url, step, buffer_bytes, by_id=by_id)
    assert answer(url)["weight_versions"] == [{"version": f"step-{step}", "start": 0, "end": 8}]


def test_a_trainer_that_dies_between_two_broadcasts_leaves_no_trace(url):
    land(url, 1)
    before, expected = standing(url), answer(url)
    command = [sys.executable, "-m", "lockstep.tests.integration.http.vllm.communicator_trainer", url, "2", "3"]
    died = prepared_python.run(command, timeout=PATIENCE)
    assert died.returncode < 0
    wait_until(lambda: httpx.get(url + "/state", headers=KEY).json()["weight_update"]["state"] != "open", PATIENCE)
    post(url, "/resume")
    assert (standing(url), answer(url)) == (before, expected)
    land(url, 2)


def test_a_trainer_that_stops_sending_is_named_and_its_receive_ends(url):
    land(url, 1)
    before = standing(url)
    trainer, newer = CommunicatorTrainer(url), model_of(4)
    trainer.post("/pause?mode=keep")
    trainer.post("/start_weight_update")
    started = time.monotonic()
    refused = trainer.post("/update_weights", {"update_info": info_of(newer)}, 400)["error"]["message"]
    assert time.monotonic() - started < 3 * WAIT_S
    assert f"broadcast 1 of {len(newer)}, tensor {newer[0][0]}" in refused
    trainer.leave()
    assert standing(url) == before
    land(url, 4)


def test_a_trainer_that_never_says_its_id_is_named_and_another_one_joins(url):
    trainer = VllmTrainer()
    joining = submit(post, url, "/init_weight_transfer_engine", {"init_info": trainer.init_info})
    trainer.open()
    failed = joining.result(timeout=PATIENCE)
    assert failed.status_code == 400, failed.text
    message = failed.json()["error"]["message"]
    assert f"{HOST}:{trainer.port}" in message and "has not set its NCCL id" in message
    assert message.endswith("ranks that had not arrived: 0")
    trainer.close()
    land(url, 5)


def test_a_trainer_that_inits_again_ends_the_join_before_it(url):
    first = VllmTrainer()
    joining = submit(post, url, "/init_weight_transfer_engine", {"init_info": first.init_info})
    first.open()  # it says no id
    land(url, 6)
    assert "cancelled" in joining.result(timeout=PATIENCE).json()["error"]["message"]
    first.close()


@pytest.mark.parametrize("buffer_bytes", [None, 20_000], ids=["plain", "packed"])
def test_our_own_sender_joins_its_targets_as_a_trainer_of_vllm_does(urls, buffer_bytes):
    model = random_model("qwen3")
    targets = [HttpTarget(url, "admin", wire="vllm") for url in urls]
    transport = VllmTransport(packed_buffer_bytes=buffer_bytes, communicators=GlooCommunicators())
    pusher = WeightPusher(targets, transport, timeout_s=PATIENCE)
    for step in ("1", "2"):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.01)
        digest = pusher.push(model, f"{buffer_bytes}-{step}").digest
        assert [standing(url) for url in urls] == [(f"{buffer_bytes}-{step}", digest)] * 2
    pusher.close()


# -- fields ------------------------------------------------------------------------------------------------------------

ID = base64.b64encode(id_of(7)).decode()
RANKS = {"rank_offset": 1, "world_size": 2}
ADDRESS = {"master_address": "trainer", "master_port": 4321}


def test_an_init_names_an_address_or_an_id_or_nothing():
    assert way_of(InitInfo(**RANKS, **ADDRESS), True) == Broadcasts(None, Place(1, 2, ("trainer", 4321), None))
    assert way_of(InitInfo(**RANKS, nccl_unique_id_b64=ID), True) == Broadcasts(None, Place(1, 2, None, ID))
    packed = InitInfo(**RANKS, **ADDRESS, nccl_unique_id_b64="", packed=True, packed_buffer_size_bytes=5)
    assert way_of(packed, True) == Broadcasts(5, Place(1, 2, ("trainer", 4321), None))
    assert way_of(InitInfo(), True) == way_of(InitInfo(), False) == Handles()


@pytest.mark.parametrize(
    ("info", "field", "why"),
    [
        ({"nccl_unique_id_b64": ID}, "rank_offset", "is needed"),
        ({"nccl_unique_id_b64": ID, "rank_offset": 1}, "world_size", "is needed"),
        ({**RANKS, "nccl_unique_id_b64": "no base64!"}, "nccl_unique_id_b64", "not standard base64"),
        ({**RANKS, "nccl_unique_id_b64": "AAAA"}, "nccl_unique_id_b64", "128 bytes; these are 3"),
        ({**RANKS, **ADDRESS, "nccl_unique_id_b64": ID}, "nccl_unique_id_b64", "not both"),
        ({**RANKS, "master_port": 1, "nccl_unique_id_b64": ID}, "nccl_unique_id_b64", "not both"),
        ({**RANKS, "master_address": "trainer"}, "master_port", "is needed"),
        (RANKS, "master_address", "is needed"),
        (ADDRESS, "rank_offset", "is needed"),
        ({**ADDRESS, "rank_offset": 0, "world_size": 2}, "rank_offset", "at least 1"),
        ({**ADDRESS, "rank_offset": 2, "world_size": 2}, "world_size", "no rank 2"),
    ],
)
def test_a_wrong_init_names_its_field(info, field, why):
    with pytest.raises(BadField, match=rf"init_info\.{field}.*{why}"):
        way_of(InitInfo(**info), True)


def test_an_id_is_refused_where_the_model_is_on_a_cpu():
    with pytest.raises(BadField, match=r"init_info\.nccl_unique_id_b64.*a model on a GPU"):
        way_of(InitInfo(**RANKS, nccl_unique_id_b64=ID), False)
    service = RolloutService(Engine(random_model("qwen3"), EngineConfig(kv_cache="8 blocks", max_num_seqs=1)))
    assert service.communicators is None
    with pytest.raises(ValueError, match="needs a model on a GPU"):
        service.join_vllm_trainer(1, 2, nccl_unique_id_b64=ID)
    service.close()


def test_the_pickle_of_a_store_is_refused_where_pickles_are_turned_off():
    engine = Engine(random_model("qwen3"), EngineConfig(kv_cache="8 blocks", max_num_seqs=1))
    service = RolloutService(engine, ServiceConfig(allow_pickle=False))
    service.groups.communicators = GlooCommunicators()
    with pytest.raises(ValueError, match=r"allow_pickle=False.*nccl_unique_id_b64"):
        service.join_vllm_trainer(1, 2, master_address=HOST, master_port=1)
    service.close()
