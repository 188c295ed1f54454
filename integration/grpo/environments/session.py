"""The conversation of one episode: turn by turn, with the tokens that were sampled."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import replace
from typing import Any

from torch import Tensor

from ....kernels.sampling.draws import derive_seed
from ....rollout.completion import Completion
from ....rollout.media.reader import IDS, ids_of, image_tensors
from ....rollout.sampling_params import GRAMMARS, SamplingParams
from ...chat_tail import UnclearEnd, added_tokens
from ...image_inputs import joined
from .chat import EpisodeChat
from .episode import Conversation, Episode, Turn
from .served import AgentServer, ServedModel

New = str | Mapping[str, Any] | Sequence[Mapping[str, Any]] | Sequence[int]
ImageTensors = dict[str, Tensor]  # of all images of a conversation, by the names of the encoder's parameters
Waits = Callable[[float], AbstractContextManager[None]]
Generate = Callable[[list[int], SamplingParams, ImageTensors], Awaitable[Completion]]

# These belong to the job: the trainer's log-probabilities have its temperature, and a turn is one sample.
_OF_THE_JOB = {"n": "rollout.group_size", "sampling_seed": "run.seed", "temperature": "rollout.temperature"}


class NoRoom(ValueError):
    """The error of a turn for which the model's context has no room."""


class Session:
    """One conversation with the model. An environment gets it, and asks for turns.

    The tokens of earlier turns stand as they were sampled. Example:

        async def rollout(row, session):
            answer = await session.turn(row["prompt"])
            if answer.text.strip() == row["answer"]:
                return session.episode(1.0)
            second = await session.turn("That is wrong. Try once more.")
            return session.episode(0.5 * (second.text.strip() == row["answer"]))
    """

    def __init__(
        self, generate: Generate, chat: EpisodeChat, params: SamplingParams, seed: int, max_model_len: int,
        agents: AgentServer | None = None, waits: Waits | None = None,
    ) -> None:  # fmt: skip
        """Begin without tokens. params: of every turn, where it sets nothing itself. seed: of this episode. agents: the
        server of its agents; None: it may have none. waits: see `outside`."""
        self._waits: Waits = waits or (lambda limit_s: nullcontext())
        self._agents = agents
        self._num_served = 0
        self._served: list[Conversation] = []  # of its agents
        self._generate, self._chat, self._params, self._seed = generate, chat, params, seed
        self._max_model_len = max_model_len
        self._messages: list[dict[str, Any]] = []
        self._prompt_ids: tuple[int, ...] = ()
        self._token_ids: list[int] = []  # behind the first prompt
        self._sampled: list[bool] = []
        self._turns: list[Turn] = []
        self._completions: list[Completion] = []
        self._images: ImageTensors = {}
        self._is_asking = False

    @property
    def turns(self) -> list[Turn]:
        """The turns so far."""
        return list(self._turns)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The messages so far, answers included. Turns that were asked by token ids are not among them."""
        return [dict(message) for message in self._messages]

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the conversation."""
        return len(self._prompt_ids) + len(self._token_ids)

    @property
    def room(self) -> int:
        """Number of tokens that the model's context has left."""
        return self._max_model_len - self.num_tokens

    async def turn(self, new: New, **sampling: Any) -> Turn:
        """Add messages to the conversation, and return the model's answer.

        new: a text, which is a user's message; a message or several, with pictures in parts of the type "image"; or
        token ids, or what a processor makes of a text and its images, which are added as they are. A turn after one of
        token ids must have token ids too. sampling: fields of `SamplingParams`, without `n`,
        `sampling_seed` and `temperature`, which take the place of `rollout.sampling`'s, a grammar that of any other;
        `max_new_tokens` is `rollout.max_new_tokens` where it is not set, and less where the context has less room.
        Raises ValueError for what is wrong with these, NoRoom where not one token
        more fits, and RuntimeError for two turns at a time.
        """
        if self._is_asking:
            raise RuntimeError("a turn of this session is under way: its answer must be awaited before the next turn")
        if wrong := sorted(set(sampling) & set(_OF_THE_JOB)):
            raise ValueError(f"a turn must not set {wrong[0]}: it is {_OF_THE_JOB[wrong[0]]} of the job")
        self._is_asking = True
        try:
            added, messages, tensors = self._added(new)
            room = self.room - len(added)
            params = replace(
                self._params, **self._settings(sampling), sampling_seed=derive_seed(self._seed, len(self._turns))
            )
            if room < max(params.min_new_tokens, 1):
                raise NoRoom(
                    f"a turn of {len(added)} tokens after {self.num_tokens} leaves no room in a context of "
                    f"{self._max_model_len}"
                )
            params = replace(params, max_new_tokens=min(params.max_new_tokens, room))
            images = with_images(self._images, tensors)
            completion = await self._generate([*self._prompt_ids, *self._token_ids, *added], params, images)
            self._images = images
            return self._noted(added, messages, completion)
        finally:
            self._is_asking = False

    @asynccontextmanager
    async def served(self) -> AsyncIterator[ServedModel]:
        """Serve the model to an agent, which finds it by a base URL. What the agent has said to it by the end of the
        block is of the episode, as conversations of their own. Example:

            async with session.served() as policy:
                answer = await my_agent(policy.openai_url, row["prompt"])
            return session.episode(score(answer))

        All turns have the job's temperature, filters and penalties, at most `rollout.max_new_tokens`, and seeds that
        follow from the episode's and from their prompts, whatever the agent asks for. Raises ValueError where the job
        has no server for agents.
        """
        if self._agents is None:
            raise ValueError("agents need rollout.ahead=0: what they do does not follow from the model's tokens alone")
        # The other turns' seeds are made of one number beside the episode's.
        params = replace(self._params, sampling_seed=derive_seed(self._seed, 0, self._num_served))
        self._num_served += 1
        async with self._agents.session(params, self._chat, self._served) as model:
            yield model

    def outside(self, limit_s: float) -> AbstractContextManager[None]:
        """Enclose work that asks the model nothing, as tests of a program, and ends in `limit_s` seconds at the latest.
        Where a job has several ranks, one that does nothing for `run.timeout_s` is taken to hang, but for such work."""
        return self._waits(limit_s)

    def episode(self, reward: float | Mapping[str, float]) -> Episode:
        """Return the episode, which ends with the last answer. reward: a number, or components by name, of which
        "success" says whether it is one. Raises ValueError before the first turn, an agent's included."""
        conversations = [*self._own_conversation(), *self._served]
        if not conversations:
            raise ValueError("an episode needs one turn at least")
        return Episode.of_conversations(conversations, reward)

    def _own_conversation(self) -> list[Conversation]:
        """Return the conversation of the turns that were asked here, if there is one."""
        if not self._completions:
            return []
        text = self._chat.text(self._token_ids)
        return [Conversation.of(self._prompt_ids, self._token_ids, self._sampled, text, self._completions)]

    def _added(self, new: New) -> tuple[list[int], list[dict[str, Any]] | None, ImageTensors]:
        """Return the tokens that come before the next answer, the messages that they are (None of token ids), and the
        tensors of their images."""
        if isinstance(new, Mapping) and IDS in new:
            return self._chat.checked(ids_of(new)), None, image_tensors(new)
        if isinstance(new, Sequence) and not isinstance(new, str) and new and not isinstance(new[0], Mapping):
            return self._chat.checked(new), None, {}
        if self._turns and not self._messages:
            raise ValueError("the turns before were asked by token ids, which are no messages: add token ids again")
        added: Any = [{"role": "user", "content": new}] if isinstance(new, str) else new
        messages = [dict(message) for message in ([added] if isinstance(added, Mapping) else added)]
        if not messages:
            raise ValueError("a turn needs a message, or token ids")
        messages = messages if self._turns else self._chat.opened(messages)
        writer = self._chat.writer(messages)
        if not self._turns:
            return writer.template.tokenise(writer.template.render(messages)), messages, writer.tensors
        history = [*self._prompt_ids, *self._token_ids]
        reason = self._turns[-1].finish_reason
        try:
            tokens = added_tokens(
                history, None if reason is None else reason.matched, self._messages, messages, writer.template,
                refused=ValueError,
            )  # fmt: skip
        except UnclearEnd as error:
            raise ValueError(f"{error}: add token ids instead of messages") from error
        return tokens, messages, writer.tensors

    def _settings(self, sampling: Mapping[str, Any]) -> dict[str, Any]:
        """Return a turn's settings. With a grammar of its own, they take the job's grammar away; the tokens that the
        job bans stay banned."""
        found = dict(sampling)
        if any(sampling.get(name) is not None for name in GRAMMARS):
            found = {**dict.fromkeys(GRAMMARS), **found}
        if "logit_bias" in found:
            banned = {id: bias for id, bias in (self._params.logit_bias or {}).items() if bias == float("-inf")}
            found["logit_bias"] = {**(found["logit_bias"] or {}), **banned} or None
        return found

    def _noted(self, added: list[int], messages: list[dict[str, Any]] | None, completion: Completion) -> Turn:
        if self._turns:
            self._token_ids += added
            self._sampled += [False] * len(added)
        else:
            self._prompt_ids = tuple(added)
        self._token_ids += completion.token_ids
        self._sampled += [True] * len(completion.token_ids)
        self._messages = [] if messages is None else [
            *self._messages, *messages, {"role": "assistant", "content": completion.text}
        ]  # fmt: skip
        turn = Turn.of(completion)
        self._turns.append(turn)
        self._completions.append(completion)
        return turn


def with_images(images: ImageTensors, more: ImageTensors) -> ImageTensors:
    """Return the tensors of images with those of further ones behind. Raises ValueError where they do not fit."""
    if not images or not more:
        return images or more
    if images.keys() != more.keys():
        raise ValueError(f"images of a turn have {', '.join(more)}, and those before {', '.join(images)}")
    return {name: joined([images[name], more[name]]) for name in images}
