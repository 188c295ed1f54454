"""Models, settings and calls of the tests beside this file."""

from __future__ import annotations

import copy
import signal
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from lockstep.integration.service import RolloutService
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.weight_sync.digests.model_digest import model_digest, tensor_roots
from lockstep.weight_sync.errors import TransferFailed

PATIENCE = 30.0  # seconds; far more than any wait here takes
PROMPT = list(range(1, 40))
PARAMS = SamplingParams(max_new_tokens=4, temperature=0.0, ignore_eos=True)
LONG = SamplingParams(max_new_tokens=60, temperature=0.0, ignore_eos=True)
NORM, EMBED, HEAD = "model.norm.weight", "model.embed_tokens.weight", "lm_head.weight"


def later(model: nn.Module, seed: int = 7) -> nn.Module:
    other, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return other


def named(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [(name, parameter.detach()) for name, parameter in model.named_parameters()]


def only(model: nn.Module, *names: str) -> list[tuple[str, Tensor]]:
    return [(name, tensor) for name, tensor in named(model) if name in names]


def roots(model: nn.Module) -> dict[str, str]:
    return {name: root.hex() for name, root in tensor_roots(named(model)).items()}


def digest_of(model: nn.Module) -> str:
    return model_digest(named(model))


def standing(service: RolloutService) -> tuple[object, ...]:
    """Return all facts that identify the engine's weights."""
    engine = service.engine
    return engine.weight_version, engine.weight_digest, engine.epoch, service.model_digest()


def greedy(model: nn.Module, num_tokens: int = 4) -> tuple[int, ...]:
    ids = list(PROMPT)
    for _ in range(num_tokens):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return tuple(ids[len(PROMPT) :])


def answer(service: RolloutService) -> tuple[int, ...]:
    return tuple(service.engine.generate([PROMPT], PARAMS)[0].token_ids)


def last_commit(service: RolloutService) -> dict:
    return service.state()["weight_update"]["last_commit"]


def failing(pairs: list[tuple[str, Tensor]], after: int) -> Iterator[tuple[str, Tensor]]:
    yield from pairs[:after]
    raise TransferFailed("the wire broke")


def interrupt(service: RolloutService, command: str, call: Callable[[], object]) -> None:
    """Interrupt the call when this command of the engine has had its effect. The handler is called where the engine's
    lock is released, or later."""
    commands = service.engine.weights._between_steps
    real = getattr(commands, command)

    def interrupted(*args: object) -> object:
        setattr(commands, command, real)
        value = real(*args)
        signal.raise_signal(signal.SIGINT)
        return value

    setattr(commands, command, interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            call()
    finally:
        signal.signal(signal.SIGINT, before)


class Slow:
    """Tensors of which the last one comes only when a test releases it."""

    def __init__(self, pairs: list[tuple[str, Tensor]]) -> None:
        self._pairs, self.under_way, self.go_on = pairs, threading.Event(), threading.Event()

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._pairs[:-1]
        self.under_way.set()
        assert self.go_on.wait(PATIENCE)
        yield self._pairs[-1]
