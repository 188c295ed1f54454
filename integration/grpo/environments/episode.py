"""An episode: the tokens of the conversations between an environment, or an agent, and the model, and its reward."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
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

    @classmethod
    def of(cls, completion: Completion) -> Turn:
        """Return the turn that a completion is."""
        return cls(*(getattr(completion, one.name) for one in fields(cls)))

    @property
    def is_cut_off(self) -> bool:
        """Whether the largest number of new tokens has ended it."""
        return self.finish_reason is not None and self.finish_reason.type == "length"


@dataclass(frozen=True)
class Conversation:
    """The tokens of one conversation, up to the end of its last answer.

    Of the tokens behind the prompt, N were sampled; the others are not trained on: an environment wrote them, or they
    count in another conversation of the episode, which has the same beginning.
    """

    prompt_ids: tuple[int, ...]  # before the first answer that counts
    token_ids: tuple[int, ...]  # all tokens behind it, up to the end of the last answer
    sampled: tuple[bool, ...]  # of each of token_ids: whether it is one of the N
    logprobs: tuple[float, ...]  # [N]: of the sampled ones
    weight_versions: tuple[WeightSpan, ...]  # contiguous over the N sampled ones
    text: str  # of token_ids, special tokens included
    num_turns: int  # answers that count
    finish_reason: FinishReason | None  # of the last turn, or "length" where any turn was cut off
    num_cached_tokens: int  # prompt tokens of all turns whose KV was in the cache
    num_retractions: int
    num_accepted_tokens: int  # of drafts
    receipts: tuple[Mapping[str, Any], ...] = ()  # of the turns, if the engine makes some
    forced: tuple[bool, ...] | None = (
        None  # [N]: of the sampled ones, whether a grammar left no choice; None: no grammar
    )
    images: tuple[Images, ...] = ()  # of the turns' prompts, each with those before it; different ones alone

    @classmethod
    def of(
        cls, prompt_ids: Sequence[int], token_ids: Sequence[int], sampled: Sequence[bool], text: str,
        turns: Sequence[Completion],
    ) -> Conversation:  # fmt: skip
        """Make it of its tokens and of the answers that count, in order."""
        cut = (one.finish_reason for one in turns if Turn.of(one).is_cut_off)
        return cls(
            tuple(prompt_ids), tuple(token_ids), tuple(sampled), tuple(one for turn in turns for one in turn.logprobs),
            joined_spans((turn.weight_versions, len(turn.token_ids)) for turn in turns),
            text, len(turns), next(cut, turns[-1].finish_reason),
            sum(one.num_cached_tokens for one in turns),
            sum(one.num_retractions for one in turns),
            sum(one.num_accepted_tokens for one in turns),
            tuple(one.receipt for one in turns if one.receipt is not None),
            joined_flags([(turn.forced, len(turn.token_ids)) for turn in turns]), _images_of(turns),
        )  # fmt: skip

    @property
    def drawn_ids(self) -> tuple[int, ...]:
        """The N sampled tokens."""
        return tuple(token for token, is_drawn in zip(self.token_ids, self.sampled, strict=True) if is_drawn)

    @property
    def runs(self) -> list[int]:
        """The lengths of the runs of sampled tokens and of others, in turn, beginning with sampled ones."""
        runs, is_drawn = [0], True
        for one in self.sampled:
            if one != is_drawn:
                runs.append(0)
                is_drawn = one
            runs[-1] += 1
        return runs


@dataclass(frozen=True)
class Episode(Conversation):
    """A play that is over: `Session.episode` makes it. It is a conversation, and where an agent had several, the
    longest of them."""

    value: object = field(kw_only=True)  # what the environment was given for it: a number, or numbers by name
    others: tuple[Conversation, ...] = field(default=(), kw_only=True)  # the agent's further conversations

    @classmethod
    def of_conversations(cls, conversations: Sequence[Conversation], value: object) -> Episode:
        """Make an episode of its conversations, the first of which is its own."""
        first, *others = conversations
        return cls(
            **{one.name: getattr(first, one.name) for one in fields(Conversation)}, value=value, others=tuple(others)
        )

    @property
    def conversations(self) -> tuple[Conversation, ...]:
        """All conversations, this one first."""
        return (self, *self.others)

    @property
    def all_images(self) -> tuple[Images, ...]:
        """The images of all conversations, each once."""
        return tuple({images.digest: images for one in self.conversations for images in one.images}.values())

    @property
    def all_receipts(self) -> tuple[Mapping[str, Any], ...]:
        """The receipts of the turns of all conversations."""
        return tuple(receipt for one in self.conversations for receipt in one.receipts)

    def as_completion(self, index: int) -> Completion:
        """Return the sampled tokens of all conversations as one answer to the prompt, the `index`-th of it. Its text is
        the conversations'."""
        all_of = self.conversations
        spans = joined_spans((one.weight_versions, len(one.logprobs)) for one in all_of)
        cut = next((one.finish_reason for one in all_of if _is_cut(one)), self.finish_reason)
        return Completion(
            "episode", index, self.prompt_ids, tuple(token for one in all_of for token in one.drawn_ids),
            "\n\n".join(one.text for one in all_of), tuple(logprob for one in all_of for logprob in one.logprobs), cut,
            sum(one.num_cached_tokens for one in all_of), sum(one.num_retractions for one in all_of),
            spans[-1].version, spans[-1].digest, spans,
            forced=joined_flags([(one.forced, len(one.logprobs)) for one in all_of]),
        )  # fmt: skip

    def kept(self) -> Mapping[str, object]:
        """Return what a file of samples keeps of an episode beside its completion: all tokens of its conversations, and
        how long their runs of sampled and other tokens are."""
        found: dict[str, object] = {"num_turns": self.num_turns, "episode_ids": self.token_ids, "runs": self.runs}
        if self.others:
            found["conversations"] = [
                {"prompt_ids": one.prompt_ids, "num_turns": one.num_turns, "episode_ids": one.token_ids,
                 "runs": one.runs}
                for one in self.others
            ]  # fmt: skip
        return found


def joined_spans(parts: Iterable[tuple[Sequence[WeightSpan], int]]) -> tuple[WeightSpan, ...]:
    """Return the spans of parts that follow one another, each with its number of tokens; neighbours of one version are
    joined."""
    found: list[WeightSpan] = []
    before = 0
    for spans, length in parts:
        for span in spans:
            start, end = before + span.start, before + span.end
            if found and (found[-1].version, found[-1].digest) == (span.version, span.digest):
                found[-1] = replace(found[-1], end=end)
            else:
                found.append(WeightSpan(span.version, span.digest, start, end))
        before += length
    return tuple(found)


def joined_flags(parts: Sequence[tuple[Sequence[bool] | None, int]]) -> tuple[bool, ...] | None:
    """Return flags of parts that follow one another, False where a part has none; None where no part has some."""
    if all(flags is None for flags, _ in parts):
        return None
    return tuple(flag for flags, length in parts for flag in flags or [False] * length)


def _images_of(turns: Sequence[Completion]) -> tuple[Images, ...]:
    drawn = [one.drawn_with.images for one in turns if one.drawn_with is not None]
    return tuple({images.digest: images for images in drawn if images is not None}.values())


def _is_cut(one: Conversation) -> bool:
    return one.finish_reason is not None and one.finish_reason.type == "length"
