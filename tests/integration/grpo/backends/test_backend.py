"""Every backend trains the same model to the same weights, with a gap of 0.0, on ranks with equal bits.

Run as a script, this file is one rank of the jobs below: `python test_backend.py FOLDER KIND...`.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from lockstep.integration.grpo.backends.backend import GatheredState, TrainerState
from lockstep.integration.grpo.settings.config import JobConfig
from lockstep.integration.grpo.settings.sections import RunSettings
from lockstep.integration.grpo.settings.training import DeepSpeedSettings, TrainSettings
from lockstep.integration.grpo.training.packing import Sample
from lockstep.integration.grpo.training.trainer import GrpoTrainer, make_backend
from lockstep.integration.ranks import Ranks, process_group, this_rank
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.model.hosted_model import HostedModel
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.tests.families.compare import random_model
from lockstep.tests.support import prepared_python
from lockstep.tests.support.forked_ranks import free_port
from lockstep.weight_sync.digests.model_digest import model_digest
from lockstep.weight_sync.manifest import NamedTensors

NUM_RANKS = 2
NUM_STEPS = 3
SETTINGS = TrainSettings(learning_rate=1e-4, num_warmup_steps=2, microbatch_tokens=40, kl_coefficient=0.1)
# "plain": one micro-batch and no clipping, so that only sums over two ranks and AdamW are left.
PLAIN = replace(SETTINGS, microbatch_tokens=4000, max_grad_norm=100.0)
# "idle": samples without a gradient, and so without a backward pass, on one rank or on both.
IDLE = replace(SETTINGS, kl_coefficient=0.0)
TORCH_KINDS = ("ddp", "fsdp2", "ddp plain", "fsdp2 plain", "ddp bf16", "fsdp2 bf16", "ddp bf16 stochastic",
               "fsdp2 bf16 stochastic", "ddp bf16 checkpointed", "fsdp2 bf16 checkpointed", "ddp idle",
               "fsdp2 idle")  # fmt: skip
ZERO_KINDS = ("ddp", "zero0", "zero1", "zero2", "zero3", "zero3 checkpointed", "zero3 bf16", "ddp idle", "zero1 idle",
              "zero2 idle", "zero3 idle")  # fmt: skip
# "mixed": a model in bfloat16 that keeps sinks and routers in float32.
MIXED_KINDS = ("ddp mixed", "fsdp2 mixed", "ddp mixed stochastic", "fsdp2 mixed stochastic", "fsdp2 mixed idle")
# "unused": a model with encoders, of which text needs none.
UNUSED_KINDS = ("ddp unused", "fsdp2 unused", "ddp unused bf16")
ZERO_BF16_KINDS = ("zero0 bf16", "zero1 bf16", "zero2 bf16", "zero3 bf16")


# -- one rank ---------------------------------------------------------------------------------------------------------


def tiny_qwen3(dtype: torch.dtype) -> PreTrainedModel:
    """Build a model of 0.9 million parameters, in tensors large enough for ZeRO-3 to shard. The head is tied to the
    embedding."""
    sizes = {"hidden_size": 64, "intermediate_size": 2048, "num_hidden_layers": 2, "vocab_size": 2048, "head_dim": 32}
    torch.manual_seed(0)
    config = Qwen3Config(
        **sizes, num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True, eos_token_id=None
    )
    model = Qwen3ForCausalLM(config).to(dtype)
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_(0.0, 0.1)  # so that gradients must be clipped
    return model


def model_of(kind: str) -> PreTrainedModel:
    if "mixed" in kind:
        return random_model("text", "flint", torch.bfloat16)
    dtype = torch.bfloat16 if "bf16" in kind else torch.float32
    return random_model("text", "phi4_multimodal", dtype) if "unused" in kind else tiny_qwen3(dtype)


def job_config(kind: str, settings: TrainSettings = SETTINGS) -> JobConfig:
    trainer, stage = ("deepspeed", int(kind[4])) if kind.startswith("zero") else (kind.split()[0], 2)
    return JobConfig(RunSettings("x"), trainer=trainer, train=settings, deepspeed=DeepSpeedSettings(zero_stage=stage))


class Trained:
    """A trainer and the engine that samples for it, as in the job."""

    def __init__(self, kind: str, ranks: Ranks) -> None:
        self.ranks = ranks
        self.is_idle = "idle" in kind
        settings = IDLE if self.is_idle else PLAIN if "plain" in kind else SETTINGS
        settings = replace(
            settings,
            low_precision="stochastic" if "stochastic" in kind else "masters",
            gradient_checkpointing="checkpointed" in kind,
        )
        self.backend = make_backend(job_config(kind, settings), ranks)
        self.model = model_of(kind)
        hosted_here = self.model if self.backend.shares_storage else copy.deepcopy(self.model)
        self.engine = Engine(hosted_here, EngineConfig(kv_cache="64 blocks", max_num_seqs=8))
        hosted = self.engine.model
        if not self.backend.shares_storage:
            hosted = HostedModel.adopt(self.model, dtype=None, device=None, invariant=True)
        self.trainer = GrpoTrainer(hosted, self.backend, settings, 1.0, ranks)
        self.commit("0")

    def commit(self, version: str) -> None:
        resident = dict(self.engine.weights.resident_tensors())
        for name, tensor in self.parameters():
            if self.backend.shares_storage:
                assert resident[name].data_ptr() == tensor.data_ptr(), name
            else:
                resident[name].data.copy_(tensor)
        self.engine.weights.commit_weights(version, None)

    def samples(self, step: int) -> list[Sample]:
        """Make more samples on rank 0 than on rank 1, so that their numbers of micro-batches differ."""
        num_samples = 4 if self.ranks.is_first else 2
        params = SamplingParams(
            n=num_samples, max_new_tokens=9, temperature=1.0, sampling_seed=10 * step + self.ranks.rank
        )
        prompt = [5 + self.ranks.rank, 6, 7 + step] * 4
        return [
            Sample(c.prompt_ids, c.token_ids, c.logprobs, self.advantage(step, i))
            for i, c in enumerate(self.engine.generate([prompt], params))
        ]

    def advantage(self, step: int, index: int) -> float:
        # Rank 0 has three samples without a gradient in each step. Rank 1 has no other in the first step, and none in
        # the second, so that the ranks' first forwards are of two kinds; in the third no rank has another.
        if self.is_idle and (step == 2 or (index > 0 if self.ranks.is_first else step == 0)):
            return 0.0
        return (-1.0) ** index + 0.1 * self.ranks.rank

    def step(self, step: int, samples: list[Sample]) -> dict[str, object]:
        stats = self.trainer.update(samples, step)
        self.commit(str(step + 1))
        digest = self.digest()
        return {
            "gap": stats.logprob_gap, "norm": stats.grad_norm, "loss": stats.loss, "kl": stats.kl, "digest": digest,
            "without": stats.num_without_gradient,
            "engine_digest": model_digest(self.engine.weights.resident_tensors()),
        }  # fmt: skip

    def digest(self) -> str:
        return model_digest([(name, tensor.clone()) for name, tensor in self.parameters()])

    def parameters(self) -> NamedTensors:
        """Gather the parameters; buffers of some families come with them, which no step changes."""
        names = {name for name, _ in self.engine.weights.resident_tensors()}
        return ((name, tensor) for name, tensor in self.backend.named_tensors() if name in names)


def one_kind(kind: str, ranks: Ranks, folder: Path) -> dict[str, object]:
    """Train three steps, with a checkpoint after two, from which another trainer continues."""
    path = folder / kind.replace(" ", "-")
    straight = Trained(kind, ranks)
    lines = []
    for step in range(NUM_STEPS):
        samples = straight.samples(step)
        if step == NUM_STEPS - 1:
            save(straight.backend.state(), path, ranks)
        lines.append(straight.step(step, samples))
    tensors = {name: tensor.clone() for name, tensor in straight.backend.named_tensors()}
    if ranks.is_first:
        save_file(tensors, f"{path}.safetensors")
        straight.backend.save_pretrained(Path(f"{path}-saved"), tensors)
    resumed = Trained(kind, ranks)
    resumed.backend.load_state(TrainerState(load_file(path / "model"), load_file(path / "optimizer")))
    return {"steps": lines, "resumed": resumed.step(step, samples), "refusal": refusal(resumed, path)}


def save(state: GatheredState, path: Path, ranks: Ranks) -> None:
    gathered = dict(state.model), {name: tensor.contiguous() for name, tensor in state.optimizer}
    if ranks.is_first:
        assert [part.keys() for part in gathered] == [set(state.model.names), set(state.optimizer.names)]
        path.mkdir()
        for name, part in zip(("model", "optimizer"), gathered, strict=True):
            sizes = [tensor.element_size() for tensor in part.values()]
            assert sizes == sorted(sizes, reverse=True), "each is aligned in a file"
            save_file(part, path / name)
    torch.distributed.barrier()


def refusal(resumed: Trained, path: Path) -> list[object]:
    """Load a state without one tensor. Returns the error, and whether anything was written."""
    before = resumed.digest()
    state = TrainerState(load_file(path / "model"), load_file(path / "optimizer"))
    said = []
    for broken in (
        TrainerState({k: v for k, v in state.model.items() if "norm" not in k}, state.optimizer),
        TrainerState(state.model, {f"{k}9": v for k, v in state.optimizer.items()}),
    ):
        with pytest.raises(ValueError) as caught:
            resumed.backend.load_state(broken)
        said.append(str(caught.value))
    return [*said, resumed.digest() == before]


def rank_main(folder: Path, kinds: Iterable[str]) -> None:
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    ranks = this_rank("cpu")
    with process_group(ranks, 60):
        results = {kind: one_kind(kind, ranks, folder) for kind in kinds}
    (folder / f"rank{ranks.rank}.json").write_text(json.dumps(results))


# -- the jobs ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """The reports of both ranks, by kind, and the folder of their files."""

    ranks: list[dict[str, dict[str, object]]]
    folder: Path
    log: str

    def path(self, kind: str) -> Path:
        return self.folder / kind.replace(" ", "-")

    def tensors(self, kind: str) -> Mapping[str, torch.Tensor]:
        return load_file(f"{self.path(kind)}.safetensors")

    def steps(self, kind: str) -> list[dict[str, object]]:
        return self.ranks[0][kind]["steps"]


def launch(folder: Path, *kinds: str) -> Job:
    port = free_port()
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(NUM_RANKS)}
    common |= {"OMP_NUM_THREADS": "1", "TORCH_EXTENSIONS_DIR": str(folder / "extensions")}
    processes = []
    try:
        for rank in range(NUM_RANKS):
            environment = {**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            with (folder / f"log{rank}").open("wb") as log:
                command = [sys.executable, __file__, str(folder), *kinds]
                processes.append(prepared_python.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
        codes = [process.wait(240) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    logs = [(folder / f"log{rank}").read_text() for rank in range(NUM_RANKS)]
    assert codes == [0] * NUM_RANKS, "\n".join(log[-4000:] for log in logs)
    return Job([json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(NUM_RANKS)], folder, logs[0])


def check(job: Job) -> None:
    """Check the requirements on every kind of trainer."""
    first, second = job.ranks
    before = model_digest(tiny_qwen3(torch.float32).named_parameters())
    for kind, told in first.items():
        steps = told["steps"]
        assert second[kind]["steps"] == steps, kind
        assert [step["gap"] for step in steps] == [0.0] * NUM_STEPS, kind
        assert all(step["engine_digest"] == step["digest"] for step in steps), kind
        assert len({before, *(step["digest"] for step in steps)}) == NUM_STEPS + 1, kind
        if "idle" in kind:
            assert [step["without"] for step in steps] == [4, 3, 4], kind  # of six; each rank has one backward pass
            assert [step["norm"] > 0 for step in steps] == [True, True, False], kind
        else:
            assert [step["without"] for step in steps] == [0, 0, 0], kind
            assert [step["kl"] > 0 for step in steps] == [False, True, True], kind
            assert all(step["norm"] > 2 * SETTINGS.max_grad_norm for step in steps), kind  # so that it is clipped
        assert told["resumed"] == steps[-1], kind
        assert "the state is of another model: model.layers.0.input_layernorm.weight" in told["refusal"][0], kind
        assert "state is of another trainer" in told["refusal"][1] and told["refusal"][2], kind
        saved = AutoModelForCausalLM.from_pretrained(f"{job.path(kind)}-saved")
        assert model_digest(saved.named_parameters()) == steps[-1]["digest"], kind
        assert saved.config.architectures == ["Qwen3ForCausalLM"], kind


def difference(job: Job, kind: str, other: str) -> float:
    """Measure the distance between the final weights of two kinds, relative to their change by training."""
    start = dict(model_of(kind.replace("bf16", "")).named_parameters())
    tensors, others = job.tensors(kind), job.tensors(other)
    apart = sum((tensors[name] - others[name]).double().abs().sum().item() for name in start)
    return apart / sum((others[name] - start[name].detach()).double().abs().sum().item() for name in start)


@pytest.mark.slow
def test_ddp_and_fsdp2_train_alike(tmp_path):
    job = launch(tmp_path, *TORCH_KINDS)
    check(job)
    plain = job.steps("ddp plain")
    assert job.steps("fsdp2 plain") == [{**step, "norm": pytest.approx(step["norm"], rel=1e-4)} for step in plain]
    for kind in ("ddp bf16", "fsdp2 bf16"):
        assert job.steps(f"{kind} checkpointed") == job.steps(kind)
    assert difference(job, "fsdp2", "ddp") < 1e-3
    assert difference(job, "fsdp2 idle", "ddp idle") < 1e-3
    assert difference(job, "ddp plain", "ddp") > 1e-3  # the measure is sensitive to clipping
    assert difference(job, "fsdp2 bf16", "ddp bf16") < 0.05  # of weights that bfloat16 rounds
    for dtype in ("", " bf16"):
        for part in ("model", "optimizer"):  # a checkpoint of one kind has the layout of the other's
            ddp, fsdp2 = (load_file(job.path(kind + dtype) / part) for kind in ("ddp", "fsdp2"))
            layouts = [{name: (t.shape, t.dtype) for name, t in state.items()} for state in (ddp, fsdp2)]
            assert layouts[0] == layouts[1]
            assert any(name.startswith("master/") for name in ddp) == (part == "optimizer" and bool(dtype))


def check_family(job: Job) -> None:
    """Check the requirements on kinds of trainers of a family's tiny model."""
    first, second = job.ranks
    for kind, told in first.items():
        steps = told["steps"]
        assert second[kind]["steps"] == steps, kind
        assert [step["gap"] for step in steps] == [0.0] * NUM_STEPS, kind
        assert all(step["engine_digest"] == step["digest"] for step in steps), kind
        assert told["resumed"] == steps[-1], kind


@pytest.mark.slow
def test_fsdp2_trains_float32_parameters_of_a_model_in_bfloat16(tmp_path):
    job = launch(tmp_path, *MIXED_KINDS)
    check_family(job)
    start = dict(model_of("mixed").named_parameters())
    kept = [name for name, one in start.items() if one.dtype == torch.float32]
    for kind in MIXED_KINDS:
        tensors = job.tensors(kind)
        assert {name: tensor.dtype for name, tensor in tensors.items()} == {n: one.dtype for n, one in start.items()}
        assert kept and not any(torch.equal(tensors[name], start[name]) for name in kept), kind
    norms = [[step["norm"] for step in job.steps(kind)] for kind in ("fsdp2 mixed", "ddp mixed")]
    assert norms[0] == pytest.approx(norms[1], rel=1e-2)
    assert difference(job, "fsdp2 mixed", "ddp mixed") < 0.05  # as of other models in bfloat16
    for part in ("model", "optimizer"):
        ddp, fsdp2 = (load_file(job.path(kind) / part) for kind in ("ddp mixed", "fsdp2 mixed"))
        assert {n: (t.shape, t.dtype) for n, t in ddp.items()} == {n: (t.shape, t.dtype) for n, t in fsdp2.items()}


@pytest.mark.slow
def test_ranks_train_a_model_with_parameters_that_text_does_not_use(tmp_path):
    job = launch(tmp_path, *UNUSED_KINDS)
    check_family(job)
    start, tensors = dict(model_of("unused").named_parameters()), job.tensors("ddp unused")
    is_same = {name: torch.equal(tensors[name], start[name]) for name in start}
    assert any(is_same.values()) and not all(is_same.values())
    assert difference(job, "fsdp2 unused", "ddp unused") < 1e-3


@pytest.mark.slow
def test_every_zero_stage_trains_as_ddp_does(tmp_path):
    pytest.importorskip("deepspeed")
    job = launch(tmp_path, *ZERO_KINDS)
    check(job)
    assert job.steps("zero0") == job.steps("ddp")
    assert job.steps("zero3 checkpointed") == job.steps("zero3")
    for kind in ("zero1", "zero2", "zero3"):
        assert difference(job, kind, "ddp") < 1e-3, kind
        norms = [step["norm"] for step in job.steps(kind)]
        assert norms == pytest.approx([step["norm"] for step in job.steps("ddp")], rel=1e-4), kind
        assert difference(job, f"{kind} idle", "ddp idle") < 1e-3, kind
    assert not list(tmp_path.glob("extensions/**/*.so")), "nothing was compiled"
    for noise in ("[INFO]", "FutureWarning"):
        assert noise not in job.log


@pytest.mark.exhaustive
def test_every_zero_stage_trains_in_bfloat16(tmp_path):
    pytest.importorskip("deepspeed")
    check(launch(tmp_path, *ZERO_BF16_KINDS))


@pytest.mark.parametrize(
    ("kind", "shares_storage", "talks_in_forward"),
    [
        ("ddp", True, False),
        ("fsdp2", False, True),
        ("zero0", True, False),
        ("zero1", True, False),
        ("zero2", True, True),
        ("zero3", False, True),
    ],
)
def test_a_backend_tells_before_wrapping_whether_an_engine_may_alias_the_model(kind, shares_storage, talks_in_forward):
    backend = make_backend(job_config(kind), Ranks(0, 1, torch.device("cpu")))
    assert (backend.shares_storage, backend.talks_in_forward) == (shares_storage, talks_in_forward)


if __name__ == "__main__":
    rank_main(Path(sys.argv[1]), sys.argv[2:])
