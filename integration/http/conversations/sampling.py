"""The sampling settings that a session was opened with: all of its turns have them, whatever their requests ask.

An agent sets a temperature of its own, or none; a trainer needs the one that it trains with. And an agent that asks
again in the same state, or in two states at a time, must get other samples, but the same ones in another run: the seed
of a turn follows from the session's, from the prompt, and from how often this session has asked it.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ....kernels.sampling.draws import derive_seed
from ....rollout.sampling_params import SamplingParams
from ..edge.errors import BadField

SEED, MOST_TOKENS = "sampling_seed", "max_new_tokens"
NAMES = (
    "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
    "logit_bias", MOST_TOKENS, SEED,
)  # fmt: skip


@dataclass(frozen=True)
class SessionSampling:
    """The settings of all turns of a session: fields of `SamplingParams`, of which those that have no value here are a
    request's own. `max_new_tokens` is the most that a turn may have."""

    values: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, given: Mapping[str, Any], name: str) -> SessionSampling:
        """Read them. name: of the field that has them. Raises BadField."""
        if unknown := sorted(set(given) - set(NAMES)):
            raise BadField(
                name, f"has {unknown[0][:100]!r}; a session sets {', '.join(NAMES)}, and its requests the rest"
            )
        values = {key: value for key, value in given.items() if value is not None}
        try:
            checked = SamplingParams.from_dict(values)
        except ValueError as error:
            raise BadField(name, str(error).removeprefix("sampling parameters: ")) from None
        return cls({key: getattr(checked, key) for key in values})

    @property
    def seed(self) -> int | None:
        """The session's seed, of which each turn's is made; None: a request's own."""
        return self.values.get(SEED)

    def params(self, asked: SamplingParams, digest: int, number: int) -> SamplingParams:
        """Return the settings of a turn whose request asked for these. digest: of its prompt; number: how often the
        session asks it besides. Raises ValueError where the two do not go together."""
        values = dict(self.values)
        if (most := values.get(MOST_TOKENS)) is not None:
            values[MOST_TOKENS] = min(most, asked.max_new_tokens)
        if self.seed is not None:
            values[SEED] = derive_seed(self.seed, digest, number)
        return replace(asked, **values)


def prompt_digest(token_ids: Sequence[int]) -> int:
    """Return 64 bits of the SHA-256 of a prompt."""
    return int.from_bytes(hashlib.sha256(array("q", token_ids).tobytes()).digest()[:8], "little")


class Numbers:
    """The numbers of the requests that a session has for each prompt: a request has the smallest one that is free."""

    def __init__(self) -> None:
        self._taken: dict[int, set[int]] = {}

    def take(self, digest: int) -> int:
        """Return a number for a further request with this prompt."""
        taken = self._taken.setdefault(digest, set())
        number = next(one for one in range(len(taken) + 1) if one not in taken)
        taken.add(number)
        return number

    def give_back(self, digest: int, number: int) -> None:
        """Free the number of a request that became no turn: asked again, it is the same sample."""
        if taken := self._taken.get(digest):
            taken.discard(number)
            if not taken:
                del self._taken[digest]
