"""Assembly of an engine's parts, once, in the order in which they need each other."""

from __future__ import annotations

import logging
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from torch import nn
from transformers import PreTrainedTokenizerBase

from ..check.module_check import check_hosted
from ..config import EngineConfig, KVSize, parse_kv_size
from ..grammars.catalog import GrammarLimits, Grammars
from ..grammars.jump_forward import JumpMode
from ..grammars.token_text import FastTokenizer
from ..kv.ledger import KVLedger
from ..kv.tensors import KVCache, KVPlan, plan_kv_pool, usable_bytes
from ..model.hosted_model import HostedModel
from ..model.supported import context_length, refuse_block_size
from ..model.tokenizer import find_eos_token_ids, load_tokenizer, refuse_other_eos
from ..ranks.channel import RankChannel
from ..ranks.mesh import Mesh
from ..ranks.opening import open_channel
from ..replica.controller import ReplicaRunner
from ..replica.stage import Stage
from ..replica.stage_graphs import StageGraphs
from ..reports.reports import Reports
from ..reports.trace import Trace
from ..running.decode_graphs import DecodeGraphs, decode_ladder, why_not_recorded
from ..running.model_runner import ModelRunner
from ..running.recorders import PlainCalls
from ..running.runner import Runner
from ..running.sampler import Sampler
from ..scheduling.pipelining import Pipelining
from ..scheduling.scheduler import Scheduler, StepLimits
from ..sequences.engine_manager import EngineSequenceManager
from ..sequences.event_log import ManagerPair
from ..speculation.speculation import DEPTH, Speculation
from ..states.slots import SlotLedger
from ..states.tensors import StatePlan, StatePool, plan_state_pool
from .on_host import on_host
from .parts import MakeRunner, Parts, RunnerParts

logger = logging.getLogger(__name__)


def make_runner(parts: RunnerParts) -> Runner:
    """Make the runner of one rank, or of a replica if there are several ranks."""
    sampler, config = Sampler(parts.eos_token_ids), parts.config
    if parts.ranks.mesh.num_ranks > 1:
        trace, metrics = parts.reports.trace, parts.reports.metrics
        stage = Stage(
            parts.ranks, parts.model, parts.kv_cache, parts.state_pool, sampler, config.block_size, trace,
            make_stage_graphs(parts),
        )  # fmt: skip
        return ReplicaRunner(parts.ranks, stage, metrics, config.state_check_steps)
    # A CPU gains nothing from starting a decode step before the results of the last one, and computes rows of ended
    # sequences in vain. It starts early only if graph sizes are configured.
    begins_ahead = parts.model.device.type == "cuda" or config.cuda_graph_batch_sizes is not None
    return ModelRunner(
        parts.model, parts.kv_cache, parts.state_pool, sampler, config.block_size, parts.reports.trace,
        overlap=parts.overlap, graphs=make_graphs(parts), begins_ahead=begins_ahead,
    )  # fmt: skip


def assemble(
    model: nn.Module | str | Path,
    config: EngineConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    mesh: Mesh | None,
    make_runner: MakeRunner = make_runner,
) -> Parts:
    """Host the model, plan and allocate its KV, and make the scheduler, the managers and the runner.

    A collective of the replica's ranks, or of the whole job if `mesh` is None and has to be built. Raises ValueError
    for settings that do not fit the model or each other, or that differ between the ranks.
    """
    if not isinstance(config, EngineConfig):
        raise ValueError(f"an engine's config is an EngineConfig, not {config!r:.100}: see EngineConfig.from_dict")
    is_one = callable(getattr(tokenizer, "decode", None)) and hasattr(tokenizer, "eos_token_id")
    if tokenizer is not None and not is_one:  # one of a user's own will do
        raise ValueError(f"a tokenizer is one of transformers', as AutoTokenizer loads it, not {tokenizer!r:.100}")
    with on_host():
        return _assemble(model, config, tokenizer, mesh, make_runner)


def _assemble(
    model: nn.Module | str | Path,
    config: EngineConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    mesh: Mesh | None,
    make_runner: MakeRunner,
) -> Parts:
    ranks = open_channel(_mesh(config, mesh), config.rank_timeout_s)
    options: dict[str, Any] = {"dtype": config.dtype, "device": config.device, "invariant": config.invariant,
                               "k_blocks": config.k_blocks, "mesh": ranks.mesh}  # fmt: skip
    if isinstance(model, str | Path):
        hosted = HostedModel.load(model, **options)
        tokenizer = tokenizer or load_tokenizer(Path(model))
    else:
        hosted = HostedModel.adopt(model, **options)
    refuse_block_size(type(hosted.module).__name__, config.block_size, (s.index_rate for s in hosted.kv_shapes))
    check_hosted(hosted)
    eos_token_ids = find_eos_token_ids(hosted.module, tokenizer)
    hosted.phase.before_begin = partial(refuse_other_eos, hosted.module, tokenizer, eos_token_ids)
    max_model_len = context_length(hosted.config, config.max_model_len)
    if max_model_len < (config.max_model_len or 0):
        logger.warning("max_model_len=%d is above the model's own limit: a sequence has at most %d tokens",
                       config.max_model_len, max_model_len)  # fmt: skip
    plan, state_plan = _plan_pools(hosted, config, max_model_len, ranks)
    kv_cache = KVCache(plan, hosted.kv_shapes, config.block_size, hosted.device)
    state_pool = StatePool(state_plan, hosted.state_shapes, hosted.device)
    reports = Reports(_open_trace(config.trace))
    runner_parts = RunnerParts(config, ranks, hosted, kv_cache, state_pool, eos_token_ids, max_model_len, reports)
    runner = make_runner(runner_parts)
    states = SlotLedger(state_plan.num_sequences, state_plan.num_snapshots) if state_plan.num_slots else None
    ledger = KVLedger(
        plan.num_blocks, config.block_size, config.prefix_cache, pin_budget=config.pin_budget, states=states
    )
    limits = StepLimits(
        state_plan.num_sequences if states else config.max_num_seqs, config.max_num_batched_tokens,
        config.chunked_prefill_size or config.max_num_batched_tokens, max_model_len,
    )  # fmt: skip
    sequences = EngineSequenceManager(eos_token_ids, max_model_len, runner.num_stages)
    return Parts(
        **vars(runner_parts),
        tokenizer=tokenizer,
        kv_plan=plan,
        state_plan=state_plan,
        runner=runner,
        ledger=ledger,
        limits=limits,
        scheduler=_make_scheduler(config, ledger, limits, runner.num_stages),
        managers=ManagerPair(sequences, runner.workers, runner.on_event),
        grammars=_make_grammars(config, tokenizer, hosted.vocab_size, eos_token_ids),
        speculation=Speculation.of(config, hosted.vocab_size, runner.computed_rows, search_is_dear=runner.begins_ahead),
        owns_mesh=mesh is None,
    )


def _mesh(config: EngineConfig, mesh: Mesh | None) -> Mesh:
    """Return the given mesh, or build one. Raises ValueError for a mesh that contradicts the configuration."""
    if mesh is None:
        if config.tp * config.pp == 1:
            return Mesh.single()
        return Mesh.build(config.tp, config.pp, timeout_s=config.rank_timeout_s)
    if (mesh.tp, mesh.pp) != (config.tp, config.pp):
        raise ValueError(f"the mesh has tp={mesh.tp} and pp={mesh.pp}, but the configuration tp={config.tp} and "
                         f"pp={config.pp}")  # fmt: skip
    return mesh


def _open_trace(path: str | None) -> Trace:
    """Open the trace of the settings. Raises ValueError naming the setting where the file cannot be created."""
    try:
        return Trace(path)
    except OSError as error:
        raise ValueError(f"trace: the file cannot be created: {error}") from error


def _plan_pools(
    model: HostedModel, config: EngineConfig, max_model_len: int, ranks: RankChannel
) -> tuple[KVPlan, StatePlan]:
    """Compute the sizes of the KV pool and of the state pool, which fit into every rank of the replica.

    Of the memory for pools of an automatic size, states get at most half.
    """
    size = parse_kv_size(config.kv_cache)
    is_auto = size == KVSize()
    states = StatePlan()
    if model.has_states:
        half = usable_bytes(model.device) // 2 if is_auto else None
        snapshots = config.state_snapshots if config.prefix_cache else 0
        states = plan_state_pool(model.state_shapes, config.max_num_seqs, snapshots, half)
    plan = plan_kv_pool(
        size, model.kv_shapes, config.block_size, states.num_sequences or config.max_num_seqs, max_model_len,
        model.device, states.num_bytes,
    )  # fmt: skip
    plan, states = _agreed(plan, states, config, max_model_len, ranks)
    logger.info("KV pool: %d blocks of %d tokens, %.1f MiB (%s)", plan.num_blocks, config.block_size,
                plan.num_bytes / 2**20, plan.reason)  # fmt: skip
    if states.num_slots:
        logger.info("state pool: %d sequences and %d snapshots, %.1f MiB", states.num_sequences, states.num_snapshots,
                    states.num_bytes / 2**20)  # fmt: skip
    return plan, states


def _agreed(
    plan: KVPlan, states: StatePlan, config: EngineConfig, max_model_len: int, ranks: RankChannel
) -> tuple[KVPlan, StatePlan]:
    """Reduce the plans to the numbers of blocks and slots that fit into every rank of the replica.

    Raises ValueError naming the settings that differ between ranks.
    """
    sizes = [plan.num_blocks, states.num_sequences, states.num_snapshots]
    answers = ranks.gather_json([sizes, {**asdict(config), "max_model_len": max_model_len}])
    first = answers[0][1]
    differing = sorted({key for _, settings in answers for key in settings if settings[key] != first[key]} - {"trace"})
    if differing:
        raise ValueError(f"the ranks of a replica need the same configuration: {', '.join(differing)} differ")
    least, num_sequences, num_snapshots = map(min, zip(*(sizes for sizes, _ in answers), strict=True))
    if least < plan.num_blocks:
        plan = replace(plan, num_blocks=least, reason="as another rank has room")
    return plan, replace(states, num_sequences=num_sequences, num_snapshots=num_snapshots)


def _make_scheduler(config: EngineConfig, ledger: KVLedger, limits: StepLimits, num_stages: int) -> Scheduler:
    return Scheduler(
        ledger, limits, config.policy, deadline_multiplier=config.deadline_multiplier,
        min_deadline_s=config.min_deadline_s, admission_ratio=config.admission_ratio,
        pipelining=Pipelining(num_stages, config.sequence_pipelining),
    )  # fmt: skip


def _make_grammars(
    config: EngineConfig, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int, eos_token_ids: frozenset[int]
) -> Grammars:
    return Grammars(
        cast(FastTokenizer | None, tokenizer),  # checked when the first grammar needs it
        vocab_size,
        eos_token_ids,
        mode=cast(JumpMode, config.jump_forward),
        any_whitespace=config.grammar_any_whitespace,
        limits=GrammarLimits(
            config.max_grammars, config.max_waiting_grammars, config.grammar_timeout_s, config.grammar_memory_mb << 20
        ),
        max_rollback=config.jump_forward_max_rollback,
    )


def make_graphs(parts: RunnerParts) -> DecodeGraphs | None:
    """Make the recorded decode steps if they are configured or faster; else return None."""
    model, config = parts.model, parts.config
    asked = config.cuda_graph_batch_sizes
    most = config.max_num_seqs if config.speculation == "off" else config.max_num_seqs * (1 + DEPTH)
    sizes = decode_ladder(asked, most, model.device)
    if not sizes:
        return None
    recorder = None
    if (why := why_not_recorded(model)) is not None:
        if asked is not None and model.device.type == "cuda":
            raise ValueError(f"cuda_graph_batch_sizes={list(asked)}, but no decode step can be recorded: {why}")
        logger.info("decode steps are not recorded: %s", why)
        if asked is None:
            return None
        recorder = PlainCalls()
    return DecodeGraphs(model, parts.kv_cache, parts.state_pool, sizes, _longest_table(parts), recorder)


def make_stage_graphs(parts: RunnerParts) -> StageGraphs | None:
    """Make the recorded decode steps of this rank of a replica; None where they cannot be recorded.

    A collective of the replica: all of its ranks record, or none.
    """
    model, config = parts.model, parts.config
    most = config.max_num_seqs if config.speculation == "off" else config.max_num_seqs * (1 + DEPTH)
    sizes = decode_ladder(config.cuda_graph_batch_sizes, most, model.device)
    why = why_not_recorded(model)
    if model.device.type == "cuda":
        why = "a CUDA graph holds no exchange between ranks here"
    if model.mesh.tp > 1 and model.mesh.tp_memory is None:
        why = "the ranks of a stage do not share memory"
    answers = parts.ranks.gather_json(why)
    if found := sorted({answer for answer in answers if answer}):
        logger.info("decode steps are not recorded: %s", "; ".join(found))
        return None
    if not sizes:
        return None
    return StageGraphs(model, parts.kv_cache, parts.state_pool, sizes, _longest_table(parts))


def _longest_table(parts: RunnerParts) -> int:
    """Return the number of blocks of the longest sequence that can run: a table names no block of the pool twice."""
    return min(-(-parts.max_model_len // parts.config.block_size), parts.kv_cache.num_blocks)
