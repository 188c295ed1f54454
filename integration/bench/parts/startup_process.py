"""One start of `lockstep bench startup`, in a process of its own: load a folder, draw one token, print the seconds.

Arguments: the kind, and a JSON object with folder, dtype, threads, prompt_tokens, and the time of the monotonic clock
when the process was started. Prints one JSON object of seconds: load_s, token_s, their sum first_token_s, and
process_s, from the start of the process to the token.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from ....rollout.config import EngineConfig
from ....rollout.engine import Engine
from ....rollout.model.tokenizer import load_tokenizer
from ....rollout.sampling_params import SamplingParams
from ....rollout.sharding.skeleton import auto_class

KINDS = ("ours", "transformers", "unkept")
_TEXT = "The time to the first token of an engine that has just been made is"

_Token = Callable[[], None]


def main(kind: str, settings: dict[str, Any]) -> dict[str, float]:
    """Measure one start. The class of the model is imported before the clock starts."""
    torch.set_num_threads(settings["threads"])
    folder = Path(settings["folder"])
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    loader = auto_class(config)
    loader._model_mapping[type(config)]  # imports the model's module
    prompt = torch.randint(config.vocab_size, (settings["prompt_tokens"],)).tolist()
    began = time.perf_counter()
    if kind == "transformers":
        draw = _with_transformers(loader, folder, settings["dtype"], prompt)
    else:
        draw = _with_engine(folder, settings["dtype"], prompt)
    loaded = time.perf_counter()
    draw()
    drawn, now = time.perf_counter(), time.monotonic()
    return {
        "load_s": loaded - began,
        "token_s": drawn - loaded,
        "first_token_s": drawn - began,
        "process_s": now - settings["started"],
    }


def _with_engine(folder: Path, dtype: str, prompt: list[int]) -> _Token:
    engine = Engine(folder, EngineConfig(dtype=dtype))
    wanted = _TEXT if engine.tokenizer is not None else prompt

    def draw() -> None:
        chunk = next(engine.stream(wanted, SamplingParams(max_new_tokens=1, ignore_eos=True)))
        assert len(chunk.token_ids) == 1

    return draw


def _with_transformers(loader: Any, folder: Path, dtype: str, prompt: list[int]) -> _Token:
    model = loader.from_pretrained(folder, dtype=getattr(torch, dtype), trust_remote_code=False)
    tokenizer = load_tokenizer(folder)

    def draw() -> None:
        ids = torch.tensor([prompt if tokenizer is None else tokenizer(_TEXT)["input_ids"]])
        with torch.inference_mode():
            drawn = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, max_new_tokens=1, pad_token_id=0
            )
        assert drawn.shape[1] == ids.shape[1] + 1
        if tokenizer is not None:
            tokenizer.decode(drawn[0, -1:])

    return draw


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], json.loads(sys.argv[2]))))
