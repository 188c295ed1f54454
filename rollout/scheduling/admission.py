"""Admission of waiting requests, and the blocks that it keeps free for running ones.

Sequences may ask for far more tokens than they use. Keeping room for all of them would leave the pool half empty;
keeping none would retract sequences all the time. So room is kept for a share of the tokens that they may still
generate. The share adapts: it falls while steps succeed and rises at each retraction. Source: SGLang's new_token_ratio.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection
from operator import attrgetter

from ..config import ADMISSION_RATIO
from ..kv.ledger import KVLedger
from ..kv.radix_cache import Node
from ..sequences.request import Request

MINIMUM_SHARE = 0.14  # of the initial ratio: the ratio falls no lower
NUM_DECAY_STEPS = 600  # good steps from the initial ratio down to the minimum
RISE = 0.1  # least increase at a retraction
NUM_STEPS_AHEAD = 20  # after a retraction: expected further tokens of each sequence
# tokens of one sequence: beyond, a request that asks for "as much as fits" would keep all others out
MAX_TOKENS_COUNTED = 4096


class Admission:
    """The admission ratio, and the numbers of blocks that it predicts for sequences."""

    def __init__(self, ledger: KVLedger, max_model_len: int, initial_ratio: float = ADMISSION_RATIO) -> None:
        self._ledger = ledger
        self._max_model_len = max_model_len
        self._initial_ratio = self.ratio = initial_ratio

    def reset(self) -> None:
        """Set the ratio to its initial value, for a flush of the cache or the end of all work."""
        self.ratio = self._initial_ratio

    def on_good_step(self, num_steps: int = 1) -> None:
        """Lower the ratio after so many steps without a retraction."""
        lowest = self._initial_ratio * MINIMUM_SHARE
        self.ratio = max(self.ratio - num_steps * (self._initial_ratio - lowest) / NUM_DECAY_STEPS, lowest)

    def on_retraction(self, running: Collection[Request]) -> None:
        """Raise the ratio because blocks ran out.

        The new ratio predicts for all running sequences the tokens that they have generated so far and a few more. It
        is higher than before, and at most 1.
        """
        num_generated = sum(r.sequence.num_output_tokens for r in running)
        num_allowed = sum(r.params.max_new_tokens for r in running)
        estimate = (num_generated + NUM_STEPS_AHEAD * len(running)) / (num_allowed + 1)
        self.ratio = min(max(estimate, self.ratio + RISE), 1.0)

    def num_blocks_expected(self, request: Request) -> int:
        """Predict the blocks of the request's table after the expected share of the tokens that it may still generate.

        The result covers at least its known tokens, and never exceeds the blocks that it can use or the pool has.
        """
        num_known = request.num_tokens_ahead
        num_tokens = request.sequence.num_prompt_tokens + request.params.max_new_tokens
        # The last token of a sequence needs no KV.
        num_left = max(min(num_tokens, self._max_model_len) - 1 - num_known, 0)
        num_expected = num_known + math.ceil(self.ratio * min(num_left, MAX_TOKENS_COUNTED))
        num_blocks = self._ledger.num_blocks_for(min(num_expected, num_known + num_left))
        return min(num_blocks, self._ledger.usage.num_blocks)

    def num_blocks_reserved(self, running: Collection[Request]) -> int:
        """Predict the blocks that running sequences will take beyond those they hold. Cost grows with their number."""
        ledger = self._ledger
        return sum(max(self.num_blocks_expected(r) - len(ledger.block_table(r)), 0) for r in running)

    def num_blocks_to_take(self, request: Request, nodes: list[Node]) -> int:
        """Predict the available blocks that a waiting request will take, decoding included.

        nodes: the cached nodes that it would start with.
        """
        return self.num_blocks_expected(request) - len(nodes) + _num_evictable(nodes)

    def fits(self, request: Request, nodes: list[Node], reserve: int, *, is_alone: bool) -> bool:
        """Return whether the pool has the blocks that the request is expected to need, besides `reserve` for running
        ones.

        When nothing runs, blocks for its known tokens are enough: the first request is always admitted.
        """
        ledger = self._ledger
        if is_alone:
            num_wanted = ledger.num_blocks_for(request.sequence.num_tokens) - len(nodes) + _num_evictable(nodes)
        else:
            num_wanted = self.num_blocks_to_take(request, nodes)
        return num_wanted + reserve <= ledger.num_available

    def why_never(self, request: Request) -> str | None:
        """Return the reason why this request could not run even alone in the pool; None if it could."""
        num_known = request.sequence.num_tokens
        num_new = min(request.params.max_new_tokens, 1)
        if num_known + num_new > self._max_model_len:
            return f"{num_known} tokens leave no room in a context of {self._max_model_len}"
        ledger = self._ledger
        if ledger.num_blocks_for(num_known) > (num_blocks := ledger.usage.num_blocks):
            return f"{num_known} tokens can never fit the KV pool of {num_blocks} blocks of {ledger.block_size} tokens"
        return None


def _num_evictable(nodes: list[Node]) -> int:
    """Count the matched nodes that are available until a sequence holds them.

    The holders and pins of a node are those of all nodes before it too, so the available ones are the last of the path.
    """
    return len(nodes) - bisect_left(nodes, True, key=attrgetter("is_free_to_go"))
