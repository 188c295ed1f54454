"""vLLM's weight checker, onto the engine's own: SHA-256 of every tensor, a comparison with them, random weights."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter, Request
from fastapi.responses import Response

from ..admin.common import json_response, run, run_update, service_of
from ..edge.bodies import AdminBody, body_of, describe
from ..edge.errors import BadField, HttpError

router = APIRouter(tags=["weights"])


class CheckerBody(AdminBody):
    """Fields of POST /weight_checker."""

    action: Literal["checksum", "reset", "compare"]
    baseline: dict[str, str] | None = None  # of compare: the checksums that an earlier call returned


@router.post("/weight_checker", openapi_extra=describe(CheckerBody), response_class=Response)
async def weight_checker(request: Request) -> Response:
    """Compute checksums, compare with a baseline, or overwrite the weights with random values: then nothing is sampled
    before a full update. Works while the engine is paused too, and during an update on what has arrived."""
    body = await body_of(CheckerBody)(request)
    if body.action == "compare" and body.baseline is None:
        raise BadField("baseline", "is needed to compare: an object of checksums by name")
    service = service_of(request)
    if body.action == "reset":
        await run_update(request, body, lambda _: service.weights_checker("reset_tensors"))
        return json_response({"status": "reset"})
    report = await run(request, body, lambda _: service.weights_checker("checksum"))
    if not report["success"]:
        raise HttpError(500, str(report["message"]), code="checksum_failed")
    sums = _checksums(report)
    if body.baseline is None or body.action == "checksum":
        return json_response({"checksums": sums})
    baseline = body.baseline
    mismatches = sorted(name for name in baseline.keys() | sums.keys() if baseline.get(name) != sums.get(name))
    return json_response({"match": not mismatches, "mismatches": mismatches})


def _checksums(report: dict[str, object]) -> dict[str, str]:
    """Return the checksums by name; where several ranks hold the model, by rank and name."""
    ranks = report.get("rank_results")
    if not isinstance(ranks, list):
        tensors = report["tensors"]
        assert isinstance(tensors, dict)
        return tensors
    return {
        f"pp={rank['pp_rank']}/tp={rank['tp_rank']}:{name}": value
        for rank in ranks
        for name, value in rank["tensors"].items()
    }
