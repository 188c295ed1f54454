"""An environment of verifiers as an environment of the job: its turns, its rubric, and exact log-probabilities.

python verifiers_environment_program.py URL TOKENIZER_FOLDER MODEL_NAME
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Literal

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


class Calling(vf.ToolEnv):
    """An environment whose first answer must be a call, which a random model would hardly make."""

    async def get_model_response(self, state, *args, **more):
        choice = "auto" if state["trajectory"] else "required"
        return await super().get_model_response(state, *args, **{**more, "sampling_args": {"tool_choice": choice}})


def lookup(word: Literal["ab", "ac"]) -> str:
    """Look a word up."""
    return f"nothing of {word}"


def content(completion) -> float:
    """Reward everything alike."""
    return 1.0


def main() -> None:
    torch.set_num_threads(1)
    tokenizer = byte_tokenizer(chat_template("hermes"))
    model = random_model("qwen3", vocab_size=VOCAB_SIZE, max_position_embeddings=512)
    engine = Engine(model, EngineConfig(kv_cache="128 blocks", max_num_seqs=8), tokenizer=tokenizer)
    try:
        service = RolloutService(engine)
        service.commit_in_place("0", source=model.named_parameters())
        play(service, tokenizer)
        play_others(service, tokenizer)
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


def play_one(service, tokenizer, environment, row, **params):
    """Play one episode of an environment."""
    from lockstep.integration.grpo.environments.adapters import verifiers as adapter

    adapter._environment = lambda name, its_args: environment
    problem, params = (
        Problem("", "", "row 1", row),
        SamplingParams(**{"n": 1, "sampling_seed": 0, "max_new_tokens": 100, **params}),
    )
    with tempfile.TemporaryDirectory() as folder:
        [[episode]] = player(service, tokenizer, folder, env="x").play([problem], [params])
    for one in episode.conversations:
        logprobs = trainer_logprobs(service.engine, [*one.prompt_ids, *one.token_ids])[len(one.prompt_ids) - 1 :]
        drawn = [logprob for logprob, is_drawn in zip(logprobs, one.sampled, strict=True) if is_drawn]
        assert drawn == list(one.logprobs)
    return episode


def play_others(service, tokenizer) -> None:
    """Play an environment that changes what was said before, one with tools, and one whose talk outgrows the
    context."""
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": "hello"}], "answer": ""}])
    rewritten = Rewritten(max_turns=2, dataset=rows, rubric=vf.Rubric(funcs=[content]))
    episode = play_one(service, tokenizer, rewritten, rows[0], max_new_tokens=4)
    assert [one.num_turns for one in episode.conversations] == [1, 1], "each a conversation of its own"

    tools = Calling(tools=[lookup], dataset=rows, rubric=vf.Rubric(funcs=[content]), max_turns=3)
    episode = play_one(service, tokenizer, tools, {**rows[0], "prompt": [{"role": "user", "content": "look it up"}]})
    assert episode.num_turns >= 2 and not episode.others and "nothing of a" in episode.text
    assert episode.forced is not None and any(episode.forced) and not all(episode.forced)

    long = [{"role": "user", "content": "x" * 600}]
    single = vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric(funcs=[content]))
    with pytest.raises(ValueError, match="an episode needs one turn"):
        play_one(service, tokenizer, single, {"prompt": long, "answer": ""}, max_new_tokens=4)


if __name__ == "__main__":
    main()
