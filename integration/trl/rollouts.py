"""A `rollout_func` for TRL's GRPOTrainer that samples with the module being trained, and its callback.

    rollouts = LockstepRollouts(EngineConfig(kv_cache="1GiB"))
    trainer = GRPOTrainer(..., rollout_func=rollouts, callbacks=[rollouts.callback])

There is no second copy of the weights, and TRL's own forward computes the engine's log-probabilities, bit for bit: the
ratio of new to old policy is exactly 1 on the first pass over a generation.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable
from contextlib import AbstractContextManager
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from ...rollout.completion import Completion
from ...rollout.config import EngineConfig
from ...rollout.engine import Engine
from ...rollout.model.adapters.layers import without_peft_model
from ...rollout.model.hosted_model import HostedModel
from ...rollout.sampling_params import SamplingParams
from ..image_inputs import banned_tokens
from ..service import RolloutService
from .callback import RolloutCallback
from .drawn import DrawnLogprobs
from .forward import Images, PackedForward
from .images import images_of, model_prompts, refuse_uneven_images
from .packed_rows import PackedRows
from .refusals import refuse_unsupported
from .settings import SampleSeeds, sampling_params

logger = logging.getLogger(__name__)

GAP = "lockstep/logprob_gap"
NUM_COMPARED = "lockstep/compared_tokens"
SECONDS = "lockstep/generate_seconds"


class LockstepRollouts:
    """The rollouts of one GRPOTrainer. Pass it as `rollout_func`, and its `callback` among `callbacks`.

    The engine is made at the first call, in each process, around the trainer's module. `close` gives the module back.

    Each step it logs, beside TRL's metrics, `lockstep/logprob_gap`: the largest difference between the engine's and the
    trainer's log-probabilities, over all processes and all tokens that were scored with the weights that drew them,
    whose number is `lockstep/compared_tokens`. In invariant mode the gap is 0.0.
    """

    def __init__(self, config: EngineConfig | None = None, *, reuse_logprobs: bool = True) -> None:
        """Note the settings.

        config: of the engine. Its KV pool is released while the trainer trains; give it a size (`kv_cache`) on a GPU,
            for "auto" takes most of what is free before the optimizer has its memory.
        reuse_logprobs: where TRL wants the log-probabilities of the policy before its steps (with `num_iterations` or
            `steps_per_generation` above their defaults), give it the engine's, and save that forward.
        """
        self.callback: TrainerCallback = RolloutCallback(self)
        self._config, self._reuse_logprobs = config or EngineConfig(), reuse_logprobs
        self._trainer: Any = None
        self._service: RolloutService | None = None
        self._params: SamplingParams | None = None  # of every sample, but for the seed
        self._forwards: list[PackedForward] = []
        self._writing: AbstractContextManager[None] | None = None  # the optimizer's step, while it runs
        self._drawn = DrawnLogprobs()
        self._seeds = SampleSeeds()
        self._num_scored = 0  # scoring forwards up to the step before
        self._has_warned = self._is_closed = False

    @property
    def service(self) -> RolloutService:
        """The engine with its weight verbs. Raises RuntimeError before the first call."""
        if self._service is None:
            raise RuntimeError("there is no engine yet: a trainer makes it when it first calls its rollout_func")
        return self._service

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """Return one sample for each of this process's prompts, as TRL's `rollout_func`.

        TRL lists a prompt once for each of its generations. Prompts are texts or conversations, with images among their
        messages where the dataset has some; TRL's own code and processor turn them into tokens and tensors. Beside what
        TRL asks for, reward functions get `rollout_version`, `rollout_digest`, `rollout_seed` and `rollout_finish` of
        each sample. Raises ValueError naming the settings of a trainer that is not supported, RuntimeError for a sample
        that the engine did not finish.
        """
        if self._is_closed:
            raise RuntimeError("these rollouts are closed: make a LockstepRollouts for the next GRPOTrainer")
        if self._service is None:
            self._host(trainer)
        if trainer is not self._trainer:
            raise ValueError("these rollouts are another trainer's: make a LockstepRollouts for each GRPOTrainer")
        mode = "train" if trainer.model.training else "eval"
        given = model_prompts(trainer, prompts)
        refuse_uneven_images(trainer, given)
        first = trainer.accelerator.process_index * len(prompts)
        places = range(first, first + len(prompts))
        seeds = self._seeds.next(trainer.args.seed, mode, trainer.state.global_step, places)
        assert self._params is not None
        params = [replace(self._params, sampling_seed=seed) for seed in seeds]
        began = time.perf_counter()
        with self.service.rollout(release_kv=True):
            completions = self.service.engine.generate(given, params)
        trainer._metrics[mode][SECONDS].append(time.perf_counter() - began)
        _refuse_unfinished(completions)
        self._drawn.remember(mode, self._weights(), completions, [images_of(prompt) for prompt in given])
        return {
            "prompt_ids": [list(c.prompt_ids) for c in completions],
            "completion_ids": [list(c.token_ids) for c in completions],
            "logprobs": [list(c.logprobs) for c in completions],
            "rollout_version": [c.weight_version for c in completions],
            "rollout_digest": [c.weight_digest for c in completions],
            "rollout_seed": seeds,
            "rollout_finish": [c.finish_reason.type if c.finish_reason else None for c in completions],
        }

    # -- what the callback calls --------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Announce that the optimizer writes the weights: nothing is sampled until `end_step`."""
        assert self._writing is None
        self._writing = self.service.optimizer_step()
        self._writing.__enter__()

    def end_step(self, version: int) -> None:
        """Publish the weights that the optimizer has written."""
        assert self._writing is not None
        writing, self._writing = self._writing, None
        writing.__exit__(None, None, None)
        self._commit(version)

    def weights_replaced(self, version: int) -> None:
        """Publish weights that the trainer has loaded, of a checkpoint for instance. Does nothing before the first
        generation."""
        if self._service is not None:
            self._writing = None
            self._service.weights_restored()
            self._commit(version)

    def log_gap(self) -> None:
        """Add the gap of the step to the trainer's metrics. All processes call it together.

        Raises RuntimeError if TRL has trained without the forward that computes the engine's bits.
        """
        num_scored = self._forwards[0].num_scored
        if num_scored == self._num_scored:
            raise RuntimeError(
                "TRL computed no log-probabilities with the module's fused head (as trl 1.16 does) in this step: its "
                "log-probabilities are not the engine's"
            )
        self._num_scored = num_scored
        accelerator = self._trainer.accelerator
        taken = torch.tensor([self._drawn.take()], dtype=torch.float64, device=accelerator.device)
        of_all = accelerator.gather(taken)
        gap, num_tokens = of_all[:, 0].max().item(), of_all[:, 1].sum().item()
        metrics = self._trainer._metrics["train"]
        metrics[NUM_COMPARED].append(num_tokens)
        if num_tokens:
            metrics[GAP].append(gap)
        if gap and self._config.invariant and not self._has_warned:
            self._has_warned = True
            logger.warning("the trainer's log-probabilities differ from the engine's by %g", gap)

    def end_evaluation(self) -> None:
        """Let the next evaluation of the same weights draw the same samples."""
        self._seeds.forget("eval")

    # -- making and closing -------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the engine, and give the trainer its own forward back. It cannot generate any more."""
        self._is_closed = True
        self._leave()

    def _leave(self) -> None:
        if self._service is not None:
            self._service.close()
        while self._forwards:
            self._forwards.pop().remove()

    def __enter__(self) -> LockstepRollouts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _host(self, trainer: Any) -> None:
        """Make the engine around the trainer's module, and put its numerics into the forward of TRL."""
        refuse_unsupported(trainer, self._config)
        if self.callback not in trainer.callback_handler.callbacks:
            raise ValueError("callbacks: pass the callback of these rollouts too, callbacks=[rollouts.callback]")
        module: Any = without_peft_model(trainer.model)
        try:
            # Before the engine runs the module: nothing of TRL's or of accelerate's forward is in its numbers.
            recall = self._recall if self._reuse_logprobs else None
            self._forwards.append(PackedForward(module, trainer.temperature, self._compare, recall))
            engine = Engine(trainer.model, self._config, tokenizer=trainer._tokenizer)
            self._trainer, self._service = trainer, RolloutService(engine)
            self._forwards[0].hosted = engine.model
            self._params = sampling_params(trainer, engine.max_model_len, banned_tokens(module))
            if trainer.ref_model is not None:
                self._adopt_reference(trainer.accelerator.unwrap_model(trainer.ref_model))
            self._commit(trainer.state.global_step)
        except BaseException:
            self._leave()
            self._service = None
            raise

    def _adopt_reference(self, module: Any) -> None:
        """Let a reference model compute with the engine's numerics, so that an equal model has a KL of exactly 0."""
        self._forwards.append(PackedForward(module, self._trainer.temperature))
        self._forwards[-1].hosted = HostedModel.adopt(
            module, dtype=None, device=None, invariant=self._config.invariant, k_blocks=self._config.k_blocks
        )

    def _commit(self, version: int) -> None:
        self.service.commit_in_place(str(version), source=self._trainer.model.named_parameters())

    def _weights(self) -> Hashable:
        """Return a name of the present weights, and of the state of their adapters."""
        return self.service.engine.epoch, self.service.engine.model.adapters.state()

    def _recall(self, rows: PackedRows, images: Images) -> Tensor | None:
        return self._drawn.recall(rows, self._weights(), images)

    def _compare(self, rows: PackedRows, logprobs: Tensor, images: Images) -> None:
        """Compare what was scored; log it at once in an evaluation, in which no step ends."""
        self._drawn.compare(rows, logprobs, self._weights(), images)
        if not self._trainer.model.training:
            gap, num_tokens = self._drawn.take()
            if num_tokens:
                self._trainer._metrics["eval"][GAP].append(gap)


def _refuse_unfinished(completions: list[Completion]) -> None:
    """Raise RuntimeError naming samples that the engine could not draw."""
    for completion in completions:
        if (why := completion.why_unfinished) is not None:
            num = completion.num_prompt_tokens
            raise RuntimeError(f"the engine did not finish a sample of a prompt of {num} tokens: {why}")
