"""The sequence that is run in two ways: a prompt and the tokens after it, from a file, a run of the job, or a text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...kernels.sampling.definition import GREEDY_BELOW
from ...rollout.model.loading import refuse_missing_folder
from ...rollout.model.tokenizer import load_tokenizer
from ..grpo.results.samples import read_samples, saved_steps


@dataclass(frozen=True)
class TokenSequence:
    """A prompt, the tokens after it, and what is claimed of them."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]  # after the prompt: at least one
    logprobs: tuple[float, ...] = ()  # as they were reported, one a token; (): none were
    temperature: float = 1.0  # of the log-probabilities
    source: str = ""  # where it comes from, for people
    is_temperature_known: bool = True  # else it is assumed

    def __post_init__(self) -> None:
        wrong = []
        for name in ("prompt_ids", "token_ids"):
            ids = getattr(self, name)
            if not ids:
                wrong.append(f"{name} is empty")
            elif not all(type(id) is int and id >= 0 for id in ids):
                wrong.append(f"{name} must be a list of token ids")
        if not all(type(one) in (int, float) for one in self.logprobs):
            wrong.append("logprobs must be a list of numbers")
        if self.logprobs and len(self.logprobs) != len(self.token_ids):
            wrong.append(f"{len(self.logprobs)} logprobs stand for {len(self.token_ids)} token_ids")
        if not self.temperature > 0:
            wrong.append(f"temperature must be above 0, not {self.temperature}: a greedy draw reports it as 1")
        if wrong:
            raise ValueError(f"{self.source or 'the sequence'}: {'; '.join(wrong)}")

    @property
    def ids(self) -> tuple[int, ...]:
        """Prompt and output."""
        return self.prompt_ids + self.token_ids

    @property
    def num_rows(self) -> int:
        """Number of rows of its forward: the last token is no input."""
        return len(self.prompt_ids) + len(self.token_ids) - 1

    def save(self, path: Path) -> None:
        """Write it as JSON, in the form that `read_sequence` reads."""
        path.write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")


def sequence_of(values: Mapping[str, Any], source: str) -> TokenSequence:
    """Make a sequence of a JSON object with `prompt_ids` and `token_ids`, as lines of samples and `generate` have
    them. Raises ValueError that names the source."""
    missing = [name for name in ("prompt_ids", "token_ids") if not isinstance(values.get(name), list)]
    missing += ["logprobs"] if not isinstance(values.get("logprobs") or [], list) else []
    if missing:
        raise ValueError(f"{source} has no list of {' and no list of '.join(missing)}")
    token_ids, logprobs = values["token_ids"], values.get("logprobs") or ()
    if "episode_ids" in values:  # of several turns: some of its tokens are its environment's, which have no score
        token_ids, logprobs = values["episode_ids"], ()
    temperature = _temperature(values, source)
    return TokenSequence(
        tuple(values["prompt_ids"]), tuple(token_ids), tuple(logprobs), 1.0 if temperature is None else temperature,
        source, temperature is not None,
    )  # fmt: skip


def _temperature(values: Mapping[str, Any], source: str) -> float | None:
    """Return the temperature of a sample's log-probabilities, its own or its receipt's; None: it has none. A greedy
    draw reports them at 1."""
    given = values.get("temperature")
    if given is None and (given := _of_receipt(values)) is None:
        return None
    if type(given) not in (int, float):
        raise ValueError(f"{source}: temperature must be a number, not {given!r}")
    return 1.0 if 0 <= given < GREEDY_BELOW else float(given)


def _of_receipt(values: Mapping[str, Any]) -> float | None:
    """Return the temperature that a sample's receipt names; None: it has no receipt."""
    receipts = values.get("receipts")
    receipt = receipts[0] if isinstance(receipts, list) and receipts else values.get("receipt")
    settings = receipt.get("settings") if isinstance(receipt, Mapping) else None
    if not isinstance(settings, Mapping):
        return None
    given = settings.get("temperature", 1.0)  # those that are not the default, numbers as texts of their bits
    try:
        return float.fromhex(given) if isinstance(given, str) else float(given)
    except (TypeError, ValueError, OverflowError):
        return None


def read_sequence(path: Path, line: int = 0, temperature: float | None = None) -> TokenSequence:
    """Read a JSON object, or line `line` (from 0) of a file of such lines. temperature: None: the object's or
    its receipt's, or else 1. Raises ValueError naming the file."""
    try:
        text = path.read_text(encoding="utf-8")
        try:
            found = [json.loads(text)]
        except json.JSONDecodeError:
            # Not splitlines: servers write U+2028 and its like as they are, and these end no line of JSON.
            found = [json.loads(its) for its in text.split("\n") if its.strip()]
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}") from error
    if not 0 <= line < len(found):
        raise ValueError(f"{path} has samples 0 to {len(found) - 1}, not {line}" if found else f"{path} is empty")
    if not isinstance(found[line], dict):
        raise ValueError(f"{path}: sample {line} is no JSON object")
    return sequence_of({**found[line], **_replaced(temperature)}, str(path))


def _replaced(temperature: float | None) -> dict[str, float]:
    return {} if temperature is None else {"temperature": temperature}


def sample_of(run: Path, step: int | None, sample: int, temperature: float | None) -> TokenSequence:
    """Read a sample that a run of the job has kept. step: None: of the newest step; temperature: None: the sample's.
    Raises ValueError for one that is not there."""
    steps = saved_steps(run)
    if not steps:
        raise ValueError(f"{run} has no samples")
    step = steps[-1] if step is None else step
    rows = read_samples(run, step)
    if not 0 <= sample < len(rows):
        raise ValueError(f"step {step} of {run} has samples 0 to {len(rows) - 1}, not {sample}")
    return sequence_of({**rows[sample], **_replaced(temperature)}, f"sample {sample} of step {step} of {run}")


def text_sequence(text: str, model: Path, temperature: float) -> TokenSequence:
    """Return a text as tokens of the model's tokenizer, of which the first is the prompt. Raises ValueError for a
    folder without one, and for a text of one token."""
    refuse_missing_folder(model)
    tokenizer = load_tokenizer(model)
    if tokenizer is None:
        raise ValueError(f"--text needs a tokenizer, and {model} has none")
    ids = tokenizer(text)["input_ids"]
    if len(ids) < 2:
        raise ValueError(f"--text has {len(ids)} tokens, and at least 2 are needed")
    return TokenSequence(tuple(ids[:1]), tuple(ids[1:]), (), temperature, "text")
