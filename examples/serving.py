"""Serve an engine over HTTP from a thread of this process, and send it requests of two APIs.

    python examples/serving.py [--model FOLDER]

Needs the extra `serve`: pip install -e '.[serve]'. `/generate` takes SGLang's requests, `/v1/...` OpenAI's: its client
works with `OpenAI(base_url=f"{server.url}/v1", api_key="-")`. `lockstep serve --model FOLDER` serves from a
process of its own.
"""

from __future__ import annotations

import argparse

import httpx
from tiny_model import load

from lockstep import Engine, EngineConfig, RolloutService
from lockstep.integration.http.edge.config import HttpConfig
from lockstep.integration.http.server import serve_in_background

PROMPT = "What is 347 + 285?\n"


def main() -> None:
    """Serve, ask, and print the answers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder in Hugging Face format")
    options = parser.parse_args()

    model, tokenizer = load(options.model)
    service = RolloutService(Engine(model, EngineConfig(kv_cache="64MiB"), tokenizer=tokenizer))
    service.commit_in_place("1", source=model.named_parameters())
    # Beside a trainer the requests are answered inside `service.rollout()`, and wait outside it.
    with service.rollout(), serve_in_background(service, HttpConfig(port=0)) as server:
        ask(server.url)
    service.close()


def ask(url: str) -> None:
    """Send a request of SGLang's API and one of OpenAI's."""
    with httpx.Client(base_url=url, timeout=60) as client:
        settings = {"max_new_tokens": 8, "temperature": 0.7}
        asked = {"text": PROMPT, "sampling_params": settings, "return_logprob": True}
        answer = client.post("/generate", json=asked).raise_for_status().json()
        meta = answer["meta_info"]
        print("POST /generate:", repr(answer["text"]))
        print("  log-probabilities:", [round(entry[0], 3) for entry in meta["output_token_logprobs"]])
        print(f"  weights: version {meta['weight_version']}, digest {meta['weight_digest']}")

        [model] = client.get("/v1/models").raise_for_status().json()["data"]
        asked = {"model": model["id"], "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
        answer = client.post("/v1/completions", json=asked).raise_for_status().json()
        print("POST /v1/completions:", repr(answer["choices"][0]["text"]), answer["usage"])


if __name__ == "__main__":
    main()
