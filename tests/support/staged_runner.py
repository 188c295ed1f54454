"""A runner whose stages are threads of the test's process."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future

import torch

from lockstep.rollout.loop.parts import RunnerParts
from lockstep.rollout.model.operations.carried import STEP_KEYWORD
from lockstep.rollout.model.operations.packed_rows import NO_MASK
from lockstep.rollout.model.steps.context import StepContext
from lockstep.rollout.running.batch import Batch, build_batch
from lockstep.rollout.running.results import results_of
from lockstep.rollout.running.sampler import Sampler
from lockstep.rollout.sequences.event_log import Event, replay
from lockstep.rollout.sequences.request import Request
from lockstep.rollout.sequences.step import ScheduleOutput, SequenceResult
from lockstep.rollout.sequences.worker_manager import WorkerSequenceManager


class StagedRunner:
    """Run steps in stages as the ranks of a pipeline do.

    Each stage is a thread with its own worker manager, which the messages of the launches update. The layers, their KV
    and the hidden states are real; queues replace the network. For modules built like Llama's. In a module of few
    layers some stages may have none.

    before_stage(stage, output), if set, is called on the stage's thread before it runs a step.
    """

    begins_ahead = False
    goes_on: Callable[[int], bool]

    def __init__(self, parts: RunnerParts, num_stages: int) -> None:
        self.num_stages = num_stages
        self.num_forwards = 0
        self.most_in_flight = self._num_in_flight = 0
        self.before_stage: Callable[[int, ScheduleOutput], None] = lambda stage, output: None
        self._model, self._kv_cache, self._block_size = parts.model, parts.kv_cache, parts.config.block_size
        self._state_pool = parts.state_pool
        self._sampler = Sampler(parts.eos_token_ids)
        self.managers = [WorkerSequenceManager(num_stages) for _ in range(num_stages)]
        self.workers = self.managers[0]
        self._news: list[Event] = []
        self._messages = [queue.SimpleQueue() for _ in range(num_stages)]
        self._hidden = [queue.SimpleQueue() for _ in range(num_stages)]
        for stage in range(num_stages):
            threading.Thread(target=self._run_stage, args=(stage,), name=f"stage-{stage}", daemon=True).start()

    def on_event(self, event: Event) -> None:
        if event[0] != "on_stage_completed":  # each stage sees that for itself
            self._news.append(event)

    def launch(self, output: ScheduleOutput, requests: dict[str, Request]) -> StagedStep:
        self.num_forwards += 1
        self._num_in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self._num_in_flight)
        step, news, self._news = StagedStep(self), self._news, []
        self._hidden[0].put(None)
        for stage, messages in enumerate(self._messages):
            messages.put((output, requests, [] if stage == 0 else news, step))
        return step

    def release_memory(self) -> None:
        """Do nothing: it records no step."""

    def runs_several(self, num_rows):
        return False

    def computed_rows(self, num_rows: int) -> int:
        return num_rows

    def forget(self, request: Request) -> None:
        self._sampler.forget(request)

    def close(self) -> None:
        for messages in self._messages:
            messages.put(None)

    def finished(self) -> None:
        self._num_in_flight -= 1

    def _run_stage(self, stage: int) -> None:
        manager, is_last = self.managers[stage], stage == self.num_stages - 1
        while (message := self._messages[stage].get()) is not None:
            output, requests, news, step = message
            replay(news, manager)
            batch = build_batch(output, manager, requests, self._block_size, self._model.device)
            hidden = self._hidden[stage].get()
            try:
                if not isinstance(hidden, Exception):
                    self.before_stage(stage, output)
                    hidden = self._forward(stage, batch, hidden)
                    if is_last:
                        hidden = results_of(output, batch, hidden, self._sampler)
            except Exception as error:  # noqa: BLE001 - goes down the stages with its step, which fails; the next one runs
                hidden = error
            if stage > 0:
                manager.on_stage_completed(output.scheduled)
            if not is_last:
                self._hidden[stage + 1].put(hidden)
            step.done(stage, is_last, hidden)

    @torch.inference_mode()
    def _forward(self, stage: int, batch: Batch, hidden: torch.Tensor | None) -> torch.Tensor:
        module = self._model.module
        first, end = (len(module.model.layers) * s // self.num_stages for s in (stage, stage + 1))
        if hidden is None:
            hidden = module.model.embed_tokens(batch.token_ids[None])
        positions = batch.positions[None]
        states = self._state_pool.step(batch.states)
        kv = self._kv_cache
        context = StepContext(batch.slots, batch.paged, kv.keys, kv.values, states=states, index_caches=kv.index_keys)
        embedding = getattr(module.model, "rotary_emb", getattr(module.model, "pos_emb", None))
        rotary = embedding(hidden, positions) if embedding is not None else None
        for index, layer in enumerate(module.model.layers[first:end], first):
            mask = None if index in self._model.state_shapes else NO_MASK
            hidden = layer(
                hidden, attention_mask=mask, position_ids=positions, position_embeddings=rotary, use_cache=False,
                **{STEP_KEYWORD: context},
            )  # fmt: skip
        if stage < self.num_stages - 1:
            return hidden
        norm = getattr(module.model, "norm", None) or module.model.embedding_norm  # LFM2's name
        return module.lm_head(norm(hidden)[0, batch.logit_rows])


class StagedStep:
    """A step in flight through the stages of a StagedRunner."""

    def __init__(self, runner: StagedRunner) -> None:
        self._runner = runner
        self._left: Future[None] = Future()
        self._results: Future[list[SequenceResult]] = Future()

    def done(self, stage: int, is_last: bool, outcome: object) -> None:
        if stage == 0:
            self._left.set_result(None)
        if is_last and isinstance(outcome, Exception):
            self._results.set_exception(outcome)
        elif is_last:
            self._results.set_result(outcome)

    def wait_first_stage(self) -> None:
        self._left.result(timeout=60)

    def results(self) -> list[SequenceResult]:
        results = self._results.result(timeout=60)
        self._runner.finished()
        return results

    def abandon(self) -> None:
        self._runner.finished()
