"""Draws of samples whose logits are changed before the draw: penalties, biases, forbidden ends and grammars."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
from torch import Tensor

from ..grammars.matcher import MAX_TOKEN_S
from ..grammars.processor_time import thread_time
from ..grammars.state import GrammarState
from ..loop.parts import Parts
from ..request_options import RequestOptions
from ..running.batch import SampledRow
from ..running.sampler import Sampler
from ..sequences.request import Request
from ..sequences.sequence import Sequence
from .claim import Claim
from .layout import Task

# Processor time of grammars. A token may take four times as long as an engine lets it, whose machine may be faster.
TOKEN_S = 4 * MAX_TOKEN_S
SAMPLE_S = 300.0


class TooSlow(Exception):
    """A grammar that has taken too long to be followed along an output."""


def needs_own(claim: Claim) -> bool:
    """Return whether a sample's rows are drawn one by one, each with what its own tokens before it change."""
    params = claim.params
    return params.needs_penalties or bool(params.logit_bias) or params.min_new_tokens > 0 or params.is_constrained


class OwnSettings:
    """The draws of such samples, by the sampler that drew them."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._samplers: dict[frozenset[int], Sampler] = {}
        self._requests: dict[Task, Request] = {}
        self._masks: dict[Task, list[bytes | None]] = {}
        self.open: set[Task] = set()  # whose grammar allows a token after an output that is said to end with it
        self.too_slow: set[Task] = set()  # whose grammar has taken too long: they cannot be drawn

    def prepare(self, tasks: Iterable[Task]) -> None:
        """Follow the grammars of tasks along their outputs, before anything is drawn from them. It may take long, so
        it is called outside the engine's loop."""
        for task in tasks:
            claim = task.claim
            if claim.params.is_constrained and task not in self._masks and task not in self.too_slow:
                state = self._state(claim)
                try:
                    masks = self._masks[task] = masks_of(claim, state)
                    if claim.ends_with_grammar and _goes_on(claim, state, masks[-1]):
                        self.open.add(task)
                except TooSlow:
                    self._masks.pop(task, None)
                    self.too_slow.add(task)

    def drawn(self, task: Task, first: int, logits: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Draw output tokens `first`, first + 1, ... of a task from logits [R, V]; returns ids and
        log-probabilities. A task with a grammar must be prepared."""
        claim = task.claim
        request = self._requests.get(task)
        if request is None:
            sequence = Sequence(claim.id, claim.prompt_ids)
            request = self._requests[task] = Request(
                sequence, claim.params, RequestOptions(), claim.index, claim.seed, 0.0, 0, None
            )
        output = tuple(claim.token_ids.tolist())
        places = range(first, first + len(logits))
        rows = [SampledRow(request, output[:place]) for place in places]
        its_masks = self._masks.get(task)
        allowed = [its_masks[place] for place in places] if its_masks else ()
        sampler = self._samplers.setdefault(claim.eos, Sampler(claim.eos))
        choices = sampler.sample(logits, rows, allowed)
        if places.stop >= task.span.end:  # the last rows of the task
            sampler.forget(request)
            del self._requests[task]
            self._masks.pop(task, None)  # V / 8 bytes for each token
        return np.array([c.token_id for c in choices], np.int64), np.array([c.logprob for c in choices], np.float32)

    def _state(self, claim: Claim) -> GrammarState:
        assert claim.grammar is not None, "checked before"
        params = replace(claim.params, jump_forward=claim.grammar["mode"])
        [compiled] = self._parts.grammars.compiled([params])
        assert compiled is not None
        return self._parts.grammars.state(compiled, params)


def masks_of(claim: Claim, state: GrammarState) -> list[bytes | None]:
    """Return the tokens that a grammar allows at each position of a claimed output, as the bits of a mask.

    After a token that it does not allow, which no draw can be, nothing is known: None. Raises TooSlow: a grammar that
    does not nest may take long for one token, which may be the machine's time, as in an engine.
    """
    state.limit(TOKEN_S)
    masks: list[bytes | None] = []
    output, began, num_long = claim.token_ids.tolist(), thread_time(), 0
    newest = began
    for place, token_id in enumerate(output):
        if place:
            state.follow(output[place - 1 : place], place - 1)
        mask = state.mask()
        before, newest = newest, thread_time()
        num_long += newest - before > TOKEN_S
        if state.is_lost or newest - began > SAMPLE_S or num_long > (0 if state.nests else 1):
            raise TooSlow
        masks.append(mask.tobytes())
        if not _allows(masks[-1], token_id):
            break
    return masks + [None] * (len(output) - len(masks))


def _goes_on(claim: Claim, state: GrammarState, last_mask: bytes | None) -> bool:
    """Return whether a grammar allows a token after a claimed output, or does not allow all of it. Moves the state.
    Raises TooSlow."""
    output = claim.token_ids.tolist()
    if not _allows(last_mask, output[-1]):
        return True
    state.follow(output[-1:], len(output) - 1)
    if state.is_lost:
        raise TooSlow
    return not state.is_over


def _allows(mask: bytes | None, token_id: int) -> bool:
    return mask is not None and bool(mask[token_id >> 3] >> (token_id & 7) & 1)
