"""The engine's answers to the turns of an episode, and what an earlier play of the same episode is worth for them.

An episode that was begun under older weights is played again under the present ones. Where its environment is a
function of the row and of the tokens, the new play asks the same turns as long as the answers come out equal; each
answer of the old play is drawn again in one forward, as `RequestOptions.renewal` does, and only from the first token on
that differs is anything generated. What comes out is what the present weights alone would have given.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from torch import Tensor

from ....kernels.sampling.draws import derive_seed
from ....rollout.completion import Completion
from ....rollout.engine import Engine
from ....rollout.media.reader import IDS, images_digest
from ....rollout.request_options import Renewal, RequestOptions
from ....rollout.sampling_params import SamplingParams


@dataclass(frozen=True)
class Asked:
    """One turn that was asked, and as much of its answer as there is."""

    prompt_ids: tuple[int, ...]
    images: str = ""  # SHA-256 of the prompt's, if it has some
    token_ids: list[int] = field(default_factory=list)


class Turns:
    """The turns of one play of an episode."""

    def __init__(self, engine: Engine, earlier: Sequence[Asked] = ()) -> None:
        """Begin a play. earlier: the turns of a play under other weights."""
        self.asked: list[Asked] = []
        self.is_over = False  # the play: no turn can be asked any more
        self.task: asyncio.Task[Any] | None = None  # in which a turn is under way
        self._engine, self._earlier = engine, earlier

    async def __call__(
        self, prompt_ids: list[int], params: SamplingParams, images: Mapping[str, Tensor] = MappingProxyType({})
    ) -> Completion:
        """Return the answer of the present weights. params: with a seed, of one sample. images: the tensors of the
        prompt's. A play that is cancelled keeps the tokens so far. Raises RuntimeError if the engine did not finish it,
        as one that was aborted, and after the play."""
        if self.is_over:
            raise RuntimeError("the episode is over: no turn of it can be asked any more")
        asked = Asked(tuple(prompt_ids), images_digest(images) if images else "")
        prompt = {IDS: prompt_ids, **images} if images else prompt_ids
        options = RequestOptions(renewal=self._renewal(asked, params))
        self.asked.append(asked)
        completion = None
        self.task = asyncio.current_task()
        try:
            async for chunk in self._engine.astream(prompt, params, options=options):
                if chunk.num_taken_back:
                    del asked.token_ids[-chunk.num_taken_back :]
                asked.token_ids.extend(chunk.token_ids)
                completion = chunk.completion
        finally:
            self.task = None
        if completion is None:
            raise RuntimeError("a turn ended without an answer")
        if (why := completion.why_unfinished) is not None:
            raise RuntimeError(f"a turn was not finished: {why}")
        return completion

    def _renewal(self, asked: Asked, params: SamplingParams) -> Renewal | None:
        """Return the earlier answer to the same tokens in the same turn, if there is one."""
        number = len(self.asked)
        earlier = self._earlier[number] if number < len(self._earlier) else None
        if earlier is None or (earlier.prompt_ids, earlier.images) != (asked.prompt_ids, asked.images):
            return None
        assert params.sampling_seed is not None
        tokens = tuple(earlier.token_ids[: params.max_new_tokens])
        return Renewal(tokens, derive_seed(params.sampling_seed, 0)) if tokens else None
