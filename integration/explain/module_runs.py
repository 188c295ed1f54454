"""A known sequence run by the module itself: as the trainer does, or with transformers' own operations."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from ...kernels.sampling.logprobs import selected_logprobs
from ...rollout.model.forward_numerics import restored_implementations
from ...rollout.model.hosted_model import HostedModel
from ...rollout.model.rollout_phase import evaluated
from ..grpo.training.packing import Sample, pack
from .recorder import Recorder
from .recording import Recording
from .sequence import TokenSequence
from .ways import Way


def run_trainer(module: PreTrainedModel, way: Way, sequence: TokenSequence) -> Recording:
    """Run the sequence as the job's trainer does: packed, behind `way.mates` other samples, with gradients recorded."""
    _refuse_unknown_tokens(module, sequence)
    hosted = HostedModel.adopt(module, dtype=None, device=None, invariant=way.invariant, k_blocks=way.k_blocks or 1)
    samples, first = [], 0
    for mate in range(1, way.mates + 1):
        generator = torch.Generator().manual_seed(mate)
        ids = torch.randint(hosted.vocab_size, (sequence.num_rows // 2 + mate,), generator=generator).tolist()
        samples.append(Sample(tuple(ids), (0,), (0.0,), 0.0))
        first += samples[-1].num_rows
    num_tokens = len(sequence.token_ids)
    samples.append(Sample(sequence.prompt_ids, sequence.token_ids, (0.0,) * num_tokens, 0.0))
    packed = pack(samples, hosted.device)
    recorder = Recorder(module)
    recorder.own(first, sequence.num_rows)
    flags = [(part, part.training) for part in module.modules()]
    try:
        module.train()
        with hosted.training_numerics(), torch.enable_grad(), recorder.recording_on() as recording:
            logits = module(**packed.model_inputs()).logits[0]
            logprobs = selected_logprobs(logits, packed.targets, sequence.temperature)[-num_tokens:]
    finally:
        for part, training in flags:
            part.training = training
    recording.logprobs = dict(enumerate(logprobs.tolist(), len(sequence.prompt_ids)))
    recording.notes.append(f"{way.describe()}: {hosted.numerics.describe()}")
    return recording


def run_transformers(module: PreTrainedModel, way: Way, sequence: TokenSequence) -> Recording:
    """Run the sequence whole, with the module's own operations and one of transformers' attentions.

    Raises ValueError for an attention that the module or this machine does not have.
    """
    _refuse_unknown_tokens(module, sequence)
    device = next(module.parameters()).device
    ids = torch.tensor([sequence.ids[:-1]], device=device)
    num_tokens = len(sequence.token_ids)
    rows = torch.arange(sequence.num_rows - num_tokens, sequence.num_rows, device=device)
    targets = torch.tensor(sequence.token_ids, device=device)
    recorder = Recorder(module)
    with restored_implementations(module), evaluated(module), torch.no_grad():
        try:
            module.set_attn_implementation(way.attention)
        except (ValueError, ImportError) as error:
            raise ValueError(f"the way {way.describe()!r}: {error}") from error
        with recorder.recording_on() as recording:
            logits = module(ids, use_cache=False, logits_to_keep=rows).logits[0].float()
    logprobs = torch.log_softmax(logits / sequence.temperature, -1).gather(-1, targets[:, None])
    recording.logprobs = dict(enumerate(logprobs.flatten().tolist(), len(sequence.prompt_ids)))
    recording.notes.append(f"{way.describe()}: transformers' own operations and its attention {way.attention!r}")
    return recording


def _refuse_unknown_tokens(module: PreTrainedModel, sequence: TokenSequence) -> None:
    vocab_size = module.config.get_text_config(decoder=True).vocab_size
    if unknown := sorted({id for id in sequence.ids if id >= vocab_size}):
        raise ValueError(f"tokens {unknown[:5]} are beyond the vocabulary, which ends at {vocab_size - 1}")
