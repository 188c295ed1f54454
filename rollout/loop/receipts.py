"""The making of receipts: one for each answer that asks for it, chained in the order of the answers."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import Any

import torch

from ..completion import Completion, FinishReason
from ..kept_kv import KeptKV
from ..receipt import GRAMMAR_SETTINGS, Guarantee, guarantee, listed, sealed, settings_json
from ..sequences.output_record import OutputRecord
from ..sequences.request import Request, fresh_ids
from .parts import Parts

logger = logging.getLogger(__name__)
_FAULTS = (ValueError, TypeError, OverflowError, OSError, ImportError)  # of values without JSON, and of unread versions


class Receipts:
    """Maker of one engine's receipts.

    Each has a number and the hash of the one before of this engine, so that the last one covers all of a batch.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts, self._metrics = parts, parts.reports.metrics
        self._engine = fresh_ids(1)[0][:16]
        self._number, self._previous = 0, ""
        self._known: tuple[object, int, Guarantee] | None = None  # numerics and threads, and what they guarantee

    def with_receipt(self, request: Request, completion: Completion) -> Completion:
        """Return the answer with its receipt, if its request or else the engine's settings ask for one.

        Where none can be made, the answer is an aborted one whose reason says why: the step's other answers go on.
        """
        asked: object = request.options.return_receipt
        if asked is None:
            asked = self._parts.config.receipts
        if asked in (False, "off") or request.params.max_new_tokens == 0:
            return completion
        started = time.thread_time()
        try:
            receipt = self._receipt(request, completion, in_full=asked != "digests")
        except _FAULTS as error:
            logger.exception("the receipt of %s cannot be made", completion.id)
            why = f"its receipt cannot be made: {type(error).__name__}: {error}"
            return replace(completion, finish_reason=FinishReason("abort", message=why, by_engine=True))
        self._number, self._previous = self._number + 1, receipt["sha256"]
        self._metrics.receipt_seconds += time.thread_time() - started
        self._metrics.num_receipts += 1
        return replace(completion, receipt=receipt)

    def _receipt(self, request: Request, completion: Completion, *, in_full: bool) -> dict[str, Any]:
        parts, params, reason = self._parts, request.params, completion.finish_reason
        assert reason is not None, "the answer has ended"
        return sealed(
            {
                "engine": self._engine,
                "number": self._number,
                "previous": self._previous,
                "id": completion.id,
                "index": completion.index,
                "seed": request.seed,
                **listed(completion.prompt_ids, completion.token_ids, completion.logprobs, in_full=in_full),
                **({} if request.images is None else {"images": request.images.digest}),
                "settings": settings_json(params),
                "finish": _finish(reason),
                "eos": sorted(parts.eos_token_ids),
                "max_model_len": parts.max_model_len,
                "spans": spans_of(request.record),
                **({"grammar": self._grammar(request)} if request.grammar is not None else {}),
                "guarantee": self._guarantee(),
            }
        )

    def _grammar(self, request: Request) -> dict[str, Any]:
        """Return what a constrained answer follows from besides its settings, and its jumps in the mode `text`."""
        assert request.grammar is not None
        settings = {name: getattr(self._parts.config, name) for name in GRAMMAR_SETTINGS}
        jumps = [[at, list(removed), list(inserted)] for at, removed, inserted in request.record.jumps]
        return {"mode": request.grammar.mode, **settings, "jumps": jumps}

    def _guarantee(self) -> Guarantee:
        numerics, num_threads = self._parts.model.numerics, torch.get_num_threads()
        known = self._known
        if known is None or known[0] is not numerics or known[1] != num_threads:  # an adapter brings other numerics
            known = self._known = (numerics, num_threads, guarantee(self._parts.model))
        return known[2]


def _finish(reason: FinishReason) -> dict[str, Any]:
    """Return the end of an output as a receipt has it: a "length" that the pool forced says so."""
    forced = {"message": reason.message} if reason.type == "length" and reason.message else {}
    return {"type": reason.type, "matched": reason.matched, **forced}


def spans_of(record: OutputRecord) -> list[dict[str, Any]]:
    """Return the runs of output tokens of one weight version and one origin of their KV, as a receipt has them.

    A digest is that which was known when the tokens were drawn, or None. A later one may be of other weights, since a
    version is the caller's label.
    """
    kept_from = dict(record.kv_starts)
    spans: list[dict[str, Any]] = []
    kept: tuple[KeptKV, ...] = ()
    starts = sorted({*kept_from, *(span.start for span in record.spans)})
    ends = [*starts[1:], len(record.logprobs)]
    for start, end in zip(starts, ends, strict=False):  # without output there are no starts
        kept = kept_from.get(start, kept)
        span = next(span for span in reversed(record.spans) if span.start <= start)
        weights = {"version": span.version, "digest": span.digest}
        runs = [{"version": run.version, "digest": run.digest, "end": run.end} for run in kept]
        if spans and (spans[-1]["version"], spans[-1]["digest"], spans[-1]["kept_kv"]) == (*weights.values(), runs):
            spans[-1]["end"] = end
        else:
            spans.append({**weights, "start": start, "end": end, "kept_kv": runs})
    return spans
