"""An engine whose sequences all decode at one context length, without computing their prefill."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ....rollout.config import EngineConfig
from ....rollout.engine import Engine
from ....rollout.running.cpu_graphs import PLAIN_STEPS
from ....rollout.sampling_params import SamplingParams
from .machine_peaks import Peaks
from .runs import clock

_NUM_SKIPPED = PLAIN_STEPS + 4  # decode steps that warm up, until a CPU replays its recording
_NUM_SPARE = _NUM_SKIPPED + 2  # tokens: one in the prefill, and no sequence ends in the last step


@dataclass(frozen=True)
class DecodeWork:
    """The bytes that one decode step must read, and the operations that it must compute."""

    num_bytes: int
    num_operations: int

    @classmethod
    def of(cls, model: PreTrainedModel, batch: int, context: int, kv_bytes_per_token: int) -> DecodeWork:
        """Count every weight once and the KV of every sequence; an embedding counts only if it is the head too.

        Of experts, those count that rows with even chances choose: all experts are equal, and a row is multiplied with
        its own ones only.
        """
        config = model.config
        num_weights: float = sum(parameter.numel() for parameter in model.parameters())
        if not config.tie_word_embeddings:
            embedding = model.get_input_embeddings().weight
            assert isinstance(embedding, Tensor)
            num_weights -= embedding.numel()
        in_experts = sum(weight.numel() for m in model.modules() if hasattr(m, "has_gate") for weight in m.parameters())
        chosen = config.num_experts_per_tok / config.num_experts if in_experts else 0.0  # by a row
        num_read = num_weights - in_experts * (1 - chosen) ** batch
        num_weights -= in_experts * (1 - chosen)
        itemsize = next(model.parameters()).element_size()
        num_bytes = num_read * itemsize + batch * context * kv_bytes_per_token
        attention = 4 * config.num_attention_heads * head_dim_of(config) * context * config.num_hidden_layers
        return cls(round(num_bytes), round(batch * (2 * num_weights + attention)))

    def floor_seconds(self, peaks: Peaks) -> float:
        return peaks.floor_seconds(self.num_bytes, self.num_operations)


def head_dim_of(config: Any) -> int:
    """Return the size of a head: a configuration may lack it, or leave it to be computed."""
    size: int | None = getattr(config, "head_dim", None)
    return size or config.hidden_size // config.num_attention_heads


def make_decode_engine(
    model: PreTrainedModel, batch: int, context: int, num_steps: int, *, invariant: bool, overlap: bool = False,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Engine:  # fmt: skip
    """Make an engine with room for one load of `decode_steps`. With a tokenizer it turns every token into text."""
    blocks_each = -(-(context + num_steps + _NUM_SPARE) // EngineConfig.block_size)
    config = EngineConfig(
        kv_cache=batch * blocks_each + 1,
        max_num_seqs=batch,
        max_num_batched_tokens=max(batch * context, batch),
        invariant=invariant,
        overlap=overlap,
        prefix_cache=False,
        speculation="off",  # each step has one row of every sequence
    )
    return Engine(model, config, tokenizer=tokenizer)


def decode_steps(
    engine: Engine, batch: int, context: int, num_steps: int,
    around: Callable[[Callable[[], object]], object] = lambda step: step(),
) -> list[float]:  # fmt: skip
    """Measure the seconds of `num_steps` steps, each of one row of every sequence, at about `context` tokens of
    context.

    Their KV is random numbers: a step reads as much as after a prefill, and takes as long. They run as `generate` runs
    them, those of one schedule together, which have the mean of their time. around: called to run those that count.
    With overlap the next step runs already when one returns: all have the mean of the time from one return to the last.
    """
    max_new_tokens = num_steps + _NUM_SPARE
    generator = torch.Generator().manual_seed(0)
    prompt_tokens = max(context - _NUM_SKIPPED - num_steps // 2, 1)
    prompts = torch.randint(engine.model.vocab_size, (batch, prompt_tokens), generator=generator)
    with engine.model.rollout_phase():
        for index, prompt in enumerate(prompts.tolist()):
            params = SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True, sampling_seed=index)
            engine.add(prompt, params)
        for keys in (*engine.parts.kv_cache.keys, *engine.parts.kv_cache.values):
            keys.normal_()
        with without_forward(engine):
            engine.step()
            engine.parts.runner.call(lambda: None)  # with overlap the step runs on a thread: it has run then
            clock(engine.model.device)
            engine.parts.runner.release_memory()  # and has recorded the step after it without the forward
        now = time.perf_counter if engine.config.overlap else partial(clock, engine.model.device)
        for _ in range(_NUM_SKIPPED):
            _checked(engine, batch, engine.step)
        seconds: list[float] = []
        began = before = now()
        while len(seconds) < num_steps:
            run = partial(engine.step, min(engine.config.num_scheduler_steps, num_steps - len(seconds)))
            num = _checked(engine, batch, partial(around, run))
            after = now()
            seconds += [(after - before) / num] * num
            before = after
        engine.abort_request(abort_all=True)
    return [(before - began) / num_steps] * num_steps if engine.config.overlap else seconds


def _checked(engine: Engine, batch: int, run: Callable[[], object]) -> int:
    """Call `run` and return how many steps it ran. They have one row of every sequence."""
    num_rows, num_steps = engine.metrics.num_rows, engine.metrics.num_steps
    run()
    num = engine.metrics.num_steps - num_steps
    assert engine.metrics.num_rows - num_rows == batch * num > 0, "not a decode step of the whole batch"
    return num


@contextmanager
def without_forward(engine: Engine) -> Iterator[None]:
    """Replace the model's forward by one that computes nothing, for the time of the context: any token follows."""
    model = engine.model

    def forward(
        token_ids: Tensor | None, positions: Tensor, logit_rows: Tensor | None, step: object,
        hidden: Tensor | None = None, *, whole_logits: bool = True, features: object = None,
    ) -> Tensor:  # fmt: skip  # as HostedModel.forward
        num_rows = len(positions if logit_rows is None else logit_rows)
        return torch.zeros(num_rows, model.vocab_size, device=model.device)

    model.forward = forward  # type: ignore[method-assign]  # restored below
    try:
        yield
    finally:
        del model.forward


def median_ms(seconds: list[float]) -> float:
    return round(statistics.median(seconds) * 1e3, 3)
