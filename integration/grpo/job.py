"""One rank of the main job: a loop of generate, score, train and commit."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch.distributed as dist
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from ...rollout.model.loading import load_whole, named_by_folder, read_config
from ...rollout.model.operations.indexer import freeze_indexers
from ...rollout.model.supported import context_length
from ..failures import FileFailed
from ..image_inputs import banned_tokens
from ..ranks import Ranks
from .backends.lora import add_adapters
from .engines.answers import StepSamples
from .engines.factory import make_engine
from .engines.rollouts import Rollouts
from .engines.schedule import SCHEDULE
from .environments.player import EpisodePlayer
from .evaluation import Evaluations
from .first_gap import FirstGap
from .planning.models import DTYPES, warm_start_spec
from .results.best_model import BestModel
from .results.checkpoint import (
    load_checkpoint,
    load_history,
    newest_checkpoint,
    refuse_other_checkpoints,
    refuse_other_draws,
    saved_digest,
)
from .results.json_files import read_json, write_json
from .results.run_folder import say
from .results.run_log import RunLog, drop_lines_after
from .results.samples import SampleFiles
from .results.samples_page import samples_data
from .results.settings_kept import changed_settings, describe
from .results.statistics import REWARD, step_statistics
from .results.wandb_log import WandbLog
from .rewards.scorer import make_scorer
from .rewards.user_calls import UserCalls
from .saving import SavedWeights
from .settings.config import JobConfig
from .tasks.task import build_task, described_drops
from .tasks.warm_start import WarmStartProgress, warm_start
from .training.loss import RatioNumbers
from .training.packing import Sample
from .training.trainer import GrpoTrainer, make_backend

if TYPE_CHECKING:  # FastAPI is an extra
    from ..http.server import BackgroundServer

logger = logging.getLogger(__name__)


class GrpoJob:
    """Model, engine and trainer of one rank."""

    def __init__(self, config: JobConfig, ranks: Ranks, *, resume: bool) -> None:
        transformers_logging.disable_progress_bar()  # the job has a bar of its own
        self.config = config
        self.ranks = ranks
        checkpoint = newest_checkpoint(config.folder / "checkpoints") if resume else None
        if resume:
            refuse_other_checkpoints(ranks, checkpoint)
        folder = Path(config.model.path) if config.model.path else self._built_model()
        self._model_folder = folder
        self.tokenizer, self.model = self._loaded(folder)
        max_model_len = context_length(self.model.config.get_text_config(decoder=True))
        self.task = build_task(config, self.tokenizer, max_model_len)
        if ranks.is_first and self.task.num_dropped:
            logger.warning("%s", described_drops(self.task, config))
        self.adapted = None  # the PeftModel around the model, if adapters are trained
        freeze_indexers(self.model)
        if config.train.lora.rank:
            self.adapted = add_adapters(self.model, config.train.lora, config.run.seed, folder)
        self.backend = make_backend(config, ranks)
        # The engine comes before the trainer, which may shard the module that the engine hosts or copies.
        self.engine = make_engine(config, self.model, folder, self.tokenizer, ranks, self.backend)
        self.engine.activity = ranks.activity
        self._calls = UserCalls(config.rollout.reward_timeout_s)
        self._progress = lambda: self.engine.num_steps() + self._calls.progress
        self.rollouts = Rollouts(
            config, ranks, self.engine, self.task, make_scorer(config, self._calls), self._player(),
            banned=banned_tokens(self.engine.hosted.module),
        )  # fmt: skip
        self.evaluations = Evaluations(config, ranks, self.task, self.rollouts.answers, self._progress)
        self._sample_files: SampleFiles | None = None  # of the first rank, while the job runs
        self._saved = SavedWeights(config, ranks, self.engine, self.backend, self.tokenizer, folder, self.adapted)
        self.first_step = self.step = 0  # step: number of the current step, from 1
        try:
            self.trainer = GrpoTrainer(
                self.engine.hosted, self.backend, config.train, config.rollout.temperature, ranks,
                num_steps=config.run.num_steps, max_new_tokens=config.rollout.max_new_tokens,
                announce_step=self.engine.announce_step, reference=self._reference(),
            )  # fmt: skip
            self.trainer.on_gap = FirstGap(config, ranks, self._saved.save_model)
            if checkpoint is not None:
                refuse_other_draws(checkpoint)
                if ranks.is_first and (changed := changed_settings(config, checkpoint)):
                    logger.warning("settings are others than at %s: %s", checkpoint, describe(changed))
                self.first_step, state = load_checkpoint(checkpoint, ranks.activity.note)
                ranks.meet()  # some may have read it in less time
                self.backend.load_state(state)
                if (drafts := self._saved.drafts()) is not None:
                    load_history(checkpoint, drafts)
            self.step = ranks.activity.step = self.first_step
            self.engine.sync(str(self.first_step))
            if checkpoint is not None:
                self._refuse_other_weights(checkpoint)
            self._http = self._serve()
        except BaseException:
            if config.parallel.num_ranks == 1:  # else closing would wait for the other ranks
                self.engine.close()
            raise

    def _loaded(self, folder: Path) -> tuple[PreTrainedTokenizerBase, PreTrainedModel]:
        """Load the tokenizer and the model of a folder. Raises ValueError naming one that is damaged."""
        model = self.config.model
        try:
            with named_by_folder(folder):
                tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
            return tokenizer, load_whole(folder, read_config(folder), DTYPES[model.dtype], self.ranks.device)
        except ValueError as error:
            if model.path:
                raise
            raise ValueError(f"{error}; remove this folder, and it is made anew") from error

    def _reference(self) -> PreTrainedModel | None:
        """Load the model of the KL, where it is another one than the job's at the start."""
        train = self.config.train
        if not (train.kl_coefficient and train.reference):
            return None
        folder = Path(train.reference)
        with named_by_folder(folder):
            return load_whole(folder, read_config(folder), DTYPES[self.config.model.dtype], self.ranks.device)

    def _player(self) -> EpisodePlayer | None:
        """Return the player of the job's episodes, where it has an environment."""
        service = self.engine.service
        if not self.config.environment or service is None:
            return None
        return EpisodePlayer(self.config, service, self.tokenizer, self._calls)

    def _refuse_other_weights(self, checkpoint: Path) -> None:
        """Raise ValueError if the weights are not those that the run had at the checkpoint: its file is damaged, or, as
        it holds adapters alone, their base is another one."""
        saved, now = saved_digest(checkpoint), self.engine.weight_digest()
        if self.adapted is not None and saved != now:
            raise ValueError(
                f"the base model is not the one of the checkpoint: its digest was {saved}, now it is {now}"
            )
        if None not in (saved, now) and saved != now:
            raise ValueError(
                f"{checkpoint} holds other weights than the run had there: their digest was {saved}, now it is {now}: "
                "remove this folder, then --resume continues from the checkpoint before it"
            )

    def run(self) -> None:
        """Train to the last step, evaluate and save the model. Rank 0 prints the results."""
        config, log, is_writable = self.config, None, True
        before = self._before()
        if self.ranks.is_first:
            best = BestModel(config.folder, config.checkpoints.best_by)
            if (aside := best.set_aside_after(self.first_step)) is not None:
                why = "of a later step than the run goes on from, or of another checkpoints.best_by"
                logger.warning("the best model was %s: it is in %s now", why, aside)
            self._saved.describe_engines(self.first_step)
            if config.run.rollouts_every:
                self._sample_files = SampleFiles(config.folder, config.run.rollouts_keep, self.first_step)
                self._sample_files.write_tokenizer(self.tokenizer.save_pretrained)
            if config.depends_on_timing:
                drop_lines_after(config.folder / SCHEDULE, self.first_step)
            wandb = WandbLog(config.run.wandb, config.folder, asdict(config)) if config.run.wandb else None
            log = RunLog(
                config.folder, config.run.num_steps, self.first_step, tensorboard=config.run.tensorboard, wandb=wandb
            )
        try:
            for step in range(self.first_step, config.run.num_steps):
                self.step = self.ranks.activity.step = step + 1
                line = self.run_step(step)
                self._saved.follow(self.step, cast("str | None", line["weight_digest"]))
                if due := self.evaluations.due(self.step):
                    line |= (found := self.evaluations.run(due))
                    if config.checkpoints.best_by in due:
                        self._saved.keep_if_best(self.step, found)
                    if log is not None:
                        log.show(self.evaluations.examples)
                if log is not None:
                    log.step(line)
                if self.step == config.run.num_steps or self.step % config.run.checkpoint_every == 0:
                    self._saved.save_checkpoint(step + 1)
        except FileFailed:
            is_writable = False
            raise
        finally:
            if log is not None:
                log.close(draws=is_writable)
        self._saved.save_last(config.run.num_steps)
        if log is not None:
            say(log.result(before))
        dist.barrier()  # no rank ends before the results are written, or while other ranks may call its engine

    def _serve(self) -> BackgroundServer | None:
        """Start an HTTP server on this rank's engine, if the config sets a port. It answers while the job trains.
        Raises ValueError where the port is in use."""
        service, port = self.engine.service, self.config.http.port
        if not port or service is None or not service.engine.is_controller:
            return None
        from ..http.edge.config import HttpConfig
        from ..http.server import serve_in_background

        samples = partial(samples_data, self.config.folder, tokenizer=self.tokenizer)
        keeps = bool(self.config.run.rollouts_every)
        try:
            server = serve_in_background(service, HttpConfig(port=port + self.ranks.rank), samples if keeps else None)
        except OSError as error:  # taken since the check
            raise ValueError(f"http.port: {error.strerror or error}") from error
        logger.info("rank %d answers at %s", self.ranks.rank, server.url)
        return server

    def close(self) -> None:
        """Close the servers, engines and sockets of the job, and the loop of its rewards and environments."""
        if self._http is not None:
            self._http.close()
        self._calls.close()
        self.engine.close()

    def run_step(self, step: int) -> dict[str, object]:
        """Generate, score, train and commit, all ranks together. Returns the step's metrics. step: from 0, in order."""
        started = time.perf_counter()
        done, activity = StepSamples(), self.ranks.activity
        with activity.of("training"):
            stats = self.trainer.update(self._followed(self.rollouts.samples(step, done)), step)
        trained = time.perf_counter()
        with activity.of("updating the engine's weights"):
            self.rollouts.end(step, done)
            num_bytes = self.engine.sync(str(step + 1))
        synced = time.perf_counter()
        own_tokens = done.num_discarded_tokens + sum(c.num_completion_tokens for c in done.completions)
        num_tokens = self.ranks.total(own_tokens)
        rollout_s = self.ranks.largest(done.waited_s)
        return {
            "step": step + 1,
            "reward_mean": self.ranks.total(sum(score.total for score in done.scores))
            / self.ranks.total(len(done.scores)),
            "logprob_gap": stats.logprob_gap,
            "loss": stats.loss,
            "kl": stats.kl,
            "clip_fraction": stats.clip_fraction,
            "grad_norm": stats.grad_norm,
            "learning_rate": stats.learning_rate,
            "samples_without_backward": stats.num_without_gradient,
            "samples_unmeasured": stats.num_unmeasured,  # those that logprob_gap is not of
            "rows": stats.num_rows,  # of one forward of the training
            "rows_shared": stats.num_shared,  # that it would have had in addition, without shared prefixes
            "sync_bytes": int(self.ranks.total(num_bytes)),
            "weight_version": str(step + 1),
            "weight_digest": self.engine.weight_digest(),
            "rollout_tokens_per_s": num_tokens / rollout_s,
            "accepted_drafts": int(self.ranks.total(sum(c.num_accepted_tokens for c in done.completions))),
            "rollout_s": rollout_s,
            "reward_s": self.ranks.largest(done.scored_s),
            "train_s": trained - started - done.waited_s - done.scored_s,
            "sync_s": synced - trained,
            **ratio_metrics(stats.ratios),
            **self._statistics(step, done),
            **self.rollouts.redrawn(done),
            **self.rollouts.lag(step, done),
            **self.rollouts.ahead(rollout_s),
        }

    def _followed(self, samples: Iterator[Sample]) -> Iterator[Sample]:
        """Yield samples, tell the other ranks of each, and wait for theirs at the end, before a collective does."""
        activity, doing = self.ranks.activity, "playing episodes" if self.config.environment else "scoring"
        while True:
            with activity.of(doing, self._progress):  # but while the engine generates
                sample = next(samples, None)
            if sample is None:
                break
            yield sample
        self.ranks.meet()

    def _statistics(self, step: int, done: StepSamples) -> dict[str, object]:
        """Keep the step's samples where it is their turn, and return their statistics, on the first rank."""
        every, group_size = self.config.run.rollouts_every, self.config.rollout.group_size
        if every and (step + 1) % every == 0:
            groups, images = self.rollouts.packed(done), self.rollouts.images(done)
            if self._sample_files is not None:
                self._sample_files.write(step + 1, groups, images)
        numbers = self.rollouts.numbers(done)
        return step_statistics(numbers, group_size) if numbers else {}

    def _before(self) -> dict[str, float]:
        """Evaluate the run's first model. A resumed run reads what was found from the run's folder; {} on other ranks
        than the first."""
        path = self.config.folder / "before.json"
        if self.first_step:
            advice = f'write {{"{REWARD}": 0.0}} there, say: only the last line of the run names it'
            return read_json(path, {REWARD: (int, float)}, advice) if self.ranks.is_first else {}
        found = self.evaluations.run(self.evaluations.due(0))
        if self.ranks.is_first:
            write_json(path, found)
        return found

    def _built_model(self) -> Path:
        cache_dir, device = self.config.warm_start.cache_dir, self.ranks.device
        return warm_start(warm_start_spec(self.config), cache_dir, device=device, on_progress=_report_warm_start)


def ratio_metrics(ratios: RatioNumbers) -> dict[str, object]:
    """Return how far the trainer's weights are from those that drew its tokens; {} where those are its own."""
    if not ratios.num:
        return {}
    return {
        "ratio_mean": ratios.total / ratios.num,
        "ratio_max": ratios.most,
        "ratio_bounded": ratios.num_bounded / ratios.num,
        "ratio_dropped": ratios.num_dropped / ratios.num,
    }


def _report_warm_start(progress: WarmStartProgress) -> None:
    if progress.step % 50 == 0 or progress.step == progress.num_steps:
        logger.info("warm start %d/%d: loss %.3f", progress.step, progress.num_steps, progress.loss)
