"""The SDK of Tinker (0.38) against `lockstep tinker`: supervised steps, an RL loop, custom losses, checkpoints.

python tinker_program.py URL MODEL_FOLDER MODEL_NAME
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["TINKER_API_KEY"] = "tml-local"
os.environ["TINKER_TELEMETRY"] = "1"

import tinker
import torch
from tinker import types

PROMPTS = [[5, 17, 9], [40, 41, 42, 43], [100, 3]]


def main(url: str, folder: str, name: str) -> None:
    with tinker.ServiceClient(base_url=url) as service:
        [model] = tinker.RestClient(base_url=url).get_server_capabilities().result().supported_models
        assert model.model_name == name and model.trainable and model.sampleable, model
        supervised(service, name)
        reinforcement(service, name)
        checkpoints(service, name, url)
        custom(service, name)
        samples(service, name)
        refusals(service, name)
    assert Path(folder).is_dir()
    print("Tinker: done")


def datum(prompt: list[int], sampled: list[int], **inputs: list[float]) -> types.Datum:
    """Make a datum of a prompt and what follows it; inputs: one number for each token behind the prompt."""
    ids, before = [*prompt, *sampled], len(prompt) - 1
    padded = {key: [0.0] * before + list(values) for key, values in inputs.items()}
    return types.Datum(
        model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs={"target_tokens": ids[1:], **padded}
    )


def supervised(service: tinker.ServiceClient, name: str) -> None:
    client = service.create_lora_training_client(base_model=name, rank=8, seed=3).result()
    info = client.get_info()
    assert (info.lora_rank, info.model_data.model_name) == (8, name), info
    tokenizer = client.get_tokenizer()
    ids = tokenizer.encode("the name of the value is the name of the value")
    data = [datum(ids[:2], ids[2:], weights=[1.0] * (len(ids) - 2))]
    losses = []
    for _ in range(12):
        passed = client.forward_backward(data, "cross_entropy")
        stepped = client.optim_step(types.AdamParams(learning_rate=5e-3))
        losses.append(passed.result().metrics["loss:sum"])
        assert stepped.result().metrics["grad_norm"] > 0
    assert losses[-1] < 0.5 * losses[0], losses
    print(f"supervised: the loss falls from {losses[0]:.2f} to {losses[-1]:.2f}")


def reinforcement(service: tinker.ServiceClient, name: str) -> None:
    """GRPO's advantages with the loss importance_sampling; the reward is the share of a quarter of the tokens."""
    client = service.create_lora_training_client(base_model=name, rank=4, seed=1).result()
    rewards = []
    for step in range(10):
        sampler = client.save_weights_and_get_sampling_client().result()
        params = types.SamplingParams(max_tokens=8, temperature=1.0, stop=[], seed=100 + step)
        drawn = [sampler.sample(types.ModelInput.from_ints(prompt), 8, params) for prompt in PROMPTS]
        data, total = [], []
        for prompt, future in zip(PROMPTS, drawn, strict=True):
            sequences = future.result().sequences
            found = [sum(token % 4 == 0 for token in one.tokens) / len(one.tokens) for one in sequences]
            mean = sum(found) / len(found)
            total.append(mean)
            for one, reward in zip(sequences, found, strict=True):
                advantages = [reward - mean] * len(one.tokens)
                data.append(datum(prompt, one.tokens, logprobs=one.logprobs, advantages=advantages))
        rewards.append(sum(total) / len(total))
        before = client.forward(data, "importance_sampling").result()
        for one, output in zip(data, before.loss_fn_outputs, strict=True):
            counts = one.loss_fn_inputs["advantages"].to_torch() != 0
            assert torch.equal(
                output["logprobs"].to_torch()[counts], one.loss_fn_inputs["logprobs"].to_torch()[counts]
            ), "the trainer's log-probabilities have the sampler's bits"
        for substep in range(2):
            passed = client.forward_backward(data, "importance_sampling")
            client.optim_step(types.AdamParams(learning_rate=1e-2, eps=1e-8)).result()
            ratios = [passed.result().metrics[f"importance_ratio:{end}"] for end in ("min", "max")]
            assert (ratios == [1.0, 1.0]) is (substep == 0), (substep, ratios)
    assert rewards[-1] > rewards[0] + 0.2, rewards
    print(f"reinforcement: the reward rises from {rewards[0]:.2f} to {rewards[-1]:.2f}; on-policy ratios are 1.0")


def checkpoints(service: tinker.ServiceClient, name: str, url: str) -> None:
    data, params = [datum([1, 2], [3, 4, 5], weights=[1.0] * 3)], types.AdamParams(learning_rate=1e-2)

    def step(client: tinker.TrainingClient) -> list[float]:
        passed = client.forward_backward(data, "cross_entropy")
        client.optim_step(params).result()
        return passed.result().loss_fn_outputs[0]["logprobs"].tolist()

    client = service.create_lora_training_client(base_model=name, rank=4).result()
    for _ in range(3):
        step(client)
    path = client.save_state("three", user_metadata={"kind": "test"}).result().path
    saved = client.save_weights_for_sampler("three").result().path
    sampler = service.create_sampling_client(model_path=saved).result()
    prompt = types.ModelInput.from_ints([1, 2, 3, 4, 5])
    before = sampler.compute_logprobs(prompt).result()
    expected = [step(client) for _ in range(3)]
    assert sampler.compute_logprobs(prompt).result() == before, "a sampler keeps its weights while training goes on"
    assert before[2:] == expected[0][1:], "and has the trainer's bits"
    resumed = service.create_training_client_from_state_with_optimizer(path).result()
    assert [step(resumed) for _ in range(3)] == expected, "a resumed run goes on exactly"
    anew = service.create_training_client_from_state(path).result()
    found = [step(anew) for _ in range(3)]
    assert found[0] == expected[0], "the weights are the same"
    assert found[2] != expected[2], "the optimizer's state is not"

    rest = tinker.RestClient(base_url=url)
    [run] = [one for one in rest.list_training_runs().result().training_runs if one.training_run_id == client.model_id]
    assert run.last_checkpoint.tinker_path == path and run.lora_rank == 4
    listed = rest.list_checkpoints(client.model_id).result().checkpoints
    assert {one.tinker_path for one in listed} == {path, saved}
    assert rest.get_weights_info_by_tinker_path(path).result().lora_rank == 4
    rest.delete_checkpoint_from_tinker_path(saved).result()
    assert [one.tinker_path for one in rest.list_checkpoints(client.model_id).result().checkpoints] == [path]
    print("checkpoints: saved, sampled, resumed with and without the optimizer's state, listed and deleted")


def custom(service: tinker.ServiceClient, name: str) -> None:
    """A loss of the client's own: minus the summed log-probability, which is cross_entropy."""
    data = [datum([1, 2], [3, 4, 5], weights=[1.0] * 3), datum([9], [8, 7], weights=[1.0] * 2)]

    def loss(data: list[types.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        weights = [one.loss_fn_inputs["weights"].to_torch() for one in data]
        return -sum((lp * w).sum() for lp, w in zip(logprobs, weights, strict=True)), {"own": 1.0}

    found = []
    for run in range(2):
        client = service.create_lora_training_client(base_model=name, rank=4, seed=9).result()
        for _ in range(2):
            if run:
                passed = client.forward_backward_custom(data, loss)
            else:
                passed = client.forward_backward(data, "cross_entropy")
            client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        found.append([one["logprobs"].tolist() for one in passed.result().loss_fn_outputs])
    assert found[0] == found[1]
    print("custom losses: forward_backward_custom trains as the built-in loss")


def samples(service: tinker.ServiceClient, name: str) -> None:
    sampler = service.create_sampling_client(base_model=name).result()
    assert sampler.get_base_model() == name and sampler.get_tokenizer().encode("the name")
    prompt = types.ModelInput.from_ints([5, 17, 9, 40, 41])
    params = types.SamplingParams(max_tokens=6, seed=3, temperature=0.8, top_k=50, top_p=0.9, stop=[])
    first, again = (sampler.sample(prompt, 3, params).result() for _ in range(2))
    assert [one.tokens for one in first.sequences] == [one.tokens for one in again.sequences]
    assert len({tuple(one.tokens) for one in first.sequences}) > 1
    assert len({one.sequence_id for one in (*first.sequences, *again.sequences)}) == 6
    targets = types.TensorData(data=[1, 2, 3, -1, 5, 6, 7, 8], dtype="int64", shape=[4, 2])
    scored = sampler.sample(
        prompt, 1, types.SamplingParams(max_tokens=1), include_prompt_logprobs=True, topk_prompt_logprobs=3,
        topk_sample_logprobs=2, target_prompt_logprobs=targets,
    ).result()  # fmt: skip
    assert scored.prompt_logprobs[0] is None and None not in scored.prompt_logprobs[1:]
    assert [one and len(one) for one in scored.topk_prompt_logprobs] == [None, 3, 3, 3, 3]
    assert len(scored.sequences[0].topk_logprobs[0]) == 2
    named = scored.target_prompt_logprobs.to_numpy()
    assert named[1, 1] == 0.0 and (named < 0).sum() == 7
    ids = torch.full((4, 1), -1, dtype=torch.int64)
    ids[3, 0] = 41
    sparse = sampler.sample(
        prompt, 1, types.SamplingParams(max_tokens=1), include_prompt_logprobs=True,
        target_prompt_logprobs=types.TensorData.from_torch_sparse(ids, pad_value=-1),
    ).result()  # fmt: skip
    assert sparse.target_prompt_logprobs.to_torch()[3, 0].item() == sparse.prompt_logprobs[4]
    last = sampler.compute_logprobs(prompt, prompt_logprobs_last_n=2).result()
    assert last[:3] == [None] * 3 and last[3:] == scored.prompt_logprobs[3:]
    token = first.sequences[0].tokens[2]
    ended = sampler.sample(prompt, 1, types.SamplingParams(max_tokens=6, seed=3, temperature=0.8, top_k=50, top_p=0.9,
                                                           stop=[token])).result().sequences[0]  # fmt: skip
    assert ended.stop_reason == "stop" and ended.tokens[-1] == token
    print("samples: seeded, filtered, stopped, scored, with alternatives and named tokens")


def refusals(service: tinker.ServiceClient, name: str) -> None:
    """What is refused reaches the user with its reason."""
    client = service.create_lora_training_client(base_model=name, rank=4).result()
    refuse(lambda: client.forward_backward([datum([1], [2], weights=[1.0])], "stable_reinforce"), "stable_reinforce")
    refuse(lambda: client.optim_step(types.AdamParams()), "no gradients")
    refuse(lambda: client.forward([datum([1], [10**6], weights=[1.0])], "cross_entropy"), "vocabulary has")
    refuse(lambda: service.create_lora_training_client(base_model=name, rank=4096), "max-lora-rank")
    refuse(lambda: service.create_lora_training_client(base_model="another/model", rank=4), "is not served")
    refuse(lambda: client.save_weights_and_get_sampling_client(kind="inflight"), "inflight")
    refuse(lambda: client.save_state("../outside"), "no name of a checkpoint")
    assert client.forward([datum([1], [2], weights=[1.0])], "cross_entropy").result().metrics["loss:sum"] > 0
    print("refusals: named, and the model goes on")


def refuse(call, reason: str) -> None:
    told = ""
    try:
        call().result()
    except (tinker.APIStatusError, tinker.RequestFailedError) as error:
        told = str(error)
    assert reason in told, f"{told!r} does not say {reason!r}"


main(*sys.argv[1:])
