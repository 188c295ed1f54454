"""Train in your own loop: FSDP2 shards the model, the engine samples, and both compute equal log-probabilities.

    torchrun --nproc-per-node 2 examples/own_trainer.py [--model FOLDER] [--steps N]

The loop is `train`, below. Each rank has an engine with a copy of the weights, since FSDP2 keeps only shards of them.
The trainer's forward runs with the engine's numerics: the log-probability gap that is printed is 0.0, exactly.

A trainer that does not shard the model, such as DistributedDataParallel, passes the model itself to the engine. Then it
needs only `service.training_numerics`, `service.optimizer_step` and `service.commit_in_place`, and an update copies
nothing.
"""

from __future__ import annotations

import argparse
import copy
import warnings

import torch
import torch.distributed as dist
from tiny_model import load
from torch.distributed.fsdp import fully_shard

from lockstep import Completion, Engine, EngineConfig, RolloutService, SamplingParams
from lockstep.integration.grpo.training.packing import Sample, pack
from lockstep.integration.push.adapters.fsdp2 import fsdp2_tensors
from lockstep.integration.ranks import Ranks, process_group, this_rank
from lockstep.kernels.sampling.logprobs import selected_logprobs
from lockstep.rollout.model.trainer_numerics import TrainerNumerics

GROUP = 8  # samples of one prompt
PROMPTS = ("Write a number: ", "Count: ")


def main() -> None:
    """Join the other ranks and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder in Hugging Face format")
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    ranks = this_rank()
    with process_group(ranks, timeout_s=120):
        train(options.model, options.steps, ranks)


def train(path: str | None, num_steps: int, ranks: Ranks) -> None:
    """Sample, learn, and bring the new weights into the engine, step by step. Every rank runs this."""
    model, tokenizer = load(path)  # the same on every rank
    model.to(ranks.device)
    service = RolloutService(Engine(copy.deepcopy(model), EngineConfig(kv_cache="64MiB"), tokenizer=tokenizer))
    numerics = TrainerNumerics(model, device=ranks.device)  # the engine's, for training
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")  # no code writes into it
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(num_steps):
        params = SamplingParams(n=GROUP, max_new_tokens=12, ignore_eos=True, sampling_seed=1000 * step + ranks.rank)
        with service.rollout():
            completions = service.engine.generate(list(PROMPTS), params)
        batch = pack(samples_of(completions), ranks.device)
        with numerics.training_numerics():
            logits = model(**batch.model_inputs()).logits[0]
            logprobs = selected_logprobs(logits, batch.targets, params.temperature)
            loss = -(batch.advantages * (logprobs - batch.logprobs).exp()).mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        service.begin_weight_update(weight_version=str(step + 1))
        service.update_weights_from_named_tensors(fsdp2_tensors(model))  # gathered one by one: every rank takes part
        service.end_weight_update()
        gap = ranks.largest((logprobs.detach() - batch.logprobs).abs().max().item())
        mean = ranks.total(sum(map(reward, completions))) / len(completions) / ranks.num_ranks
        if ranks.is_first:
            digest = service.engine.weight_digest[:12]
            print(f"step {step + 1}: reward {mean:.3f}, log-probability gap {gap}, weights {digest}", flush=True)
    dist.barrier()
    service.close()


def reward(completion: Completion) -> float:
    """Return the share of characters that are digits. Replace it by your own reward."""
    return sum(character.isdigit() for character in completion.text) / max(len(completion.text), 1)


def samples_of(completions: list[Completion]) -> list[Sample]:
    """Give each completion its advantage: its reward less the mean of its group."""
    samples = []
    for first in range(0, len(completions), GROUP):
        group = completions[first : first + GROUP]
        mean = sum(map(reward, group)) / len(group)
        samples += [Sample(c.prompt_ids, c.token_ids, c.logprobs, reward(c) - mean) for c in group]
    return samples


if __name__ == "__main__":
    main()
