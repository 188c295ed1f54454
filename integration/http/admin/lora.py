"""Endpoints that load and unload an adapter: SGLang's paths and replies, and vLLM's under /v1."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse, Response

from ...service import RolloutService
from ...weights.lora import AdapterReport
from ..edge.bodies import AdminBody
from ..edge.errors import HttpError
from .common import endpoint, run_update, service_of, triple, verb

router = APIRouter(tags=["adapters"])


class AdapterBody(AdminBody):
    """Common fields."""

    lora_name: str
    weight_version: str | None = None
    abort_all_requests: bool = False
    keep_running: bool | None = None  # default: true, as a pause with mode in_place does, unless there is in_flight
    in_flight: str | None = None  # "verify": requests that have begun are drawn again under the adapter

    @property
    def common(self) -> dict[str, Any]:
        """The verbs' common arguments."""
        keeps_running = self.in_flight is None if self.keep_running is None else self.keep_running
        return {"weight_version": self.weight_version, "abort_all_requests": self.abort_all_requests,
                "keep_running": keeps_running, "in_flight": self.in_flight}  # fmt: skip

    lora_int_id: int | None = None  # vLLM's: names say enough here


class LoadBody(AdapterBody):
    """Fields of load_lora_adapter."""

    lora_path: str
    load_inplace: bool = False
    pinned: bool = False  # SGLang's: an adapter stays until it is unloaded


class UnloadBody(AdapterBody):
    """Fields of unload_lora_adapter."""


def _changed(report: AdapterReport, **ranks: object) -> Response:
    commit = report.commit
    return triple(
        "Success", report, loaded_adapters=report.loaded_adapters, error_message="",
        weight_version=commit.version, weight_digest=commit.digest, **ranks,
    )  # fmt: skip


def _load(service: RolloutService, body: LoadBody, seconds_left: float | None) -> AdapterReport:
    return service.load_lora_adapter(
        body.lora_name, body.lora_path, load_inplace=body.load_inplace, timeout_s=seconds_left, **body.common
    )


def _unload(service: RolloutService, body: UnloadBody, seconds_left: float | None) -> AdapterReport:
    return service.unload_lora_adapter(body.lora_name, timeout_s=seconds_left, **body.common)


@verb(router, LoadBody, writes=True, reply=_changed)
def load_lora_adapter(service: RolloutService, body: LoadBody, seconds_left: float | None) -> AdapterReport:
    """Load an adapter folder; it then answers every request. An engine has one adapter at a time."""
    return _load(service, body, seconds_left)


@verb(router, UnloadBody, writes=True, reply=_changed)
def unload_lora_adapter(service: RolloutService, body: UnloadBody, seconds_left: float | None) -> AdapterReport:
    """Unload the adapter of that name: the engine has its base alone again."""
    return _unload(service, body, seconds_left)


@endpoint(router, "/v1/load_lora_adapter", LoadBody)
async def load_as_vllm(request: Request, body: LoadBody) -> Response:
    """Load an adapter folder as /load_lora_adapter does; answers with vLLM's text."""
    service = service_of(request)
    await run_update(request, body, lambda seconds_left: _load(service, body, seconds_left))
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@endpoint(router, "/v1/unload_lora_adapter", UnloadBody)
async def unload_as_vllm(request: Request, body: UnloadBody) -> Response:
    """Unload an adapter as /unload_lora_adapter does; answers with vLLM's text, and 404 for an unknown name."""
    service = service_of(request)
    if body.lora_name not in service.loaded_adapters:
        raise HttpError(404, f"The lora adapter '{body.lora_name}' cannot be found.", param="lora_name")
    await run_update(request, body, lambda seconds_left: _unload(service, body, seconds_left))
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")
