"""Batches of samples that are begun before their turn, so that rollouts run ahead of training.

A sample is a function of its prompt, seed, settings and weights. One that was begun under older weights is therefore
drawn again under the present ones: what is in flight at a commit by the commit itself (`in_flight="verify"`), what has
ended before it when its batch's turn comes. As far as the tokens come out equal that costs a prefill. A batch is
always the samples that the present weights draw, whatever was begun when.

The other policies are those of asynchronous training elsewhere: "keep" returns samples of older weights as they are,
"drop" draws those groups anew that were begun more than `max_lag` commits ago.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from itertools import takewhile
from typing import Literal

from ..completion import Completion
from ..control.desk.intake import Params, Prompt, as_params
from ..engine import Engine
from ..errors import EngineStopped
from ..request_options import RequestOptions
from .group import Group, ReplayDiverged, ReplayedGroup, Spans

OnCommitPolicy = Literal["verify", "keep", "drop"]


@dataclass(frozen=True)
class AheadCounts:
    """The cost of verifying and dropping so far, and the time of an engine's steps."""

    num_verified_tokens: int = 0  # rows for tokens of older weights
    num_kept_tokens: int = 0  # of those tokens, the ones that the newer weights drew again
    num_parted_tokens: int = 0  # the ones from the first difference on: thrown away
    num_dropped_tokens: int = 0  # of samples that "drop" has thrown away
    step_seconds: float = 0.0
    verify_seconds: float = 0.0  # of these, the share of the rows that verified

    def __sub__(self, other: AheadCounts) -> AheadCounts:
        """Return what was added since `other`."""
        return AheadCounts(*(mine - its for mine, its in zip(astuple(self), astuple(other), strict=True)))


class RolloutsAhead:
    """The batches of one engine, in the order of their turns.

    Example, with one batch begun beyond the current one:

        ahead = RolloutsAhead(engine)
        for step in range(num_steps):
            for coming in range(step, min(step + 2, num_steps)):
                if coming not in ahead:
                    ahead.begin(coming, *prompts_and_params(coming))
            completions = ahead.finish(step)
            ...  # train, and commit with in_flight="verify"

    All ranks of a replica make one; `begin` counts on its controller alone, and `finish` is called on all together.
    """

    def __init__(self, engine: Engine, on_commit: OnCommitPolicy = "verify", max_lag: int | None = None) -> None:
        """Begin nothing yet. max_lag: for "drop", the largest number of commits that a kept group has seen."""
        if (max_lag is not None) != (on_commit == "drop"):
            raise ValueError(f'max_lag goes with on_commit="drop", not {on_commit!r} and max_lag={max_lag}')
        self._engine = engine
        self._on_commit, self._max_lag = on_commit, max_lag
        # All of these are guarded by the engine's lock.
        self._batches: dict[int, list[Group]] = {}
        self._coming: deque[Group] = deque()  # groups that may not have been submitted, in their order
        self._num_places, self._counted_in = 0, -1  # places that samples have, and the epoch in which all were counted
        self._width = 0  # number of sequences of the largest batch so far
        self._failure: Exception | None = None
        self._num_dropped_tokens = 0

    @property
    def verifies(self) -> bool:
        """Whether commits are to draw again what is in flight."""
        return self._on_commit == "verify"

    @property
    def counts(self) -> AheadCounts:
        """The counts so far."""
        metrics = self._engine.metrics
        return AheadCounts(
            metrics.num_verified_tokens, metrics.num_kept_tokens, metrics.num_parted_tokens, self._num_dropped_tokens,
            metrics.step_seconds, metrics.verify_seconds,
        )  # fmt: skip

    def __contains__(self, key: int) -> bool:
        """Return whether a batch was begun, and is not finished."""
        return key in self._batches

    def begin(
        self,
        key: int,
        prompts: Sequence[Prompt],
        params: Sequence[Params],
        options: Sequence[RequestOptions] | None = None,
        *,
        schedule: Sequence[Sequence[Spans]] | None = None,
    ) -> None:
        """Queue a batch behind the ones before it, without waiting.

        Its prompts run, in their order, as the batches before it leave places: there are as many as the largest batch
        has samples. Raises ValueError for a key that is taken and for bad prompts and settings; then nothing is queued.

        schedule: repeat another run: for each prompt and sample the weight versions and how many tokens each drew.
        Needs `sampling_seed`; `settle` is called before each commit.
        """
        engine = self._engine
        if not engine.is_controller:
            return
        if any(one is not None and not isinstance(one, Sequence) for one in (params, options)):
            raise ValueError("params and options are lists, of one for each prompt")
        options = options or [RequestOptions()] * len(prompts)
        if not prompts:
            raise ValueError(f"batch {key} has no prompts")
        if not len(prompts) == len(params) == len(options):
            raise ValueError(f"{len(prompts)} prompts, but {len(params)} params and {len(options)} options")
        if schedule is not None and len(schedule) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts, but a schedule of {len(schedule)}")
        spans: Sequence[Sequence[Spans] | None] = schedule or [None] * len(prompts)
        groups = [self._group(*asked) for asked in zip(prompts, params, options, spans, strict=True)]
        with engine.driver.lock:
            if key in self._batches:
                raise ValueError(f"batch {key} has been begun already")
            self._batches[key] = groups
            self._coming.extend(groups)
            self._width = max(self._width, sum(group.params.n for group in groups))
            try:
                self._feed()
            except BaseException:
                del self._batches[key]
                engine.requests.withdraw({group for group in groups if group.begun_in is not None})
                self._look_again()
                raise

    def finish(self, key: int) -> list[Completion]:
        """Return the samples of a batch, those of a prompt side by side; the batch is over then.

        Runs the steps itself where no thread does. With "verify" all of them are the present weights' samples, tokens
        and log-probabilities bit for bit. Raises KeyError for a batch that was not begun, ReplayDiverged for a schedule
        of another run, and EngineStopped.
        """
        return self._engine.waiting.together(lambda: self._take(key, 0, len(self._begun(key))))

    def finish_groups(self, key: int, first: int) -> list[Completion]:
        """Return the samples of the prompt `first` of a batch, while further ones of it still run, and those of the
        prompts behind it that are there already: a caller in another process waits for the engine once. The batch is
        over with its last prompt. Raises as `finish`, and IndexError."""
        return self._engine.waiting.together(lambda: self._take(key, first, first + 1, and_ready=True))

    def settle(self) -> None:
        """Wait until all that a schedule gives the present weights is drawn; before each commit of a run that is
        repeated. All ranks of a replica call it together."""
        self._engine.waiting.together(self._settle)

    def _settle(self) -> list[Completion]:
        engine = self._engine
        replayed = [g for batch in self._batches.values() for g in batch if isinstance(g, ReplayedGroup)]
        with engine.model.rollout_phase():
            with engine.driver.lock:
                self._advance()
            engine.driver.wait_until(lambda: self._failure is not None or not any(g.running for g in replayed))
        if self._failure is not None:
            raise self._failure
        return []

    def close(self) -> None:
        """Abort everything that was begun and not finished."""
        if not self._engine.is_controller:
            return
        with self._engine.driver.lock:
            groups = [group for batch in self._batches.values() for group in batch]
            self._batches.clear()
            self._coming.clear()
        self._engine.requests.withdraw(set(groups))
        with self._engine.driver.lock:
            self._look_again()

    # -- helpers; the caller holds the engine's lock, but for the first two -------------------------------------------

    def _group(self, prompt: Prompt, params: Params, options: RequestOptions, spans: Sequence[Spans] | None) -> Group:
        engine, checked = self._engine, as_params(params)
        # Later it is submitted by a thread that must not fail.
        read, (checked, grammar) = engine.requests.check(prompt, checked, options)
        given = (engine, read, checked, grammar, options, self._answered, self._fail)
        if spans is None:
            return Group(*given)
        if checked.sampling_seed is None or len(spans) != checked.n:
            raise ValueError(f"a schedule is of samples with a seed: {len(spans)} for n={checked.n}, "
                             f"sampling_seed={checked.sampling_seed}")  # fmt: skip
        return ReplayedGroup(*given, spans=spans)

    def _take(self, key: int, first: int, end: int, *, and_ready: bool = False) -> list[Completion]:
        """Wait for the prompts `first` to `end` - 1 of a batch. and_ready: take those behind them too that need no
        wait."""
        engine, batch = self._engine, self._begun(key)
        wanted = batch[first:end]
        if len(wanted) != end - first:
            raise IndexError(f"batch {key} has {len(batch)} prompts, not {end}")
        with engine.model.rollout_phase():
            with engine.driver.lock:
                self._drop_old()
                self._advance()
                for group in batch:
                    if group.begun_in is None:
                        group.submit()
                        self._count(group)
                self._renew_old(batch[first:])  # also those whose turn comes next
            while True:
                engine.driver.wait_until(lambda: self._is_over(wanted))
                with engine.driver.lock:
                    self._raise_failure(wanted)
                    if not self._renew_old(wanted):
                        ready = takewhile(self._is_ready, batch[end:] if and_ready else ())
                        return self._taken(key, [*wanted, *ready])

    def _begun(self, key: int) -> list[Group]:
        """Return a batch. Raises KeyError that says which there are."""
        if key not in self._batches:
            others = ", ".join(map(str, self._batches)) or "none"
            raise KeyError(f"batch {key} was not begun, or is finished already; begun and not finished: {others}")
        return self._batches[key]

    def _taken(self, key: int, wanted: Sequence[Group]) -> list[Completion]:
        """Return the answers of some prompts, and let others take their places."""
        for group in wanted:
            group.is_taken = True
            self._count(group)
        if all(group.is_taken for group in self._batches[key]):
            del self._batches[key]
        self._feed()
        return [group.answers[number] for group in wanted for number in range(group.params.n)]

    def _feed(self) -> None:
        """Submit the next groups, as far as there are places. An answer that is to be drawn again will need one.

        Called at each answer: it must cost the same however many groups there are.
        """
        if self._coming and self._counted_in != self._engine.epoch:  # answers have grown old
            self._counted_in = self._engine.epoch
            self._count(*(group for batch in self._batches.values() for group in batch))
        while self._coming:
            group = self._coming[0]
            if group.begun_in is None:
                others = self._num_places
                if others and others + group.params.n > self._width and not isinstance(group, ReplayedGroup):
                    return
                try:
                    group.submit()
                except EngineStopped as error:  # it is being closed, which ends the answers that call this
                    self._fail(error)
                    return
                self._count(group)
            self._coming.popleft()

    def _answered(self, group: Group) -> None:
        self._count(group)
        self._feed()

    def _count(self, *groups: Group) -> None:
        """Count the places of some groups anew: of their open samples, and of answers that are to be drawn again."""
        for group in groups:
            num = group.num_open + (group.num_old if self.verifies and not group.is_taken else 0)
            self._num_places += num - group.num_counted
            group.num_counted = num

    def _look_again(self) -> None:
        """Take all groups of the batches that there are, and their places, as they are now."""
        groups = [group for batch in self._batches.values() for group in batch]
        self._coming = deque(group for group in groups if group.begun_in is None)
        self._num_places = sum(group.num_counted for group in groups)
        self._count(*groups)

    def _advance(self) -> None:
        for batch in self._batches.values():
            for group in batch:
                group.advance()

    def _is_over(self, groups: Sequence[Group]) -> bool:
        """Return whether nothing more comes for these prompts under the present weights."""
        return self._failure is not None or all(group.awaits or not group.num_open for group in groups)

    def _raise_failure(self, groups: Sequence[Group]) -> None:
        """Raise what has gone wrong with a batch whose turn has come."""
        if self._failure is not None:
            raise self._failure
        if awaited := next(filter(None, (group.awaits for group in groups)), None):
            raise ReplayDiverged(
                f"the schedule is of another run: {awaited}, and its batch is finished under "
                f"{self._engine.weight_version!r}"
            )

    def _is_ready(self, group: Group) -> bool:
        """Return whether a prompt's samples are there, and as they have to be."""
        if group.is_taken or len(group.answers) < group.params.n:
            return False
        return not self.verifies or all(epoch == self._engine.epoch for epoch in group.epochs.values())

    def _renew_old(self, groups: Sequence[Group]) -> bool:
        """Draw answers of older weights again; returns whether there are some."""
        renewed = [group for group in groups if self.verifies and group.renew_old()]
        self._count(*renewed)
        return bool(renewed)

    def _drop_old(self) -> None:
        """Begin groups anew that are too old."""
        if self._max_lag is None:
            return
        oldest = self._engine.epoch - self._max_lag
        begun = [g for batch in self._batches.values() for g in batch if g.begun_in is not None and not g.is_taken]
        old = [group for group in begun if group.begun_in < oldest]  # type: ignore[operator]
        if not old:
            return
        open_ids = self._engine.mailboxes.of(set(old))
        sequences = self._engine.parts.sequences
        self._num_dropped_tokens += sum(answer.num_completion_tokens for g in old for answer in g.answers.values())
        self._num_dropped_tokens += sum(
            sequences.request(id).sequence.num_output_tokens for id in open_ids if id in sequences
        )
        self._engine.requests.withdraw(set(old))
        for group in old:
            group.forget()
        self._look_again()

    def _fail(self, error: Exception) -> None:
        self._failure = error
