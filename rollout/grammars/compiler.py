"""Grammars that constrain a request's output, and matchers that follow one token by token, on top of xgrammar.

Only this file knows that library, and imports it with the first grammar. It asks the library for masks, for the forced
text, and for rollbacks; `jump_forward` chooses the tokens of a forced text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import numpy as np

from ..sampling_params import SamplingParams
from .json_schema import check_schema, parse_json
from .token_text import WRONG_SECOND_BYTES, TokenText, can_be_text

Kind = Literal["json_schema", "regex", "ebnf", "structural_tag"]
ANY_JSON = "$$ANY$$"  # SGLang's value for a json_schema that allows every JSON value
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

    def __init__(self, text: TokenText, stop_token_ids: Iterable[int], *, any_whitespace: bool = False) -> None:
        """Prepare the vocabulary. Raises ValueError if the library is not installed.

        stop_token_ids: tokens that a model may generate once the grammar has ended. any_whitespace: allow any spaces
        and line breaks in JSON; then hardly any text is forced.
        """
        self.text = text
        self._xgrammar = _library()
        self.stop_token_ids = tuple(sorted(id for id in set(stop_token_ids) if id < len(text.pieces)))
        info = self._xgrammar.TokenizerInfo(
            text.pieces, self._xgrammar.VocabType.RAW, vocab_size=len(text.pieces),
            stop_token_ids=list(self.stop_token_ids),
        )  # fmt: skip
        self._compiler = self._xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._any_whitespace = any_whitespace
        pieces, vocab_size = text.pieces, len(text.pieces)
        # The library takes any bytes of the right form for a character, and allows control characters in strings of
        # bounded length, which JSON does not.
        self._no_text = pack_ids((i for i, piece in enumerate(pieces) if not can_be_text(piece)), vocab_size)
        controls = set(range(0x20)) - (set(b"\n\r") if any_whitespace else set())
        no_json = pack_ids((i for i, piece in enumerate(pieces) if not controls.isdisjoint(piece)), vocab_size)
        self._no_json = self._no_text | no_json
        self._after_lead = {
            lead: pack_ids((i for i, piece in enumerate(pieces) if piece and piece[0] in wrong), vocab_size)
            for lead, wrong in WRONG_SECOND_BYTES.items()
        }

    def compile(self, constraint: Constraint) -> CompiledGrammar:
        """Compile a constraint. Raises ValueError with the error in the grammar and its position."""
        try:
            compiled = self._compiled(constraint)
        except RuntimeError as error:  # the library's exception for an error in the grammar
            _refuse(constraint.kind, error)
        banned = self._no_json if constraint.kind == "json_schema" else self._no_text
        grammar = CompiledGrammar(self._xgrammar, compiled, self.text, self.stop_token_ids, banned, self._after_lead)
        start = grammar.matcher()
        if not start.is_complete and not start.mask().any():
            raise ValueError(f"{constraint.kind}: no text of this vocabulary can begin to match it")
        return grammar

    def _compiled(self, constraint: Constraint) -> Any:
        kind, text, compiler = constraint.kind, constraint.text, self._compiler
        if kind == "regex":
            return compiler.compile_regex(text)
        if kind == "ebnf":
            return compiler.compile_grammar(text)
        if kind == "structural_tag":
            parse_json(text, kind)
            return compiler.compile_structural_tag(text)
        if text == ANY_JSON:
            return compiler.compile_json_schema("true", any_whitespace=self._any_whitespace)
        check_schema(parse_json(text, kind))
        return compiler.compile_json_schema(text, any_whitespace=self._any_whitespace)


class CompiledGrammar:
    """A grammar that any number of sequences follow. Immutable."""

    def __init__(
        self,
        library: Any,
        compiled: Any,
        text: TokenText,
        stop_token_ids: Sequence[int],
        banned: np.ndarray,
        after_lead: Mapping[int, np.ndarray],
    ) -> None:
        self._library, self._compiled, self._text = library, compiled, text
        self._banned, self._after_lead = banned, after_lead
        self.stop_token_ids = stop_token_ids

    @property
    def num_bytes(self) -> int:
        """Approximate size in memory."""
        return int(self._compiled.memory_size_bytes)

    def matcher(self) -> GrammarMatcher:
        """Create a matcher at the beginning of the grammar."""
        matcher = self._library.GrammarMatcher(self._compiled)
        row = self._library.allocate_token_bitmask(1, len(self._text.pieces))
        return GrammarMatcher(matcher, row, self._text, self._banned, self._after_lead)


class GrammarMatcher:
    """The position of one sequence in its grammar. Not thread-safe."""

    def __init__(
        self, matcher: Any, row: Any, text: TokenText, banned: np.ndarray, after_lead: Mapping[int, np.ndarray]
    ) -> None:
        """Create a matcher that has accepted no token.

        row: int32 [1, ceil(V / 32)], filled anew for each mask. banned: a mask of tokens that are never allowed.
        after_lead: masks of tokens that are not allowed after this byte.
        """
        self._matcher, self._row, self._bits = matcher, row, row.numpy()
        self._text, self._banned, self._after_lead = text, banned, after_lead
        self._last_bytes: list[int] = []  # last byte of each accepted token

    @property
    def is_complete(self) -> bool:
        """Whether the text so far matches the grammar; the grammar may allow more."""
        return bool(self._matcher.is_completed())

    @property
    def has_stopped(self) -> bool:
        """Whether a stop token was accepted: no token follows."""
        return bool(self._matcher.is_terminated())

    def accept(self, token_id: int) -> bool:
        """Accept one more token; returns whether the grammar allows it, and changes nothing if it does not."""
        is_accepted = bool(self._matcher.accept_token(token_id))
        if is_accepted:
            self._last_bytes.append((self._text.pieces[token_id] or b"\0")[-1])
        return is_accepted

    def roll_back(self, num_tokens: int) -> None:
        """Undo the last tokens, as if they had never been accepted."""
        if num_tokens:
            self._matcher.rollback(num_tokens)
            del self._last_bytes[-num_tokens:]

    def forced(self) -> bytes:
        """Return the text that every continuation starts with; it may end, or begin, inside a character."""
        try:
            return self._matcher.find_jump_forward_string().encode()
        except UnicodeDecodeError as error:  # the library converts the text to str
            return bytes(error.object)

    def mask(self) -> np.ndarray:
        """Return the tokens that may come next: one bit each, uint8 [4 * ceil(V / 32)], the first token in the lowest
        bit."""
        self._matcher.fill_next_token_bitmask(self._row)
        mask = self._bits[0].view(np.uint8) & ~self._banned
        if self._last_bytes and (wrong := self._after_lead.get(self._last_bytes[-1])) is not None:
            mask &= ~wrong
        return mask


def pack_ids(token_ids: Iterable[int], vocab_size: int) -> np.ndarray:
    """Build the mask of these ids, in the format of `GrammarMatcher.mask`."""
    bits = np.zeros(32 * -(-vocab_size // 32), np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little")


def _library() -> Any:
    try:
        import xgrammar
    except ImportError as error:
        raise ValueError(
            "json_schema, regex, ebnf and structural_tag need the grammar extra: pip install 'lockstep[grammar]'"
        ) from error
    return xgrammar


def _refuse(kind: Kind, error: RuntimeError) -> NoReturn:
    message = _CODE_PLACE.sub("", str(error)).strip()
    raise ValueError(f"{kind}: {message}") from error
