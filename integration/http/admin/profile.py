"""Endpoints that take profiles of the engine's steps."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse, Response
from pydantic import Field

from ..edge.bodies import AdminBody
from ..edge.errors import BadField
from .common import endpoint, run, skipped

router = APIRouter(tags=["profiling"])

Name = Annotated[str, Field(max_length=128, pattern=r"^[A-Za-z0-9._-]*$")]


class ProfileBody(AdminBody):
    """Fields of start_profile."""

    output_dir: str | None = None
    activities: list[str] = Field(default_factory=lambda: ["CPU", "GPU"])
    with_stack: bool = False
    record_shapes: bool = False
    profile_id: Name | None = None
    profile_prefix: Name | None = None
    start_step: Annotated[int, Field(ge=0, lt=2**63)] | None = Field(
        None, description="begin when this many steps have run since the engine was made (lockstep:steps_total)"
    )
    num_steps: Annotated[int, Field(ge=1, lt=2**63)] | None = Field(
        None, description="end by itself after this many steps; stop_profile then answers with the file"
    )
    profile_by_stage: bool = False
    profile_stages: list[str] | None = None
    merge_profiles: bool = False
    detailed_annotations: bool = False


_UNSUPPORTED = {
    "profile_by_stage": "a step may run prefill and decode rows together",
    "profile_stages": "a step may run prefill and decode rows together",
    "merge_profiles": "each process writes its own",
    "detailed_annotations": "the engine's own trace tells the steps apart",
}


class StopBody(AdminBody):
    """Fields of stop_profile."""


@endpoint(router, "/start_profile", ProfileBody, carries_data=False)
async def start_profile(request: Request, body: ProfileBody) -> Response:
    """Take a torch profile and a trace of the engine's steps, from now or `start_step` to stop_profile or for
    `num_steps`."""
    for name, why in _UNSUPPORTED.items():
        if getattr(body, name):
            raise BadField(name, f"is not supported: {why}")
    if body.output_dir is not None and not body.output_dir.isprintable():
        raise BadField("output_dir", "must be printable: the answer names it in a header")
    if skipped(request, body) is not None:
        return PlainTextResponse("skipped: this stage was not selected\n")
    profiler = request.app.state.profiler
    path = await run(
        request,
        body,
        lambda _: profiler.start(
            body.output_dir, body.activities, prefix=body.profile_prefix or "", profile_id=body.profile_id,
            with_stack=body.with_stack, record_shapes=body.record_shapes, start_step=body.start_step,
            num_steps=body.num_steps,
        ),
    )  # fmt: skip
    return PlainTextResponse("Start profiling.\n", headers={"X-Profile-Path": _header(path)})


@endpoint(router, "/stop_profile", StopBody, carries_data=False)
async def stop_profile(request: Request, body: StopBody) -> Response:
    """End the profile if it has not ended by itself; the file is complete when this answers."""
    if skipped(request, body) is not None:
        return PlainTextResponse("skipped: this stage was not selected\n")
    profiler = request.app.state.profiler
    path = await run(request, body, lambda _: profiler.stop())
    return PlainTextResponse("Stop profiling. This will take some time.\n", headers={"X-Profile-Path": _header(path)})


def _header(path: object) -> str:
    return str(path).encode("unicode_escape").decode()  # the environment may name the folder, too
