"""The compilation of grammars that constrain a request's output, on top of xgrammar.

A grammar comes from a caller, and may take any time and memory to compile. So an engine compiles in a process of its
own (`worker`), with limits, and takes the result from there (`restore`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import numpy as np

from ..sampling_params import SamplingParams
from .library import make_compiler
from .matcher import CompiledGrammar
from .schemas.check import check_schema, parse_json
from .schemas.patterns import anchor_fault, escape_fault, with_plain_patterns
from .schemas.references import with_plain_references
from .shortest_text import ENDLESS, ForcedBound, Rules
from .token_text import WRONG_SECOND_BYTES, can_be_text
from .vocabulary import Pieces, Vocabulary, pack_ids

Kind = Literal["json_schema", "regex", "ebnf", "structural_tag"]
ANY_JSON = "$$ANY$$"  # SGLang's value for a json_schema that allows every JSON value
_RAW_BYTES = 0  # the library's number of a vocabulary that is given as bytes
_NO_TEXT = b"\xff"  # a byte that is in no UTF-8
_MAX_TRIALS = 1_000_000  # about 0.3 s for one mask; JSON of any depth with a vocabulary of 65,000 has 83,000
_TRIAL_RULES = 50  # a trial costs as much as following so many rules that recur
_TOO_DEEP = "Nest layer exceeded the maximum limit"
_CODE_PLACE = re.compile(r"^\[[^\]]*\] \S+?:\d+: (Check failed: \(.*?\) is false: )?", re.DOTALL)


@dataclass(frozen=True)
class Constraint:
    """A grammar as the request gives it. Equal ones are compiled once."""

    kind: Kind
    text: str


def constraint_of(params: SamplingParams) -> Constraint | None:
    """Return the constraint that these parameters put on the output; None if there is none."""
    for kind in ("json_schema", "regex", "ebnf", "structural_tag"):
        if (text := getattr(params, kind)) is not None:
            return Constraint(kind, text)
    return None


class GrammarCompiler:
    """Compile constraints for one vocabulary. Thread-safe; other threads run meanwhile."""

    def __init__(
        self, library: Any, text: Pieces, stop_token_ids: Iterable[int], *, any_whitespace: bool = False
    ) -> None:
        """Prepare the vocabulary.

        stop_token_ids: tokens that a model may generate once the grammar has ended. any_whitespace: allow any spaces
        and line breaks in JSON; then hardly any text is forced.
        """
        pieces, vocab_size = text.pieces, len(text.pieces)
        stop_token_ids = tuple(sorted(id for id in set(stop_token_ids) if id < vocab_size))
        self._library, self._any_whitespace = library, any_whitespace
        # A token without text has a name in bytes that no text has, else the library would never allow it, also where
        # a structural tag names it. Everywhere else `silent` bans it.
        named = [piece or _NO_TEXT + str(id).encode() for id, piece in enumerate(pieces)]
        silent = pack_ids((i for i, piece in enumerate(pieces) if not piece and i not in stop_token_ids), vocab_size)
        self._info = library.TokenizerInfo(named, _RAW_BYTES, vocab_size, list(stop_token_ids), False)
        self._compiler = make_compiler(library, self._info)
        # The library takes any bytes of the right form for a character, and allows control characters in strings of
        # bounded length, which JSON does not.
        no_text = pack_ids((i for i, piece in enumerate(pieces) if not can_be_text(piece)), vocab_size) | silent
        controls = set(range(0x20)) - (set(b"\n\r") if any_whitespace else set())
        no_json = pack_ids((i for i, piece in enumerate(pieces) if not controls.isdisjoint(piece)), vocab_size)
        after_lead = {
            lead: pack_ids((i for i, piece in enumerate(pieces) if piece and piece[0] in wrong), vocab_size)
            for lead, wrong in WRONG_SECOND_BYTES.items()
        }
        byte_ids = np.full(256, -1, np.int64)
        for id, piece in enumerate(pieces):
            if len(piece) == 1:
                byte_ids[piece[0]] = id
        first_bytes = np.fromiter((piece[0] if piece else -1 for piece in pieces), np.int16, vocab_size)
        self.vocabulary = Vocabulary(
            library, text, stop_token_ids, no_text, no_text | no_json, silent, after_lead, byte_ids, first_bytes
        )

    def compile(self, constraint: Constraint) -> CompiledGrammar:
        """Compile a constraint. Raises ValueError with the error in the grammar and its position."""
        kind = constraint.kind
        try:
            compiled = self._compiled(constraint)
        except RuntimeError as error:  # the library's exception for an error in the grammar
            _refuse(kind, error)
        rules = Rules(str(compiled.grammar().serialize_json()))
        if rules.shortest_length < ENDLESS and (endless := rules.endless):
            raise ValueError(f"{kind}: no text can end that enters the rule {', '.join(endless[:5])}")
        if rules.nests:
            self._refuse_slow_masks(kind, compiled, rules.num_recursive)
        grammar = self._grammar(compiled, rules.bound(), rules.nests, constraint)
        start = grammar.matcher()
        if not start.is_complete and not start.mask().any():
            raise ValueError(f"{kind}: no text of this vocabulary can begin to match it")
        if rules.shortest_length >= ENDLESS:
            raise ValueError(f"{kind}: no text can match it, as each would have to go on without end")
        return grammar

    def _refuse_slow_masks(self, kind: Kind, compiled: Any, num_recursive: int) -> None:
        """Raise ValueError for a grammar with a place where the library would try too many tokens for one mask.

        It decides most tokens when it compiles, and tries the others, where a rule can end inside the token, each time.
        Trying is not interrupted. It takes about 6 to 15 us a token, and longer where many rules recur.
        """
        masks = json.loads(compiled.serialize_json())["adaptive_token_mask_cache"]
        most = max((len(mask["uncertain_indices"]) for _, mask in masks), default=0)
        if most * (_TRIAL_RULES + num_recursive) > _MAX_TRIALS:
            raise ValueError(
                f"{kind}: too ambiguous: at one place {most} tokens of {len(self.vocabulary.text.pieces)} can only be "
                "tried one by one; where a rule names itself to repeat, write * or +"
            )

    def restore(self, serialized: str, bound: ForcedBound, nests: bool, constraint: Constraint) -> CompiledGrammar:
        """Return the grammar whose serialised form and properties a compiler of the same vocabulary has made."""
        compiled = self._library.CompiledGrammar.deserialize_json(serialized, self._info)
        return self._grammar(compiled, bound, nests, constraint)

    def _grammar(self, compiled: Any, bound: ForcedBound, nests: bool, constraint: Constraint) -> CompiledGrammar:
        is_json, named = constraint.kind == "json_schema", named_tokens(constraint)
        return CompiledGrammar(self.vocabulary, compiled, bound, nests, is_json=is_json, named=named)

    def _compiled(self, constraint: Constraint) -> Any:
        kind, text, compiler = constraint.kind, constraint.text, self._compiler
        if kind == "regex":
            if (fault := escape_fault(text) or anchor_fault(text)) is not None:
                raise ValueError(f"regex: {fault}")
            return compiler.compile_regex(text)
        if kind == "ebnf":
            return compiler.compile_grammar_from_strings(text, "root")
        if kind == "structural_tag":
            tag = parse_json(text, kind)
            _check_tag(tag)
            return compiler.compile_structural_tag(_with_plain_schemas(tag, text))
        if text == ANY_JSON:
            text = "true"
        else:
            schema = parse_json(text, kind)
            check_schema(schema)
            if (plain := _plain(schema)) is not schema:
                text = json.dumps(plain)
        # No indent and the usual separators, nothing but the named properties, in their order.
        return compiler.compile_json_schema(text, self._any_whitespace, None, None, True, None, False)


def _parts_of(tag: object) -> Iterator[dict[str, Any]]:
    """Yield the objects in a structural tag, without those inside its schemas, whose properties may have any names."""
    todo = [tag]
    while todo:
        part = todo.pop()
        if isinstance(part, dict):
            yield part
            todo += [value for name, value in part.items() if name != "json_schema"]
        elif isinstance(part, list):
            todo += part


def _check_tag(tag: object) -> None:
    """Check the schemas and regular expressions of a structural tag. Raises ValueError."""
    for part in _parts_of(tag):
        if "json_schema" in part:
            try:
                check_schema(part["json_schema"])
            except ValueError as error:
                raise ValueError(f"structural_tag: {error}") from error
        pattern = part.get("pattern")
        if isinstance(pattern, str) and (fault := escape_fault(pattern) or anchor_fault(pattern)) is not None:
            raise ValueError(f"structural_tag: the pattern {pattern[:100]!r} {fault}")


def _plain(schema: Any) -> Any:
    """Return a checked schema with references and patterns that the library reads; itself if it has no others."""
    return with_plain_patterns(with_plain_references(schema))


def _with_plain_schemas(tag: object, text: str) -> str:
    """Return the text of a structural tag whose schemas have a form that the library reads. Changes the tag."""
    is_changed = False
    for part in _parts_of(tag):
        if "json_schema" in part and (plain := _plain(part["json_schema"])) is not part["json_schema"]:
            part["json_schema"], is_changed = plain, True
    return json.dumps(tag) if is_changed else text


def named_tokens(constraint: Constraint) -> frozenset[int]:
    """Return the token ids that a structural tag names: its `token` and `trigger_tokens`."""
    if constraint.kind != "structural_tag":
        return frozenset()
    found: set[int] = set()
    for part in _parts_of(json.loads(constraint.text)):
        for value in (part.get("token"), part.get("trigger_tokens")):
            listed = value if isinstance(value, list) else [value]
            found.update(id for id in listed if isinstance(id, int) and not isinstance(id, bool))
    return frozenset(found)


def _refuse(kind: Kind, error: RuntimeError) -> NoReturn:
    message = _CODE_PLACE.sub("", str(error)).strip()
    if _TOO_DEEP in message:  # at a place of the rules that the library makes of a pattern
        message = "nested too deeply"
    raise ValueError(f"{kind}: {message or 'the library refuses it without a reason'}") from error
