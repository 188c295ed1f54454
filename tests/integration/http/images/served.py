"""A client of a served model of images and text."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import httpx
import torch

from lockstep.integration.http.server import BackgroundServer
from lockstep.kernels.sampling.logprobs import selected_logprobs
from lockstep.rollout.engine import Engine
from lockstep.rollout.model.loading import media_tokens
from lockstep.rollout.sampling_params import LEAST_BIAS

PATIENCE = 60.0


class Served:
    """The client, and the trainer's view of the served module."""

    def __init__(self, server: BackgroundServer) -> None:
        self.server, self.service = server, server.app.state.service
        self.client = httpx.Client(base_url=server.url, timeout=PATIENCE)

    def __enter__(self) -> Served:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.client.close()

    @property
    def engine(self) -> Engine:
        return self.service.engine

    def ok(self, path: str, **body: object) -> Any:
        answer = self.client.post(path, json=body) if body else self.client.get(path)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def refused(self, path: str, **body: object) -> tuple[str, str]:
        """Return the field and the message of a request that is refused with 400."""
        answer = self.client.post(path, json=body)
        assert answer.status_code == 400, (answer.status_code, answer.text)
        error = answer.json()["error"]
        return error.get("param"), error["message"]

    def chat(self, *content: object, **fields: object) -> Any:
        """Ask with one message of the user, of these parts."""
        messages = [{"role": "user", "content": list(content)}]
        return self.ok("/v1/chat/completions", **{**CHAT, "logit_bias": self.no_media, "messages": messages, **fields})

    @property
    def model_type(self) -> str:
        return str(self.engine.model.module.config.model_type)

    @property
    def no_media(self) -> dict[str, float]:
        """A bias that bans the tokens of media, which a trainer's forward refuses in an answer."""
        return {str(id): LEAST_BIAS for id in media_tokens(self.engine.model.module.config)}


CHAT = {"max_tokens": 8, "seed": 3, "logprobs": True, "return_token_ids": True}


def image_part(url: str) -> dict[str, object]:
    return {"type": "image_url", "image_url": {"url": url}}


def text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def trained_logprobs(engine: Engine, prompt: dict[str, torch.Tensor], token_ids: list[int]) -> list[float]:
    """Return the log-probabilities of an answer in a trainer's forward over a processor's output and the answer."""
    whole = torch.cat([prompt["input_ids"], torch.tensor([token_ids])], dim=1)
    given = {name: value for name, value in prompt.items() if name != "attention_mask"} | {"input_ids": whole}
    for name in ("mm_token_type_ids", "token_type_ids"):
        if name in prompt:
            given[name] = torch.nn.functional.pad(prompt[name], (0, len(token_ids)))
    with engine.model.training_numerics(), torch.no_grad():
        logits = engine.model.module(**given, use_cache=False).logits[0]
    own = logits[prompt["input_ids"].shape[1] - 1 : -1]
    return selected_logprobs(own, torch.tensor(token_ids), 1.0).tolist()
