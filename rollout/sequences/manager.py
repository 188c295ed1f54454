"""The base of both managers, through which all changes of sequences' states go.

Two managers consume the same events, so that a replay of one log gives equal state: the controller's is authoritative
(stop conditions, detokenising, outputs), and every rank has a worker's (execution, block tables, stage progress).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from ..grammars.jump import NO_JUMP, Jump
from .sequence import TERMINAL, Sequence, State
from .step import ScheduledSequence, ScheduleOutput, SequenceResult

TAKES_NO_RESULT = TERMINAL | {State.WAITING_PREEMPT}


class SequenceManager:
    """The registry of live sequences and the events that change their states. Base of both managers.

    With one stage both progress counters advance together, at `on_step_completed`. With several, `on_stage_completed`
    advances the stage counter and pauses the sequence early, so that its next chunk can enter this stage while the
    present one is in the next.
    """

    def __init__(self, num_stages: int = 1) -> None:
        self.num_stages = num_stages
        self._sequences: dict[str, Sequence] = {}
        self._incarnations: dict[str, int] = {}

    def __contains__(self, id: str) -> bool:
        return id in self._sequences

    def __len__(self) -> int:
        return len(self._sequences)

    def sequence(self, id: str) -> Sequence:
        """Return the live sequence of that id. Raises ValueError for an unknown id."""
        sequence = self._sequences.get(id)
        if sequence is None:
            raise ValueError(f"no live sequence {id!r}")
        return sequence

    def on_schedule(self, output: ScheduleOutput) -> None:
        """Apply a schedule: ignored, exhausted, preempted, then scheduled sequences."""
        for id, why in output.ignored:
            self._ignore(id, why)
        for id, why in output.exhausted:
            self._exhaust(id, why)
        for id in output.preempted:
            self.preempt(id)
        for item in output.scheduled:
            self._on_scheduled(item)

    def on_stage_completed(self, items: Iterable[ScheduledSequence]) -> None:
        """Count rows that went through this stage. Does nothing with one stage: the step's end counts them."""
        if self.num_stages == 1:
            return
        for item in items:
            sequence = self._live(item.id, item.incarnation)
            if sequence is None:
                continue
            sequence.stage_processed(item.num_tokens)
            if sequence.is_prefilling or sequence.num_tokens_stage_processed < sequence.num_tokens:
                sequence.move(State.PAUSED)  # more known tokens: the next chunk may enter this stage now

    def on_step_completed(self, results: Iterable[SequenceResult]) -> list[str]:
        """Count rows that went through all stages. Returns the ids that finished by conditions that need no text.

        Results of sequences that have ended, or were preempted since, are dropped. Accepted tokens of a draft count as
        tokens whose rows ran.
        """
        finished = []
        has_one_stage = self.num_stages == 1
        for result in results:
            sequence = self._live(result.id, result.incarnation)
            if sequence is None:
                continue
            jump = NO_JUMP
            if result.token_id is not None:
                if sequence.has_jump:
                    jump = sequence.settle_jump()
                if result.accepted:
                    sequence.token_ids += [token.token_id for token in result.accepted]
                sequence.token_ids.append(result.token_id)
            num_accepted = len(result.accepted)  # in a pipeline this stage has not counted them either
            if has_one_stage:
                sequence.processed(result.num_tokens + num_accepted)
            else:
                if num_accepted:
                    sequence.stage_processed(num_accepted)
                sequence.step_processed(result.num_tokens + num_accepted)
            # In a pipeline, a sequence inside its prompt was paused when its chunk left this stage; if it is RUNNING
            # now, then for its next chunk.
            was_last = has_one_stage or result.token_id is not None
            if was_last and sequence.state is State.RUNNING:
                sequence.move(State.PAUSED)
            if self._on_result(sequence, result, jump):
                finished.append(sequence.id)
        return finished

    def on_step_cancelled(self, items: Iterable[ScheduledSequence]) -> None:
        """Pause sequences that were scheduled and did not run. They keep their blocks and wait for the next step."""
        for item in items:
            self.sequence(item.id).move(State.PAUSED)

    def preempt(self, id: str) -> None:
        """Reset a sequence whose blocks were freed. Its tokens, prompt boundary and log-probabilities stay."""
        sequence = self.sequence(id)
        sequence.move(State.WAITING_PREEMPT)
        sequence.forget_progress()
        sequence.undo_jump()  # none of its tokens was delivered; it begins again once the rows before it have run
        self._incarnations[id] += 1

    def free(self, id: str) -> None:
        """Remove a sequence, live or ended."""
        sequence = self.sequence(id)
        if not sequence.is_terminal:
            sequence.move(State.FINISHED)
        del self._sequences[id], self._incarnations[id]

    def state_hash(self) -> str:
        """Return the SHA-256 of the state that both managers share: ids, states, tokens, counters, incarnations.

        A sequence that still waits for its first step is left out: no worker knows it.
        """
        digest = hashlib.sha256()
        for id in sorted(self._sequences):
            s = self._sequences[id]
            if s.state in (State.WAITING, State.IGNORED):
                continue
            record = (
                id,
                s.state.name,
                s.num_prompt_tokens,
                s.token_ids,
                s.num_tokens_step_processed,
                s.num_tokens_stage_processed,
                self._incarnations[id],
            )
            digest.update(repr(record).encode())
        return digest.hexdigest()

    def _register(self, sequence: Sequence, incarnation: int = 0) -> None:
        if sequence.id in self._sequences:
            raise ValueError(f"duplicate request id {sequence.id!r}: a live request has it")
        self._sequences[sequence.id] = sequence
        self._incarnations[sequence.id] = incarnation

    def is_live(self, id: str, incarnation: int) -> bool:
        """Return whether a result of that incarnation is still valid."""
        return self._live(id, incarnation) is not None

    def _live(self, id: str, incarnation: int) -> Sequence | None:
        sequence = self._sequences.get(id)
        if sequence is None or self._incarnations[id] != incarnation or sequence.state in TAKES_NO_RESULT:
            return None
        return sequence

    def _on_scheduled(self, item: ScheduledSequence) -> None:
        sequence = self.sequence(item.id)
        sequence.move(State.RUNNING)
        has_jump = bool(item.jump.token_ids)
        if has_jump:
            sequence.give_up_progress(item.start)
        if (num_cached := item.start - sequence.num_tokens_stage_processed) > 0:  # their KV was cached
            sequence.processed(num_cached)
        if has_jump:
            sequence.begin_jump(item.jump.num_rolled_back, item.jump.token_ids)

    def _on_result(self, sequence: Sequence, result: SequenceResult, jump: Jump) -> bool:
        """Record a result beyond its counts. jump: the one that its sampled token has settled. Returns whether the
        sequence is finished."""
        return False

    def _ignore(self, id: str, why: str) -> None:
        if id in self._sequences:
            self.sequence(id).move(State.IGNORED)

    def _exhaust(self, id: str, why: str) -> None:
        self.sequence(id).move(State.FINISHED)
