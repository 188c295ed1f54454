"""The tokens of a text that a grammar forces: pure functions of tokens and text.

There are two rules. Rule `text` is MLC-LLM's: the last tokens and the forced text are tokenised together, so sampled
tokens may be replaced by others that spell the same text and continue it:

    had      | {" | na |                        forced text: me": "
    now      | {" | name | ": |                 one token rolled back, two new; the last one, ` "`, is dropped because
                                                a longer token starts with it: the model chooses

Rule `exact` and `off` replaces nothing: the forced text is tokenised by itself, and only those of its tokens are used
that are the same for every continuation of the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from .jump import NO_JUMP, Jump
from .token_text import TokenText, whole_characters

JumpMode = Literal["text", "exact", "off"]
MAX_ROLLBACK_TOKENS = 10
MAX_STRETCH_BYTES = 1024  # a stretch's time grows with its length and with the vocabulary's longest token


def plan_text_jump(
    output_ids: Sequence[int], forced: bytes, text: TokenText, max_rollback: int = MAX_ROLLBACK_TOKENS
) -> Jump:
    """Tokenise the last `max_rollback` output tokens and the forced text together; without forced text, only the
    tokens.

    Returns NO_JUMP if that changes nothing, or if the tokenizer does not reproduce the text.
    """
    past = _whole_window(output_ids, max_rollback, text)
    past_text = text.spell(past)
    wanted = whole_characters(past_text + forced)
    new = text.encode(wanted)
    if not new or len(wanted) < len(past_text):
        return NO_JUMP
    if forced and text.begins_a_token(last := text.pieces[new[-1]]):
        # The next retokenisation would usually roll it back, and until then it distorts the sampling.
        if len(last) >= len(wanted) - len(past_text):
            return NO_JUMP
        new = new[:-1]
    num_same = _num_common(past, new)
    if num_same == len(new):
        return NO_JUMP
    return Jump(len(past) - num_same, tuple(new[num_same:]))


def plan_stretch(forced: bytes, text: TokenText) -> tuple[int, ...]:
    """Return the first canonical tokens of the forced text that no continuation can change; depends on the text alone,
    of which the first `MAX_STRETCH_BYTES` count.

    For every continuation, some token ends the text or extends beyond it, and this token begins at one of the text's
    open ends; the text before that token is tokenised as if nothing followed. So the tokens that all these beginnings
    share are final.
    """
    forced = whole_characters(forced[:MAX_STRETCH_BYTES])
    tokens = text.encode(forced) or ()
    for end in text.open_ends(forced):
        if not tokens or end == len(forced):
            break
        tokens = tokens[: _num_common(tokens, text.encode(whole_characters(forced[:end])) or ())]
    return tuple(tokens)


def cut_jump(jump: Jump, output_ids: Sequence[int], num_tokens: int, text: TokenText) -> Jump:
    """Keep at most the first `num_tokens` new tokens; NO_JUMP if they spell less than the tokens that they replace."""
    if len(jump.token_ids) <= num_tokens:
        return jump
    kept = jump.token_ids[: max(num_tokens, 0)]
    replaced = output_ids[len(output_ids) - jump.num_rolled_back :]
    if not kept or len(text.spell(kept)) < len(text.spell(replaced)):
        return NO_JUMP
    return Jump(jump.num_rolled_back, kept)


def _whole_window(output_ids: Sequence[int], max_rollback: int, text: TokenText) -> Sequence[int]:
    """Return the longest run of last tokens that begins with a whole character and has no token without text."""
    for num_tokens in range(min(max_rollback, len(output_ids)), 0, -1):
        window = output_ids[len(output_ids) - num_tokens :]
        pieces = [text.pieces[id] for id in window]
        if all(pieces) and not 0x80 <= pieces[0][0] < 0xC0:
            return window
    return ()


def _num_common(a: Sequence[int], b: Sequence[int]) -> int:
    """Count the equal items at the beginning of both."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
