"""Modules with PEFT adapters: hosted as they are, and no KV of weights that are switched off."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, PrefixTuningConfig, get_peft_model

from lockstep.kernels.sampling.logprobs import selected_logprobs
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.tests.optional_packages import needs_peft_of_transformers

PROMPTS = [[3, 17, 90, 4, 55], [7] * 3 + list(range(40, 75)), [250]]
CONFIG = EngineConfig(kv_cache="64 blocks", max_num_seqs=4, chunked_prefill_size=13)
LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "o_proj", "down_proj"]}


def adapted(model, **settings):
    torch.manual_seed(0)
    return get_peft_model(model, LoraConfig(**LORA, init_lora_weights=False, **settings))


def gap_of(engine, model, **params):
    """Sample each prompt, and return the largest difference to the trainer's log-probabilities."""
    largest = 0.0
    for completion in engine.generate(PROMPTS, SamplingParams(max_new_tokens=6, sampling_seed=5, **params)):
        ids = torch.tensor([completion.prompt_ids + completion.token_ids])
        with engine.model.training_numerics(), torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[0, completion.num_prompt_tokens - 1 : -1]
        chosen = selected_logprobs(logits, torch.tensor(completion.token_ids), 1.0)
        largest = max(largest, (chosen - torch.tensor(completion.logprobs)).abs().max().item())
    return largest


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_peft_model_is_hosted_as_it_is(make_model, dtype):
    model = adapted(make_model("qwen3", dtype))
    engine = Engine(model, CONFIG)
    greedy = engine.generate(PROMPTS, SamplingParams(max_new_tokens=8, temperature=0.0))
    for prompt, completion in zip(PROMPTS, greedy, strict=True):
        expected = model.generate(input_ids=torch.tensor([prompt]), max_new_tokens=8, do_sample=False, pad_token_id=0)
        assert list(completion.token_ids) == expected[0, len(prompt) :].tolist()
    model.train()
    assert gap_of(engine, model) == 0.0
    with engine.model.training_numerics():
        model(input_ids=torch.tensor([PROMPTS[1]]), use_cache=False).logits.float().logsumexp(-1).sum().backward()
    graded = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert graded and all("lora_" in name for name in graded)


def test_module_with_an_added_adapter_is_hosted(make_model):
    needs_peft_of_transformers()
    model = make_model("qwen3")
    model.add_adapter(LoraConfig(**LORA, init_lora_weights=False))
    assert gap_of(Engine(model, CONFIG), model) == 0.0


@pytest.mark.parametrize("family", ["qwen3_5", pytest.param("kimi_linear", marks=pytest.mark.slow)])
def test_adapters_on_every_linear_layer_of_recurrent_models_keep_the_trainers_bits(make_model, family):
    settings = LoraConfig(**{**LORA, "target_modules": "all-linear"}, init_lora_weights=False)
    model = get_peft_model(make_model(family), settings).train()
    engine = Engine(model, CONFIG)
    with engine.model.rollout_phase():
        assert gap_of(engine, model) == 0.0


def test_adapters_and_a_divided_model_are_refused_together(make_model):
    config = EngineConfig(kv_cache="64 blocks", k_blocks=2)
    with pytest.raises(ValueError, match=r"has adapters, which need one rank and k_blocks=1, not 1 and 2: merge them"):
        Engine(adapted(make_model("qwen3")), config)


def test_no_kv_of_an_adapter_is_used_after_a_switch(make_model):
    model = adapted(make_model("qwen3"))
    model.add_adapter("other", LoraConfig(**LORA, init_lora_weights=False))
    engine = Engine(model, CONFIG)

    def sees_a_switch() -> bool:
        before = engine.epoch
        assert gap_of(engine, model) == 0.0
        first, again = (engine.generate(PROMPTS[1], SamplingParams(max_new_tokens=1))[0] for _ in range(2))
        assert first.num_cached_tokens == again.num_cached_tokens == 32
        return engine.epoch > before

    assert not sees_a_switch()
    with engine.model.rollout_phase():  # also inside of one
        assert not sees_a_switch()
        with model.disable_adapter():
            assert sees_a_switch()
        assert sees_a_switch()
    model.set_adapter("other")
    assert sees_a_switch()
    model.merge_adapter()
    assert sees_a_switch()
    model.unmerge_adapter()
    assert sees_a_switch()
    next(m for m in model.modules() if hasattr(m, "scale_layer")).scale_layer(2.0)
    assert sees_a_switch() and not sees_a_switch()


def test_switch_between_two_steps_makes_running_sequences_compute_their_kv_again(make_model):
    model = adapted(make_model("qwen3"))
    engine = Engine(model, CONFIG)
    engine.add(PROMPTS[1], SamplingParams(max_new_tokens=4, temperature=0.0))
    while not (running := engine.live_sequences()) or running[0].num_output_tokens < 2:
        engine.step()
    with model.disable_adapter():
        done = []
        while not done:
            done = engine.step()
        [mixed] = done
        ids = torch.tensor([mixed.prompt_ids + mixed.token_ids])
        with engine.model.training_numerics(), torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[0, mixed.num_prompt_tokens - 1 : -1]
    plain = selected_logprobs(logits, torch.tensor(mixed.token_ids), 1.0).tolist()
    same = [a == b for a, b in zip(plain, mixed.logprobs, strict=True)]
    assert same == [False, False, True, True]


def test_each_step_looks_for_a_switch(make_model):
    """A schedule of several steps would run them with the adapters of the first one."""
    engine = Engine(adapted(make_model("qwen3")), replace(CONFIG, speculation="off"))
    launch, allowed = engine.parts.runner.launch, []

    def noted(output, requests):
        allowed.append(output.num_steps)
        return launch(output, requests)

    engine.parts.runner.launch = noted
    engine.generate(PROMPTS, SamplingParams(max_new_tokens=12))
    assert set(allowed) == {1}


def test_recorded_decode_steps_are_dropped_with_a_switch(make_model):
    model = adapted(make_model("qwen3"))
    engine = Engine(model, EngineConfig(kv_cache="64 blocks", max_num_seqs=4, cuda_graph_batch_sizes=(1, 2, 4)))
    long = {"ignore_eos": True, "min_new_tokens": 24}
    engine.generate(PROMPTS[0], SamplingParams(max_new_tokens=24, sampling_seed=1, **long))
    with model.disable_adapter():
        [off] = engine.generate(PROMPTS[0], SamplingParams(max_new_tokens=24, sampling_seed=1, **long))
        ids = torch.tensor([off.prompt_ids + off.token_ids])
        with engine.model.training_numerics(), torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[0, off.num_prompt_tokens - 1 : -1]
    assert selected_logprobs(logits, torch.tensor(off.token_ids), 1.0).tolist() == list(off.logprobs)


def test_adapters_outside_of_the_layers_are_refused_by_name(make_model):
    model = get_peft_model(make_model("qwen3"), PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"))
    with pytest.raises(ValueError, match=r"adapter 'default' \(PREFIX_TUNING\) cannot be hosted: it learns a prompt"):
        Engine(model, CONFIG)
    with pytest.raises(ValueError, match=r"needs? one rank and k_blocks=1, not 1 and 2: merge them"):
        Engine(adapted(make_model("qwen3")), EngineConfig(kv_cache="64 blocks", k_blocks=2))


def test_layers_that_change_after_hosting_are_refused_by_name(make_model):
    model = adapted(make_model("qwen3"))
    engine = Engine(model, CONFIG)
    model.add_adapter("other", LoraConfig(**LORA))
    with pytest.raises(ValueError, match="layers of Qwen3ForCausalLM are others than when it was hosted"):
        engine.generate(PROMPTS[0], SamplingParams(max_new_tokens=1))
