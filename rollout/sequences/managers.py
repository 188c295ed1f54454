"""All changes of a sequence's state go through a manager.

Two managers consume the same events, so that replaying one log gives equal state: the controller's is authoritative
(stop conditions, detokenising, outputs), a worker's stands on every rank (execution, block tables, stage progress).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from ..completion import FinishReason, NextToken
from .block_tables import BlockTables
from .detokenizer import StopRegexTimeout
from .request import Request
from .sequence import TERMINAL, Sequence, State
from .step import ScheduledSequence, ScheduleOutput, SequenceResult

_TAKES_NO_RESULT = TERMINAL | {State.WAITING_PREEMPT}


class SequenceManager:
    """Registry of live sequences and the events that move them. Base of both managers.

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
        """The live sequence of that id. Raises ValueError for an unknown one."""
        sequence = self._sequences.get(id)
        if sequence is None:
            raise ValueError(f"no live sequence {id!r}")
        return sequence

    def on_schedule(self, output: ScheduleOutput) -> None:
        """Take a scheduling decision: ignored, exhausted, preempted, then scheduled sequences."""
        for id, why in output.ignored:
            self._ignore(id, why)
        for id, why in output.exhausted:
            self._exhaust(id, why)
        for id in output.preempted:
            self.preempt(id)
        for item in output.scheduled:
            self._on_scheduled(item)

    def on_stage_completed(self, items: Iterable[ScheduledSequence]) -> None:
        """These rows went through this stage. Does nothing with one stage: the step's end counts them."""
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
        """These rows went through all stages. Returns the ids that finished, as far as no text is needed to tell.

        Results of sequences that are gone, or were preempted since, are dropped.
        """
        finished = []
        has_one_stage = self.num_stages == 1
        for result in results:
            sequence = self._live(result.id, result.incarnation)
            if sequence is None:
                continue
            if has_one_stage:
                sequence.stage_processed(result.num_tokens)
            sequence.step_processed(result.num_tokens)
            # In a pipeline a chunk inside the prompt was paused when it left this stage, and RUNNING is the next one.
            was_last = has_one_stage or result.token_id is not None
            if was_last and sequence.state is State.RUNNING:
                sequence.move(State.PAUSED)
            if result.token_id is not None:
                sequence.settle_jump()
                sequence.token_ids.append(result.token_id)
            if self._on_result(sequence, result):
                finished.append(sequence.id)
        return finished

    def on_step_cancelled(self, items: Iterable[ScheduledSequence]) -> None:
        """These were scheduled and did not run: they keep their blocks and wait for the next step."""
        for item in items:
            self.sequence(item.id).move(State.PAUSED)

    def preempt(self, id: str) -> None:
        """The sequence gave its blocks back; its tokens, prompt boundary and log-probabilities stay."""
        sequence = self.sequence(id)
        sequence.move(State.WAITING_PREEMPT)
        sequence.forget_progress()
        sequence.undo_jump()  # nothing of it was answered
        self._incarnations[id] += 1

    def free(self, id: str) -> None:
        """Forget a sequence, live or ended."""
        sequence = self.sequence(id)
        if not sequence.is_terminal:
            sequence.move(State.FINISHED)
        del self._sequences[id], self._incarnations[id]

    def state_hash(self) -> str:
        """SHA-256 over everything the two managers must agree on: ids, states, tokens, counters, incarnations.

        A sequence that still waits for its first step is left out: no worker has heard of it.
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
        """Whether a result of that incarnation would be taken."""
        return self._live(id, incarnation) is not None

    def _live(self, id: str, incarnation: int) -> Sequence | None:
        sequence = self._sequences.get(id)
        if sequence is None or self._incarnations[id] != incarnation or sequence.state in _TAKES_NO_RESULT:
            return None
        return sequence

    def _on_scheduled(self, item: ScheduledSequence) -> None:
        sequence = self.sequence(item.id)
        sequence.move(State.RUNNING)
        has_jump = bool(item.jump.token_ids)
        if has_jump:
            sequence.give_up_progress(item.start)
        if (num_cached := item.start - sequence.num_tokens_stage_processed) > 0:  # their KV was there already
            sequence.stage_processed(num_cached)
            sequence.step_processed(num_cached)
        if has_jump:
            sequence.begin_jump(item.jump.num_rolled_back, item.jump.token_ids)

    def _on_result(self, sequence: Sequence, result: SequenceResult) -> bool:
        """What this manager does with a result beyond counting. Returns whether the sequence is finished."""
        return False

    def _ignore(self, id: str, why: str) -> None:
        if id in self._sequences:
            self.sequence(id).move(State.IGNORED)

    def _exhaust(self, id: str, why: str) -> None:
        self.sequence(id).move(State.FINISHED)


class EngineSequenceManager(SequenceManager):
    """The authoritative manager, on the controller: requests, stop conditions, detokenising, what was answered."""

    def __init__(self, eos_token_ids: frozenset[int], max_model_len: int, num_stages: int = 1) -> None:
        super().__init__(num_stages)
        self.eos_token_ids = eos_token_ids
        self.max_model_len = max_model_len
        self.weight_version = "default"
        self.weight_digest: str | None = None
        self._requests: dict[str, Request] = {}
        self.num_constrained = 0  # live requests that follow a grammar

    def add(self, request: Request) -> None:
        """Register a new request. Raises ValueError when a live one has its id."""
        self._register(request.sequence)
        self._requests[request.id] = request
        self.num_constrained += request.grammar is not None

    def request(self, id: str) -> Request:
        """The live request of that id. Raises ValueError for an unknown one."""
        request = self._requests.get(id)
        if request is None:
            raise ValueError(f"no live sequence {id!r}")
        return request

    def requests_of(self, items: Iterable[ScheduledSequence]) -> dict[str, Request]:
        """The live requests of these shares of a step, by id, in order."""
        requests = self._requests
        return {item.id: requests[item.id] for item in items}

    def takes(self, result: SequenceResult, request: Request) -> bool:
        """Whether this result, of a step that was launched for `request`, would be taken: the request lives, and was
        not preempted since."""
        is_same = self._requests.get(result.id) is request and request.num_retractions == result.incarnation
        return is_same and request.sequence.state not in _TAKES_NO_RESULT

    def requests(self) -> list[Request]:
        """Live requests in order of arrival."""
        return list(self._requests.values())

    def finish(self, id: str, reason: FinishReason) -> None:
        """End a live sequence for `reason`, from any live state."""
        self.sequence(id).move(State.FINISHED)
        self._requests[id].finish_reason = reason

    def preempt(self, id: str) -> None:
        super().preempt(id)
        self._requests[id].num_retractions += 1
        self._requests[id].in_flight.forget()

    def free(self, id: str) -> None:
        super().free(id)
        self.num_constrained -= self._requests.pop(id).grammar is not None

    def _ignore(self, id: str, why: str) -> None:
        super()._ignore(id, why)
        self._requests[id].finish_reason = FinishReason("ignored", message=why)

    def _exhaust(self, id: str, why: str) -> None:
        length = self.sequence(id).num_output_tokens
        self.finish(id, FinishReason("length", length=length, message=why))

    def _on_result(self, sequence: Sequence, result: SequenceResult) -> bool:
        request = self._requests[sequence.id]
        if result.prompt_logprobs:
            request.record.add_prompt(result)
        if result.token_id is None:
            return False
        if request.params.max_new_tokens == 0:  # rescoring: the prompt is done, the sampled token is not wanted
            sequence.token_ids.pop()
            assert result.logprob is not None
            request.next_token = NextToken(result.token_id, result.logprob, result.top_logprobs, result.listed_logprobs)
            self.finish(sequence.id, FinishReason("length", length=0))
            return True
        record = request.record
        if not result.jump.token_ids:
            record.add_sampled(result)
            record.tag_token(self.weight_version, self.weight_digest)
            reason = self._why_finished(request, result.token_id)
            if reason is not None:
                self.finish(sequence.id, reason)
            return reason is not None
        record.begin_tokens(result.jump)
        for token in result.tokens():
            record.add(token)
            record.tag_token(self.weight_version, self.weight_digest)
            reason = self._why_finished(request, token.token_id)
            if reason is not None:
                request.cut_output(len(record.logprobs))  # what else the same step brought is not wanted
                self.finish(sequence.id, reason)
                return True
        return False

    def _why_finished(self, request: Request, token_id: int) -> FinishReason | None:
        """Stop conditions that need no text, at the newest recorded token: a stop token ends with "stop" also at the
        last allowed length."""
        num_output, params = len(request.record.logprobs), request.params
        if token_id in params.stop_token_ids or (token_id in self.eos_token_ids and not params.ignore_eos):
            return FinishReason("stop", matched=token_id)
        num_tokens = request.sequence.num_prompt_tokens + num_output
        if num_output >= params.max_new_tokens or num_tokens >= self.max_model_len:
            return FinishReason("length", length=num_output)
        return None

    def _is_stop(self, request: Request, token_id: int) -> bool:
        params = request.params
        return token_id in params.stop_token_ids or (not params.ignore_eos and token_id in self.eos_token_ids)

    def deliver(self, request: Request) -> bool:
        """Turn the newest step's tokens into text, which may complete a stop string and so end the output before the
        last of them; returns whether the sequence is finished.

        Comes after `on_step_completed`, while the next step may be running already: then that step's result is dropped.
        """
        record = request.record
        num_new, record.num_undelivered = record.num_undelivered, 0
        if request.detokenizer is None:
            return request.finish_reason is not None
        first = len(record.logprobs) - num_new
        token_ids = request.sequence.settled_output(first)[:num_new]
        if token_ids and not request.params.no_stop_trim and self._is_stop(request, token_ids[-1]):
            del token_ids[-1]
        if token_ids:
            reason = None
            try:
                num_replaced = record.newest_jump.num_rolled_back
                if (matched := request.detokenizer.append(token_ids, num_replaced)) is not None:
                    reason = FinishReason("stop", matched=matched.stop)
                    request.cut_output(matched.num_tokens)
            except StopRegexTimeout as error:  # this pattern runs wild: its request ends, the batch goes on
                reason = FinishReason("abort", message=str(error))
            if reason is not None and request.finish_reason is None:
                self.finish(request.id, reason)
            elif reason is not None:  # a stop string in the last allowed token is a stop, not a length
                request.finish_reason = reason
        return request.finish_reason is not None


class WorkerSequenceManager(SequenceManager):
    """The manager on every rank: what has to run next, and where its KV stands."""

    def __init__(self, num_stages: int = 1) -> None:
        super().__init__(num_stages)
        self.block_tables = BlockTables()

    def block_table(self, id: str) -> list[int]:
        return self.block_tables.blocks(id)

    def preempt(self, id: str) -> None:
        super().preempt(id)
        self.block_tables.cut(id, 0)

    def free(self, id: str) -> None:
        super().free(id)
        self.block_tables.drop(id)

    def _on_scheduled(self, item: ScheduledSequence) -> None:
        if item.id not in self._sequences:
            assert item.token_ids is not None, f"first sight of {item.id} without its tokens"
            self._register(Sequence(item.id, item.token_ids), item.incarnation)
            self.block_tables.add(item.id)
        super()._on_scheduled(item)
        if item.num_blocks_kept is not None:
            self.block_tables.cut(item.id, item.num_blocks_kept)
        if item.new_blocks:
            self.block_tables.append(item.id, item.new_blocks)
