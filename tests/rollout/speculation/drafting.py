"""Engines whose steps draft whenever they can, and the outputs that drafts must not change."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from lockstep.rollout.completion import Completion
from lockstep.rollout.engine import Engine
from lockstep.rollout.request_options import RequestOptions
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.rollout.sequences.engine_manager import EngineSequenceManager
from lockstep.rollout.sequences.event_log import replay
from lockstep.rollout.sequences.request import Request
from lockstep.rollout.sequences.worker_manager import WorkerSequenceManager
from lockstep.rollout.speculation.lengths import WholeDrafts
from lockstep.rollout.speculation.proposer import Proposal

# Ways to spoil a true continuation.
SPOILS = ("right", "part", "wrong", "too long", "outside", "any")


@dataclass(frozen=True)
class Case:
    """One request of a test."""

    prompt: list[int] | str
    params: SamplingParams
    options: RequestOptions = field(default_factory=RequestOptions)


class Oracle:
    """A source that knows the outputs of requests by their ids, and spoils its proposals."""

    def __init__(self, outputs: Mapping[str, Sequence[int]], vocab_size: int, spoil: str = "right", name="oracle"):
        self.outputs, self.name = outputs, name
        self._vocab_size, self._spoil = vocab_size, spoil

    def propose(self, request: Request, most: int) -> Proposal:
        num = request.sequence.num_output_tokens
        dice = random.Random(f"{self.name} {request.id} {num}")
        how = dice.choice(SPOILS[:5]) if self._spoil == "any" else self._spoil
        true = list(self.outputs.get(request.id, ())[num:])
        ids = true if how == "too long" else true[:most]
        if how == "too long":
            ids += [dice.randrange(self._vocab_size) for _ in range(3)]
        elif ids and how == "wrong":
            ids = [(id + 1 + dice.randrange(self._vocab_size - 1)) % self._vocab_size for id in ids]
        elif ids and how == "part" and (place := dice.randrange(len(ids) + 1)) < len(ids):
            ids[place] = (ids[place] + 1) % self._vocab_size
        elif ids and how == "outside":
            ids[dice.randrange(len(ids))] = dice.choice([-1, self._vocab_size, 2**31 - 1, 2**40, -(2**33)])
        return Proposal(ids, confidence=1)

    def on_tokens(self, request: Request, num_cut: int) -> None:
        """Do nothing: the outputs are known."""

    def on_end(self, request: Request) -> None:
        """Do nothing: the outputs are known."""


def draft_always(engine: Engine, *sources: Oracle, depth: int = 6) -> None:
    """Let each step have all drafts that there is room for. With sources, only these are asked."""
    speculation = engine.parts.speculation
    speculation.lengths = WholeDrafts()
    if sources:
        speculation._sources.clear()
    for source in sources:
        speculation.add_source(source, depth)


def counts(engine: Engine) -> tuple[int, int, int]:
    """Return the numbers of drafted, accepted and refused tokens of all sources."""
    its = engine.parts.speculation.counts.values()
    return sum(c.num_drafted for c in its), sum(c.num_accepted for c in its), sum(c.num_refused for c in its)


def record(answer: Completion) -> tuple:
    """Return all of an answer that drafts must not change, bit for bit."""
    return (
        answer.prompt_ids, answer.index, answer.token_ids, answer.logprobs, answer.top_logprobs, answer.listed_logprobs,
        answer.prompt_logprobs, answer.prompt_top_logprobs, answer.prompt_listed_logprobs, answer.forced,
        answer.masked_probs, answer.text, answer.finish_reason, answer.weight_versions, answer.num_jump_forward_tokens,
    )  # fmt: skip


class Play:
    """The run of some cases in an engine, step by step, with checks after each step."""

    def __init__(self, engine: Engine, *, streamed: bool = True) -> None:
        self.engine, self._streamed = engine, streamed
        self.answers: dict[str, Completion] = {}
        self.texts: dict[str, str] = {}  # streamed, by id
        self.tokens: dict[str, list[int]] = {}
        self.num_steps = 0
        engine.parts.managers.log = []

    def add(self, cases: Sequence[Case], name: str = "r") -> None:
        """Queue the cases, whose ids are made of the name and their numbers."""
        for number, case in enumerate(cases):
            ids = self.engine.add(case.prompt, case.params, rid=f"{name}{number}", options=case.options)
            self.engine.mailboxes.open(ids, streamed=self._streamed)
            self.texts |= dict.fromkeys(ids, "")
            self.tokens |= {id: [] for id in ids}

    def step(self) -> None:
        self.engine.step()
        self.num_steps += 1
        self.look()

    def look(self) -> None:
        """Take what has come, and check the ledger and that no draft has left anything."""
        for id in self.texts.keys() - self.answers.keys():
            for chunk in self.engine.mailboxes.take([id]):
                num_chars = len(self.texts[id]) - chunk.num_chars_taken_back
                self.texts[id] = self.texts[id][:num_chars] + chunk.text
                kept = len(self.tokens[id]) - chunk.num_taken_back
                self.tokens[id][kept:] = chunk.token_ids
                if chunk.completion is not None:
                    self.answers[id] = chunk.completion
                    self.engine.mailboxes.close(id)
        check_nothing_is_left(self.engine)

    def to_the_end(self, each_step: Callable[[Play], None] = lambda play: None) -> dict[str, tuple]:
        """Run until all have ended; returns their records by id. each_step: called before each step."""
        most = self.num_steps + 3000
        while self.engine.has_work:
            each_step(self)
            self.step()
            assert self.num_steps < most, self.engine.state()
        check_replay(self.engine)
        check_all_is_free(self.engine)
        for id, answer in self.answers.items():
            assert self.texts[id] == answer.text or not self._streamed
            assert self.tokens[id] == list(answer.token_ids) or not self._streamed
            assert len(answer.token_ids) == len(answer.logprobs)
        assert self.answers.keys() == self.texts.keys()
        return {id: record(answer) for id, answer in sorted(self.answers.items())}


def play(engine: Engine, cases: Sequence[Case], name: str = "r", **options: object) -> dict[str, tuple]:
    """Run the cases to their end, in the rollout phase; returns their records by id."""
    run = Play(engine)
    with engine.model.rollout_phase():
        run.add(cases, name)
        return run.to_the_end(**options)


def outputs_of(records: Mapping[str, tuple]) -> dict[str, tuple[int, ...]]:
    """Return the output tokens of records by id."""
    return {id: one[2] for id, one in records.items()}


def check_nothing_is_left(engine: Engine) -> None:
    """Check the ledger block by block, and between two steps that only drafts in flight have blocks and slots."""
    parts = engine.parts
    parts.ledger.check()
    is_in_flight = engine.gate.loop._flights
    for request, account in parts.ledger._accounts.items():
        if not is_in_flight and request.sequence.state.name == "PAUSED" and request.sequence.jump_start is None:
            num_tokens = request.sequence.num_tokens
            assert len(account.blocks) <= parts.ledger.num_blocks_for(num_tokens), "a block behind the next row"
    if parts.ledger.states is not None and not is_in_flight:
        assert not any(account.drafted for account in parts.ledger.states._accounts.values())


def check_all_is_free(engine: Engine) -> None:
    """Check that an engine without requests holds nothing for any."""
    parts = engine.parts
    parts.ledger.check_idle()
    assert parts.ledger.usage.num_held == 0 and not parts.ledger._accounts and not parts.ledger.paths._prefixes
    if parts.ledger.states is not None:
        assert not parts.ledger.states._accounts
    if (speculation := parts.speculation) is not None:
        past = speculation._hearers["past"]
        assert not past._histories and not speculation.samples._keys
        assert not any(prompt.live for prompt in speculation.samples._prompts.values())


def check_replay(engine: Engine) -> None:
    """Check that new managers that replay the log are equal to the engine's."""
    parts, num_stages = engine.parts, engine.parts.runner.num_stages
    controller = EngineSequenceManager(parts.eos_token_ids, engine.max_model_len, num_stages)
    worker = WorkerSequenceManager(num_stages)
    for manager in (controller, worker):
        replay(parts.managers.log, manager)
    assert controller.state_hash() == parts.sequences.state_hash()
    assert worker.state_hash() == parts.managers.worker.state_hash() == controller.state_hash()
    for request in parts.sequences.requests():
        assert controller.request(request.id).record.logprobs == request.record.logprobs
        assert worker.block_table(request.id) == parts.managers.worker.block_table(request.id)
