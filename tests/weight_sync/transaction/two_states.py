"""A tiny model, two states of its weights, and the deadlines of the tests beside this file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import transformers
from torch import Tensor, nn

from lockstep.weight_sync.digests.model_digest import model_digest
from lockstep.weight_sync.manifest import TensorSpec, specs_of

CALL_S = 1.0  # deadline of every call
LATE_S = 3.0  # past a deadline: time to exchange the reasons, on a machine that does other work too
NUM_ATTEMPTS = 3
NUM_LANES = 9  # engines at a time: most of them wait for a deadline
SUITE_S = 400.0  # for all injections together: five times their usual time
BUCKET = 48 << 10
SHM_BUCKET = 2 * BUCKET  # a bucket is two halves of it
DELTA_BUCKET = 14 << 10
PROMPT = [3, 1, 4, 1, 5, 9]
NUM_TOKENS = 4

Weights = dict[str, Tensor]
Request = Mapping[str, object]


def tiny_model() -> nn.Module:
    config = transformers.Qwen3Config(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=64, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 1.0 if "embed" in name else parameter.shape[-1] ** -0.5)
            else:
                parameter.normal_(1.0, 0.1)  # all elements differ, so that one in another's place is noticed
    return model


def changed(weights: Weights) -> Weights:
    """Return weights in which every tensor differs, in few elements or in many; their deltas are of every kind."""
    generator = torch.Generator().manual_seed(2)
    result = {}
    for index, (name, tensor) in enumerate(weights.items()):
        mask = torch.rand(tensor.shape, generator=generator) < (0.02, 0.1, 0.5)[index % 3]
        mask.view(-1)[0] = True
        result[name] = torch.where(mask, tensor + torch.randn(tensor.shape, generator=generator), tensor)
    return result


@torch.no_grad()
def greedy(model: nn.Module, weights: Weights) -> list[int]:
    """Return transformers' greedy tokens with these weights."""
    for name, parameter in model.named_parameters():
        parameter.copy_(weights[name])
    ids = list(PROMPT)
    for _ in range(NUM_TOKENS):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(PROMPT) :]


@dataclass(frozen=True)
class State:
    """Weights, and the expected reports of an engine that holds them."""

    weights: Weights = field(repr=False)
    digest: str
    tokens: list[int]

    @classmethod
    def of(cls, weights: Weights) -> State:
        return cls(weights, model_digest(weights.items()), greedy(tiny_model(), weights))

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        return specs_of(self.weights.items())


def two_states() -> tuple[State, State]:
    first = {name: parameter.detach().clone() for name, parameter in tiny_model().named_parameters()}
    states = State.of(first), State.of(changed(first))
    assert states[0].tokens != states[1].tokens
    return states
