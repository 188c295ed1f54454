"""Change the weights in the middle of a generation, and show the weight version of each token.

    python examples/pause_and_update.py [--model FOLDER]

The engine's loop runs in a thread. It is paused with its KV in place, the weights change, are committed as version "2",
and the same sequences continue. `--mode retract` releases the KV instead, and computes it again with the new weights.
"""

from __future__ import annotations

import argparse
import threading

import torch
from tiny_model import load

from lockstep import Completion, Engine, EngineConfig, RolloutService, SamplingParams


def main() -> None:
    """Generate across a weight update, and print each sample's spans of versions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder in Hugging Face format")
    parser.add_argument("--mode", choices=("in_place", "retract"), default="in_place")
    options = parser.parse_args()

    model, tokenizer = load(options.model)
    engine = Engine(model, EngineConfig(kv_cache="64MiB"), tokenizer=tokenizer)
    service = RolloutService(engine)
    service.commit_in_place("1", source=model.named_parameters())
    params = SamplingParams(max_new_tokens=200, ignore_eos=True, n=2, sampling_seed=1)

    has_tokens, finished = threading.Event(), []

    def read_stream() -> None:
        for chunk in engine.stream("Once upon a time", params):
            has_tokens.set()
            if chunk.completion is not None:
                finished.append(chunk.completion)

    with service.rollout():  # the engine uses the module until this block ends
        engine.start()  # a thread drives the loop
        reader = threading.Thread(target=read_stream)
        reader.start()
        has_tokens.wait()
        report = engine.pause_generation(options.mode)  # between two steps; it holds when the call returns
        print(f"paused: {report}")
        with service.optimizer_step(), torch.no_grad():  # in place of a trainer's step
            for parameter in model.parameters():
                parameter.add_(0.01 * torch.randn_like(parameter))
        service.commit_in_place("2", source=model.named_parameters())
        service.continue_generation()
        reader.join()
        engine.stop()
    for completion in sorted(finished, key=lambda completion: completion.index):
        print_spans(completion)
    service.close()


def print_spans(completion: Completion) -> None:
    """Print the weight versions of one sample's tokens."""
    for span in completion.weight_versions:
        tokens = f"tokens {span.start} to {span.end - 1}"
        print(f"sample {completion.index}, {tokens}: version {span.version}, digest {span.digest[:12]}")


if __name__ == "__main__":
    main()
