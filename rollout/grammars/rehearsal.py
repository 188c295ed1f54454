"""The rehearsal of a compiled grammar: a few random texts, to find out what its tokens cost.

An ambiguous grammar is compiled in no time, but each further token of it may take longer than the last one without
bound. The process that compiles finds the clear cases with this; the loop's `GrammarSteps` ends the others.
"""

from __future__ import annotations

import random
import statistics
import time

import numpy as np

from .matcher import MAX_TOKEN_S, CompiledGrammar

_NUM_TEXTS = 3
_NUM_TOKENS = 48
_MAX_S = 1.0  # for all texts; a text whose tokens grow slower goes on
_GROWTH = 2.0  # a token that takes so many times the median of its text's tokens is one of a text that grows slower


def rehearse(grammar: CompiledGrammar) -> None:
    """Follow random texts of the grammar. Raises ValueError if a token takes more than `MAX_TOKEN_S`."""
    pieces, stops = grammar.vocabulary.text.pieces, set(grammar.stop_token_ids)
    began = time.process_time()
    for number in range(_NUM_TEXTS):
        choice, matcher, seconds = random.Random(number), grammar.matcher(), []
        for _ in range(_NUM_TOKENS):
            started = time.process_time()
            ids = np.flatnonzero(np.unpackbits(matcher.mask(), bitorder="little", count=len(pieces)))
            some = [int(ids[choice.randrange(len(ids))]) for _ in range(1 + 15 * (number == 0))] if len(ids) else []
            some = [id for id in some if id not in stops]
            if not some:
                break
            matcher.accept(max(some, key=lambda id: len(pieces[id])))  # long ones in the first text
            matcher.forced()
            now = time.process_time()
            seconds.append(now - started)
            if seconds[-1] > MAX_TOKEN_S:
                raise ValueError(f"too ambiguous: a token of it takes more than {MAX_TOKEN_S} s of processor time")
            if now - began > _MAX_S and seconds[-1] < _GROWTH * statistics.median(seconds):
                return
