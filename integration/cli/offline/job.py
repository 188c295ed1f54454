"""Offline generation: prompts from a file or standard input, answers appended to a JSONL file as they finish.

An answer is one line. Answers are in the order in which they finish; sorted by `index`, the number of the input line
from 0, they are in the order of the input. A line has five hashes of its sources: the prompt, the sampling settings,
the engine settings that change results, the weights, and the model's configuration with its tokenizer; and the number
of the definition of draws. A run whose output file exists computes the missing answers, and refuses if one of the six
differs. It also computes those again that the KV pool cut short, or that were not taken: a larger pool gives others.
The noise of an answer depends only on the seed, its index and its sample number: a run that was interrupted and
continued gives the answers of an uninterrupted one.
"""

from __future__ import annotations

import hashlib
import json
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from tqdm import tqdm

from ....kernels.sampling.definition import DRAW_DEFINITION
from ....rollout.completion import Completion, FinishReason
from ....rollout.config import EngineConfig
from ....rollout.sampling_params import SamplingParams
from .answer_file import GRAMMAR_SETTINGS, MODE, MORE_SETTINGS, RESULT_SETTINGS, STANDARD, AnswerFile
from .conversations import Conversations, Message, is_conversation, read_conversations, refuse_half_pair

_MAX_FAULTS = 10  # input lines named in one message


@dataclass(frozen=True)
class Prompt:
    """One line of the input."""

    index: int  # number of the line, from 0; blank lines count
    prompt: str | list[int] | list[Message]  # text, token ids, or a conversation
    id: object = None  # the line's "id", copied to its answers
    variables: Mapping[str, object] = field(default_factory=dict)  # of the chat template, for a conversation

    @property
    def hash(self) -> str:
        """The hash of the prompt, with the variables of its chat template."""
        return _hash([self.prompt, dict(self.variables)] if self.variables else self.prompt)


@dataclass(frozen=True)
class OfflineJob:
    """The settings of one run of `lockstep generate`."""

    model: str
    input: str = STANDARD
    output: str = STANDARD
    prompt_field: str = "prompt"
    as_text: bool = False  # lines are prompts, not JSON objects
    sampling: SamplingParams = field(default_factory=SamplingParams)  # n answers a prompt
    engine: EngineConfig = field(default_factory=EngineConfig)
    messages: str = ""  # JSON file of conversations, in place of the input
    conversations: Conversations = field(default_factory=Conversations)

    def where(self, index: int) -> str:
        """Return the place of a prompt, for errors."""
        if self.messages:
            return f"--messages {self.messages}, conversation {index + 1}"
        return f"--input {self.input}, line {index + 1}"

    @property
    def hashes(self) -> dict[str, str]:
        """Hashes of the sampling and engine settings and the number of draws, by the keys of an answer's sources."""
        engine = {name: getattr(self.engine, name) for name in RESULT_SETTINGS}
        more = list(MORE_SETTINGS)
        if self.sampling.is_constrained:
            more += [*GRAMMAR_SETTINGS, *([MODE] if self.sampling.jump_forward is None else [])]
        usual = EngineConfig()
        engine |= {name: value for name in more if (value := getattr(self.engine, name)) != getattr(usual, name)}
        sampling = _hash(asdict(replace(self.sampling, n=1)))
        return {"sampling": sampling, "engine": _hash(engine), "draws": str(DRAW_DEFINITION)}


Work = tuple[Prompt, int]  # a prompt, and the number of its sample, from 0


def read_prompts(job: OfflineJob) -> list[Prompt]:
    """Read and check the whole input. Raises ValueError naming the file and every wrong line."""
    if job.messages:
        found = enumerate(read_conversations(job.messages))
        return [_opened(job, Prompt(index, cast(Any, one)), job.where(index)) for index, one in found]
    name = "standard input" if job.input == STANDARD else job.input
    if job.input == STANDARD and sys.stdin is None:
        raise ValueError("standard input is closed: name a file with --input")
    try:
        data = sys.stdin.buffer.read() if job.input == STANDARD else Path(job.input).read_bytes()
        text = data.decode("utf-8")
    except OSError as error:
        raise ValueError(f"--input {name}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ValueError(f"--input {name}, line {line}: not UTF-8 text") from error
    prompts, faults = [], []
    # Not splitlines(): it also splits at U+2028 and other characters, which JSON strings may contain.
    for index, line in enumerate(text.split("\n")):
        if not line.strip():
            continue
        try:
            if job.as_text:
                prompt = Prompt(index, line.removesuffix("\r"))
            else:
                prompt = _parse(index, line, job.prompt_field)
            is_text = isinstance(prompt.prompt, str)
            if is_conversation(prompt.prompt) or (is_text and job.conversations.takes_text):
                prompt = _opened(job, prompt)
            prompts.append(prompt)
        except ValueError as error:
            faults.append(f"line {index + 1}: {error}")
    _refuse(f"--input {name}, ", faults)
    if not prompts:
        raise ValueError(f"--input {name}: holds no prompt")
    return prompts


def _refuse(where: str, faults: Sequence[str]) -> None:
    """Raise ValueError for faults of lines, the first ones of many, if there are some."""
    if faults:
        more = f"; and {len(faults) - _MAX_FAULTS} more lines" if len(faults) > _MAX_FAULTS else ""
        raise ValueError(f"{where}{'; '.join(faults[:_MAX_FAULTS])}{more}")


def _opened(job: OfflineJob, prompt: Prompt, where: str = "") -> Prompt:
    """Return a prompt as a conversation. Raises ValueError, which begins with `where`."""
    conversations = job.conversations
    try:
        messages = conversations.opened(cast(str | list[Message], prompt.prompt))
        return replace(prompt, prompt=messages, variables=conversations.template_kwargs)
    except ValueError as error:
        raise ValueError(f"{where}: {error}" if where else str(error)) from error


def _parse(index: int, line: str, name: str) -> Prompt:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at column {error.colno}); --text takes lines as prompts") from error
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(record, dict):
        raise ValueError(f"must be a JSON object, not {type(record).__name__}; --text takes lines as prompts")
    if name == "prompt" and name not in record and "messages" in record:
        name = "messages"  # as chat clients call it
    if name not in record:
        raise ValueError(f"field {name!r} is missing")
    prompt = record[name]
    if not prompt or not (isinstance(prompt, str) or _is_ids(prompt) or is_conversation(prompt)):
        raise ValueError(f"field {name!r} must be a text, a list of token ids or a list of messages, and not empty")
    if isinstance(prompt, str):
        refuse_half_pair(f"field {name!r}", prompt)
    return Prompt(index, prompt, record.get("id"))


@dataclass(frozen=True)
class OfflineReport:
    """The counts of one run."""

    num_before: int  # answers that the file had before
    num_written: int
    num_ignored: int  # written answers without output, because the engine could not take the prompt; see finish_reason


def generate(job: OfflineJob) -> OfflineReport:
    """Compute the missing answers. After any interruption, the finished answers are in the file.

    Raises ValueError naming the wrong option, file or line.
    """
    prompts = read_prompts(job)
    file = AnswerFile(job.output)
    try:
        file.compare({prompt.index: prompt.hash for prompt in prompts}, job.sampling.n, job.hashes)
        run = _OfflineRun(job, file, prompts)  # also where no answer is missing: only it knows the weights
        file.drop_unfinished()
        every = [(prompt, sample) for prompt in prompts for sample in range(job.sampling.n)]
        return run.run([(prompt, sample) for prompt, sample in every if (prompt.index, sample) not in file.answers])
    finally:
        file.close()


class _OfflineRun:
    """The part of a job that needs the engine."""

    def __init__(self, job: OfflineJob, file: AnswerFile, prompts: Sequence[Prompt]) -> None:
        # Heavy imports come after the checks, so that a wrong option or line is reported at once.
        from ....kernels.sampling.draws import derive_seed
        from ....rollout.engine import Engine
        from ....rollout.model.tokenizer import tokenizer_content
        from ....rollout.receipt import guarantee
        from ...service import RolloutService

        self._job, self._file, self._derive_seed = job, file, derive_seed
        try:
            self._engine = Engine(job.model, job.engine)
        except OSError as error:  # transformers raises it for a folder that lacks a file
            raise ValueError(f"--model {job.model}: {error}") from error
        if self._engine.tokenizer is None and any(not _is_ids(prompt.prompt) for prompt in prompts):
            raise ValueError(f"--model {job.model} has no tokenizer: prompts must be lists of token ids")
        self._refuse_unknown_ids(prompts)
        self._template_ids: dict[int, array[int]] = {}  # of conversations without an answer, by their index
        digest = RolloutService(self._engine).model_digest()
        self._engine.weights.set_weight_digest(digest)
        made_by: object = digest
        if any(is_conversation(prompt.prompt) for prompt in prompts):
            assert self._engine.tokenizer is not None  # checked above
            made_by = [digest, str(self._engine.tokenizer.chat_template)]
        model = [
            guarantee(self._engine.model)["model"], sorted(self._engine.parts.eos_token_ids),
            None if self._engine.tokenizer is None else tokenizer_content(self._engine.tokenizer),
        ]  # fmt: skip
        self._hashes = {**job.hashes, "weights": _hash(made_by), "model": _hash(model)}
        file.compare({prompt.index: prompt.hash for prompt in prompts}, job.sampling.n, self._hashes)

    def _refuse_unknown_ids(self, prompts: Sequence[Prompt]) -> None:
        """Raise ValueError naming the prompts that have token ids beyond the vocabulary, before the first answer."""
        from ....rollout.control.desk.intake import prompt_ids

        faults = []
        for prompt in prompts:
            try:
                if _is_ids(prompt.prompt):
                    prompt_ids(cast(list[int], prompt.prompt), None, self._engine.model.vocab_size)
            except ValueError as error:
                faults.append(f"{self._job.where(prompt.index)}: {error}")
        _refuse("", faults)

    def _write_by_template(self, prompt: Prompt) -> None:
        """Keep the tokens of a conversation. Raises ValueError naming its place."""
        tokenizer, messages = self._engine.tokenizer, cast(list[Message], prompt.prompt)
        assert tokenizer is not None  # checked before
        where = self._job.where(prompt.index)
        if not tokenizer.chat_template:
            raise ValueError(f"{where}: messages need a chat template, and the tokenizer of {self._job.model} has none")
        try:
            self._template_ids[prompt.index] = array("I", self._job.conversations.token_ids(messages, tokenizer))
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error

    def run(self, work: Sequence[Work]) -> OfflineReport:
        """Keep the engine full, with as many requests waiting as may run, and write the finished answers."""
        # All of them before the first answer: a conversation that the template refuses is named at once.
        for prompt, _ in work:
            if is_conversation(prompt.prompt) and prompt.index not in self._template_ids:
                self._write_by_template(prompt)
        engine, num_before, num_ignored = self._engine, len(self._file.answers), 0
        waiting = iter(work)
        live: dict[str, Work] = {}
        bar = tqdm(
            total=num_before + len(work),
            initial=num_before,
            unit="answer",
            dynamic_ncols=True,
            file=sys.stderr,
        )
        with bar:
            while True:
                while len(live) < 2 * self._job.engine.max_num_seqs and (item := next(waiting, None)) is not None:
                    live[self._add(*item)] = item
                if not live:
                    break
                finished = engine.step(engine.config.num_scheduler_steps)
                self._file.append(self._answer(*live.pop(c.id), c) for c in finished)
                num_ignored += sum(_finish_reason(c).type == "ignored" for c in finished)
                seconds, num_tokens = engine.metrics.step_seconds, engine.metrics.num_output_tokens
                if seconds:  # else no step has run yet: all of them were ignored
                    bar.set_postfix_str(f"{num_tokens / seconds:.0f} tok/s", refresh=False)
                bar.update(len(finished))
        return OfflineReport(num_before, len(work), num_ignored)

    def _seed(self, prompt: Prompt, sample: int) -> int:
        given = self._job.sampling.sampling_seed
        return self._derive_seed(self._job.engine.seed if given is None else given, prompt.index, sample)

    def _add(self, prompt: Prompt, sample: int) -> str:
        params = replace(self._job.sampling, n=1, sampling_seed=self._seed(prompt, sample))
        ids = self._template_ids.get(prompt.index)
        model_input = cast(str | list[int], prompt.prompt) if ids is None else ids.tolist()
        try:
            [rid] = self._engine.add(model_input, params, rid=f"{prompt.index}-{sample}")
        except ValueError as error:
            raise ValueError(f"{self._job.where(prompt.index)}: {error}") from error
        return rid

    def _answer(self, prompt: Prompt, sample: int, completion: Completion) -> dict[str, object]:
        reason = {name: value for name, value in asdict(_finish_reason(completion)).items() if value is not None}
        return {
            "index": prompt.index,
            "sample": sample,
            **({} if prompt.id is None else {"id": prompt.id}),
            "prompt": prompt.prompt,
            "text": completion.text,
            "prompt_ids": completion.prompt_ids,
            "token_ids": completion.token_ids,
            "logprobs": completion.logprobs,
            "temperature": self._job.sampling.temperature,
            "finish_reason": reason,
            "num_prompt_tokens": completion.num_prompt_tokens,
            "num_cached_tokens": completion.num_cached_tokens,
            "num_completion_tokens": completion.num_completion_tokens,
            "sampling_seed": self._seed(prompt, sample),
            "weight_version": completion.weight_version,
            "weight_digest": completion.weight_digest,
            **({} if completion.receipt is None else {"receipt": completion.receipt}),
            "made_from": {"prompt": prompt.hash, **self._hashes},
        }


def _finish_reason(completion: Completion) -> FinishReason:
    """Return the reason for which a finished sequence ended."""
    assert completion.finish_reason is not None
    return completion.finish_reason


def _is_ids(prompt: object) -> bool:
    return isinstance(prompt, list) and all(type(id) is int and id >= 0 for id in prompt)


def _hash(value: object) -> str:
    """Hash a JSON-like value to 16 hexadecimal digits."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
