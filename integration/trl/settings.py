"""The sampling settings of a GRPOTrainer as the engine's, and the seeds of its samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...kernels.sampling.definition import GREEDY_BELOW
from ...kernels.sampling.draws import derive_seed
from ...rollout.sampling_params import SamplingParams

# Names of GRPOConfig.generation_kwargs, and the engine's for them.
_GENERATION_KWARGS = {
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "max_new_tokens": "max_new_tokens",
    "min_new_tokens": "min_new_tokens",
    "stop_strings": "stop",
    "stop": "stop",
    "stop_token_ids": "stop_token_ids",
}
_MODES = {"train": 0, "eval": 1}


def sampling_params(trainer: Any, max_model_len: int, banned: Mapping[int, float] | None = None) -> SamplingParams:
    """Return the settings that a GRPOTrainer's configuration asks for, without a seed.

    max_model_len: the limit of completions that have none. banned: the `logit_bias` of tokens that are never drawn, as
    TRL's own generation draws none that stands for images. Raises ValueError naming every setting that the engine does
    not have, or that would make its log-probabilities another policy's.
    """
    given = {name: value for name, value in (trainer.args.generation_kwargs or {}).items() if value is not None}
    wrong = []
    if trainer.temperature < GREEDY_BELOW:
        wrong.append(f"temperature={trainer.temperature}: TRL divides logits by it, so it must be positive")
    if given.pop("temperature", trainer.temperature) != trainer.temperature:
        wrong.append(
            f"generation_kwargs: temperature is not that of GRPOConfig ({trainer.temperature}), by which TRL divides "
            "logits"
        )
    if not given.pop("do_sample", True):
        wrong.append("generation_kwargs: do_sample=False: set a low temperature")
    if unknown := sorted(given.keys() - _GENERATION_KWARGS):
        known = ", ".join(sorted(_GENERATION_KWARGS))
        wrong.append(f"generation_kwargs: {', '.join(unknown)}: the engine has {known}")
    if wrong:
        raise ValueError("; ".join(wrong))
    settings = {
        "max_new_tokens": trainer.max_completion_length or max_model_len,
        "temperature": trainer.temperature,
        "top_p": trainer.top_p,
        "top_k": trainer.top_k,
        "min_p": trainer.min_p,
        "repetition_penalty": trainer.repetition_penalty,
        "stop_token_ids": list(trainer.eos_token_ids),
        "logit_bias": dict(banned) if banned else None,
    }
    for name, value in given.items():
        if _GENERATION_KWARGS[name] == "stop_token_ids":
            value = [*trainer.eos_token_ids, *value]
        settings[_GENERATION_KWARGS[name]] = value
    return SamplingParams.from_dict(settings)


class SampleSeeds:
    """The seeds of samples: a function of the trainer's seed, the mode, the step, the generation in it and the place.

    The same on any number of processes, and in a run that was resumed at a step.
    """

    def __init__(self) -> None:
        self._step: dict[str, int] = {}
        self._num: dict[str, int] = {}  # generations so far in that step

    def forget(self, mode: str) -> None:
        """Begin this mode's next generation as the first of its step."""
        self._step.pop(mode, None)

    def next(self, seed: int, mode: str, step: int, places: range) -> list[int]:
        """Return the seeds of a generation's samples. places: their numbers among the samples of all processes."""
        is_same = self._step.get(mode) == step
        self._num[mode] = self._num[mode] + 1 if is_same else 0
        self._step[mode] = step
        return [derive_seed(seed, _MODES[mode], step, self._num[mode], place) for place in places]
