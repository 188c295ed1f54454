"""The description of a job before the start, in a few lines: ranks, batch, memory per rank."""

from __future__ import annotations

import reprlib

from ....rollout.ranks.mesh import MeshPlan
from ..backends.lora import add_adapters
from ..settings.config import JobConfig
from ..settings.unread import unread_settings
from ..tasks.task import build_task, described_drops
from .memory import activations, aliases, weight_memory
from .model_sizes import kv_bytes_per_token
from .models import mesh_plan, model_without_memory, tokenizer_and_sizes
from .sampling_check import distortions

_LARGE_RATE = 1e-5  # of all weights of a pretrained model


def describe_plan(config: JobConfig, num_ranks: int) -> str:
    """Describe the plan in a few lines: ranks, batch, memory per rank. Builds the model without memory for weights."""
    model = model_without_memory(config)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    adapters = ""
    if lora := config.train.lora.rank:
        add_adapters(model, config.train.lora, config.run.seed)
        num_trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        adapters = f", and {num_trained / 1e6:.2f} M in adapters of rank {lora}, which alone are trained"
    itemsize = {"float32": 4, "bfloat16": 2}[config.model.dtype]
    text = model.config.get_text_config(decoder=True)
    mesh = mesh_plan(config, num_ranks)
    kv_per_token = kv_bytes_per_token(model, mesh, itemsize)
    per_token = "" if kv_per_token is None else f" at about {kv_per_token} bytes a token"
    prompts, group = config.rollout.prompts_per_step, config.rollout.group_size
    lines = [
        f"model      {config.model.path or 'built'}: {num_parameters / 1e6:.2f} M parameters, {config.model.dtype}"
        f"{adapters}",
        f"ranks      {num_ranks}, each {_trainer(config)} and {_engine(config)}",
        f"mesh       {_mesh(mesh)}",
        f"weights    {_sync(config)}",
        f"batch      {prompts} prompts x {group} samples a step, {prompts // num_ranks} x {group} a rank, "
        f"up to {config.rollout.max_new_tokens} new tokens each",
        *_sources(config),
        *_drops(config),
        *_evaluations(config),
        *_sampling(config),
        *_ahead(config),
        f"steps      {config.run.num_steps}, {config.train.num_optimizer_steps} optimizer step(s) on each",
        f"memory     per rank: {weight_memory(config, model, num_ranks)}; {activations(config, text, num_ranks)}; "
        f"KV pool {config.engine.kv_cache}{per_token}, released while training",
        f"results    {config.folder}",
        *_notes(config),
    ]
    return "\n".join(lines)


def _notes(config: JobConfig) -> list[str]:
    """Describe settings that have no effect, and one that is seldom meant."""
    rate, lines = config.train.learning_rate, []
    if config.model.path and not config.train.lora.rank and rate > _LARGE_RATE:
        why = f"AdamW may move each weight that far in a step, and pretrained models often break above {_LARGE_RATE:g}"
        lines.append(f"warning    train.learning_rate={rate:g} of all weights: {why} (1e-6 is usual)")
    unread = unread_settings(config)
    return lines + [f"{'not read' if number == 0 else '':<10} {one}" for number, one in enumerate(unread)]


def _drops(config: JobConfig) -> list[str]:
    """Describe the rows that are left out."""
    if config.data.too_long == "refuse":
        return []
    tokenizer, max_model_len, _ = tokenizer_and_sizes(config)
    return [f"data       {described_drops(build_task(config, tokenizer, max_model_len), config)}"]


def _sources(config: JobConfig) -> list[str]:
    """Describe the shares of several sources of problems."""
    given = config.data.sources
    total = sum(one.weight for one in given.values())
    shares = [f"{one.weight / total:.1%} {name}" for name, one in given.items()]
    return [f"sources    of the prompts {', '.join(shares)}"] if shares else []


def _evaluations(config: JobConfig) -> list[str]:
    """Describe the further evaluations."""
    return [
        f"{'' if number else 'evaluation':<10} {name}: up to {one.num} rows of {one.path} x {one.n} samples at a "
        f"temperature of {one.temperature:g}, every {one.every or config.run.eval_every} steps"
        for number, (name, one) in enumerate(config.evaluations.items())
    ]


def _sampling(config: JobConfig) -> list[str]:
    """Describe the further settings of the samples, and which of them their log-probabilities do not say."""
    settings = config.rollout.sampling
    if not settings:
        return []
    lines = [f"sampling   {', '.join(f'{name}={reprlib.repr(value)}' for name, value in settings.items())}"]
    if found := distortions(config):
        lines.append("           warning: not drawn from the policy, whose log-probabilities are reported:")
        lines += [f"           {one}" for one in found]
    return lines


def _ahead(config: JobConfig) -> list[str]:
    """Describe which steps are begun before their turn, and when they run."""
    rollout, num = config.rollout, config.rollout.steps_begun_ahead
    if not num:
        return []
    steps = "the next step" if num == 1 else f"the next {num} steps"
    when = (
        "beside training too" if config.engines == "separate" else "within the rollout phase only, not beside training"
    )
    rules = {
        "verify": "drawn again at a commit: the run is the one with rollout.ahead=0",
        "keep": f"kept at a commit, with {'their KV' if rollout.keep_kv else 'KV computed anew'}: "
        f"tokens of up to {_commits(num)} ago",
        "drop": f"kept at a commit, and groups begun more than {_commits(rollout.max_lag)} ago are drawn anew",
    }
    return [
        f"ahead      prompts of {steps} fill the places that a step leaves, {when}",
        f"           {rules[rollout.on_commit]}",
    ]


def _commits(num: int) -> str:
    return "1 commit" if num == 1 else f"{num} commits"


def _trainer(config: JobConfig) -> str:
    names = {"ddp": "a DDP", "fsdp2": "an FSDP2", "deepspeed": f"a DeepSpeed ZeRO-{config.deepspeed.zero_stage}"}
    return f"{names[config.trainer]} trainer"


def _engine(config: JobConfig) -> str:
    if config.engines == "separate":
        return "an engine in a process of its own"
    if config.parallel.num_ranks > 1:
        return "a part of an engine, with a copy of its part of the weights"
    return f"an engine {'that aliases its weights' if aliases(config) else 'with a copy of the weights'}"


def _sync(config: JobConfig) -> str:
    if config.sync == "in_place":
        if config.parallel.num_ranks > 1:
            return "whole tensors, one after another, of which each rank copies its part"
        return "in place: nothing moves" if aliases(config) else "gathered from the shards into the copies"
    settings = config.weights
    return (
        f"by {config.sync}, in buckets of {settings.bucket_bytes}, {'' if settings.verify else 'not '}verified, "
        f"{'with' if settings.undo == 'tensors' else 'without'} undo, waiting {settings.timeout_s} s at most"
    )


def _mesh(mesh: MeshPlan) -> str:
    def several(count: int, what: str) -> str:
        return f"{count} {what}{'' if count == 1 else 's'}"

    inside = f": {several(mesh.pp, 'stage')} of {several(mesh.tp, 'rank')}" if mesh.num_ranks > 1 else ""
    return (
        f"dp={mesh.dp} x pp={mesh.pp} x tp={mesh.tp}: {several(mesh.dp, 'replica')} of "
        f"{several(mesh.num_ranks, 'rank')}{inside}"
    )
