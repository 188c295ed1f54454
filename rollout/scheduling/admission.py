"""Whether a waiting request may run now, and how many blocks admission keeps free for what is running already.

Sequences may ask for far more tokens than they use. Keeping room for all of it would leave the pool half empty; keeping
none retracts sequences all the time. So room is kept for a share of what they may still generate, and the share follows
what happens: it falls while steps go well and rises when one has to retract. Source: SGLang's new_token_ratio.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from ..config import ADMISSION_RATIO
from ..kv.ledger import KVLedger
from ..kv.radix_cache import Node
from ..sequences.request import Request

MINIMUM_SHARE = 0.14  # of the initial ratio: as low as it falls
NUM_DECAY_STEPS = 600  # good steps from the initial ratio down to the minimum
RISE = 0.1  # what a retraction adds at least
NUM_STEPS_AHEAD = 20  # after a retraction: tokens that each sequence is expected to generate beyond what it has
MAX_TOKENS_COUNTED = 4096  # of one sequence's remaining tokens: beyond, a request that asks for "as much as fits" would
# keep all others out


class Admission:
    """The ratio, and the blocks that it says a sequence will have."""

    def __init__(self, ledger: KVLedger, max_model_len: int, initial_ratio: float = ADMISSION_RATIO) -> None:
        self._ledger = ledger
        self._max_model_len = max_model_len
        self._initial_ratio = self.ratio = initial_ratio

    def reset(self) -> None:
        """Start over, as when the cache is flushed or nothing is left to do."""
        self.ratio = self._initial_ratio

    def on_good_step(self) -> None:
        """A step ran and nobody was retracted for it."""
        lowest = self._initial_ratio * MINIMUM_SHARE
        self.ratio = max(self.ratio - (self._initial_ratio - lowest) / NUM_DECAY_STEPS, lowest)

    def on_retraction(self, running: Collection[Request]) -> None:
        """Blocks ran out. The new ratio expects of all running sequences what they have generated so far and a little
        more, and is in any case higher than it was, up to 1."""
        num_generated = sum(r.sequence.num_output_tokens for r in running)
        num_allowed = sum(r.params.max_new_tokens for r in running)
        estimate = (num_generated + NUM_STEPS_AHEAD * len(running)) / (num_allowed + 1)
        self.ratio = min(max(estimate, self.ratio + RISE), 1.0)

    def num_blocks_expected(self, request: Request) -> int:
        """Blocks of the request's table when it has generated the expected share of what it may still generate: those
        of its known tokens at least, never more than it can use or the pool has."""
        num_known = request.num_tokens_ahead
        num_tokens = request.sequence.num_prompt_tokens + request.params.max_new_tokens
        # The last token of a sequence needs no KV.
        num_left = max(min(num_tokens, self._max_model_len) - 1 - num_known, 0)
        num_expected = num_known + math.ceil(self.ratio * min(num_left, MAX_TOKENS_COUNTED))
        num_blocks = self._ledger.num_blocks_for(min(num_expected, num_known + num_left))
        return min(num_blocks, self._ledger.usage.num_blocks)

    def num_blocks_reserved(self, running: Collection[Request]) -> int:
        """Blocks that running sequences are expected to take beyond those they hold. Cost grows with their number."""
        ledger = self._ledger
        return sum(max(self.num_blocks_expected(r) - len(ledger.block_table(r)), 0) for r in running)

    def num_blocks_to_take(self, request: Request, nodes: list[Node]) -> int:
        """Available blocks that the request, not admitted yet, is expected to take, decoding included; `nodes` are the
        cached ones that it would begin with."""
        return self.num_blocks_expected(request) - len(nodes) + _num_evictable(nodes)

    def fits(self, request: Request, nodes: list[Node], reserve: int, *, is_alone: bool) -> bool:
        """Whether the pool has the blocks that the request is expected to have, besides `reserve` for running ones.
        When nothing runs its known tokens are enough: whoever comes first is always taken."""
        ledger = self._ledger
        if is_alone:
            num_wanted = ledger.num_blocks_for(request.sequence.num_tokens) - len(nodes) + _num_evictable(nodes)
        else:
            num_wanted = self.num_blocks_to_take(request, nodes)
        return num_wanted + reserve <= ledger.num_available

    def why_never(self, request: Request) -> str | None:
        """Why this request could not run even with the pool to itself; None: it could."""
        num_known = request.sequence.num_tokens
        num_new = min(request.params.max_new_tokens, 1)
        if num_known + num_new > self._max_model_len:
            return f"{num_known} tokens leave no room in a context of {self._max_model_len}"
        ledger = self._ledger
        if ledger.num_blocks_for(num_known) > (num_blocks := ledger.usage.num_blocks):
            return f"{num_known} tokens can never fit the KV pool of {num_blocks} blocks of {ledger.block_size} tokens"
        return None


def _num_evictable(nodes: list[Node]) -> int:
    """Matched nodes that count as available until a sequence holds them."""
    return sum(node.is_free_to_go for node in nodes)
