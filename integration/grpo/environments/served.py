"""The model as a server for the agents of episodes: programs that know a base URL, and nothing of training.

Each agent has a session of a server in this process, which answers the paths of sessions alone. All of its turns have
the job's sampling settings, whatever it asks for. What it said to the model becomes the episode's conversations.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

from ....rollout.completion import Completion
from ....rollout.sampling_params import SamplingParams
from ...service import RolloutService
from .chat import EpisodeChat
from .episode import Conversation, Turn

if TYPE_CHECKING:  # FastAPI is an extra
    from ...http.conversations.turns import Turn as HttpTurn
    from ...http.server import BackgroundServer

_NO_KEY = "none"  # clients want one; the secret is the session's id


@dataclass
class ServedModel:
    """The model for one agent: its base URLs, and the turns that it has asked so far."""

    url: str  # for Anthropic's clients
    completions: dict[str, Completion] = field(default_factory=dict)  # by the rid of the turn

    @property
    def openai_url(self) -> str:
        """The base URL for OpenAI's clients."""
        return f"{self.url}/v1"

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which programs of OpenAI's and Anthropic's clients find the model."""
        return {
            "OPENAI_BASE_URL": self.openai_url, "OPENAI_API_BASE": self.openai_url, "OPENAI_API_KEY": _NO_KEY,
            "ANTHROPIC_BASE_URL": self.url, "ANTHROPIC_API_KEY": _NO_KEY,
        }  # fmt: skip

    @property
    def turns(self) -> list[Turn]:
        """The answers so far, in the order in which they ended."""
        return [Turn.of(one) for one in list(self.completions.values())]


class AgentServer:
    """The server of the agents of one play. It starts with the first of them."""

    def __init__(self, service: RolloutService) -> None:
        """Start nothing."""
        self._service = service
        self._server: BackgroundServer | None = None
        self._starting = asyncio.Lock()

    @asynccontextmanager
    async def session(
        self, params: SamplingParams, chat: EpisodeChat, into: list[Conversation]
    ) -> AsyncIterator[ServedModel]:
        """Serve the model to one agent, and put its conversations into a list. params: of all turns, as far as a
        session has them; chat: of the job, whose template has its variables. Requests that are open at the end are
        aborted, and are no turns. Raises ValueError where the server cannot be, or the params have what an agent's
        requests set themselves, and RuntimeError where the engine has failed, or did not finish an answer: nothing may
        be learned from that, whatever the agent made of it."""
        server = await self._started()
        from ...http.conversations.sampling import NAMES, SessionSampling
        from ...http.conversations.session import SessionOptions
        from ...http.edge.session_paths import path_of

        settings = {one.name: one.default for one in fields(SamplingParams) if one.name not in NAMES}
        if given := [name for name, default in settings.items() if getattr(params, name) != default]:
            raise ValueError(f"rollout.sampling.{given[0]} is not for agents, whose requests have their own")
        sessions = server.app.state.conversations
        model = ServedModel("")
        sampling = SessionSampling({name: getattr(params, name) for name in NAMES})
        found = sessions.open(
            None,
            SessionOptions(
                sampling=sampling, chat_template_kwargs=chat.template_kwargs,
                on_answer=model.completions.__setitem__, may_forget=False,
            ),
        )  # fmt: skip
        model.url = server.url + path_of(found.id, "")
        try:
            yield model
        finally:
            with sessions.lock:
                turns: list[HttpTurn] = list(found.turns.values())
                open_rids = list(found.open_rids)
                sessions.close(found.id)
            into += conversations_of(turns, model.completions, chat.text)
            if open_rids:
                await asyncio.to_thread(self._abort, open_rids)
            self._refuse_unfinished(model)

    async def close(self) -> None:
        """End the server, if it runs."""
        if self._server is not None:
            await asyncio.to_thread(self._server.close, drain=False)
            self._server = None

    async def _started(self) -> BackgroundServer:
        async with self._starting:
            if self._server is None:
                starting = asyncio.ensure_future(asyncio.to_thread(self._start))
                try:
                    self._server = await asyncio.shield(starting)
                except asyncio.CancelledError:
                    self._server = await starting  # for `close`
                    raise
            return self._server

    def _start(self) -> BackgroundServer:
        try:
            from ...http.edge.config import HttpConfig
            from ...http.server import serve_in_background
        except ModuleNotFoundError as error:
            raise ValueError(f"agents need {error.name}, the extra `serve`: pip install -e '.[serve]'") from error
        # Idle for hours, while it works: only the end of its episode ends a session.
        config = HttpConfig(port=0, session_idle_s=float("inf"), max_session_bytes=2**62, max_sessions=2**31)
        return serve_in_background(self._service, config, only_sessions=True)

    def _refuse_unfinished(self, model: ServedModel) -> None:
        if (error := self._service.engine.failure) is not None:
            raise RuntimeError(f"the engine failed while it served an agent: {error}") from error
        for completion in list(model.completions.values()):
            if (why := completion.why_unfinished) is not None:
                raise RuntimeError(f"a turn of the agent was not finished: {why}")

    def _abort(self, rids: Sequence[str]) -> None:
        for rid in rids:
            self._service.engine.abort_request(rid, message="the agent's episode is over")


def conversations_of(
    turns: Sequence[HttpTurn], completions: Mapping[str, Completion], text_of: Callable[[Sequence[int]], str]
) -> list[Conversation]:
    """Return the conversations that the turns of a session are, the longest first.

    An answer that several have counts in the first of them, and nowhere where a request has cut it. Their order follows
    from their tokens, so that it does not depend on which of two requests at a time was answered first. turns: each
    after its parent; completions: by rid.
    """
    from ...http.conversations.turns import tokens_of

    kept_whole = {
        turn.parent.rid for turn in turns if turn.parent is not None and turn.num_kept == turn.parent.num_tokens
    }
    ends = sorted(
        ((tokens_of(turn), turn) for turn in turns if turn.rid not in kept_whole),
        key=lambda pair: (-len(pair[0]), pair[0]),
    )
    found, counted = [], set[str]()
    for token_ids, end in ends:
        own = [turn for turn in _answers_in(end, completions) if turn.rid not in counted]
        if not own:
            continue
        counted.update(turn.rid for turn in own)
        start, stop = own[0].num_prompt, own[-1].num_tokens
        sampled = [False] * (stop - start)
        for turn in own:
            sampled[turn.num_prompt - start : turn.num_tokens - start] = [True] * (turn.num_tokens - turn.num_prompt)
        answers, behind = [completions[turn.rid] for turn in own], token_ids[start:stop]
        found.append(Conversation.of(token_ids[:start], behind, sampled, text_of(behind), answers))
    return found


def _answers_in(end: HttpTurn, completions: Mapping[str, Completion]) -> list[HttpTurn]:
    """Return the turns of a conversation whose answers it has whole, the first one first."""
    found, limit = [], end.num_tokens
    for turn in reversed(end.path):
        if turn.rid in completions and turn.num_prompt < turn.num_tokens <= limit:
            found.append(turn)
        limit = min(limit, turn.num_kept)
    return found[::-1]
