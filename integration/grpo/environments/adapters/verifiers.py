"""Environments of verifiers: single-turn and multi-turn ones, with tools and without, with their rubrics.

A row is one of the environment's dataset as it stands (`prompt`, and what else it has: `answer`, `info`, `task`).
verifiers asks the model by its own client of OpenAI's chats, as any agent does, so that tokens stand as sampled.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

from ..episode import Episode
from ..session import Session
from .packages import package


async def rollout(
    row: Mapping[str, Any], session: Session, *, env: str, env_args: Mapping[str, object] | None = None
) -> Episode:
    """Play one rollout of the environment that `load_environment` of verifiers finds by the name `env`.

    The reward is its rubric's. Its metrics are not added to it. Raises the environment's own error where it has failed.
    """
    environment = _environment(env, json.dumps(dict(env_args or {}), sort_keys=True))
    from openai import AsyncOpenAI  # a dependency of verifiers
    from verifiers.clients import OpenAIChatCompletionsClient

    request = {"example_id": 0, **row}
    async with (
        session.served() as policy,
        AsyncOpenAI(base_url=policy.openai_url, api_key="none", timeout=None, max_retries=0) as client,
    ):
        state = await environment.rollout(request, OpenAIChatCompletionsClient(client), "lockstep", {})
    if (error := state.get("error")) is not None:
        raise error.__cause__ or error
    await environment.rubric.score_rollout(state)
    await environment.rubric.cleanup(state)
    return session.episode(float(state["reward"]))


@functools.cache
def _environment(name: str, its_args: str) -> Any:
    """Load an environment, once in this process."""
    return package("verifiers", "verifiers").load_environment(name, **json.loads(its_args))
