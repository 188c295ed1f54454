"""Prompts, settings and checks of the tests beside this file."""

from __future__ import annotations

import torch

from lockstep.kernels.sampling.logprobs import selected_logprobs
from lockstep.rollout.engine import Engine
from lockstep.rollout.sampling_params import SamplingParams

PROMPTS = [[3, 17, 90, 4, 55], list(range(40, 75)), [250]]
LONG = [(7 * i) % 250 for i in range(70)]
WORDS = ["the answer is seven and the sum of two and three is five", "add the numbers, then stop: 12 + 30 = 42."] * 3


def sampled(**params: object) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": 8, "sampling_seed": 5, **params})


def trainer_logprobs(engine: Engine, token_ids: list[int], temperature: float = 1.0) -> list[float]:
    """Return the log-probabilities of tokens 1, 2, ... by the trainer's forward."""
    ids = torch.tensor([token_ids])
    with engine.model.training_numerics():
        logits = engine.model.module(ids, use_cache=False).logits[0, :-1]
    return selected_logprobs(logits, ids[0, 1:], temperature).tolist()


def assert_idle(engine: Engine) -> None:
    state = engine.state()
    assert (state["num_running"], state["num_waiting"], state["num_held_blocks"]) == (0, 0, 0)
    assert not engine.has_work
    engine.check_integrity()
