"""The training loops of tinker-cookbook (0.6) against `lockstep tinker`, as they are: RL and supervised learning.

python tinker_cookbook_program.py URL MODEL_FOLDER MODEL_NAME
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from pathlib import Path

os.environ["TINKER_API_KEY"] = "tml-local"
os.environ["WANDB_MODE"] = "disabled"

import chz
import tinker
from tinker_cookbook import renderers
from tinker_cookbook.renderers import TrainOnWhat
from tinker_cookbook.rl import train as rl
from tinker_cookbook.rl.types import Env, EnvGroupBuilder, RLDataset, RLDatasetBuilder, StepResult
from tinker_cookbook.supervised import train as supervised
from tinker_cookbook.supervised.data import conversation_to_datum
from tinker_cookbook.supervised.types import SupervisedDataset, SupervisedDatasetBuilder
from tinker_cookbook.tokenizer_utils import get_tokenizer

NUM_STEPS = 10
CONVERSATION = [
    {"role": "user", "content": "the name of the value"},
    {"role": "assistant", "content": "the value of the name is the value"},
]


def renderer_of(name: str) -> renderers.Renderer:
    return renderers.get_renderer("role_colon", get_tokenizer(name))


class Quarter(Env):
    """One turn, whose reward is the share of the tokens of one quarter of the vocabulary."""

    def __init__(self, renderer: renderers.Renderer) -> None:
        self._renderer = renderer

    async def initial_observation(self):
        return self._renderer.build_generation_prompt(CONVERSATION[:1]), self._renderer.get_stop_sequences()

    async def step(self, action, *, extra=None) -> StepResult:
        reward = sum(token % 4 == 0 for token in action) / len(action)
        stop = self._renderer.get_stop_sequences()
        return StepResult(
            reward=reward, episode_done=True, next_observation=tinker.ModelInput.empty(), next_stop_condition=stop
        )


class Group(EnvGroupBuilder):
    def __init__(self, name: str) -> None:
        self._name = name

    async def make_envs(self):
        return [Quarter(renderer_of(self._name)) for _ in range(16)]


class Groups(RLDataset):
    def __init__(self, name: str, num_steps: int) -> None:
        self._name, self._num_steps = name, num_steps

    def get_batch(self, index: int):
        return [Group(self._name) for _ in range(3)]

    def __len__(self) -> int:
        return self._num_steps


@chz.chz
class GroupsBuilder(RLDatasetBuilder):
    name: str
    num_steps: int

    async def __call__(self):
        return Groups(self.name, self.num_steps), None


class Conversations(SupervisedDataset):
    def __init__(self, name: str) -> None:
        on = TrainOnWhat.ALL_ASSISTANT_MESSAGES
        self._data = [conversation_to_datum(CONVERSATION, renderer_of(name), 100, on) for _ in range(2)]

    def get_batch(self, index: int):
        return self._data

    def __len__(self) -> int:
        return NUM_STEPS


@chz.chz
class ConversationsBuilder(SupervisedDatasetBuilder):
    name: str

    def __call__(self):
        return Conversations(self.name), None


def metrics_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def reinforcement(url: str, name: str, folder: Path, num_steps: int, **settings: object) -> list[dict]:
    """Run the RL loop. Returns the metrics of its steps."""
    config = rl.Config(
        dataset_builder=GroupsBuilder(name=name, num_steps=num_steps), model_name=name, recipe_name="test",
        max_tokens=8, log_path=str(folder), eval_every=0, save_every=5, renderer_name="role_colon", lora_rank=8,
        base_url=url, **settings,
    )  # fmt: skip
    asyncio.run(rl.main(config))
    return [one for one in metrics_of(folder) if "env/all/reward/total" in one]


def main(url: str, _folder: str, name: str) -> None:
    with tempfile.TemporaryDirectory() as logs:
        reference = rl.KLReferenceConfig(base_model=name)
        penalty = {"kl_penalty_coef": 0.001, "kl_reference_config": reference}
        found = reinforcement(url, name, Path(logs, "rl"), NUM_STEPS, learning_rate=3e-2, **penalty)
        rewards = [one["env/all/reward/total"] for one in found]
        gaps = [one[f"optim/kl_sample_train_{kind}"] for one in found for kind in ("v1", "v2")]
        assert len(found) == NUM_STEPS and rewards[-1] > rewards[0] + 0.1, rewards
        assert gaps == [0.0] * len(gaps), f"sampler and trainer have the same bits: {gaps}"
        print(f"cookbook, RL: the reward rises from {rewards[0]:.2f} to {rewards[-1]:.2f}, kl_sample_train is 0.0")

        ahead = rl.AsyncConfig(max_steps_off_policy=2, groups_per_batch=3, loss_fn="importance_sampling")
        # Ratios of samples that are two steps old have no clip here: at the rate above they hinder each other.
        found = reinforcement(url, name, Path(logs, "ahead"), 2 * NUM_STEPS, learning_rate=1e-2, async_config=ahead)
        rewards = [one["env/all/reward/total"] for one in found]
        ages = [one["training_client/step"] - one["sampling_client/step_min"] for one in found]
        assert len(found) > 1 and rewards[-1] > rewards[0] + 0.1, rewards
        assert 0 < max(ages) <= ahead.max_steps_off_policy, ages
        print(f"cookbook, RL off policy: the reward rises from {rewards[0]:.2f} to {rewards[-1]:.2f}")

        folder = Path(logs, "supervised")
        supervised_config = supervised.Config(
            log_path=str(folder), model_name=name, recipe_name="test", renderer_name="role_colon", base_url=url,
            dataset_builder=ConversationsBuilder(name=name), learning_rate=1e-2, lora_rank=8, save_every=3,
            eval_every=0,
        )  # fmt: skip
        asyncio.run(supervised.main(supervised_config))
        losses = [one["train_mean_nll"] for one in metrics_of(folder) if "train_mean_nll" in one]
        assert len(losses) == NUM_STEPS and losses[-1] < 0.5 * losses[0], losses
        print(f"cookbook, supervised: the loss falls from {losses[0]:.2f} to {losses[-1]:.2f}")
    print("tinker-cookbook: done")


if __name__ == "__main__":
    main(*sys.argv[1:])
