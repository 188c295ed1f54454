"""The `session_params` of a request: SGLang's fields, and those of a chat over a session."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StrictInt

from ..edge.bodies import Body, fields_of
from ..edge.errors import BadField
from ..edge.session_paths import FIELD, MAX_ID

MAX_NAME = MAX_ID  # characters of a session's id

Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
History = Literal["sampled", "template"]


class SessionParams(Body):
    """Fields of `session_params`."""

    id: Name
    rid: str | None = Field(None, max_length=1024, description="the turn to go on from; default: the last that ended")
    offset: Annotated[StrictInt, Field(ge=-(2**31), lt=2**31)] = Field(
        0, description="keep so many tokens of the history, or leave out so many at its end; 0: keep all"
    )
    replace: bool = Field(False, description="forget the turns after `rid`; without `rid`: all turns")
    drop_previous_output: bool = Field(False, description="go on from the prompt of `rid`, without its answer")
    open: bool = Field(False, description="open the session where none has had this id")
    messages: Literal["new", "all"] | None = Field(
        None,
        description="whether a chat's messages are new ones or the whole conversation; default: the whole where they "
        "have a system's, a developer's or an assistant's message, or no turn has ended",
    )
    branch: bool | None = Field(
        None,
        description="where earlier messages differ, go on from the last turn that has them; default: where the path "
        "names the session, unless it is a streaming one",
    )


def read_session_params(given: object) -> SessionParams | None:
    """Return the fields, or None where there are none. Raises BadField."""
    if given in (None, {}, False, "", []):
        return None
    if isinstance(given, list):
        raise BadField(FIELD, "must be one object: a session takes one prompt at a time")
    if not isinstance(given, dict):
        raise BadField(FIELD, f"must be an object, not {type(given).__name__}")
    if unknown := sorted(set(given) - set(SessionParams.model_fields)):
        raise BadField(FIELD, f"has unknown fields: {', '.join(unknown)[:200]}")
    try:
        return fields_of(SessionParams, given)
    except BadField as error:
        raise BadField(f"{FIELD}.{error.param}", error.message.partition(": ")[2]) from None


def refuse_samples(num_prompts: int, num_samples: int) -> None:
    """Refuse a request that has several answers: a turn has one. Raises BadField."""
    if num_prompts != 1:
        raise BadField(FIELD, f"a session takes one prompt at a time, not {num_prompts}")
    if num_samples != 1:
        raise BadField(FIELD, f"a turn has one answer, and n is {num_samples}: send a request for each")
