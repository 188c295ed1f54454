"""Train with TRL's GRPOTrainer on samples of the module that it trains, with a log-probability gap of 0.0.

    python examples/trl_grpo.py [--model FOLDER] [--steps N] [--lora]
    torchrun --nproc-per-node 2 examples/trl_grpo.py

It needs the extra `trl`: pip install -e '.[trl]'. What differs from a script without Lockstep are the lines that name
`rollouts`, and `bf16`, which is false for weights in float32: the engine computes in the dtype of the weights.
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from datasets import Dataset
from peft import LoraConfig
from tiny_model import load
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from trl import GRPOConfig, GRPOTrainer

from lockstep import EngineConfig
from lockstep.integration.trl.rollouts import GAP, LockstepRollouts

PROMPTS = ("Write a number: ", "Count: ", "How many? ", "1 + 1 is ")


def main() -> None:
    """Train the model, and print a line for each step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder in Hugging Face format")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lora", action="store_true", help="train adapters, not the weights themselves")
    options = parser.parse_args()
    model, tokenizer = load(options.model)
    rollouts = LockstepRollouts(EngineConfig(kv_cache="64MiB"))
    with rollouts, tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=model,
            args=settings(folder, options.steps, uses_bf16=model.dtype is torch.bfloat16),
            reward_funcs=digits,
            train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS]),
            processing_class=tokenizer,
            peft_config=LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM") if options.lora else None,
            rollout_func=rollouts,
            callbacks=[rollouts.callback, Lines()],
        )
        trainer.train()


def settings(folder: str, num_steps: int, *, uses_bf16: bool) -> GRPOConfig:
    """Return the settings of a short run."""
    return GRPOConfig(
        output_dir=folder, max_steps=num_steps, learning_rate=3e-3, lr_scheduler_type="constant", bf16=uses_bf16,
        per_device_train_batch_size=16, num_generations=8, max_completion_length=12, num_iterations=1,
        vllm_importance_sampling_correction=False,  # there is nothing to correct, see docs/guides/trl.md
        use_cpu=not torch.cuda.is_available(),  # without it accelerate joins no processes on CPUs
        logging_steps=1, report_to=[], save_strategy="no", disable_tqdm=True,
    )  # fmt: skip


def digits(completions: list[str], **_: object) -> list[float]:
    """Return the share of characters that are digits. Replace it by your own reward."""
    return [sum(map(str.isdigit, text)) / max(len(text), 1) for text in completions]


class Lines(TrainerCallback):
    """A callback that prints the reward and the gap of each step."""

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **_: object,
    ) -> None:
        """Print the line of one step."""
        if state.is_world_process_zero and logs and "reward" in logs:
            print(f"step {state.global_step}: reward {logs['reward']:.3f}, log-probability gap {logs[GAP]}, "
                  f"ratio clipped {logs['clip_ratio/region_mean']}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
