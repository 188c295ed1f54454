"""An early SDK of Tinker (0.12), which speaks JSON alone, against `lockstep tinker`.

python tinker_earlier_program.py URL MODEL_FOLDER MODEL_NAME
"""

from __future__ import annotations

import os
import sys

os.environ["TINKER_API_KEY"] = "tml-local"

import tinker
import torch
from tinker import types


def datum(prompt: list[int], sampled: list[int], **inputs: list[float]) -> types.Datum:
    """Make a datum of a prompt and what follows it; inputs: one number for each token behind the prompt."""
    ids, before = [*prompt, *sampled], len(prompt) - 1
    given = {name: torch.tensor([0.0] * before + list(values)) for name, values in inputs.items()}
    tensors = {name: types.TensorData.from_torch(one) for name, one in given.items()}
    targets = types.TensorData.from_torch(torch.tensor(ids[1:]))
    return types.Datum(
        model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs={"target_tokens": targets, **tensors}
    )


def main(url: str, _folder: str, name: str) -> None:
    service = tinker.ServiceClient(base_url=url)
    client = service.create_lora_training_client(base_model=name, rank=4, seed=1)
    data = [datum([1, 2], [3, 4, 5], weights=[1.0] * 3)]
    losses = []
    for _ in range(6):
        passed = client.forward_backward(data, "cross_entropy")
        client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        losses.append(passed.result().metrics["loss:sum"])
    assert losses[-1] < 0.5 * losses[0], losses
    sampler = client.save_weights_and_get_sampling_client(name="six")
    answer = sampler.sample(
        types.ModelInput.from_ints([5, 6, 7]), num_samples=2, include_prompt_logprobs=True, topk_prompt_logprobs=2,
        sampling_params=types.SamplingParams(max_tokens=5, seed=1),
    ).result()  # fmt: skip
    assert answer.prompt_logprobs[0] is None and [len(one) for one in answer.topk_prompt_logprobs[1:]] == [2, 2]
    drawn = answer.sequences[0]
    policy = [datum([5, 6, 7], drawn.tokens, logprobs=drawn.logprobs, advantages=[1.0] * len(drawn.tokens))]
    output = client.forward(policy, "importance_sampling").result()
    assert output.loss_fn_outputs[0]["logprobs"].to_torch()[2:].tolist() == drawn.logprobs, "equal bits"
    assert output.metrics["importance_ratio:min"] == output.metrics["importance_ratio:max"] == 1.0
    custom = client.forward_backward_custom(data, lambda _, logprobs: (-sum(one.sum() for one in logprobs), {}))
    resumed = service.create_training_client_from_state(client.save_state("state").result().path)
    assert (
        resumed.forward(data, "cross_entropy").result().metrics
        == client.forward(data, "cross_entropy").result().metrics
    )
    assert custom.result().metrics["loss:sum"] > 0
    print("Tinker 0.12: done")


main(*sys.argv[1:])
