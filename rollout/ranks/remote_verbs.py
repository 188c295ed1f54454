"""Run a verb on one rank; encode and decode the question and its answer."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..errors import RankFailure
from .mesh import Mesh

logger = logging.getLogger(__name__)

VERB_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class RankResult:
    """The answer of one rank to a verb."""

    rank: int  # of the world
    pp_rank: int
    tp_rank: int
    success: bool
    message: str
    data: Any = None  # JSON
    error: str | None = None  # the exception's class, if it failed

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def run_verb(
    handlers: Mapping[str, Callable[..., Any]], verb: str, arguments: Mapping[str, Any], mesh: Mesh
) -> RankResult:
    """Run `handlers[verb](**arguments)` on this rank. An error becomes its result, as does an answer that is not JSON;
    RankFailure is raised."""
    place = (mesh.rank, mesh.pp_rank, mesh.tp_rank)
    handler = handlers.get(verb)
    if handler is None:
        data = {"skipped": True, "unsupported": True}
        return RankResult(*place, True, f"rank {mesh.rank} does not support {verb!r}", data)
    try:
        result = RankResult(*place, True, "", handler(**arguments))
        result_bytes(result)  # here, where the handler can still be blamed: sending it would end the follower
        return result
    except RankFailure:
        raise
    except Exception as error:  # a boundary between processes: the error is the result
        logger.exception("%s failed on rank %d", verb, mesh.rank)
        return RankResult(*place, False, str(error), None, type(error).__name__)


def question_bytes(verb: str, arguments: Mapping[str, Any]) -> bytes:
    """Encode the controller's question to a follower."""
    return json.dumps({"verb": verb, "arguments": dict(arguments)}).encode()


def question_from(data: bytes) -> tuple[str, dict[str, Any]]:
    """Decode a question: the verb and its arguments."""
    asked = json.loads(data)
    return asked["verb"], asked["arguments"]


def result_bytes(result: RankResult) -> bytes:
    """Encode a follower's answer."""
    return json.dumps(result.as_dict()).encode()


def result_from(data: bytes) -> RankResult:
    """Decode a follower's answer."""
    return RankResult(**json.loads(data))
