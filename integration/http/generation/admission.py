"""The limits of the queue: the sequences and prompt tokens of all requests of which the engine may have a sequence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, repeat

from ....rollout.engine import Engine
from ....rollout.errors import Overloaded
from ..conversations.next_turn import NextTurn
from ..edge.config import HttpConfig
from ..edge.errors import HttpError
from ..images.pictures import SentPicture

_CHARS_PER_TOKEN = 4  # of a text that is not tokenised yet, about


@dataclass(frozen=True)
class Size:
    """The part of an HTTP request in the queue's limits."""

    num_sequences: int
    num_tokens: int  # of prompts and drafts, for each sample of a prompt, because each sequence has its own copy
    num_image_bytes: int = 0  # as they came; 0: it has no images
    has_known_images: bool = False  # whether it may go on from a turn with images, which the session counts

    @classmethod
    def of(
        cls,
        prompts: Iterable[str | Sequence[int]],
        num_samples: Iterable[int],
        drafts: Iterable[str | Sequence[int]] = (),
    ) -> Size:
        """Return the size of prompts with their numbers of samples and, if given, drafts. The tokens of a text are
        estimated."""
        num_sequences = num_tokens = 0
        for prompt, num, draft in zip(prompts, num_samples, chain(drafts, repeat(())), strict=False):
            num_sequences += num
            num_tokens += num * (_num_tokens(prompt) + _num_tokens(draft))
        return cls(num_sequences, num_tokens)

    def after(self, turn: NextTurn | None) -> Size:
        """Return the size with the tokens of the conversation that the prompt goes on from."""
        if turn is None:
            return self
        num_tokens = self.num_tokens + turn.num_tokens_before
        return replace(self, num_tokens=num_tokens, has_known_images=turn.has_pictures)

    @property
    def has_images(self) -> bool:
        """Whether prompts may have images."""
        return self.num_image_bytes > 0 or self.has_known_images

    def with_images(self, pictures: Iterable[SentPicture]) -> Size:
        """Return the size with these images."""
        return replace(self, num_image_bytes=sum(picture.num_bytes for picture in pictures))


def _num_tokens(prompt: str | Sequence[int]) -> int:
    return -(-len(prompt) // _CHARS_PER_TOKEN) if isinstance(prompt, str) else len(prompt)


class Admission:
    """Count requests from their arrival until `release`. Not thread-safe: the event loop uses it."""

    def __init__(self, engine: Engine, config: HttpConfig) -> None:
        self._engine, self._config = engine, config
        self._sizes: dict[object, Size] = {}  # by request
        self.num_sequences = self.num_tokens = 0  # of all of them

    def take(self, request: object, size: Size) -> None:
        """Count a request. Raises HttpError 400 for one that is too large alone, Overloaded where too much waits."""
        config = self._config
        if size.num_tokens > config.max_waiting_tokens:
            raise HttpError(
                400, f"prompts times samples have {size.num_tokens} tokens, more than the {config.max_waiting_tokens} "
                "that may wait (max_waiting_tokens): send several requests"
            )  # fmt: skip
        num_waiting = self.num_sequences - self._engine.num_running
        if num_waiting > 0 and num_waiting + size.num_sequences > config.max_waiting_requests:
            raise Overloaded(
                f"{num_waiting} sequences wait, and {size.num_sequences} more would be over the limit of "
                f"{config.max_waiting_requests} (max_waiting_requests)"
            )
        if self.num_tokens + size.num_tokens > config.max_waiting_tokens:
            raise Overloaded(
                f"the open requests have {self.num_tokens} prompt tokens, and {size.num_tokens} more would be over "
                f"the limit of {config.max_waiting_tokens} (max_waiting_tokens)"
            )
        self._put(request, size)

    def ended(self, request: object, num: int) -> None:
        """Count so many sequences of a request no longer."""
        size = self._sizes[request]
        self._put(request, Size(max(size.num_sequences - num, 0), size.num_tokens))

    def release(self, request: object) -> None:
        """Count a request no longer. Does nothing where it is not counted."""
        self._put(request, Size(0, 0))
        del self._sizes[request]

    def _put(self, request: object, size: Size) -> None:
        former = self._sizes.get(request, Size(0, 0))
        self._sizes[request] = size
        self.num_sequences += size.num_sequences - former.num_sequences
        self.num_tokens += size.num_tokens - former.num_tokens
