"""Prompts of token ids or a text that go on from a turn, with the images of its history, which the session keeps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ....rollout.sampling_params import SamplingParams
from ..images.intake import ImageIntake
from ..images.pictures import SentPicture
from .next_turn import NextTurn


class Tokenising(Protocol):
    """Tokenise prompts, within the context's length."""

    def token_ids(
        self, prompts: Sequence[str | list[int]], field: str, params: Sequence[SamplingParams],
        num_kept: int | None = None, turn: NextTurn | None = None,
    ) -> list[list[int]]: ...  # fmt: skip

    def refuse_long(self, text: str, field: str, params: SamplingParams) -> None: ...
    def fits(self, num_tokens: int, field: str, params: SamplingParams) -> None: ...


def with_pictures(ids: list[int], pictures: Sequence[SentPicture], images: ImageIntake, field: str) -> list[int]:
    """Return a prompt whose tokens have all of its images with the tensors of these, which the processor makes
    together, as a trainer has them. Slow. Raises BadField."""
    if not pictures:
        return ids
    images.count(len(pictures), field)
    images.check_pixels(pictures)
    return images.of_ids(ids, pictures, field)


def processed_prompt(
    prompt: str | list[int], pictures: Sequence[SentPicture], params: SamplingParams, tokenising: Tokenising,
    images: ImageIntake, field: str, *, adds_special: bool = True,
) -> list[int]:  # fmt: skip
    """Return the prompt of a text or tokens with the pictures in it, if it has any. adds_special: to a text with
    pictures. Slow. Raises BadField."""
    if not pictures:
        [found] = tokenising.token_ids([prompt], field, [params])
        return found
    if isinstance(prompt, str):
        tokenising.refuse_long(prompt, field, params)
        processed = images.of_text(prompt, pictures, field, adds_special=adds_special)
    else:
        [ids] = tokenising.token_ids([prompt], field, [params])
        processed = images.of_ids(ids, pictures, field)
    tokenising.fits(len(processed), field, params)
    return processed


def joined_prompt(
    prompt: str | list[int], pictures: Sequence[SentPicture], turn: NextTurn, params: SamplingParams,
    tokenising: Tokenising, images: ImageIntake, field: str,
) -> list[int]:  # fmt: skip
    """Return the prompt that goes on from a turn with a text or tokens and the pictures in them. Slow. Raises
    BadField."""
    if not pictures:
        [found] = tokenising.token_ids([prompt], field, [params], turn=turn)
        return with_pictures(found, turn.pictures, images, field)
    images.check_pixels(pictures)
    added = processed_prompt(
        prompt, pictures, params, tokenising, images, field, adds_special=not turn.num_tokens_before
    )  # fmt: skip
    [found] = tokenising.token_ids([turn.joined(added, pictures)], field, [params])
    return with_pictures(found, turn.pictures, images, field)
