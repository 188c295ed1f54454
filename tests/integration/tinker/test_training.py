"""Training and sampling over the wire: equal bits, exact resumption, clients that do not touch each other."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from lockstep.integration.grpo.training.shared_prefixes import RowTree
from lockstep.integration.tinker.training import passes
from lockstep.integration.tinker.training.checkpoints import Checkpoints
from lockstep.integration.tinker.training.targets import AdapterSpec
from lockstep.rollout.model.adapters.folder import AdapterFolder
from lockstep.tests.integration.tinker.conftest import serving
from lockstep.tests.support.tinker_client import Client, Failed, datum, read_samples, sampled_datum

PROMPTS = [[3, 17, 90, 4, 55], [7] * 3 + list(range(40, 75)), [250]]
DATA = [
    datum([1, 2, 3, 4], target_tokens=[2, 3, 4, 5], weights=[0.0, 1.0, 1.0, 0.5]),
    datum([9, 8], target_tokens=[8, 7]),
    datum(range(20), target_tokens=range(1, 21)),
]


def draw_all(sampler, **params):
    return [sampler.draw(prompt, 2, max_tokens=6, seed=5, stop=[], **params) for prompt in PROMPTS]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("microbatch_bytes", [1, 2**30])
def test_forward_has_the_bits_of_the_samples_after_every_step(serve, dtype, microbatch_bytes):
    with serve(dtype, microbatch_bytes=microbatch_bytes) as server, Client(server.url) as client:
        model = client.model(rank=4, seed=3)
        digests = set()
        for _ in range(4):
            drawn = draw_all(model.sampler())
            digests |= {one["digest"] for one in drawn}
            pairs = [(p, one) for p, answer in zip(PROMPTS, drawn, strict=True) for one in answer["sequences"]]
            data = [sampled_datum(prompt, one, 1.0 + at) for at, (prompt, one) in enumerate(pairs)]
            for forward_only in (True, False):
                outputs, metrics = model.run(data, "importance_sampling", forward_only=forward_only)
                for (prompt, one), output in zip(pairs, outputs, strict=True):
                    assert output["logprobs"][len(prompt) - 1 :].tolist() == one["logprobs"]
                assert metrics["importance_ratio:min"] == metrics["importance_ratio:max"] == 1.0
            assert model.step(learning_rate=3e-2)["grad_norm"] > 0
        assert len(digests) == 4


def test_what_data_have_in_common_from_their_beginning_is_computed_once(serve, monkeypatch):
    num_rows = []

    class Counted(RowTree):
        def packing(self, device):
            num_rows.append(len(self.token_ids))
            return super().packing(device)

    monkeypatch.setattr(passes, "RowTree", Counted)
    prompt = list(range(30))
    data = [datum([*prompt, at], target_tokens=[*prompt[1:], at, 0]) for at in (40, 50, 40)]
    found = []
    for size in (1, 2**30):
        with serve("float32", microbatch_bytes=size) as server, Client(server.url) as client:
            outputs, _ = client.model(rank=4, seed=3).run(data)
            found.append([output["logprobs"].tolist() for output in outputs])
    assert found[0] == found[1] and found[0][0] == found[0][2] != found[0][1]
    assert num_rows == [31, 31, 31, 32]


def test_prompts_are_scored_with_the_bits_of_forward_whatever_the_temperature(client):
    model = client.model()
    model.train(DATA)
    sampler, prompt = model.sampler(), PROMPTS[1]
    outputs, _ = model.run([datum(prompt[:-1], target_tokens=prompt[1:])], forward_only=True)
    for temperature in (1.0, 0.5):
        drawn = sampler.draw(prompt, max_tokens=1, temperature=temperature, extra={"prompt_logprobs": True})
        assert np.isnan(drawn["prompt_logprobs"][0])
        assert drawn["prompt_logprobs"][1:] == outputs[0]["logprobs"].tolist()


def plain_step(folder, loss_of, **adam):
    """Return log-probabilities and weights of plain PyTorch before and after one step of AdamW."""
    path = next((folder / "checkpoints").glob("*/sampler_weights/before"))
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(model, path, is_trainable=True)
    named = {name: own for name, own in model.named_parameters() if own.requires_grad}
    optimizer = torch.optim.AdamW(named.values(), **adam)
    loss_of(model).backward()
    optimizer.step()
    return {name.replace(".default.", "."): own.detach() for name, own in named.items()}


def logprobs_of(model, tokens, targets):
    logits = model(input_ids=torch.tensor([tokens])).logits[0]
    return torch.log_softmax(logits, -1).gather(-1, torch.tensor(targets)[:, None])[:, 0]


@pytest.mark.parametrize("loss_fn", ["cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo"])
def test_one_step_is_that_of_plain_pytorch(serve, tmp_path, folder, loss_fn):
    """The formulas of the API's documentation, with PEFT's own forward and torch's AdamW."""
    (tmp_path / "model").symlink_to(folder / "model")
    tokens, targets = [5, 17, 9, 40, 2], [17, 9, 40, 2, 77]
    old = [-5.0, -4.5, -6.5, -5.2, -5.6]
    advantages, weights = [0.0, 1.5, -2.0, 0.7, 1.0], [0.0, 1.0, 0.5, 1.0, 1.0]
    inputs = {"weights": weights}
    if loss_fn != "cross_entropy":
        inputs |= {"logprobs": old, "advantages": advantages}
    config = {}
    if loss_fn == "dro":
        config = {"beta": 0.3}
    if loss_fn == "gspo":
        inputs |= {"sequence_ratio_mask": [0, 1, 1, 1, 0]}
    if loss_fn in ("ppo", "cispo", "gspo"):
        config = {"clip_low_threshold": 0.7, "clip_high_threshold": 1.1}

    def loss_of(model):
        lp, q, a = logprobs_of(model, tokens, targets), torch.tensor(old), torch.tensor(advantages)
        ratio, (low, high) = torch.exp(lp - q), (0.7, 1.1)
        if loss_fn == "gspo":
            mean = (lp.detach() - q)[torch.tensor(inputs["sequence_ratio_mask"]) != 0].mean()
            ratio = torch.exp(mean + lp - lp.detach())
        losses = {
            "cross_entropy": -lp,
            "importance_sampling": -ratio * a,
            "ppo": -torch.min(ratio * a, ratio.clamp(low, high) * a),
            "cispo": -ratio.clamp(low, high).detach() * lp * a,
            "dro": -(lp * a - 0.5 * 0.3 * (lp - q) ** 2),
            "gspo": -torch.min(ratio * a, ratio.clamp(low, high) * a),
        }
        losses = losses[loss_fn] * torch.tensor(weights)
        values.append((lp.detach(), losses.detach()))
        return losses.sum()

    values = []
    adam = {"learning_rate": 1e-2, "beta1": 0.8, "beta2": 0.9, "eps": 1e-8, "weight_decay": 0.1}
    with serving(tmp_path) as server, Client(server.url) as client:
        model = client.model(rank=4, seed=2)
        model.train(DATA)
        model.call("save_weights_for_sampler", path="before")
        fresh = client.model_from(model.call("save_weights", path="state")["path"], optimizer=False)
        [output], metrics = fresh.run([datum(tokens, target_tokens=targets, **inputs)], loss_fn, **config)
        fresh.step(**adam)
        fresh.call("save_weights_for_sampler", path="after")
        expected = plain_step(tmp_path, loss_of, lr=1e-2, betas=(0.8, 0.9), eps=1e-8, weight_decay=0.1)
        [(lp, losses)] = values
        np.testing.assert_allclose(output["logprobs"], lp, atol=1e-4)
        np.testing.assert_allclose(output["elementwise_loss"], losses, atol=1e-4, rtol=1e-4)
        assert metrics["loss:sum"] == pytest.approx(losses.sum().item(), rel=1e-4)
        [path] = (tmp_path / "checkpoints").glob("*/sampler_weights/after")
        found = AdapterFolder.read(path).tensors
        assert found.keys() == {name.removeprefix("base_model.model.") for name in expected}
        for name, own in expected.items():
            np.testing.assert_allclose(found[name.removeprefix("base_model.model.")], own, atol=3e-5)


def test_positions_may_have_several_targets_also_in_csr_form(client):
    from lockstep.integration.tinker.wire.protobuf import put_bytes, put_numbers, put_text, put_varint

    model = client.model()
    targets, weights = [[2, 9], [3, 0], [4, 8]], [[0.5, 0.5], [1.0, 0.0], [0.25, 0.75]]
    [dense], metrics = model.run([datum([1, 2, 3], target_tokens=targets, weights=weights)], forward_only=True)
    [plain], _ = model.run([datum([1, 2, 3], target_tokens=[2, 3, 4])], forward_only=True)
    assert dense["logprobs"].shape == (3, 2) and dense["logprobs"][:, 0].tolist() == plain["logprobs"].tolist()
    assert metrics["loss:sum"] == pytest.approx(-(dense["logprobs"] * weights).sum(), rel=1e-6)

    def csr(values, kind):
        rows, columns = np.array([0, 2, 3, 5], "<i8"), np.array([0, 1, 0, 0, 1], "<i8")
        parts = put_bytes(1, values.tobytes()) + put_bytes(2, rows.tobytes()) + put_bytes(3, columns.tobytes())
        return put_bytes(2, parts) + put_varint(3, kind) + put_numbers(4, [3, 2])

    sparse = datum([1, 2, 3])
    for name, value in (
        ("target_tokens", csr(np.array([2, 9, 3, 4, 8], "<i8"), 2)),
        ("weights", csr(np.array([0.5, 0.5, 1.0, 0.25, 0.75], "<f4"), 1)),
    ):
        sparse += put_bytes(2, put_text(1, name) + put_bytes(2, value))
    [found], again = model.run([sparse], forward_only=True)
    assert again == metrics and found["logprobs"].tolist() == dense["logprobs"].tolist()


def test_gradients_of_several_requests_are_summed_until_a_step(client):
    together, apart = client.model(seed=1), client.model(seed=1)
    together.run(DATA)
    for one in DATA:
        apart.run([one])
    norms = [model.step(learning_rate=1e-2)["grad_norm"] for model in (together, apart)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    clipped = client.model(seed=1)
    clipped.run(DATA)
    assert clipped.step(learning_rate=1e-2, grad_clip_norm=1e-3)["grad_norm"] == norms[0]


def test_two_clients_interleaved_train_as_each_alone(server, client):
    def alone(rank):
        with Client(server.url) as own:
            model = own.model(rank=rank, seed=rank)
            trained = [model.train(DATA) for _ in range(3)]
            return trained, model.sampler().draw(PROMPTS[0], 2, max_tokens=6, seed=1, stop=[])

    expected = [alone(rank) for rank in (2, 4)]
    with Client(server.url) as other:
        models = [client.model(rank=2, seed=2), other.model(rank=4, seed=4)]
        found = [[], []]
        samplers = [model.sampler() for model in models]
        for _ in range(3):
            for at, model in enumerate(models):
                found[at].append(model.train(DATA))
                samplers[1 - at].draw(PROMPTS[2], max_tokens=3)
        drawn = [model.sampler().draw(PROMPTS[0], 2, max_tokens=6, seed=1, stop=[]) for model in models]
        assert [(one, its) for one, its in zip(found, drawn, strict=True)] == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_run_goes_on_exactly_also_after_a_restart(serve, dtype):
    with serve(dtype) as server, Client(server.url) as client:
        model = client.model(rank=4)
        for _ in range(3):
            model.train(DATA)
        path = model.call("save_weights", path="three", user_metadata={"note": "a"})["path"]
        expected = [model.train(DATA) for _ in range(3)]
        digest = model.sampler().draw(PROMPTS[0], max_tokens=1)["digest"]
        model.call("load_weights", path=path, optimizer=True)
        assert [model.train(DATA) for _ in range(3)] == expected
    with serve(dtype) as server, Client(server.url) as client:
        resumed = client.model_from(path, optimizer=True)
        assert [resumed.train(DATA) for _ in range(3)] == expected
        assert resumed.sampler().draw(PROMPTS[0], max_tokens=1)["digest"] == digest
        anew = client.model_from(path, optimizer=False)
        found = [anew.train(DATA) for _ in range(3)]
        assert found[0] == expected[0] and found[2] != expected[2]


def test_samplers_keep_their_weights_while_training_goes_on(client):
    model = client.model()
    model.train(DATA)
    unnamed, base = model.sampler(), client.sampler()
    named = client.sampler(model.call("save_weights_for_sampler", path="kept")["path"])
    state = client.sampler(model.call("save_weights", path="state")["path"])
    before = [draw_all(sampler) for sampler in (unnamed, named, state, base)]
    assert before[0] == before[1] == before[2] != before[3]
    for _ in range(2):
        model.train(DATA)
        assert [draw_all(sampler) for sampler in (base, unnamed, state, named)] == [before[3], *before[:3]]
    assert draw_all(model.sampler()) != before[0]


def test_samples_of_one_rank_read_the_same_memory_which_recorded_steps_have(serve):
    with serve() as server, Client(server.url) as client:
        model, places = client.model(rank=4), []
        for _ in range(3):
            model.sampler().draw(PROMPTS[0], max_tokens=12, stop=[])
            names = server.service.engine.model.module.named_parameters()
            places.append({name: own.data_ptr() for name, own in names})
            model.train(DATA)
        assert any("lora_A" in name for name in places[0]) and places[0] == places[1] == places[2]


def test_seeds_settings_and_stops_are_those_of_the_request(client):
    sampler, prompt = client.sampler(), PROMPTS[1]
    first = sampler.draw(prompt, 3, max_tokens=8, seed=7, stop=[])
    assert sampler.draw(prompt, 3, max_tokens=8, seed=7, stop=[])["sequences"] == first["sequences"]
    assert len({tuple(one["tokens"]) for one in first["sequences"]}) == 3
    token = first["sequences"][0]["tokens"][3]
    [stopped] = sampler.draw(prompt, max_tokens=8, seed=7, stop=[token])["sequences"]
    assert stopped["has_stopped"] and stopped["tokens"][-1] == token
    assert stopped["tokens"] == first["sequences"][0]["tokens"][: len(stopped["tokens"])]
    greedy = [sampler.draw(prompt, max_tokens=4, top_k=1, seed=seed)["sequences"][0]["tokens"] for seed in (1, 2)]
    assert greedy[0] == greedy[1] == sampler.draw(prompt, max_tokens=4, temperature=0.0)["sequences"][0]["tokens"]


def test_checkpoints_are_adapter_folders_with_the_digest_of_any_engine(serve, folder):
    """`lockstep serve --lora` computes the same digest, and PEFT reads the folder."""
    from lockstep.integration.service import RolloutService
    from lockstep.rollout.config import EngineConfig
    from lockstep.rollout.engine import Engine

    with serve() as server, Client(server.url) as client:
        model = client.model(rank=3, train_unembed=False)
        model.train(DATA)
        path = model.call("save_weights_for_sampler", path="export")["path"]
        drawn = client.sampler(path).draw(PROMPTS[0], max_tokens=4, seed=1, stop=[])
        base = client.sampler().draw(PROMPTS[0], max_tokens=1)["digest"]
    checkpoints = Checkpoints(folder / "checkpoints")
    files = checkpoints.folder / checkpoints.info(path).run_id / "sampler_weights" / "export"
    assert json.loads((files / "adapter_config.json").read_text())["r"] == 3
    service = RolloutService(Engine(folder / "model", EngineConfig(kv_cache="32 blocks")))
    assert service.model_digest() == base
    assert service.load_lora_adapter("own", files).commit.digest == drawn["digest"]
    [own] = service.engine.generate([PROMPTS[0]], {"max_new_tokens": 4, "sampling_seed": 1, "ignore_eos": True})
    assert list(own.logprobs) == drawn["sequences"][0]["logprobs"]
    service.close()


@pytest.mark.parametrize("kinds", [{"train_mlp": False}, {"train_attn": False, "train_unembed": False}])
def test_adapters_are_on_the_layers_that_were_asked_for(serve, folder, kinds):
    with serve() as server, Client(server.url) as client:
        model = client.model(rank=2, **kinds)
        model.train(DATA)
        path = model.call("save_weights_for_sampler", path="kinds")["path"]
    checkpoints = Checkpoints(folder / "checkpoints")
    files = checkpoints.folder / checkpoints.info(path).run_id / "sampler_weights" / "kinds"
    layers = {name.split(".")[-3] for name in AdapterFolder.read(files).tensors}
    of_kind = {"train_attn": {"q_proj", "k_proj", "v_proj", "o_proj"}, "train_unembed": {"lm_head"},
               "train_mlp": {"gate_proj", "up_proj", "down_proj"}}  # fmt: skip
    assert layers == set().union(*(own for kind, own in of_kind.items() if kinds.get(kind, True)))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_clients_at_the_same_time_have_the_bits_that_each_has_alone(serve, dtype):
    """Adapters of one rank, whose training runs between the steps of samples, and of others, which wait for them."""
    ranks = [2, 4, 4, 3]

    def run(client, place):
        model = client.model(rank=ranks[place], seed=place)
        found = []
        for step in range(3):
            sampler = model.sampler()
            sent = [sampler.send(prompt, 2, max_tokens=20, seed=step, stop=[]).json() for prompt in PROMPTS]
            found.append(model.train(DATA, learning_rate=3e-2))
            drawn = [read_samples(client.answer(one["request_id"]).content)["sequences"] for one in sent]
            data = [sampled_datum(p, one) for p, its in zip(PROMPTS, drawn, strict=True) for one in its]
            found.append((drawn, model.train(data, "importance_sampling")))
        return found

    with serve(dtype) as server:
        alone = []
        for place in range(len(ranks)):
            with Client(server.url) as client:
                alone.append(run(client, place))
        for _ in range(3):
            with ExitStack() as entered, ThreadPoolExecutor(len(ranks)) as pool:
                clients = [entered.enter_context(Client(server.url)) for _ in ranks]
                together = list(pool.map(run, clients, range(len(ranks))))
            assert together == alone


def test_layers_of_kinds_of_adapters_that_are_gone_are_dropped(serve):
    with serve(max_snapshots=1) as server, Client(server.url) as client:
        kinds = server.trainer._window.knows
        sampled, trained = client.model(rank=1), client.model(rank=2)
        sampler = sampled.sampler()
        for rank in (3, 4, 5):
            model = client.model(rank=rank)
            model.run(DATA)
            client.answer(client.post("unload_model", model_id=model.model_id)["request_id"])
        client.answer(client.post("unload_model", model_id=sampled.model_id)["request_id"])
        trained.run(DATA)
        assert [rank for rank in range(1, 6) if kinds(AdapterSpec(rank))] == [1, 2], "a sampler has the first"
        expected = sampler.draw([1, 2], max_tokens=3, seed=1, stop=[])
        trained.sampler()  # takes the place of the other snapshot
        trained.run(DATA)  # and this that of its layers in the module
        assert [rank for rank in range(1, 6) if kinds(AdapterSpec(rank))] == [2]
        with pytest.raises(Failed, match="--max-snapshots"):
            sampler.draw([1, 2], max_tokens=3, seed=1, stop=[])
        again = client.model(rank=1)
        assert again.sampler().draw([1, 2], max_tokens=3, seed=1, stop=[])["sequences"] == expected["sequences"]
