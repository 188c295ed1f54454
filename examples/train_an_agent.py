"""Train on what an agent does, without a change of the agent: its base URL is a session, which keeps its tokens.

    python examples/train_an_agent.py [--model FOLDER] [--agent COMMAND] [--steps N]

Needs the extra `serve`: pip install -e '.[serve]'. The agent is a process that gets a task as its last argument and its
base URL in OPENAI_BASE_URL; what it prints is rewarded. `an_agent.py` asks three times, with its whole history each
time, and once on the side. Its session has a branch for each conversation, and each branch becomes a row for the
trainer: token ids, a mask of the sampled ones, their log-probabilities. The trainer's forward, with which it learns,
computes the same ones: the gap that is printed is 0.0, exactly. The model must have a chat template; without --model it
is a tiny random one. `docs/guides/agents.md` says how Claude Code and Codex are such agents.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import torch
from tiny_model import load

from lockstep import Engine, EngineConfig, RolloutService
from lockstep.integration.grpo.training.packing import Sample, pack
from lockstep.integration.http.edge.config import HttpConfig
from lockstep.integration.http.server import serve_in_background
from lockstep.kernels.sampling.logprobs import selected_logprobs

AGENT = Path(__file__).with_name("an_agent.py")
GROUP = 4  # agents with the same task
TASKS = ("count to three", "add 17 and 25")
TEMPERATURE = 1.0  # the default, with which the agent asks
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def main() -> None:
    """Run agents, and learn from what they did, step by step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder in Hugging Face format")
    parser.add_argument("--agent", help="a command; the task is its last argument")
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    model, tokenizer = load(options.model)
    tokenizer.chat_template = tokenizer.chat_template or TEMPLATE
    service = RolloutService(Engine(model, EngineConfig(kv_cache="64MiB"), tokenizer=tokenizer))
    service.commit_in_place("0", source=model.named_parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    command = shlex.split(options.agent) if options.agent else [sys.executable, str(AGENT)]
    for step in range(options.steps):
        with service.rollout(), serve_in_background(service, HttpConfig(port=0)) as server:
            samples, mean = play(server.url, command)
        gap = learn(service, model, optimizer, samples)
        service.commit_in_place(str(step + 1), source=model.named_parameters())
        print(f"step {step + 1}: reward {mean:.3f}, {len(samples)} rows, log-probability gap {gap}", flush=True)
    service.close()


def play(url: str, command: list[str]) -> tuple[list[Sample], float]:
    """Run a group of agents on each task, all at a time. Returns a sample for each branch of each agent's session, and
    the mean reward."""
    tasks = [task for task in TASKS for _ in range(GROUP)]
    with ThreadPoolExecutor(len(tasks)) as pool:
        played = list(pool.map(lambda task: play_one(url, command, task), tasks))
    samples = []
    for first in range(0, len(played), GROUP):
        group = played[first : first + GROUP]
        mean = sum(reward for reward, _ in group) / GROUP
        samples += [sample for reward, branches in group for sample in samples_of(branches, reward - mean)]
    return samples, sum(reward for reward, _ in played) / len(played)


def play_one(url: str, command: list[str], task: str) -> tuple[float, list[Any]]:
    """Run the agent on a task in a session of its own. Returns its reward, and the branches of its session."""
    with httpx.Client(base_url=url, timeout=60) as client:
        session = client.post("/open_session", json={}).raise_for_status().json()
        environment = {**os.environ, "OPENAI_BASE_URL": f"{url}/sessions/{session}/v1", "OPENAI_API_KEY": "none"}
        said = subprocess.run([*command, task], env=environment, check=True, timeout=600, stdout=subprocess.PIPE)

        def info(**fields: object) -> Any:
            return client.get("/session_info", params={"session_id": session, **fields}).raise_for_status().json()

        branches = [info(rid=leaf, logprobs=True) for leaf in info()["leaves"]]
        client.post("/close_session", json={"session_id": session}).raise_for_status()
    return reward_of(said.stdout.decode()), branches


def reward_of(said: str) -> float:
    """Return the share of digits in what the agent printed. Replace it by your own reward."""
    return sum(character.isdigit() for character in said) / max(len(said), 1)


def samples_of(branches: list[Any], advantage: float) -> list[Sample]:
    """Return a sample for each branch. An answer that several branches have counts in the first of them."""
    samples, learned = [], set()
    for branch in branches:
        runs = [run for run in branch["sampled"] if run["rid"] not in learned]
        if not runs:
            continue
        learned |= {run["rid"] for run in runs}
        ids, start = branch["token_ids"], runs[0]["start"]
        sampled = [any(run["start"] <= at < run["end"] for run in runs) for at in range(start, len(ids))]
        logprobs = tuple(logprob for run in runs for logprob in run["logprobs"])
        samples.append(Sample(tuple(ids[:start]), tuple(ids[start:]), logprobs, advantage, sampled=tuple(sampled)))
    return samples


def learn(
    service: RolloutService, model: torch.nn.Module, optimizer: torch.optim.Optimizer, samples: list[Sample]
) -> float:
    """Take a step of policy gradient. Returns the largest difference between the log-probabilities of the agents'
    answers and those of the forward that learns."""
    batch = pack(samples, next(model.parameters()).device)
    with service.training_numerics():
        logprobs = selected_logprobs(model(**batch.model_inputs()).logits[0], batch.targets, TEMPERATURE)
        loss = -(batch.advantages * (logprobs - batch.logprobs).exp()).mean()
        loss.backward()
    with service.optimizer_step():
        optimizer.step()
    optimizer.zero_grad()
    return (logprobs.detach() - batch.logprobs).abs().max().item()


if __name__ == "__main__":
    main()
