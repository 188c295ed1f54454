"""The shortest texts of a grammar's rules: whether each rule can end, and how much text a grammar can force at most.

A rule that needs itself in every alternative never ends. Where every rule ends, the text that a grammar forces at a
position is no longer than the shortest continuation there: the rest of each rule that is open. The rules that are open
without recursion add up to `base`; each level of recursion takes a byte of text or more, and adds at most `per_byte`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

ENDLESS = 2**62  # the length of a text that does not end
_LONGEST = 2**40  # lengths are counted up to here
# The library's numbers. The last three are about tokens, whatever they spell.
_STRING, _CLASS, _CLASS_STAR, _EMPTY, _RULE, _SEQUENCE, _CHOICES, _TAGS, _REPEAT = range(9)
_TOKEN, _OTHER_TOKENS, _TOKEN_TAGS = range(9, 12)


@dataclass(frozen=True)
class ForcedBound:
    """A bound of the length of forced text, in bytes."""

    base: int
    per_byte: int = 0  # further bytes for each byte of the text so far

    def after(self, num_bytes: int) -> int:
        """Return the bound after a text of this many bytes."""
        return self.base + self.per_byte * num_bytes


NO_TEXT = ForcedBound(0)
NO_BOUND = ForcedBound(ENDLESS)  # of a grammar that names tokens: what continues a text may be no text


class Rules:
    """The rules of a grammar, read from the library's JSON."""

    def __init__(self, grammar_json: str) -> None:
        grammar = json.loads(grammar_json)
        self.names = [rule[0] for rule in grammar["rules"]]
        self._bodies = [rule[1] for rule in grammar["rules"]]
        self._root = grammar["root_rule_id"]
        data, starts = grammar["grammar_expr_data"], grammar["grammar_expr_indptr"]
        # An expression is its type, the number of its values, and the values.
        self._expressions = [(data[start], data[start + 2 : start + 2 + data[start + 1]]) for start in starts]
        self._refers_to = [sorted(set(self._references(body))) for body in self._bodies]
        self._lengths = [ENDLESS] * len(self._bodies)
        self._find_lengths()

    @property
    def endless(self) -> list[str]:
        """The names of the rules that a text can enter and that never end."""
        seen, todo = {self._root}, [self._root]
        while todo:
            new = set(self._refers_to[todo.pop()]) - seen
            seen |= new
            todo += new
        return [self.names[rule] for rule in sorted(seen) if self._lengths[rule] >= ENDLESS]

    @property
    def shortest_length(self) -> int:
        """The length of the shortest text that matches, in bytes; `ENDLESS`: none."""
        return self._lengths[self._root]

    @property
    def nests(self) -> bool:
        """Whether a rule recurs anywhere but at the end of an alternative: then the library may keep ever more
        positions at a time, and a byte of text may cost any time."""
        groups = self._recursive_groups()
        for rule, body in enumerate(self._bodies):
            for sequence in self._sequences(body) if groups[rule] else ():
                *inner, last = self._parts(sequence)
                inner += [last] if self._expressions[last][0] == _REPEAT else []
                if any(groups[rule] & set(self._references(part)) for part in inner):
                    return True
        return False

    @property
    def num_recursive(self) -> int:
        """The number of rules that need themselves, at once or through others."""
        return sum(map(bool, self._recursive_groups()))

    def bound(self) -> ForcedBound:
        """Return the bound of the text that this grammar forces; `NO_BOUND` for one that names tokens."""
        if any(kind in (_TOKEN, _OTHER_TOKENS, _TOKEN_TAGS) for kind, _ in self._expressions):
            return NO_BOUND
        groups = self._recursive_groups()
        base = per_byte = 0
        for rule, body in enumerate(self._bodies):
            longest = longest_rest = 0  # of its alternatives; behind a part that recurs
            for part in self._sequences(body):
                longest = max(longest, self._length(part))
                inside = [self._once(one) for one in self._parts(part) if groups[rule] & set(self._references(one))]
                if inside:
                    longest_rest = max(longest_rest, self._length(part) - min(inside))
            base, per_byte = base + longest, per_byte + longest_rest
        return ForcedBound(base, per_byte)

    def _find_lengths(self) -> None:
        used_by: list[list[int]] = [[] for _ in self._bodies]
        for rule, others in enumerate(self._refers_to):
            for other in others:
                used_by[other].append(rule)
        todo = list(range(len(self._bodies)))
        waiting = set(todo)
        while todo:
            rule = todo.pop()
            waiting.discard(rule)
            length = self._length(self._bodies[rule])
            if length < self._lengths[rule]:
                self._lengths[rule] = length
                new = set(used_by[rule]) - waiting
                waiting |= new
                todo += new

    def _length(self, expression: int) -> int:
        """Return the length of the expression's shortest text, by the lengths of the rules so far."""
        kind, values = self._expressions[expression]
        if kind == _STRING:
            return len(values)
        if kind == _RULE:
            return self._lengths[values[0]]
        if kind == _SEQUENCE:
            return _counted(sum(self._length(one) for one in values))
        if kind == _CHOICES:
            return min((self._length(one) for one in values), default=ENDLESS)
        if kind == _REPEAT:
            return _counted(self._lengths[values[0]] * values[1])
        return 0 if kind in (_CLASS_STAR, _EMPTY, _TAGS, _TOKEN_TAGS) else 1

    def _once(self, expression: int) -> int:
        """Return `_length`; of a repetition, that of one repeat."""
        kind, values = self._expressions[expression]
        return self._lengths[values[0]] if kind == _REPEAT else self._length(expression)

    def _parts(self, expression: int) -> Sequence[int]:
        kind, values = self._expressions[expression]
        return values if kind == _SEQUENCE else [expression]

    def _sequences(self, expression: int) -> Iterator[int]:
        """Yield the alternatives of an expression, and those inside them."""
        kind, values = self._expressions[expression]
        if kind == _CHOICES:
            for one in values:
                yield from self._sequences(one)
            return
        yield expression
        for one in values if kind == _SEQUENCE else ():
            if self._expressions[one][0] in (_CHOICES, _SEQUENCE):
                yield from self._sequences(one)

    def _references(self, expression: int) -> Iterator[int]:
        """Yield the rules that an expression names."""
        kind, values = self._expressions[expression]
        if kind in (_RULE, _REPEAT):
            yield values[0]
        elif kind in (_SEQUENCE, _CHOICES):
            for one in values:
                yield from self._references(one)
        elif kind == _TAGS:  # pairs of a trigger and a rule, then two settings
            yield from values[1:-2:2]
        elif kind == _TOKEN_TAGS:  # the number of pairs, and the pairs
            yield from values[2 : 1 + 2 * values[0] : 2]

    def _recursive_groups(self) -> list[set[int]]:
        """Return for each rule the rules that it needs and that need it; empty if it does not recur. (Tarjan's
        algorithm, without recursion.)"""
        groups: list[set[int]] = [set() for _ in self._bodies]
        index: dict[int, int] = {}
        low: dict[int, int] = {}
        stack: list[int] = []
        on_stack: set[int] = set()
        for start in range(len(self._bodies)):
            work = [] if start in index else [(start, iter(self._refers_to[start]))]
            while work:
                rule, rest = work[-1]
                if rule not in index:
                    index[rule] = low[rule] = len(index)
                    stack.append(rule)
                    on_stack.add(rule)
                for other in rest:
                    if other not in index:
                        work.append((other, iter(self._refers_to[other])))
                        break
                    if other in on_stack:
                        low[rule] = min(low[rule], index[other])
                else:
                    work.pop()
                    if work:
                        low[work[-1][0]] = min(low[work[-1][0]], low[rule])
                    if low[rule] == index[rule]:
                        group = {stack.pop()}
                        while rule not in group:
                            group.add(stack.pop())
                        on_stack -= group
                        if len(group) > 1 or rule in self._refers_to[rule]:
                            for member in group:
                                groups[member] = group
        return groups


def _counted(length: int) -> int:
    return ENDLESS if length >= ENDLESS else min(length, _LONGEST)
