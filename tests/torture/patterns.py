"""Random and hostile grammars: JSON schemas, regular expressions, EBNF, structural tags and stop patterns."""

from __future__ import annotations

import json
import random
from typing import Any

from lockstep.tests.torture.attackers import Attacker

ATOMS = ("a", "b", "[a-z]", "[^x]", r"\d", r"\w", ".", "é", r"\x41", r"\p{L}", "^", "$", r"\b", "(?i)", "(?=a)", r"\1")
REPEATS = ("*", "+", "?", "{2}", "{0,3}", "{3,}", "{0}", "{1000}", "{100000}", "*?", "++", "{9,1}")
TYPES = ("string", "integer", "number", "boolean", "null", "object", "array")
# A server may compile one grammar after another, ours for 20 s each, and other attackers send some besides.
PATIENCE_S = 180.0
SYMBOLS = "(){}[]|*+?.\\^$\"'<>:=, \n\x00é\U0001f600"


def random_regex(draw: random.Random, depth: int = 3) -> str:
    """Draw a regular expression, mostly a valid one."""
    if depth == 0:
        return draw.choice(ATOMS)
    parts = [random_regex(draw, depth - 1) for _ in range(draw.randint(1, 4))]
    opening, closing = draw.choice([("", ""), ("(", ")"), ("(?:", ")")])
    return opening + draw.choice(["", "|"]).join(parts) + closing + draw.choice(["", "", draw.choice(REPEATS)])


def random_schema(draw: random.Random, depth: int = 3) -> Any:
    """Draw a JSON schema, mostly a valid one."""
    kind = draw.choice(TYPES if depth else TYPES[:5])
    schema: dict[str, Any] = {"type": kind}
    if kind == "string":
        schema |= draw.choice([{}, {"pattern": random_regex(draw, 2)}, {"maxLength": draw.choice([0, 3, 10**6])},
                               {"enum": ["a", "b"]}, {"format": draw.choice(["date", "email", "none"])}])  # fmt: skip
    elif kind in ("integer", "number"):
        schema |= draw.choice([{}, {"minimum": draw.randint(-9, 9)}, {"maximum": 10**draw.choice([1, 18, 300])},
                               {"multipleOf": 3}])  # fmt: skip
    elif kind == "object":
        names = draw.sample("abcdefgh", draw.randint(0, 4))
        schema["properties"] = {name: random_schema(draw, depth - 1) for name in names}
        schema["required"] = draw.sample(names, draw.randint(0, len(names)))
        schema["additionalProperties"] = draw.choice([True, False])
    elif kind == "array":
        schema |= {"items": random_schema(draw, depth - 1), "minItems": draw.choice([0, 1, 3, 10**9])}
    if depth and draw.random() < 0.2:
        return {draw.choice(["anyOf", "oneOf", "allOf"]): [schema, random_schema(draw, depth - 1)]}
    return {"$ref": draw.choice(["#", "#/properties/a", "#/none"])} if draw.random() < 0.03 else schema


def random_ebnf(draw: random.Random) -> str:
    """Draw an EBNF grammar of a few rules that call each other."""
    names = ["root", *(f"r{i}" for i in range(draw.randint(0, 5)))]

    def body() -> str:
        parts = [draw.choice([*names, '"a"', '"b"', "[a-z]", "[^a]", '""']) for _ in range(draw.randint(1, 4))]
        parts = [part + draw.choice(["", "", "*", "+", "?", "{2,5}"]) for part in parts]
        return draw.choice([" ", " | "]).join(parts)

    return "\n".join(f"{name} ::= {body()}" for name in names)


def mutated(draw: random.Random, text: str) -> str:
    """Change a few places of a text."""
    for _ in range(draw.randint(1, 4)):
        at = draw.randint(0, len(text))
        piece = text[at : at + draw.randint(0, 5)]
        text = text[:at] + draw.choice([draw.choice(SYMBOLS), piece * draw.choice([2, 50]), ""]) + text[at + 1 :]
    return text


def valid(draw: random.Random) -> dict[str, Any]:
    """Draw a constraint that is meant to be valid."""
    kind = draw.choice(["json_schema", "regex", "ebnf", "structural_tag", "stop_regex"])
    if kind == "json_schema":
        return {kind: json.dumps(random_schema(draw))}
    if kind == "ebnf":
        return {kind: random_ebnf(draw)}
    if kind == "structural_tag":
        structure = {"begin": "<f>", "schema": random_schema(draw, 2), "end": "</f>"}
        return {kind: json.dumps({"type": "structural_tag", "structures": [structure], "triggers": ["<f"]})}
    if kind == "stop_regex":
        return {kind: [random_regex(draw) for _ in range(draw.choice([1, 1, 8, 40]))]}
    return {kind: random_regex(draw)}


def _schema(**fields: Any) -> dict[str, Any]:
    return {"json_schema": json.dumps(fields)}


def _stop_power(draw: random.Random, count: int) -> dict[str, Any]:
    return {"stop_regex": f"(?:(?:(?:x?){{{count}}}){{{count}}}){{{count}}}y"}


def _many(draw: random.Random, count: int) -> dict[str, Any]:
    rules = [f'{f"r{i}" if i else "root"} ::= "a" r{i + 1}' for i in range(count)]
    return draw.choice([
        _schema(oneOf=[{"enum": [f"a{i}" for i in range(count)]}, {"enum": [f"b{i}" for i in range(count)]}]),
        _schema(type="object", properties={f"p{i}": {"type": "string"} for i in range(count)}),
        {"regex": "|".join(f"w{i}x" for i in range(count))},
        {"ebnf": "\n".join([*rules, f'r{count} ::= "b"'])},
        {"stop_regex": [f"x{i}(a|b)*c" for i in range(count)]},
    ])  # fmt: skip


def _endless(draw: random.Random, count: int) -> dict[str, Any]:
    itself = {"$ref": "#"}
    return draw.choice([
        {"ebnf": 'root ::= "a" root'}, {"ebnf": "root ::= r0\nr0 ::= r1 root\nr1 ::= [a-z] | r1 r1"},
        {"ebnf": 'root ::= ("a" | "b") root'}, {"regex": f"a{{{count * 1000}}}"}, {"regex": f"(ab?){{{count},}}"},
        _schema(type="object", properties={"a": itself}, required=["a"]),
        _schema(type="array", items=itself, minItems=1),
        _schema(type="array", items={"type": "null"}, minItems=count * 1000),
        _schema(type="string", minLength=count * 1000), _schema(const="x" * count * 10),
    ])  # fmt: skip


def _nested(draw: random.Random, count: int) -> dict[str, Any]:
    opening, inner, closing = draw.choice([("(", "a", ")"), ("[", "a", "]"), ("(?:", "a", ")*"), ("(a|", "b", ")")])
    text = opening * count + inner + closing * count
    return draw.choice([
        _schema(type="string", pattern=text), _schema(type="object", propertyNames={"pattern": text}),
        _schema(type="object", patternProperties={text: {}}), {"regex": text}, {"ebnf": f"root ::= {text}"},
        {"stop_regex": text[:250]}, {"json_schema": '{"items":' * count + "{}" + "}" * count},
        {"json_schema": '{"not":' * count + "{}" + "}" * count},
        {"structural_tag": '{"a":' * count + "1" + "}" * count},
    ])  # fmt: skip


def _quadratic(draw: random.Random, count: int) -> dict[str, Any]:
    text = draw.choice(["[^", "(?", "\\", "[a-", "{1,", "[[:"]) * count
    return draw.choice([_schema(type="string", pattern=text), {"regex": text}, {"ebnf": f"root ::= {text}"}])


# Ways that have ended or frozen an engine, and the sizes to draw from: small ones, and those that did.
KILLERS = (
    (_nested, (50, 1000, 10_000, 30_000)), (_endless, (10, 100, 10_000)), (_stop_power, (10, 40, 70, 100, 300)),
    (_quadratic, (100, 5_000, 20_000, 80_000)), (_many, (50, 500, 2_000, 9_000)),
)  # fmt: skip


class Patterns(Attacker):
    """Ask for generation under random, mutated and hostile grammars."""

    name = "patterns"
    num_lanes = 3

    def step(self, draw: random.Random) -> None:
        kind = draw.randrange(3)
        if kind == 0:
            make, sizes = draw.choice(KILLERS)
            size = draw.choice(sizes)
            params, name = make(draw, size), f"{make.__name__.strip('_')} {size}"
        else:
            params, name = valid(draw), "valid"
            if kind == 2:
                [(key, value)] = params.items()
                params = {key: [mutated(draw, x) for x in value] if isinstance(value, list) else mutated(draw, value)}
                name = "mutated"
        self.ask(draw, f"{name} {next(iter(params))}", params)

    def ask(self, draw: random.Random, name: str, params: dict[str, Any]) -> None:
        """Send the constraint by one of the ways that a server takes it."""
        limits = {"max_new_tokens": draw.choice([1, 8, 40]), "sampling_seed": 1}
        if "json_schema" in params and draw.random() < 0.3 and self.scene.has("/v1/completions"):
            try:
                schema = json.loads(params["json_schema"])
            except (ValueError, RecursionError):
                schema = params["json_schema"]
            wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
            body = {"model": "", "prompt": "q", "max_tokens": 8, "response_format": wanted}
            try:
                self.wire.call("POST", "/v1/completions", body, name=name, patience_s=PATIENCE_S)
            except RecursionError:
                return  # our own encoder refuses it
            return
        if self.scene.is_lockstep and draw.random() < 0.5:
            limits["jump_forward"] = draw.choice(["text", "exact", "off"])
        body = {"text": "q", "sampling_params": limits | params}
        self.wire.call("POST", "/generate", body, name=name, patience_s=PATIENCE_S)
