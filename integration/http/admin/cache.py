"""The prefix cache from outside: pins on blocks and prefixes, eviction below a block, and the tree as it is.

/hicache/pin_blocks and /hicache/unpin_blocks are the seed's paths and fields. Hashes are signed 64-bit integers; as
text they are taken, too, and `hashes=text` gives them so, for readers that know no 64-bit integers.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse, Response
from pydantic import Field

from ....rollout.control.intake import Prompt
from ....rollout.kv.cache_tree import CacheTree
from ..edge.bodies import AdminBody, Timeout, fields_of
from ..edge.errors import BadField
from .common import endpoint, json_response, run, service_of, skipped

router = APIRouter(tags=["prefix cache"])

BlockHash = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
TokenIds = list[Annotated[int, Field(ge=0, le=2**31 - 1)]]
_DEFAULT_TTL_S = 300.0


class BlocksBody(AdminBody):
    block_hashes: list[BlockHash]
    owner: Annotated[str, Field(max_length=256)] | None = None
    ttl_seconds: Timeout | None = None


class PrefixBody(AdminBody):
    token_ids: TokenIds | None = None
    text: str | None = None
    owner: Annotated[str, Field(max_length=256)] | None = None
    ttl_seconds: Timeout = _DEFAULT_TTL_S
    extra_key: str = ""


class EvictBody(AdminBody):
    block_hash: BlockHash


class TreeBody(AdminBody):
    depth: Annotated[int, Field(ge=1, le=2**31)] | None = None
    under: BlockHash | None = None
    token_ids: TokenIds | None = None
    text: str | None = None
    extra_key: str = ""
    format: str = "json"  # or "text", a tree for people
    hashes: str = "number"  # or "text"


@endpoint(router, "/hicache/pin_blocks", BlocksBody)
async def pin_blocks(request: Request, body: BlocksBody) -> Response:
    """Keep cached blocks, and those before them, from eviction."""
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
    """Lift one of the owner's pins on each block."""
    if (skip := skipped(request, body)) is not None:
        return skip
    engine = service_of(request).engine
    report = await run(request, body, lambda left: engine.unpin_blocks(body.block_hashes, body.owner, timeout_s=left))
    return json_response({"unpinned_count": report.num_unpinned, "success": True, "report": report})


@endpoint(router, "/hicache/pin_prefix", PrefixBody)
async def pin_prefix(request: Request, body: PrefixBody) -> Response:
    """Pin the cached blocks of a prompt, from its start as far as they are there."""
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
    """Free every cached block below this one that no sequence holds and no pin protects."""
    if (skip := skipped(request, body)) is not None:
        return skip
    engine = service_of(request).engine
    report = await run(request, body, lambda left: engine.evict_descendants(body.block_hash, timeout_s=left))
    return json_response({"evicted_count": report.num_evicted, "success": True, "report": report})


@endpoint(router, "/hicache/cache_tree", TreeBody, methods=("GET", "POST"))
async def cache_tree(request: Request, body: TreeBody) -> Response:
    """The prefix cache between two steps, or what is below a block; with a prompt, where it leaves the cache. GET
    takes the same fields from its query, but for token_ids."""
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
    for node in report["nodes"]:  # type: ignore[attr-defined]
        node["hash"], node["parent"] = str(node["hash"]), None if node["parent"] is None else str(node["parent"])
    if (divergence := report["divergence"]) is not None:
        for key in ("hash", "nearest"):
            divergence[key] = None if divergence[key] is None else str(divergence[key])  # type: ignore[index]
    return report
