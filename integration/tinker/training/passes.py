"""Forward and backward passes of checked data, in micro-batches, with the engine's numerics.

The log-probabilities of a forward have the bits that the engine reports for the same tokens and weights, however the
data are divided into requests and micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ....kernels.sampling.logprobs import scaled_logprobs, selected_logprobs
from ....rollout.model.hosted_model import HostedModel
from ...grpo.training.activations import ActivationBytes, measure
from ...grpo.training.shared_prefixes import RowTree, why_no_shared_prefixes
from .adapter import TrainedAdapter
from .data import BadInput, Batch, CheckedDatum
from .losses import ratios
from .targets import AdapterSpec
from .window import AdapterWindow

_WEIGHTS = "weights"


@dataclass(frozen=True)
class PassResult:
    """The outputs of each datum, float32 arrays by name, and the metrics of all."""

    outputs: list[dict[str, np.ndarray]]
    metrics: dict[str, float]


class Passes:
    """The passes of one engine's module."""

    def __init__(self, window: AdapterWindow, microbatch_bytes: float) -> None:
        """Take the window. microbatch_bytes: of the activations of a micro-batch; a larger datum is one by itself."""
        self._window, self._limit = window, microbatch_bytes
        self._sizes: dict[AdapterSpec, ActivationBytes] = {}
        self._shares: bool | None = None  # whether data that begin alike can have rows in common; None: not tried yet

    def run(self, adapter: TrainedAdapter, batch: Batch, *, backward: bool) -> PassResult:
        """Run the data forward and, with `backward`, add the gradients of the losses' sum to the adapter's.

        Raises BadInput for a loss that is not finite; no gradient is added then, nor where anything else fails.
        """
        outputs: list[dict[str, np.ndarray]] = []
        summed: dict[str, Tensor] = {}
        found = _Ratios()
        with self._window.training(adapter.spec, adapter.weights()) as parameters:
            for part in self._microbatches(adapter.spec, batch.sequences):
                with nullcontext() if backward else torch.no_grad():
                    logprobs, losses = self._losses(batch, part, found)
                    self._refuse_infinite(losses, part, len(outputs))
                if backward:
                    losses.sum().backward()
                    for name, parameter in parameters.items():
                        gradient, parameter.grad = parameter.grad, None
                        if gradient is not None:
                            gradient = gradient.to(torch.float32)
                            summed[name] = gradient if name not in summed else summed[name].add_(gradient)
                outputs += _outputs(part, logprobs.detach(), losses.detach())
        if backward:
            adapter.add_gradients(summed)
        total = float(np.sum([one["elementwise_loss"].sum(dtype=np.float64) for one in outputs]))
        return PassResult(outputs, {"loss:sum": total, **found.metrics()})

    def _losses(self, batch: Batch, part: Sequence[CheckedDatum], found: _Ratios) -> tuple[Tensor, Tensor]:
        """Return log-probability and loss of each target of a micro-batch, [M] or [M, K] where a datum has several."""
        model, device = self._window.model, self._window.model.device
        logits = _logits(model, part, shares=bool(self._shares))
        targets = torch.cat([one.targets for one in part]).to(device)
        if targets.dim() == 1:
            logprobs = selected_logprobs(logits, targets)
        else:
            logprobs = scaled_logprobs(logits, 1.0).gather(-1, targets)
        inputs = {name: torch.cat([one.inputs[name] for one in part]).to(device) for name in part[0].inputs}
        losses = batch.loss.losses(logprobs, inputs, [one.num_rows for one in part], batch.config)
        if batch.loss.has_ratio:
            counts = (inputs["advantages"] != 0) & (inputs[_WEIGHTS] != 0)
            found.add(ratios(logprobs.detach(), inputs)[counts])
        return logprobs, losses * inputs[_WEIGHTS]

    def _refuse_infinite(self, losses: Tensor, part: Sequence[CheckedDatum], first: int) -> None:
        if torch.isfinite(losses).all():
            return
        ends = np.cumsum([one.num_rows for one in part])
        row = int((~torch.isfinite(losses)).flatten().nonzero()[0]) // (losses.shape[1] if losses.dim() > 1 else 1)
        index = int(np.searchsorted(ends, row, side="right"))
        raise BadInput(
            f"data[{first + index}]: the loss is not finite at position {row - int(ends[index]) + part[index].num_rows}"
        )

    def _microbatches(self, spec: AdapterSpec, data: Sequence[CheckedDatum]) -> Iterator[list[CheckedDatum]]:
        """Divide data, in order, into runs of equal numbers of targets a position whose activations fit."""
        model = self._window.model
        if spec not in self._sizes:
            self._sizes[spec] = measure(model)
        if self._shares is None:
            self._shares = why_no_shared_prefixes(model) is None
        size, run, cost, tree = self._sizes[spec], list[CheckedDatum](), 0.0, RowTree(shares=self._shares)
        for one in data:
            of_targets = size.per_target * one.num_rows
            if one.targets.dim() > 1:  # log-probabilities of the whole vocabulary
                of_targets += 4 * model.vocab_size * one.num_rows
            ids = one.token_ids.tolist()
            num_rows = one.num_rows if model.has_states else tree.num_new(ids)  # recurrent layers keep something of all
            its = size.per_row * num_rows + of_targets
            if run and (cost + its > self._limit or one.targets.shape[1:] != run[0].targets.shape[1:]):
                yield run
                run, cost, tree = [], 0.0, RowTree(shares=self._shares)
                its = size.per_row * one.num_rows + of_targets
            run.append(one)
            cost += its
            tree.add(ids)
        if run:
            yield run


class _Ratios:
    """The least and the largest ratio p / q of the tokens that count."""

    def __init__(self) -> None:
        self._least, self._most = float("inf"), float("-inf")

    def add(self, values: Tensor) -> None:
        """Add ratios."""
        if values.numel():
            least, most = (float(end) for end in values.aminmax())
            self._least, self._most = min(self._least, least), max(self._most, most)

    def metrics(self) -> dict[str, float]:
        """Return both; nothing without a ratio."""
        if self._least > self._most:
            return {}
        return {"importance_ratio:min": self._least, "importance_ratio:max": self._most}


def _logits(model: HostedModel, part: Sequence[CheckedDatum], *, shares: bool) -> Tensor:
    """Return the logits [M, V] of all tokens of a micro-batch, which are packed one after another. shares: data that
    begin alike have rows in common."""
    device, tree = model.device, RowTree(shares=shares)
    rows = [row for one in part for row in tree.add(one.token_ids.tolist())]
    output = model.trained_module(
        input_ids=torch.tensor([tree.token_ids], device=device),
        position_ids=torch.tensor([tree.positions], device=device),
        logits_to_keep=torch.tensor(rows, device=device), use_cache=False, **tree.packing(device),
    )  # fmt: skip
    logits: Tensor = output.logits[0]
    return logits


def _outputs(part: Sequence[CheckedDatum], logprobs: Tensor, losses: Tensor) -> list[dict[str, np.ndarray]]:
    sizes = [one.num_rows for one in part]
    both = zip(logprobs.cpu().split(sizes), losses.cpu().split(sizes), strict=True)
    return [{"logprobs": own.numpy(), "elementwise_loss": its.numpy()} for own, its in both]
