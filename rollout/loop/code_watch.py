"""A module's settings, forwards and hooks that were changed between two phases: KV is then of other computations."""

from __future__ import annotations

import logging

from ..model.module_code import FUNCTIONS
from ..sequences.sequence import State
from .loop import Loop
from .parts import Parts

logger = logging.getLogger(__name__)


class CodeWatch:
    """Watch what a module computes beside its weights, from phase to phase. The caller holds the engine's lock."""

    def __init__(self, parts: Parts, loop: Loop) -> None:
        self._parts, self._loop = parts, loop
        self._seen: int | None = None  # version of the code in the last phase with steps

    def accept(self) -> None:
        """Take the module as it is: KV of another one is dropped already."""
        self._seen = self._parts.model.phase.code_version

    def look(self) -> None:
        """Start a KV epoch if the module is another one than in the last phase, from the first one with steps on.
        Running sequences compute their KV again. Version and digest stay: the weights are the same."""
        before, now = self._seen, self._parts.model.phase.code_version
        self._seen = now
        if before in (None, now):
            return
        name, changed = type(self._parts.model.module).__name__, self._parts.model.phase.changed_code
        if self._parts.ledger.usage.num_cached or self._parts.scheduler.num_running:
            logger.warning(
                "settings, forwards or hooks of %s are others than in the rollout phase before (%s): cached KV is "
                "dropped",
                name, ", ".join(changed),
            )  # fmt: skip
        if FUNCTIONS in changed:
            logger.warning(
                "%s was checked when its engine was made, with other forwards or hooks: that its log-probabilities are "
                "the trainer's is not proven for these (a new engine checks them)",
                name,
            )
        drop_kv(self._parts, self._loop)


def drop_kv(parts: Parts, loop: Loop) -> None:
    """Start a KV epoch: no cached block matches again, and running sequences compute their KV anew. No step is in
    flight afterwards."""
    loop.drain()
    for request in reversed(parts.scheduler.running()):
        loop.retract(request)
    score_prompts_again(parts, loop)
    start_epoch(parts)
    parts.scheduler.forget_under_way()


def start_epoch(parts: Parts) -> tuple[int, int]:
    """Start a KV epoch, also for the tokens to come; returns as the ledger does."""
    report = parts.ledger.start_epoch()
    parts.sequences.epoch = parts.ledger.epoch
    return report


def score_prompts_again(parts: Parts, loop: Loop) -> None:
    """Begin sequences without output again that have given their KV back inside a prompt that is scored: all of its
    log-probabilities are then of the weights that draw. With output they stay as the first token's weights gave them,
    and where a sequence has kept its KV, each is of the weights that ran its row. No step is in flight."""
    for request in parts.sequences.requests():
        has_gone_back = request.sequence.state is State.WAITING_PREEMPT
        if has_gone_back and request.wants_prompt_logprobs and not request.record.logprobs:
            loop.begin_again(request)
