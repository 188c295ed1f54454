"""The check of a job's settings against each other, its files, its model and its ranks."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from ....rollout.media.reader import why_no_images
from ....weight_sync.layout.bucket import ALIGNMENT
from ..backends.lora import add_adapters, missing_package
from ..engines.schedule import read_schedule, refuse_older_versions
from ..environments.player import job_environment
from ..results.checkpoint import num_steps_done
from ..results.settings_kept import other_seed
from ..rewards.scorer import make_scorer
from ..settings.config import JobConfig
from ..tasks.rows import why_unreadable
from ..tasks.task import Task, build_task, check_lengths
from ..training.checkpointing import refuse_without_layers
from .models import first_part, mesh_plan, model_spec, model_without_memory, tokenizer_and_sizes
from .sampling_check import check_sampling


def _inputs_in_own_folder(config: JobConfig) -> list[str]:
    """Return a fault for each input that lies in the folder of the run, which is moved aside when the run begins."""
    inputs = {
        "model.path": config.model.path,
        "run.replay_schedule": config.run.replay_schedule,
        "train.reference": config.train.reference,
        **config.data_files,
    }
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


def _missing_packages(config: JobConfig) -> list[str]:
    """Return a fault for each package that the settings need and that is not installed."""
    wrong: list[str] = []
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
    if config.http.port and not _has_server():
        wrong.append(
            "uvicorn and fastapi must be installed for http.port, the extra `serve`: pip install -e '.[serve]'"
        )
    if config.train.lora.rank:
        wrong += missing_package()
    return wrong + [f"{key}: {fault}" for key, path in config.data_files.items() if (fault := why_unreadable(path))]


def _has_server() -> bool:
    return None not in map(importlib.util.find_spec, ("uvicorn", "fastapi"))


def _refused_port(config: JobConfig) -> list[str]:
    """Return the fault of the port on which this rank's engine is to answer, if it takes requests."""
    rank = int(os.environ.get("RANK", "0"))
    if not config.http.port or rank % config.parallel.num_ranks or not _has_server():
        return []
    from ...http.edge.config import HttpConfig  # its packages are an extra
    from ...http.edge.listening import listen

    try:
        listen(HttpConfig(port=config.http.port + rank)).close()
    except (ValueError, OSError) as error:
        return [f"http.port: {error.strerror if isinstance(error, OSError) else error}"]
    return []


def check_job(config: JobConfig, num_ranks: int, *, resume: bool = False) -> None:
    """Check the config before a process group exists. resume: the run goes on in its folder. Raises ValueError with all
    faults in one line."""
    wrong = [*_steps_already_done(config), *other_seed(config)] if resume else _inputs_in_own_folder(config)
    if config.run.num_ranks and config.run.num_ranks != num_ranks:
        wrong.append(f"run.num_ranks is {config.run.num_ranks}, but torchrun started {num_ranks}")
    if config.rollout.prompts_per_step % num_ranks:
        wrong.append(f"rollout.prompts_per_step={config.rollout.prompts_per_step} does not divide by {num_ranks} ranks")
    elif (config.rollout.prompts_per_step // num_ranks) % config.train.minibatches_per_step:
        num, each = config.train.minibatches_per_step, config.rollout.prompts_per_step // num_ranks
        wrong.append(
            f"train.minibatches_per_step={num} does not divide the {each} prompts that each rank has in a step"
        )
    try:
        mesh_plan(config, num_ranks)
    except ValueError as error:
        wrong.append(f"parallel: {error}")
    wrong += _missing_packages(config)
    wrong += _refused_port(config)
    if config.weights.num_bucket_bytes < ALIGNMENT:
        wrong.append(f"weights.bucket_bytes must be at least {ALIGNMENT} bytes, not {config.weights.bucket_bytes!r}")
    if config.weights.folder and os.path.exists(config.weights.folder) and not os.path.isdir(config.weights.folder):
        wrong.append(f"weights.folder: {config.weights.folder!r} is no folder")
    if wrong:
        raise ValueError("; ".join(wrong))
    config.engine_config()
    if path := config.run.replay_schedule:
        schedule = read_schedule(path)
        refuse_older_versions(path, schedule, num_steps_done(config.folder / "checkpoints") if resume else 0)
    scorer = make_scorer(config)
    if config.environment:
        job_environment(config)
    if not config.model.path:
        model_spec(config)
    tokenizer, max_model_len, vocab_size = tokenizer_and_sizes(config)
    task = build_task(config, tokenizer, max_model_len)
    if not config.environment:
        scorer.check_rows(task.all_known)
        check_lengths(task.all_known, tokenizer, config.rollout.max_new_tokens, max_model_len)
    check_sampling(config, tokenizer, vocab_size)
    _refuse_pictures(config, task, num_ranks)
    if config.train.kl_coefficient and config.train.reference:
        _check_reference(config, tokenizer, vocab_size)
    if config.train.gradient_checkpointing:
        refuse_without_layers(model_without_memory(config))
    if config.train.lora.rank:
        add_adapters(model_without_memory(config), config.train.lora, config.run.seed)
    if config.parallel.num_ranks > 1:
        try:
            first_part(config, model_without_memory(config), num_ranks)
        except ValueError as error:
            raise ValueError(f"parallel: {error}") from error


def _check_reference(config: JobConfig, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    """Raise ValueError for a reference that is no model folder, or that has other tokens than the job's model."""
    path = config.train.reference
    its_tokenizer, max_model_len, size = tokenizer_and_sizes(config, path, "train.reference")
    ours, theirs = tokenizer.get_vocab(), its_tokenizer.get_vocab()
    if differing := sorted(token for token in {*ours, *theirs} if ours.get(token) != theirs.get(token)):
        shown = ", ".join(f"{token!r} ({ours.get(token)} and {theirs.get(token)})" for token in differing[:3])
        raise ValueError(
            f"train.reference: {path} has other tokens than the job's model, {len(differing)} of them: {shown}"
        )
    if size < vocab_size:  # a drawn token may be beyond them
        raise ValueError(f"train.reference: {path} has logits of {size} tokens only, the job's model of {vocab_size}")
    longest = config.rollout.max_new_tokens
    if max_model_len <= longest:
        raise ValueError(
            f"train.reference: {path} has a context of {max_model_len} tokens: no prompt fits before {longest} new ones"
        )


def _refuse_pictures(config: JobConfig, task: Task, num_ranks: int) -> None:
    """Raise ValueError for prompts with pictures where the job's model or engine takes none."""
    first = next((problem for problem in task.all_known if problem.pictures), None)
    if first is None:
        return
    if config.engines == "separate":
        raise ValueError('engines must be "local" for prompts with pictures: tensors do not go to another process')
    if reason := why_no_images(model_without_memory(config)):
        raise ValueError(f"{first.source} is a prompt with pictures: {reason}")
    if config.train.kl_coefficient and config.train.reference:
        raise ValueError("train.reference must not be set for prompts with pictures, which another model may read anew")
    if config.trainer == "ddp" or num_ranks == 1:
        return
    if without := next((problem.source for problem in task.all_known if not problem.pictures), ""):
        raise ValueError(
            f'trainer must be "ddp" for rows with and without pictures on {num_ranks} ranks, as {without} is without: '
            "with others each rank has to run the encoder of images in each micro-batch"
        )
