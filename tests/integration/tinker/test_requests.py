"""The order of requests, repeated and hostile ones, sessions that end, and keys."""

from __future__ import annotations

import threading

import httpx
import numpy as np
import pytest

from lockstep.integration.http.edge.config import HttpConfig
from lockstep.integration.tinker.training.config import TinkerConfig
from lockstep.integration.tinker.wire.protobuf import put_bytes, put_text
from lockstep.tests.integration.tinker.conftest import serving
from lockstep.tests.support.random_models import random_model
from lockstep.tests.support.tinker_client import Client, Failed, Sampler, datum, pass_body, read_samples, tensor

DATA = [datum([1, 2, 3], target_tokens=[2, 3, 4])]
PROTO = {"Content-Type": "application/x-protobuf"}


def refused(answer: httpx.Response) -> str:
    assert answer.status_code == 400, answer.text
    return answer.json()["detail"]


def test_requests_run_in_the_order_of_their_numbers_whenever_they_come(client):
    model = client.model()
    sent = {}
    for seq in (3, 2):  # the SDK sends the first part of a large batch last
        sent[seq] = model.send_pass(DATA, seq=seq).json()["request_id"]
    step = client.post("optim_step", model_id=model.model_id, seq_id=4, adam_params={"learning_rate": 0.1})
    waits = client.http.post("retrieve_future", json={"request_id": step["request_id"]}, timeout=30)
    assert waits.status_code == 408 and waits.json()["type"] == "try_again"
    sent[1] = model.send_pass(DATA, seq=1).json()["request_id"]
    assert client.answer(step["request_id"]).json()["metrics"]["grad_norm"] > 0
    one, two = client.model(), client.model()
    for other in (one, two):
        assert client.answer(sent[3]).content == client.answer(sent[1]).content
        other.run(DATA)


def test_a_repeated_request_is_one_request_and_a_number_is_used_once(client):
    model = client.model()
    first, again = (model.send_pass(DATA, seq=1).json()["request_id"] for _ in range(2))
    assert first == again
    client.answer(first)
    assert "its seq_id was used" in refused(model.send_pass([*DATA, *DATA], seq=1))
    model.seq = 1
    norm = model.step()["grad_norm"]
    other = client.model()
    other.run(DATA)
    assert other.step()["grad_norm"] == norm, "the gradient was added once"
    assert "seq_id must be 1 or more" in refused(model.send_pass(DATA, seq=-1))


@pytest.mark.parametrize(
    ("path", "wrong", "reason"),
    [
        ("optim_step", {"adam_params": {"learning_rate": None}}, "learning_rate"),
        ("optim_step", {"newer": 1}, "newer"),
        ("save_weights", {"path": 5}, "path"),
        ("save_weights_for_sampler", {"path": "a", "kind": "other"}, "kind"),
        ("load_weights", {"path": "tinker://a/weights/b"}, "optimizer"),
        ("load_weights", {"path": "p", "optimizer": True, "session_id": "x"}, "model_id, or session_id"),
        ("load_weights", {"path": "p", "optimizer": True, "base_model": "b"}, "is not served"),
        ("forward", {}, "forward_input is missing"),
        ("forward_backward", {"forward_backward_input": {"data": [], "loss_fn": 3}}, "loss_fn"),
    ],
)
def test_a_wrong_request_uses_its_number_and_the_next_one_runs(client, path, wrong, reason):
    model = client.model(rank=1, train_mlp=False)
    ahead = model.send_pass(DATA, seq=2).json()["request_id"]
    ids = [client.post(path, model_id=model.model_id, seq_id=1, **wrong)["request_id"] for _ in range(2)]
    assert ids[0] == ids[1], "the same request again"
    with pytest.raises(Failed, match=reason) as failed:
        client.answer(ids[0])
    assert failed.value.category == "user"
    client.answer(ahead)
    unnumbered = client.http.post(path, json={"model_id": model.model_id, **wrong})
    assert unnumbered.status_code in (400, 404) and reason in unnumbered.json()["detail"]


def test_a_pass_that_is_no_message_uses_its_number_and_the_next_one_runs(client):
    model = client.model(rank=1, train_mlp=False)
    body = pass_body(model.model_id, 1, DATA, "cross_entropy", {}, False)
    sent = client.http.post("forward_backward", content=body + b"\x0a\xff\xff", headers=PROTO).raise_for_status()
    with pytest.raises(Failed, match="the message ends"):
        client.answer(sent.json()["request_id"])
    model.seq = 1
    model.run(DATA)


def test_requests_fail_whose_forerunner_does_not_come_and_later_ones_run(serve):
    with serve(gap_s=0.2, http=HttpConfig(port=0, max_body_bytes=2000)) as server, Client(server.url) as client:
        model = client.model(rank=1, train_mlp=False)
        long = [datum(range(200), target_tokens=range(200))]
        assert model.send_pass(long).status_code == 413
        with pytest.raises(Failed, match=r"a request with seq_id 1 did not come within 0\.2 s") as failed:
            model.step()
        assert failed.value.category == "user"
        assert "came too late" in refused(model.send_pass(DATA, seq=1))
        model.train(DATA)


def test_without_numbers_requests_run_as_they_come(client):
    model = client.model()
    model.send_pass(DATA, seq=1)
    ids = [client.post("optim_step", model_id=model.model_id)["request_id"] for _ in range(2)]
    assert client.answer(ids[0]).json()["metrics"]["grad_norm"] > 0
    with pytest.raises(Failed, match="no gradients; call forward_backward first"):
        client.answer(ids[1])


WRONG = {
    "model_input has 0 tokens": (datum([], target_tokens=[]), "cross_entropy"),
    "model_input has 600 tokens; it must have 1 to 512": (
        datum([1] * 600, target_tokens=[1] * 600),
        "cross_entropy",
    ),
    "model_input has token ids from 1 to 256; the vocabulary has 256": (
        datum([1, 256], target_tokens=[1, 2]),
        "cross_entropy",
    ),
    "target_tokens has token ids from -1 to 2": (datum([1, 2], target_tokens=[-1, 2]), "cross_entropy"),
    r"target_tokens has shape \[3\]; cross_entropy takes": (datum([1, 2], target_tokens=[1, 2, 3]), "cross_entropy"),
    r"weights has shape \[1\], and target_tokens \[2\]": (
        datum([1, 2], target_tokens=[1, 2], weights=[1.0]),
        "cross_entropy",
    ),
    "weights has numbers that are not finite": (
        datum([1, 2], target_tokens=[1, 2], weights=[1.0, float("nan")]),
        "cross_entropy",
    ),
    "has no target_tokens, which cross_entropy needs": (datum([1, 2]), "cross_entropy"),
    "has no logprobs, advantages, which ppo needs": (datum([1], target_tokens=[1]), "ppo"),
    "cross_entropy does not take mask": (datum([1], target_tokens=[1], mask=[1.0]), "cross_entropy"),
    "target_tokens must be int64, not float32": (
        datum([1]) + put_bytes(2, put_text(1, "target_tokens") + put_bytes(2, tensor(np.ones(1, "<f4")))),
        "cross_entropy",
    ),
    "the loss is not finite at position 1": (
        datum([1, 2], target_tokens=[1, 2], logprobs=[0.0, -3e38], advantages=[0.0, 1.0]),
        "importance_sampling",
    ),
    "chunk of kind image": (put_bytes(1, put_bytes(2, b"")), "cross_entropy"),
    "stable_reinforce' is not supported": (DATA[0], "stable_reinforce"),
    "loss_fn must be one of": (DATA[0], "mse"),
    "dro needs beta": (datum([1], target_tokens=[1], logprobs=[0.0], advantages=[1.0]), "dro"),
}


@pytest.mark.parametrize("reason", WRONG)
def test_wrong_data_are_refused_by_name_and_leave_no_gradient(client, reason):
    one, loss_fn = WRONG[reason]
    model = client.model(rank=1, train_mlp=False, train_unembed=False)
    data = [one] if loss_fn not in ("cross_entropy", "importance_sampling") else [one, one]
    with pytest.raises(Failed, match=reason) as failed:
        model.run(data, loss_fn)
    assert failed.value.category == "user"
    with pytest.raises(Failed, match="no gradients"):
        model.step()
    assert model.run(DATA)[1]["loss:sum"] > 0


def test_settings_of_losses_and_steps_are_checked(client):
    model = client.model()
    rl = [datum([1], target_tokens=[1], logprobs=[0.0], advantages=[1.0])]
    for config, reason in (
        ({"beta": 1.0}, "ppo has no setting beta"),
        ({"clip_low_threshold": float("inf")}, "clip_low_threshold must be a number"),
        ({"clip_low_threshold": 2.0}, "clip_low_threshold is above"),
    ):
        with pytest.raises(Failed, match=reason):
            model.run(rl, "ppo", **config)
    model.run(DATA)
    for params, reason in (({"learning_rate": -1.0}, "learning_rate must be"), ({"beta1": 1.0}, "beta1 must be"),
                           ({"eps": 0.0}, "eps must be above 0")):  # fmt: skip
        with pytest.raises(Failed, match=reason):
            model.step(**params)
    with pytest.raises(Failed, match="only one here"):
        model.call("optim_step", optimizer_params={"type": "dimuon"})
    assert model.step()["grad_norm"] > 0, "a refused step keeps the gradients"


def test_gradients_that_are_not_finite_are_refused_and_dropped(client):
    model = client.model()
    model.run([datum([1], target_tokens=[1], weights=[1e37]), datum([2], target_tokens=[3], weights=[1e37])])
    before = model.run(DATA, forward_only=True)[1]
    with pytest.raises(Failed, match="gradients are not finite"):
        model.step()
    assert model.run(DATA, forward_only=True)[1] == before
    with pytest.raises(Failed, match="no gradients"):
        model.step()


def test_unknown_fields_and_bodies_that_are_none_are_refused(client):
    assert "adam" in refused(client.http.post("optim_step", json={"model_id": "x", "adam": {}}))
    assert refused(client.http.post("create_session", content=b"[1")).startswith("the body is not JSON")
    assert "the message ends" in refused(client.http.post("forward_backward", content=b"\x0a\xff\xff", headers=PROTO))
    assert "model_id" in refused(client.http.post("forward_backward", json={}))
    assert "forward_input is missing" in refused(client.http.post("forward", json={"model_id": "x"}))
    answer = client.http.post("forward_backward", content=b"", headers=PROTO | {"Content-Encoding": "zstd"})
    assert "content encoding 'zstd'" in refused(answer)
    assert client.http.post("copy_weights", json={}).status_code == 400
    missing = client.http.get("billing/usage/events")
    assert missing.status_code == 404 and "is not a path of this server" in missing.json()["detail"]


def test_bodies_and_prompts_have_limits(serve):
    with serve(http=HttpConfig(port=0, max_body_bytes=2000)) as server, Client(server.url) as client:
        model = client.model()
        assert model.send_pass([datum(range(200), target_tokens=range(200))], seq=1).status_code == 413
        model.run(DATA)
        sampler = client.sampler()
        assert "prompt has 0 tokens" in refused(sampler.send([]))
        assert "must be from 1 to 511" in refused(sampler.send([1], max_tokens=512))
        assert "num_samples" in refused(sampler.send([1], 0))
        assert "temperature" in refused(sampler.send([1], temperature=-1.0))
        assert "top_p" in refused(sampler.send([1], top_p=0.0))
        assert "chunks of type 'image'" in refused(
            sampler.send([1], extra={"prompt": {"chunks": [{"type": "image", "data": ""}]}})
        )
        for extra in ({"prompt_alt_tokens_k": 2}, {"record_stability_info": True}, {"model_path": "tinker://a"}):
            assert next(iter(extra)) in refused(sampler.send([1], extra=extra))
        with pytest.raises(Failed, match="256"):
            sampler.draw([256], max_tokens=1)
        assert len(sampler.draw([1], max_tokens=3, stop=[])["sequences"][0]["tokens"]) == 3


def test_models_that_are_gone_and_strangers_are_refused(client):
    model = client.model()
    left = client.post("optim_step", model_id=model.model_id, seq_id=2)  # waits for the first
    answer = client.answer(client.post("unload_model", model_id=model.model_id)["request_id"]).json()
    assert answer == {"model_id": model.model_id, "type": "unload_model"}
    with pytest.raises(Failed, match="the model was unloaded before a request with seq_id 1 came"):
        client.answer(left["request_id"])
    assert model.send_pass(DATA).status_code == 404
    assert client.http.post("get_info", json={"model_id": "nobody:train:0"}).status_code == 410
    assert client.http.get("samplers/" + client.session + ":sample:99").status_code == 404
    assert client.http.post("retrieve_future", json={"request_id": client.session + ":train:0:99"}).status_code == 410
    for lora, reason in (({"rank": 0}, "rank must be from 1 to 64"), ({"rank": 2, "train_mlp": False,
                         "train_attn": False, "train_unembed": False}, "one of train_mlp")):  # fmt: skip
        body = {"session_id": client.session, "model_seq_id": 50, "base_model": client.base, "lora_config": lora}
        assert reason in refused(client.http.post("create_model", json=body))
    assert "not whole models" in refused(client.http.post("create_model", json={**body, "lora_config": None}))
    other = {**body, "lora_config": {"rank": 2}}
    assert client.http.post("create_model", json={**other, "base_model": "b"}).status_code == 404
    assert "'dimuon' is not supported" in refused(
        client.http.post("create_model", json={**other, "optimizer_config": {"type": "dimuon", "version": 1}})
    )


def test_numbers_of_models_wait_and_are_limited(serve):
    limits = {"max_models": 2, "max_requests_ahead": 3, "max_open_samples": 6}
    with serve(**limits) as server, Client(server.url) as client:
        models = [client.model() for _ in range(2)]
        body = {"session_id": client.session, "model_seq_id": 9, "base_model": client.base,
                "lora_config": {"rank": 1}}  # fmt: skip
        full = client.http.post("create_model", json=body)
        assert full.status_code == 429 and "2 models are loaded" in full.json()["detail"]
        assert models[0].send_pass(DATA, seq=4).status_code == 429
        for seq in (2, 3):
            assert models[0].send_pass(DATA, seq=seq).status_code == 200
        client.answer(client.post("unload_model", model_id=models[1].model_id)["request_id"])
        client.answer(client.post("create_model", **body)["request_id"])
        assert client.sampler().send([1], 7, max_tokens=1).status_code == 429
        answers = [client.sampler().send([1], max_tokens=1) for _ in range(6)]
        assert answers[-1].status_code == 429, "the answers that nobody fetches are counted"


def test_a_number_of_a_sampler_is_that_of_one_request(client):
    model = client.model()
    body = {"model_id": model.model_id, "sampling_session_seq_id": 5}
    ids = [client.post("save_weights_for_sampler", seq_id=1, **body)["request_id"] for _ in range(2)]
    assert ids[0] == ids[1], "the same request again"
    sampler = Sampler(client, client.answer(ids[0]).json()["sampling_session_id"])
    expected = sampler.draw([1, 2], max_tokens=4, seed=1, stop=[])
    model.seq = 1
    model.train(DATA, learning_rate=0.5)
    taken = "sampling_session_seq_id 5 of session"
    with pytest.raises(Failed, match=taken):
        model.call("save_weights_for_sampler", sampling_session_seq_id=5)
    assert taken in refused(client.http.post("save_weights_for_sampler", json=body))
    model.sampler().draw([1, 2], max_tokens=4, seed=1, stop=[])
    assert sampler.draw([1, 2], max_tokens=4, seed=1, stop=[]) == expected


def test_a_sampler_whose_save_has_to_wait_is_made_by_the_next_try(serve):
    with serve(max_requests_ahead=2) as server, Client(server.url) as client:
        model = client.model()
        body = {"model_id": model.model_id, "sampling_session_seq_id": 5, "seq_id": 3}
        assert client.http.post("save_weights_for_sampler", json=body).status_code == 429
        assert client.http.get(f"samplers/{client.session}:sample:5").status_code == 404
        model.run(DATA)
        model.step()
        saved = client.answer(client.post("save_weights_for_sampler", **body)["request_id"]).json()
        Sampler(client, saved["sampling_session_id"]).draw([1], max_tokens=1)


def test_a_model_whose_unload_has_to_wait_is_unloaded_by_the_next_try(serve):
    with serve(max_open_samples=2) as server, Client(server.url) as client:
        model = client.model()
        waits = [model.send_pass(DATA, seq=seq).json()["request_id"] for seq in (1, 2)]
        assert client.http.post("unload_model", json={"model_id": model.model_id}).status_code == 429
        for request_id in waits:
            client.answer(request_id)
        first, again = (client.post("unload_model", model_id=model.model_id)["request_id"] for _ in range(2))
        assert first == again
        client.answer(first)
        assert model.model_id not in server.trainer._adapters
        assert model.send_pass(DATA).status_code == 404


def test_a_session_without_heartbeats_ends_and_frees_its_models(serve):
    with serve(session_timeout_s=1.0) as server, Client(server.url) as client, Client(server.url) as silent:
        model = silent.model()
        sampler = model.sampler()
        trainer = server.trainer
        assert model.model_id in trainer._adapters and sampler.sampler_id in trainer._snapshots
        gone = threading.Event()
        drop = trainer.drop_snapshot
        trainer.drop_snapshot = lambda version: (drop(version), gone.set())
        while not gone.wait(0.2):
            client.post("session_heartbeat", session_id=client.session)
        assert not trainer._adapters and not trainer._snapshots
        left = silent.http.post("session_heartbeat", json={"session_id": silent.session})
        assert left.status_code == 410 and "is not open" in left.json()["detail"]
        assert model.send_pass(DATA).status_code == 410
        client.model().run(DATA)


def test_samples_under_way_are_cancelled_by_their_client_and_by_the_end_of_its_session(serve):
    with serve() as server, Client(server.url) as client:
        sampler = client.sampler()
        begun = threading.Event()
        step = server.service.engine.step
        server.service.engine.step = lambda most=1: (begun.set(), step(most))[1]
        long = {"max_tokens": 500, "stop": [], "seed": 1}
        first = sampler.send([1], 2, **long).json()["request_id"]
        begun.wait(30)
        assert client.http.post("cancel_future", json={"request_id": first}).status_code == 204
        with pytest.raises(Failed, match="cancelled, or its session has ended"):
            client.answer(first)
        with Client(server.url) as other:
            other.sampler().send([1], 2, **long)
        assert len(sampler.draw([1], max_tokens=3, stop=[])["sequences"][0]["tokens"]) == 3
        assert not server.service.engine.has_work


def test_weights_of_samplers_that_are_dropped_are_named(serve):
    with serve(max_snapshots=2) as server, Client(server.url) as client:
        model = client.model()
        named = client.sampler(model.call("save_weights_for_sampler", path="named")["path"])
        expected = named.draw([1], max_tokens=2, seed=1, stop=[])
        samplers = [model.sampler() for _ in range(3)]
        with pytest.raises(Failed, match="--max-snapshots"):
            samplers[0].draw([1], max_tokens=1)
        assert named.draw([1], max_tokens=2, seed=1, stop=[])["sequences"] == expected["sequences"]


def test_keys_are_those_of_the_sdk(serve):
    with serve(http=HttpConfig(port=0, api_key="tml-secret")) as server:
        with Client(server.url, "tml-secret") as client:
            client.model(rank=1, train_mlp=False)
        url = f"{server.url}/api/v1/get_server_capabilities"
        assert httpx.get(url).status_code == 401
        assert httpx.get(url, headers={"X-API-Key": "tml-secre"}).status_code == 403
        assert httpx.get(url, headers={"X-API-Key": "tml-sécret".encode("latin-1")}).status_code == 403
        assert httpx.get(url, headers={"Authorization": "Bearer tml-secret"}).status_code == 200
        assert httpx.get(f"{server.url}/api/v1/healthz").json() == {"status": "ok"}
        page = httpx.get(url, headers={"X-API-Key": "tml-secret", "Sec-Fetch-Site": "cross-site"})
        assert page.status_code == 403
    for http, reason in (
        (HttpConfig(api_key="own"), "begin with tml-"),
        (HttpConfig(host="0.0.0.0"), "without an API"),
    ):
        with pytest.raises(ValueError, match=reason), serve(http=http):
            pass


def test_settings_are_checked_together(tmp_path):
    with pytest.raises(ValueError, match=r"max_models must be.*poll_s must be.*model_name must not"):
        TinkerConfig("", tmp_path, max_models=0, poll_s=float("nan"))


def test_telemetry_is_taken_and_dropped(client):
    assert client.post("telemetry", events=[{"event": "x"}], session_id="any") == {"status": "accepted"}


def test_a_pass_of_a_stranger_is_refused(client):
    body = pass_body(f"{client.session}:train:77", 1, DATA, "cross_entropy", {}, False)
    assert client.http.post("forward_backward", content=body, headers=PROTO).status_code == 404


@pytest.mark.parametrize("overlap", [False, True])  # True: a step is launched before the last one is delivered
def test_training_runs_between_the_steps_of_samples_and_changes_none_of_them(serve, overlap):
    with serve(overlap=overlap) as server, Client(server.url) as client:
        engine = server.service.engine
        model, other = client.model(rank=4), client.model(rank=2)
        model.train(DATA)
        sampler = model.sampler()
        params = {"max_tokens": 120, "stop": [], "seed": 4}
        expected = sampler.draw([1, 2], 3, **params)
        first_step, has_sent = threading.Event(), threading.Event()
        step, trained_beside = engine.step, []
        trainer_step = server.trainer.step

        def slow_step(most: int = 1):
            found = step(most)
            first_step.set()
            assert has_sent.wait(30)
            return found

        def noted(model_id, adam):
            trained_beside.append(engine.has_work)
            return trainer_step(model_id, adam)

        engine.step, server.trainer.step = slow_step, noted
        sent = sampler.send([1, 2], 3, **params).json()["request_id"]
        assert first_step.wait(30)
        ids = []
        for one in (model, model, other):  # that of another rank exchanges layers
            ids.append(one.send_pass(DATA).json()["request_id"])
            one.seq += 1
            step_body = {"model_id": one.model_id, "seq_id": one.seq, "adam_params": {}}
            ids.append(client.http.post("optim_step", json=step_body).json()["request_id"])
        has_sent.set()
        for request_id in ids:
            client.answer(request_id)
        answer = client.answer(sent)
        assert read_samples(answer.content)["sequences"] == expected["sequences"]
        assert answer.headers["x-lockstep-weight-digest"] == expected["digest"]
        assert trained_beside == [True, True, False]


def test_layers_that_cannot_be_adapted_are_refused_when_the_model_is_created(tmp_path):
    random_model("mamba2").save_pretrained(tmp_path / "model")
    with serving(tmp_path) as server, Client(server.url) as client:
        with pytest.raises(Failed, match="no linear layers for train_mlp"):
            client.model()
        with pytest.raises(Failed, match="'out_proj' is incompatible"):
            client.model(train_mlp=False)
        model = client.model(train_mlp=False, train_attn=False)
        model.run(DATA)
        assert model.step()["grad_norm"] > 0


def test_adapters_on_experts_are_refused_by_name(tmp_path):
    random_model("qwen3_moe").save_pretrained(tmp_path / "model")
    with serving(tmp_path) as server, Client(server.url) as client:
        with pytest.raises(Failed, match=r"experts of Qwen3MoeForCausalLM are one tensor .* pass train_mlp=False"):
            client.model()
        client.model(train_mlp=False).run(DATA)
