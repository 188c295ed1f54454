"""Tests of vLLM's updates without a group (handles of memory, folders), by SkyRL's names, and of their fields."""

from __future__ import annotations

import base64
import io
import pickle
import socket
from collections.abc import Iterator
from contextlib import closing
from multiprocessing import reduction

import httpx
import pytest
import torch
from torch.multiprocessing import reductions

from lockstep.integration.http.edge.config import HttpConfig
from lockstep.integration.http.edge.errors import BadField
from lockstep.integration.http.server import serve_in_background
from lockstep.integration.http.vllm.transfers import Broadcasts, Handles, InitInfo, Place, Way, read_update, way_of
from lockstep.integration.service import RolloutService
from lockstep.integration.service_config import ServiceConfig
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.tests.integration.http.vllm.weight_trainer import KEY, PATIENCE, Named, Trainer, info_of, model_of
from lockstep.tests.support.fake_workers import wait_until
from lockstep.weight_sync.digests.model_digest import model_digest

GROUP = {"master_address": "127.0.0.1", "master_port": 5000, "rank_offset": 1, "world_size": 2}


@pytest.fixture
def service(make_model, tmp_path, restore_threads) -> Iterator[RolloutService]:
    torch.set_num_threads(1)
    make_model("qwen3").save_pretrained(tmp_path / "model")
    service = RolloutService(Engine(tmp_path / "model", EngineConfig(kv_cache="64 blocks", max_num_seqs=4)))
    yield service
    service.close()


@pytest.fixture
def url(service) -> Iterator[str]:
    with serve_in_background(service, HttpConfig(port=0, admin_api_key="admin")) as server:
        yield server.url


@pytest.fixture
def client(url) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=PATIENCE, headers=KEY) as client:
        yield client


def post(client: httpx.Client, path: str, body: dict | None = None, status: int = 200) -> dict:
    answer = client.post(path, json=body or {})
    assert answer.status_code == status, f"{path}: {answer.text}"
    return answer.json()


def handles_of(tensors: Named, *, device: str = "cpu", names_function: bool = False, is_packed: bool = False) -> str:
    """Pickle handles of copies in shared memory, as a trainer on the same host does with CUDA tensors."""
    strategy = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    buffer = io.BytesIO()
    try:
        reduced = [reductions.reduce_tensor(tensor.clone()) for _, tensor in tensors]
        handles = [{device: one if names_function else one[1]} for one in reduced]
        reduction.ForkingPickler(buffer, 3).dump(handles[0] if is_packed else handles)
    finally:
        torch.multiprocessing.set_sharing_strategy(strategy)
    return base64.b64encode(buffer.getvalue()).decode()


def packed_of(tensors: Named) -> dict:
    flat = torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for _, tensor in tensors])
    return {
        "ipc_handles_pickled": handles_of([("flat", flat)], is_packed=True),
        "tensor_sizes": [t.nbytes for _, t in tensors],
    }


# -- bodies ------------------------------------------------------------------------------------------------------------


def test_an_update_whose_body_finds_no_room_has_failed_and_is_taken_back(make_model, tmp_path, restore_threads):
    torch.set_num_threads(1)
    make_model("qwen3").save_pretrained(tmp_path)
    engine = Engine(tmp_path, EngineConfig(kv_cache="64 blocks", max_num_seqs=4))
    service = RolloutService(engine, ServiceConfig(max_pickle_bytes=1 << 10))
    config = HttpConfig(port=0, admin_api_key="admin", max_body_bytes=1 << 20, max_open_body_bytes=1 << 20)
    with (
        closing(service),
        serve_in_background(service, config) as server,
        httpx.Client(base_url=server.url, timeout=PATIENCE, headers=KEY) as client,
        socket.create_connection(("127.0.0.1", server.port)) as other,
    ):

        def is_full() -> bool:  # the server counts a body so short only while nothing else of it runs
            return client.post("/generate", content=b"x" * 200).status_code == 503

        post(client, "/start_weight_update")
        other.sendall(b"POST /generate HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 1048576\r\n\r\n")
        other.sendall(b"x" * (1048576 - 100))  # its end never comes
        wait_until(is_full, "the body is there")
        refused = client.post("/update_weights", content=b"x" * (1 << 19))
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
        other.close()
        wait_until(lambda: not is_full(), "there is room")
        assert "no weight update is under way" in post(client, "/finish_weight_update", status=400)["error"]["message"]


# -- handles of memory -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["plain", "packed", "with the function"])
def test_handles_of_shared_memory_bring_the_weights(client, service, kind):
    tensors, is_packed = model_of(3), kind == "packed"
    post(client, "/init_weight_transfer_engine", {"init_info": {"packed": is_packed}})
    post(client, "/start_weight_update")
    for part in (tensors[:5], tensors[5:]):
        plain = {"ipc_handles_pickled": handles_of(part, names_function=kind == "with the function")}
        handles = packed_of(part) if is_packed else plain
        post(client, "/update_weights", {"update_info": info_of(part) | handles})
    post(client, "/finish_weight_update", {"weight_version": "3"})
    assert (service.engine.weight_version, service.engine.weight_digest) == ("3", model_digest(tensors))


def test_wrong_calls_are_answered_while_a_trainer_keeps_the_weights(make_model, restore_threads, until):
    torch.set_num_threads(1)
    module = make_model("qwen3")
    service = RolloutService(Engine(module, EngineConfig(kv_cache="64 blocks")))
    service.commit_in_place("1", source=module.named_parameters())
    info = info_of(model_of(3)[:1]) | {"ipc_handles_pickled": handles_of(model_of(3)[:1])}
    with (
        serve_in_background(service, HttpConfig(port=0, admin_api_key="admin")) as server,
        httpx.Client(base_url=server.url, timeout=30, headers=KEY) as client,
    ):  # outside of a rollout phase, for which the calls would wait weight_timeout_s
        for path, body in (("/finish_weight_update", {}), ("/update_weights", {"update_info": info})):
            assert "call /start_weight_update first" in post(client, path, body, 400)["error"]["message"]
        post(client, "/init_weight_transfer_engine", {"init_info": {}})
        with service.rollout():
            post(client, "/start_weight_update")
        assert service.sessions.is_open
        post(client, "/update_weights", {"update_info": {**info, "shapes": []}}, 400)
        late = client.post("/finish_weight_update", json={"weight_version": "2"})
        assert late.status_code in (400, 409), "the update is taken back, or waits for a phase to be"
        with service.rollout():
            until(lambda: not service.sessions.is_open)
        assert service.engine.weight_version == "1"
    service.close()


class _Evil:
    def __reduce__(self):
        return (print, ("run",))


@pytest.mark.parametrize(
    ("handles", "why"),
    [
        (lambda tensors: base64.b64encode(pickle.dumps([_Evil()])).decode(), "blocked unsafe global"),
        (lambda tensors: base64.b64encode(pickle.dumps([{"cpu": 7}])).decode(), "rebuild_tensor"),
        (lambda tensors: base64.b64encode(pickle.dumps([{"cpu": (1, 2)}])).decode(), "with 2 arguments"),
        (lambda tensors: base64.b64encode(pickle.dumps([{"cpu": (1, 2, 3)}])).decode(), "tensor metadata"),
        (lambda tensors: base64.b64encode(pickle.dumps([])).decode(), "a list of 1 handles"),
        (lambda tensors: base64.b64encode(pickle.dumps(3)).decode(), "a list of 1 handles"),
        (lambda tensors: "no base64!", "base64"),
        (lambda tensors: handles_of(tensors, device="GPU-1234"), "opens no CUDA handle"),
        (lambda tensors: handles_of([(name, tensor[:1]) for name, tensor in tensors]), "the handle is of"),
    ],
)  # fmt: skip
def test_handles_that_are_wrong_or_of_a_gpu_are_refused_and_the_weights_stay(client, service, handles, why):
    before, tensors = service.model_digest(), model_of(3)[:1]
    post(client, "/init_weight_transfer_engine", {"init_info": {}})
    post(client, "/start_weight_update")
    body = {"update_info": info_of(tensors) | {"ipc_handles_pickled": handles(tensors)}}
    assert why in post(client, "/update_weights", body, 400)["error"]["message"]
    post(client, "/finish_weight_update", status=400)
    assert service.model_digest() == before


def test_cuda_handles_are_refused_by_name_where_the_model_is_on_a_cpu(client):
    arguments: tuple = (
        torch.Tensor,
        (2,),
        (1,),
        0,
        torch.storage.TypedStorage,
        torch.float32,
        0,
        b"h",
        8,
        0,
        False,
        b"r",
        0,
        b"e",
        True,
    )
    handles = base64.b64encode(pickle.dumps([{"GPU-0a1b": arguments}])).decode()  # as vLLM's trainers do
    post(client, "/init_weight_transfer_engine", {"init_info": {}})
    post(client, "/start_weight_update")
    info = info_of(model_of(3)[:1]) | {"ipc_handles_pickled": handles}
    said = post(client, "/update_weights", {"update_info": info}, 400)["error"]["message"]
    assert "this engine's model is on a CPU, which opens no CUDA handle" in said and "GPU-0a1b" in said


def test_handles_are_refused_where_pickles_are_turned_off(make_model, tmp_path):
    make_model("qwen3").save_pretrained(tmp_path / "model")
    engine = Engine(tmp_path / "model", EngineConfig(kv_cache="16 blocks", max_num_seqs=4))
    service = RolloutService(engine, ServiceConfig(allow_pickle=False))
    with (
        serve_in_background(service, HttpConfig(port=0, admin_api_key="admin")) as server,
        httpx.Client(base_url=server.url, timeout=PATIENCE, headers=KEY) as client,
    ):
        post(client, "/init_weight_transfer_engine", {"init_info": {}})
        post(client, "/start_weight_update")
        part = model_of(3)[:2]
        body = {"update_info": info_of(part) | {"ipc_handles_pickled": handles_of(part)}}
        assert "allow_pickle" in post(client, "/update_weights", body, 400)["error"]["message"]
    service.close()


# -- folders, as prime-rl sends them -----------------------------------------------------------------------------------


def test_a_folder_is_an_update_of_its_own(client, service, make_model, tmp_path):
    model = make_model("qwen3")
    with torch.no_grad():
        for (_, parameter), (_, newer) in zip(model.named_parameters(), model_of(4), strict=True):
            parameter.copy_(newer)
    model.save_pretrained(tmp_path / "step_4")
    post(client, "/pause?mode=keep&clear_cache=false")
    said = post(client, "/update_weights", {"weight_dir": str(tmp_path / "step_4"), "weight_version": "4"})
    assert said["status"] == "ok"
    post(client, "/resume")
    assert (service.engine.weight_version, service.engine.weight_digest) == ("4", model_digest(model_of(4)))
    before = service.model_digest()
    refused = post(client, "/update_weights", {"weight_dir": str(tmp_path / "nowhere")}, 400)["error"]
    assert "nowhere" in refused["message"]
    post(client, "/update_weights", {"weight_dir": None}, 400)
    assert service.model_digest() == before


# -- SkyRL's names -----------------------------------------------------------------------------------------------------


def test_skyrls_calls_by_method_are_the_same_update(url, client, service):
    trainer = Trainer(url)
    tensors = model_of(5)

    def rpc(method: str, status: int = 200, **kwargs: object) -> dict:
        return post(client, "/collective_rpc", {"method": method, "kwargs": kwargs}, status)

    assert rpc("skyrl_start_weight_update", is_checkpoint_format=True) == {"results": [None]}
    info = info_of(tensors) | {"packed": True}  # of its older vLLM: in update_info
    waiting = trainer.begin("/collective_rpc", {"method": "update_weights_nccl", "kwargs": {"update_info": info}})
    trainer.broadcast([torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for _, tensor in tensors])])
    assert waiting().json() == {"results": [None]}
    assert rpc("skyrl_finish_weight_update") == {"results": [None]}
    assert service.engine.weight_digest == model_digest(tensors)
    for method, kwargs, param in (
        ("save_sharded_state", {}, "method"),
        ("skyrl_start_weight_update", {"is_checkpoint_format": False}, "kwargs.is_checkpoint_format"),
        ("update_weights_nccl", {}, "update_info"),
    ):
        assert rpc(method, 400, **kwargs)["error"]["param"] == param
    body = {"method": "skyrl_start_weight_update", "args": [1]}
    assert post(client, "/collective_rpc", body, 400)["error"]["param"] == "args"
    refused = post(client, "/start_weight_update", {"is_checkpoint_format": False}, 400)["error"]
    assert refused["param"] == "is_checkpoint_format"
    trainer.leave()


# -- fields ------------------------------------------------------------------------------------------------------------


def test_init_info_chooses_the_way():
    def way(**info: object) -> Way:
        return way_of(InitInfo(**info), has_nccl=False)

    place = Place(GROUP["rank_offset"], GROUP["world_size"], (GROUP["master_address"], GROUP["master_port"]), None)
    assert way(**GROUP) == Broadcasts(None, place)
    assert way(**GROUP, packed=True, packed_buffer_size_bytes=7) == Broadcasts(7, place)
    assert way() == way(packed=True) == Handles()
    for name in ("master_address", "master_port", "rank_offset", "world_size"):
        with pytest.raises(BadField, match=name):
            way(**{key: value for key, value in GROUP.items() if key != name})


def test_an_updates_own_packing_replaces_that_of_init():
    def parts(way: Broadcasts, **fields: object) -> list[int]:
        info = {"names": list("abcd"), "dtype_names": ["float32"] * 4, "shapes": [[4]] * 4} | fields
        return [len(part) for part in way.parts(read_update({"update_info": info}))]

    assert parts(Broadcasts(None)) == [4]
    assert parts(Broadcasts(20)) == [2, 2]
    assert parts(Broadcasts(20), packed_buffer_size_bytes=1) == [1, 1, 1, 1]
    assert parts(Broadcasts(20), packed=False) == [4]
    assert parts(Broadcasts(None), packed=True, packed_buffer_size_bytes=40) == [3, 1]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"shapes": [[2**31 - 1] * 100]}, "update_info"),
        ({"names": ["a", "a"], "dtype_names": ["float32"] * 2, "shapes": [[1], [1]]}, "update_info"),
        ({"shapes": [[-1]]}, "update_info"),
        ({"dtype_names": ["Tensor"]}, "update_info.dtype_names"),
        ({"packed_buffer_size_bytes": 0}, "update_info"),
    ],
)
def test_fields_that_no_tensor_can_have_are_refused_before_anything_is_received(fields, param):
    info = {"names": ["a"], "dtype_names": ["float32"], "shapes": [[1]]} | fields
    with pytest.raises(BadField) as refused:
        read_update({"update_info": info})
    assert refused.value.param.startswith(param)
