"""What a request's output has to look like, and who follows it token by token. The engine behind it is xgrammar.

Only this file knows that library, and loads it with the first grammar. It is asked for masks, for the text that is
forced, and to go back; which tokens a forced text becomes is `jump_forward`'s business.
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
ANY_JSON = "$$ANY$$"  # SGLang's word for a json_schema that allows every JSON value
_CODE_PLACE = re.compile(r"^\[[^\]]*\] \S+?:\d+: (Check failed: \(.*?\) is false: )?", re.DOTALL)


@dataclass(frozen=True)
class Constraint:
    """A grammar as it was asked for. Equal ones are compiled once."""

    kind: Kind
    text: str


def constraint_of(params: SamplingParams) -> Constraint | None:
    """What these parameters ask of the output; None: nothing."""
    for kind in ("json_schema", "regex", "ebnf", "structural_tag"):
        if (text := getattr(params, kind)) is not None:
            return Constraint(kind, text)
    return None


class GrammarCompiler:
    """Compiles constraints for one vocabulary. Any thread may call it; it lets other threads run meanwhile."""

    def __init__(self, text: TokenText, stop_token_ids: Iterable[int], *, any_whitespace: bool = False) -> None:
        """stop_token_ids: what a model may say once the grammar has ended. any_whitespace: JSON with spaces and line
        breaks as the model likes; then hardly anything is forced. Raises ValueError without the library."""
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
        # The library takes any bytes of the right form for a character, and lets control characters into strings of
        # bounded length, where JSON has none.
        self._no_text = pack_ids((i for i, piece in enumerate(pieces) if not can_be_text(piece)), vocab_size)
        controls = set(range(0x20)) - (set(b"\n\r") if any_whitespace else set())
        no_json = pack_ids((i for i, piece in enumerate(pieces) if not controls.isdisjoint(piece)), vocab_size)
        self._no_json = self._no_text | no_json
        self._after_lead = {
            lead: pack_ids((i for i, piece in enumerate(pieces) if piece and piece[0] in wrong), vocab_size)
            for lead, wrong in WRONG_SECOND_BYTES.items()
        }

    def compile(self, constraint: Constraint) -> CompiledGrammar:
        """Raises ValueError that says what is wrong with the grammar, and where."""
        try:
            compiled = self._compiled(constraint)
        except RuntimeError as error:  # the library's word for a fault in the grammar
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
    """A grammar that any number of sequences follow. Never changes."""

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
        """About how much memory it takes."""
        return int(self._compiled.memory_size_bytes)

    def matcher(self) -> GrammarMatcher:
        """A new one, at the beginning."""
        matcher = self._library.GrammarMatcher(self._compiled)
        row = self._library.allocate_token_bitmask(1, len(self._text.pieces))
        return GrammarMatcher(matcher, row, self._text, self._banned, self._after_lead)


class GrammarMatcher:
    """Where one sequence stands in its grammar. One thread at a time."""

    def __init__(
        self, matcher: Any, row: Any, text: TokenText, banned: np.ndarray, after_lead: Mapping[int, np.ndarray]
    ) -> None:
        """row: int32 [1, ceil(V / 32)], filled anew for each mask; banned: a mask of tokens that never come;
        after_lead: masks of tokens that do not come after this byte."""
        self._matcher, self._row, self._bits = matcher, row, row.numpy()
        self._text, self._banned, self._after_lead = text, banned, after_lead
        self._last_bytes: list[int] = []  # of each token that was accepted

    @property
    def is_complete(self) -> bool:
        """Whether the text so far is one that the grammar describes; it may allow more."""
        return bool(self._matcher.is_completed())

    @property
    def has_stopped(self) -> bool:
        """Whether a stop token was accepted: nothing follows."""
        return bool(self._matcher.is_terminated())

    def accept(self, token_id: int) -> bool:
        """Go on by one token; returns whether the grammar allows it, and changes nothing where it does not."""
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
        """The text that has to come next, however the output goes on; may end, or begin, inside a character."""
        try:
            return self._matcher.find_jump_forward_string().encode()
        except UnicodeDecodeError as error:  # the library makes a str of it
            return bytes(error.object)

    def mask(self) -> np.ndarray:
        """Which tokens may come next: one bit each, uint8 [4 * ceil(V / 32)], the first token in the lowest bit."""
        self._matcher.fill_next_token_bitmask(self._row)
        mask = self._bits[0].view(np.uint8) & ~self._banned
        if self._last_bytes and (wrong := self._after_lead.get(self._last_bytes[-1])) is not None:
            mask &= ~wrong
        return mask


def pack_ids(token_ids: Iterable[int], vocab_size: int) -> np.ndarray:
    """The mask, as `GrammarMatcher.mask`, that has these ids."""
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
