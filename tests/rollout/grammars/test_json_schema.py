"""Refusal, with the position, of schemas that the grammar engine would follow only in part."""

from __future__ import annotations

import pytest

from lockstep.rollout.grammars.schemas.check import check_schema, parse_json

FINE = [
    {},
    {"type": "object", "properties": {"a": {"type": "integer", "minimum": 0}}, "required": ["a"]},
    {"properties": {"a": {"type": ["string", "null"], "maxLength": 3}}},
    {"type": "array", "items": {"anyOf": [{"type": "null"}, {"$ref": "#"}]}, "minItems": 1},
    {"$defs": {"a/b": {"const": 1}}, "type": "object", "properties": {"x": {"$ref": "#/$defs/a~1b"}}},
    {"type": "string", "enum": ["a", "b"], "description": "x", "default": "a"},
    {"oneOf": [{"type": "string"}, {"type": "integer"}, {"type": "null"}]},
    {"oneOf": [{"type": "object", "properties": {"k": {"const": c}, "v": {}}, "required": ["k"]} for c in "ab"]},
    {"type": "integer", "multipleOf": 5},
    {"type": "string", "pattern": r'^[^"]+\.\d{2}$|^x$'},
    {"type": "string", "pattern": r"(?:a|[(?!+][?+*]+)\(\?a*?[[:]\d+\.+[a]+(?<y>\d{4})a}+"},
    {"type": "object", "patternProperties": {"^a": {"type": "null"}}, "additionalProperties": False},
    {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 1},
    {"type": "object", "propertyNames": {"pattern": "^a+$"}},
    {"uniqueItems": False, "type": "array", "items": {}},
    {
        "oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}],
        "$defs": {
            name: {"type": "object", "properties": {"kind": {"const": name}}, "required": ["kind"]} for name in "AB"
        },
    },
    {"type": "object", "propertyNames": {"$ref": "#/$defs/name"}, "$defs": {"name": {"enum": ["a", "b"]}}},
    {"type": "integer", "multipleOf": 3.0},
    {"type": "integer", "multipleOf": 1024},
    {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
    {"type": "number", "minimum": -1e300, "maximum": 1e300},
    {"type": "number", "minimum": 0.3, "maximum": 0.3},
    {"type": "number", "minimum": -0.1234575, "maximum": -0.1234565},
    {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 2e-6},
    {"type": "number", "exclusiveMinimum": 1e9, "maximum": 1e20},
    {"type": "integer", "exclusiveMinimum": 2**60},
    {"enum": [2**63 - 1, -(2**63), 1.5]},
    {"$ref": "#"} | {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
]
WRONG = [
    ({"type": "array", "items": {}, "uniqueItems": True}, "#/uniqueItems is not supported"),
    ({"properties": {"a": {"not": {}}}}, "#/properties/a/not is not supported"),
    ({"if": {}, "then": {}}, "#/if is not supported; #/then"),
    ({"minimum": 3}, '#/minimum needs "type": "number"'),
    ({"pattern": "a"}, '#/pattern needs "type": "string"'),
    ({"type": "integer", "multipleOf": 5, "maximum": 9}, "#/multipleOf is supported"),
    ({"type": "number", "multipleOf": 0.5}, "#/multipleOf is supported"),
    ({"type": "string", "pattern": "a", "maxLength": 3}, "#/pattern cannot stand beside maxLength"),
    ({"type": "string", "pattern": 'a"b'}, "quotes"),
    ({"type": "string", "pattern": r"a\\b"}, "backslashes"),
    ({"type": "string", "pattern": r"a\nb"}, "control characters"),
    ({"type": "string", "pattern": "a^b"}, "middle"),
    ({"type": "string", "pattern": "(?!b)b"}, r"has a group \(\?!b, which is not supported"),
    ({"type": "string", "pattern": "x(?=a)a"}, r"group \(\?=a"),
    ({"type": "string", "pattern": "(?i)abc"}, r"group \(\?i"),
    ({"type": "string", "pattern": "(?P<n>a)"}, r"group \(\?P"),
    ({"type": "string", "pattern": "a++"}, "possessive quantifier"),
    ({"type": "string", "pattern": "a{2,}+"}, "possessive quantifier"),
    ({"type": "string", "pattern": r"\Aab\Z"}, r"has \\A, which is not supported"),
    ({"type": "object", "patternProperties": {"(?!b)b": {}}}, r"#/patternProperties '\(\?!b\)b' has a group"),
    (
        {"type": "object", "patternProperties": {"a": {}, "^a$": {"type": "null"}}},
        "one pattern twice, written in two",
    ),
    ({"type": "string", "pattern": r"a|[^\s\S]"}, r"has \[\^\\s\\S\], which no character of a JSON string matches"),
    ({"type": "string", "pattern": r"[^!#-\u{10ffff}\x00-\x20]."}, "which no character of a JSON string matches"),
    ({"type": "string", "pattern": "a$b"}, "middle"),
    ({"type": "string", "format": "color"}, "#/format 'color'"),
    ({"type": "object", "required": ["b"], "properties": {"a": {}}}, "#/required names 'b'"),
    ({"allOf": [{"type": "integer"}, {"minimum": 3}]}, "#/allOf is supported with one"),
    ({"anyOf": [{}], "required": ["a"], "properties": {"a": {}}}, "#/anyOf cannot stand beside"),
    ({"$ref": "#/$defs/a", "minimum": 3, "$defs": {"a": {}}}, "#/\\$ref cannot stand beside minimum"),
    ({"type": "integer", "enum": [1, "a"]}, "#/enum holds 'a'"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "#/oneOf/1 may hold together"),
    ({"oneOf": [{"const": 1}, {"enum": [2, 1.0]}]}, "#/oneOf/1 may hold together"),
    ({"$ref": "other.json"}, "not inside this schema"),
    ({"$ref": "#/$defs/b", "$defs": {"a": {}}}, "points nowhere"),
    ({"items": 3}, "#/items is integer, not a schema"),
    ({"type": "object", "additionalProperties": True, "minProperties": 2}, "#/minProperties"),
    ({"type": "object", "propertyNames": {"maxLength": 2}, "properties": {"a": {}}}, "#/propertyNames"),
    (3, "# is integer"),
    ({"properties": {"a": {"type": "any"}}}, '#/properties/a/type "any" is none of string, integer'),
    ({"type": ["string", None]}, "#/type null is none of"),
    ({"type": []}, r"#/type \[\] is none of"),
    ({"enum": []}, r"#/enum must be a list with a member, not \[\]"),
    ({"anyOf": []}, "#/anyOf must be a list with a member"),
    ({"type": "object", "required": "a", "properties": {"a": {}}}, '#/required must be a list of names, not "a"'),
    ({"properties": []}, "#/properties must be an object"),
    ({"type": "integer", "minimum": "3"}, '#/minimum must be a number, not "3"'),
    ({"type": "string", "minLength": -1}, "#/minLength must be an integer from 0, not -1"),
    ({"type": "array", "items": {}, "maxItems": True}, "#/maxItems must be an integer from 0, not true"),
    ({"type": "string", "pattern": 3}, "#/pattern must be a text, not 3"),
    ({"$ref": "#/x/A", "x": {"A": {"type": "array", "uniqueItems": True}}}, "#/x/A/uniqueItems is not supported"),
    ({"properties": {"a": {"$ref": "#/x"}}, "x": {"$ref": "#/y"}, "y": {"minimum": 1}}, "#/y/minimum needs"),
    ({"type": "object", "unevaluatedProperties": {"minimum": 1}}, "#/unevaluatedProperties/minimum needs"),
    ({"type": "object", "minProperties": 2, "unevaluatedProperties": {}}, "#/minProperties over 1"),
    ({"type": "integer", "multipleOf": 1025}, "#/multipleOf is enforced up to 1024 only, not 1025"),
    ({"type": "integer", "multipleOf": 10**400}, "#/multipleOf is enforced up to 1024 only, not 1000"),
    ({"type": "integer", "minimum": 10**400}, "#/minimum must be within int64 or float64, not 1000"),
    ({"type": "integer", "exclusiveMaximum": -(2**63) - 1}, "#/exclusiveMaximum must be within int64"),
    ({"type": "number", "maximum": float("inf")}, "#/maximum must be within int64 or float64, not Infinity"),
    (
        {"type": "number", "minimum": 1e-7, "maximum": 2e-7},
        "#/minimum and maximum leave no number of at most 6 decimals",
    ),
    ({"type": ["number", "null"], "exclusiveMinimum": 0, "maximum": 5e-7}, "#/maximum and exclusiveMinimum leave no"),
    ({"type": "number", "minimum": -0.1234568, "maximum": -0.1234561}, "leave no number of at most 6 decimals"),
    ({"type": "number", "exclusiveMinimum": 3, "exclusiveMaximum": 3.000001}, "leave no number"),
    ({"type": "number", "minimum": 0.333333333333, "maximum": 0.333333333334}, "leave no number"),
    ({"type": "number", "exclusiveMinimum": 1e20}, r"#/exclusiveMinimum 1e\+20 is too large"),
    ({"type": "number", "exclusiveMaximum": -(2**35)}, "#/exclusiveMaximum -34359738368 is too large"),
    (
        {"type": "number", "minimum": 0, "exclusiveMaximum": 9999999990.00001},
        "#/exclusiveMaximum 9999999990.00001 is too",
    ),
    ({"type": "string", "maxLength": 10**400}, "#/maxLength must be within int64 or float64, not 1000"),
    ({"type": "integer", "multipleOf": 2.5}, "#/multipleOf must be a positive whole number, not 2.5"),
    ({"type": "integer", "multipleOf": float("inf")}, "#/multipleOf must be a positive whole number"),
    ({"const": 2**63}, "#/const holds a number beyond int64"),
    ({"enum": [1, {"a": [-(2**63) - 1]}]}, "#/enum holds a number beyond int64"),
    ({"const": float("inf")}, "#/const holds a number beyond"),
]


@pytest.mark.parametrize("schema", FINE)
def test_what_is_enforced_is_taken(schema):
    check_schema(schema)


@pytest.mark.parametrize(("schema", "why"), WRONG)
def test_what_is_not_enforced_is_refused_with_its_place(schema, why):
    with pytest.raises(ValueError, match=why):
        check_schema(schema)


def test_everything_wrong_is_named_at_once():
    with pytest.raises(ValueError, match=r"#/properties/a/minimum.*#/properties/b/uniqueItems"):
        check_schema({"properties": {"a": {"minimum": 1}, "b": {"type": "array", "uniqueItems": True}}})


def test_json_that_cannot_be_read_is_quoted_with_its_place():
    with pytest.raises(ValueError, match=r"json_schema: .* at line 2, column 1"):
        parse_json('{"a":\n', "json_schema")
    with pytest.raises(ValueError, match="nested more than 64 levels"):
        parse_json("[" * 65 + "]" * 65, "x")
    assert parse_json("[" * 60 + "]" * 60, "x")
