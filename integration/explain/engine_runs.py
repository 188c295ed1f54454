"""A known sequence run by a real engine: its scheduler, its paged KV, its prefix cache and its drafts.

The engine draws the tokens of the sequence because its sampler is told them. Nothing else of it is changed, and its
steps are not recorded graphs while a recorder reads them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...kernels.sampling.draws import RowSettings, derive_seed
from ...kernels.sampling.logprobs import selected_logprobs
from ...rollout.completion import Completion
from ...rollout.config import EngineConfig
from ...rollout.engine import Engine
from ...rollout.loop.assemble import make_graphs
from ...rollout.loop.parts import MakeRunner, RunnerParts
from ...rollout.replica.controller import ReplicaRunner
from ...rollout.replica.stage import Stage
from ...rollout.request_options import RequestOptions
from ...rollout.running.batch import SampledRow
from ...rollout.running.model_runner import LaunchedStep, ModelRunner
from ...rollout.running.runner import Runner
from ...rollout.running.sampler import Sampled, Sampler
from ...rollout.sampling_params import SamplingParams
from ...rollout.sequences.request import Request
from ...rollout.sequences.step import ScheduleOutput, SequenceResult
from ...rollout.speculation.lengths import WholeDrafts
from .recorder import Recorder
from .recording import Recording
from .sequence import TokenSequence
from .ways import BLOCK_SIZE, RunFailed, Way

_SEED = 7_000_000_000_001  # of the requests whose rows are the sequence's; the mates have others
_OWN = derive_seed(_SEED, 0)  # by which their noise, and these requests, are known on all ranks
_MATE_LENGTH = 5  # tokens of a mate's prompt more than the mate before has


class _ToldSampler(Sampler):
    """A sampler that draws the given tokens for the sequence, and reports their log-probabilities as it always does."""

    def __init__(self, eos_token_ids: frozenset[int], ids: Sequence[int]) -> None:
        super().__init__(eos_token_ids)
        self._ids = ids

    def settings_of(self, requests: Sequence[Request]) -> RowSettings | None:
        return None  # all draws come to `sample`

    def sample(self, logits: Tensor, rows: Sequence[SampledRow], allowed: Sequence[bytes | None] = ()) -> list[Sampled]:
        choices = super().sample(logits, rows, allowed)
        for index, row in enumerate(rows):
            if row.request.seed != _OWN or row.num_tokens >= len(self._ids):
                continue
            token = self._ids[row.num_tokens]
            scored = selected_logprobs(
                logits[index : index + 1], torch.tensor([token], device=logits.device), row.request.params.temperature
            )
            choices[index] = Sampled(token, scored.item(), ())
        return choices


class _Watch:
    """The link from an engine's steps to a recorder: which rows are the sequence's."""

    recorder: Recorder | None = None

    def step(self, output: ScheduleOutput, requests: Mapping[str, Request]) -> None:
        first, own = 0, (0, 0)
        for item in output.scheduled:
            if requests[item.id].seed == _OWN:
                own = first, item.num_rows
            first += item.num_rows
        if self.recorder is not None:
            self.recorder.own(*own)


class _WatchedRunner(ModelRunner):
    watch: _Watch

    def launch(self, output: ScheduleOutput, requests: Mapping[str, Request]) -> LaunchedStep:
        self.watch.step(output, requests)
        return super().launch(output, requests)


class _WatchedStage(Stage):
    watch: _Watch

    def run(self, output: ScheduleOutput, requests: Mapping[str, Request]) -> list[SequenceResult]:
        self.watch.step(output, requests)
        return super().run(output, requests)


def _maker(ids: Sequence[int], watch: _Watch, *, records: bool) -> MakeRunner:
    def make(parts: RunnerParts) -> Runner:
        sampler, config, trace = _ToldSampler(parts.eos_token_ids, ids), parts.config, parts.reports.trace
        if parts.ranks.mesh.num_ranks > 1:
            stage = _WatchedStage(
                parts.ranks, parts.model, parts.kv_cache, parts.state_pool, sampler, config.block_size, trace
            )
            stage.watch = watch
            return ReplicaRunner(parts.ranks, stage, parts.reports.metrics, config.state_check_steps)
        runner = _WatchedRunner(
            parts.model, parts.kv_cache, parts.state_pool, sampler, config.block_size, trace, overlap=False,
            graphs=None if records else make_graphs(parts),
        )  # fmt: skip
        runner.watch = watch
        return runner

    return make


def run_engine(model: PreTrainedModel | Path, way: Way, sequence: TokenSequence, *, records: bool = True) -> Recording:
    """Run the sequence in an engine. All ranks of a replica call it together; each gets the recording of its part.

    records: False to read no operations, only the log-probabilities, as the engine usually computes them: with several
    layers in one call of a kernel, and recorded decode steps. Raises ValueError for a model that no engine
    hosts and a sequence beyond its context, and RunFailed if the engine did not go the way.
    """
    watch = _Watch()
    engine = Engine(model, _config(way, sequence), make_runner=_maker(sequence.ids, watch, records=records))
    try:
        if len(sequence.ids) > (context := engine.max_model_len):
            raise ValueError(f"the sequence has {len(sequence.ids)} tokens, and the model's context has {context}")
        if engine.parts.speculation is not None:
            engine.parts.speculation.lengths = WholeDrafts()
        hosted = engine.model
        with hosted.rollout_phase():
            recorder = Recorder(hosted.module, hosted.division)
            watch.recorder = recorder if records else None
            with recorder.recording_on() if records else nullcontext():
                completion = _generate(engine, way, sequence)
        recording = recorder.recording
        recording.notes.append(f"{way.describe()}: {hosted.numerics.describe()}")
    finally:
        engine.close()
    _check(completion, way, sequence)
    recording.logprobs |= _logprobs(completion, sequence)
    return recording


def _config(way: Way, sequence: TokenSequence) -> EngineConfig:
    longest = sequence.num_rows + 1 + way.mates * _MATE_LENGTH
    num_blocks = (1 + way.mates) * (-(-longest // BLOCK_SIZE) + 2)
    return EngineConfig(
        dtype=way.dtype or None, kv_cache=num_blocks, block_size=BLOCK_SIZE, max_num_seqs=1 + way.mates,
        max_num_batched_tokens=(1 + way.mates) * (longest + 64), chunked_prefill_size=way.chunk or None,
        invariant=way.invariant, tp=way.tp, pp=way.pp, k_blocks=way.k_blocks or way.tp,
        speculation={"caller": way.draft} if way.draft else "off", prefix_cache=bool(way.prefix),
    )  # fmt: skip


def _generate(engine: Engine, way: Way, sequence: TokenSequence) -> Completion:
    """Return the answer to the sequence's request."""
    num_prompt = len(sequence.prompt_ids)
    if way.prefix:
        if way.prefix >= sequence.num_rows:
            raise ValueError(f"prefix={way.prefix} leaves nothing of the sequence's {sequence.num_rows} rows")
        engine.generate([list(sequence.ids[: way.prefix])], _params(sequence, 1))
    if way.runner == "prefill":
        prompt, num_new, scored = list(sequence.ids[:-1]), 1, num_prompt
    else:
        prompt, num_new, scored = list(sequence.prompt_ids), len(sequence.token_ids), -1
    if way.prefix:
        scored = -1  # log-probabilities of a prompt would compute its prefix again
    options = RequestOptions(
        logprob_start_len=scored, draft_token_ids=sequence.token_ids if way.draft else (), speculation=bool(way.draft)
    )
    prompts, params, all_options = [prompt], [_params(sequence, num_new)], [options]
    for mate in range(1, way.mates + 1):
        length = (len(prompt) + mate * _MATE_LENGTH) // 2 + 1
        vocab_size = engine.model.vocab_size
        prompts.append(torch.randint(vocab_size, (length,), generator=torch.Generator().manual_seed(mate)).tolist())
        params.append(SamplingParams(max_new_tokens=max(num_new, 2), ignore_eos=True, sampling_seed=mate))
        all_options.append(RequestOptions(speculation=False))
    return engine.generate(prompts, params, options=all_options)[0]


def _params(sequence: TokenSequence, num_new: int) -> SamplingParams:
    return SamplingParams(
        max_new_tokens=num_new, ignore_eos=True, temperature=sequence.temperature, sampling_seed=_SEED
    )


def _check(completion: Completion, way: Way, sequence: TokenSequence) -> None:
    """Raise RunFailed if the run was another one than asked for."""
    drawn = (completion.prompt_ids + completion.token_ids)[: len(sequence.ids)]
    if drawn != sequence.ids:
        raise RunFailed(f"{way.describe()} drew other tokens than it was told")
    if way.prefix and completion.num_cached_tokens != way.prefix:
        raise RunFailed(f"{way.describe()} found {completion.num_cached_tokens} tokens in its cache")
    if way.draft and len(sequence.token_ids) > 2 and not completion.num_accepted_tokens:
        raise RunFailed(f"{way.describe()} had no step with a draft")


def _logprobs(completion: Completion, sequence: TokenSequence) -> dict[int, float]:
    """Return the log-probabilities of output tokens by position."""
    first = len(completion.prompt_ids)
    found = dict(enumerate(completion.logprobs, first))
    prompt = completion.prompt_logprobs or ()
    scored = enumerate(prompt, first - len(prompt))
    found |= {at: value for at, value in scored if value is not None}
    return {at: value for at, value in sorted(found.items()) if len(sequence.prompt_ids) <= at < len(sequence.ids)}
