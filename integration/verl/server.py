"""A replica's server for verl: a process of `lockstep serve`, and the calls that verl makes of it as of a Ray actor."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
import ray
from verl.workers.rollout.replica import RolloutMode, TokenOutput
from verl.workers.rollout.utils import get_max_position_embeddings

from .requests import read_answer, request_body
from .settings import serve_command

logger = logging.getLogger(__name__)

_KEY = "LOCKSTEP_ADMIN_KEY"
_TAGS = ("kv_cache", "weights")
_ABORT_EVERY_S = 0.1  # while requests are on their way that are to be rejected
_LINE_BYTES = 1 << 24  # a progress bar is one line, however often it is drawn


class LockstepServer:
    """One replica: its process, and what verl asks of it. Requests go to the process over HTTP on this host."""

    def __init__(self, config: Any, model_config: Any, mode: RolloutMode, environment: Mapping[str, str]) -> None:
        """Keep the settings. environment: of the process, beside this one's."""
        self._config, self._model_config, self._mode = config, model_config, mode
        self._context = config.max_model_len or get_max_position_embeddings(model_config.hf_config)
        self._key = secrets.token_hex(16)
        self._environment = {**os.environ, **environment, _KEY: self._key}
        self._host = ray.util.get_node_ip_address().strip("[]")
        self._url = ""
        self._client = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {self._key}"}, trust_env=False, timeout=None,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
        )  # fmt: skip
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._rejects = False  # requests, until generation is resumed
        self._asked: set[asyncio.Future[httpx.Response]] = set()  # answers that are not there yet

    async def launch(self) -> str:
        """Start the process and wait until it serves. Returns its address, HOST:PORT. Raises RuntimeError with its last
        lines if it ends before."""
        command = serve_command(self._config, self._model_config, self._host)
        # Its standard input ends when this process ends, however it does, and it with it.
        self._process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=self._environment,
            limit=_LINE_BYTES,
        )  # fmt: skip
        lines: list[str] = []
        assert self._process.stderr is not None
        async for line in self._process.stderr:
            text = _logged(line)
            lines.append(text)
            if " at http" in text:
                self._url = text.split()[-1]
                self._reader = asyncio.create_task(self._log())
                return self._url.removeprefix("http://")
        raise RuntimeError(f"`lockstep serve` ended with {await self._process.wait()}: " + "\n".join(lines[-20:]))

    def endpoint(self) -> tuple[str, str]:
        """Return the url and the admin key of the process."""
        return self._url, self._key

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        request_id: str,
        image_data: Sequence[Any] | None = None,
        video_data: Sequence[Any] | None = None,
    ) -> TokenOutput:
        """Draw the answer to a prompt. Raises ValueError with the engine's reason for a request that it refuses."""
        if image_data or video_data:
            raise NotImplementedError("the rollout lockstep takes text alone, no images and videos")
        if self._rejects:
            return TokenOutput(token_ids=[], stop_reason="aborted")
        body = request_body(self._config, self._context, prompt_ids, sampling_params, request_id)
        asked = asyncio.ensure_future(self._post("/generate", body))
        self._asked.add(asked)
        asked.add_done_callback(self._asked.discard)
        response = await asked
        if response.status_code != 200:
            raise ValueError(f"request {request_id}: {response.status_code} {response.text[:500]}")
        return TokenOutput(**read_answer(response.json()))

    async def sleep(self) -> None:
        """Release the memory that verl's mode shares with its trainer."""
        if self._config.free_cache_engine:
            tags = _TAGS[:1] if self._mode == RolloutMode.STANDALONE else _TAGS
            await self._tell("/release_memory_occupation", tags=tags)

    async def wake_up(self) -> None:
        """Resume what `sleep` released. In the hybrid mode the update of weights does it."""
        if self._mode == RolloutMode.HYBRID:
            raise ValueError("a hybrid replica wakes up by update_weights")
        if self._config.free_cache_engine:
            tags = _TAGS[:1] if self._mode == RolloutMode.STANDALONE else _TAGS
            await self._tell("/resume_memory_occupation", tags=tags)

    async def clear_kv_cache(self) -> None:
        """Empty the prefix cache."""
        await self._tell("/flush_cache")

    async def release_kv_cache(self) -> None:
        """Release the KV pool alone."""
        if self._config.free_cache_engine:
            await self._tell("/release_memory_occupation", tags=_TAGS[:1])

    async def resume_kv_cache(self) -> None:
        """Allocate the KV pool again."""
        if self._config.free_cache_engine:
            await self._tell("/resume_memory_occupation", tags=_TAGS[:1])

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        """End all requests with their tokens so far, and hold new ones until `resume_generation`, or, if asked to, end
        them at once."""
        self._rejects = reject_request
        await self._tell("/pause_generation", mode="abort")
        while self._rejects and self._asked:  # those that arrive behind the pause would wait for its end
            await self._tell("/abort_request", abort_all=True)
            await asyncio.wait(self._asked, timeout=_ABORT_EVERY_S)

    async def resume_generation(self) -> None:
        """Generate again."""
        await self._tell("/continue_generation")
        self._rejects = False

    async def start_profile(self, **_: object) -> None:
        """Begin a profile of the engine, where verl's settings ask for one."""
        if self._config.profiler is not None and self._config.profiler.enable:
            await self._tell("/start_profile")

    async def stop_profile(self) -> None:
        """End the profile."""
        if self._config.profiler is not None and self._config.profiler.enable:
            await self._tell("/stop_profile")

    async def _tell(self, path: str, **body: object) -> None:
        response = await self._post(path, body)
        if response.status_code != 200:
            raise RuntimeError(f"{path}: {response.status_code} {response.text[:500]}")

    async def _post(self, path: str, body: Mapping[str, object]) -> httpx.Response:
        try:
            return await self._client.post(f"{self._url}{path}", json=body)
        except httpx.HTTPError as error:
            raise RuntimeError(f"`lockstep serve` at {self._url} does not answer {path}: {error!r}") from error

    async def _log(self) -> None:
        """Pass the process's messages on to verl's log."""
        assert self._process is not None and self._process.stderr is not None
        async for line in self._process.stderr:
            _logged(line)
        logger.error("`lockstep serve` at %s ended with %s", self._url, await self._process.wait())


def _logged(line: bytes) -> str:
    """Pass a line of the process on, at its own level, and return it."""
    text = line.decode(errors="replace").rstrip()
    logger.log(
        logging.WARNING if text.startswith(("WARNING", "ERROR", "lockstep: error")) else logging.INFO, "%s", text
    )
    return text
