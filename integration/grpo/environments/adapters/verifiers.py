"""Environments of verifiers: single-turn and multi-turn ones, with their rubrics.

A row is one of the environment's dataset as it stands (`prompt`, and what else it has: `answer`, `info`, `task`).
verifiers writes the turns of the environment; the model's answers come from the episode's session, so that their tokens
stand as sampled.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Mapping
from typing import Any

from ..episode import Episode
from ..session import NoRoom, Session
from .packages import package


async def rollout(
    row: Mapping[str, Any], session: Session, *, env: str, env_args: Mapping[str, object] | None = None
) -> Episode:
    """Play one rollout of the environment that `load_environment` of verifiers finds by the name `env`.

    The reward is its rubric's. Its metrics are not added to it. Raises ValueError for an environment that uses tools,
    or that changes what was said before, and the environment's own error where it has failed.
    """
    environment = _environment(env, json.dumps(dict(env_args or {}), sort_keys=True))
    client = _client_class()(session)
    request = {"example_id": 0, **row}
    state = await environment.rollout(request, client, "lockstep", {})
    if (error := state.get("error")) is not None:
        raise error.__cause__ or error
    await environment.rubric.score_rollout(state)
    await environment.rubric.cleanup(state)
    return session.episode(float(state["reward"]))


@functools.cache
def _environment(name: str, its_args: str) -> Any:
    """Load an environment, once in this process."""
    return package("verifiers", "verifiers").load_environment(name, **json.loads(its_args))


@functools.cache
def _client_class() -> type:
    """Return the class of the clients by which verifiers asks a session for turns."""
    package("verifiers", "verifiers")
    from verifiers.clients import Client
    from verifiers.errors import OverlongPromptError
    from verifiers.types import Response, ResponseMessage

    class SessionClient(Client):
        """The client of one rollout."""

        def __init__(self, session: Session) -> None:
            super().__init__(session)
            self._seen: list[dict[str, Any]] = []  # messages as verifiers has them

        def setup_client(self, config: Any) -> Session:
            raise ValueError("the environment verifiers asks its own session, which no settings of a client describe")

        async def to_native_tool(self, tool: Any) -> Any:
            raise ValueError("the environment verifiers cannot play environments that use tools")

        async def to_native_prompt(self, messages: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
            return [plain(message) for message in messages], {}

        async def get_native_response(
            self, prompt: list[dict[str, Any]], model: str, sampling_args: Any, tools: Any = None, **_: object
        ) -> Any:
            if prompt[: len(self._seen)] != self._seen:
                raise ValueError(
                    "the environment of verifiers has changed what was said before: no tokens stand for it"
                )
            try:
                turn = await session_of(self).turn(prompt[len(self._seen) :])
            except NoRoom as error:
                raise OverlongPromptError from error
            self._seen = [*prompt, {"role": "assistant", "content": turn.text}]
            return turn

        async def raise_from_native_response(self, response: Any) -> None:
            """Accept every answer: a session gives no others."""

        async def from_native_response(self, response: Any) -> Any:
            message = ResponseMessage(
                content=response.text, finish_reason="length" if response.is_cut_off else "stop",
                is_truncated=response.is_cut_off,
            )  # fmt: skip
            return Response(id="", created=int(time.time()), model="lockstep", message=message)

        async def close(self) -> None:
            """Do nothing: the job ends the session."""

    def session_of(client: Any) -> Session:
        session: Session = client.client
        return session

    return SessionClient


def plain(message: Any) -> dict[str, Any]:
    """Return a message of verifiers with its role and text alone. Raises ValueError for calls of tools and for parts
    that are no text."""
    found = message.model_dump(exclude_none=True) if hasattr(message, "model_dump") else dict(message)
    content = found.get("content", "")
    if isinstance(content, list):
        if any(part.get("type") != "text" for part in content):
            raise ValueError("the environment verifiers needs messages of text")
        content = "".join(part["text"] for part in content)
    if found.get("tool_calls") or found["role"] == "tool":
        raise ValueError("the environment verifiers cannot play environments that use tools")
    return {"role": found["role"], "content": content}
