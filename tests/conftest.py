"""What many tests stand on: models, served engines, ranks, and waiting for things to happen."""

from __future__ import annotations

import gc
import json
import multiprocessing
import multiprocessing.connection
import os
import queue
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

# Where no GPU can run its kernels Triton interprets them. It reads this as it is imported, which transformers does.
os.environ.setdefault("TRITON_INTERPRET", str(int(not torch.cuda.is_available())))

import tokenizers
import transformers
from transformers import PreTrainedModel

from lockstep.integration.service import RolloutService
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.loop.assemble import make_runner
from lockstep.rollout.loop.parts import MakeRunner, RunnerParts
from lockstep.rollout.model.attention import NO_MASK, STEP_KEYWORD, StepContext
from lockstep.rollout.running.batch import Batch, build_batch
from lockstep.rollout.running.results import results_of
from lockstep.rollout.running.sampler import Sampler
from lockstep.rollout.sequences.event_log import Event, replay
from lockstep.rollout.sequences.managers import WorkerSequenceManager
from lockstep.rollout.sequences.request import Request
from lockstep.rollout.sequences.step import ScheduleOutput, SequenceResult
from lockstep.tests.support.callers import wait_until
from lockstep.tests.support.random_models import random_model

MakeModel = Callable[..., PreTrainedModel]

# A forked rank must not collect what this process left unreachable: a process group's end waits for its threads, which
# a fork does not have, and aborts.
os.register_at_fork(after_in_child=gc.freeze)

# The modules that take longest: begun first, lest one process end with them while the others are idle.
LONGEST = ("replica/test_faults", "replica/test_interruption", "rollout/test_interruption_random",
           "replica/test_rank_failures", "grpo/test_syncs")  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not item.path.with_suffix("").as_posix().endswith(LONGEST))


@pytest.fixture
def make_model() -> MakeModel:
    """make_model("gemma2", dtype=torch.bfloat16): a random model whose logits are far from uniform."""
    return random_model


@pytest.fixture
def model(make_model: MakeModel, restore_threads: None) -> PreTrainedModel:
    """The model of most tests of a served engine; torch has one thread."""
    torch.set_num_threads(1)
    return make_model("qwen2")


@pytest.fixture
def service(model: PreTrainedModel, tmp_path: Path) -> Iterator[RolloutService]:
    """A service whose engine has read `model` from a folder."""
    model.save_pretrained(tmp_path / "model")
    service = RolloutService(Engine(tmp_path / "model", EngineConfig(kv_cache="32 blocks", max_num_seqs=4)))
    yield service
    service.close()


@pytest.fixture
def server(service):
    """The test's service behind HTTP, without keys."""
    from lockstep.integration.http.edge.config import HttpConfig
    from lockstep.integration.http.server import serve_in_background

    with serve_in_background(service, HttpConfig(port=0)) as server:
        yield server


@pytest.fixture
def client(server):
    import httpx

    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.fixture
def shm() -> Iterator[Path]:
    """A folder for segments and checkpoints; what is left in it at the end was forgotten."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
        yield Path(path)
        assert list(Path(path).iterdir()) == []


@pytest.fixture
def restore_threads():
    """Put torch's thread count back after a test that changes it."""
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture
def until() -> Callable[..., None]:
    """until(condition): see `wait_until`."""
    return wait_until


@pytest.fixture
def run_world() -> Callable[..., list[object]]:
    """run_world(4, rank_function): what rank_function(rank) returned on each rank of a torch.distributed job (gloo).

    Each rank is a forked process with one thread and a default group. Fails with the rank and the traceback where one
    raised, died, or was not done in `timeout_s`. What is returned must pickle; tensors are copied through a file.
    """

    def run(num_ranks: int, rank_function: Callable[[int], object], timeout_s: float = 120.0) -> list[object]:
        context = multiprocessing.get_context("fork")
        with tempfile.TemporaryDirectory() as folder:
            processes = [
                context.Process(target=_run_rank, args=(rank_function, rank, num_ranks, folder, timeout_s), daemon=True)
                for rank in range(num_ranks)
            ]
            for process in processes:
                process.start()
            try:
                return _results_of(processes, folder, timeout_s)
            finally:
                for process in processes:
                    process.kill()
                    process.join()

    return run


def _run_rank(rank_function: Callable[[int], object], rank: int, num_ranks: int, folder: str, timeout_s: float) -> None:
    torch.set_num_threads(1)
    init, timeout = f"file://{folder}/store", timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=num_ranks, timeout=timeout)
    torch.save(rank_function(rank), f"{folder}/result.{rank}")
    dist.barrier()  # nobody leaves while another still talks to it
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _results_of(processes: list[multiprocessing.Process], folder: str, timeout_s: float) -> list[object]:
    running, end = {process.sentinel for process in processes}, time.monotonic() + timeout_s
    while running:
        ended = multiprocessing.connection.wait(running, max(0.0, end - time.monotonic()))
        running -= set(ended)
        codes = [process.exitcode for process in processes]
        if not ended or any(codes):
            pytest.fail(f"a rank failed, or was not done in {timeout_s:g} s; exit codes by rank: {codes}")
    return [torch.load(f"{folder}/result.{rank}", weights_only=False) for rank in range(len(processes))]


class StagedRunner:
    """Runs steps in stages as the ranks of a pipeline do: each on a thread with a worker manager of its own, which
    knows what the messages of the launches tell it. The layers, their KV and the hidden states are real; only the wires
    are queues. For modules built as Llama's are. A module of few layers may have stages without one.

    before_stage(stage, output), if set, is called on the stage's thread before it runs a step.
    """

    def __init__(self, parts: RunnerParts, num_stages: int) -> None:
        self.num_stages = num_stages
        self.num_forwards = 0
        self.most_in_the_air = self._num_in_the_air = 0
        self.before_stage: Callable[[int, ScheduleOutput], None] = lambda stage, output: None
        self._model, self._kv_cache, self._block_size = parts.model, parts.kv_cache, parts.config.block_size
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
        self._num_in_the_air += 1
        self.most_in_the_air = max(self.most_in_the_air, self._num_in_the_air)
        step, news, self._news = StagedStep(self), self._news, []
        self._hidden[0].put(None)
        for stage, messages in enumerate(self._messages):
            messages.put((output, requests, [] if stage == 0 else news, step))
        return step

    def forget(self, request: Request) -> None:
        self._sampler.forget(request)

    def close(self) -> None:
        for messages in self._messages:
            messages.put(None)

    def landed(self) -> None:
        self._num_in_the_air -= 1

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
        context = StepContext(batch.slots, batch.paged, self._kv_cache.keys, self._kv_cache.values)
        rotary = module.model.rotary_emb(hidden, positions)
        for layer in module.model.layers[first:end]:
            hidden = layer(
                hidden, attention_mask=NO_MASK, position_ids=positions, position_embeddings=rotary, use_cache=False,
                **{STEP_KEYWORD: context},
            )  # fmt: skip
        if stage < self.num_stages - 1:
            return hidden
        return module.lm_head(module.model.norm(hidden)[0, batch.logit_rows])


class StagedStep:
    """A step on its way through the stages of a StagedRunner."""

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
        self._runner.landed()
        return results

    def abandon(self) -> None:
        self._runner.landed()


@pytest.fixture
def in_stages() -> Callable[[int], MakeRunner]:
    """Engine(..., make_runner=in_stages(2)): an engine that runs steps in two stages, each a thread of this process.

    One stage is an engine's own way. The runner is `engine.parts.runner`.
    """

    def runner_of(num_stages: int) -> MakeRunner:
        return make_runner if num_stages == 1 else lambda parts: StagedRunner(parts, num_stages)

    return runner_of


@pytest.fixture(scope="session")
def bpe_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """A byte-level BPE of 1,000 tokens with `<eos>` (0), a special `<|im_start|>` and a control word `<think>`."""
    words = ("name", "value", "items", "type", "object", "string", "true", "false", "città", "ключ", "the", "and")
    lines = [json.dumps({a: [b, {b: 10 * i + j}]}, ensure_ascii=False)
             for i, a in enumerate(words) for j, b in enumerate(words)]  # fmt: skip
    lines += [f'"{a}": "{b} of the {a}", 0.{i}25, -{i}7' for i, a in enumerate(words) for b in words]
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=999, special_tokens=["<eos>", "<|im_start|>"], initial_alphabet=alphabet, show_progress=False
    )  # fmt: skip
    backend.train_from_iterator(lines, trainer)
    backend.add_tokens(["<think>"])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>", additional_special_tokens=["<|im_start|>"]
    )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what tests recorded as their figures (`record_property("figures", ...)`), whichever process they ran in."""
    for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed"):
        for name, text in getattr(report, "user_properties", ()):
            if name == "figures" and report.when == "call":
                terminalreporter.section(report.nodeid)
                terminalreporter.line(str(text))
