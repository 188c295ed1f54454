"""AReaL (1.0, on processors) against a server by address, as SGLang's and then as its own vLLM's: PPO steps of its FSDP
trainer on asynchronous rollouts, updates of weights under way, adapters, and its client for agents. The server needs
`--lora-replaces`.

python areal_program.py URL MODEL_FOLDER MODEL_NAME
"""

from __future__ import annotations

import asyncio
import copy
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace

os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}

import httpx
import peft
import torch
from areal.api import FinetuneSpec, ModelAllocation, WeightUpdateMeta
from areal.api.cli_args import (
    GenerationHyperparameters,
    InferenceEngineConfig,
    MicroBatchSpec,
    NameResolveConfig,
    NormConfig,
    OptimizerConfig,
    PPOActorConfig,
)
from areal.engine.fsdp_engine import FSDPPPOActor
from areal.engine.sglang_remote import RemoteSGLangEngine
from areal.engine.vllm_remote import RemotevLLMEngine
from areal.experimental.openai import ArealOpenAI
from areal.utils import name_resolve, names
from areal.utils.hf_utils import load_hf_tokenizer
from areal.workflow.rlvr import RLVRWorkflow
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import AutoModelForCausalLM

from lockstep.kernels.sampling.logprobs import selected_logprobs
from lockstep.rollout.model.trainer_numerics import TrainerNumerics
from lockstep.tests.support.forked_ranks import free_port

Engine = RemoteSGLangEngine | RemotevLLMEngine

ENGINES = {"sglang": RemoteSGLangEngine, "vllm": RemotevLLMEngine}
TEXT = ("input_ids", "position_ids", "cu_seq_lens_q", "use_cache")
ROWS = ("input_ids", "logprobs", "versions", "attention_mask")
STEPS = 3
CPU = torch.device("cpu")


class Actor(FSDPPPOActor):
    """AReaL's FSDP trainer, with the rollout's numerics."""

    def _create_device_model(self) -> None:
        super()._create_device_model()
        self.numerics = TrainerNumerics(self.model, device=self.device)

    def _prepare_mb_inputs(self, item: object) -> tuple[dict, object]:
        inputs, context = super()._prepare_mb_inputs(item)
        return {name: inputs[name] for name in TEXT}, context

    def forward_backward_batch(self, *args: object, **named: object) -> None:
        with self.numerics.training_numerics():
            super().forward_backward_batch(*args, **named)

    def _compute_logprobs(self, logits: torch.Tensor, inputs: dict, *_: object) -> torch.Tensor:
        labels = inputs["input_ids"].flatten().roll(-1)
        return selected_logprobs(logits, labels, self.config.temperature)

    def _compute_logprobs_entropy(
        self, logits: torch.Tensor, inputs: dict, *_: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        _, entropy = super()._compute_logprobs_entropy(logits, inputs)
        return self._compute_logprobs(logits, inputs), entropy


class Scores:
    """Log-probabilities of the weights of each version, in one forward of a sequence."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._versions: list[tuple[torch.nn.Module, TrainerNumerics]] = []
        self.num_mixed = 0  # sequences whose tokens are of several versions

    def add(self, weights: torch.nn.Module | None = None, adapter: str | None = None) -> None:
        """Note the next version: the folder's weights, those of a trainer's module, or the folder's with an adapter."""
        module = AutoModelForCausalLM.from_pretrained(self._folder)
        if weights is not None:
            tensors = {name: tensor.full_tensor() for name, tensor in weights.state_dict().items()}
            module.load_state_dict(tensors)
        if adapter is not None:
            module = peft.PeftModel.from_pretrained(module, adapter)
        self._versions.append((module, TrainerNumerics(module, device=CPU)))

    def check(self, rows: dict[str, torch.Tensor]) -> None:
        """Compare the log-probabilities of the tokens of each version with those of its weights, bit for bit."""
        for ids, logprobs, versions, mask in zip(*(rows[name] for name in ROWS), strict=True):
            ids, logprobs, versions = (values[mask.bool()] for values in (ids.long(), logprobs, versions))
            its_versions = versions[versions >= 0].unique().tolist()
            self.num_mixed += len(its_versions) > 1
            for version in its_versions:
                module, numerics = self._versions[version]
                with torch.no_grad(), numerics.training_numerics():
                    logits = module(input_ids=ids[None], use_cache=False).logits[0]
                its = versions[1:] == version
                made = selected_logprobs(logits[:-1], ids[1:], 1.0)[its]
                assert torch.equal(made, logprobs[1:][its]), (version, made, logprobs[1:][its])


def reward(prompt: str, completion: str, *_: object, **__: object) -> float:
    return sum(character.isdigit() for character in completion) / max(1, len(completion))


def prompts() -> list[dict]:
    return [{"messages": [{"role": "user", "content": f"the name {number}"}]} for number in range(8)]


def rollouts(kind: str, url: str, folder: str, work: str, **more: object) -> Engine:
    config = InferenceEngineConfig(
        experiment_name="lockstep", trial_name=kind, fileroot=work, backend=f"{kind}:d1", consumer_batch_size=4,
        max_concurrent_rollouts=16, max_head_offpolicyness=100, tokenizer_path=folder, check_trajectory_format=True,
        request_retries=1, request_timeout=60, setup_timeout=30, **more,
    )  # fmt: skip
    engine = ENGINES[kind](config)
    engine.initialize(addr=url.removeprefix("http://"))
    return engine


def flow_of(folder: str, num_tokens: int) -> RLVRWorkflow:
    sampling = GenerationHyperparameters(max_new_tokens=num_tokens, max_tokens=240, lora_name="adapter")
    return RLVRWorkflow(reward, sampling, load_hf_tokenizer(folder))


def interrupts(server: httpx.Client, engine: Engine, flow: RLVRWorkflow) -> None:
    """Pause AReaL's rollouts while an answer is under way."""
    for data in prompts()[:2]:
        engine.submit(data, flow)
    deadline = time.monotonic() + 60
    while not server.get("/state").json()["num_running"]:
        assert time.monotonic() < deadline, "no answer is under way"
    engine.pause()


def trains(server: httpx.Client, kind: str, engine: Engine, folder: str, work: str) -> None:
    """Run AReaL's own loop: rollouts run ahead, each update interrupts them, and their tokens stand."""
    scores, flow, version = Scores(folder), flow_of(folder, 150), 0
    scores.add()
    actor = Actor(
        PPOActorConfig(
            experiment_name="lockstep", trial_name=kind, path=folder, attn_impl="sdpa", dtype="float32",
            backend="fsdp:d1", optimizer=OptimizerConfig(lr=1e-3), mb_spec=MicroBatchSpec(max_tokens_per_mb=512),
            ppo_n_minibatches=1, kl_ctl=0.0, adv_norm=NormConfig("batch", "batch"), use_decoupled_loss=True,
        )
    )  # fmt: skip
    actor.create_process_group()
    actor.initialize(None, FinetuneSpec(STEPS, 8, 4))
    loader = StatefulDataLoader(prompts(), batch_size=4, collate_fn=list)
    over_group = WeightUpdateMeta.from_fsdp_xccl(ModelAllocation.from_str(f"{kind}:d1", name="rollout"))
    for meta in (WeightUpdateMeta.from_disk("lockstep", kind, work), over_group):
        actor.connect_engine(engine, meta)
        for _ in range(STEPS):
            batch = actor.prepare_batch(loader, flow, group_size=2)
            for rows, logp in zip(batch, actor.compute_logp(batch), strict=True):
                scores.check(rows)
                rows["prox_logp"] = logp
                fresh = (rows["versions"] == version) & rows["loss_mask"].bool()
                assert torch.equal(logp.roll(1, -1)[fresh], rows["logprobs"][fresh]), meta.type
            actor.ppo_update(actor.compute_advantages(batch))
            version += 1
            interrupts(server, engine, flow)
            actor.update_weights(meta.with_version(version))
            actor.set_version(version)
            engine.set_version(version)
            scores.add(actor.model)
            engine.resume()
    assert scores.num_mixed, "no update has come while an answer was under way"
    actor.destroy()


def scores_and_sleeps(kind: str, engine: Engine, folder: str) -> None:
    """Release the server's memory and allocate it again; score sequences as AReaL's teachers do."""
    scores = Scores(folder)
    scores.add()
    engine.pause_generation()
    engine.offload()
    engine.onload()
    engine.continue_generation()
    for rows in engine.rollout_batch(prompts()[:2], flow_of(folder, 8)):
        scores.check(rows)
        if kind == "vllm":  # its reader of SGLang's scores takes no null, which SGLang's first one always is
            [scored] = engine.compute_logp([rows])
            assert torch.equal(scored, rows["logprobs"]), (scored, rows["logprobs"])


async def answers_agents(engine: Engine, folder: str) -> None:
    """Answer an agent's chats by AReaL's client, which keeps their tokens."""
    scores, client = Scores(folder), ArealOpenAI(engine, load_hf_tokenizer(folder))
    scores.add()
    messages = [{"role": "user", "content": "the name"}]
    for _ in range(2):
        said = await client.chat.completions.create(messages=messages, max_completion_tokens=20, temperature=1.0)
        messages += [
            {"role": "assistant", "content": said.choices[0].message.content},
            {"role": "user", "content": "a"},
        ]
        client.set_reward(said.id, 1.0)
    interactions = client.export_interactions("individual")
    assert len(interactions) == 2
    for interaction in interactions.values():
        scores.check(interaction.to_tensor_dict())


def adapts(server: httpx.Client, kind: str, engine: Engine, folder: str, work: str) -> None:
    """Load the adapter of each version from its folder, while requests are under way, which name theirs."""
    scores, flow, base = Scores(folder), flow_of(folder, 150), AutoModelForCausalLM.from_pretrained(folder)
    for version in range(4):
        path = f"{work}/adapter/weight_update_v{version}"
        lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        torch.manual_seed(version)
        peft.get_peft_model(copy.deepcopy(base), lora).save_pretrained(path)
        scores.add(adapter=path)
        if version:
            interrupts(server, engine, flow)
        engine.pause_generation()
        saved = names.update_weights_from_disk("lockstep", kind, engine.get_version())
        name_resolve.add(saved, str(time.time()), replace=True)
        meta = WeightUpdateMeta("disk", path=path, use_lora=True, lora_name="adapter", version=version)
        engine.update_weights_from_disk(replace(meta, clear_checkpoint_after_load=False)).result()
        engine.set_version(version)
        engine.continue_generation()
        engine.resume()
        for rows in engine.wait(2) if version else ():
            scores.check(rows)
    assert scores.num_mixed, "no adapter has come while an answer was under way"


def main(url: str, folder: str, name: str, kind: str | None = None) -> None:
    if kind is None:  # each in a process of its own: AReaL keeps a trainer's groups until its process ends
        for each in ENGINES:
            subprocess.run([sys.executable, __file__, url, folder, name, each], check=True)
        print("AReaL: done")
        return
    os.environ["MASTER_PORT"], first = str(free_port()), {"model_path": folder, "abort_all_requests": True}
    with tempfile.TemporaryDirectory() as work, httpx.Client(base_url=url) as server:
        name_resolve.reconfigure(NameResolveConfig(type="nfs", nfs_record_root=f"{work}/names"))
        server.post("/update_weights_from_disk", json=first).raise_for_status()
        engine = rollouts(kind, url, folder, work)
        scores_and_sleeps(kind, engine, folder)
        asyncio.run(answers_agents(engine, folder))
        trains(server, kind, engine, folder, work)
        engine.destroy()
        server.post("/update_weights_from_disk", json=first).raise_for_status()
        engine = rollouts(kind, url, folder, work, use_lora=True)
        adapts(server, kind, engine, folder, work)
        engine.destroy()
        last = {"lora_name": "adapter-v3", "abort_all_requests": True}
        server.post("/unload_lora_adapter", json=last).raise_for_status()


if __name__ == "__main__":
    main(*sys.argv[1:])
