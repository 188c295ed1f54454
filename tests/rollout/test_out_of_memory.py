"""Memory that runs out: in the KV pool's allocation, and in the forward of a step. The engine goes on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from lockstep.integration.service import RolloutService
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.errors import OutOfMemory, RankFailure
from lockstep.rollout.loop.assemble import make_runner
from lockstep.rollout.loop.parts import RunnerParts
from lockstep.rollout.model.memory import is_out_of_memory
from lockstep.rollout.running.runner import Runner, StepHandle
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.rollout.scheduling.row_limit import RowLimit
from lockstep.rollout.sequences.request import Request
from lockstep.rollout.sequences.step import ScheduleOutput

CPU_TEXT = "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: not enough memory: you tried to allocate 64 bytes."
CONFIG = EngineConfig(kv_cache="64 blocks", max_num_seqs=4, max_num_batched_tokens=128)
PROMPTS = [[(7 * i + k) % 250 for i in range(length)] for k, length in enumerate((90, 40, 5, 60, 33, 17))]


@pytest.fixture(autouse=True)
def _one_thread(restore_threads):
    torch.set_num_threads(1)


def params(seed: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=6, sampling_seed=seed, temperature=1.0)


class ShortOfMemory:
    """A runner whose steps find memory for `most` rows, and for no row of the request `victim`."""

    def __init__(self, runner: Runner, most: int, victim: str = "", error: Exception | None = None) -> None:
        self._runner, self.most, self.victim = runner, most, victim
        self._error = error or RuntimeError(CPU_TEXT)
        self.num_failures = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def launch(self, output: ScheduleOutput, requests: Mapping[str, Request]) -> StepHandle:
        if output.num_rows > self.most or self.victim in requests:
            self.num_failures += 1
            raise self._error
        return self._runner.launch(output, requests)


class LateShortOfMemory(ShortOfMemory):
    """The same, whose error arrives with the results, as from the thread of the model."""

    def launch(self, output: ScheduleOutput, requests: Mapping[str, Request]) -> StepHandle:
        handle, is_short = self._runner.launch(output, requests), output.num_rows > self.most
        is_short = is_short or self.victim in requests
        return _Late(handle, self) if is_short else handle

    def fail(self) -> None:
        self.num_failures += 1
        raise self._error


class _Late:
    def __init__(self, handle: StepHandle, runner: LateShortOfMemory) -> None:
        self._handle, self._runner = handle, runner

    def wait_first_stage(self) -> None:
        self._handle.wait_first_stage()

    def abandon(self) -> None:
        self._handle.abandon()

    def results(self) -> list:
        self._handle.results()
        self._runner.fail()
        raise AssertionError("not reached")


def short(kind: type[ShortOfMemory], most: int, victim: str = "", error: Exception | None = None):
    def make(parts: RunnerParts) -> ShortOfMemory:
        return kind(make_runner(parts), most, victim, error)

    return make


def wanted(model: torch.nn.Module) -> list[tuple[list[int], list[float]]]:
    engine = Engine(model, CONFIG)
    done = engine.generate(PROMPTS, [params(seed) for seed in range(len(PROMPTS))])
    engine.close()
    return [(one.token_ids, one.logprobs) for one in done]


@pytest.mark.parametrize("kind", [ShortOfMemory, LateShortOfMemory])
@pytest.mark.parametrize("overlap", [False, True])
def test_steps_that_find_no_memory_become_smaller_and_no_bit_changes(make_model, kind, overlap) -> None:
    model = make_model("qwen3")
    config = EngineConfig(**{**vars(CONFIG), "overlap": overlap})
    engine = Engine(model, config, make_runner=short(kind, 20))
    engine.start()
    done = engine.generate(PROMPTS, [params(seed) for seed in range(len(PROMPTS))])
    assert [(one.token_ids, one.logprobs) for one in done] == wanted(make_model("qwen3"))
    runner = engine.parts.runner
    assert runner.num_failures >= 2 and engine.failure is None  # type: ignore[attr-defined]
    engine.check_integrity()
    assert engine.state()["num_held_blocks"] == 0
    engine.close()


@pytest.mark.parametrize("error", [RuntimeError(CPU_TEXT), MemoryError(), torch.OutOfMemoryError("CUDA out of memory")])
def test_a_request_for_which_no_step_is_small_enough_ends_alone(make_model, error) -> None:
    engine = Engine(make_model("qwen3"), CONFIG, make_runner=short(ShortOfMemory, 10**6, "victim", error))
    engine.start()
    engine.add(PROMPTS[0], params(99), rid="victim")
    done = engine.generate(PROMPTS, [params(seed) for seed in range(len(PROMPTS))])
    assert [(one.token_ids, one.logprobs) for one in done] == wanted(make_model("qwen3"))
    (ended,) = engine.step()
    assert ended.finish_reason.type == "abort" and ended.token_ids == ()
    assert "out of memory: a step of 16 rows of this request alone" in ended.finish_reason.message
    engine.check_integrity()
    assert engine.state()["num_held_blocks"] == 0 and engine.failure is None
    engine.close()


def test_another_error_of_a_step_is_raised_as_before(make_model) -> None:
    broken = RuntimeError("the sizes do not match")
    engine = Engine(make_model("qwen3"), CONFIG, make_runner=short(ShortOfMemory, 20, error=broken))
    with pytest.raises(RuntimeError, match="the sizes do not match"):
        engine.generate(PROMPTS, params(0))
    engine.close()


def test_what_counts_as_a_want_of_memory() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("x")) and is_out_of_memory(MemoryError())
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert not is_out_of_memory(RuntimeError("x")) and not is_out_of_memory(ValueError("not enough memory"))
    assert not is_out_of_memory(RankFailure("rank 1: not enough memory"))


def test_the_limit_of_rows_grows_again_and_later_after_each_failure() -> None:
    limit, needed = RowLimit(100), []
    for _ in range(3):
        limit.halve(100)
        assert limit.now == 50
        needed.append(0)
        while limit.now < 100:
            limit.on_good_step()
            needed[-1] += 1
    assert needed == [64, 128, 256]
    limit.halve(1)
    assert limit.now == 1


def test_a_pool_that_cannot_be_allocated_is_an_error_with_its_size_and_the_remedy(make_model) -> None:
    model = make_model("qwen3")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(OutOfMemory, match=r"KV pool of \d+ blocks, .*MiB .*smaller EngineConfig.kv_cache"):
        Engine(model, EngineConfig(kv_cache=f"{1 << 50} blocks"))
    engine = Engine(model, CONFIG)  # the module can be hosted again
    assert len(engine.generate([PROMPTS[0]], params(1))[0].token_ids) == 6
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    engine.close()


def test_a_pool_that_cannot_be_resumed_stays_released_until_a_later_try(make_model, monkeypatch) -> None:
    service = RolloutService(Engine(make_model("qwen3"), CONFIG))
    engine = service.engine
    [first] = engine.generate([PROMPTS[0]], params(1))
    service.release_memory_occupation(["kv_cache"])
    real, calls = torch.empty, []

    def third_fails(*sizes: int, **options: object) -> torch.Tensor:
        calls.append(sizes)
        if len(calls) == 3:
            raise RuntimeError(CPU_TEXT)
        return real(*sizes, **options)

    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty", third_fails)
        with pytest.raises(OutOfMemory, match=r"KV pool of 64 blocks.*try again"):
            service.resume_memory_occupation(["kv_cache"])
    assert engine.kv_bytes == 0 and not engine.parts.kv_cache.is_allocated
    service.resume_memory_occupation(["kv_cache"])
    [again] = engine.generate([PROMPTS[0]], params(1))
    assert (again.token_ids, again.logprobs) == (first.token_ids, first.logprobs)
    service.close()
