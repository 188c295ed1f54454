"""One type of the sweep: a tiny random model of it is built, hosted and compared with transformers and its trainer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from lockstep.integration.grpo.training.shared_prefixes import why_no_shared_prefixes
from lockstep.kernels.sampling.logprobs import selected_logprobs
from lockstep.rollout.completion import Completion
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.tests.families.configs import tiny_config
from lockstep.tests.support.random_models import cast, spread_weights

PROMPTS = [[13, 17, 90, 14, 55], [27] * 3 + list(range(40, 75)), [200]]  # the second is prefilled in chunks of 13
NUM_NEW = 10
TOLERANCE = 1e-3  # between log-probabilities of the engine and of the module's own forward, in float32
CLASSES = {
    "text": transformers.AutoModelForCausalLM,
    "vision": transformers.AutoModelForImageTextToText,
}


@dataclass
class Progress:
    """The part of the comparison that runs now: an error belongs to it."""

    part: str = "build"


class Differs(Exception):
    """A hosted model whose engine computes something else."""


def compare(kind: str, model_type: str, progress: Progress) -> list[str]:
    """Compare one type in float32 and bfloat16. Returns remarks; raises Differs, and whatever the parts raise.

    kind: of CLASSES.
    """
    remarks: list[str] = []
    for dtype in (torch.float32, torch.bfloat16):
        progress.part = f"build {dtype}"
        model = random_model(kind, model_type, dtype)
        progress.part = f"host {dtype}"
        engine = Engine(model, EngineConfig(kv_cache="32 blocks", max_num_seqs=4, chunked_prefill_size=13))
        progress.part = f"compare {dtype}"
        if dtype is torch.float32:
            remarks += _compare_greedy(engine, model)
            if (why := why_no_shared_prefixes(engine.model)) is not None and "computes other numbers" in why:
                raise Differs(why)
        remarks += [one for one in _compare_gap(engine, model) if one not in remarks]
        engine.close()
    return remarks


def random_model(
    kind: str,
    model_type: str,
    dtype: torch.dtype,
    change: Callable[[PretrainedConfig], PretrainedConfig] = lambda config: config,
) -> PreTrainedModel:
    """Make the tiny random model of a type, with norms that are not all ones. change: of its configuration."""
    config = change(tiny_config(model_type))
    torch.manual_seed(1)
    model = cast(CLASSES[kind].from_config(config, attn_implementation="eager"), dtype)
    spread_weights(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 and "norm" in name and name.endswith("weight"):
                parameter += 0.1 * torch.randn(parameter.shape).to(parameter.dtype)
    return model.eval()


def _compare_greedy(engine: Engine, model: PreTrainedModel) -> list[str]:
    """Compare greedy tokens with transformers' generate, log-probabilities with the module's own forward, and both
    with those of prompts that are cached."""
    params = SamplingParams(max_new_tokens=NUM_NEW, temperature=0.0)
    first, again = engine.generate(PROMPTS, params), engine.generate(PROMPTS, params)
    if [(c.token_ids, c.logprobs) for c in first] != [(c.token_ids, c.logprobs) for c in again]:
        raise Differs("other tokens or log-probabilities with cached prompts")
    remarks: list[str] = []
    for prompt, completion in zip(PROMPTS, first, strict=True):
        ids = torch.tensor([[*prompt, *completion.token_ids]])
        with torch.no_grad():
            logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
        off = (selected_logprobs(logits, ids[0, len(prompt) :]) - torch.tensor(completion.logprobs)).abs().max()
        if logits.argmax(-1).tolist() != list(completion.token_ids) or not off <= TOLERANCE:
            raise Differs(f"greedy tokens or log-probabilities, off by {off:.2g}, are not the module's own")
        with torch.no_grad():
            expected = model.generate(
                torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                max_new_tokens=NUM_NEW, do_sample=False, pad_token_id=0,
            )  # fmt: skip
        if not torch.equal(expected, ids):
            remarks = ["`generate` of transformers gives other tokens than the module's own forward"]
    return remarks


def _compare_gap(engine: Engine, model: PreTrainedModel) -> list[str]:
    """Compare the bits of sampled log-probabilities with the trainer's: whole, padded and packed."""
    params = SamplingParams(max_new_tokens=NUM_NEW, temperature=0.7, sampling_seed=5)
    completions = engine.generate(PROMPTS, params)
    remarks = []
    try:
        model.train()
        with engine.model.training_numerics():
            whole = [_logits(model, c.prompt_ids + c.token_ids) for c in completions]
    except ValueError as refusal:
        text = str(refusal)
        why = "it draws random numbers" if "random numbers" in text else text
        remarks.append(f"a forward in train mode is refused: {why}")
        model.eval()
    with engine.model.training_numerics():
        whole = [_logits(model, c.prompt_ids + c.token_ids) for c in completions]
        _refuse_gap("whole", completions, whole)
        _refuse_gap("padded", completions, _padded(model, completions))
        try:
            packed = _packed(model, completions)
        except (TypeError, ValueError) as refusal:
            logging.getLogger(__name__).info("packed: %s", refusal)
            remarks.append("packed rows are refused")
        else:
            _refuse_gap("packed", completions, packed)
    return remarks


def _logits(model: PreTrainedModel, ids: Sequence[int]) -> Tensor:
    return model(torch.tensor([ids]), use_cache=False).logits[0]


def _padded(model: PreTrainedModel, completions: Sequence[Completion]) -> list[Tensor]:
    rows = [torch.tensor(c.prompt_ids + c.token_ids) for c in completions]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    return list(model(ids, attention_mask=mask, use_cache=False).logits)


def _packed(model: PreTrainedModel, completions: Sequence[Completion]) -> list[Tensor]:
    lengths = [len(c.prompt_ids) + len(c.token_ids) for c in completions]
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    ends: dict[str, Any] = {f"cu_seq_lens_{one}": starts for one in "qk"}
    ends |= {f"max_length_{one}": max(lengths) for one in "qk"}
    ids = torch.tensor([[token for c in completions for token in (*c.prompt_ids, *c.token_ids)]])
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    return list(model(ids, position_ids=positions, use_cache=False, **ends).logits[0].split(lengths))


def _refuse_gap(layout: str, completions: Sequence[Completion], logits: Sequence[Tensor]) -> None:
    gap = 0.0
    for completion, of_row in zip(completions, logits, strict=True):
        first = completion.num_prompt_tokens - 1
        rows = of_row[first : first + len(completion.token_ids)]
        found = selected_logprobs(rows, torch.tensor(completion.token_ids), 0.7)
        gap = max(gap, float((found - torch.tensor(completion.logprobs)).abs().max()))
    if gap:
        raise Differs(f"logprob_gap {gap:.2g} ({layout})")
