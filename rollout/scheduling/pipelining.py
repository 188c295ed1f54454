"""The choice of sequences for the next step while other steps are in flight."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..sequences.request import Request


@dataclass(frozen=True)
class Pipelining:
    """The rule of micro-batches. With one stage it restricts nothing: no other step is in flight when a step begins."""

    num_stages: int = 1
    sequence_pipelining: bool = True  # a prompt's next chunk need not wait until the last one is through all stages

    def may_run(self, request: Request, *, is_last_chunk: bool) -> bool:
        """Return whether the running request's next rows are known and may be scheduled. is_last_chunk: they are all
        that are known.

        A decode needs the token that is sampled at the end of the step before. A prompt's next chunk needs the KV of
        the last chunk, which each stage has by the time the next one comes: it may follow as soon as the first stage is
        free. The last chunk waits where a jump may take tokens back, whose rows may be in an earlier chunk.
        """
        if self.num_stages == 1:
            return True
        in_flight = request.in_flight
        if in_flight.num_tokens or in_flight.num_rows:
            return False
        if is_last_chunk and in_flight.num_steps and request.may_take_back:
            return False
        return self.sequence_pipelining or in_flight.num_steps == 0

    def max_decodes(self, running: Iterable[Request]) -> int | None:
        """Return the most decodes that one step may hold; None: no limit.

        It is an equal share of all decodes, those in flight included, so that every stage has a step to run. A single
        step with all decodes would leave all stages but one idle. No sequence starves: decodes are left out only while
        a step in flight holds less than its share; that step ends, and once all steps in flight hold a full share the
        next step has room for all other decodes.

        Rows of prompts are not divided: a step takes as many as its budget holds, and long prompts fill many steps.
        """
        if self.num_stages == 1:
            return None
        num_decoding = sum(not request.is_prefilling_ahead for request in running)
        return -(-num_decoding // self.num_stages)
