"""Random events of an engine, checked after every event, and replayed from their log."""

from __future__ import annotations

import functools
import random
from collections import Counter

import torch
import transformers

from lockstep.rollout.completion import Completion
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.loop.parts import MakeRunner
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.rollout.sequences.engine_manager import EngineSequenceManager
from lockstep.rollout.sequences.event_log import replay
from lockstep.rollout.sequences.worker_manager import WorkerSequenceManager

NUM_BLOCKS = 14
NUM_PLACES = 5
NUM_KINDS = 13  # of requests
MODES = ("abort", "retract", "in_place")


def tiny_model() -> transformers.PreTrainedModel:
    config = transformers.Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(2)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 1.0)
    return model


def make_engine(overlap: bool, make_runner: MakeRunner, speculation: str = "auto") -> Engine:
    config = EngineConfig(
        kv_cache=NUM_BLOCKS,
        max_num_seqs=NUM_PLACES,
        max_num_batched_tokens=40,
        chunked_prefill_size=11,
        overlap=overlap,
        speculation=speculation,
        pin_budget=1.0,
    )
    engine = Engine(tiny_model(), config, make_runner=make_runner)
    engine.model.rollout_phase().__enter__()  # never ended: its end would wait for the steps in flight
    return engine


def prompt_of(kind: int) -> list[int]:
    """Return one of a dozen prompts: some share a block or more, and one is longer than the context."""
    if kind == NUM_KINDS - 1:
        return [1] * 129
    return [(kind % 3 + i * (1 + kind % 2)) % 64 for i in range(3 + 5 * kind)]


def params_of(kind: int, num_new: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=num_new, sampling_seed=kind, temperature=float(kind % 4 > 0))


@functools.cache
def undisturbed(kind: int) -> Completion:
    """Return the longest answer of a request of this kind in an undisturbed run."""
    [whole] = Engine(tiny_model(), EngineConfig(kv_cache=NUM_BLOCKS)).generate(prompt_of(kind), params_of(kind, 40))
    return whole


class Trace:
    """An engine under random events, and the invariants that must hold after each of them."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.engine.parts.managers.log = []
        self.kinds: dict[str, int] = {}  # of the live requests
        self.counts: Counter[str] = Counter()
        self.answers: Counter[str] = Counter()  # by finish reason
        self._num_added = 0
        self.pinned: list[tuple[int, str]] = []  # every pin that was ever set: hash and owner

    def event(self, name: str, number: int) -> None:
        """Run one event; `number` selects its subject."""
        engine, live = self.engine, list(self.kinds)
        self.counts[name] += 1
        if name == "add":
            if len(live) < 3 * NUM_PLACES:
                self._add(number)
        elif name == "step":
            before, num_steps = engine.state()["num_forwards"], engine.metrics.num_steps
            engine.step(1 + number % 9)
            assert not engine.is_paused or engine.state()["num_forwards"] == before
            self.counts["several"] += engine.metrics.num_steps - num_steps > 1
        elif name in MODES:
            report = engine.pause_generation(name)
            assert engine.is_paused and report.mode == name
            assert report.num_running == 0 or name == "in_place"
            assert report.num_retracted + report.num_aborted + report.num_running <= len(live)
            self.counts["retracted"] += report.num_retracted
            self.counts["cut"] += report.num_aborted
        elif name == "continue":
            assert engine.continue_generation().was_paused is not None
            assert not engine.is_paused
        elif name == "abort one":
            id = live[number % len(live)] if live and number % 8 else "nobody"
            report = engine.abort_request(id)
            assert report.aborted + report.unknown == (id,)
            self.counts["cut"] += len(report.aborted)
        elif name == "flush":
            report = engine.flush_cache()
            has_holders = engine.state()["num_held_blocks"] > 0  # before it the last one's last step may be in flight
            assert report.success is not has_holders and bool(report.error_msg) is has_holders
            assert has_holders or engine.state()["num_free_blocks"] == NUM_BLOCKS
        elif name == "pin":
            owner, ttl = ("router", None) if number % 3 else ("brief", 0.001)
            report = engine.pin_prefix(prompt_of(number % NUM_KINDS), owner=owner, ttl_s=ttl)
            self.counts["pinned"] += report.num_pinned
            self.pinned += [(hash, owner) for hash in report.hashes]
        elif name == "unpin":
            dice = random.Random(number)
            hash, owner = dice.choice(self.pinned[-20:]) if self.pinned else (number, "nobody")
            self.counts["unpinned"] += engine.unpin_blocks([hash], owner=owner).num_unpinned
        elif name == "evict":
            report = engine.evict_descendants(random.Random(number).choice(self.pinned)[0] if self.pinned else number)
            assert report.is_known or (report.num_evicted, report.num_held, report.num_pinned) == (0, 0, 0)
        else:
            assert name == "commit"
            engine.weights.commit_weights(f"v{self.counts['commit']}", None)  # the same weights under another name
        self.check()

    def _add(self, number: int) -> None:
        kind, self._num_added = number % NUM_KINDS, self._num_added + 1
        ids = self.engine.add(prompt_of(kind), params_of(kind, number % 40), rid=f"r{self._num_added}")
        self.engine.mailboxes.open(ids, streamed=False)
        self.kinds[ids[0]] = kind

    def check(self) -> None:
        """Check that every request is in one container or answered once, and that the ledger adds up."""
        engine = self.engine
        for id in list(self.kinds):
            chunks = engine.mailboxes.take([id])
            if chunks:
                [chunk] = chunks
                engine.mailboxes.close(id)
                self._check_answer(chunk.completion, self.kinds.pop(id))
        state = engine.state()
        assert sorted(state["running_ids"] + state["waiting_ids"]) == sorted(self.kinds)
        assert (state["num_running"], state["num_waiting"]) == (len(state["running_ids"]), len(state["waiting_ids"]))
        assert state["num_running"] <= NUM_PLACES
        assert (
            state["num_free_blocks"]
            + state["num_cached_blocks"]
            + state["num_held_blocks"]
            + state["num_pinned_blocks"]
            == NUM_BLOCKS
        )
        assert state["num_held_blocks"] > 0 or state["num_running"] == 0
        engine.check_integrity()

    def _check_answer(self, answer: Completion, kind: int) -> None:
        whole, num = undisturbed(kind), answer.num_completion_tokens
        assert len(answer.logprobs) == num
        assert (answer.token_ids, answer.logprobs) == (whole.token_ids[:num], whole.logprobs[:num])
        spans = answer.weight_versions
        assert [s.start for s in spans[1:]] == [s.end for s in spans[:-1]]
        assert num == 0 or (spans[0].start, spans[-1].end) == (0, num)
        self.answers[answer.finish_reason.type] += 1
        self.counts["preempted"] += answer.num_retractions

    def drain(self) -> None:
        """Run all requests to their end, and check that none is left."""
        self.engine.continue_generation()
        limit = 5000
        while self.engine.has_work:
            self.event("step", 0)
            limit -= 1
            assert limit, self.engine.state()
        assert not self.kinds and not self.engine.mailboxes
        state = self.engine.state()
        assert state["num_held_blocks"] == 0
        self.engine.flush_cache()
        state = self.engine.state()
        assert (state["num_pins"], state["num_free_blocks"]) == (0, NUM_BLOCKS)
        assert self.answers.total() == self._num_added
        assert self.answers["abort"] == self.counts["cut"]

    def check_replay(self) -> None:
        """Replay the log with new managers, and check that their state equals the engine's managers'."""
        engine = self.engine
        num_stages = engine.parts.runner.num_stages
        controller = EngineSequenceManager(engine.parts.eos_token_ids, engine.max_model_len, num_stages)
        worker = WorkerSequenceManager(num_stages)
        for manager in (controller, worker):
            replay(engine.parts.managers.log, manager)
        assert controller.state_hash() == engine.parts.sequences.state_hash()
        assert worker.state_hash() == engine.parts.managers.worker.state_hash() == controller.state_hash()
        assert len(controller) == len(engine.parts.sequences)
        assert state_total(engine.state()) == len(self.kinds)  # those that no step has taken up yet among them
        for request in engine.parts.sequences.requests():
            assert controller.request(request.id).record.logprobs == request.record.logprobs


def state_total(state: dict[str, object]) -> int:
    """Return the number of live requests that a state counts."""
    return sum(int(str(state[name])) for name in ("num_running", "num_waiting"))


# The frequency of each event: steps come most often, so that some requests reach their end.
WEIGHTS = {
    "step": 60,
    "add": 14,
    "continue": 12,
    "retract": 3,
    "in_place": 3,
    "abort": 0.4,
    "abort one": 2,
    "flush": 2,
    "commit": 2,
    "pin": 9,
    "unpin": 3,
    "evict": 1,
}
