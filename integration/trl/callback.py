"""The callback that tells an engine when the trainer writes the weights it samples with."""

from __future__ import annotations

from typing import Any, Protocol

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class WeightEvents(Protocol):
    """The calls that a trainer's events are turned into."""

    def begin_step(self) -> None:
        """Announce an optimizer's step."""

    def end_step(self, version: int) -> None:
        """Publish the weights of that step."""

    def weights_replaced(self, version: int) -> None:
        """Publish weights that were loaded."""

    def log_gap(self) -> None:
        """Log the gap of the step."""

    def end_evaluation(self) -> None:
        """Note the end of an evaluation."""


class RolloutCallback(TrainerCallback):
    """A callback for `callbacks` of the GRPOTrainer, made by `LockstepRollouts`."""

    def __init__(self, events: WeightEvents) -> None:
        self._events = events

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Publish the weights anew: a checkpoint may have been loaded since the last step."""
        self._events.weights_replaced(state.global_step)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Refuse to sample while the optimizer writes."""
        self._events.begin_step()

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Publish the new weights, under the number of the step that ends here."""
        self._events.end_step(state.global_step + 1)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Log the gap before the trainer writes its metrics."""
        self._events.log_gap()

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Note the end of an evaluation."""
        self._events.end_evaluation()

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Publish the best weights, where the trainer has loaded them in the end."""
        if args.load_best_model_at_end:
            self._events.weights_replaced(state.global_step)
