"""TRL's GRPOTrainer trains with samples of its own module: the gap is 0.0, the ratio is 1, and the reward rises."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("trl", reason="the extra `trl` is not installed: make test-trl")
from peft import LoraConfig

from lockstep.integration.trl.rollouts import GAP, NUM_COMPARED
from lockstep.rollout.errors import LockstepError

pytestmark = [pytest.mark.filterwarnings("ignore:You are using 'rollout_func'")]
LORA = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}


def steps_of(trainer):
    """Return the log line of each step."""
    return [line for line in trainer.state.log_history if NUM_COMPARED in line]


def column(trainer, name):
    return [line[name] for line in steps_of(trainer)]


def parameters_of(trainer):
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def test_the_reward_rises_and_the_gap_is_zero_at_every_step(make_trainer, record_property):
    trainer = make_trainer(max_steps=25, per_device_train_batch_size=16)
    trainer.train()
    assert column(trainer, GAP) == [0.0] * 25
    assert all(num > 100 for num in column(trainer, NUM_COMPARED))
    rewards = column(trainer, "reward")
    record_property("figures", f"reward {sum(rewards[:5]) / 5:.3f} at first, {sum(rewards[-5:]) / 5:.3f} in the end")
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.3, rewards
    service = trainer.rollouts.service
    assert (service.engine.weight_version, service.engine.kv_bytes) == ("25", 0)
    assert service.engine.weight_digest == service.model_digest()


def test_adapters_are_trained_with_a_gap_of_zero(make_trainer, record_property):
    trainer = make_trainer(peft_config=LoraConfig(**LORA), max_steps=20, learning_rate=1e-2, beta=0.01)
    base = {name: p.clone() for name, p in trainer.model.named_parameters() if not p.requires_grad}
    trainer.train()
    assert column(trainer, GAP) == [0.0] * 20
    assert column(trainer, "kl")[0] == 0.0 < column(trainer, "kl")[-1]
    rewards = column(trainer, "reward")
    record_property("figures", f"reward {sum(rewards[:5]) / 5:.3f} at first, {sum(rewards[-5:]) / 5:.3f} in the end")
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.1, rewards
    assert base and all(torch.equal(base[name], p) for name, p in trainer.model.named_parameters() if name in base)


@pytest.mark.parametrize("checkpointing", [True, False])
def test_a_run_repeats_bit_for_bit(make_trainer, checkpointing):
    runs = []
    for _ in range(2):
        trainer = make_trainer(max_steps=3, gradient_checkpointing=checkpointing)
        trainer.train()
        runs.append((parameters_of(trainer), column(trainer, "reward"), trainer.rollouts.service.engine.weight_digest))
    (first, rewards, digest), (second, others, other_digest) = runs
    assert rewards == others and digest == other_digest
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_another_seed_draws_other_samples(make_trainer):
    rewards = []
    for seed in (1, 2):
        trainer = make_trainer(max_steps=1, seed=seed, shuffle_dataset=False, learning_rate=0.0)
        trainer.train()
        rewards.append(column(trainer, "reward"))
    assert rewards[0] != rewards[1]


def recorded_batches(trainer):
    """Record what TRL makes of each generation."""
    batches, generate = [], trainer._generate_and_score_completions
    trainer._generate_and_score_completions = lambda inputs: batches.append(generate(inputs)) or batches[-1]
    return batches


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_old_logprobs_that_trl_computes_are_the_engines(make_trainer, folder, dtype):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    settings = {"num_iterations": 2, "max_steps": 4, "temperature": 0.8, "off_policy_mask_threshold": 0.0}
    trainer = make_trainer(model, bf16=dtype is torch.bfloat16, **settings)
    batches = recorded_batches(trainer)
    trainer.train()
    assert len(batches) == 2
    for batch in batches:
        mask = batch["completion_mask"].bool()
        assert mask.sum() > 100
        assert torch.equal(batch["old_per_token_logps"][mask], batch["sampling_per_token_logps"][mask])
    assert column(trainer, NUM_COMPARED)[1] == 0  # the second pass: its weights have drawn none of the samples
    assert GAP not in steps_of(trainer)[1] and column(trainer, NUM_COMPARED)[2] > 0
    assert [line[GAP] for line in steps_of(trainer)[::2]] == [0.0, 0.0]


def test_known_logprobs_save_a_forward_and_change_no_bit(make_trainer):
    runs = []
    for reuses in (False, True):
        trainer = make_trainer(num_iterations=2, max_steps=4, reuse_logprobs=reuses)
        trainer.train()
        [forward] = trainer.rollouts._forwards
        runs.append((forward.num_scored, trainer.rollouts.service.engine.weight_digest, column(trainer, "loss")))
        assert steps_of(trainer)[0][GAP] == 0.0
    (computed, digest, losses), (reused, other_digest, other_losses) = runs
    assert reused == 8 and computed == 8 + 4  # micro-batches, and those of two generations once more
    assert digest == other_digest and losses == other_losses


def test_samples_for_several_steps_are_compared_in_the_first_only(make_trainer):
    trainer = make_trainer(steps_per_generation=4, gradient_accumulation_steps=2, max_steps=4)
    trainer.train()
    compared = column(trainer, NUM_COMPARED)
    assert compared[0] > 0 and compared[2] > 0 and compared[1] == compared[3] == 0


def test_one_ulp_in_one_weight_opens_the_gap(make_trainer, caplog):
    trainer = make_trainer(max_steps=1, gradient_accumulation_steps=1)
    trainer._generate_and_score_completions = changed_after(trainer)
    trainer.train()
    assert 0.0 < column(trainer, GAP)[0] < 1e-3
    assert "differ from the engine's" in caplog.text


def changed_after(trainer):
    """Return the trainer's generation, after which one weight is changed."""
    generate = trainer._generate_and_score_completions

    def run(inputs):
        batch = generate(inputs)
        weight = trainer.model.model.layers[0].mlp.down_proj.weight
        with torch.no_grad():
            weight[3, 4] = torch.nextafter(weight[3, 4], torch.tensor(torch.inf))
        return batch

    return run


@pytest.mark.parametrize(("dtype", "least", "most"), [(torch.float32, 0.0, 1e-5), (torch.bfloat16, 1e-3, 0.5)])
def test_trls_own_forward_has_other_bits(make_trainer, folder, record_property, dtype, least, most):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    trainer = make_trainer(model, max_steps=1, num_iterations=2, bf16=dtype is torch.bfloat16)
    trainer.train()
    [forward] = trainer.rollouts._forwards

    def without_numerics(prompts, its):
        out = trainer.rollouts(prompts, its)
        forward.remove()  # so that TRL computes the old log-probabilities by itself
        return out

    trainer.rollout_func = without_numerics
    trainer.model.train()
    prompts = [f"What is {n} + 3?\n" for n in (1, 10, 100, 1000) for _ in range(4)]
    batch = trainer._generate_and_score_completions([{"prompt": prompt} for prompt in prompts])
    mask = batch["completion_mask"].bool()
    difference = (batch["old_per_token_logps"] - batch["sampling_per_token_logps"])[mask].abs().max().item()
    record_property("figures", f"TRL's own forward, {dtype}: {difference:.2g}")
    assert least < difference < most


def test_reward_functions_see_which_weights_drew_a_sample(make_trainer):
    seen = []

    def look(completions, rollout_version, rollout_digest, rollout_seed, rollout_finish, **_):
        seen.append((rollout_version, rollout_digest, rollout_seed, rollout_finish))
        return [float(len(text)) for text in completions]

    trainer = make_trainer(reward_funcs=look)
    trainer.train()
    assert [set(versions) for versions, *_ in seen] == [{"0"}, {"1"}]
    assert len({digest for _, digests, *_ in seen for digest in digests}) == 2
    assert len({seed for *_, seeds, _ in seen for seed in seeds}) == 32
    assert {reason for *_, reasons in seen for reason in reasons} <= {"stop", "length"}


TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}a: "


def test_conversations_are_rendered_by_trl_and_evaluations_repeat(make_trainer):
    from datasets import Dataset

    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": text}]} for text in ("1 + 2", "30 + 40")] * 4)
    trainer = make_trainer(
        train_dataset=rows, eval_dataset=rows.select(range(2)), max_steps=1, per_device_eval_batch_size=8,
        max_completion_length=6,
    )  # fmt: skip
    trainer.processing_class.chat_template = TEMPLATE
    batches = recorded_batches(trainer)
    results = [trainer.evaluate() for _ in range(2)]
    assert results[0]["eval_reward"] == results[1]["eval_reward"] and results[0][f"eval_{GAP}"] == 0.0
    assert torch.equal(batches[0]["completion_ids"], batches[2]["completion_ids"])
    prompts = trainer.processing_class.batch_decode(batches[0]["prompt_ids"], skip_special_tokens=True)
    assert set(prompts) <= {"user: 1 + 2\na: ", "user: 30 + 40\na: "}
    trainer.train()
    assert column(trainer, GAP) == [0.0]
    assert trainer.evaluate()[f"eval_{GAP}"] == 0.0


def test_an_equal_reference_model_has_a_kl_of_zero(make_trainer):
    trainer = make_trainer(beta=0.1)
    trainer.train()
    assert column(trainer, "kl")[0] == 0.0 < column(trainer, "kl")[1]
    assert column(trainer, GAP) == [0.0, 0.0]


def test_a_resumed_run_ends_as_one_without_a_stop(make_trainer, tmp_path):
    ends = []
    for stops in (False, True):
        trainer = make_trainer(max_steps=4, save_strategy="steps", save_steps=2, output_dir=str(tmp_path / str(stops)))
        if stops:
            straight = tmp_path / "False" / "checkpoint-2"
            trainer.train(resume_from_checkpoint=str(straight))
        else:
            trainer.train()
        ends.append(trainer.rollouts.service.engine.weight_digest)
        assert trainer.rollouts.service.engine.weight_version == "4"
    assert ends[0] == ends[1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bf16": True}, r"bf16=True \(TRL's default\) would compute in bfloat16 with weights in torch.float32"),
        ({"cast_lm_head_to_fp32": True}, "cast_lm_head_to_fp32=True"),
        ({"use_transformers_continuous_batching": True}, "use_transformers_continuous_batching=True"),
        ({"generation_kwargs": {"num_beams": 2}}, "generation_kwargs: num_beams"),
        ({"engine": {"tp": 2, "k_blocks": 2}}, "tp=2, pp=1"),
        ({"callbacks": []}, "pass the callback of these rollouts"),
    ],
)
def test_settings_that_are_not_supported_are_refused_by_name(make_trainer, settings, message):
    trainer = make_trainer(**settings)
    with pytest.raises(ValueError, match=message):
        trainer.train()
    with pytest.raises(RuntimeError, match="there is no engine yet"):
        _ = trainer.rollouts.service
    assert trainer.rollouts._forwards == []  # the module has TRL's again


def test_dropout_is_refused_by_name(make_trainer):
    trainer = make_trainer(peft_config=LoraConfig(**LORA, lora_dropout=0.1))
    with pytest.raises(ValueError, match=r"draws random numbers.*\(0.1\) of Dropout"):
        trainer.train()


def test_a_sample_that_does_not_fit_in_the_pool_is_an_error_that_says_so(make_trainer):
    trainer = make_trainer(engine={"kv_cache": "1 block"})
    with pytest.raises(RuntimeError, match=r"did not finish a sample of a prompt of 2\d tokens"):
        trainer.train()


def test_a_prompt_beyond_the_context_is_an_error_that_says_so(make_trainer):
    from datasets import Dataset

    trainer = make_trainer(train_dataset=Dataset.from_list([{"prompt": "1 + " * 20}] * 4))
    with pytest.raises((ValueError, RuntimeError), match="64"):
        trainer.train()


def test_completions_that_trl_masks_because_they_are_cut_off_are_not_compared(make_trainer):
    trainer = make_trainer(mask_truncated_completions=True, num_iterations=2, reuse_logprobs=True, max_steps=3)
    batches = recorded_batches(trainer)
    trainer.train()
    num_scored = [int(batch["completion_mask"].sum()) for batch in batches]
    assert column(trainer, NUM_COMPARED) == [num_scored[0], 0, num_scored[1]]
    assert sum(num_scored) < 2 * 16 * 8
    assert all(line.get(GAP, 0.0) == 0.0 for line in steps_of(trainer))


def test_a_step_that_fails_leaves_an_engine_that_refuses_to_sample_until_training_begins_again(make_trainer):
    trainer = make_trainer(max_steps=3)
    trainer.create_optimizer()
    fault = trainer.optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    with pytest.raises(LockstepError, match="the trainer is writing the weights"):
        trainer.rollouts(["1 + 1"], trainer)
    fault.remove()
    trainer.train()
    assert column(trainer, GAP)[-3:] == [0.0] * 3


def test_the_best_weights_that_trl_loads_in_the_end_are_published(make_trainer, folder):
    from datasets import Dataset

    trainer = make_trainer(
        max_steps=2, eval_dataset=Dataset.from_list([{"prompt": "1 + 2"}]), eval_strategy="steps", eval_steps=1,
        save_strategy="steps", save_steps=1, load_best_model_at_end=True, metric_for_best_model="eval_falling",
        per_device_eval_batch_size=8, reward_funcs=falling,
    )  # fmt: skip
    digests = []
    trainer.rollouts.callback.on_save = lambda *_, **__: digests.append(trainer.rollouts.service.engine.weight_digest)
    trainer.train()
    engine = trainer.rollouts.service.engine
    assert len(set(digests)) == 2 and engine.weight_digest == digests[0]
    assert trainer.evaluate()[f"eval_{GAP}"] == 0.0


def falling(completions, trainer_state, log_metric, **_):
    log_metric("falling", -float(trainer_state.global_step))
    return [float(len(text)) for text in completions]


def test_rollouts_serve_one_trainer(make_trainer):
    first, second = make_trainer(max_steps=1), make_trainer(max_steps=1)
    first.train()
    with pytest.raises(ValueError, match="another trainer's"):
        first.rollouts(["1"], second)


def test_closing_gives_trl_its_forward_back(make_trainer):
    trainer = make_trainer(max_steps=1)
    before = vars(trainer.model)["forward"]
    with trainer.rollouts:
        trainer.train()
        assert vars(trainer.model)["forward"] is not before
    assert vars(trainer.model)["forward"] is before
    with pytest.raises(RuntimeError, match="these rollouts are closed"):
        trainer.train()
    ids = torch.tensor([[5, 6, 7, 8]])
    assert trainer.model(ids, labels=ids, fused_lm_head=True).log_probs.shape == (1, 3)


RANK = """
import os, sys, tempfile
sys.path.insert(0, sys.argv[1])
import trl_grpo as example
from datasets import Dataset

model, tokenizer = example.load(None)
seeds = []

def reward(completions, rollout_seed, **_):
    seeds.extend(rollout_seed)
    return example.digits(completions)

with example.LockstepRollouts(example.EngineConfig(kv_cache="64MiB")) as rollouts:
    trainer = example.GRPOTrainer(
        model=model, args=example.settings(tempfile.mkdtemp(), 3, uses_bf16=False), reward_funcs=reward,
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in example.PROMPTS]),
        processing_class=tokenizer, rollout_func=rollouts, callbacks=[rollouts.callback, example.Lines()],
    )
    trainer.train()
    assert trainer.model_wrapped is not trainer.model, "there is no DistributedDataParallel"
    engine = rollouts.service.engine
    print(f"rank {os.environ['RANK']}: {engine.weight_version} {engine.weight_digest} {sorted(seeds)}", flush=True)
"""
EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.mark.slow
def test_two_processes_train_one_model_with_samples_of_their_own(tmp_path):
    (tmp_path / "rank.py").write_text(RANK)
    env = os.environ | {"OMP_NUM_THREADS": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "rank.py", str(EXAMPLES)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, env=env, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("step ")]
    assert len(lines) == 3 and all("gap 0.0," in line for line in lines), done.stdout
    ranks = re.findall(r"^rank [01]: (3) ([0-9a-f]{64}) \[(.*)\]$", done.stdout, re.MULTILINE)
    assert len(ranks) == 2 and ranks[0][1] == ranks[1][1]
    seeds = [set(text.split(", ")) for *_, text in ranks]
    assert len(seeds[0]) == len(seeds[1]) == 48 and not seeds[0] & seeds[1]
