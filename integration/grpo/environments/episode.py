"""An episode: the tokens of a conversation between an environment and the model, and its reward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ....rollout.completion import Completion, FinishReason, WeightSpan
from ....rollout.media.images import Images


@dataclass(frozen=True)
class Turn:
    """One answer of the model within an episode."""

    text: str  # without the stop that ended it
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]  # one per token
    finish_reason: FinishReason | None
    weight_versions: tuple[WeightSpan, ...]  # contiguous over token_ids

    @property
    def is_cut_off(self) -> bool:
        """Whether the largest number of new tokens has ended it."""
        return self.finish_reason is not None and self.finish_reason.type == "length"


@dataclass(frozen=True)
class Episode:
    """A conversation that is over: `Session.episode` makes it.

    Of the tokens behind the prompt, N were sampled; the environment wrote the others, which are not trained on.
    """

    prompt_ids: tuple[int, ...]  # before the first answer
    token_ids: tuple[int, ...]  # all tokens behind it, up to the end of the last answer
    sampled: tuple[bool, ...]  # of each of token_ids: whether the model drew it
    logprobs: tuple[float, ...]  # [N]: of the sampled ones
    weight_versions: tuple[WeightSpan, ...]  # contiguous over the N sampled ones
    text: str  # of token_ids, special tokens included
    num_turns: int
    finish_reason: FinishReason | None  # of the last turn, or "length" where any turn was cut off
    num_cached_tokens: int  # prompt tokens of all turns whose KV was in the cache
    num_retractions: int
    num_accepted_tokens: int  # of drafts
    value: object  # what the environment was given for it: a number, or numbers by name
    receipts: tuple[Mapping[str, Any], ...] = ()  # of the turns, if the engine makes some
    forced: tuple[bool, ...] | None = (
        None  # [N]: of the sampled ones, whether a grammar left no choice; None: no grammar
    )
    images: tuple[Images, ...] = ()  # of the turns' prompts, each with those before it; different ones alone

    def as_completion(self, index: int) -> Completion:
        """Return the sampled tokens as one answer to the prompt, the `index`-th of it. Its text is the episode's."""
        drawn = tuple(token for token, is_drawn in zip(self.token_ids, self.sampled, strict=True) if is_drawn)
        last = self.weight_versions[-1]
        return Completion(
            "episode", index, self.prompt_ids, drawn, self.text, self.logprobs, self.finish_reason,
            self.num_cached_tokens, self.num_retractions, last.version, last.digest, self.weight_versions,
            forced=self.forced,
        )  # fmt: skip

    def kept(self) -> Mapping[str, object]:
        """Return what a file of samples keeps of an episode beside its completion: all tokens, and how long the runs
        of sampled and written ones are, in turn, beginning with sampled ones."""
        runs, is_drawn = [0], True
        for one in self.sampled:
            if one != is_drawn:
                runs.append(0)
                is_drawn = one
            runs[-1] += 1
        return {"num_turns": self.num_turns, "episode_ids": self.token_ids, "runs": runs}
