"""Refuse modules that cannot be hosted, and replicas whose ranks would compute differently."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from ...kernels.self_test import Guarantee
from ..errors import LockstepError
from ..ranks.mesh import Mesh
from ..sharding.skeleton import auto_class
from .operations.compressor import compressor_of
from .own_attention.layers import interfaced_models, own_attentions
from .recurrent.layers import recurrent_forward
from .tensors import first_weight

logger = logging.getLogger(__name__)
_OURS = __name__.rpartition(".model.")[0] + "."  # begin of the names of the modules that refuse

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Rotary tables that are recomputed from the longest sequence of the batch: a row would depend on its neighbours.
_BATCH_DEPENDENT_ROPE = ("dynamic", "longrope")
_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention", "indexed_attention"}
_COMPRESSED_TYPES = {"compressed_sparse_attention", "heavily_compressed_attention"}  # states of what is to be pooled
_RECURRENT_TYPES = {"conv", "linear_attention", "hybrid", "hybrid_sliding", *_COMPRESSED_TYPES}  # some beside attention
_POOLS = ("index_kpool", "indexer_compress_ratio")  # of indexers, which have a state of the tokens of the next pool
_STATELESS_TYPES = {"mlp", "moe"}
DEFAULT_CONTEXT = 32_768  # tokens, of a model that tells no limit
_NEEDED = ("hidden_size", "vocab_size")
_CONTEXTS = ("max_position_embeddings", "max_seq_len", "seq_length")  # names of a context's length, in their order


def stated_context(config: PretrainedConfig) -> int | None:
    """Return the tokens of the longest context; None if a configuration does not tell. config: its decoder's."""
    return next((length for name in _CONTEXTS if isinstance(length := getattr(config, name, None), int)), None)


def has_recurrent_layers(config: PretrainedConfig) -> bool:
    """Return whether any layer of the whole model has recurrent states. config: its decoder's."""
    return not _RECURRENT_TYPES.isdisjoint(_types(config)) or any(hasattr(config, name) for name in _POOLS)


def context_length(config: PretrainedConfig, asked: int | None = None) -> int:
    """Return the most tokens of a sequence, prompt and output: the model's own limit, or fewer if asked for.

    A model whose layers are all recurrent may tell no limit, and has none: what is asked for counts, or
    DEFAULT_CONTEXT. Any other must tell one: raises ValueError. config: its decoder's.
    """
    own = stated_context(config)
    if own is None and not _is_recurrent(config):
        raise ValueError(f"a configuration without {_CONTEXTS[0]}")
    if own is None:
        return asked or DEFAULT_CONTEXT
    return min(asked or own, own)


def _is_recurrent(config: PretrainedConfig) -> bool:
    """Return whether every layer is recurrent by its type, and has no attention."""
    types = _types(config)
    return len(types) >= config.num_hidden_layers and set(types) <= {"linear_attention", "conv"}


def has_state(config: PretrainedConfig, layer: int) -> bool:
    """Return whether a layer has KV or a recurrent state by its type. config: its decoder's."""
    types = _types(config)
    return layer >= len(types) or types[layer] not in _STATELESS_TYPES


def _types(config: PretrainedConfig) -> list[str]:
    return getattr(config, "layer_types", None) or []


def refuse_unsupported(module: PreTrainedModel, config: PretrainedConfig, invariant: bool, layers: range) -> None:
    """Raise ValueError that names every unsupported feature of the module.

    config: of its decoder; layers: of this rank.
    """
    wrong = []
    if (dtype := first_weight(module.parameters()).dtype) not in DTYPES.values():
        wrong.append(f"dtype {dtype}, and not one of {' and '.join(DTYPES)}")
    if config.num_hidden_layers < 1:
        wrong.append(f"num_hidden_layers {config.num_hidden_layers}: it has no layers")
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if invariant and parameters.get("rope_type") in _BATCH_DEPENDENT_ROPE:
            wrong.append(f"rope_type {parameters['rope_type']!r} (its tables depend on the batch)")
    if not interfaced_models(module) and not own_attentions(module):
        wrong.append("attention that does not go through transformers' attention interface")
    # A module implements other kinds in its mask or its own code, which the hosted attention does not see.
    recurrent = {part.layer_idx for part in module.modules() if recurrent_forward(part) or compressor_of(part)}
    attends = not _is_recurrent(config) or not recurrent.issuperset(layers)
    if attends and not _has_attention_heads(config):
        wrong.append("layers without attention heads")
    types = dict(enumerate(_types(config)))
    wrong += [
        f"layers of type {kind}"
        for kind in sorted(set(types.values()) - _LAYER_TYPES - _STATELESS_TYPES)
        if kind not in _RECURRENT_TYPES or any(types[i] == kind and i not in recurrent for i in layers)
    ]
    if "chunked_attention" in types.values() and not getattr(config, "attention_chunk_size", None):
        wrong.append("layers of type chunked_attention without attention_chunk_size")
    if not getattr(module.config, "return_dict", True):
        wrong.append("return_dict=False in its configuration, with which its own forward fails: set it to True")
    if module.base_model is module and not any(map(_has_head, module.modules())):
        wrong.append("no head that gives logits: pass the model for causal language modelling around it")
    missing = [name for name in _NEEDED if not hasattr(config, name)]
    if missing := missing + [_CONTEXTS[0]] * (attends and stated_context(config) is None):
        wrong.append(f"a configuration without {', '.join(missing)}")
    if wrong:
        raise ValueError(f"{type(module).__name__} cannot be hosted: {', '.join(wrong)}")


def _has_head(part: nn.Module) -> bool:
    """Return whether a part gives logits. A class of images and text may be built around a model that does."""
    return isinstance(part, PreTrainedModel) and part.get_output_embeddings() is not None


def _has_attention_heads(config: PretrainedConfig) -> bool:
    name = "num_attention_heads"
    stored = vars(config).get(config.attribute_map.get(name, name))  # where layers differ in it, reading it is refused
    return stored is not None or getattr(config, name, None) is not None


def refuse_other_kinds(module: PreTrainedModel) -> None:
    """Raise ValueError for a module whose configuration is not that of one decoder with a number of layers."""
    config = module.config.get_text_config(decoder=True)
    wrong = [] if hasattr(config, "num_hidden_layers") else ["a configuration without num_hidden_layers"]
    if getattr(config, "is_encoder_decoder", False):
        wrong.append("an encoder")
    if wrong:
        raise ValueError(f"{type(module).__name__} cannot be hosted: {', '.join(wrong)}")


def refuse_stages(config: PretrainedConfig, num_stages: int) -> None:
    """Raise ValueError for several stages of a model of images and text, which is not cut."""
    if num_stages > 1 and auto_class(config) is not AutoModelForCausalLM:
        raise ValueError(f"a {config.model_type} model of images and text is not cut into stages: pp must be 1")


def refuse_block_size(name: str, block_size: int, rates: Iterable[int]) -> None:
    """Raise ValueError for blocks that the windows of compressed entries do not divide. name: of the module's class."""
    if wrong := [rate for rate in rates if block_size % rate]:
        raise ValueError(
            f"{name} has an indexer of entries of {wrong[0]} tokens: block_size must be a multiple, not {block_size}"
        )


def refuse_other_outputs(name: str, out: Tensor, hidden_size: int, vocab_size: int | None) -> None:
    """Raise ValueError for a forward that gives no hidden states of four rows, or not one logit for each token.

    name: of the module's class. vocab_size: None for a stage that gives hidden states."""
    if vocab_size is None:
        if out.shape != (4, hidden_size):
            raise ValueError(f"{name} cannot be cut into stages: a stage gave {list(out.shape)} for hidden states")
    elif out.shape[-1] != vocab_size:
        raise ValueError(
            f"{name} cannot be hosted: it gives {out.shape[-1]} logits, and its configuration has the vocab_size "
            f"{vocab_size}. A padded head would draw tokens that the vocabulary does not have: give both the same size "
            "(resize_token_embeddings)"
        )


@contextmanager
def refused_if_it_fails(module: nn.Module, what: str = "text", says: str | None = None) -> Iterator[None]:
    """Turn an error of a module's own code into a ValueError that names it. Our refusals and errors of memory stay.
    what: its forward is run on. says: the refusal; None: that of the module."""
    try:
        yield
    except (torch.OutOfMemoryError, LockstepError):
        raise
    except (ValueError, TypeError, AttributeError, LookupError, RuntimeError) as error:
        if isinstance(error, ValueError) and _is_refusal(error):
            raise
        text = str(error).strip().partition("\n")[0]
        of_module = f"cannot be hosted: its forward fails on {what} with the engine's attention"
        said = says or f"{type(module).__name__} {of_module}"
        raise ValueError(f"{said}: {type(error).__name__}: {text}") from error


def _is_refusal(error: ValueError) -> bool:
    """Return whether this part of the package raised it, and not the module's code or an operation that it called."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_globals.get("__name__", "").startswith(_OURS)


def refuse_randomness(module: PreTrainedModel) -> None:
    """Raise ValueError that names every dropout and jitter of a module in train mode. An evaluated part has none."""
    found: dict[str, list[str]] = {}
    for path, part in module.named_modules():
        if not part.training:
            continue
        if isinstance(part, _DropoutNd):
            numbers = {"dropout": part.p} if part.p else {}
        else:
            numbers = {name: value for name, value in vars(part).items() if type(value) is float and value > 0}
        for name, value in numbers.items():
            if "drop" in name or "jitter" in name:
                found.setdefault(f"{name} ({value:g}) of {type(part).__name__}", []).append(path or "the module")
    places = [f"{kind} ({paths[0]}{f' and {len(paths) - 1} more' * (len(paths) > 1)})" for kind, paths in found.items()]
    if places:
        raise ValueError(
            f"{type(module).__name__} draws random numbers in train mode, so the trainer's log-probabilities would "
            f"differ from the engine's: {'; '.join(places)}. Set them to 0, or call eval()"
        )


def warn_of_rounded_frequencies(module: nn.Module) -> None:
    """Log the rotary frequencies that are not float32. `module.to(torch.bfloat16)` rounds them with the parameters;
    they are in no file and no update, so that an engine that loads the folder has others."""
    rounded = {
        name: str(buffer.dtype).removeprefix("torch.")
        for name, buffer in module.named_buffers()
        if name.rpartition(".")[2].endswith("inv_freq") and buffer.is_floating_point() and buffer.dtype != torch.float32
    }
    if rounded:
        logger.warning(
            "rotary frequencies are %s (%s): module.to(dtype) has rounded them, and an engine that loads this model "
            "from a folder would give other log-probabilities. Load it with from_pretrained(..., dtype=...) instead",
            " and ".join(sorted(set(rounded.values()))), ", ".join(rounded),
        )  # fmt: skip


def refuse_different_choices(guarantee: Guarantee | None, mesh: Mesh) -> None:
    """Raise ValueError on all ranks of a replica if their self-tests chose different operations. A collective."""
    if mesh.replica_group is None or guarantee is None:
        return
    own = torch.tensor(list(guarantee.choices.ljust(80).encode()), dtype=torch.uint8)
    of_all = [torch.empty_like(own) for _ in range(mesh.num_ranks)]
    dist.all_gather(of_all, own, group=mesh.replica_group)
    texts = [bytes(t.tolist()).decode().strip() for t in of_all]
    if len(set(texts)) > 1:
        choices = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts))
        raise ValueError(f"the self-test chose different operations on the ranks of the replica ({choices})")
