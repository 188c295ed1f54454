"""Updates that verify requests in flight: afterwards their answers are those of the new weights from the start."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from lockstep.integration.grpo.tasks.arithmetic import build_tokenizer
from lockstep.integration.http.edge.config import HttpConfig
from lockstep.integration.http.server import serve_in_background
from lockstep.integration.push.local_target import LocalTarget
from lockstep.integration.push.pusher import WeightPusher
from lockstep.integration.service import RolloutService
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.errors import NotIdle
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.tests.rollout.speculation.drafting import record
from lockstep.tests.support.framework_sender import serialize_for_engine
from lockstep.tests.support.random_models import random_model
from lockstep.weight_sync.disk.folder import save_folder
from lockstep.weight_sync.transports.delta import DeltaTransport
from lockstep.weight_sync.transports.disk import DiskTransport
from lockstep.weight_sync.transports.same_host import TensorTransport

PROMPTS = [[3, 14, 15], [9, 26, 5, 35]]
PARAMS = [SamplingParams(max_new_tokens=24, sampling_seed=seed, ignore_eos=True) for seed in range(2)]
NEW = {"weight_version": "new", "in_flight": "verify"}


@pytest.fixture
def old(restore_threads):
    torch.set_num_threads(1)
    return random_model("qwen3", vocab_size=128, max_position_embeddings=512)


@pytest.fixture
def new(old):
    model = copy.deepcopy(old)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 0.02 * torch.randn_like(parameter))
    return model


@pytest.fixture
def service(old, tmp_path):
    old.save_pretrained(tmp_path / "old")
    config = EngineConfig(kv_cache="128 blocks", max_num_seqs=4, speculation="off")
    service = RolloutService(Engine(tmp_path / "old", config, tokenizer=build_tokenizer()))
    yield service
    service.close()


def named_tensors(service, new, tmp_path):
    service.update_weights_from_named_tensors(list(new.named_parameters()), **NEW)


def tensors_of_a_framework(service, new, tmp_path):
    payload = serialize_for_engine(list(new.named_parameters()), "flattened_bucket")
    service.update_weights_from_tensor([payload], load_format="flattened_bucket", **NEW)


def disk(service, new, tmp_path):
    new.save_pretrained(tmp_path / "new")
    service.update_weights_from_disk(tmp_path / "new", **NEW)


def session(service, new, tmp_path):
    service.engine.pause_generation("in_place")
    service.begin_weight_update(weight_version="new", keep_running=True)
    service.update_weights_from_named_tensors(list(new.named_parameters()))
    assert service.end_weight_update(in_flight="verify").num_verified == 2
    service.continue_generation()


def push(service, new, tmp_path):
    pusher = WeightPusher([LocalTarget(service)], DiskTransport(tmp_path / "push"))
    pusher.push(new, "new", in_flight="verify")
    pusher.close()


def shared_memory(service, new, tmp_path):
    pusher = WeightPusher([LocalTarget(service)], TensorTransport(bucket_bytes=1 << 16))
    pusher.push(new, "new", in_flight="verify")
    pusher.close()


def delta(service, new, tmp_path):
    pusher = WeightPusher([LocalTarget(service)], DeltaTransport(TensorTransport(), check="touched"))
    pusher.push(AutoModelForCausalLM.from_pretrained(tmp_path / "old"), "old", in_flight="verify")
    pusher.push(new, "new", in_flight="verify")
    pusher.close()


@pytest.mark.parametrize("update", [named_tensors, tensors_of_a_framework, disk, session, push, shared_memory, delta])
def test_every_path_of_an_update_verifies(service, new, tmp_path, update: Callable[..., None]):
    engine = service.engine
    with RolloutServiceOf(new) as fresh:
        expected = [record(one)[2:-2] for one in fresh.generate(PROMPTS, PARAMS)]
    ids = [id for prompt, params in zip(PROMPTS, PARAMS, strict=True) for id in engine.add(prompt, params)]
    engine.mailboxes.open(ids, streamed=False)
    for _ in range(9):
        engine.step()
    update(service, new, tmp_path)
    service.commit_implicit_update()
    while engine.has_work:
        engine.step()
    answers = engine.mailboxes.completions(ids)
    assert [record(one)[2:-2] for one in answers] == expected
    assert {span.version for one in answers for span in one.weight_versions} == {"new"}
    assert engine.metrics.num_kept_tokens + engine.metrics.num_parted_tokens == 18
    assert engine.metrics.num_kept_tokens > 0


class RolloutServiceOf:
    """An engine of a module, for one block."""

    def __init__(self, module) -> None:
        self.engine = Engine(
            module, EngineConfig(kv_cache="128 blocks", speculation="off"), tokenizer=build_tokenizer()
        )

    def __enter__(self) -> Engine:
        return self.engine

    def __exit__(self, *_) -> None:
        self.engine.close()


def test_in_flight_excludes_the_other_ways_and_a_session_has_it_at_its_end(service, new):
    tensors = list(new.named_parameters())
    for other in ("abort_all_requests", "keep_running"):
        with pytest.raises(ValueError, match=f"in_flight=\"?'?verify.*{other}"):
            service.update_weights_from_named_tensors(tensors, in_flight="verify", **{other: True})
    with pytest.raises(ValueError, match="in_flight must be"):
        service.update_weights_from_named_tensors(tensors, in_flight="keep")
    service.engine.add(PROMPTS[0], PARAMS[0])
    service.engine.step()
    with pytest.raises(NotIdle, match='in_flight="verify"'):
        service.update_weights_from_named_tensors(tensors)
    service.engine.abort_request(abort_all=True)
    service.begin_weight_update(weight_version="new")
    with pytest.raises(ValueError, match="end_weight_update has in_flight"):
        service.update_weights_from_named_tensors(tensors, in_flight="verify")
    service.abort_weight_update()


def test_a_commit_that_fails_verifies_nothing_later(service, new):
    service.begin_weight_update(weight_version="new", coverage="full")
    with pytest.raises(ValueError):
        service.end_weight_update(in_flight="verify")  # nothing was written
    service.update_weights_from_named_tensors(list(new.named_parameters()))
    assert service.end_weight_update().num_verified == 0


# -- streams ----------------------------------------------------------------------------------------------------------

LONG = {"max_new_tokens": 300, "sampling_seed": 4, "ignore_eos": True}


def events(lines) -> list[dict]:
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


@pytest.mark.slow
def test_a_stream_takes_back_what_the_new_weights_do_not_give(service, new, tmp_path):
    new.save_pretrained(tmp_path / "new")
    ask = {"text": "1 + 2", "sampling_params": LONG, "return_logprob": True, "top_logprobs_num": 2}
    update = {"model_path": str(tmp_path / "new"), **NEW}
    with serve_in_background(service, HttpConfig(port=0)) as server, httpx.Client(base_url=server.url) as client:
        with client.stream("POST", "/generate", json={**ask, "stream": True}) as stream:
            lines = stream.iter_lines()
            first = json.loads(next(lines)[6:])
            answer = client.post("/update_weights_from_disk", json=update)
            assert answer.status_code == 200, answer.text
            rest = events(lines)
        whole = client.post("/generate", json=ask).json()
    for name in ("output_ids", "text"):
        assert rest[-1][name] == whole[name], name
    for name in ("output_token_logprobs", "output_top_logprobs"):
        assert rest[-1]["meta_info"][name] == whole["meta_info"][name]
    assert {span["version"] for span in rest[-1]["meta_info"]["weight_versions"]} == {"new"}
    assert whole["output_ids"][: len(first["output_ids"])] != first["output_ids"] or len(first["output_ids"]) < 20
    for event in rest:  # under the new weights every chunk is a beginning of the answer
        if event["meta_info"]["weight_version"] == "new":
            assert whole["text"].startswith(event["text"])
            assert whole["output_ids"][: len(event["output_ids"])] == event["output_ids"]


@pytest.mark.slow
@pytest.mark.parametrize("waits", [False, True])
def test_a_stream_of_openais_api_keeps_its_tokens_unless_it_waits(service, new, tmp_path, waits):
    new.save_pretrained(tmp_path / "new")
    ask = {"prompt": "1 + 2", "max_tokens": 300, "seed": 4, "ignore_eos": True, "stream_when_final": waits}
    update = {"model_path": str(tmp_path / "new"), **NEW}
    with serve_in_background(service, HttpConfig(port=0)) as server, httpx.Client(base_url=server.url) as client:
        with client.stream("POST", "/v1/completions", json={**ask, "stream": True}) as stream:
            lines = stream.iter_lines()
            if waits:
                while not service.engine.metrics.num_steps > 5:
                    client.get("/state")
                begun = ""
            else:
                begun = json.loads(next(lines)[6:])["choices"][0]["text"]
            assert client.post("/update_weights_from_disk", json=update).status_code == 200
            streamed = begun + "".join(event["choices"][0]["text"] for event in events(lines))
        whole = client.post("/v1/completions", json=ask).json()["choices"][0]["text"]
    metrics = service.engine.metrics
    assert (metrics.num_kept_tokens + metrics.num_parted_tokens > 0) == waits
    assert metrics.num_retractions == 1
    assert streamed == whole or not waits


def test_a_folder_of_safetensors_is_read_too(service, new, tmp_path):
    save_folder(tmp_path / "new", new.named_parameters(), "new")
    assert service.update_weights_from_disk(tmp_path / "new", **NEW).num_bytes > 0


# -- renewals over HTTP -----------------------------------------------------------------------------------------------


def test_answers_are_renewed_over_http(service, new, tmp_path):
    new.save_pretrained(tmp_path / "new")
    params = {"max_new_tokens": 20, "ignore_eos": True, "n": 2}  # without a seed: the engine draws one
    ask = {"input_ids": PROMPTS, "sampling_params": params, "return_logprob": True, "extra_key": "k"}
    with serve_in_background(service, HttpConfig(port=0)) as server, httpx.Client(base_url=server.url) as client:
        old = client.post("/generate", json=ask).json()
        again = {
            **ask, "input_ids": [prompt for prompt in PROMPTS for _ in range(2)],
            "output_ids": [one["output_ids"] for one in old],
            "seeds": [one["meta_info"]["seed"] for one in old],
            "sample_indexes": [one["meta_info"]["sample_index"] for one in old],
        }  # fmt: skip
        same = client.post("/renew", json=again).json()
        assert client.post("/update_weights_from_disk", json={"model_path": str(tmp_path / "new")}).status_code == 200
        renewed = client.post("/renew", json=again).json()
        from_nothing = client.post("/renew", json={**again, "output_ids": [[]] * 4}).json()
        refused = {
            f"{field} {value}": client.post("/renew", json={**again, field: value})
            for field, value in [
                ("output_ids", [[1]]), ("output_ids", [[True]] * 4), ("output_ids", [["5"]] * 4), ("seeds", [1]),
                ("seeds", [True] * 4), ("sample_indexes", [0, 0]), ("sample_indexes", [2**80] * 4),
                ("stream", "perhaps"),
            ]
        }  # fmt: skip
        wrong_tokens = client.post("/renew", json={**again, "output_ids": [[999]] * 4})
        missing = client.post("/renew", json=ask)
    values = [
        [(one["output_ids"], one["text"], one["meta_info"]["output_token_logprobs"]) for one in answers]
        for answers in (old, same, renewed, from_nothing)
    ]
    assert values[0] == values[1] and values[2] == values[3] != values[0]
    assert [one["meta_info"]["num_kept_tokens"] for one in same] == [20] * 4
    for field, answer in refused.items():
        assert answer.status_code == 400 and field.split()[0] in answer.text, (field, answer.text)
    assert wrong_tokens.status_code == 400 and "999" in wrong_tokens.text
    assert missing.status_code == 400 and "output_ids" in missing.text
