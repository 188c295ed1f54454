"""Endpoints of the service's own verbs by name, for `HttpTarget` and for arguments that SGLang's endpoints do not have.

POST /lockstep/VERB takes a JSON object of the verb's arguments, `timeout_s` and `op_id`, and answers with the verb's
report. `local_target.VERBS` lists the verbs; their signatures name the arguments.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Annotated, Any, get_type_hints

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from starlette.applications import Starlette
from starlette.datastructures import State

from ....rollout.completion import FinishReason
from ....rollout.engine import Engine
from ....weight_sync.deadline import Deadline
from ...plain_values import plain
from ...push.local_target import VERBS, run_verb
from ...service import RolloutService
from ...weights.sources import OWN_FORMATS
from ...weights.verbs import GROUP_NAME
from ..edge.bodies import AdminBody, Timeout, fields_of, read_object
from ..edge.early_aborts import note_abort
from ..edge.errors import BadField, HttpError
from .broadcasts import ForeignUpdate

# Verbs that write weights: one of them at a time, and a second is refused at once.
_UPDATES = frozenset(
    {
        "update_weights_from_distributed", "update_weights_from_tensor", "update_weights_from_disk",
        "load_lora_adapter", "unload_lora_adapter",
    }
)  # fmt: skip
# Verbs of sessions, which need the module, too.
_SESSIONS = frozenset(
    {"begin_weight_update", "verify_weight_update", "end_weight_update", "abort_weight_update", "revert_weight_update"}
)
_NEWEST_SHOWN = 24  # tokens of each sequence
_SEQUENCES_SHOWN = 64  # running ones, and as many waiting ones
_Whole = Annotated[int, Field(ge=-(2**63), lt=2**63)]
# Types of a signature, as JSON can express them and within the range of machine integers.
_AS_JSON = {
    int: _Whole,
    int | None: _Whole | None,
    float | None: Timeout | None,
    Iterable[str] | None: list[str] | None,
}

router = APIRouter(tags=["verbs"])


@router.post("/lockstep/{verb}")
async def call_verb(verb: str, request: Request) -> JSONResponse:
    """Run a verb of the service. Answers 404 for an unknown verb, 400 naming an argument that it does not take."""
    if verb not in VERBS:
        raise HttpError(404, f"unknown verb {verb!r}; known: {', '.join(VERBS)}", code="unknown_verb")
    values = await read_object(request)
    common = fields_of(AdminBody, {key: values.pop(key, None) for key in ("op_id", "timeout_s")})
    arguments = _checked(verb, values)
    state = request.app.state
    service: RolloutService = state.service

    is_foreign = verb == "update_weights_from_distributed" and arguments.get("load_format") not in OWN_FORMATS
    foreign = ForeignUpdate(request, str(arguments.get("group_name", GROUP_NAME)), is_foreign=is_foreign)
    _note_abort(request.app, verb, arguments)

    def run(seconds_left: float | None) -> dict[str, object]:
        with _in_turn(state, verb, arguments, seconds_left or service.config.weight_timeout_s) as still_left:
            foreign.begins()
            return run_verb(service, verb, still_left, arguments)

    async with foreign:
        report = await state.operations.run(
            f"/lockstep/{verb}", run, op_id=common.op_id, timeout_s=common.timeout_s, arguments=values
        )
    return JSONResponse(report)


def _note_abort(app: Starlette, verb: str, arguments: Mapping[str, Any]) -> None:
    """Note what a verb aborts, for the requests that the engine has not got yet."""
    if verb == "pause_generation" and arguments.get("mode") == "abort":
        note_abort(app, None)
    elif verb == "abort_request" and (arguments.get("abort_all") or arguments.get("rid") is not None):
        message = arguments.get("message")
        reason = arguments.get("finished_reason") or (FinishReason("abort", message=message) if message else None)
        note_abort(app, None if arguments.get("abort_all") else arguments["rid"], reason)


@contextmanager
def _in_turn(state: State, verb: str, arguments: Mapping[str, object], timeout_s: float) -> Iterator[float]:
    """Hold the server's own state for a verb: the gate of updates, or a trainer's rollout phase. Yields the seconds
    left."""
    service: RolloutService = state.service
    deadline = Deadline.within(timeout_s)
    if verb in _UPDATES or (verb == "weights_checker" and arguments.get("action") == "reset_tensors"):
        with state.updates.enter(verb), service.weights_turn(verb, timeout_s) as seconds_left:
            yield seconds_left
    elif verb in _SESSIONS:
        with service.weights_turn(verb, timeout_s) as seconds_left:
            yield seconds_left
    elif verb == "continue_generation":
        with service.turn_to_commit(verb, timeout_s):
            yield deadline.left_s
    elif verb == "resume_memory_occupation":
        with service.turn_to_commit(verb, timeout_s):
            yield timeout_s
    else:
        yield timeout_s


@router.get("/lockstep/sequences")
async def sequences(request: Request) -> JSONResponse:
    """List the first running and waiting sequences, with the newest tokens and the weight versions of each."""
    state = request.app.state
    return JSONResponse(await state.reads.run(lambda: {"sequences": _sequences(state.service.engine)}))


def _sequences(engine: Engine) -> list[dict[str, object]]:
    shown = []
    for view in engine.live_sequences(_NEWEST_SHOWN, _SEQUENCES_SHOWN):
        entry = plain(view)
        assert isinstance(entry, dict)
        # Tokens from the middle of a text: a partial character at the beginning or the end shows as U+FFFD.
        text = None if engine.tokenizer is None else engine.tokenizer.decode(list(view.newest_ids))
        shown.append(entry | {"newest_text": text})
    return shown


def _checked(verb: str, values: dict[str, object]) -> dict[str, object]:
    """Convert the given arguments to the types in the verb's signature. Raises BadField for the first argument that is
    wrong, missing or unknown."""
    model = arguments_of(verb)
    if unknown := sorted(values.keys() - model.model_fields.keys()):
        raise BadField(unknown[0], f"{verb} does not take it; it takes {', '.join(model.model_fields) or 'nothing'}")
    try:
        checked = model.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        raise BadField(".".join(map(str, first["loc"])), first["msg"]) from None
    return {name: getattr(checked, name) for name in checked.model_fields_set}


@cache
def arguments_of(verb: str) -> type[BaseModel]:
    """Make a pydantic model of a verb's arguments, without the fields of every call."""
    function = getattr(RolloutService, verb, None) or getattr(Engine, verb)
    hints = get_type_hints(function)
    fields = {
        name: (
            _AS_JSON.get(hints[name], hints[name]),
            ... if parameter.default is inspect.Parameter.empty else parameter.default,
        )
        for name, parameter in inspect.signature(function).parameters.items()
        if name not in ("self", "timeout_s", "op_id")
    }
    config = ConfigDict(allow_inf_nan=False, protected_namespaces=())
    return create_model(verb, __config__=config, **fields)  # type: ignore[call-overload]  # its names are not literals
