"""Endpoints of the prefix cache: pins on blocks and prefixes, eviction below a block, and a report of the tree.

/hicache/pin_blocks and /hicache/unpin_blocks have the paths and fields of the seed implementation. Hashes are signed
64-bit integers. They may be sent as text, too, and `hashes=text` returns them as text, for clients without 64-bit
integers.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse, Response
from pydantic import Field

from ....rollout.control.desk.intake import Prompt
from ....rollout.kv.cache_tree import CacheTree
from ..edge.bodies import AdminBody, Timeout, fields_of
from ..edge.errors import BadField
from .common import endpoint, json_response, run, service_of, skipped

router = APIRouter(tags=["prefix cache"])

BlockHash = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
TokenIds = list[Annotated[int, Field(ge=0, le=2**31 - 1)]]
_DEFAULT_TTL_S = 300.0


class BlocksBody(AdminBody):
    """Fields of pin_blocks and unpin_blocks."""

    block_hashes: list[BlockHash]
    owner: Annotated[str, Field(max_length=256)] | None = None
    ttl_seconds: Timeout | None = None


class PrefixBody(AdminBody):
    """Fields of pin_prefix: exactly one of token_ids and text."""

    token_ids: TokenIds | None = None
    text: str | None = None
    owner: Annotated[str, Field(max_length=256)] | None = None
    ttl_seconds: Timeout = _DEFAULT_TTL_S
    extra_key: str = ""


class EvictBody(AdminBody):
    """Fields of evict_descendants."""

    block_hash: BlockHash


class TreeBody(AdminBody):
    """Fields of cache_tree, at most one of token_ids and text among them."""

    depth: Annotated[int, Field(ge=1, le=2**31)] | None = None
    under: BlockHash | None = None
    token_ids: TokenIds | None = None
    text: str | None = None
    extra_key: str = ""
    format: str = "json"  # or "text", a tree that a person can read
    hashes: str = "number"  # or "text"


@endpoint(router, "/hicache/pin_blocks", BlocksBody)
async def pin_blocks(request: Request, body: BlocksBody) -> Response:
    """Protect cached blocks, and the blocks before them, from eviction."""
    if (skip := skipped(request, body)) is not None:
        return skip
    engine = service_of(request).engine
    report = await run(
        request,
        body,
        lambda left: engine.pin_blocks(body.block_hashes, body.owner, body.ttl_seconds, timeout_s=left),
    )
    return json_response({"pinned_count": report.num_pinned, "success": True, "report": report})


@endpoint(router, "/hicache/unpin_blocks", BlocksBody)
async def unpin_blocks(request: Request, body: BlocksBody) -> Response:
    """Remove one of the owner's pins from each block."""
    if (skip := skipped(request, body)) is not None:
        return skip
    engine = service_of(request).engine
    report = await run(request, body, lambda left: engine.unpin_blocks(body.block_hashes, body.owner, timeout_s=left))
    return json_response({"unpinned_count": report.num_unpinned, "success": True, "report": report})


@endpoint(router, "/hicache/pin_prefix", PrefixBody)
async def pin_prefix(request: Request, body: PrefixBody) -> Response:
    """Pin the cached blocks of a prompt, from its start to the first block that is not cached."""
    if (skip := skipped(request, body)) is not None:
        return skip
    engine, prompt = service_of(request).engine, _prompt(body.token_ids, body.text)
    if prompt is None:
        raise BadField("token_ids", "pass token_ids or text")
    report = await run(
        request,
        body,
        lambda left: engine.pin_prefix(prompt, body.owner, body.ttl_seconds, extra_key=body.extra_key, timeout_s=left),
    )
    return json_response({"pinned_count": report.num_pinned, "success": True, "report": report})


@endpoint(router, "/hicache/evict_descendants", EvictBody)
async def evict_descendants(request: Request, body: EvictBody) -> Response:
    """Free every cached block below a block, except blocks that a sequence holds or a pin protects."""
    if (skip := skipped(request, body)) is not None:
        return skip
    engine = service_of(request).engine
    report = await run(request, body, lambda left: engine.evict_descendants(body.block_hash, timeout_s=left))
    return json_response({"evicted_count": report.num_evicted, "success": True, "report": report})


@endpoint(router, "/hicache/cache_tree", TreeBody, methods=("GET", "POST"))
async def cache_tree(request: Request, body: TreeBody) -> Response:
    """Report the prefix cache between two steps, all of it or below a block; for a prompt, also where it diverges from
    the cache. GET takes the same fields from its query, except token_ids."""
    if request.method == "GET":
        query = {key: value for key, value in request.query_params.items() if key != "token_ids"}
        body = fields_of(TreeBody, {**body.model_dump(exclude_unset=True), **query})
    if body.format not in ("json", "text"):
        raise BadField("format", "must be json or text")
    if body.hashes not in ("number", "text"):
        raise BadField("hashes", "must be number or text")
    if (skip := skipped(request, body)) is not None:
        return skip
    engine, prompt = service_of(request).engine, _prompt(body.token_ids, body.text)
    tree = await request.app.state.reads.run(
        lambda: engine.cache_tree(
            body.depth, body.under, prompt=prompt, extra_key=body.extra_key, timeout_s=body.timeout_s
        )
    )
    if body.format == "text":
        return PlainTextResponse(tree.text() + "\n")
    return json_response(_as_text(tree) if body.hashes == "text" else tree.as_dict())


def _prompt(token_ids: list[int] | None, text: str | None) -> Prompt | None:
    if token_ids is not None and text is not None:
        raise BadField("text", "pass token_ids or text, not both")
    return token_ids if token_ids is not None else text


def _as_text(tree: CacheTree) -> dict[str, object]:
    report = tree.as_dict()
    for node in report["nodes"]:  # type: ignore[attr-defined]  # as_dict makes it a list
        node["hash"], node["parent"] = str(node["hash"]), None if node["parent"] is None else str(node["parent"])
    if (divergence := report["divergence"]) is not None:
        for key in ("hash", "nearest"):
            divergence[key] = None if divergence[key] is None else str(divergence[key])  # type: ignore[index]  # a dict
    return report
