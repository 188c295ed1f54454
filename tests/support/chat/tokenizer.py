"""A tokenizer of bytes with the markers of families that call tools, and small chat templates of these families."""

from __future__ import annotations

import tokenizers
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 320
EOS = "<|im_end|>"
SPECIAL = (  # left out of texts unless they are kept, as in the families' tokenizers
    EOS, "<|im_start|>", "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|return|>",
    "<|call|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]", "<|python_tag|>",
)  # fmt: skip
WORDS = (  # part of every text
    "<tool_call>", "</tool_call>", "<think>", "</think>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>",
)  # fmt: skip
_MESSAGES = (
    "{% if tools %}tools: {{ tools | tojson }}\n{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}[CALL]{{ call.function.name }} {{ CALL }}{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_OBJECT, _TEXT = "call.function.arguments | tojson", "'' + call.function.arguments"
_SIGNS = {  # a text of the family's template, and the form in which it expects the arguments of calls
    "hermes": ("<tool_call>", _OBJECT),
    "qwen3_coder": ("<tool_call><function=f><parameter=a>", _OBJECT),
    "llama3_json": ("<|python_tag|>", _OBJECT),
    "mistral": ("[TOOL_CALLS]", _OBJECT),
    "deepseek_v3": ("<｜tool▁calls▁begin｜>```json", _TEXT),
    "deepseek_v31": ("<｜tool▁calls▁begin｜>", _TEXT),
    "glm45": ("<tool_call><arg_key>", _OBJECT),
    "gpt-oss": ("<|channel|>", _OBJECT),
}
FAMILIES = tuple(_SIGNS)


def chat_template(family: str, *, thinks: bool = False, opens: bool = False) -> str:
    """Return a small template of a family. thinks: the family reasons; opens: the template opens the reasoning."""
    sign, arguments = _SIGNS[family]
    sign += "<think></think>" if thinks or opens else ""
    template = "{# " + sign + " #}" + _MESSAGES.replace("CALL }}", arguments + " }}")
    return template.replace("assistant\n{% endif", "assistant\n<think>\n{% endif") if opens else template


def bytes_as_tokens(text: str) -> list[str]:
    """Return the tokens of a text's single bytes, which spell markers in letters too."""
    level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return [letter for piece, _ in level.pre_tokenize_str(text) for letter in piece]


def byte_tokenizer(template: str | None = None) -> PreTrainedTokenizerFast:
    """Make a tokenizer with a token for each byte and each marker."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({token: id for id, token in enumerate(alphabet)}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken(word, special=True, normalized=False) for word in SPECIAL])
    backend.add_tokens([tokenizers.AddedToken(word, special=False, normalized=False) for word in WORDS])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=EOS)
    tokenizer.chat_template = template
    return tokenizer
