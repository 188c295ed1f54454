"""Who may be in the next step while other steps are in the air."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..sequences.request import Request


@dataclass(frozen=True)
class Pipelining:
    """The rule of micro-batches. With one stage it leaves everything to the scheduler: nothing else is in the air when
    a step begins."""

    num_stages: int = 1
    sequence_pipelining: bool = True  # a prompt's next chunk need not wait until the last is through all stages

    def may_run(self, request: Request) -> bool:
        """Whether the running request's next rows are known, and may be scheduled.

        A decode needs the token that is sampled at the end of its flight. A prompt's next chunk needs the KV of the
        last one, which each stage has by the time the next comes: it may follow as soon as the first stage is free.
        """
        if self.num_stages == 1:
            return True
        in_flight = request.in_flight
        if in_flight.num_tokens or in_flight.num_rows:
            return False
        return self.sequence_pipelining or in_flight.num_steps == 0

    def max_decodes(self, running: Iterable[Request]) -> int | None:
        """How many decodes one step may hold: an equal share of all, those in the air included, so that as many steps
        as there are stages have work. A single step with everybody would leave all stages but one idle. None: all.

        Starves nobody: decodes are left out only while a step in the air holds less than its share; it lands, and once
        all in the air hold a full share the next step has room for all the others.

        Rows of prompts are not shared out: a step takes what its budget holds, and long prompts fill many steps.
        """
        if self.num_stages == 1:
            return None
        num_decoding = sum(not request.is_prefilling_ahead for request in running)
        return -(-num_decoding // self.num_stages)
