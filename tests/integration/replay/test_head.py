"""Logits of a large forward, some rows at a time: the bits of all at once, by the module's own code."""

from __future__ import annotations

import pytest
import torch

from lockstep.integration.service import RolloutService
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.model.steps.pools import trial_step
from lockstep.rollout.proving import prover
from lockstep.rollout.proving.head import HeadInParts
from lockstep.rollout.request_options import RequestOptions
from lockstep.rollout.sampling_params import SamplingParams

FAMILIES = ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "gpt_oss", "qwen3_moe"]  # gemma2 caps its logits


def engine_of(module: torch.nn.Module) -> Engine:
    torch.set_num_threads(1)
    return Engine(module, EngineConfig(kv_cache="64 blocks", max_num_seqs=8))


@pytest.mark.parametrize("family", FAMILIES)
def test_parts_have_the_bits_of_the_whole(make_model, restore_threads, family):
    model = engine_of(make_model(family)).model
    head = HeadInParts(model)
    ids, positions, step = trial_step(model)
    with model.rollout_phase(), torch.inference_mode():
        before = model.module.base_model.forward
        assert head.is_recognised()
        for rows in (positions, positions[-1:], positions[[6, 2, 3]]):
            whole = model.forward(ids, positions, rows, step)
            for most in (1, 2, 8):
                parts = list(head.logits(ids, positions, rows, step, most))
                assert [len(part) for part in parts] == [len(part) for part in rows.split(most)]
                assert torch.equal(torch.cat(parts), whole)
        assert model.module.base_model.forward == before


def test_a_head_whose_rows_depend_on_others_is_not_recognised(make_model, restore_threads):
    model = engine_of(make_model("qwen3")).model
    with model.rollout_phase():
        run = model.module.lm_head.forward
        model.module.lm_head.forward = lambda hidden: run(hidden) * (1 + hidden.shape[1])
        assert not HeadInParts(model).is_recognised()


def test_a_decoder_with_a_hook_runs_whole_and_samples_are_proven(make_model, restore_threads):
    module = make_model("qwen3").train()
    seen = []
    module.model.register_forward_hook(lambda *_: seen.append(1))
    service = RolloutService(engine_of(module))
    service.commit_in_place("1", source=module.named_parameters())
    with service.engine.model.rollout_phase():
        assert not HeadInParts(service.engine.model).is_recognised()
    receipts = generated(service)
    assert service.replay(receipts).num("equal") == len(receipts) and seen


def generated(service: RolloutService, num: int = 3) -> list[dict]:
    params = SamplingParams(max_new_tokens=30, n=num, sampling_seed=2)
    prompts = [[3, 17, 90, 4, 55], list(range(40, 72))]
    return [c.receipt for c in service.engine.generate(prompts, params, options=RequestOptions(return_receipt=True))]


def test_draws_cross_the_ends_of_parts(make_model, restore_threads, monkeypatch):
    module = make_model("qwen3").train()
    service = RolloutService(engine_of(module))
    service.commit_in_place("1", source=module.named_parameters())
    receipts = generated(service)
    monkeypatch.setattr(prover, "LOGITS_BYTES", 1)
    monkeypatch.setattr(prover, "LEAST_LOGITS", 64)  # of 2 x 3 x 30 that are drawn
    sizes = []
    whole = HeadInParts.logits

    def counted(self, *arguments):
        for part in whole(self, *arguments):
            sizes.append(len(part))
            yield part

    monkeypatch.setattr(HeadInParts, "logits", counted)
    assert service.replay(receipts).num("equal") == 6
    assert sizes[-3:] == [64, 64, 52]  # behind those of the trial
    receipts[4]["logprobs"][17] ^= 1
    report = service.replay(receipts)
    assert report.num("equal") == 5
