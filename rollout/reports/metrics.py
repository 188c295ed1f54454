"""Plain counters of one engine, which the HTTP edge exports to Prometheus."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass
class Metrics:
    """Totals since the engine was created. Written by the engine's loop only."""

    num_requests: int = 0  # sequences added
    num_finished: int = 0  # answered with stop or length
    num_aborted: int = 0
    num_ignored: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0  # prompt tokens whose KV was reused
    num_output_tokens: int = 0
    num_retractions: int = 0
    num_pauses: int = 0  # a pause during a pause counts too
    num_steps: int = 0
    num_rows: int = 0  # prefill and decode rows run
    num_sequence_forwards: int = 0  # sequences in each step, added up
    num_weight_commits: int = 0
    num_jumps: int = 0  # steps of one sequence that committed tokens which were not sampled
    num_jump_forward_tokens: int = 0  # of those tokens, less the ones that they replaced
    num_forwards_saved: int = 0  # steps of one sequence that those tokens would have taken
    num_jump_rollbacks: int = 0  # jumps that replaced tokens
    num_rolled_back_tokens: int = 0
    num_retokenisations: int = 0  # checks whether a token sampled after a jump joins the text before it
    num_drafted_tokens: int = 0  # rows for proposed tokens
    num_accepted_tokens: int = 0  # proposed tokens that were the ones drawn: steps of one sequence saved
    num_verified_tokens: int = 0  # rows for tokens of earlier answers
    num_kept_tokens: int = 0  # tokens of earlier answers that were drawn again
    num_parted_tokens: int = 0  # tokens of earlier answers from the first one on that was not: thrown away
    verify_seconds: float = 0.0  # of step_seconds, the share of the rows of earlier answers and what they follow
    speculation_seconds: float = 0.0  # finding drafts and making room for them
    jump_forward_seconds: float = 0.0  # planning jumps and making room for them; part of:
    grammar_seconds: float = 0.0  # masks, forced text and jumps
    num_receipts: int = 0  # answers that were given a receipt
    receipt_seconds: float = 0.0  # processor time that making them took
    step_seconds: float = 0.0
    control_bytes: int = 0  # sent by the controller of a replica to its followers
    control_messages: int = 0  # likewise: one a step and follower, and a few
    control_seconds: float = 0.0  # that the controller spent writing, sending and reading messages

    def as_dict(self) -> dict[str, float]:
        return asdict(self)
