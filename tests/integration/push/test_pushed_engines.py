"""Trainers of two ranks push to an engine in a separately launched process and to the one in their ranks: after each
optimizer step all hold the same weights and generate the tokens that transformers generates with them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from lockstep.tests.support import prepared_python

TRAIN = """
import copy, os, sys
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
import transformers

from lockstep.integration.push.adapters.named_tensors import outgoing_specs
from lockstep.integration.grpo.backends.deepspeed import DeepSpeedBackend
from lockstep.integration.grpo.settings.training import TrainSettings
from lockstep.integration.ranks import process_group, this_rank
from lockstep.integration.push.remote_engine import RemoteEngine
from lockstep.integration.service import RolloutService
from lockstep.integration.grpo.backends.ddp import DdpBackend
from lockstep.integration.grpo.backends.fsdp2 import Fsdp2Backend
from lockstep.integration.push.pusher import WeightPusher
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.weight_sync.digests.model_digest import model_digest
from lockstep.weight_sync.transports.group import DistributedTransport

trainer, folder = sys.argv[1], Path(sys.argv[2])
torch.set_num_threads(1)
ranks = this_rank("")
settings = TrainSettings(learning_rate=1e-2, max_grad_norm=1.0)
backend = {
    "ddp": lambda: DdpBackend(settings, ranks),
    "fsdp2": lambda: Fsdp2Backend(settings, ranks),
    **{f"zero{n}": lambda n=n: DeepSpeedBackend(settings, ranks, n) for n in (1, 2, 3)},
}[trainer]()
PROMPTS = [[1, 2, 3, 4, 5], [7, 8, 9], [30, 31, 32, 33, 34, 35, 36]]
GREEDY = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}
SIZES = {"kv_cache": "64 blocks", "max_num_seqs": 8, "max_num_batched_tokens": 64}


def said(completions):
    return [list(c.token_ids) for c in completions]


def expected(model):
    outputs = []
    for prompt in PROMPTS:
        ids = model.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                             max_new_tokens=12, min_new_tokens=12, do_sample=False, pad_token_id=0)
        outputs.append(ids[0, len(prompt):].tolist())
    return outputs


with process_group(ranks, 60):
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=128, tie_word_embeddings=trainer == "ddp",
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    reference = copy.deepcopy(model).eval()
    specs = outgoing_specs(model)
    if ranks.is_first:
        model.save_pretrained(folder / "model")
    dist.barrier()
    local = RolloutService(Engine(model if backend.shares_storage else folder / "model", EngineConfig(**SIZES)))
    remote = RemoteEngine(folder / "model", folder, "remote", SIZES) if ranks.is_first else None
    backend.wrap(model)

    def share(error):
        shared = [error]
        dist.broadcast_object_list(shared, src=0)
        return shared[0]

    targets = [remote] if remote is not None else []
    pusher = WeightPusher(targets, DistributedTransport(bucket_bytes=1 << 16) if targets else None, timeout_s=30,
                          share=share)
    digests = set()
    for step in range(1, 4):
        ids = torch.arange(16)[None] * (step + ranks.rank + 1) % 64
        with backend.microbatch(is_last=True):
            backend.backward(torch.nn.functional.cross_entropy(backend.forward(input_ids=ids)[0, :-1], ids[0, 1:]))
        with local.optimizer_step() if backend.shares_storage else nullcontext():
            backend.step()
        pusher.push_tensors(backend.named_tensors(), specs, str(step))
        if backend.shares_storage:
            local.commit_in_place(str(step), source=backend.named_tensors())
        else:
            local.begin_weight_update(weight_version=str(step))
            local.update_weights_from_named_tensors(backend.named_tensors())
            local.end_weight_update()
        with torch.no_grad():
            for (name, parameter), (_, tensor) in zip(reference.named_parameters(), backend.named_tensors()):
                parameter.copy_(tensor)
        digest = model_digest(reference.named_parameters())
        digests.add(digest)
        wanted = expected(reference)
        assert local.engine.weight_digest == digest == local.model_digest(), (step, "local")
        with local.rollout():
            assert said(local.engine.generate(PROMPTS, GREEDY)) == wanted, (step, "local")
        if remote is not None:
            state = remote.call("state", timeout_s=30)
            assert (state["weight_digest"], state["weight_version"]) == (digest, str(step)), (step, "remote")
            assert said(remote.generate(PROMPTS, [GREEDY] * 3, 30)) == wanted, (step, "remote")
        dist.barrier()
    assert len(digests) == 3
    pusher.close()
    if remote is not None:
        remote.close()
        print("agreed", flush=True)
    dist.barrier()
sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "trainer", ["ddp", "fsdp2", pytest.param("zero1", marks=pytest.mark.exhaustive), "zero2", "zero3"]
)
def test_engines_in_and_beside_the_ranks_follow_every_optimizer_step(tmp_path: Path, trainer: str) -> None:
    if trainer.startswith("zero"):
        pytest.importorskip("deepspeed")
    (tmp_path / "train.py").write_text(TRAIN)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    with open(tmp_path / "log", "w") as log:
        process = prepared_python.run(
            [*command, trainer, str(tmp_path)], cwd=tmp_path, stdout=log, stderr=log, timeout=150,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    text = (tmp_path / "log").read_text()
    assert process.returncode == 0 and "agreed" in text, text[-4000:]
