"""The statements of a program, without the expressions in them, which are nine tenths of its syntax tree."""

from __future__ import annotations

import ast
from collections.abc import Iterator

_BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and all statements in it, with the clauses of `try` and `match`."""
    yield node
    for name in _BLOCKS:
        inner = getattr(node, name, ())
        for child in inner if isinstance(inner, list) else ():  # the body of an expression is one node
            yield from statements(child)
