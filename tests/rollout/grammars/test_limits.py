"""Grammars that would cost too much: they are refused, and cost the process that serves nothing."""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest

from lockstep.rollout.grammars.catalog import GrammarLimits, Grammars
from lockstep.rollout.grammars.compiler import Constraint, GrammarCompiler, _refuse
from lockstep.rollout.grammars.forced_text import MAX_PIECE_BYTES
from lockstep.rollout.grammars.frames import CompilerSetup
from lockstep.rollout.grammars.library import load_library
from lockstep.rollout.grammars.process import CompilerProcess
from lockstep.rollout.grammars.rehearsal import rehearse
from lockstep.rollout.grammars.token_text import TokenText
from lockstep.rollout.sampling_params import SamplingParams

VOCAB = 1024
EOS = 0


@pytest.fixture(scope="module")
def compiler(bpe_tokenizer):
    return GrammarCompiler(load_library(), TokenText(bpe_tokenizer, VOCAB), [EOS])


@pytest.fixture(scope="module")
def grammars(bpe_tokenizer):
    grammars = Grammars(bpe_tokenizer, VOCAB, [EOS], limits=GrammarLimits(timeout_s=1.0, num_bytes=2**28))
    yield grammars
    grammars.close()


def allowed_ids(matcher) -> np.ndarray:
    ids = np.flatnonzero(np.unpackbits(matcher.mask(), bitorder="little", count=VOCAB))
    return ids[ids != EOS]


ENDLESS = [
    ("ebnf", 'root ::= "a" root'),
    ("ebnf", 'root ::= x\nx ::= "a" y\ny ::= "b" x'),
    ("ebnf", 'root ::= "a" | "b" x\nx ::= "c" x'),
    ("json_schema", '{"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}'),
    ("json_schema", '{"type": "array", "items": {"$ref": "#"}, "minItems": 1}'),
]


@pytest.mark.parametrize(("kind", "text"), ENDLESS)
def test_a_grammar_that_cannot_end_is_refused(compiler, kind, text):
    with pytest.raises(ValueError, match=r"without end|no text can end"):
        compiler.compile(Constraint(kind, text))


ENDING = [
    ("ebnf", 'root ::= "(" root ")" | "x"'),
    ("ebnf", 'root ::= "a" root?'),
    ("json_schema", '{"type": "array", "items": {"$ref": "#"}}'),
    ("json_schema", '{"type": "object", "properties": {"a": {"$ref": "#"}}}'),
    ("json_schema", '{"type": "object", "properties": {"name": {"enum": ["Parma", "Paris"]}}, "required": ["name"]}'),
    ("regex", "(abc|abd){20}x{4}[^a]é日本{3}"),
    ("structural_tag", '{"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<f="], "tags": '
     '[{"type": "tag", "begin": "<f=g>", "content": {"type": "json_schema", "json_schema": {"type": "integer"}}, '
     '"end": "</f>"}]}}'),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "text"), ENDING)
@pytest.mark.parametrize("seed", range(3))
def test_forced_text_found_by_bytes_is_that_of_the_library(compiler, kind, text, seed):
    matcher, choice = compiler.compile(Constraint(kind, text)).matcher(), random.Random(seed)
    for _ in range(40):
        assert matcher._forced.find_by_bytes() == matcher.forced()[:MAX_PIECE_BYTES]
        if not len(ids := allowed_ids(matcher)):
            break
        assert matcher.accept(int(choice.choice(ids)))


def test_forced_text_is_taken_in_pieces_where_it_may_be_very_long(compiler):
    matcher = compiler.compile(Constraint("regex", "a{10000000}b")).matcher()
    assert matcher.forced() == b"a" * MAX_PIECE_BYTES
    assert matcher.accept(int(allowed_ids(matcher)[-1])) and matcher.forced() == b"a" * MAX_PIECE_BYTES
    deep = compiler.compile(Constraint("ebnf", 'root ::= "(" root "' + "p" * 500 + '" | "x"')).matcher()
    for piece in (b"(",) * 40 + (b"x",):
        assert deep.accept(compiler.vocabulary.text.pieces.index(piece))
    assert deep.forced() == b"p" * MAX_PIECE_BYTES


HOSTILE = [
    ({"json_schema": {"type": "string", "pattern": "(" * 30_000 + "a" + ")" * 30_000}}, "nested too deeply"),
    ({"ebnf": 'root ::= root root root | [a-z] | ""'}, "ambiguous|grammar_timeout_s"),
    ({"ebnf": "root ::= " + " ".join(["([a-z] | [a-z]* | [a-z] [a-z]+)"] * 60)}, "grammar_timeout_s|ambiguous"),
    ({"ebnf": "root ::= r0\n" + "\n".join(f'r{i} ::= r{i + 1} "a"' for i in range(12_000)) + '\nr12000 ::= "b"'},
     "grammar_memory_mb|grammar_timeout_s"),
]  # fmt: skip


@pytest.mark.parametrize(("params", "why"), HOSTILE)
def test_a_grammar_that_meets_a_limit_is_refused_and_the_next_one_is_compiled(grammars, params, why):
    for _ in range(2):
        with pytest.raises(ValueError, match=why):
            grammars.compiled([SamplingParams(**params)])
    num_compiled = grammars.cache.num_compiled
    with pytest.raises(ValueError, match=why):  # known: it costs nothing
        grammars.compiled([SamplingParams(**params)])
    assert grammars.cache.num_compiled == num_compiled
    assert grammars.compiled([SamplingParams(regex="after" + why.replace("|", ""))])[0] is not None


def rehearsed(monkeypatch, seconds_of):
    """Rehearse a grammar whose n-th token takes so many seconds of a clock that the test moves. Returns the number of
    its tokens."""
    clock, num = [0.0], [0]

    class Matcher:
        def mask(self):
            return np.full(1, 255, np.uint8)

        def accept(self, token):
            num[0] += 1
            clock[0] += seconds_of(num[0])
            return True

        def forced(self):
            return b""

    monkeypatch.setattr("lockstep.rollout.grammars.rehearsal.time.process_time", lambda: clock[0])
    text = SimpleNamespace(pieces=[b"a"] * 8)
    rehearse(SimpleNamespace(vocabulary=SimpleNamespace(text=text), stop_token_ids=[], matcher=Matcher))
    return num[0]


def test_a_rehearsal_goes_on_while_tokens_grow_slower(monkeypatch):
    with pytest.raises(ValueError, match="too ambiguous"):
        rehearsed(monkeypatch, lambda number: 0.0008 * number**2)  # 1.0 s in all after 15 tokens, the last 0.18 s
    assert rehearsed(monkeypatch, lambda number: 0.1) == 11  # slow, and no slower: it ends after its time
    assert rehearsed(monkeypatch, lambda number: 0.001) == 3 * 48


@pytest.fixture(scope="module")
def long_tokens():
    """Make a compiler whose vocabulary has all bytes, and long tokens."""
    pieces = [b"", *(bytes([byte]) for byte in range(256)), b"a" * 64, b"ab" * 8, b"([{", "日本".encode()]
    return GrammarCompiler(load_library(), SimpleNamespace(pieces=pieces), [0])


@pytest.fixture(scope="module")
def large_vocabulary():
    """Make a compiler with tens of thousands of tokens that any text of eight letters may go on with."""
    choice = random.Random(0)
    words = {bytes(choice.choices(b"abcdefgh", k=choice.randint(2, 9))) for _ in range(50_000)}
    pieces = [b"", *(bytes([byte]) for byte in range(256)), *sorted(words)]
    return GrammarCompiler(load_library(), SimpleNamespace(pieces=pieces), [0])


@pytest.mark.parametrize(
    "rules",
    ["s ::= s s | [a-h] | [a-h] [a-h]", "s ::= [a-h] s [a-h] | [a-h] | s s", "s ::= u s | s u | u\nu ::= [a-h] [a-h]?"],
)
def test_a_grammar_that_leaves_most_tokens_to_be_tried_for_each_mask_is_refused(large_vocabulary, rules):
    """One mask would take up to a second and a half, behind a beginning that no rehearsal gets over."""
    with pytest.raises(
        ValueError, match=r"too ambiguous: at one place 34[0-9]{3} tokens of 34[0-9]{3} can only be tried"
    ):
        large_vocabulary.compile(Constraint("ebnf", 'root ::= [b-h]{300} "x" s\n' + rules))


@pytest.mark.parametrize(
    "rules",
    ['s ::= s "+" s | "(" s ")" | [a-h]+', "s ::= u s | u\nu ::= [a-h] [a-h]?", 's ::= [^()]* | [^()]* "(" s ")" s'],
)
def test_ambiguous_grammars_whose_masks_are_quick_are_compiled(large_vocabulary, rules):
    matcher = large_vocabulary.compile(Constraint("ebnf", 'root ::= "(" s ")"\n' + rules)).matcher()
    for byte in b"(ab":
        assert matcher.mask().any() and matcher.accept(byte + 1)
    assert large_vocabulary.compile(Constraint("json_schema", "$$ANY$$")).nests


def test_a_token_that_an_ambiguous_grammar_takes_too_long_for_is_not_waited_for(long_tokens):
    """The rehearsal does not get behind the first part, and the whole token would take seconds."""
    rules = "\n".join(f's{i} ::= s{i} s{i} | "a"' for i in range(40))
    text = f'root ::= [b-h]{{300}} "x" ({" | ".join(f"s{i}" for i in range(40))})\n{rules}'
    matcher = long_tokens.compile(Constraint("ebnf", text)).matcher()
    for byte in b"bcd" * 100 + b"x":
        assert matcher.accept(byte + 1)
    matcher.limit_s = 0.01
    began = time.thread_time()
    assert matcher.accept(257) and matcher.is_lost
    assert time.thread_time() - began < 0.5  # the processor's time, a fifth of the whole token's
    assert matcher.mask().any() and matcher.forced() == b"" and not matcher.is_complete and not matcher.has_stopped
    assert matcher.accept(1 + ord("z"))
    matcher.roll_back(3)


def test_forced_text_that_takes_too_long_is_not_waited_for(long_tokens):
    matcher = long_tokens.compile(Constraint("ebnf", f'root ::= "(" root ")" | "{"x" * 100}"')).matcher()
    assert matcher.accept(1 + ord("x")) and matcher.forced() == b"x" * 99
    matcher.limit_s = 0.0
    assert matcher.forced() == b"" and matcher.is_lost


@pytest.mark.parametrize(
    "text", ['root ::= "(" root ")" | "[{" root "}]" | [a-b]+ root "." | "日" [本]', "root ::= [a-z]*"]
)
def test_tokens_are_accepted_and_taken_back_byte_by_byte_as_in_one(long_tokens, text):
    grammar = long_tokens.compile(Constraint("ebnf", text))
    assert grammar.nests == ("(" in text)
    by_bytes, whole, choice = grammar.matcher(), grammar.matcher(), random.Random(4)
    whole._nests = False
    tokens = [258, 1 + ord("("), 259, 1 + ord("["), 1 + ord("{"), 260, 257, 1 + ord(")"), 1 + ord(".")]
    num_taken = most = 0
    for _ in range(300):
        token = choice.choice(tokens)
        taken = by_bytes.accept(token)
        assert taken == whole.accept(token)
        num_taken += taken
        most = max(most, num_taken)
        if num_taken and choice.random() < 0.2:
            count = choice.randint(1, min(num_taken, 4))
            by_bytes.roll_back(count)
            whole.roll_back(count)
            num_taken -= count
        assert (by_bytes.mask() == whole.mask()).all() and by_bytes.forced() == whole.forced()
    assert most > 3


def test_schemas_with_many_constants_and_open_classes_are_checked_in_linear_time(grammars):
    pair = [{"enum": [f"{letter}{i}" for i in range(1500)]} for letter in "ab"]
    assert grammars.compiled([SamplingParams(json_schema={"oneOf": pair})])[0] is not None
    with pytest.raises(ValueError, match="Unclosed"):
        grammars.compiled([SamplingParams(json_schema={"type": "string", "pattern": "[^" * 20_000})])


def test_a_grammar_restored_from_the_other_process_is_the_one_compiled_here(grammars, compiler):
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "é": {"enum": ["x", "日本"]}},
        "required": ["a"],
    }
    [restored] = grammars.compiled([SamplingParams(json_schema=schema)])
    here = compiler.compile(Constraint("json_schema", SamplingParams(json_schema=schema).json_schema))
    assert restored.bound == here.bound and restored.serialized() == here.serialized()


PARENT = """
import sys
from lockstep.rollout.grammars.compiler import Constraint
from lockstep.rollout.grammars.frames import CompilerSetup
from lockstep.rollout.grammars.process import CompilerProcess
process = CompilerProcess(lambda: CompilerSetup([bytes([b]) for b in range(256)], [0], False, 60.0, 2**29, 2**25))
assert process.compile(Constraint("regex", "a")).error is None
print(process.pid, flush=True)
sys.stdin.read()
"""


def test_the_process_that_compiles_ends_with_its_parent():
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    watched = os.pidfd_open(int(parent.stdout.readline()))
    os.kill(parent.pid, signal.SIGKILL)
    parent.communicate()
    poll = select.poll()
    poll.register(watched)
    assert poll.poll(30_000)
    os.close(watched)


def mutated(choice: random.Random) -> dict[str, str]:
    """Make a random grammar out of pieces of grammars."""
    kind = choice.choice(["regex", "ebnf", "json_schema"])
    if kind == "regex":
        pieces = [
            "a",
            "(",
            ")",
            "[",
            "[^",
            "]",
            "|",
            "*",
            "+",
            "?",
            "{3}",
            "{2,}",
            "{0,9}",
            ".",
            r"\d",
            r"\w",
            "é",
            "^",
            "$",
        ]
        return {kind: "".join(choice.choices(pieces, k=choice.randrange(1, 12)))}
    if kind == "ebnf":
        pieces = ['"a"', '""', "[a-z]", "root", "x", "(", ")", "|", "*", "+", "?", "{2,4}", "[^a]*"]
        body = [" ".join(choice.choices(pieces, k=choice.randrange(1, 8))) for _ in range(2)]
        return {kind: f"root ::= {body[0]}\nx ::= {body[1]}"}

    def schema(depth: int) -> object:
        made = [
            {"type": "string", "pattern": mutated_regex(choice)}, {"type": "integer", "minimum": choice.randrange(9)},
            {"$ref": "#"}, {"enum": ["a", 1, None]}, {"type": "string", "maxLength": choice.randrange(99)}, True, {},
        ]  # fmt: skip
        if depth:
            names = choice.sample("abcd", choice.randrange(1, 4))
            required = names[: choice.randrange(3)]
            made += [{"type": "array", "items": schema(depth - 1), "minItems": choice.randrange(3)}] * 3
            made += [{"type": "object", "properties": {n: schema(depth - 1) for n in names}, "required": required}] * 4
            made += [{"anyOf": [schema(depth - 1), schema(depth - 1)]}] * 2
        return choice.choice(made)

    return {kind: json.dumps(schema(3))}


def mutated_regex(choice: random.Random) -> str:
    return "".join(choice.choices(["a", "[b-y]", "z+", "(c|d)", "e{2,5}", "[^", "(", "q*"], k=choice.randrange(1, 6)))


def test_a_setup_that_fails_is_named_each_time_and_leaves_no_process():
    def make() -> CompilerSetup:
        started.append(process.pid)
        raise ValueError("the tokenizer has no text")

    started: list[int] = []
    process = CompilerProcess(make)
    for _ in range(2):
        with pytest.raises(ValueError, match="the tokenizer has no text"):
            process.compile(Constraint("regex", "a"))
        assert process.pid is None
        with pytest.raises(ProcessLookupError):
            os.kill(started[-1], 0)
    process.close()


def test_numbers_beyond_those_of_the_library_are_refused_by_name(grammars):
    for keyword in ("minimum", "multipleOf"):
        text = '{"type": "integer", "' + keyword + '": 1' + "0" * 400 + "}"
        with pytest.raises(ValueError, match=f"#/{keyword} "):
            grammars.compiled([SamplingParams(json_schema=text)])


@pytest.mark.parametrize("said", ["", "[12:00:00] /a/b.cc:7: Check failed: (x) is false: "])
def test_a_refusal_without_a_reason_says_so(said):
    with pytest.raises(ValueError, match="json_schema: the library refuses it without a reason"):
        _refuse("json_schema", RuntimeError(said))


@pytest.mark.parametrize("seed", range(2))
def test_random_grammars_are_compiled_and_followed_or_refused(grammars, seed):
    choice = random.Random(seed)
    num_compiled, text = 0, grammars.restorer().vocabulary.text
    for _ in range(30):
        params = SamplingParams(**mutated(choice), jump_forward=choice.choice(["text", "exact", "off"]))
        try:
            [grammar] = grammars.compiled([params])
            state = grammars.state(grammar, params)
        except ValueError:
            continue
        num_compiled += 1
        output: list[int] = []
        began = time.thread_time()
        for _ in range(24):
            state.follow(output)
            ids = np.flatnonzero(np.unpackbits(state.mask(), bitorder="little", count=VOCAB))
            if not len(ids) or (id := int(choice.choice(ids))) == EOS:
                break
            output.append(id)
            state.plan(1000, follows_jump=True) if params.jump_forward == "text" else None
        assert time.thread_time() - began < 5 and all(text.pieces[id] for id in output)
    assert num_compiled > 4


def test_an_engine_without_grammars_has_no_callback_in_which_an_interrupt_would_be_lost():
    program = (
        "import gc, lockstep.rollout.engine\n"
        "from lockstep.rollout.grammars.processor_time import thread_time\n"
        "names = lambda: [one.__module__ for one in gc.callbacks if one.__module__.startswith('lockstep')]\n"
        "assert names() == [], names()\n"
        "thread_time()\n"
        "assert len(names()) == 1\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
