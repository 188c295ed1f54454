"""Which tokens a text becomes that a grammar leaves no choice about: pure functions of tokens and text.

Two rules. The one of `text` is MLC-LLM's: the last tokens and the forced text are tokenised anew together,
so tokens that were sampled may be replaced by others that spell the same and go on:

    had      | {" | na |                        forced text: me": "
    now      | {" | name | ": |                 one token rolled back, two new; the last one, ` "`, is dropped where a
                                                longer token begins with it, for the model to choose

The one of `exact` and `off` replaces nothing: the forced text is tokenised by itself, and of that only the tokens count
that stay the same however the text goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from .jump import NO_JUMP, Jump
from .token_text import TokenText, whole_characters

JumpMode = Literal["text", "exact", "off"]
MAX_ROLLBACK_TOKENS = 10


def plan_text_jump(
    output_ids: Sequence[int], forced: bytes, text: TokenText, max_rollback: int = MAX_ROLLBACK_TOKENS
) -> Jump:
    """Tokenise the last `max_rollback` output tokens and the forced text together; without forced text, the tokens
    alone. NO_JUMP where that changes nothing, or where the tokenizer does not give the text back."""
    past = _whole_window(output_ids, max_rollback, text)
    past_text = text.spell(past)
    wanted = whole_characters(past_text + forced)
    new = text.encode(wanted)
    if not new or len(wanted) < len(past_text):
        return NO_JUMP
    if forced and text.begins_a_token(last := text.pieces[new[-1]]):
        # It would usually be rolled back by the next retokenisation, and bends what is sampled until then.
        if len(last) >= len(wanted) - len(past_text):
            return NO_JUMP
        new = new[:-1]
    num_same = _num_common(past, new)
    if num_same == len(new):
        return NO_JUMP
    return Jump(len(past) - num_same, tuple(new[num_same:]))


def plan_stretch(forced: bytes, text: TokenText) -> tuple[int, ...]:
    """The first canonical tokens of the forced text that no continuation can change; a function of the text alone.

    However the text goes on, some token ends it or reaches beyond it, and begins at one of the text's open ends; what
    comes before that token is tokenised as if nothing followed. So the tokens that all these beginnings share stay.
    """
    forced = whole_characters(forced)
    tokens = text.encode(forced) or ()
    for end in text.open_ends(forced):
        if not tokens or end == len(forced):
            break
        tokens = tokens[: _num_common(tokens, text.encode(whole_characters(forced[:end])) or ())]
    return tuple(tokens)


def cut_jump(jump: Jump, output_ids: Sequence[int], num_tokens: int, text: TokenText) -> Jump:
    """At most the first `num_tokens` new tokens; NO_JUMP where they would spell less than those that they replace."""
    if len(jump.token_ids) <= num_tokens:
        return jump
    kept = jump.token_ids[: max(num_tokens, 0)]
    replaced = output_ids[len(output_ids) - jump.num_rolled_back :]
    if not kept or len(text.spell(kept)) < len(text.spell(replaced)):
        return NO_JUMP
    return Jump(jump.num_rolled_back, kept)


def _whole_window(output_ids: Sequence[int], max_rollback: int, text: TokenText) -> Sequence[int]:
    """The most of the last tokens that begin with a whole character and spell something each."""
    for num_tokens in range(min(max_rollback, len(output_ids)), 0, -1):
        window = output_ids[len(output_ids) - num_tokens :]
        pieces = [text.pieces[id] for id in window]
        if all(pieces) and not 0x80 <= pieces[0][0] < 0xC0:
            return window
    return ()


def _num_common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many of the first items are equal."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
