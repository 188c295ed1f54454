"""Grammars that name tokens, which text alone does not tell apart: what they force, jumps, and endless rules."""

from __future__ import annotations

import json
from contextlib import closing

import pytest

from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.grammars.compiler import Constraint
from lockstep.rollout.grammars.token_text import TokenText
from lockstep.rollout.sampling_params import SamplingParams

EOS = 0
VOCAB = 1024


def tag(format: dict) -> Constraint:
    return Constraint("structural_tag", json.dumps({"type": "structural_tag", "format": format}))


def string(value: str) -> dict:
    return {"type": "const_string", "value": value}


def token(id: int) -> dict:
    return {"type": "token", "token": id}


def either(*elements: dict) -> dict:
    return {"type": "or", "elements": list(elements)}


def sequence(*elements: dict) -> dict:
    return {"type": "sequence", "elements": list(elements)}


def of_text(text: TokenText, *pieces: str) -> list[int]:
    return [text.pieces.index(piece.encode()) for piece in pieces]


@pytest.mark.parametrize("is_silent", [True, False])
def test_text_is_forced_up_to_where_a_token_may_come_in_its_place(compiler, text, bpe_tokenizer, is_silent):
    id = bpe_tokenizer.convert_tokens_to_ids("<|im_start|>") if is_silent else of_text(text, "x")[0]
    assert bool(text.pieces[id]) != is_silent
    grammar = compiler.compile(tag(sequence(string("val"), either(string("ue"), token(id)))))
    matcher = grammar.matcher()
    assert grammar.names_tokens and matcher.forced() == b"val"
    assert all(matcher.accept(one) for one in of_text(text, "v", "a", "l"))
    assert matcher.forced() == b""
    assert matcher.accept(of_text(text, "u")[0]) and matcher.forced() == b"e"


@pytest.mark.parametrize("mode", ["text", "exact", "off"])
def test_a_token_in_the_place_of_text_is_drawn_where_the_model_wants_it(make_model, bpe_tokenizer, mode):
    """As where a tool's call ends with a token, and an option of its argument is the beginning of another one."""
    id = bpe_tokenizer.convert_tokens_to_ids("<|im_start|>")
    grammar = tag(sequence(string("val"), either(string("ue."), token(id)))).text
    config = EngineConfig(kv_cache="64 blocks", jump_forward=mode)
    with closing(Engine(make_model("qwen3", vocab_size=VOCAB), config, tokenizer=bpe_tokenizer)) as engine:
        for bias, wanted in ((50.0, True), (-50.0, False)):
            params = SamplingParams(
                max_new_tokens=6, structural_tag=grammar, logit_bias={id: bias}, sampling_seed=1, min_new_tokens=0
            )
            assert (id in engine.generate([[1, 2, 3]], params)[0].token_ids) is wanted


def test_a_jump_that_would_spell_a_named_token_otherwise_is_not_made(make_model, bpe_tokenizer, text):
    """`na` and `me` are the tokens `n`, `a` and so on here, which the tokenizer would join with what is forced."""
    names = of_text(text, "n", "a", "m")
    whole = text.encode(b"name")
    assert whole is not None and not set(names) & set(whole)
    grammar = tag(sequence(*map(token, names), string("e"), string("xyz"))).text
    params = SamplingParams(max_new_tokens=12, structural_tag=grammar, sampling_seed=1)
    config = EngineConfig(kv_cache="64 blocks", jump_forward="text")
    with closing(Engine(make_model("qwen3", vocab_size=VOCAB), config, tokenizer=bpe_tokenizer)) as engine:
        (answer,) = engine.generate([[1, 2, 3]], params)
    assert answer.finish_reason.type == "stop" and list(answer.token_ids[:3]) == names
    assert text.spell(answer.token_ids) == b"namexyz"


def test_a_named_token_with_text_is_taken_where_rules_nest(compiler, text):
    """Tokens of such grammars are followed byte by byte, for the time that they may take."""
    whole = text.encode(b"name")
    assert whole is not None and len(whole) == 1
    ebnf = {"type": "grammar", "grammar": 'root ::= "(" root ")" | "x"'}
    matcher = compiler.compile(tag(sequence(ebnf, token(whole[0]), string("z")))).matcher()
    assert matcher._nests and all(matcher.accept(one) for one in of_text(text, "x"))
    assert not matcher.accept(of_text(text, "n")[0])
    assert matcher.accept(whole[0]) and matcher.forced() == b"z"
    matcher.roll_back(1)
    assert matcher.accept(whole[0]) and matcher.accept(of_text(text, "z")[0]) and matcher.is_complete


def test_a_rule_that_never_ends_behind_a_token_is_refused(compiler, bpe_tokenizer):
    id = bpe_tokenizer.convert_tokens_to_ids("<|im_start|>")
    endless = {"type": "json_schema", "json_schema": {"$ref": "#/$defs/a", "$defs": {"a": {
        "type": "object", "properties": {"b": {"$ref": "#/$defs/a"}}, "required": ["b"]}}}}  # fmt: skip
    tags = {"type": "token_triggered_tags", "trigger_tokens": [id], "tags": [
        {"type": "tag", "begin": token(id), "content": endless, "end": "y"}]}  # fmt: skip
    with pytest.raises(ValueError, match="structural_tag: no text can end that enters the rule"):
        compiler.compile(tag(tags))
