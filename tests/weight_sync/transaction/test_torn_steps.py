"""Steps that a trainer's optimizer leaves half done: no token comes from torn weights."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from lockstep.integration.bench.parts.chaos import Forked
from lockstep.integration.service import RolloutService
from lockstep.integration.service_config import ServiceConfig
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.errors import SamplingRefused
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.tests.weight_sync.transaction.two_states import (
    CALL_S,
    LATE_S,
    NUM_TOKENS,
    PROMPT,
    State,
    tiny_model,
    two_states,
)
from lockstep.weight_sync.errors import Poisoned


def in_process(state: State) -> tuple[nn.Module, RolloutService]:
    """Make a trainer's model with these weights, and a service around an engine that shares them."""
    model = tiny_model()
    write(model, state)
    config = EngineConfig(kv_cache="16 blocks", max_num_seqs=2, max_num_batched_tokens=32)
    service = RolloutService(Engine(model, config), ServiceConfig(weight_timeout_s=CALL_S))
    service.commit_in_place("0", source=model.named_parameters())
    return model, service


@torch.no_grad()
def write(model: nn.Module, state: State, num_tensors: int | None = None, half: bool = False) -> None:
    """Write an optimizer's step, or only its first tensors, the last of them perhaps only half."""
    pairs = list(model.named_parameters())[:num_tensors]
    for index, (name, parameter) in enumerate(pairs):
        size = parameter.numel() // (2 if half and index == len(pairs) - 1 else 1)
        parameter.view(-1)[:size] = state.weights[name].view(-1)[:size]


def tokens_of(service: RolloutService) -> list[int]:
    with service.rollout():
        params = SamplingParams(max_new_tokens=NUM_TOKENS, temperature=0.0)
        (completion,) = service.engine.generate([PROMPT], params)
    return list(completion.token_ids)


def refuses(service: RolloutService) -> bool:
    """Return whether sampling is refused with a reason."""
    try:
        tokens_of(service)
    except SamplingRefused as error:
        return bool(str(error))
    return False


def broken_step(
    model: nn.Module, service: RolloutService, new: State, num_tensors: int, half: bool, kind: type[BaseException]
) -> None:
    with service.optimizer_step():
        write(model, new, num_tensors, half)
        assert refuses(service)
        raise kind("in the step")


@pytest.mark.slow
@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt, SystemExit, MemoryError])
def test_no_token_comes_from_weights_that_an_optimizer_step_left_torn(kind: type[BaseException]) -> None:
    torch.set_num_threads(1)
    states = two_states()
    model, service = in_process(states[0])
    num_tensors, current = len(states[0].weights), 0
    for written in range(num_tensors + 1):
        for half in (False, True):
            new = states[1 - current]
            with pytest.raises(kind, match="in the step"):
                broken_step(model, service, new, written, half, kind)
            assert refuses(service)
            with pytest.raises(Poisoned, match="in the step"):
                service.commit_in_place("torn", source=model.named_parameters())
            with pytest.raises(SamplingRefused):
                service.continue_generation()
            with service.optimizer_step():
                write(model, new)
            assert refuses(service), "between a step and its commit"
            service.commit_in_place(f"{written}", source=model.named_parameters())
            current = 1 - current
            assert tokens_of(service) == new.tokens and service.model_digest() == new.digest
    service.close()


@pytest.mark.slow
def test_a_commit_in_place_that_fails_commits_nothing_and_the_next_one_does() -> None:
    torch.set_num_threads(1)
    states = two_states()
    model, service = in_process(states[0])

    def broken_after(num_tensors: int) -> Iterator[tuple[str, Tensor]]:
        for index, pair in enumerate(model.named_parameters()):
            if index == num_tensors:
                raise KeyboardInterrupt
            yield pair

    for num_tensors in range(len(states[0].weights)):
        new, before = states[(num_tensors + 1) % 2], service.engine.weight_version
        with service.optimizer_step():
            write(model, new)
        with pytest.raises(KeyboardInterrupt):
            service.commit_in_place("torn", source=broken_after(num_tensors))
        assert refuses(service) and service.engine.weight_version == before
        service.commit_in_place(f"{num_tensors} again", source=model.named_parameters())
        assert tokens_of(service) == new.tokens
    service.close()


def _stepping_rank(states: tuple[State, State], moment: str, writer: int) -> None:
    """Step once and die at that moment, while another thread requests tokens and writes each answer to `writer`."""
    model, service = in_process(states[0])
    stepping, asked = threading.Event(), threading.Semaphore(0)

    def ask() -> None:
        while True:
            during = stepping.is_set()
            try:
                tokens = tokens_of(service)
            except SamplingRefused:
                tokens = None
            os.write(writer, json.dumps([during and stepping.is_set(), tokens]).encode() + b"\n")
            asked.release()

    threading.Thread(target=ask, daemon=True).start()

    def answers(count: int = 3) -> None:
        while asked.acquire(blocking=False):
            pass  # requests of the moment before
        assert all(asked.acquire(timeout=CALL_S + LATE_S) for _ in range(count))

    def die_if(now: str) -> None:
        answers()
        if moment == now:
            os.kill(os.getpid(), signal.SIGKILL)

    answers()
    with service.optimizer_step():
        stepping.set()
        die_if("before")
        write(model, states[1], len(states[1].weights) // 2, half=True)
        die_if("half")
        write(model, states[1])
        die_if("all")
    die_if("between")
    stepping.clear()
    service.commit_in_place("1", source=model.named_parameters())
    die_if("committed")


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["before", "half", "all", "between", "committed"])
def test_a_rank_that_is_killed_around_its_step_gives_no_token_of_torn_weights(moment: str) -> None:
    """Another thread requests tokens all the time; every answer is reported before the next step happens."""
    torch.set_num_threads(1)
    states = two_states()
    reader, writer = os.pipe()

    killed = Forked(partial(_stepping_rank, states, moment, writer))
    os.close(writer)
    lines: list[str] = []
    with os.fdopen(reader) as told:
        listener = threading.Thread(target=lambda: lines.extend(told), daemon=True)
        listener.start()  # runs all the time: refusals come fast, and a full pipe would delay the answers
        try:
            assert killed.wait(8 * (CALL_S + LATE_S)) and killed.error is None and not killed.finished, killed.error
        finally:
            killed.end()
            listener.join()
    answers = [json.loads(line) for line in lines if line.endswith("\n")]
    given = [tokens for _, tokens in answers if tokens is not None]
    assert given and all(tokens in (states[0].tokens, states[1].tokens) for tokens in given)
    assert all(tokens is None for during, tokens in answers if during)
    assert (given[-1] == states[1].tokens) == (moment == "committed")
