"""The real changes of an optimizer step of the main job, sent as a delta over every path."""

from __future__ import annotations

import copy
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import torch

from lockstep.integration.grpo.job import GrpoJob
from lockstep.integration.grpo.results.run_folder import prepare_folder
from lockstep.integration.grpo.settings.config import load_config
from lockstep.integration.push.local_target import LocalTarget
from lockstep.integration.push.pusher import WeightPusher
from lockstep.integration.ranks import process_group, this_rank
from lockstep.integration.service import RolloutService
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.weight_sync.digests.model_digest import model_digest
from lockstep.weight_sync.transports.delta import DeltaTransport
from lockstep.weight_sync.transports.disk import DiskTransport
from lockstep.weight_sync.transports.group import DistributedTransport
from lockstep.weight_sync.transports.same_host import TensorTransport

CONFIG = Path(__file__).parents[3] / "configs" / "arithmetic_cpu.toml"
SHRUNK = [
    "run.num_steps=1", "run.eval_every=1", "warm_start.num_steps=12", "warm_start.batch_size=16", "data.num_heldout=8",
    "rollout.prompts_per_step=4", "rollout.group_size=4", "rollout.max_new_tokens=8", "engine.kv_cache=4MiB",
    "train.num_warmup_steps=0", "model.dtype=bfloat16", "reward=reward_of_test:by_text",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("learning_rate", ["1e-6", "1e-5"])
def test_the_delta_of_a_real_step_gives_the_full_update_over_every_path(
    tmp_path, monkeypatch, restore_threads, learning_rate
):
    torch.set_num_threads(1)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    reward = "def by_text(prompt, completion, answer):\n    return float(sum(map(ord, completion)) % 3)\n"
    (tmp_path / "reward_of_test.py").write_text(reward)
    config = load_config(CONFIG, [*SHRUNK, f"train.learning_rate={learning_rate}"])
    ranks = this_rank("cpu")
    with process_group(ranks, 60):
        prepare_folder(config.folder, resume=False)
        with closing(GrpoJob(config, ranks, resume=False)) as job:
            before = copy.deepcopy(job.model)
            job.run_step(0)
            after = copy.deepcopy(job.model)
    wanted = model_digest(after.named_parameters())
    assert wanted != model_digest(before.named_parameters())
    inner = {
        "disk": lambda: DiskTransport(tmp_path / "updates"),
        "tensor": lambda: TensorTransport(bucket_bytes=1 << 20),
        "distributed": lambda: DistributedTransport(bucket_bytes=1 << 20),
    }
    sizes = EngineConfig(kv_cache="16 blocks", max_num_seqs=4, max_num_batched_tokens=64)
    for path, make in inner.items():
        for check in ("pre", "touched"):
            with ExitStack() as stack:
                services = [RolloutService(Engine(copy.deepcopy(before), sizes)) for _ in range(2)]
                for service in services:
                    stack.callback(service.close)
                targets = [LocalTarget(service, f"engine {index}") for index, service in enumerate(services)]
                pusher = stack.enter_context(closing(WeightPusher(targets, DeltaTransport(make(), check=check))))
                full = pusher.push(before, "before").sent
                sent = pusher.push(after, "after").sent
                assert [service.model_digest() for service in services] == [wanted, wanted], (path, check)
                assert [service.engine.weight_digest for service in services] == [wanted, wanted]
            assert full.density is None and 0 < sent.density < 0.15
            assert sent.num_bytes < full.num_bytes / 4
            print(f"\nlr {learning_rate}, {path}, check {check}: density {sent.density:.2%}, {sent.num_bytes:,} of "
                  f"{full.num_bytes:,} bytes")  # fmt: skip
