"""Draw pictures of one colour each, and make a tiny LLaVA that has never seen one: python make.py

It writes model/ (0.1 M parameters, with a processor), pictures/ and rows.jsonl beside itself, or in the folder that is
given. Then `lockstep train config.toml` there teaches the model to name the colours.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForImageTextToText,
    CLIPImageProcessorPil,
    LlavaConfig,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (40, 60, 220), "yellow": (230, 210, 50)}
WORDS = ["<end>", "<image>", "what", "colour", "?", "grey", "pink", "brown", *COLOURS]
SIDE = 16  # of a picture, in pixels: four patches of 8 x 8
NUM_PICTURES = 240


def main() -> None:
    """Write everything."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    make_model(folder / "model")
    draw = random.Random(0)
    rows = []
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    for number in range(NUM_PICTURES):
        name = draw.choice(list(COLOURS))
        shade = tuple(min(255, max(0, part + draw.randint(-35, 35))) for part in COLOURS[name])
        Image.new("RGB", (SIDE, SIDE), shade).save(folder / "pictures" / f"{number}.png")
        rows.append({"prompt": "<image> what colour ?", "images": [f"pictures/{number}.png"], "answer": name})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{NUM_PICTURES} pictures and a model are in {folder.resolve()}")


def make_model(folder: Path) -> None:
    """Write a random model with its processor."""
    words = Tokenizer(models.WordLevel({word: id for id, word in enumerate(WORDS)}, unk_token="<end>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<end>", pad_token="<end>", additional_special_tokens=["<image>"]
    )
    processor = LlavaProcessor(
        CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE}),
        tokenizer,
        patch_size=8,
        image_token="<image>",
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    config = LlavaConfig(
        text_config={
            "model_type": "llama", "vocab_size": len(WORDS), "hidden_size": 64, "intermediate_size": 128,
            "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32,
            "max_position_embeddings": 64, "eos_token_id": 0, "bos_token_id": None, "pad_token_id": 0,
        },
        vision_config={
            "model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 2, "image_size": SIDE, "patch_size": 8,
        },
        image_token_index=WORDS.index("<image>"),
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    processor.save_pretrained(folder)


if __name__ == "__main__":
    main()
