"""Train on what an agent does, without a change of the agent: its base URL is a session, which keeps its tokens.

    python examples/agent_rows.py [--model FOLDER] [--agent COMMAND]

Needs the extra `serve`: pip install -e '.[serve]'. The agent is a process that gets its base URL in OPENAI_BASE_URL and
writes what it has done; the one of this file asks three times, with its whole history each time, and once on the side.
Its session has a branch for each conversation, and each branch becomes a row for the trainer: token ids, a mask of the
sampled ones, their log-probabilities. The trainer's forward computes the same ones: the gap that is printed is 0.0,
exactly. The model must have a chat template; without --model it is a tiny random one.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import httpx
import torch
from tiny_model import load

from lockstep import Engine, EngineConfig, RolloutService
from lockstep.integration.http.edge.config import HttpConfig
from lockstep.integration.http.server import serve_in_background
from lockstep.kernels.sampling.logprobs import selected_logprobs

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def main() -> None:
    """Serve, run the agent on two tasks, and print the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder in Hugging Face format")
    parser.add_argument("--agent", help="a command; the task is its last argument")
    parser.add_argument("--task", help=argparse.SUPPRESS)  # this process is the agent
    options = parser.parse_args()
    if options.task is not None:
        agent(options.task)
        return

    model, tokenizer = load(options.model)
    tokenizer.chat_template = tokenizer.chat_template or TEMPLATE
    service = RolloutService(Engine(model, EngineConfig(kv_cache="64MiB"), tokenizer=tokenizer))
    service.commit_in_place("1", source=model.named_parameters())
    command = shlex.split(options.agent) if options.agent else [sys.executable, __file__, "--task"]
    with service.rollout(), serve_in_background(service, HttpConfig(port=0)) as server:
        rows = [row for task in ("count to three", "sort 3 1 2") for row in rows_of(server.url, command, task)]
    for row in rows:  # and here the trainer learns from them
        gap = gap_of(service, model, row)
        print(f"{len(row.token_ids)} tokens, {sum(row.loss_mask)} of them to learn from; log-probability gap {gap}")
    service.close()


@dataclass(frozen=True)
class Row:
    """One conversation for the trainer."""

    token_ids: list[int]
    loss_mask: list[bool]  # one per token: sampled, and in no earlier row
    logprobs: list[float]  # one per token, 0.0 where it was not sampled
    temperature: float


def rows_of(url: str, command: list[str], task: str) -> list[Row]:
    """Run the agent on a task in a session of its own, and return a row for each branch of it."""
    with httpx.Client(base_url=url, timeout=60) as client:
        session = client.post("/open_session", json={}).raise_for_status().json()
        environment = {**os.environ, "OPENAI_BASE_URL": f"{url}/sessions/{session}/v1", "OPENAI_API_KEY": "none"}
        subprocess.run([*command, task], env=environment, check=True, timeout=600)

        def info(**fields: object) -> Any:
            return client.get("/session_info", params={"session_id": session, **fields}).raise_for_status().json()

        learned: set[str] = set()  # answers of earlier rows: branches share their beginnings
        rows = [row_of(info(rid=leaf, logprobs=True), learned) for leaf in info()["leaves"]]
        client.post("/close_session", json={"session_id": session}).raise_for_status()
    return rows


def row_of(branch: Any, learned: set[str]) -> Row:
    """Return the row of a branch, and add its answers to those that are learned."""
    ids = branch["token_ids"]
    mask, logprobs = [False] * len(ids), [0.0] * len(ids)
    for run in branch["sampled"]:
        part = slice(run["start"], run["end"])
        mask[part] = [run["rid"] not in learned] * (run["end"] - run["start"])
        logprobs[part] = run["logprobs"]
    learned.update(run["rid"] for run in branch["sampled"])
    return Row(ids, mask, logprobs, branch["sampled"][0]["temperature"])


def gap_of(service: RolloutService, model: torch.nn.Module, row: Row) -> float:
    """Return the largest difference between the log-probabilities of a row and those of the trainer's forward."""
    ids, mask = torch.tensor([row.token_ids]), torch.tensor(row.loss_mask[1:])
    with service.training_numerics(), torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
    trained = selected_logprobs(logits, ids[0, 1:], row.temperature)
    return (trained - torch.tensor(row.logprobs[1:], dtype=torch.float32))[mask].abs().max().item()


def agent(task: str) -> None:
    """Be the agent, which knows nothing of sessions: it sends its whole history with every request."""
    with httpx.Client(base_url=os.environ["OPENAI_BASE_URL"], timeout=60) as client:

        def ask(messages: list[dict[str, Any]]) -> dict[str, Any]:
            body = {"model": "", "messages": messages, "max_tokens": 8, "temperature": 0.7}
            answer = client.post("chat/completions", json=body).raise_for_status().json()
            return answer["choices"][0]["message"]

        ask([{"role": "system", "content": "Name the topic."}, {"role": "user", "content": task}])
        history = [{"role": "user", "content": task}]
        for _ in range(3):
            history += [ask(history), {"role": "user", "content": "Go on."}]


if __name__ == "__main__":
    main()
