"""Gradient checkpointing changes no bit: not of the update, not of the gap, not of the engine's answers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from lockstep.integration.grpo.backends.ddp import DdpBackend
from lockstep.integration.grpo.backends.lora import add_adapters
from lockstep.integration.grpo.settings.training import LoraSettings, TrainSettings
from lockstep.integration.grpo.training.checkpointing import refuse_without_layers
from lockstep.integration.grpo.training.packing import Sample
from lockstep.integration.grpo.training.trainer import GrpoTrainer, TrainStats
from lockstep.integration.ranks import Ranks, process_group
from lockstep.integration.service import RolloutService
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.sampling_params import SamplingParams

RANKS = Ranks(0, 1, torch.device("cpu"))


@pytest.fixture
def group():
    with process_group(RANKS, 30):
        yield


class Run:
    """A trainer and the engine that aliases its module. Counts the runs of layers that are checkpointed."""

    def __init__(self, model, *, is_checkpointed: bool, adapters: bool) -> None:
        if adapters:
            add_adapters(model, LoraSettings(rank=4), 0)
        settings = TrainSettings(
            learning_rate=1e-3, num_warmup_steps=0, microbatch_tokens=60, kl_coefficient=0.1,
            gradient_checkpointing=is_checkpointed,
        )  # fmt: skip
        self.model = model
        engine = Engine(model, EngineConfig(kv_cache="64 blocks", max_num_seqs=8))
        self.service = RolloutService(engine)
        self.trainer = GrpoTrainer(
            engine.model, DdpBackend(settings, RANKS), settings, 1.0, RANKS, announce_step=self.service.optimizer_step
        )
        self.num_checkpoints = 0
        for part in model.modules():
            if isinstance(part, GradientCheckpointingLayer) and part.gradient_checkpointing:
                part._gradient_checkpointing_func = self._counted(part._gradient_checkpointing_func)

    def _counted(self, own):
        def checkpoint(*args, **kwargs):
            self.num_checkpoints += 1
            return own(*args, **kwargs)

        return checkpoint

    def samples(self) -> list[Sample]:
        params = SamplingParams(n=3, max_new_tokens=9, temperature=1.0, sampling_seed=3, ignore_eos=True)
        completions = self.service.engine.generate([[5, 6, 7] * 7, [9, 10]], params)
        return [Sample(c.prompt_ids, c.token_ids, c.logprobs, (-1.0) ** i) for i, c in enumerate(completions)]

    def steps(self) -> tuple[list[list[Sample]], list[TrainStats], dict[str, Tensor]]:
        drawn, told = [], []
        for step in range(2):
            before = self.num_checkpoints
            drawn.append(self.samples())
            assert self.num_checkpoints == before, "the engine's forwards are checkpointed"
            told.append(self.trainer.update(drawn[-1], step))
            self.service.commit_in_place(str(step), source=self.model.named_parameters())
        return drawn, told, {name: parameter.clone() for name, parameter in self.model.named_parameters()}


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
@pytest.mark.parametrize(
    ("dtype", "adapters"), [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)]
)
def test_samples_gap_and_weights_have_the_bits_of_a_run_without(group, make_model, family, dtype, adapters):
    plain = Run(make_model(family, dtype), is_checkpointed=False, adapters=adapters)
    run = Run(make_model(family, dtype), is_checkpointed=True, adapters=adapters)
    (drawn, told, weights), (own_drawn, own_told, own_weights) = plain.steps(), run.steps()
    assert run.num_checkpoints > 0 and plain.num_checkpoints == 0
    assert own_drawn == drawn and own_told == told
    assert [stats.logprob_gap for stats in own_told] == [0.0, 0.0] and told[1].kl > 0
    assert all(torch.equal(own_weights[name], weight) for name, weight in weights.items())


def test_a_forward_keeps_fewer_activations(group, make_model):
    kept = {}
    for is_checkpointed in (False, True):
        run = Run(make_model("qwen3"), is_checkpointed=is_checkpointed, adapters=False)
        inside = {parameter.data_ptr() for parameter in run.model.parameters()}
        saved: dict[int, int] = {}

        def keep(tensor: Tensor, inside=inside, saved=saved) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in inside:
                saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        hosted = run.service.engine.model
        ids = torch.arange(200).reshape(1, 200)
        run.model.train()
        with hosted.training_numerics(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            out = run.trainer.backend.forward(input_ids=ids, use_cache=False, logits_to_keep=1)
        out.sum().backward()
        kept[is_checkpointed] = sum(saved.values())
    assert kept[True] < kept[False] / 3


def test_a_model_that_cannot_is_refused_by_the_name_of_the_setting(make_model, monkeypatch):
    model = make_model("qwen3")
    refuse_without_layers(model)
    monkeypatch.setattr(type(model), "supports_gradient_checkpointing", False)
    with pytest.raises(ValueError, match=r"train\.gradient_checkpointing must be false: Qwen3ForCausalLM"):
        refuse_without_layers(model)
