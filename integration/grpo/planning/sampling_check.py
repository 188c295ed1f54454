"""The check of `rollout.sampling` against the model, and what of it the reported log-probabilities do not say."""

from __future__ import annotations

from typing import cast

from transformers import PreTrainedTokenizerBase

from ....rollout.grammars.catalog import Grammars
from ....rollout.grammars.token_text import FastTokenizer
from ....rollout.sampling_params import GRAMMARS, SamplingParams
from ..settings.config import JobConfig

_DISTORTS = {
    "top_p": "less likely tokens are never drawn",
    "top_k": "less likely tokens are never drawn",
    "min_p": "less likely tokens are never drawn",
    "frequency_penalty": "tokens that have occurred are drawn less often",
    "presence_penalty": "tokens that have occurred are drawn less often",
    "repetition_penalty": "tokens that have occurred are drawn less often",
    "logit_bias": "the tokens that it names are drawn more or less often",
    "min_new_tokens": "the first tokens are never an end of sequence or a stop token",
    **dict.fromkeys(GRAMMARS, "tokens that the grammar does not allow are never drawn"),
}


def check_sampling(config: JobConfig, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    """Compile the grammar of `rollout.sampling`, and compare its token ids with the vocabulary. Raises ValueError by
    the key."""
    params = config.rollout.params(0)
    named = {"logit_bias": list(params.logit_bias or ()), "stop_token_ids": list(params.stop_token_ids)}
    wrong = [
        f"rollout.sampling.{name} names tokens {bad[:5]}, but the vocabulary ends at {vocab_size - 1}"
        for name, ids in named.items()
        if (bad := [token for token in ids if token >= vocab_size])
    ]
    if wrong:
        raise ValueError("; ".join(wrong))
    if not params.is_constrained:
        return
    ends = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    grammars = Grammars(cast(FastTokenizer, tokenizer), vocab_size, ends)
    try:
        [grammar] = grammars.compiled([params])
        assert grammar is not None  # of constrained parameters
        grammars.state(grammar, params)
    except ValueError as error:
        name = next(name for name in GRAMMARS if getattr(params, name) is not None)
        raise ValueError(f"rollout.sampling.{name}: {str(error).removeprefix(f'{name}: ')}") from error
    finally:
        grammars.close()


def distortions(config: JobConfig) -> list[str]:
    """Return the keys of `rollout.sampling` that change what is drawn, and how. The reported log-probabilities stay
    those of the whole vocabulary at `rollout.temperature`."""
    params, plain = config.rollout.params(0), SamplingParams()
    changed = [name for name in _DISTORTS if getattr(params, name) not in (getattr(plain, name), {})]
    return [f"rollout.sampling.{name}: {_DISTORTS[name]}" for name in changed]


def distortion_warning(config: JobConfig) -> str:
    """Return a warning of samples that are not drawn from what their log-probabilities say; empty without need."""
    if not (found := distortions(config)):
        return ""
    return (
        f"samples are not drawn from the policy that is trained ({'; '.join(found)}). Their log-probabilities are the "
        "model's own, of its whole vocabulary at rollout.temperature, in the engine as in the trainer: logprob_gap "
        "does not show the difference, and the loss does not correct it"
    )
