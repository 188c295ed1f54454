"""The division of a module among the ranks of a stage.

It turns the module's own tensor-parallel plan into a role for each layer and a shard for each tensor. Pure: modules on
the meta device will do.

Letters: H query heads, K KV heads, D head size.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...kernels.self_test import Cut
from .shards import Range, Shard

# The role of a layer in a division. "column" computes some of the outputs, "column_gather" then gathers all of them on
# every rank; "row" has some of the inputs, "row_split" takes its part of inputs that every rank has, and both sum.
Role = Literal["column", "column_gather", "packed_column", "row", "row_split", "experts", "embedding", "whole"]

_ROLES: dict[str, Role] = {
    "colwise": "column",
    "colwise_rep": "column_gather",
    "colwise_gather_output": "column_gather",
    "packed_colwise": "packed_column",
    "rowwise": "row",
    "rowwise_rep": "row_split",
    "rowwise_split_input": "row_split",
    "moe_tp_experts": "experts",
    "embedding_rowwise": "embedding",
    "replicate": "whole",
    "replicated_with_grad_allreduce": "whole",
    "local_params": "whole",
    "mla_kv_a_proj": "whole",  # its second part goes to all heads
}
_ATTENTION = {
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.k_proj": "colwise",
    "layers.*.self_attn.v_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
}
_MLP = {
    "layers.*.mlp.gate_proj": "colwise",
    "layers.*.mlp.up_proj": "colwise",
    "layers.*.mlp.down_proj": "rowwise",
}
_HEAD_NORMS = {
    "layers.*.self_attn.q_norm": "replicated_with_grad_allreduce",
    "layers.*.self_attn.k_norm": "replicated_with_grad_allreduce",
}
# Plans of families without one, by model_type of their text.
_MISSING_PLANS = {
    "gpt_oss": _ATTENTION
    | {
        "layers.*.self_attn.sinks": "colwise",
        "layers.*.mlp.experts.gate_up_proj": "colwise",  # gate and up are interleaved: any even range holds pairs
        "layers.*.mlp.experts.gate_up_proj_bias": "colwise",
        "layers.*.mlp.experts.down_proj": "rowwise",
        "layers.*.mlp.experts": "moe_tp_experts",
    },
    "qwen3_vl_text": _ATTENTION | _MLP | _HEAD_NORMS,
}
SUMS = ("row", "row_split")


@dataclass(frozen=True)
class Roles:
    """The role of each planned module, or bare parameter, of a model; names as in the module."""

    of: Mapping[str, Role]
    problems: tuple[str, ...]  # why it cannot be divided; empty when it can

    def __getitem__(self, name: str) -> Role:
        return self.of.get(name, "whole")


def roles_of(module: PreTrainedModel) -> Roles:
    """Return the roles that the module's plan gives to its parts. Lists every unknown style as a problem."""
    plan, prefix = _plan_of_text(module)
    if not any("layers" in pattern for pattern in plan):
        missing = _MISSING_PLANS.get(module.config.get_text_config(decoder=True).model_type)
        if missing is None:
            return Roles({}, (f"{type(module).__name__} brings no tensor-parallel plan (base_model_tp_plan)",))
        plan |= {prefix + pattern: style for pattern, style in missing.items()}
    embedding = next(name for name, m in module.named_modules() if m is module.get_input_embeddings())
    plan = {embedding: "embedding_rowwise"} | plan
    patterns = [(re.compile(re.escape(p).replace(r"\*", r"\d+")), style) for p, style in plan.items()]
    names = [name for name, _ in module.named_modules()] + [name for name, _ in module.named_parameters()]
    roles: dict[str, Role] = {}
    unknown: dict[str, str] = {}
    for name in names:
        for pattern, style in patterns:
            if pattern.fullmatch(name):
                roles[name] = _ROLES.get(style, "whole")
                if style not in _ROLES:
                    unknown.setdefault(style, name)
    problems = [f"{name} has the plan style {style!r}, which is not supported" for style, name in unknown.items()]
    head = module.get_output_embeddings()
    vocab = _vocab_size(module)
    for name, m in module.named_modules():
        if m is head:
            roles[name] = "column_gather" if head.weight.shape[0] == vocab else "whole"
        # Inkling's plans divide such columns as if gates and ups were interleaved: a rank would have gates alone.
        if roles.get(gates := f"{name}.gate_up_proj") == "column" and _gates_by_halves(m):
            roles[gates] = "packed_column"
    return Roles(roles, tuple(problems))


def _plan_of_text(module: PreTrainedModel) -> tuple[dict[str, str], str]:
    """Return the plan of the module's decoder of text, and the beginning of the names in it. An encoder beside it, as
    of images, is whole on every rank."""
    plan, decoder = dict(module._tp_plan or {}), module.get_decoder()
    name = next((name for name, part in module.named_modules() if part is decoder), "")
    if decoder is module.base_model or not name:
        return plan, f"{module.base_model_prefix}."
    return {pattern: style for pattern, style in plan.items() if pattern.startswith(f"{name}.")}, f"{name}."


def _gates_by_halves(experts: nn.Module) -> bool:
    """Return whether the first gate of an experts module belongs to the first column behind the middle."""
    if not getattr(experts, "has_gate", False):
        return False
    columns = torch.linspace(0.1, 1, 16, dtype=torch.float32)
    moved = columns.clone()
    moved[8] += 1
    before, after = (experts._apply_gate(each[None])[0] for each in (columns, moved))  # type: ignore[operator]
    return bool(before[0] != after[0]) and torch.equal(before[1:], after[1:])


def plan_shards(module: PreTrainedModel, roles: Roles, tp: int, tp_rank: int, k_blocks: int) -> dict[str, Shard]:
    """Return the shard of every parameter and buffer, by name. Raises ValueError listing everything indivisible."""
    problems = list(roles.problems)
    vocab = _vocab_size(module)
    shards = {name: Shard.whole(tuple(t.shape)) for name, t in _tensors(module)}
    for owner_name, owner in module.named_modules():
        for leaf, parameter in owner.named_parameters(recurse=False):
            name = f"{owner_name}.{leaf}" if owner_name else leaf
            role = roles.of.get(name) or roles[owner_name]
            dim = _dim_of(role, parameter, leaf, getattr(owner, "is_transposed", False))
            if dim is None or (role in ("embedding", "column_gather") and parameter.shape[dim] == vocab and vocab % tp):
                continue  # a vocabulary that does not divide is whole on every rank
            halves = 2 if role == "packed_column" else 1
            unit = _unit_of(module, owner_name, leaf, parameter) if role == "column" else 1
            ranges = _ranges(parameter.shape[dim], unit, tp, tp_rank, halves)
            if ranges is None:
                problems.append(f"{name} {list(parameter.shape)} does not divide by tp={tp}")
            elif role in SUMS and parameter.shape[dim] % k_blocks:
                problems.append(f"{name} has {parameter.shape[dim]} inputs, no multiple of k_blocks={k_blocks}")
            else:
                shards[name] = Shard(tuple(parameter.shape), dim, ranges)
    if tp > 1:
        problems += _head_problems(module, roles, tp)
    if problems:
        raise ValueError(f"{type(module).__name__} cannot be divided: {'; '.join(problems)}")
    return shards


def layer_cuts(module: PreTrainedModel, roles: Roles, k_blocks: int) -> list[Cut]:
    """Return the cuts that ranks may make at this k_blocks, whatever their number, for `kernels.self_test`."""
    cuts: list[Cut] = []
    for owner_name, owner in module.named_modules() if k_blocks > 1 else ():
        for leaf, parameter in owner.named_parameters(recurse=False):
            role = roles.of.get(f"{owner_name}.{leaf}") or roles[owner_name]
            if parameter.dim() < 2 or role in ("whole", "embedding") or "bias" in leaf:
                continue
            out_features, in_features = parameter.shape[-2:]
            if getattr(owner, "is_transposed", False):
                out_features, in_features = in_features, out_features
            cuts.append(Cut(out_features, in_features, "blocks" if role in SUMS else "columns", k_blocks))
    return sorted(set(cuts))


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _vocab_size(module: PreTrainedModel) -> int:
    weight = module.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    return weight.shape[0]


def _dim_of(role: Role, parameter: Tensor, leaf: str, is_transposed: bool) -> int | None:
    """Return the dimension that a role divides, or None. Weights are [..., out, in], or transposed; experts are
    stacked."""
    is_bias = leaf == "bias" or leaf.endswith("_bias")
    if role in ("column", "column_gather", "packed_column"):
        if is_bias or parameter.dim() == 1:
            return parameter.dim() - 1
        return parameter.dim() - (1 if is_transposed else 2)
    if role in SUMS:
        return None if is_bias else parameter.dim() - (2 if is_transposed else 1)
    return 0 if role == "embedding" else None


def _ranges(size: int, unit: int, tp: int, tp_rank: int, halves: int) -> tuple[Range, ...] | None:
    """Return this rank's ranges of a dimension of `halves` equal parts, in whole units; None if they do not divide.

    With fewer units than ranks, several ranks hold the same unit (KV heads). unit: its size; 1 if columns are
    independent.
    """
    if size % (unit * halves):
        return None
    num_units = size // halves // unit
    if num_units % tp == 0:
        mine = num_units // tp * unit
        starts = [half * (size // halves) + tp_rank * mine for half in range(halves)]
        return tuple((start, start + mine) for start in starts)
    if unit > 1 and num_units < tp and tp % num_units == 0:
        start = tp_rank * num_units // tp * unit
        return ((start, start + unit),)
    return None


def _unit_of(module: PreTrainedModel, owner_name: str, leaf: str, parameter: Tensor) -> int:
    """Count the columns that stay together: a KV head's, which several ranks may hold; else 1 (heads are checked)."""
    if not owner_name.endswith((".k_proj", ".v_proj")):
        return 1
    attention = module.get_submodule(owner_name.rpartition(".")[0])
    return getattr(attention, "head_dim", 1)


def _head_problems(module: PreTrainedModel, roles: Roles, tp: int) -> list[str]:
    """List attentions with indivisible heads, or with tensors that are missing from the plan; each kind once."""
    problems: dict[str, str] = {}
    config = module.config.get_text_config(decoder=True)
    of_layers = config.per_layer_config if getattr(config, "is_heterogeneous", False) else None
    for name, attention in module.named_modules():
        projections = [child for child, _ in attention.named_children() if roles[f"{name}.{child}"] == "column"]
        is_latent = hasattr(attention, "kv_b_proj")  # its latents, and an indexer, are whole on every rank
        if not hasattr(attention, "layer_idx") or not projections or not (hasattr(attention, "head_dim") or is_latent):
            continue
        heads = (config if of_layers is None else of_layers[attention.layer_idx]).num_attention_heads
        if heads % tp:
            problems.setdefault("heads", f"num_attention_heads={heads} does not divide by tp={tp}")
        if is_latent:
            continue
        for leaf, parameter in attention.named_parameters():
            planned = f"{name}.{leaf}" in roles.of or f"{name}.{leaf.rpartition('.')[0]}" in roles.of
            if not planned and parameter.dim() > 1:
                problems.setdefault(leaf, f"{name}.{leaf} is not in the tensor-parallel plan")
    return list(problems.values())
