"""Broadcasts over a group that another framework's trainer starts beside the call of an update.

Where the call is refused before the weight verb runs (wrong fields, another update, its deadline) the engine joins none
of them, and the next update over the group would take them for its own. Therefore the group is broken: broadcasts that
are under way fail, and the trainer joins a new one. The verb itself does the same where it fails.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import TypeVar

from fastapi import Request

from ....weight_sync.group.registry import NOT_RECEIVED
from ....weight_sync.group.weight_group import JOIN_ANEW
from ...weights.sources import OWN_FORMATS
from ..edge.bodies import AdminBody, fields_of, read_as
from ..edge.errors import HttpError, as_http_error

B = TypeVar("B", bound=AdminBody)


def reader_of(model: type[B]) -> Callable[[Request], Awaitable[B]]:
    """Return a function that reads the body of an update over a group. Where the body is refused it breaks the group
    that it names, and where it could not be read so far, every group of other frameworks."""

    async def read(request: Request) -> B:
        update = ForeignUpdate(request, None)

        def fields(values: dict[str, object]) -> B:
            given, field = values.get("group_name"), model.model_fields["group_name"]
            if given is not None or not field.is_required():
                update.group_name = str(field.default if given is None else given)
            update.is_foreign = values.get("load_format") not in OWN_FORMATS
            return fields_of(model, values)

        async with update:
            return await read_as(request, fields)

    return read


class ForeignUpdate:
    """A block in which an update over a group is asked for. A context manager: where the block fails before `begins`
    was called, it breaks the group. Errors of an update whose group is broken say what the trainer has to do."""

    def __init__(self, request: Request, group_name: str | None, *, is_foreign: bool = True) -> None:
        """Note what is asked for. group_name: None stands for every group of other frameworks, where it is not known
        which one is meant. is_foreign: whether the update is in the format of another framework; else the block has no
        effect."""
        self.group_name, self.is_foreign = group_name, is_foreign
        self._request, self._has_begun = request, False

    def begins(self) -> None:
        """Note that the weight verb begins, which breaks the group itself where it fails."""
        self._has_begun = True

    async def __aenter__(self) -> ForeignUpdate:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        if not (self.is_foreign and isinstance(error, Exception)):
            return
        groups, state = self._request.app.state.service.groups, self._request.app.state
        if not self._has_begun:
            path = self._request.scope["path"]
            await state.operations.run(path, lambda _: groups.break_off(self.group_name, NOT_RECEIVED))
        states = groups.state()
        wanted = states if self.group_name is None else {self.group_name} & set(states)
        broken = [name for name in wanted if states[name] not in ("ready", "joining")]
        if broken and JOIN_ANEW not in str(error):
            raise _with_remedy(as_http_error(error), broken) from error


def _with_remedy(error: HttpError, broken: Sequence[str]) -> HttpError:
    message = f"{error.message}; group {', '.join(broken)} is broken: {JOIN_ANEW}"
    return HttpError(
        error.status, message, param=error.param, code=error.code, headers=error.headers, extra=error.extra,
        kind=error.kind,
    )  # fmt: skip
