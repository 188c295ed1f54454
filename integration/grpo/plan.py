"""The plan of a job, checked and described before the start: ranks, batch, memory per rank."""

from __future__ import annotations

import importlib.util
import math
import os
import reprlib
from pathlib import Path

import torch
from transformers import AutoTokenizer, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ...rollout.media.reader import why_no_images
from ...rollout.model.loading import named_by_folder, read_config, refuse_faulty_weights
from ...rollout.model.supported import context_length
from ...rollout.ranks.mesh import Mesh, MeshPlan
from ...rollout.sharding.part import Part, build_part
from ...rollout.sharding.skeleton import auto_class
from ...weight_sync.layout.bucket import ALIGNMENT
from ..ranks import Ranks
from .backends.lora import add_adapters, missing_package
from .engines.schedule import read_schedule
from .environments.player import job_environment
from .model_sizes import kv_bytes_per_token, layer_configs, mlp_width
from .results.checkpoint import num_steps_done
from .results.settings_kept import other_seed
from .rewards.scorer import make_scorer
from .sampling_check import check_sampling, distortions
from .settings.config import JobConfig
from .settings.unread import unread_settings
from .tasks.arithmetic import CONTEXT_TOKENS, VOCAB_SIZE, ArithmeticSpec, build_tokenizer
from .tasks.task import Task, build_task, check_lengths, described_drops
from .tasks.warm_start import ModelSpec, WarmStartSpec, build_model
from .training.checkpointing import refuse_without_layers
from .training.trainer import make_backend

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_LARGE_RATE = 1e-5  # of all weights of a pretrained model


def model_spec(config: JobConfig) -> ModelSpec:
    """Return the shape of the model that the job builds."""
    m = config.model
    return ModelSpec(
        m.hidden_size, m.intermediate_size, m.num_layers, m.num_heads, m.num_kv_heads, m.head_dim, m.family
    )


def warm_start_spec(config: JobConfig) -> WarmStartSpec:
    """Return what the warm start of that model depends on."""
    data, warm = config.data, config.warm_start
    return WarmStartSpec(
        seed=config.run.seed,
        model=model_spec(config),
        data=ArithmeticSpec(config.run.seed, data.min_digits, data.max_digits, data.num_heldout),
        num_steps=warm.num_steps,
        batch_size=warm.batch_size,
        learning_rate=warm.learning_rate,
        slip_rate=warm.slip_rate,
    )


def _inputs_in_own_folder(config: JobConfig) -> list[str]:
    """Return a fault for each input that lies in the folder of the run, which is moved aside when the run begins."""
    inputs = {
        "model.path": config.model.path, "run.replay_schedule": config.run.replay_schedule,
        "data.path": config.data.path, "data.heldout_path": config.data.heldout_path,
        "data.few_shot_path": config.data.few_shot_path,
    }  # fmt: skip
    folder = os.path.realpath(config.folder)  # Path.resolve raises on links that lead in a circle
    return [
        f"{key}: {value!r} is in the folder of this very run, which is moved aside when it begins: choose another "
        "run.name, or go on with --resume"
        for key, value in inputs.items()
        if value and Path(os.path.realpath(value)).is_relative_to(folder)
    ]


def _steps_already_done(config: JobConfig) -> list[str]:
    """Return the fault of a run that is resumed for fewer steps than it has done."""
    folder = config.folder / "checkpoints"
    num_done = num_steps_done(folder)
    if num_done <= config.run.num_steps:  # with as many, only the results are written again
        return []
    return [
        f"run.num_steps={config.run.num_steps}, but the newest checkpoint in {folder} is of step {num_done}: raise "
        "run.num_steps, or remove the later checkpoints"
    ]


def check_job(config: JobConfig, num_ranks: int, *, resume: bool = False) -> None:
    """Check the config before a process group exists. resume: the run goes on in its folder. Raises ValueError with all
    faults in one line."""
    wrong = [*_steps_already_done(config), *other_seed(config)] if resume else _inputs_in_own_folder(config)
    if config.run.num_ranks and config.run.num_ranks != num_ranks:
        wrong.append(f"run.num_ranks is {config.run.num_ranks}, but torchrun started {num_ranks}")
    if config.rollout.prompts_per_step % num_ranks:
        wrong.append(f"rollout.prompts_per_step={config.rollout.prompts_per_step} does not divide by {num_ranks} ranks")
    try:
        mesh_plan(config, num_ranks)
    except ValueError as error:
        wrong.append(f"parallel: {error}")
    needed = ["matplotlib"] + ["tensorboard"] * config.run.tensorboard + ["zstandard"] * (config.run.rollouts_every > 0)
    if absent := [name for name in needed if importlib.util.find_spec(name) is None]:
        names = " and ".join(sorted(absent))
        wrong.append(f"{names} must be installed for plots and logs, the extra `train`: pip install -e '.[train]'")
    # A folder wandb, as wandb leaves one, is not the package.
    if config.run.wandb and ((spec := importlib.util.find_spec("wandb")) is None or spec.origin is None):
        wrong.append("wandb must be installed for run.wandb, the extra `wandb`: pip install -e '.[wandb]'")
    if config.trainer == "deepspeed" and importlib.util.find_spec("deepspeed") is None:
        wrong.append(
            "deepspeed must be installed for this trainer, the extra `deepspeed`: pip install -e '.[deepspeed]'"
        )
    if config.train.lora.rank:
        wrong += missing_package()
    if config.weights.num_bucket_bytes < ALIGNMENT:
        wrong.append(f"weights.bucket_bytes must be at least {ALIGNMENT} bytes, not {config.weights.bucket_bytes!r}")
    if config.weights.folder and os.path.exists(config.weights.folder) and not os.path.isdir(config.weights.folder):
        wrong.append(f"weights.folder: {config.weights.folder!r} is no folder")
    if wrong:
        raise ValueError("; ".join(wrong))
    config.engine_config()
    if config.run.replay_schedule:
        read_schedule(config.run.replay_schedule)
    scorer = make_scorer(config)
    if config.environment:
        job_environment(config)
    model_spec(config)
    tokenizer, max_model_len, vocab_size = _tokenizer_and_sizes(config)
    task = build_task(config, tokenizer, max_model_len)
    if not config.environment:
        scorer.check_rows(task.all_known)
        check_lengths(task.all_known, tokenizer, config.rollout.max_new_tokens, max_model_len)
    check_sampling(config, tokenizer, vocab_size)
    _refuse_pictures(config, task, num_ranks)
    if config.train.gradient_checkpointing:
        refuse_without_layers(_model_without_memory(config))
    if config.train.lora.rank:
        add_adapters(_model_without_memory(config), config.train.lora, config.run.seed)
    if config.parallel.num_ranks > 1:
        try:
            _part(config, _model_without_memory(config), num_ranks)
        except ValueError as error:
            raise ValueError(f"parallel: {error}") from error


def _refuse_pictures(config: JobConfig, task: Task, num_ranks: int) -> None:
    """Raise ValueError for prompts with pictures where the job's model or engine takes none."""
    if not any(problem.pictures for problem in task.all_known):
        return
    if config.engines == "separate":
        raise ValueError('engines must be "local" for prompts with pictures: tensors do not go to another process')
    if reason := why_no_images(_model_without_memory(config)):
        raise ValueError(f"{config.data.path} has prompts with pictures: {reason}")
    if config.trainer == "ddp" or num_ranks == 1:
        return
    if without := next((problem.source for problem in task.all_known if not problem.pictures), ""):
        raise ValueError(
            f'trainer must be "ddp" for rows with and without pictures on {num_ranks} ranks, as {without} is without: '
            "with others each rank has to run the encoder of images in each micro-batch"
        )


def mesh_plan(config: JobConfig, num_ranks: int) -> MeshPlan:
    """Divide the job's ranks into replicas. Raises ValueError where their number does not fit."""
    return MeshPlan(num_ranks, config.parallel.tp, config.parallel.pp)


def _part(config: JobConfig, model: PreTrainedModel, num_ranks: int) -> Part:
    """Build the first rank's part of the model, without memory. Raises ValueError where the model cannot be divided."""
    mesh = Mesh(mesh_plan(config, num_ranks), 0, None, None, None, 0.0)
    return build_part(model.config, _DTYPES[config.model.dtype], mesh, config.engine.k_blocks)


def _model_without_memory(config: JobConfig) -> PreTrainedModel:
    with torch.device("meta"):
        if not config.model.path:
            return build_model(model_spec(config), build_tokenizer())
        path_config = read_config(Path(config.model.path))
        with named_by_folder(Path(config.model.path)):
            return auto_class(path_config).from_config(path_config, dtype=_DTYPES[config.model.dtype])


def _tokenizer_and_sizes(config: JobConfig) -> tuple[PreTrainedTokenizerBase, int, int]:
    """Return the model's tokenizer, the length of its context and the size of its vocabulary."""
    path = config.model.path
    if not path:
        return build_tokenizer(), CONTEXT_TOKENS, VOCAB_SIZE
    if not os.path.isfile(os.path.join(path, "config.json")):
        raise ValueError(f"model.path: {path!r} is no model folder, it holds no config.json")
    text = read_config(Path(path)).get_text_config(decoder=True)
    refuse_faulty_weights(Path(path))
    with named_by_folder(Path(path)):
        return AutoTokenizer.from_pretrained(path), context_length(text), text.vocab_size


def describe_plan(config: JobConfig, num_ranks: int) -> str:
    """Describe the plan in a few lines: ranks, batch, memory per rank. Builds the model without memory for weights."""
    model = _model_without_memory(config)
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
        *_drops(config),
        *_sampling(config),
        *_ahead(config),
        f"steps      {config.run.num_steps}, {config.train.epochs_per_step} optimizer step(s) on each",
        f"memory     per rank: {_weight_memory(config, model, num_ranks)}; {_activations(config, text, num_ranks)}; "
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


def _activations(config: JobConfig, text: PretrainedConfig, num_ranks: int) -> str:
    """Describe the memory of a micro-batch's activations. text: the decoder's configuration."""
    train, rollout = config.train, config.rollout
    if train.microbatch_bytes:
        return f"activations of a micro-batch up to {train.microbatch_bytes}, as measured at the start"
    rows, of_what = train.num_microbatch_rows, "rows"
    if rows is None:
        samples = -(-rollout.prompts_per_step * rollout.group_size // num_ranks)
        rows = -(-samples // train.gradient_accumulation_steps) * rollout.max_new_tokens
        of_what = "rows of new tokens"
    itemsize = {"float32": 4, "bfloat16": 2}[config.model.dtype]
    # The backward pass keeps residual stream, attention and MLP of each layer, and the logits in float32.
    per_layer = [(10 * text.hidden_size + 3 * mlp_width(one)) * itemsize for one in layer_configs(text)]
    layers = sum(per_layer)
    if train.gradient_checkpointing:
        layers = len(per_layer) * text.hidden_size * itemsize + max(per_layer)
    size = min(rows, 10**9) * (layers + 3 * text.vocab_size * 4)
    return f"activations about {size / 2**20:.0f} MiB for {rows} {of_what}"


def _drops(config: JobConfig) -> list[str]:
    """Describe the rows that are left out."""
    if config.data.too_long == "refuse":
        return []
    tokenizer, max_model_len, _ = _tokenizer_and_sizes(config)
    return [f"data       {described_drops(build_task(config, tokenizer, max_model_len), config)}"]


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
    return f"an engine {'that aliases its weights' if _aliases(config) else 'with a copy of the weights'}"


def _aliases(config: JobConfig) -> bool:
    backend = make_backend(config, Ranks(0, 1, torch.device("cpu")))
    return config.sync == "in_place" and config.parallel.num_ranks == 1 and backend.shares_storage


def _sync(config: JobConfig) -> str:
    if config.sync == "in_place":
        if config.parallel.num_ranks > 1:
            return "whole tensors, one after another, of which each rank copies its part"
        return "in place: nothing moves" if _aliases(config) else "gathered from the shards into the copies"
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


def _weight_memory(config: JobConfig, model: PreTrainedModel, num_ranks: int) -> str:
    """Describe the memory of one rank for parameters, by kind."""
    num_parameters = num_in_engine = sum(parameter.numel() for parameter in model.parameters())
    if config.parallel.num_ranks > 1:
        part = _part(config, model, num_ranks)
        names = {name for name, _ in part.module.named_parameters()}  # tied parameters counted once
        num_in_engine = sum(math.prod(part.division.shards[name].shape) for name in names)
    itemsize = {"float32": 4, "bfloat16": 2}[config.model.dtype]
    weights, gradients = itemsize, 4  # gradients are summed in float32
    # Of weights, gradients and optimizer state, the last `num_sharded` are sharded.
    num_sharded = {"ddp": 0, "fsdp2": 3, "deepspeed": config.deepspeed.zero_stage}[config.trainer]
    shards = [num_ranks if kind >= 3 - num_sharded else 1 for kind in range(3)]
    adamw = 2 * 4  # moments in float32
    if config.model.dtype == "bfloat16" and config.train.low_precision == "masters":
        if config.trainer == "fsdp2":
            weights = 4  # the shards are the masters
        else:
            adamw += 4
    if config.trainer == "deepspeed":
        gradients = itemsize
        if config.deepspeed.zero_stage or config.model.dtype == "bfloat16":
            adamw = 3 * 4  # moments and a copy of the parameters, in float32
    if config.train.lora.rank:  # in float32 whatever the base's dtype is
        num_trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        sizes = {
            "weights": itemsize * (num_parameters - num_trained),
            "adapters, gradients and AdamW": 16 * num_trained,
        }
        return " + ".join(f"{name} {size / 2**20:.1f} MiB" for name, size in sizes.items())
    parts = {
        "weights": weights / shards[0],
        "gradients": gradients / shards[1],
        "AdamW": adamw / shards[2],
        "the engine's copy": 0
        if _aliases(config) or config.engines == "separate"
        else itemsize * num_in_engine / num_parameters,
        "the KL reference": itemsize if config.train.kl_coefficient else 0,
    }
    return " + ".join(f"{name} {num_parameters * size / 2**20:.1f} MiB" for name, size in parts.items() if size)
