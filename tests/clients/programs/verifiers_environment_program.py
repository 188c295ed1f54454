"""An environment of verifiers as an environment of the job: its turns, its rubric, and exact log-probabilities.

python verifiers_environment_program.py URL TOKENIZER_FOLDER MODEL_NAME
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "examples" / "environments"))

import pytest
import torch
import verifiers as vf
from datasets import Dataset

from lockstep.integration.grpo.environments.player import EpisodePlayer
from lockstep.integration.grpo.settings.config import JobConfig
from lockstep.integration.grpo.settings.sampling import RolloutSettings
from lockstep.integration.grpo.settings.sections import RunSettings
from lockstep.integration.grpo.tasks.problems import Problem
from lockstep.integration.service import RolloutService
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.tests.rollout.engine.callers import trainer_logprobs
from lockstep.tests.support.chat.tokenizer import VOCAB_SIZE, byte_tokenizer, chat_template
from lockstep.tests.support.random_models import random_model


class Rewritten(vf.MultiTurnEnv):
    """An environment that changes what was said."""

    async def get_prompt_messages(self, state):
        return [vf.UserMessage(content=f"attempt {len(state['trajectory'])}")]

    async def env_response(self, messages, state, **_):
        return []


def main() -> None:
    torch.set_num_threads(1)
    tokenizer = byte_tokenizer(chat_template("hermes"))
    model = random_model("qwen3", vocab_size=VOCAB_SIZE, max_position_embeddings=512)
    engine = Engine(model, EngineConfig(kv_cache="128 blocks", max_num_seqs=8), tokenizer=tokenizer)
    try:
        service = RolloutService(engine)
        service.commit_in_place("0", source=model.named_parameters())
        play(service, tokenizer)
        refuse(service, tokenizer)
    finally:
        engine.close()
    print("verifiers environments: done")


def player(service, tokenizer, folder, **options) -> EpisodePlayer:
    config = JobConfig(
        RunSettings("x", folder), environment="verifiers", environment_options=options,
        rollout=RolloutSettings(prompts_per_step=3, group_size=2, max_new_tokens=12),
    )  # fmt: skip
    return EpisodePlayer(config, service, tokenizer)


def play(service, tokenizer) -> None:
    """Play the example's rows, many at a time."""
    rows = vf.load_environment("shorter_each_time").get_dataset().to_list()[:3]
    problems = [Problem("", "", f"row {at}", row) for at, row in enumerate(rows)]
    params = [SamplingParams(n=2, max_new_tokens=12, sampling_seed=at) for at in range(3)]
    with tempfile.TemporaryDirectory() as folder:
        episodes = player(service, tokenizer, folder, env="shorter_each_time").play(problems, params)
    for episode in (one for group in episodes for one in group):
        assert episode.num_turns == 3 and episode.value in (0.0, 0.5, 1.0), episode
        logprobs = trainer_logprobs(service.engine, [*episode.prompt_ids, *episode.token_ids])
        drawn = [logprobs[len(episode.prompt_ids) - 1 + at] for at, one in enumerate(episode.sampled) if one]
        assert drawn == list(episode.logprobs), "the log-probabilities are those of one forward"
        assert episode.text.count("Now say it in fewer words.") == 2


def refuse(service, tokenizer) -> None:
    """Refuse an environment that changes what was said before, and tools."""
    from lockstep.integration.grpo.environments.adapters import verifiers as adapter

    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": "hello"}], "answer": ""}])

    def tool(text: str) -> str:
        """Return a text."""
        return text

    for environment, words in [
        (Rewritten(max_turns=2, dataset=rows, rubric=vf.Rubric()), "has changed what was said before"),
        (vf.ToolEnv(tools=[tool], dataset=rows, rubric=vf.Rubric()), "use tools"),
    ]:
        adapter._environment = lambda name, its_args, environment=environment: environment
        problem, params = Problem("", "", "row 1", rows[0]), SamplingParams(n=1, max_new_tokens=4, sampling_seed=0)
        with tempfile.TemporaryDirectory() as folder, pytest.raises(ValueError, match=words):
            player(service, tokenizer, folder, env="x").play([problem], [params])


if __name__ == "__main__":
    main()
