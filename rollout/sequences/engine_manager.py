"""The authoritative state of sequences, on the controller: requests, stop conditions, text and outputs."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from operator import attrgetter

from ..completion import UNNAMED_VERSION, FinishReason, NextToken
from ..grammars.jump import Jump
from .detokenizer import StopRegexTimeout, Undecodable
from .manager import TAKES_NO_RESULT, SequenceManager
from .output_record import OutputRecord, RecordedJump, ScoredToken
from .request import Request
from .sequence import Sequence, State
from .step import NewToken, ScheduledSequence, SequenceResult


class EngineSequenceManager(SequenceManager):
    """The authoritative manager, on the controller: requests, stop conditions, detokenising and outputs."""

    def __init__(self, eos_token_ids: frozenset[int], max_model_len: int, num_stages: int = 1) -> None:
        super().__init__(num_stages)
        self.eos_token_ids = eos_token_ids
        self.max_model_len = max_model_len
        self.weight_version = UNNAMED_VERSION
        self.weight_digest: str | None = None
        self.epoch = 0  # the ledger's
        self._requests: dict[str, Request] = {}
        # Ids of live samples by the ids of the request and the prompt that they are samples of, where those are others.
        self._samples: dict[str, dict[str, None]] = {}
        self.num_constrained = 0  # live requests that follow a grammar

    def add(self, request: Request) -> None:
        """Register a new request. Raises ValueError if a live request has its id."""
        self._register(request.sequence, request.num_retractions)
        self._requests[request.id] = request
        for name in _other_names(request):
            self._samples.setdefault(name, {})[request.id] = None
        self.num_constrained += request.grammar is not None

    def request(self, id: str) -> Request:
        """Return the live request of that id. Raises ValueError for an unknown id."""
        request = self._requests.get(id)
        if request is None:
            raise ValueError(f"no live sequence {id!r}")
        return request

    def requests_of(self, items: Iterable[ScheduledSequence]) -> dict[str, Request]:
        """Return the live requests of these shares of a step, by id, in order."""
        requests, found = self._requests, dict[str, Request]()
        for item in items:
            found[item.id] = requests[item.id]
        return found

    def takes(self, result: SequenceResult, request: Request) -> bool:
        """Return whether a result of a step that was launched for `request` is still valid.

        It is if the request is live and was not preempted since.
        """
        is_same = self._requests.get(result.id) is request and request.num_retractions == result.incarnation
        return is_same and request.sequence.state not in TAKES_NO_RESULT

    def requests(self) -> list[Request]:
        """Return the live requests in order of arrival."""
        return list(self._requests.values())

    def requests_named(self, rid: str) -> list[Request]:
        """Return the live request with this id and the live samples of the request with this id, in order of
        arrival."""
        ids = [id for id in (rid, *self._samples.get(rid, ())) if id in self._requests]
        return sorted((self._requests[id] for id in ids), key=attrgetter("arrival_index"))

    def finish(self, id: str, reason: FinishReason) -> None:
        """End a live sequence for `reason`, from any live state. An unsettled jump is undone."""
        sequence = self.sequence(id)
        sequence.move(State.FINISHED)
        sequence.undo_jump()
        self._requests[id].finish_reason = reason

    def preempt(self, id: str) -> None:
        super().preempt(id)
        request = self._requests[id]
        request.num_retractions += 1
        request.in_flight.forget()
        request.record.forget_scored()
        request.record.kept_kv = ()

    def keep_kv(self) -> None:
        """Note in each live request that its KV stays at a commit, which comes next. No step is in flight."""
        for request in self._requests.values():
            if num_rows := request.sequence.num_tokens_step_processed:
                request.record.keep_kv(self.weight_version, self.weight_digest, num_rows)

    def free(self, id: str) -> None:
        super().free(id)
        request = self._requests.pop(id)
        for name in _other_names(request):
            self._samples[name].pop(id, None)
            if not self._samples[name]:
                del self._samples[name]
        self.num_constrained -= request.grammar is not None

    def _ignore(self, id: str, why: str) -> None:
        super()._ignore(id, why)
        self._requests[id].finish_reason = FinishReason("ignored", message=why)

    def _exhaust(self, id: str, why: str) -> None:
        length = len(self._requests[id].record.logprobs)
        self.finish(id, FinishReason("length", length=length, message=why))

    def _on_result(self, sequence: Sequence, result: SequenceResult, jump: Jump) -> bool:
        request = self._requests[sequence.id]
        if result.prompt_logprobs:
            request.record.add_prompt(result)
        if result.token_id is None:
            if sequence.jump_start is not None:
                self._score(request, result, sequence.token_ids[sequence.jump_start :])
            return False
        if request.params.max_new_tokens == 0:  # rescoring: the prompt is done, the sampled token is dropped
            sequence.token_ids.pop()
            assert result.logprob is not None
            request.next_token = NextToken(result.token_id, result.logprob, result.top_logprobs, result.listed_logprobs)
            self.finish(sequence.id, FinishReason("length", length=0))
            return True
        record = request.record
        if not jump.token_ids and not result.accepted:
            record.add_sampled(result)
            record.tag_token(self.weight_version, self.weight_digest, self.epoch, record.kept_kv)
            reason = self._why_finished(request, result.token_id)
            if reason is not None:
                self.finish(sequence.id, reason)
            return reason is not None
        if jump.token_ids:
            self._score(request, result, jump.token_ids)
            if request.may_be_rewritten:
                at = len(record.logprobs) - jump.num_rolled_back
                record.jumps.append(RecordedJump(at, sequence.newest_replaced, jump.token_ids))
        drawn = (*result.accepted, result.sampled())
        scored = [self._scored(record, token) for token in drawn]
        for token, version, digest, epoch, kept_kv in (*record.begin_tokens(jump), *scored):
            record.add(token)
            record.tag_token(version, digest, epoch, kept_kv)
            reason = self._why_finished(request, token.token_id)
            if reason is not None:
                request.cut_output(len(record.logprobs))  # the step's further tokens are dropped
                self.finish(sequence.id, reason)
                return True
        return False

    def _score(self, request: Request, result: SequenceResult, jump_ids: SequenceOf[int]) -> None:
        """Note the scores of a jump's next tokens. jump_ids: all of its tokens."""
        record = request.record
        record.num_jump_steps += 1
        record.scored += [self._scored(record, token) for token in result.jumped(jump_ids[len(record.scored) :])]

    def _scored(self, record: OutputRecord, token: NewToken) -> ScoredToken:
        return ScoredToken(token, self.weight_version, self.weight_digest, self.epoch, record.kept_kv)

    def _why_finished(self, request: Request, token_id: int) -> FinishReason | None:
        """Check the stop conditions that need no text at the newest recorded token; returns the reason or None.

        A stop token gives "stop" also at the last allowed length.
        """
        num_output, params = len(request.record.logprobs), request.params
        if len(request.record.kept_ids) > (limit := request.options.max_kept_ids):
            why = f"the filters kept more than {limit} tokens to report (max_kept_ids)"
            return FinishReason("abort", message=why, by_engine=True)
        if token_id in params.stop_ids or (token_id in self.eos_token_ids and not params.ignore_eos):
            return FinishReason("stop", matched=token_id)
        num_tokens = request.sequence.num_prompt_tokens + num_output
        if num_output >= params.max_new_tokens or num_tokens >= self.max_model_len:
            return FinishReason("length", length=num_output)
        return None

    def is_stop(self, request: Request, token_id: int) -> bool:
        """Return whether the token ends the request's output."""
        params = request.params
        return token_id in params.stop_ids or (not params.ignore_eos and token_id in self.eos_token_ids)

    def deliver(self, request: Request) -> bool:
        """Decode the newest step's tokens to text; returns whether the sequence is finished.

        The text may complete a stop string, which ends the output before the last of these tokens. Called after
        `on_step_completed`, while the next step may be running already: that step's result is then dropped.
        """
        record = request.record
        num_new, record.num_undelivered = record.num_undelivered, 0
        if request.detokenizer is None:
            return request.finish_reason is not None
        first = len(record.logprobs) - num_new
        token_ids = request.sequence.settled_output(first)[:num_new]
        if token_ids and not request.params.no_stop_trim and self.is_stop(request, token_ids[-1]):
            del token_ids[-1]
        if token_ids:
            reason = None
            try:
                num_replaced = record.newest_jump.num_rolled_back
                if (matched := request.detokenizer.append(token_ids, num_replaced)) is not None:
                    reason = FinishReason("stop", matched=matched.stop)
                    request.cut_output(matched.num_tokens)
            except (StopRegexTimeout, Undecodable) as error:  # only the request of this pattern or token ends
                reason = FinishReason("abort", message=str(error), by_engine=True)
            if reason is not None and request.finish_reason is None:
                self.finish(request.id, reason)
            elif reason is not None:  # a stop string in the last allowed token is a stop, not a length
                request.finish_reason = reason
        return request.finish_reason is not None


def _other_names(request: Request) -> set[str]:
    """Return the ids of the request and of the prompt that this is a sample of, without its own id."""
    return {request.base_id, request.prompt_id} - {request.id, ""}
