"""Adapters over HTTP, in SGLang's and vLLM's spelling: whole or no trace, one at a time, others refused by name."""

from __future__ import annotations

import httpx
import pytest
import torch
from peft import LoraConfig, get_peft_model

from lockstep.integration.http.edge.config import HttpConfig
from lockstep.integration.http.server import serve_in_background
from lockstep.integration.service import RolloutService
from lockstep.integration.service_config import ServiceConfig
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine

PROMPT = list(range(3, 40))
LORA = {"lora_alpha": 8, "target_modules": ["q_proj", "o_proj", "gate_proj"], "init_lora_weights": False}


@pytest.fixture
def folders(make_model, tmp_path):
    """Save a base and two adapters of it. Returns the folder, and the digest and greedy tokens with each."""
    make_model("qwen3").save_pretrained(tmp_path / "base")
    known = {}
    for seed, name in enumerate(("one", "two")):
        torch.manual_seed(seed)
        model = get_peft_model(make_model("qwen3"), LoraConfig(r=2 + seed, **LORA))
        model.save_pretrained(tmp_path / name)
        trainer = RolloutService(Engine(model, EngineConfig(kv_cache="16 blocks")))
        tokens = model.generate(input_ids=torch.tensor([PROMPT]), max_new_tokens=8, do_sample=False, pad_token_id=0)
        known[name] = trainer.model_digest(), tokens[0, len(PROMPT) :].tolist()
        trainer.close()
    return tmp_path, known


@pytest.fixture
def served(folders, request):
    engine = Engine(folders[0] / "base", EngineConfig(kv_cache="32 blocks", max_num_seqs=4))
    service = RolloutService(engine, getattr(request, "param", None))
    config = HttpConfig(port=0, api_key="user", admin_api_key="admin", model_name="base")
    with serve_in_background(service, config) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        yield service, client
    service.close()


def post(client, path, key="admin", **body):
    return client.post(path, json=body, headers={"Authorization": f"Bearer {key}"})


def tokens(client, **extra):
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 8, "temperature": 0}, **extra}
    return post(client, "/generate", key="user", **body).json()["output_ids"]


def test_adapter_is_loaded_answers_and_is_unloaded(folders, served):
    (folder, known), (service, client) = folders, served
    base, base_digest = tokens(client), service.model_digest()
    answer = post(client, "/load_lora_adapter", lora_name="a", lora_path=str(folder / "one"), weight_version="7")
    assert answer.status_code == 200 and answer.json()["loaded_adapters"] == {"a": str(folder / "one")}
    assert answer.json()["weight_digest"] == known["one"][0] and answer.json()["weight_version"] == "7"
    assert tokens(client) == tokens(client, lora_path="a") == known["one"][1] != base
    cards = client.get("/v1/models", headers={"Authorization": "Bearer user"}).json()["data"]
    assert [(card["id"], card["parent"]) for card in cards] == [("base", None), ("a", "base")]

    for body, named in (({"lora_path": "b"}, "'b'"), ({"lora_path": ["b"]}, "'b'")):
        refused = post(client, "/generate", key="user", input_ids=PROMPT, **body)
        assert refused.status_code == 400 and named in refused.text and "lora_path" in refused.text
    for model, code in (("a", 200), ("base:a", 200), ("base", 400), ("base:b", 400)):
        body = {"prompt": PROMPT, "max_tokens": 1, "model": model}
        assert post(client, "/v1/completions", key="user", **body).status_code == code
        body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 1}, "model": model}
        answer = post(client, "/inference/v1/generate", key="user", **body)
        assert answer.status_code == (404 if model == "base:b" else code), answer.text
    few = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 1}}
    for path, body in (("/v1/completions", {"prompt": PROMPT, "max_tokens": 1}), ("/inference/v1/generate", few)):
        assert post(client, path, key="user", **body).json()["model"] == "a"  # which answered

    again = post(client, "/load_lora_adapter", lora_name="b", lora_path=str(folder / "two"))
    assert again.status_code == 400 and "adapter 'a' is loaded already: an engine has one at a time" in again.text
    unknown = post(client, "/unload_lora_adapter", lora_name="b")
    assert unknown.status_code == 400 and "adapter 'b' is not loaded; loaded: 'a'" in unknown.text
    gone = post(client, "/unload_lora_adapter", lora_name="a")
    assert gone.status_code == 200 and gone.json()["loaded_adapters"] == {}
    assert gone.json()["weight_digest"] == base_digest and tokens(client) == base
    assert post(client, "/generate", key="user", input_ids=PROMPT, lora_path="a").status_code == 400


@pytest.mark.parametrize("served", [ServiceConfig(lora_replaces=True)], indirect=True)
def test_an_adapter_replaces_another_one_where_the_service_says_so(folders, served):
    (folder, known), (service, client) = folders, served
    for name, of in (("a-v0", "one"), ("a-v1", "two"), ("a-v1", "one")):
        answer = post(client, "/load_lora_adapter", lora_name=name, lora_path=str(folder / of))
        assert answer.status_code == 200 and answer.json()["loaded_adapters"] == {name: str(folder / of)}
        assert service.engine.weight_digest == known[of][0] and tokens(client, lora_path=name) == known[of][1]
    refused = post(client, "/generate", key="user", input_ids=PROMPT, lora_path="a-v0")
    assert refused.status_code == 400 and "'a-v1' is loaded" in refused.text


def test_paths_of_vllm_answer_with_its_texts_and_need_the_admin_key(folders, served):
    (folder, known), (service, client) = folders, served
    load = {"lora_name": "a", "lora_path": str(folder / "one")}
    for path in ("/v1/load_lora_adapter", "/load_lora_adapter", "/v1/unload_lora_adapter"):
        assert post(client, path, key="user", **load).status_code in (401, 403)
    assert service.loaded_adapters == {}
    assert post(client, "/v1/load_lora_adapter", **load).text == "Success: LoRA adapter 'a' added successfully."
    load |= {"lora_path": str(folder / "two"), "load_inplace": True}
    assert post(client, "/v1/load_lora_adapter", **load).status_code == 200
    assert service.engine.weight_digest == known["two"][0] and tokens(client) == known["two"][1]
    assert post(client, "/v1/unload_lora_adapter", lora_name="x").status_code == 404
    text = post(client, "/v1/unload_lora_adapter", lora_name="a").text
    assert text == "Success: LoRA adapter 'a' removed successfully."


def test_an_adapter_is_read_again_with_its_base_after_their_memory_was_released(folders, served):
    (folder, known), (service, client) = folders, served
    load = {"lora_name": "a", "lora_path": str(folder / "one"), "weight_version": "7"}
    assert post(client, "/load_lora_adapter", **load).status_code == 200
    for path in ("/release_memory_occupation", "/resume_memory_occupation"):
        assert post(client, path).status_code == 200
    assert tokens(client, lora_path="a") == known["one"][1]
    assert (service.engine.weight_version, service.engine.weight_digest) == ("7", known["one"][0])


def test_failed_load_leaves_no_trace(folders, served, make_model, monkeypatch):
    (folder, known), (service, client) = folders, served
    load = {"lora_name": "a", "lora_path": str(folder / "one")}
    assert post(client, "/load_lora_adapter", **load).status_code == 200
    get_peft_model(make_model("qwen3", num_hidden_layers=3), LoraConfig(r=2, **LORA)).save_pretrained(folder / "deep")
    (folder / "empty").mkdir()
    cut = folder / "two" / "adapter_model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-100])
    names = [name for name, _ in service.engine.weights.resident_tensors()]
    for name, message in (
        ("deep", "model.layers.2.mlp.gate_proj.lora_A.weight has no place in the model"),
        ("empty", "holds no adapter_config.json and no adapter_model.safetensors"),
        ("two", "cannot be read"),
        ("nowhere", "holds no adapter_config.json"),
    ):
        answer = post(client, "/load_lora_adapter", **load | {"lora_path": str(folder / name), "load_inplace": True})
        assert answer.status_code == 400 and message in answer.text, answer.text
        assert tokens(client) == known["one"][1]

    def fail(*_):
        raise ValueError("no digest today")

    monkeypatch.setattr(service.sessions, "commit_adapter", fail)
    assert post(client, "/unload_lora_adapter", lora_name="a").status_code == 400
    assert service.loaded_adapters == {"a": str(folder / "one")} and tokens(client) == known["one"][1]
    assert [name for name, _ in service.engine.weights.resident_tensors()] == names
    assert service.model_digest() == service.engine.weight_digest == known["one"][0]


def test_updates_reach_base_and_adapter_under_the_names_of_both(folders, served):
    (folder, known), (service, client) = folders, served
    post(client, "/load_lora_adapter", lora_name="a", lora_path=str(folder / "one"))
    with torch.no_grad():
        resident = {name: tensor.clone() for name, tensor in service.engine.weights.resident_tensors()}
    lora = "model.layers.0.self_attn.q_proj.lora_B.default.weight"
    update = {lora: resident[lora] + 1}
    service.update_weights_from_named_tensors(update.items(), weight_version="8")
    service.commit_implicit_update()
    assert service.engine.weight_digest == service.model_digest() != known["one"][0]
    service.update_weights_from_named_tensors({lora: resident[lora]}.items())
    answer = post(client, "/update_weights_from_disk", model_path=str(folder / "base"))
    assert answer.status_code == 200, answer.text
    assert service.engine.weight_digest == known["one"][0]


def test_adapter_is_refused_where_it_cannot_be_loaded(folders, make_model):
    folder = folders[0]
    service = RolloutService(Engine(make_model("qwen3"), EngineConfig(kv_cache="16 blocks")))
    with pytest.raises(ValueError, match="a trainer adds adapters to its own module"):
        service.load_lora_adapter("a", folder / "one")
    assert service.loaded_adapters == {} and service.engine.refusal is None
    service.close()


@pytest.mark.parametrize(("family", "targets"), [("qwen3", ["embed_tokens", "lm_head"]), ("qwen2", ["embed_tokens"])])
def test_adapters_of_embeddings_and_heads_are_loaded_with_the_base_that_they_were_trained_on(
    make_model, tmp_path, family, targets
):
    """PEFT saves the frozen weights below them along. qwen2 has tied embeddings."""
    base = make_model(family)
    base.save_pretrained(tmp_path / "base")
    with torch.no_grad():
        base.get_input_embeddings().weight[3, 3] += 1
    base.save_pretrained(tmp_path / "other")
    torch.manual_seed(0)
    trained = get_peft_model(make_model(family), LoraConfig(**LORA | {"target_modules": targets}))
    trained.save_pretrained(tmp_path / "adapter")
    service = RolloutService(Engine(tmp_path / "base", EngineConfig(kv_cache="16 blocks")))
    service.load_lora_adapter("a", tmp_path / "adapter")
    [answer] = service.engine.generate(PROMPT, {"max_new_tokens": 8})
    logits = trained(torch.tensor([[*PROMPT, *answer.token_ids]])).logits[0, len(PROMPT) - 1 : -1]
    own = logits.log_softmax(-1).gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
    assert torch.allclose(own, torch.tensor(answer.logprobs), atol=1e-4)
    service.close()
    service = RolloutService(Engine(tmp_path / "other", EngineConfig(kv_cache="16 blocks")))
    with pytest.raises(
        ValueError, match=r"embed_tokens\.base_layer\.weight is not the model's: the adapter was trained"
    ):
        service.load_lora_adapter("a", tmp_path / "adapter")
    service.close()
