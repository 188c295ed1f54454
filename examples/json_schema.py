"""Sample JSON that follows a schema, and show which tokens the model chose.

    python examples/json_schema.py [--model FOLDER]

Needs the extra `grammar`: pip install -e '.[grammar]'. Log-probabilities are the model's own. `forced` marks the
tokens for which the schema left no choice, so that a trainer can leave them out.
"""

from __future__ import annotations

import argparse
import json

from tiny_model import load

from lockstep import Engine, EngineConfig, SamplingParams

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Rome", "Oslo"]},
        "nights": {"type": "integer", "minimum": 1, "maximum": 9},
        "breakfast": {"type": "boolean"},
    },
    "required": ["city", "nights", "breakfast"],
    "additionalProperties": False,
}


def main() -> None:
    """Generate four bookings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder in Hugging Face format")
    options = parser.parse_args()

    model, tokenizer = load(options.model)
    engine = Engine(model, EngineConfig(kv_cache="64MiB"), tokenizer=tokenizer)
    params = SamplingParams(json_schema=SCHEMA, n=4, max_new_tokens=100, sampling_seed=3)
    for completion in engine.generate("A booking, please: ", params):
        booking = json.loads(completion.text)
        num_chosen = completion.forced.count(False)
        print(f"{booking}: {len(completion.token_ids)} tokens, {num_chosen} of them chosen by the model")
    engine.close()


if __name__ == "__main__":
    main()
