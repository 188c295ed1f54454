"""verl's trainer (0.9, on processors) with Lockstep's rollout: GRPO steps whose log-probabilities do not differ.

python verl_program.py URL MODEL_FOLDER MODEL_NAME: the server is not used, verl starts its own.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from transformers import AutoTokenizer

from lockstep.tests.support.random_models import initial_model

STEPS = 3
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role + '\n' + message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **further):
    return sum(character.isdigit() for character in solution_str) / max(1, len(solution_str))
"""
SETTINGS = {
    "data.train_batch_size": 4, "data.max_prompt_length": 64, "data.max_response_length": 16,
    "data.dataloader_num_workers": 0, "algorithm.adv_estimator": "grpo",
    "actor_rollout_ref.model.external_lib": "lockstep.integration.verl.engine",
    "actor_rollout_ref.model.use_remove_padding": True,
    "+actor_rollout_ref.model.override_config.attn_implementation": "sdpa",
    "actor_rollout_ref.actor.strategy": "fsdp2", "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 4, "actor_rollout_ref.actor.use_torch_compile": False,
    "actor_rollout_ref.actor.fsdp_config.use_torch_compile": False, "actor_rollout_ref.actor.optim.lr": 1e-3,
    "actor_rollout_ref.rollout.name": "lockstep", "actor_rollout_ref.rollout.n": 4,
    "actor_rollout_ref.rollout.max_model_len": 96, "actor_rollout_ref.rollout.max_num_seqs": 32,
    "actor_rollout_ref.rollout.calculate_log_probs": True,
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 4, "actor_rollout_ref.rollout.agent.num_workers": 1,
    "+actor_rollout_ref.rollout.engine_kwargs.lockstep.kv_cache": "256 blocks", "reward.num_workers": 1,
    "trainer.logger": "[console]", "trainer.n_gpus_per_node": 2, "trainer.nnodes": 1, "trainer.val_before_train": False,
    "trainer.test_freq": -1, "trainer.save_freq": -1, "trainer.total_training_steps": STEPS, "trainer.device": "cpu",
    "ray_kwargs.ray_init.num_cpus": 32, "+ray_kwargs.ray_init.num_gpus": 2,
    "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
}  # fmt: skip
FLOAT32 = {
    "+actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype": "fp32",
    "actor_rollout_ref.rollout.dtype": "float32", "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
}  # fmt: skip
DIVIDED = {  # float32 parameters that compute in bfloat16, as by default; embeddings and head share a matrix
    "actor_rollout_ref.rollout.dtype": "bfloat16", "actor_rollout_ref.rollout.tensor_model_parallel_size": 2,
    "+actor_rollout_ref.model.override_config.lockstep_k_blocks": 2,
}  # fmt: skip

BYPASS = {"algorithm.rollout_correction.bypass_mode": True}  # the rollout's log-probabilities are the old ones


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(sys.argv[2])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.pad_token, tokenizer.chat_template = tokenizer.eos_token, CHAT
    for settings, is_tied in ((FLOAT32, False), (DIVIDED, True), (FLOAT32 | BYPASS, True)):
        with tempfile.TemporaryDirectory() as folder:
            sizes = {"vocab_size": 1000, "max_position_embeddings": 256, "tie_word_embeddings": is_tied}
            initial_model("qwen3", **sizes).save_pretrained(f"{folder}/model")
            tokenizer.save_pretrained(f"{folder}/model")
            trains(Path(folder), settings)
    print("verl: done")


def trains(folder: Path, settings: dict[str, object]) -> None:
    rows = [
        {
            "data_source": "sums", "prompt": [{"role": "user", "content": f"{number} + {7 * number} ="}],
            "ability": "math", "reward_model": {"style": "rule", "ground_truth": str(8 * number)},
            "extra_info": {"index": number},
        }
        for number in range(16)
    ]  # fmt: skip
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "reward.py").write_text(REWARD)
    files = {
        "data.train_files": folder / "rows.jsonl", "data.val_files": folder / "rows.jsonl",
        "actor_rollout_ref.model.path": folder / "model", "reward.custom_reward_function.path": folder / "reward.py",
        "trainer.default_local_dir": folder / "checkpoints",
    }  # fmt: skip
    command = [sys.executable, "-m", "verl.trainer.main_ppo"]
    command += [f"{name}={value}" for name, value in (SETTINGS | settings | files).items()]
    environment = os.environ | {
        "VERL_PLATFORM": "cpu", "RAY_DEDUP_LOGS": "0", "RAY_USAGE_STATS_ENABLED": "0",
        # The plugin by name too: the checkout's own entry points may be older than it.
        "VERL_USE_EXTERNAL_MODULES": "lockstep.tests.clients.programs.verl_platform,lockstep.integration.verl.plugin",
    }  # fmt: skip
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=900)
    steps = re.findall(r"step:(\d+) - (.*)", done.stdout)
    if done.returncode != 0 or len(steps) != STEPS:
        raise SystemExit(
            f"verl ended with {done.returncode} after {len(steps)} steps:\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
        )
    for number, line in steps:
        metrics = dict(re.findall(r"([\w/]+):(-?[\d.e+-]+)", line))
        if not settings.keys() & BYPASS.keys():
            gap, ratio = metrics["training/rollout_probs_diff_max"], metrics["rollout_corr/ppl_ratio"]
            assert (float(gap), float(ratio)) == (0.0, 1.0), (number, gap, ratio)
        # Of the trainer's own forward and the old log-probabilities, which are the rollout's or have its bits.
        assert float(metrics["actor/ppo_kl"]) == 0 < float(metrics["actor/grad_norm"]), metrics
    left = subprocess.run(["pgrep", "-f", f"serve --model {folder}"], capture_output=True, text=True).stdout
    assert not left, f"servers that verl's end has left: {left}"


if __name__ == "__main__":
    main()
