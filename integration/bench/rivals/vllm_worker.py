"""A script that runs loads through vLLM, for the Python of vLLM's own environment, which does not have this package.

Started with one argument, a JSON object: model (a folder), dtype, max_model_len, max_num_seqs, prefix_cache. It answers
one JSON object a line: {"ready": version} once the model is loaded, then for every line {"prompts": [[id, ...], ...],
"counts": [n, ...]} on its standard input {"seconds": s, "num_tokens": n, "num_logprobs": n}. It ends at the end of
its input.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def main() -> None:
    settings = json.loads(sys.argv[1])
    # vLLM and its processes print to standard output: the answers use another descriptor.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    # vLLM must not import the files in this folder, whatever their names.
    sys.path = [entry for entry in sys.path if entry != os.path.dirname(os.path.abspath(__file__))]

    import vllm

    llm = vllm.LLM(
        model=settings["model"],
        dtype=settings["dtype"],
        skip_tokenizer_init=True,
        max_model_len=settings["max_model_len"],
        max_num_seqs=settings["max_num_seqs"],
        enable_prefix_caching=settings["prefix_cache"],
        disable_log_stats=True,
    )
    print(json.dumps({"ready": vllm.__version__}), file=answers)
    for line in sys.stdin:
        print(json.dumps(run(vllm, llm, json.loads(line))), file=answers)


def run(vllm: Any, llm: Any, load: dict[str, Any]) -> dict[str, Any]:
    """Sample each prompt to its number of tokens at temperature 1, with the log-probability of each sampled token."""
    params = [
        vllm.SamplingParams(temperature=1.0, logprobs=0, ignore_eos=True, max_tokens=count, detokenize=False)
        for count in load["counts"]
    ]
    prompts = [{"prompt_token_ids": prompt} for prompt in load["prompts"]]
    started = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - started
    completions = [output.outputs[0] for output in outputs]
    return {
        "seconds": seconds,
        "num_tokens": sum(len(completion.token_ids) for completion in completions),
        "num_logprobs": sum(len(completion.logprobs) for completion in completions),
    }


if __name__ == "__main__":  # processes that vLLM starts import this file too
    main()
