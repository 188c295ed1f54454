"""A toy model that TRL's GRPOTrainer trains in seconds: the job's arithmetic tokenizer, and a reward of digits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

GROUP = 8  # generations of one prompt


def digits(completions: list[Any], **_: object) -> list[float]:
    """Return the share of digits in each completion, a text or a conversation."""
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [sum(map(str.isdigit, text)) / max(len(text), 1) for text in texts]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the folder of the toy model and its tokenizer."""
    from lockstep.integration.grpo.tasks.arithmetic import build_tokenizer
    from lockstep.integration.grpo.tasks.warm_start import ModelSpec, build_model

    folder = tmp_path_factory.mktemp("toy")
    tokenizer = build_tokenizer()
    torch.manual_seed(0)
    spec = ModelSpec(hidden_size=64, intermediate_size=64, num_layers=2, num_heads=2)
    build_model(spec, tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def make_trainer(folder: Path, tmp_path: Path, restore_threads: None) -> Iterator[Callable[..., Any]]:
    """Yield a function that makes a GRPOTrainer and its rollouts, as make_trainer(beta=0.1, peft_config=...).

    Arguments that GRPOTrainer has go there, all others into its GRPOConfig. The rollouts are the trainer's `rollouts`.
    """
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    from lockstep.integration.grpo.tasks.arithmetic import ArithmeticSpec, arithmetic_problems
    from lockstep.integration.trl.rollouts import LockstepRollouts
    from lockstep.rollout.config import EngineConfig

    torch.set_num_threads(1)
    made = []
    prompts = [{"prompt": p.prompt} for p in arithmetic_problems(ArithmeticSpec(num_heldout=4)).train_problems(0, 32)]

    def make(
        model: Any = None, engine: dict[str, Any] | None = None, reuse_logprobs: bool = False, **given: Any
    ) -> Any:
        config = EngineConfig(**{"kv_cache": "256 blocks", "max_num_seqs": 16} | (engine or {}))
        rollouts = LockstepRollouts(config, reuse_logprobs=reuse_logprobs)
        own = {"eval_dataset", "peft_config", "train_dataset", "reward_funcs", "callbacks", "tools"}
        arguments: dict[str, Any] = {
            "reward_funcs": digits, "train_dataset": Dataset.from_list(prompts), "callbacks": [rollouts.callback],
        } | {name: given.pop(name) for name in own & given.keys()}  # fmt: skip
        settings = {
            "output_dir": str(tmp_path / "out"), "use_cpu": True, "bf16": False, "report_to": [], "logging_steps": 1,
            "save_strategy": "no", "disable_tqdm": True, "max_steps": 2, "per_device_train_batch_size": GROUP,
            "gradient_accumulation_steps": 2, "num_generations": GROUP, "max_completion_length": 8,
            "learning_rate": 3e-3, "lr_scheduler_type": "constant",
        } | given  # fmt: skip
        trainer = GRPOTrainer(
            model=model or AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
            args=GRPOConfig(**settings),
            processing_class=AutoTokenizer.from_pretrained(folder),
            rollout_func=rollouts,
            **arguments,
        )
        trainer.rollouts = rollouts
        made.append(rollouts)
        return trainer

    yield make
    for rollouts in made:
        rollouts.close()
