"""Sample several answers to a prompt: text, log-probabilities, and the version of the weights.

    python examples/generate.py [--model FOLDER] [--prompt TEXT]

FOLDER has a causal LM in Hugging Face format. Without it, a tiny random model answers with random text.
"""

from __future__ import annotations

import argparse

from tiny_model import load

from lockstep import Engine, EngineConfig, RolloutService, SamplingParams


def main() -> None:
    """Generate, and print a line for each sample."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder in Hugging Face format")
    parser.add_argument("--prompt", default="What is 347 + 285?\n")
    options = parser.parse_args()

    model, tokenizer = load(options.model)
    engine = Engine(model, EngineConfig(kv_cache="64MiB"), tokenizer=tokenizer)
    service = RolloutService(engine)  # an engine with its weight verbs
    # The engine samples with the model's own tensors. A commit names them: version "1", and a SHA-256 of the bytes.
    service.commit_in_place("1", source=model.named_parameters())

    params = SamplingParams(n=4, max_new_tokens=16, temperature=0.8, sampling_seed=7)
    for completion in engine.generate(options.prompt, params):
        print(f"sample {completion.index}: {completion.text!r} ({completion.finish_reason.type})")
        print("  log-probabilities:", [round(logprob, 3) for logprob in completion.logprobs])
        print(f"  weights: version {completion.weight_version}, digest {completion.weight_digest}")
    service.close()


if __name__ == "__main__":
    main()
