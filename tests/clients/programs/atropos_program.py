"""Atropos (atroposlib 0.4) against a server by address, as SGLang's and then as its own vLLM's: an environment with a
managed server writes groups to a file, and sends them through the trajectories' API to a trainer that changes weights.

python atropos_program.py URL MODEL_FOLDER MODEL_NAME
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import httpx
import torch
from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup
from atroposlib.envs.server_handling.managed_server import SequenceNode
from transformers import AutoModelForCausalLM

from lockstep.integration.bench.parts.ports import HOST
from lockstep.kernels.sampling.logprobs import selected_logprobs
from lockstep.rollout.model.trainer_numerics import TrainerNumerics
from lockstep.tests.support.forked_ranks import free_port

GROUP, STEPS = 4, 4
ASKED = "LOCKSTEP_ATROPOS"  # settings of the environment, which is a process of its own
T = TypeVar("T")
MASKED = 1.0  # Atropos' log-probability of a token that was not sampled


class Digits(BaseEnv):
    """An environment of two turns that rewards digits."""

    name = "digits"

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, list[APIServerConfig]]:
        asked = json.loads(os.environ[ASKED])
        config = BaseEnvConfig(
            tokenizer_name=asked["folder"], group_size=GROUP, use_wandb=False, rollout_server_url=asked["api"],
            batch_size=2 * GROUP, max_token_length=240, max_num_workers=4, max_batches_offpolicy=1000,
            steps_per_eval=1000, total_steps=100, wandb_name="digits", data_path_to_save_groups=asked["path"],
        )  # fmt: skip
        server = APIServerConfig(
            model_name=asked["name"], tokenizer_name=asked["folder"], base_url=asked["url"] + "/v1", api_key="x",
            server_type=asked["kind"], timeout=60, num_max_requests_at_once=8, num_requests_for_eval=8,
        )  # fmt: skip
        return config, [server]

    async def setup(self) -> None:
        self.num_items = 0

    async def get_next_item(self) -> int:
        self.num_items += 1
        return self.num_items

    async def evaluate(self, *args: object, **named: object) -> None:
        pass

    async def collect_trajectories(self, item: int) -> tuple[ScoredDataGroup, list]:
        group = ScoredDataGroup(tokens=[], masks=[], scores=[], inference_logprobs=[])
        asked = json.loads(os.environ[ASKED])
        for node in await asyncio.gather(*[self.play(item) for _ in range(GROUP)]):
            text = self.tokenizer.decode([id for id in node.masked_tokens if id != -100])
            group["tokens"].append(node.tokens)
            group["masks"].append(node.masked_tokens)
            group["inference_logprobs"].append(node.logprobs)
            group["scores"].append(sum(map(str.isdigit, text)) / max(1, len(text)) + 1e-6 * len(group["scores"]))
            if asked["scores"]:
                scored = await self.server.get_logprobs(input_ids=node.tokens, top_k=1)
                own = zip(scored["prompt_topk_token_ids"], scored["prompt_topk_logprobs"], strict=True)
                listed = [[ids[:1], logprobs[:1]] for ids, logprobs in own]
                group.setdefault("distill_token_ids", []).append([ids or [0] for ids, _ in listed])
                group.setdefault("distill_logprobs", []).append([logprobs or [0.0] for _, logprobs in listed])
        return group, []

    async def play(self, item: int) -> SequenceNode:
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            messages = [{"role": "user", "content": f"the name {item}"}]
            for _ in range(2):
                said = await managed.chat_completion(messages=messages, max_tokens=60, temperature=1.0)
                messages.append({"role": "assistant", "content": said.choices[0].message.content})
                messages.append({"role": "user", "content": "the value"})
            return managed.get_state()["nodes"][-1]


class Scores:
    """The module of each version of the weights, and the log-probabilities of sequences by it."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._versions: list[tuple[torch.nn.Module, TrainerNumerics]] = []
        self.num_mixed = 0
        self.add(1.0)

    def add(self, factor: float) -> torch.nn.Module:
        module = AutoModelForCausalLM.from_pretrained(self._folder)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(factor)
        self._versions.append((module, TrainerNumerics(module, device=torch.device("cpu"))))
        return module

    def check_all(self, groups: list[dict]) -> None:
        for group in groups:
            for tokens, logprobs in zip(group["tokens"], group["inference_logprobs"], strict=True):
                self.check(tokens, logprobs)

    def check(self, tokens: list[int], logprobs: list[float]) -> None:
        """Check that each sampled token has the bits of a version, and none one that is older than the token before."""
        ids, version, versions = torch.tensor([tokens]), 0, set()
        rows = []
        for module, numerics in self._versions:
            with torch.no_grad(), numerics.training_numerics():
                logits = module(input_ids=ids, use_cache=False).logits[0]
            rows.append(selected_logprobs(logits[:-1], ids[0, 1:], 1.0).tolist())
        given = torch.tensor(logprobs).tolist()  # float32, as the engine has them
        for at, logprob in enumerate(given):
            if logprob == MASKED:
                continue
            while rows[version][at - 1] != logprob:
                version += 1
                assert version < len(rows), (at, logprob, [row[at - 1] for row in rows])
            versions.add(version)
        assert versions, "nothing was sampled"
        self.num_mixed += len(versions) > 1


def environment(verb: str, url: str, folder: str, name: str, kind: str, **more: object) -> subprocess.Popen:
    asked = {"url": url, "folder": folder, "name": name, "kind": kind, "api": "", "path": None, "scores": False} | more
    command = [sys.executable, __file__, verb]
    if verb == "process":
        command += ["--env.data_path_to_save_groups", str(asked["path"]), "--env.total_steps", "2"]
    settings = os.environ | {ASKED: json.dumps(asked), "WANDB_MODE": "disabled"}
    return subprocess.Popen(command, env=settings, cwd=str(more["work"]))


def processes(url: str, folder: str, name: str, kind: str, work: str) -> None:
    """Let the environment write groups to a file."""
    path, scores = Path(work) / f"{kind}.jsonl", Scores(folder)
    ended = environment("process", url, folder, name, kind, path=str(path), scores=kind == "vllm", work=work).wait(100)
    groups = [json.loads(line) for line in path.read_text().splitlines()]
    assert ended == 0 and len(groups) == 2, (ended, len(groups))
    for group in groups:
        for at, (tokens, logprobs) in enumerate(zip(group["tokens"], group["inference_logprobs"], strict=True)):
            scores.check(tokens, logprobs)
            if kind == "vllm":  # SGLang's kind has no such call
                assert [ids[0] for ids in group["distill_token_ids"][at][1:]] == tokens[1:]
                scores.check(tokens, [MASKED, *(one[0] for one in group["distill_logprobs"][at][1:])])


def trains(url: str, folder: str, name: str, kind: str, work: str) -> None:
    """Take batches from the trajectories' API, and change the weights while answers are under way."""
    scores, port = Scores(folder), free_port()
    api = f"http://{HOST}:{port}"
    serving = [sys.executable, "-m", "uvicorn", "atroposlib.api.server:app", "--host", HOST, "--port", str(port)]
    server = subprocess.Popen([*serving, "--log-level", "warning"], cwd=work)
    player = None
    try:
        with httpx.Client(base_url=url, timeout=60) as engine, httpx.Client(base_url=api, timeout=60) as trajectories:
            wait(lambda: is_up(trajectories), "the API is up")
            registration = {
                "wandb_group": "", "wandb_project": "", "batch_size": 2 * GROUP, "max_token_len": 240,
                "checkpoint_dir": work, "save_checkpoint_interval": -1, "starting_step": 0, "num_steps": STEPS,
            }  # fmt: skip
            trajectories.post("/register", json=registration).raise_for_status()
            trajectories.get("/batch").raise_for_status()  # the trainer has started
            player = environment("serve", url, folder, name, kind, api=api, work=work)
            for step in range(1, STEPS + 1):
                scores.check_all(wait(lambda: trajectories.get("/batch").json()["batch"], "a batch is there"))
                scores.add(1 + 0.1 * step).save_pretrained(f"{work}/{kind}{step}")
                wait(lambda: engine.get("/state").json()["num_running"], "an answer is under way")
                for path, body in (
                    ("pause_generation", {"mode": "retract"}),
                    ("update_weights_from_disk", {"model_path": f"{work}/{kind}{step}", "weight_version": str(step)}),
                    ("continue_generation", {}),
                ):
                    engine.post(f"/{path}", json=body).raise_for_status()
            wait(lambda: scores.num_mixed or take_more(trajectories, scores), "an answer of several versions is there")
    finally:
        for process in (player, server):
            if process is not None:
                process.terminate()
                process.wait(30)


def take_more(trajectories: httpx.Client, scores: Scores) -> None:
    scores.check_all(trajectories.get("/batch").json()["batch"] or [])


def is_up(client: httpx.Client) -> bool:
    try:
        return client.get("/").status_code == 200
    except httpx.ConnectError:
        return False


def wait(look: Callable[[], T], what: str) -> T:
    """Look until there is something. Each look is a call over the network."""
    deadline = time.monotonic() + 120
    while not (found := look()):
        assert time.monotonic() < deadline, f"not within 120 s: {what}"
    return found


def main(url: str, folder: str, name: str) -> None:
    for kind in ("sglang", "vllm"):
        with tempfile.TemporaryDirectory() as work:
            first = {"model_path": folder, "abort_all_requests": True}
            httpx.post(f"{url}/update_weights_from_disk", json=first, timeout=60).raise_for_status()
            processes(url, folder, name, kind, work)
            trains(url, folder, name, kind, work)
    print("Atropos: done")


if __name__ == "__main__":
    if ASKED in os.environ:
        Digits.cli()
    else:
        main(*sys.argv[1:])
