"""The check of a hosted module when an engine is made. Two things are measured on random tokens:

- its bits: over a whole sequence as in the trainer's forward, and in pieces through the paged KV, beside a neighbour;
- its numbers: with the engine's operations, and with its own operations and its own plain attention.

A family whose code does something that the engine does not see differs in one of them, and is refused by name.
"""

from __future__ import annotations

import logging
import time
from dataclasses import asdict, dataclass, fields
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ...kernels.machine import kept_checks
from ..model.hosted_model import HostedModel
from ..model.operations.fused_layers import has_hooks
from ..model.supported import refused_if_it_fails
from . import forwards
from .checked_code import describe_module
from .forwards import BESIDE, NUM_TOKENS, PIECES, Choices

logger = logging.getLogger(__name__)

# Largest root mean square of a row's difference, by the row's spread. Rounding gives about 1e-6 and 2e-2.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25}
ATTENTION_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}  # the same for one attention of the first layers
LONGEST_WINDOW = 512  # of more tokens the first layer alone is run, and the start-up probe tries the mask
_MORE_ROUNDING = 1.5  # of a module's own
_OTHER_POSITIONS = "without position_ids, as a trainer calls it, it counts other positions than from 0"
PAST_WINDOW = 20  # tokens more than a window has
_known: dict[tuple[Any, ...], Verdict] = {}
_KIND = "module"  # of kept checks


@dataclass(frozen=True)
class Verdict:
    """The result of a check that a module passed."""

    num_tokens: int
    bits_gap: float  # largest difference between log-probabilities, whole and in pieces; 0.0: equal bits
    difference: float | None  # from the own operations and attention, see TOLERANCE; None: not measured
    seconds: float
    is_finite: bool = True  # whether the logits are numbers; else nothing was measured

    def describe(self) -> str:
        """Return one line for people."""
        if not self.is_finite:
            return "not checked: its logits are NaN or infinite, as with damaged weights"
        bits = "equal bits whole and in pieces" if not self.bits_gap else f"gap {self.bits_gap:.2g} in pieces"
        own = "" if self.difference is None else f", {self.difference:.1e} from its own attention and operations"
        return f"{bits}{own} ({self.num_tokens} tokens, {self.seconds:.2f} s)"


_FIELDS = [one.name for one in fields(Verdict)]


def check_hosted(hosted: HostedModel, *, anew: bool = False) -> Verdict | None:
    """Check a module before its engine generates; returns None where there is nothing to compare.

    A part of a model is checked as the whole module that it was copied from, or else for its bits alone, together with
    the other ranks of its stage. A verdict is remembered for modules of equal configuration and classes, and that of a
    module that passed on a CPU is kept on disk for other processes (`kept_checks`). Raises ValueError with the size of
    the difference and, where that can be told, the part of the module that differs. In an engine that is not invariant,
    bits may differ. anew: read no kept verdict.
    """
    trained = hosted.trained_module
    if hosted.mesh.num_ranks > 1 and trained is not hosted.module:
        if any(isinstance(parameter, DTensor) for parameter in trained.parameters()):
            return None
        invariant = hosted.numerics.guarantee is not None
        hosted = HostedModel.adopt(trained, dtype=None, device=None, invariant=invariant, k_blocks=hosted.k_blocks)
    if hosted.mesh.num_ranks > 1:
        return _check_part(hosted)
    if has_hooks(hosted.module.modules()):  # which compute what no key names
        return _kept_or_checked(hosted, anew)
    key = _key(hosted)
    if not anew and (known := _known.get(key)) is not None:
        return known
    verdict = _kept_or_checked(hosted, anew)
    if verdict.is_finite:  # else nothing was measured, and other weights of this module are checked
        _known[key] = verdict
    return verdict


def _kept_or_checked(hosted: HostedModel, anew: bool) -> Verdict:
    name = type(hosted.module).__name__
    subject = describe_module(hosted) if hosted.device.type == "cpu" else None  # a GPU's driver has no name here
    if subject is not None and not anew and (found := kept_checks.kept(_KIND, subject, _FIELDS)) is not None:
        verdict = Verdict(**found)
        logger.info("check of %s, kept from an earlier process: %s", name, verdict.describe())
        return verdict
    with refused_if_it_fails(hosted.module):
        verdict = _check_whole(hosted)
    logger.info("check of %s: %s", name, verdict.describe())
    if subject is not None and verdict.bits_gap == 0.0 and verdict.difference is not None:
        kept_checks.keep(_KIND, subject, asdict(verdict))
    return verdict


def _key(hosted: HostedModel) -> tuple[Any, ...]:
    module, guarantee = hosted.module, hosted.numerics.guarantee
    parts = [
        (type(part), type(part).forward, part.training, id(vars(part).get("forward"))) for part in module.modules()
    ]
    kind = (hosted.dtype, str(hosted.device), torch.get_num_threads(), hosted.k_blocks, guarantee and guarantee.choices)
    return repr(module.config.to_dict()), tuple(parts), *kind


def _check_whole(hosted: HostedModel) -> Verdict:
    started = time.perf_counter()
    module, name = hosted.module, type(hosted.module).__name__
    longest = max([w + PAST_WINDOW for w in hosted.windows if w <= LONGEST_WINDOW], default=0)
    num_tokens = min(max(longest, NUM_TOKENS), hosted.max_model_len)
    first = min(num_tokens, NUM_TOKENS)  # as many go through the paged KV
    ids, other = (forwards.random_tokens(module.config, num_tokens, seed).to(hosted.device) for seed in (1, 2))
    rows = torch.tensor(sorted({*range(first), *range(num_tokens - PAST_WINDOW, num_tokens)}), device=hosted.device)
    rows = rows[rows >= 0]
    with Choices() as choices:
        whole = forwards.whole(hosted, ids, rows)
    if not bool(whole.isfinite().all()):
        logger.warning("%s is not checked: its logits are not finite", name)
        return Verdict(num_tokens, 0.0, None, time.perf_counter() - started, is_finite=False)
    pieces = forwards.in_pieces(hosted, ids, None, other, first)
    tolerance = TOLERANCE[hosted.dtype]
    bits_gap = 0.0
    if not torch.equal(whole[:first], pieces):
        bits_gap = _gap(whole[:first], pieces)
        difference = _difference(pieces, whole[:first])
        counts_otherwise = (
            4 * _difference(pieces, forwards.whole(hosted, ids, rows[:first], positions=True)) < difference
        )
        is_near = difference <= tolerance and not counts_otherwise
        reason = (
            "whole, as in the trainer, it gives other log-probabilities than in pieces beside another sequence, by up "
            f"to {bits_gap:.2g}"
        )
        if hosted.numerics.guarantee is not None or not is_near:
            remedy = "; an engine with invariant=False goes on with a warning" if is_near else ""
            cause = _OTHER_POSITIONS if counts_otherwise else _cause(hosted, ids, other, first)
            raise ValueError(f"{name} cannot be hosted: {reason}: {cause}{remedy}")
        logger.warning("%s: %s", name, reason)
    with choices.repeat():
        own = forwards.own(module, ids, rows)
    difference = _difference(whole, own)
    if not difference <= tolerance:
        with choices.repeat():
            exact = None if _wrapper(module) else forwards.widened(module, ids, rows)
        if exact is None or not _rounds_alike(module, whole, own, exact):
            raise ValueError(
                f"{name} cannot be hosted: with the engine's attention and operations its log-probabilities differ by "
                f"up to {_gap(whole, own):.2g} from its own ({num_tokens} tokens; a relative difference of "
                f"{difference:.2g}, of which rounding explains {tolerance:g}){_wrapper(module)}"
            )
    return Verdict(num_tokens, bits_gap, max(difference, _check_long_windows(hosted)), time.perf_counter() - started)


def _rounds_alike(module: PreTrainedModel, whole: Tensor, own: Tensor, exact: Tensor) -> bool:
    """Return whether logits of the engine's operations are about as far as the module's own from those of numbers of
    twice the width: then its weights make more of rounding than others do."""
    ours, its = _difference(whole, exact), _difference(own, exact)
    logger.info("%s rounds by %.2g, and in the engine by %.2g", type(module).__name__, its, ours)
    return ours <= _MORE_ROUNDING * its


def _check_long_windows(hosted: HostedModel) -> float:
    """Compare the first attention with each window of more than LONGEST_WINDOW tokens with its own; returns the largest
    difference."""
    module, worst = hosted.module, 0.0
    for window, attention in hosted.windows.items():
        num_tokens = min(window + PAST_WINDOW, hosted.max_model_len)
        if not LONGEST_WINDOW < window < num_tokens:
            continue
        ids = forwards.random_tokens(module.config, num_tokens, 1).to(hosted.device)
        ours, own = forwards.attention_results(hosted, attention, ids)
        difference = _difference(ours[window:], own[window:])
        worst = max(worst, difference)
        if not difference <= ATTENTION_TOLERANCE[hosted.dtype]:
            raise ValueError(
                f"{type(module).__name__} cannot be hosted: behind its window of {window} tokens, layer "
                f"{attention.layer_idx}'s {type(attention).__name__} differs from its own attention (a relative "
                f"difference of {difference:.2g}, of which rounding explains {ATTENTION_TOLERANCE[hosted.dtype]:g})"
            )
    return worst


def _check_part(hosted: HostedModel) -> Verdict:
    """Compare the bits of a rank's part of a loaded model. A collective of its stage's ranks: nothing is remembered."""
    started = time.perf_counter()
    num_tokens = min(NUM_TOKENS, hosted.max_model_len)
    positions = torch.arange(num_tokens, device=hosted.device)
    ids = hidden = None
    other = forwards.random_tokens(hosted.module.config, num_tokens, 2).to(hosted.device)
    if hosted.mesh.is_first_stage:
        ids = forwards.random_tokens(hosted.module.config, num_tokens, 1).to(hosted.device)
    else:
        generator = torch.Generator().manual_seed(1)
        states = torch.randn(num_tokens, hosted.hidden_size, generator=generator, dtype=torch.float32)
        hidden = states.to(hosted.device, hosted.dtype)
    whole = forwards.whole_part(hosted, ids, hidden, positions)
    pieces = forwards.in_pieces(hosted, ids, hidden, other, num_tokens)
    gap = 0.0 if torch.equal(whole, pieces) else float((whole - pieces).abs().max())
    if gap and hosted.numerics.guarantee is not None:
        raise ValueError(
            f"{type(hosted.module).__name__} cannot be hosted: a rank's part of it gives other results whole than in "
            f"pieces beside another sequence, by up to {gap:.2g}"
        )
    return Verdict(num_tokens, gap, None, time.perf_counter() - started)


def _cause(hosted: HostedModel, ids: Tensor, other: Tensor, num_tokens: int) -> str:
    """Say which part of the module makes the difference between the forwards of the first tokens."""
    rows = torch.arange(num_tokens, device=ids.device)
    with forwards.watched(hosted.module) as whole:
        forwards.whole(hosted, ids[:num_tokens], rows, positions=True)
    with forwards.watched(hosted.module) as steps:
        forwards.in_pieces(hosted, ids, None, other, num_tokens)
    is_invariant = hosted.numerics.guarantee is not None
    if len(steps) == len(whole) * len(PIECES):
        for index, expected in enumerate(whole):
            ends = zip(accumulate(PIECES), PIECES, BESIDE, steps[index :: len(whole)], strict=True)
            for end, size, beside, found in ends:
                mine, its = expected.rows(end - size, size, num_tokens), found.rows(0, size, size + beside)
                if mine is None or its is None or torch.equal(mine, its):
                    continue
                if is_invariant or _difference(its, mine) > TOLERANCE[hosted.dtype]:
                    return f"the code of {found.owner} computes other numbers at the {found.place}"
    return "its forward depends on the tokens of one call, not on their positions alone"


def _wrapper(module: nn.Module) -> str:
    """Say which function was put around the module's forward, as a possible cause; nothing where there is none."""
    forward = vars(module).get("forward")
    forward = getattr(forward, "__func__", forward)
    if forward is None or forward is type(module).forward:
        return ""
    return (
        f". Its forward was replaced by {getattr(forward, '__qualname__', repr(forward))} of "
        f"{getattr(forward, '__module__', None)}, which may compute otherwise: accelerate's prepare wraps it in "
        "autocast where mixed_precision is set. Give the engine the module with its own forward "
        "(accelerator.unwrap_model(model, keep_fp32_wrapper=False))"
    )


def _gap(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference between the log-probabilities of each row's likeliest token, or between the logits
    where those are equal: 0.0 means equal logits."""
    ours, own = (torch.log_softmax(logits.float(), -1) for logits in (found, expected))
    token = own.argmax(-1, keepdim=True)
    gap = float((ours.gather(-1, token) - own.gather(-1, token)).abs().max())
    return gap or float((found.float() - expected.float()).abs().max())


def _difference(found: Tensor, expected: Tensor) -> float:
    """Return the largest root mean square of a row's difference, by the spread of the row's logits."""
    found, expected = found.float(), expected.float()
    spread = expected.std(-1).clamp(min=1e-6)
    return float(((found - expected).square().mean(-1).sqrt() / spread).max())
