"""The samples of one prompt of a batch, and the receiver of their answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from ...kernels.sampling.draws import derive_seed
from ..completion import Completion, StreamChunk
from ..control.desk.intake import CheckedPrompt, Settings
from ..control.desk.waiting import renewal_of
from ..engine import Engine
from ..errors import EngineStopped
from ..grammars.matcher import CompiledGrammar
from ..request_options import Begun, RequestOptions
from ..sampling_params import SamplingParams

Spans = Sequence[tuple[str, int]]  # weight versions of a sample, in order, and how many tokens each drew


class ReplayDiverged(ValueError):
    """A sample that is drawn again by a schedule has not the length that the schedule says, or waits for weights that
    its turn comes before."""


@dataclass(eq=False)
class Group:
    """The samples of one prompt. Its methods are called under the engine's lock."""

    engine: Engine
    prompt: CheckedPrompt
    params: SamplingParams
    grammar: CompiledGrammar | None  # of the parameters: kept, so that it need not be compiled under the lock
    options: RequestOptions
    on_answer: Callable[[Group], None]
    on_error: Callable[[Exception], None]
    begun_in: int | None = None  # epoch of its submission; None: not submitted yet
    answers: dict[int, Completion] = field(default_factory=dict)  # by index of the sample
    epochs: dict[int, int | None] = field(default_factory=dict)  # that drew them; None: not one alone
    is_taken: bool = False
    num_counted: int = 0  # of the places that samples have ahead, those of this group

    @property
    def num_open(self) -> int:
        """Number of samples that were submitted and have not ended."""
        return 0 if self.begun_in is None else self.params.n - len(self.answers)

    @property
    def num_old(self) -> int:
        """Number of answers that are not wholly of the present epoch."""
        now = self.engine.epoch
        return sum(epoch != now for epoch in self.epochs.values())

    @property
    def awaits(self) -> str | None:
        """The sample that waits for other weights than the present ones, in words; None where none does."""
        return None

    def submit(self) -> None:
        """Queue the samples. Where this raises they are not submitted."""
        self._queue([self.prompt], [self.params], [self.options])
        self.begun_in = self.engine.epoch

    def advance(self) -> None:
        """Queue what the present weights are to draw, beyond what runs."""

    def renew_old(self) -> bool:
        """Queue answers of older weights to be drawn again; returns whether there are some."""
        now = self.engine.epoch
        old = [index for index, epoch in self.epochs.items() if epoch != now]
        if old:
            asked = [renewal_of(self.answers[index]) for index in old]
            for index in old:
                del self.answers[index], self.epochs[index]
            self._queue(*zip(*asked, strict=True))
        return bool(old)

    def forget(self) -> None:
        """Forget all answers; the group is not submitted then."""
        self.answers.clear()
        self.epochs.clear()
        self.begun_in = None

    def on_chunk(self, chunk: StreamChunk) -> None:
        """Take an answer; see `Listener`."""
        assert chunk.completion is not None  # nothing is streamed
        self._keep(chunk.completion)
        self.on_answer(self)

    def on_failure(self, error: EngineStopped) -> None:
        """Take the error that ended the loop; see `Listener`."""
        self.on_error(error)

    def _keep(self, answer: Completion) -> None:
        index = self._number_of(answer)
        self.answers[index] = answer
        # One that began under other weights keeps their tokens, or KV of theirs, at a commit that does not verify.
        epoch = self.engine.epoch if answer.epoch is None else answer.epoch
        self.epochs[index] = None if answer.kv_starts else epoch

    def _number_of(self, answer: Completion) -> int:
        """Return the place of an answer among the group's. A renewed or begun one has the index that it had before."""
        return answer.index if self.params.n > 1 else 0

    def _queue(
        self, prompts: Sequence[CheckedPrompt], params: Sequence[SamplingParams], options: Sequence[RequestOptions]
    ) -> None:
        settings = [Settings(one, self.grammar) for one in params]
        self.engine.requests.submit(prompts, settings, self, options=options, streamed=False)


@dataclass(eq=False)
class ReplayedGroup(Group):
    """A group of which each version of the weights draws as many tokens of each sample as a schedule says."""

    spans: Sequence[Spans] = ()  # of each sample
    parts: dict[int, Completion] = field(default_factory=dict)  # what older weights have drawn, by sample
    running: set[int] = field(default_factory=set)  # samples of which a part is being drawn

    @property
    def awaits(self) -> str | None:
        """The sample that waits for other weights than the present ones, in words; None where none does."""
        for index, spans in enumerate(self.spans):
            if self.begun_in is not None and index not in self.answers and index not in self.running:
                num_drawn = self.parts[index].num_completion_tokens if index in self.parts else 0
                version, _ = _next_span(spans, num_drawn)
                whose = f"sample {index} of a prompt of {len(self.prompt.token_ids)} tokens"
                return f"{whose}: its token {num_drawn} is of {version!r}"
        return None

    def submit(self) -> None:
        """Queue what the present weights are to draw."""
        self.begun_in = self.engine.epoch
        self.advance()

    def advance(self) -> None:
        """Queue what the present weights are to draw, beyond what runs."""
        if self.begun_in is None:
            return
        for index, spans in enumerate(self.spans):
            part = self.parts.get(index)
            num_drawn = 0 if part is None else part.num_completion_tokens
            version, end = _next_span(spans, num_drawn)
            if index in self.answers or index in self.running or version != self.engine.weight_version:
                continue
            is_last = end == sum(num for _, num in spans)
            self.running.add(index)
            num_tokens = self.params.max_new_tokens if is_last else end
            least = min(self.params.min_new_tokens, num_tokens)
            self._queue(
                [self.prompt],
                [replace(self.params, n=1, max_new_tokens=num_tokens, min_new_tokens=least)],
                [replace(self.options, begun=self._begun(index, part))],
            )

    def _begun(self, index: int, part: Completion | None) -> Begun:
        if part is None:
            assert self.params.sampling_seed is not None  # checked where the group was made
            return Begun((), (), (), derive_seed(self.params.sampling_seed, index), index)
        return Begun.of(part)

    def _keep(self, answer: Completion) -> None:
        index, spans = answer.index, self.spans[answer.index]
        self.running.discard(index)
        num_before = 0 if (part := self.parts.get(index)) is None else part.num_completion_tokens
        _, end = _next_span(spans, num_before)
        if answer.num_completion_tokens != end:
            num = len(self.prompt.token_ids)
            found = f"sample {index} of a prompt of {num} tokens has {answer.num_completion_tokens} tokens"
            why = f"after version {answer.weight_version}, and {end} in the schedule: that is of another run"
            self.on_error(ReplayDiverged(f"{found} {why}"))
        elif end == sum(num for _, num in spans):
            self.answers[index], self.epochs[index] = answer, self.engine.epoch
        else:
            self.parts[index] = answer
            self.advance()


def _next_span(spans: Spans, num_drawn: int) -> tuple[str, int]:
    """Return the version that draws the token behind the first `num_drawn`, and the tokens at its end."""
    end = 0
    for version, num in spans:
        end += num
        if end > num_drawn:
            return version, end
    return "no version", end
