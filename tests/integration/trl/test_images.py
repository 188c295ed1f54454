"""TRL's GRPOTrainer trains models of images and text on samples of its own module, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("trl", reason="the extra `trl` is not installed: make test-trl")
from datasets import Dataset
from PIL import Image
from trl import GRPOConfig, GRPOTrainer

from lockstep.integration.trl.images import refuse_uneven_images
from lockstep.integration.trl.rollouts import GAP, NUM_COMPARED, LockstepRollouts
from lockstep.rollout.config import EngineConfig
from lockstep.tests.optional_packages import needs_transformers
from lockstep.tests.support.images import models

pytestmark = [pytest.mark.filterwarnings("ignore:You are using 'rollout_func'")]
COLOURS = {"red": (220, 20, 20), "green": (20, 200, 20), "blue": (10, 10, 230), "white": (250, 250, 250)}
SIZES = ((16, 16), (24, 16), (16, 32))
GROUP = 4


@pytest.fixture(autouse=True)
def _modules_that_take_features_of_images() -> None:
    needs_transformers(5, 23)


def pictures(num: int = 8) -> list[Any]:
    """Return pictures of one colour each, in several sizes."""
    colours = list(COLOURS.values())
    return [Image.new("RGB", SIZES[n % len(SIZES)], colours[n % len(colours)]) for n in range(num)]


def rows(column: str = "image") -> list[dict[str, Any]]:
    """Return rows of equal questions and different pictures."""
    question = [{"role": "user", "content": "the name"}]
    return [{"prompt": question, column: one if column == "image" else [one]} for one in pictures()]


def long_words(completions: list[Any], **_: object) -> list[float]:
    return [len(c[0]["content"]) / 50 for c in completions]


@pytest.fixture
def make_trainer(tmp_path: Path, restore_threads: None) -> Iterator[Callable[..., Any]]:
    torch.set_num_threads(1)
    made = []

    def make(
        kind: str,
        dataset: list[dict[str, Any]] | None = None,
        dtype: Any = torch.float32,
        peft_config: Any = None,
        **given: Any,
    ) -> Any:
        model, processor = getattr(models, kind)(dtype)
        rollouts = LockstepRollouts(EngineConfig(kv_cache="128 blocks", max_num_seqs=16), reuse_logprobs=True)
        settings = {
            "output_dir": str(tmp_path / "out"), "use_cpu": True, "bf16": dtype is torch.bfloat16, "report_to": [],
            "logging_steps": 1, "save_strategy": "no", "disable_tqdm": True, "max_steps": 2,
            "per_device_train_batch_size": GROUP, "gradient_accumulation_steps": 3, "num_generations": GROUP,
            "max_completion_length": 6, "learning_rate": 3e-3, "lr_scheduler_type": "constant",
        } | given  # fmt: skip
        trainer = GRPOTrainer(
            model=model,
            peft_config=peft_config,
            args=GRPOConfig(**settings),
            reward_funcs=long_words,
            processing_class=processor,
            train_dataset=Dataset.from_list(dataset or rows()),
            rollout_func=rollouts,
            callbacks=[rollouts.callback],
        )
        trainer.rollouts = rollouts
        made.append(rollouts)
        return trainer

    yield make
    for rollouts in made:
        rollouts.close()


def column(trainer: Any, name: str) -> list[float]:
    return [line[name] for line in trainer.state.log_history if NUM_COMPARED in line]


@pytest.mark.parametrize(
    ("kind", "dtype"), [("qwen2_5_vl", torch.float32), ("llava", torch.float32), ("qwen2_5_vl", torch.bfloat16)]
)
def test_a_model_is_trained_on_images_with_a_gap_of_zero(make_trainer, kind, dtype):
    trainer = make_trainer(kind, dtype=dtype)
    before = {name: one.detach().clone() for name, one in trainer.model.named_parameters()}
    trainer.train()
    assert column(trainer, GAP) == [0.0, 0.0]
    assert all(num >= 3 * GROUP for num in column(trainer, NUM_COMPARED))
    assert column(trainer, "clip_ratio/region_mean") == [0.0, 0.0]
    changed = {name for name, one in trainer.model.named_parameters() if not torch.equal(one, before[name])}
    assert any("vis" in name for name in changed) and any("lm_head" in name for name in changed)


def test_known_logprobs_are_found_again_by_the_images_where_tokens_are_equal(make_trainer):
    trainer = make_trainer("qwen2_5_vl", num_iterations=2, max_steps=4, max_completion_length=1)
    batches, generate = [], trainer._generate_and_score_completions
    trainer._generate_and_score_completions = lambda inputs: batches.append(generate(inputs)) or batches[-1]
    trainer.train()
    assert len(batches) == 2
    for batch in batches:
        assert torch.equal(batch["old_per_token_logps"], batch["sampling_per_token_logps"])
    assert column(trainer, NUM_COMPARED) == [3 * GROUP, 0, 3 * GROUP, 0]
    assert [line[GAP] for line in trainer.state.log_history if GAP in line] == [0.0, 0.0]
    assert trainer.rollouts._forwards[0].num_scored == 4 * 3  # none for the old log-probabilities


def test_rows_with_and_without_images_are_in_one_batch(make_trainer):
    dataset = [{**row, "images": row["images"] if n % 3 else []} for n, row in enumerate(rows("images"))]
    trainer = make_trainer("qwen2_5_vl", dataset, per_device_train_batch_size=3 * GROUP, gradient_accumulation_steps=1)
    trainer.train()
    assert column(trainer, GAP) == [0.0, 0.0]
    assert all(num >= 3 * GROUP for num in column(trainer, NUM_COMPARED))


def test_the_token_of_images_is_never_drawn(make_trainer):
    trainer = make_trainer("qwen2_5_vl", learning_rate=0.0, temperature=100.0, max_completion_length=32)
    seen = []
    trainer.reward_funcs = [lambda completion_ids, **_: seen.extend(completion_ids) or [0.0] * len(completion_ids)]
    with torch.no_grad():
        trainer.model.lm_head.weight.mul_(100.0)
    trainer.train()
    token = trainer.model.config.image_token_id
    assert trainer.rollouts._params.logit_bias == {token: float("-inf")}
    assert seen and all(token not in ids for ids in seen)


def test_images_that_trl_does_not_score_with_are_refused_by_name(make_trainer):
    picture = pictures()[0]
    content = [{"type": "image", "image": picture}, {"type": "text", "text": "the name"}]
    trainer = make_trainer("qwen2_5_vl")
    trainer.train_dataset = [{"prompt": [{"role": "user", "content": content}]}] * 8
    with pytest.raises(
        ValueError, match="the dataset's column `images` or `image` alone, not those inside of messages"
    ):
        trainer.train()


def test_an_adapter_is_trained_on_images(make_trainer):
    from peft import LoraConfig

    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = make_trainer("qwen2_5_vl", peft_config=lora, beta=0.01)
    trainer.train()
    assert column(trainer, GAP) == [0.0, 0.0]
    assert column(trainer, "kl")[0] == 0.0


@pytest.mark.parametrize(
    ("others", "logs", "is_refused"), [([1.0], True, False), ([0.0], True, True), ([0.0], False, False)]
)
def test_a_generation_whose_log_would_wait_for_ever_is_refused(others, logs, is_refused):
    accelerator = SimpleNamespace(
        num_processes=2, device="cpu", gather=lambda own: torch.cat([own, torch.tensor(others)])
    )
    trainer = SimpleNamespace(_is_vlm=True, log_multimodal=logs, accelerator=accelerator)
    refused = pytest.raises(ValueError, match=r"1 of 2 processes have images .* Set log_multimodal=False")
    with refused if is_refused else nullcontext():
        refuse_uneven_images(trainer, [[1, 2], {"input_ids": [3]}])
