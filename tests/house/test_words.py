"""Docstrings and comments in plain English: a first sentence of a verb and its object, and none of a few words."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.tests.house.statements import statements

ROOT = Path(__file__).parents[2]
ROOMS = ("rollout", "weight_sync", "integration", "kernels", "examples")
FILES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
# Words that a docstring does not begin with: what follows is no object of a verb, and no name of a thing.
NO_BEGINNINGS = {"what", "who", "whoever", "nobody", "somebody", "everybody", "those", "likewise"}
# A docstring says "Send the weights", not "Sends the weights". Before a preposition some of these are nouns.
THIRD_PERSON = re.compile(
    "adds|answers|applies|asks|builds|calls|checks|closes|compares|computes|connects|converts|copies|counts|creates|"
    "decides|divides|draws|gets|gives|has|holds|is|keeps|lists|loads|makes|maps|opens|owns|passes|pauses|picks|pushes|"
    "raises|reads|receives|records|removes|returns|runs|sends|serves|sets|starts|stops|stores|takes|tells|tests|"
    "tracks|turns|waits|wraps|writes|yields"
)
PREPOSITIONS = {"about", "at", "between", "by", "from", "in", "of", "on", "that", "to", "with"}
# Metaphors, and pronouns that stand for a thing which has a name; docs/glossary.md has the words that we use.
NO_WORDS = re.compile(r"\b(nobody|whoever|everybody|somebody|in the air|shelved?|landed|lands?)\b", re.IGNORECASE)


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield every docstring with the line of what it documents."""
    for node in statements(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield getattr(node, "lineno", 1), text


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield every comment with its line."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def begins_badly(text: str) -> bool:
    """Return whether a docstring begins with no verb in the imperative and with no name of a thing."""
    first, second = (*text.split(), "", "")[:2]
    word = re.sub(r"\W", "", first).lower()
    return bool(
        word in NO_BEGINNINGS
        or first.endswith(":")  # an argument's name, or a verb without its object
        or (word == "as" and second != "of")
        or (word == "one" and second in {"that", "which", "so"})
        or (THIRD_PERSON.fullmatch(word) and second not in PREPOSITIONS)
    )


def riddles(source: str) -> list[str]:
    """List the lines of a module whose docstring or comment breaks these rules, with the word that does."""
    found: list[str] = []
    written = list(docstrings(ast.parse(source)))
    found += [f"{line}: begins with {text.split()[0]!r}" for line, text in written if begins_badly(text)]
    # Reading the comments takes long, so only where a word of the list stands somewhere.
    said = comments(source) if NO_WORDS.search(source) else ()
    for line, text in (*written, *said):
        found += [f"{line}: {match.group()!r}" for match in NO_WORDS.finditer(text)]
    return found


def test_docstrings_begin_with_a_verb_or_a_noun_and_no_word_is_a_riddle():
    wrong = {str(path.relative_to(ROOT)): riddles(path.read_text(encoding="utf-8")) for path in FILES}
    assert len(FILES) > 300
    assert {path: lines for path, lines in wrong.items() if lines} == {}


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ('def f():\n    """What each rank said."""', "What"),
        ('"""Steps of an engine. Nobody waits for them."""', "Nobody"),
        ('class A:\n    """Sends weights."""', "Sends"),
        ('def f():\n    """Raises ValueError."""', "Raises"),
        ('def f():\n    """seed: of the noise."""', "seed:"),
        ('def f():\n    """As torch takes it."""', "As"),
        ('def f():\n    """One that may never come."""', "One"),
        ("x = 1  # while a step is in the air", "in the air"),
    ],
)
def test_a_riddle_is_found(source, word):
    [line] = riddles(source)
    assert word in line


def test_plain_sentences_pass():
    assert riddles('def f():\n    """Return each rank\'s answer."""\n    return 1  # the first one') == []
