"""Drafts from other samples of a prompt: those of now, its siblings, and those of earlier, its history.

Samples are kept by prompt and `extra_key`. While requests of a prompt are live, their outputs are siblings, ended ones
too; when the last one has ended, they become the prompt's history. All kept samples have a size in bytes: the prompts
that were used least recently make room.
"""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass, field
from itertools import islice

from ..sequences.request import Request
from .history_file import KEY_BYTES, Histories
from .own_past import OwnPast
from .proposer import Proposal
from .token_history import LENGTHS, TokenHistory, token_bytes, vote

MAX_SEARCHED = 16  # live siblings for each proposal: a group of hundreds would search for longer than it runs
MAX_SEARCHED_BYTES = 1 << 16  # of ended ones, and of a history
MAX_SAMPLES = 64  # ended siblings of a prompt, and of its history: older ones are dropped
_SAMPLE_BYTES, _PROMPT_BYTES = 160, 640  # of the objects around tokens, which count too: samples may be short


@dataclass(eq=False, slots=True)
class _Prompt:
    """The samples of one prompt."""

    live: dict[Request, None] = field(default_factory=dict)
    # Bytes, which the collector of garbage does not look at: there are many.
    ended: list[bytes] = field(default_factory=list)  # siblings
    history: list[bytes] = field(default_factory=list)  # the newest last
    joined_ended: TokenHistory | None = None  # the newest of them as one, for the search; None: not joined yet
    joined_history: TokenHistory | None = None
    num_sample_bytes: int = 0

    @property
    def num_bytes(self) -> int:
        """The bytes of all samples, with the objects around them."""
        return self.num_sample_bytes + _PROMPT_BYTES * bool(self.ended or self.history)

    def keep(self, sample: bytes) -> None:
        """Keep the output of a sibling that has ended."""
        self.ended.append(sample)
        self.num_sample_bytes += len(sample) + _SAMPLE_BYTES
        self._cut(self.ended)
        self.joined_ended = None

    def end(self) -> None:
        """Make the siblings history: the last live one has ended."""
        self.history += self.ended
        self.ended = []
        self._cut(self.history)
        self.joined_ended = self.joined_history = None

    def add_history(self, earlier: list[bytes]) -> None:
        """Put samples before those of the history."""
        self.history = earlier + self.history
        self.num_sample_bytes += sum(map(len, earlier)) + _SAMPLE_BYTES * len(earlier)
        self._cut(self.history)
        self.joined_history = None

    def forget(self) -> None:
        """Drop all samples."""
        self.ended, self.history = [], []
        self.joined_ended = self.joined_history = None
        self.num_sample_bytes = 0

    def _cut(self, samples: list[bytes]) -> None:
        if len(samples) <= MAX_SAMPLES:
            return
        dropped = samples[: len(samples) - MAX_SAMPLES]
        self.num_sample_bytes -= sum(map(len, dropped)) + _SAMPLE_BYTES * len(dropped)
        del samples[: len(dropped)]


class Samples:
    """The samples of all prompts that are live, and of as many others as fit."""

    def __init__(self, past: OwnPast, max_bytes: int) -> None:
        """Create an empty store. past: knows the tokens of live requests. max_bytes: of ended samples; 0: none."""
        self._past, self.max_bytes = past, max_bytes
        self._prompts: dict[bytes, _Prompt] = {}  # least recently used first
        self._keys: dict[Request, bytes] = {}  # of live requests
        self.num_bytes = 0  # of ended samples, as objects in memory

    def __len__(self) -> int:
        return len(self._prompts)

    def live(self, request: Request) -> _Prompt:
        """Return the samples of a live request's prompt, as the ones used last."""
        if (key := self._keys.get(request)) is None:
            sequence = request.sequence
            key = self._keys[request] = _key(sequence.token_ids[: sequence.num_prompt_tokens], request.samples_key)
        prompt = self._prompts.pop(key, None) or _Prompt()
        self._prompts[key] = prompt
        prompt.live[request] = None
        return prompt

    def siblings(self, request: Request) -> list[TokenHistory]:
        """Return other samples of now: the newest ended ones as one, then live ones."""
        prompt = self.live(request)
        if prompt.joined_ended is None:
            prompt.joined_ended = TokenHistory.joined(prompt.ended, MAX_SEARCHED_BYTES)
        others = islice((other for other in prompt.live if other is not request), MAX_SEARCHED)
        return [prompt.joined_ended, *map(self._past.history, others)]

    def history(self, request: Request) -> list[TokenHistory]:
        """Return the newest samples of earlier, as one."""
        prompt = self.live(request)
        if prompt.joined_history is None:
            prompt.joined_history = TokenHistory.joined(prompt.history, MAX_SEARCHED_BYTES)
        return [prompt.joined_history]

    def ending(self, request: Request) -> bytes:
        """Return the bytes of the request's last tokens, its prompt's among them."""
        return self._past.history(request).last(LENGTHS[0])

    def end(self, request: Request) -> None:
        """Keep the output of a request that has ended."""
        sequence, prompt = request.sequence, self.live(request)
        key, before = self._keys.pop(request), prompt.num_bytes
        del prompt.live[request]
        if sequence.num_output_tokens and self.max_bytes:
            # With the end of the prompt, so that the first tokens are found too.
            first = max(sequence.num_prompt_tokens - LENGTHS[0], 0)
            prompt.keep(token_bytes(sequence.token_ids[first:]))
        if not prompt.live:
            prompt.end()
        self._changed(key, prompt, before)

    def _changed(self, key: bytes, prompt: _Prompt, before: int) -> None:
        """Count the samples of a prompt that had `before` bytes, and drop the oldest while all are too large."""
        self.num_bytes += prompt.num_bytes - before
        victims, num_bytes = [], self.num_bytes
        for other, oldest in self._prompts.items():
            if num_bytes <= self.max_bytes:
                break
            num_bytes -= oldest.num_bytes
            victims.append((other, oldest))
        for _, oldest in victims:
            oldest.forget()
        self.num_bytes = num_bytes
        for other, one in (*victims, (key, prompt)):
            if not (one.live or one.ended or one.history):
                self._prompts.pop(other, None)

    def histories(self) -> dict[bytes, list[bytes]]:
        """Return the bytes of each prompt's earlier samples, the newest last. The prompt that was used last is last."""
        return {key: list(prompt.history) for key, prompt in self._prompts.items() if prompt.history}

    def add_histories(self, histories: Histories) -> None:
        """Add samples before those that are known of a prompt. The prompts count as used now."""
        for key, samples in histories.items():
            prompt = self._prompts.pop(key, None) or _Prompt()
            self._prompts[key] = prompt
            before = prompt.num_bytes
            prompt.add_history([bytes(sample) for sample in samples if sample])
            self._changed(key, prompt, before)


class Siblings:
    """A source that knows the other samples of a prompt that is live. It hands ended ones on to the store."""

    name = "siblings"

    def __init__(self, samples: Samples) -> None:
        self._samples = samples

    def propose(self, request: Request, most: int) -> Proposal:
        """Return what followed most of the places with the longest match."""
        return vote(self._found(request), self._samples.ending(request), most)

    def _found(self, request: Request) -> list[TokenHistory]:
        return self._samples.siblings(request)

    def on_tokens(self, request: Request, num_cut: int) -> None:
        """Do nothing: the source `past` knows the tokens of live requests."""

    def on_end(self, request: Request) -> None:
        self._samples.end(request)


class History(Siblings):
    """A source that knows earlier samples of a prompt, such as those of the last epoch."""

    name = "history"

    def _found(self, request: Request) -> list[TokenHistory]:
        return self._samples.history(request)

    def on_end(self, request: Request) -> None:
        """Do nothing: the source `siblings` hands them on."""


def _key(prompt_ids: list[int], extra_key: str) -> bytes:
    """Return the name of a prompt under a key: a hash."""
    digest = hashlib.blake2b(array("i", prompt_ids).tobytes(), digest_size=KEY_BYTES, key=b"lockstep prompt")
    digest.update(extra_key.encode(errors="surrogatepass"))
    return digest.digest()
