"""The models of a job before they have memory: shapes, tokenizers, parts, and how ranks share them."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ....rollout.model.loading import named_by_folder, read_config, refuse_faulty_weights
from ....rollout.model.supported import context_length
from ....rollout.ranks.mesh import Mesh, MeshPlan
from ....rollout.sharding.part import Part, build_part
from ....rollout.sharding.skeleton import auto_class
from ..settings.config import JobConfig
from ..tasks.arithmetic import CONTEXT_TOKENS, VOCAB_SIZE, build_tokenizer, keyed
from ..tasks.task import sums_spec
from ..tasks.warm_start import ModelSpec, WarmStartSpec, build_model

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def model_spec(config: JobConfig) -> ModelSpec:
    """Return the shape of the model that the job builds. Raises ValueError, naming the settings."""
    m = config.model
    with keyed("model"):
        return ModelSpec(
            m.hidden_size, m.intermediate_size, m.num_layers, m.num_heads, m.num_kv_heads, m.head_dim, m.family
        )


def warm_start_spec(config: JobConfig) -> WarmStartSpec:
    """Return what the warm start of that model depends on."""
    warm = config.warm_start
    return WarmStartSpec(
        seed=config.run.seed,
        model=model_spec(config),
        data=sums_spec(config),
        num_steps=warm.num_steps,
        batch_size=warm.batch_size,
        learning_rate=warm.learning_rate,
        slip_rate=warm.slip_rate,
    )


def mesh_plan(config: JobConfig, num_ranks: int) -> MeshPlan:
    """Divide the job's ranks into replicas. Raises ValueError where their number does not fit."""
    return MeshPlan(num_ranks, config.parallel.tp, config.parallel.pp)


def first_part(config: JobConfig, model: PreTrainedModel, num_ranks: int) -> Part:
    """Build the first rank's part of the model, without memory. Raises ValueError where the model cannot be divided."""
    mesh = Mesh(mesh_plan(config, num_ranks), 0, None, None, None, 0.0)
    return build_part(model.config, DTYPES[config.model.dtype], mesh, config.engine.k_blocks)


def model_without_memory(config: JobConfig, path: str = "") -> PreTrainedModel:
    """Build the job's model, or the one of another folder, without memory for its weights."""
    with torch.device("meta"):
        if not (folder := path or config.model.path):
            return build_model(model_spec(config), build_tokenizer())
        path_config = read_config(Path(folder))
        with named_by_folder(Path(folder)):
            return auto_class(path_config).from_config(
                path_config, dtype=DTYPES[config.model.dtype], trust_remote_code=False
            )


def tokenizer_and_sizes(
    config: JobConfig, path: str = "", setting: str = "model.path"
) -> tuple[PreTrainedTokenizerBase, int, int]:
    """Return the tokenizer of the job's model, or of another folder, the length of its context and the size of its
    vocabulary. Raises ValueError, naming the setting, for what is no model folder."""
    path = path or config.model.path
    if not path:
        return build_tokenizer(), CONTEXT_TOKENS, VOCAB_SIZE
    if not os.path.isfile(os.path.join(path, "config.json")):
        raise ValueError(
            f"{setting}: {path!r} is no model folder, it holds no config.json: download a model of the Hub to one first"
        )
    text = read_config(Path(path)).get_text_config(decoder=True)
    refuse_faulty_weights(Path(path))
    with named_by_folder(Path(path)):
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False), context_length(text), text.vocab_size
