"""Two small tokenizers with chat templates of the kinds that models have: ChatML with thoughts and tools; Llama's."""

from __future__ import annotations

import functools

import tokenizers
import transformers

# Writes thoughts only after the last question, tools into the first message, and the answers of tools as a user's.
CHATML = """\
{%- if tools or (messages and messages[0].role == 'system') -%}
<|im_start|>system
{{ messages[0].content + '\n\n' if messages[0].role == 'system' else '' }}
{{- '# Tools\n' + (tools | tojson) if tools else '' }}<|im_end|>
{% endif -%}
{%- set ns = namespace(last=-1) -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}
<|im_start|>user
{{ message.content }}<|im_end|>
{% elif message.role == 'assistant' -%}
{%- set content = message.content or '' -%}
{%- if '</think>' in content and loop.index0 < ns.last -%}
{%- set content = content.split('</think>')[-1].lstrip('\n') -%}
{%- endif -%}
{%- if message.reasoning_content and loop.index0 > ns.last -%}
{%- set content = '<think>\n' + message.reasoning_content.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') -%}
{%- endif -%}
<|im_start|>assistant
{{ content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{{ call.function | tojson }}
</tool_call>
{%- endfor %}<|im_end|>
{% elif message.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}
<|im_start|>user
{% else %}
{% endif -%}
<tool_response>
{{ message.content }}
</tool_response>
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}
<|im_end|>
{% endif -%}
{%- elif message.role != 'system' or not loop.first -%}
{{- raise_exception('no such role here') -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking -%}
<think>

</think>

{% endif -%}
{%- endif -%}
"""
# Trims every content, and begins with a token of its own.
LLAMA = (
    "{{- '<|begin_of_text|>' -}}"
    "{%- if tools -%}{{- '<|start_header_id|>system<|end_header_id|>\\n\\nEnvironment: ipython; answer with '"
    """ + '{"name": function name, "parameters": dictionary of argument name and its value}.'"""
    " + (tools | tojson) + '<|eot_id|>' -}}"
    "{%- endif -%}"
    "{%- for message in messages -%}"
    "{%- set role = 'ipython' if message.role == 'tool' else message.role -%}"
    "{{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' -}}"
    "{%- for call in message.tool_calls or [] -%}{%- set called = call.function -%}"
    """{{- '{"name": "' + called.name + '", "parameters": ' + (called.arguments | tojson) + '}' -}}{%- endfor -%}"""
    "{{- (message.content or '') | trim + '<|eot_id|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{%- endif -%}"
)
# special tokens, the one that ends a turn first; tokens of a text of their own
CHATML_TOKENS = (
    ["<|im_end|>", "<|endoftext|>", "<|im_start|>"],
    ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"],
)
LLAMA_TOKENS = (["<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>"], [])
VOCABULARY = 512


def chatml_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Train a byte-level BPE of 512 tokens with the template `CHATML`."""
    return _tokenizer(CHATML, *map(tuple, CHATML_TOKENS))


def llama_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Train a byte-level BPE of 512 tokens with the template `LLAMA`."""
    return _tokenizer(LLAMA, *map(tuple, LLAMA_TOKENS))


@functools.cache
def _tokenizer(template: str, special: tuple[str, ...], words: tuple[str, ...]) -> transformers.PreTrainedTokenizerFast:
    lines = [f"{a} of the {b} is {i}, and {b} was {a}? system user assistant\n\n" for i, a in enumerate(_WORDS)
             for b in _WORDS]  # fmt: skip
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(words), special_tokens=list(special), show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    backend.train_from_iterator(lines, trainer)
    backend.add_tokens(list(words))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=special[0], additional_special_tokens=list(special[1:])
    )
    tokenizer.chat_template = template
    return tokenizer


_WORDS = ("name", "value", "weather", "town", "città", "ключ", "東京", "number", "sum", "hello", "answer", "tool")
