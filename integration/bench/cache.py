"""The cost of the prefix cache, without a model: inserting the blocks of a prompt, and finding them again.

A cache is filled with --blocks blocks of prompts, some of which share their beginning. Then new prompts are inserted:
their blocks are hashed, looked up, allocated (which evicts others), published and released; and an equal prompt, hashed
anew, is matched. Both together are insert_match_ms. Medians over the repeats, in CPU time of this thread, so that other
processes on the same cores count little, and without garbage collections, as timeit does. by_prompt has the longest
prompts and shorter ones in the full cache, by_cache the longest in smaller caches; growth is the time per token of the
longest divided by that of the shortest.

Bar: 5 ms for 16,384 tokens in a cache of 100,000 blocks, growing no faster than the prompt.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time

from ...rollout.kv.ledger import KVLedger
from ...rollout.request_options import RequestOptions
from ...rollout.sampling_params import SamplingParams
from ...rollout.sequences.request import Request
from ...rollout.sequences.sequence import Sequence
from .parts.budget import Budget, add_budget_argument, say
from .parts.load import positive

_BLOCK_SIZE = 16
_VOCAB_SIZE = 16384
_STEM_BLOCKS = 8  # at the beginning of a fill prompt, possibly shared
_NUM_STEMS = 32
_FILL_TOKENS = 2048


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--blocks", type=positive, default=100_000, help="blocks in the cache")
    parser.add_argument("--prompt-tokens", type=positive, default=16384, help="the longest prompt")
    parser.add_argument("--repeats", type=positive, default=15)
    add_budget_argument(parser)


def run(options: argparse.Namespace) -> dict[str, object]:
    """Measure, and return the report."""
    budget = Budget(options.max_seconds)
    longest = max(options.prompt_tokens // _BLOCK_SIZE, 8) * _BLOCK_SIZE
    lengths = [longest // 8, longest // 4, longest // 2, longest]
    full = FilledCache(options.blocks, longest)
    cases = [(full, length) for length in lengths]
    cases += [(FilledCache(num, longest), longest) for num in (options.blocks // 100, options.blocks // 10)]
    found = [
        cache.times_ms(length, options.repeats, budget.share(1 / (len(cases) - number)))
        for number, (cache, length) in enumerate(cases)
    ]
    medians = [round(statistics.median(times), 3) for times in found]
    by_prompt = dict(zip(lengths, medians, strict=False))
    by_cache = {cache.num_blocks: ms for (cache, _), ms in zip(cases, medians, strict=True) if cache is not full}
    by_cache[full.num_blocks] = by_prompt[longest]
    return {
        "insert_match_ms": by_prompt[longest],
        "num_blocks": full.num_blocks,
        "prompt_tokens": longest,
        "repeats": min(map(len, found)),
        "by_prompt": [{"prompt_tokens": length, "insert_match_ms": ms} for length, ms in by_prompt.items()],
        "by_cache": [{"num_blocks": num_blocks, "insert_match_ms": ms} for num_blocks, ms in by_cache.items()],
        "growth": round(by_prompt[longest] / longest / (by_prompt[lengths[0]] / lengths[0]), 2),
    }


class FilledCache:
    """A ledger whose pool is full of cached blocks: `num_blocks`, or as many as the longest prompt needs."""

    def __init__(self, num_blocks: int, longest: int) -> None:
        self._dice = random.Random(num_blocks)
        self.num_blocks = max(num_blocks, longest // _BLOCK_SIZE)
        self.ledger = KVLedger(self.num_blocks, _BLOCK_SIZE, prefix_cache=True)
        stems = [self._tokens(_STEM_BLOCKS * _BLOCK_SIZE) for _ in range(_NUM_STEMS)]
        while room := self.ledger.usage.num_free * _BLOCK_SIZE:
            token_ids = self._dice.choice(stems) + self._tokens(_FILL_TOKENS)
            self.insert(token_ids if len(token_ids) <= room else self._tokens(room))

    def times_ms(self, num_tokens: int, repeats: int, budget: Budget) -> list[float]:
        """Measure inserting a new prompt of that length and matching an equal one, as often as there is time for."""
        times = []
        gc.collect()
        gc.disable()
        try:
            for _ in budget.rounds(repeats):
                token_ids = self._tokens(num_tokens)
                times.append((self.insert(token_ids) + self.match(token_ids)) * 1e3)
        finally:
            gc.enable()
        say(f"{num_tokens} tokens, {self.num_blocks} blocks: {statistics.median(times):.3f} ms")
        return times

    def insert(self, token_ids: list[int]) -> float:
        """Insert a request with this prompt, publish its blocks and release it; returns this thread's seconds."""
        ledger, request = self.ledger, _request(token_ids)
        started = time.thread_time()
        ledger.open(request, ledger.match(request))
        blocks = ledger.grow(request, len(token_ids))
        ledger.publish(request, len(token_ids))
        ledger.close(request)
        seconds = time.thread_time() - started
        ledger.forget(request)
        assert blocks is not None
        return seconds

    def match(self, token_ids: list[int]) -> float:
        """Look up a request that begins with this prompt; returns this thread's seconds."""
        request = _request([*token_ids, 0])  # one token more: the last one is always computed
        started = time.thread_time()
        nodes = self.ledger.match(request)
        seconds = time.thread_time() - started
        self.ledger.forget(request)
        assert len(nodes) == len(token_ids) // _BLOCK_SIZE
        return seconds

    def _tokens(self, num_tokens: int) -> list[int]:
        return self._dice.choices(range(_VOCAB_SIZE), k=num_tokens)


def _request(token_ids: list[int]) -> Request:
    return Request(Sequence("r", token_ids), SamplingParams(), RequestOptions(), 0, 0, 0.0, 0, None)
