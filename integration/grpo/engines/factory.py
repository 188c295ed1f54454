"""The choice of the engine of one rank of the main job, and with it the way of the trainer's weights into it.

    sync        engines     the engine                                the weights
    in_place    local       aliases the trainer's module              stay where they are
    in_place    local       a copy, where the trainer shards          are gathered into it, on every rank
    others      local       a copy in each rank                       rank 0 pushes to all, over Unix sockets
    others      separate    a process of its own for each rank        rank 0 pushes to all, over Unix sockets

With `parallel` settings several ranks share one engine, and each rank copies its part of the trainer's weights.
"""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...ranks import Ranks
from ..backends.backend import TrainerBackend
from ..settings.config import JobConfig
from .aliased import AliasedEngine
from .engine import JobEngine
from .gathered import GatheredEngine
from .pushed import PushedLocalEngine
from .separate import SeparateEngine
from .sharded import ShardedEngine


def make_engine(
    config: JobConfig, model: PreTrainedModel, folder: Path, tokenizer: PreTrainedTokenizerBase, ranks: Ranks,
    backend: TrainerBackend,
) -> JobEngine:  # fmt: skip
    """Make the engine that the job's settings name. folder: the folder that the model was loaded from. Call it on all
    ranks together, before the backend wraps the model."""
    if config.parallel.num_ranks > 1:
        return ShardedEngine(config, model, tokenizer, backend)
    if config.sync != "in_place":
        kind = SeparateEngine if config.engines == "separate" else PushedLocalEngine
        return kind(config, model, folder, ranks, backend)
    if backend.shares_storage:
        return AliasedEngine(config, model, tokenizer, backend)
    return GatheredEngine(config, model, folder, ranks, backend)
