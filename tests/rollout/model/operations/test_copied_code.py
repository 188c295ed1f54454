"""Copies of decorated code: transformers renames arguments of forwards by decorators, and others may add their own."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.model.operations.copied_code import innermost, with_names
from lockstep.rollout.model.operations.fused_layers import fused_forward
from lockstep.rollout.model.recurrent.layers import recurrent_forward
from lockstep.rollout.sampling_params import SamplingParams

OFFSET = 1


def renamed(old: str, new: str) -> Callable[[Callable], Callable]:
    """Make a decorator that gives a keyword its new name, as transformers' deprecate_kwarg."""

    def decorate(function: Callable) -> Callable:
        @functools.wraps(function)
        def run(*args, **named):
            return function(*args, **{new if name == old else name: value for name, value in named.items()})

        return run

    return decorate


@renamed("long_before", "before")
@renamed("before", "value")
def shifted(value: int, *, times: int = 1) -> int:
    return (value + OFFSET) * times


class Wrapped:
    """A decorator that keeps what it decorates in itself."""

    def __init__(self, function: Callable) -> None:
        functools.update_wrapper(self, function)

    def __call__(self, *args: int) -> int:
        return self.__wrapped__(*args)


def test_a_copy_keeps_decorators_defaults_and_the_original():
    copy = with_names(shifted, {"OFFSET": 10})
    assert (copy(1), copy(before=1, times=2), copy(long_before=2)) == (11, 22, 12)
    assert (shifted(1), copy.__name__) == (2, "shifted")
    assert innermost(copy).__globals__["OFFSET"] == 10
    assert innermost(shifted) is shifted.__wrapped__.__wrapped__


def test_code_is_not_copied_out_of_a_decorator_that_hides_it():
    kept = Wrapped(shifted)

    @functools.wraps(kept)
    def elsewhere(*args: int) -> int:
        return HIDDEN["it"](*args)

    HIDDEN = {"it": kept}
    assert with_names(elsewhere, {"OFFSET": 10}) is None
    assert innermost(len) is None


@pytest.mark.parametrize(
    ("family", "kind", "copied"),
    [("qwen2", Qwen2Attention, fused_forward), ("qwen3_5", Qwen3_5GatedDeltaNet, recurrent_forward)],
)
def test_a_decorated_layer_is_recognised_and_its_decorator_runs(make_model, monkeypatch, family, kind, copied):
    prompt, params = list(range(1, 20)), SamplingParams(temperature=0, max_new_tokens=4)
    expected = Engine(make_model(family), EngineConfig(kv_cache="20 blocks")).generate([prompt], params)[0]
    calls, own = [], kind.forward

    @functools.wraps(own)
    def counted(*args, **named):
        calls.append(named.keys())
        return own(*args, **named)

    monkeypatch.setattr(kind, "forward", counted)
    model = make_model(family)
    assert all(copied(module) is not None for module in model.modules() if isinstance(module, kind))
    found = Engine(model, EngineConfig(kv_cache="20 blocks")).generate([prompt], params)[0]
    assert (found.token_ids, found.logprobs) == (expected.token_ids, expected.logprobs) and calls
