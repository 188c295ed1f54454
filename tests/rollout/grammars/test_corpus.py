"""A corpus of grammars times sampled generations of a small random model.

Finished outputs are valid; outputs that end by length are beginnings of valid ones.
"""

from __future__ import annotations

import itertools
import json

import jsonschema
import pytest
import regex
import torch
import transformers

from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.grammars.compiler import Constraint, GrammarCompiler
from lockstep.rollout.grammars.library import load_library
from lockstep.rollout.grammars.token_text import TokenText
from lockstep.rollout.sampling_params import SamplingParams

EOS = 0
VOCAB = 1024


def obj(optional: dict | None = None, **properties) -> dict:
    """Build a schema of an object with these required properties, and optional ones."""
    return {"type": "object", "properties": {**properties, **(optional or {})}, "required": list(properties),
            "additionalProperties": False}  # fmt: skip


def arr(items: dict, low: int = 0, high: int = 3) -> dict:
    return {"type": "array", "items": items, "minItems": low, "maxItems": high}


def schemas() -> list[dict]:
    """Build over a hundred different schemas."""
    text, flag, nothing = {"type": "string", "maxLength": 5}, {"type": "boolean"}, {"type": "null"}
    low, unit = {"type": "integer", "minimum": -3, "maximum": 12}, {"type": "number", "minimum": 0, "maximum": 1}
    names = {"enum": ["Paris", "Parma", "Rome", "Rom"]}
    leaves = [
        text, low, unit, flag, nothing, names, {"type": "string", "minLength": 2, "maxLength": 4},
        {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 1000}, {"type": "integer", "multipleOf": 3},
        {"type": "number", "exclusiveMinimum": -1.5, "exclusiveMaximum": 2.25}, {"const": "città"}, {"const": 17},
        {"const": None}, {"const": {"a": [1, "é"]}}, {"enum": [1, "one", None, True, 2.5]},
        {"type": ["integer", "null"]}, {"type": ["string", "boolean"], "maxLength": 3},
        {"enum": ["日本", "日本語", "ключ"]},
    ]  # fmt: skip
    patterns = [
        "^[a-c]{1,4}$", "^(name|value)-[0-9]{2}$", r"^\d{3}-\d{2}$", "^[A-Z][a-z]{0,3}$", r"^v\d+\.\d+$", "^x?y?z?$",
        "^(ab|cd){1,3}$", "^[α-ω]{1,3}$", "^#[0-9a-f]{6}$", r"^[^\s,]{1,4}$",
    ]  # fmt: skip
    formats = ["date", "time", "date-time", "ipv4", "uuid", "email", "hostname", "duration"]
    found = [*leaves]
    found += [{"type": "string", "pattern": pattern} for pattern in patterns]
    found += [{"type": "string", "format": name} for name in formats]
    found += [arr(leaf, 1, 3) for leaf in leaves]
    found += [obj(value=leaf) for leaf in leaves]
    found += [obj({"b": b}, a=a) for a, b in itertools.pairwise(leaves[:9])]
    found += [obj({"ключ": leaf, "名": text}, città=flag) for leaf in leaves[:6]]
    found += [{"anyOf": [a, b]} for a, b in zip(leaves[:8], leaves[5:13], strict=True)]
    found += [obj(outer=obj(inner=arr(obj({"note": text}, n=leaf), 1, 2))) for leaf in leaves[:6]]
    found += [
        {"type": "array", "prefixItems": [low, text], "items": False, "minItems": 2},
        {"type": "array", "prefixItems": [flag], "items": names, "minItems": 1, "maxItems": 3},
        {"type": "object", "additionalProperties": low},
        {"type": "object", "additionalProperties": low, "minProperties": 1},
        {"type": "object", "patternProperties": {"^k[0-9]$": flag}, "additionalProperties": False},
        {"type": "object", "propertyNames": {"pattern": "^[a-d]+$"}},
        {"oneOf": [obj(kind={"const": "circle"}, radius=unit), obj(kind={"const": "square"}, side=low)]},
        {"$defs": {"node": obj(v=low, next={"anyOf": [{"$ref": "#/$defs/node"}, nothing]})}, "$ref": "#/$defs/node"},
        {"$defs": {"tree": obj(children=arr({"$ref": "#/$defs/tree"}, 0, 2))}, "$ref": "#/$defs/tree"},
        {"$defs": {"e": {"anyOf": [low, obj(add=arr({"$ref": "#/$defs/e"}, 2, 2))]}}, "$ref": "#/$defs/e"},
        obj({"next": {"$ref": "#"}}, id=low), arr(arr(arr(flag, 0, 2), 0, 2), 0, 2),
        obj({f"option {i}": flag for i in range(5)}), obj(**{"a b": low, "q\"uote": flag, "back\\slash": nothing}),
        {"type": "object"}, {"type": "object", "additionalProperties": True}, {"type": "array", "items": {}}, {}, True,
        obj({"maxProperties": low}, type=names, required=flag),
    ]  # fmt: skip
    return found


REGEXES = [
    "a{3,5}b", "(name|value): [0-9]+", "[^x]{2,6}x", r"\d{4}-\d{2}-\d{2}", "(true|false)(, (true|false)){0,3}",
    "città|ключ|日本", "x*y+z?", r"\([0-9]{3}\) [0-9]{3}-[0-9]{4}", "[a-z]+(\\.[a-z]+){1,2}", "(ab?c?){1,4}",
]  # fmt: skip
EBNF = {
    'root ::= "(" root ")" | "x"': r"(?P<r>\((?&r)\)|x)",
    'root ::= term (("+" | "-") term)*\nterm ::= [0-9] | "(" root ")"': r"(?P<r>(?P<t>[0-9]|\((?&r)\))([+-](?&t))*)",
    'root ::= "name: " ("日本" | "ключ") ", value: " [0-9]{1,3}': r"name: (日本|ключ), value: [0-9]{1,3}",
    'root ::= ("a" | "b") root | "end"': r"[ab]*end",
}


@pytest.fixture(scope="module")
def engine(bpe_tokenizer):
    config = transformers.Qwen3Config(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=512, bos_token_id=None, eos_token_id=EOS,
        pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(11)
    module = transformers.Qwen3ForCausalLM(config).eval()
    engine = Engine(module, EngineConfig(kv_cache="1024 blocks", max_num_seqs=64), tokenizer=bpe_tokenizer)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def compiler(bpe_tokenizer):
    return GrammarCompiler(load_library(), TokenText(bpe_tokenizer, VOCAB), [EOS])


def test_there_are_over_a_hundred_schemas_and_no_two_alike():
    texts = {json.dumps(schema, sort_keys=True) for schema in schemas()}
    assert len(texts) == len(schemas()) > 100


def is_beginning(compiler, kind: str, grammar: str, token_ids) -> bool:
    """Return whether a separate matcher accepts every token."""
    matcher = compiler.compile(Constraint(kind, grammar)).matcher()
    return all(matcher.accept(id) for id in token_ids)


def check_schemas(engine, compiler, mode: str, few: list[dict], max_new_tokens: int) -> int:
    """Generate and check an output for each schema; returns the number of finished outputs."""
    settings = {"jump_forward": mode, "max_new_tokens": max_new_tokens}
    params = [SamplingParams(json_schema=json.dumps(schema), sampling_seed=seed, **settings)
              for seed, schema in enumerate(few)]  # fmt: skip
    num_finished = 0
    for schema, one, answer in zip(few, params, engine.generate(["json: "] * len(few), params), strict=True):
        if answer.finish_reason.type == "stop":
            num_finished += 1
            jsonschema.validate(json.loads(answer.text), schema)
        else:
            assert answer.finish_reason.type == "length", answer.finish_reason
        assert is_beginning(compiler, "json_schema", one.json_schema, answer.token_ids), (schema, answer.text)
        assert engine.tokenizer.decode(answer.token_ids, skip_special_tokens=True) == answer.text
    return num_finished


@pytest.mark.parametrize("mode", ["text", "exact"])
def test_outputs_of_some_schemas_validate(engine, compiler, mode):
    few = schemas()[::9]
    assert check_schemas(engine, compiler, mode, few, 60) > len(few) // 2


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["text", "exact", "off"])
def test_outputs_of_all_schemas_validate(engine, compiler, mode):
    assert check_schemas(engine, compiler, mode, schemas(), 150) > 80


@pytest.mark.parametrize("mode", ["text", "exact", "off"])
def test_outputs_of_regexes_and_grammars_match(engine, compiler, mode):
    asked = [("regex", pattern, pattern) for pattern in REGEXES] + [("ebnf", g, p) for g, p in EBNF.items()]
    params = [SamplingParams(**{kind: grammar}, jump_forward=mode, max_new_tokens=80, sampling_seed=3)
              for kind, grammar, _ in asked]  # fmt: skip
    answers = engine.generate(["q"] * len(params), params)
    assert sum(answer.finish_reason.type == "stop" for answer in answers) > len(answers) // 2
    for (kind, grammar, pattern), answer in zip(asked, answers, strict=True):
        if answer.finish_reason.type == "stop":
            assert regex.fullmatch(pattern, answer.text), (grammar, answer.text)
        assert is_beginning(compiler, kind, grammar, answer.token_ids)
