"""Profiles of the engine's steps."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse, Response
from pydantic import Field

from .admin import endpoint, run, skipped
from .bodies import AdminBody
from .errors import BadField

router = APIRouter(tags=["profiling"])

Name = Annotated[str, Field(max_length=128, pattern=r"^[A-Za-z0-9._-]*$")]


class ProfileBody(AdminBody):
    output_dir: str | None = None
    activities: list[str] = Field(default_factory=lambda: ["CPU", "GPU"])
    with_stack: bool = False
    record_shapes: bool = False
    profile_id: Name | None = None
    profile_prefix: Name | None = None
    start_step: int | None = None
    num_steps: int | None = None
    profile_by_stage: bool = False
    merge_profiles: bool = False


class StopBody(AdminBody):
    pass


@endpoint(router, "/start_profile", ProfileBody)
async def start_profile(request: Request, body: ProfileBody) -> Response:
    """Take a torch profile of everything from here to stop_profile."""
    for name in ("start_step", "num_steps", "profile_by_stage", "merge_profiles"):
        if getattr(body, name):
            raise BadField(name, "is not supported: a profile goes from start_profile to stop_profile")
    if skipped(request, body) is not None:
        return PlainTextResponse("skipped: this stage was not selected\n")
    profiler = request.app.state.profiler
    path = await run(
        request,
        body,
        lambda _: profiler.start(
            body.output_dir, body.activities, prefix=body.profile_prefix or "", profile_id=body.profile_id,
            with_stack=body.with_stack, record_shapes=body.record_shapes,
        ),
    )  # fmt: skip
    return PlainTextResponse("Start profiling.\n", headers={"X-Profile-Path": _header(path)})


@endpoint(router, "/stop_profile", StopBody)
async def stop_profile(request: Request, body: StopBody) -> Response:
    """End the profile; the file is written when this answers."""
    if skipped(request, body) is not None:
        return PlainTextResponse("skipped: this stage was not selected\n")
    profiler = request.app.state.profiler
    path = await run(request, body, lambda _: profiler.stop())
    return PlainTextResponse("Stop profiling. This will take some time.\n", headers={"X-Profile-Path": _header(path)})


def _header(path: object) -> str:
    return str(path).encode("ascii", "backslashreplace").decode()
