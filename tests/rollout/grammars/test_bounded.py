"""Tests of schemas whose texts of bounded length hold no control characters."""

from __future__ import annotations

from lockstep.rollout.grammars.schemas.bounded import without_control_characters

CHARACTER = r'[^"\\\x00-\x1f]'


def test_a_pattern_stands_in_the_place_of_the_bounds():
    assert without_control_characters({"type": "string", "maxLength": 3}) == {
        "type": "string", "pattern": "^" + CHARACTER + "{0,3}$"
    }  # fmt: skip
    assert without_control_characters({"type": ["string", "null"], "minLength": 2})["pattern"].endswith("{2,}$")


def test_values_and_names_of_properties_stay_and_so_do_bounds_of_very_long_texts():
    schema = {
        "type": "object", "properties": {"maxLength": {"const": {"maxLength": 2}}, "b": {"$ref": "#/$defs/c"}},
        "$defs": {"c": {"type": "string", "maxLength": 5000}, "d": {"type": "string", "minLength": 0}},
    }  # fmt: skip
    assert without_control_characters(schema) == schema
