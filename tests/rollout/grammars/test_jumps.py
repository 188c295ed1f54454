"""The effect of a jump on a sequence, its blocks, its text and its neighbours, and its rollback."""

from __future__ import annotations

import pytest
import torch
import transformers

from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.grammars.catalog import Grammars
from lockstep.rollout.grammars.jump import Jump
from lockstep.rollout.grammars.state import GrammarState
from lockstep.rollout.grammars.token_text import TokenText
from lockstep.rollout.kv.ledger import KVLedger
from lockstep.rollout.request_options import RequestOptions
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.rollout.scheduling.scheduler import Scheduler, StepLimits
from lockstep.rollout.sequences.detokenizer import IncrementalDetokenizer
from lockstep.rollout.sequences.request import Request
from lockstep.rollout.sequences.sequence import Sequence


def make_request(id: str, prompt: list[int], arrival: int = 0) -> Request:
    return Request(Sequence(id, prompt), SamplingParams(), RequestOptions(), 0, 0, float(arrival), arrival, None)


def test_a_jump_that_is_undone_leaves_the_tokens_as_they_were():
    sequence = Sequence("a", [1, 2])
    sequence.token_ids += [3, 4, 5]
    sequence.begin_jump(2, [6, 7, 8])
    assert sequence.token_ids == [1, 2, 3, 6, 7, 8] and sequence.settled_output() == [3, 4, 5]
    assert sequence.settled_output(1) == [4, 5]
    sequence.undo_jump()
    assert sequence.token_ids == [1, 2, 3, 4, 5] == [1, 2, *sequence.settled_output()]
    sequence.undo_jump()  # none is in flight
    assert sequence.token_ids == [1, 2, 3, 4, 5]


def test_a_jump_that_stands_is_the_output():
    sequence = Sequence("a", [1, 2])
    sequence.token_ids += [3, 4]
    sequence.begin_jump(1, [5])
    assert sequence.jump_start == 3 and sequence.settle_jump() == Jump(1, (5,))
    assert sequence.jump_start is None and not sequence.has_jump
    assert sequence.settled_output() == [3, 5]
    sequence.begin_jump(0, [6, 7])
    sequence.undo_jump()
    assert sequence.settled_output() == [3, 5]


def test_rolling_back_gives_up_published_blocks_and_computes_from_their_beginning():
    ledger = KVLedger(8, 16, True)
    request = make_request("a", list(range(60)))
    ledger.open(request, [])
    ledger.grow(request, 60)
    ledger.publish(request, 60)  # three full blocks
    assert ledger.roll_back(request, 55) == 55  # in the fourth, which is private
    assert len(ledger.block_table(request)) == 4
    assert ledger.roll_back(request, 47) == 32  # in the third, which is in the tree
    assert len(ledger.block_table(request)) == 2 and ledger.usage.num_cached == 1
    ledger.check()
    request.sequence.token_ids[47:] = range(100, 113)
    assert ledger.grow(request, 60) is not None
    ledger.publish(request, 60)
    ledger.check()
    other = make_request("b", [*request.sequence.token_ids, 1])
    assert len(ledger.match(other)) == 3
    old = make_request("c", list(range(60)))
    assert len(ledger.match(old)) == 3  # published blocks still match the tokens that they were computed from
    ledger.close(request)
    ledger.check()
    ledger.check_idle()


def test_an_output_that_is_taken_back_into_planned_text_goes_on_with_it(bpe_tokenizer, text):
    """The rule here gives other tokens where it begins elsewhere, as some tokenizers do."""

    def rule(forced: bytes) -> tuple[int, ...]:
        return text.encode(forced[:3]) if len(forced) % 2 else tuple(text.pieces.index(bytes([b])) for b in forced[:3])

    grammars = Grammars(bpe_tokenizer, 1024, [0])
    [grammar] = grammars.compiled([SamplingParams(regex="the name of the value")])
    state = GrammarState(grammar, text, "exact", rule)
    whole = GrammarState(grammar, text, "exact", rule).plan(100, follows_jump=False)
    first = state.plan(2, follows_jump=False)
    assert len(first.token_ids) == 2 and first.token_ids == whole.token_ids[:2]
    rest = state.plan(100, follows_jump=False)
    assert first.token_ids + rest.token_ids == whole.token_ids
    state.follow(first.token_ids)  # the second jump is undone
    assert state.plan(100, follows_jump=False) == rest
    assert rule(b"e name of the value") != rest.token_ids[: len(rule(b"e name of the value"))]
    grammars.close()


@pytest.mark.parametrize("mode", ["text", "exact"])
def test_a_plan_leaves_a_token_to_be_sampled_and_keeps_to_its_length(bpe_tokenizer, text, mode):
    grammars = Grammars(bpe_tokenizer, 1024, [0])
    params = SamplingParams(regex="the name of the value", jump_forward=mode, ignore_eos=True)
    [grammar] = grammars.compiled([params])
    whole = grammars.state(grammar, params).plan(100, follows_jump=False).token_ids
    assert b"the name of the value".startswith(text.spell(whole)) and len(text.spell(whole)) < 21
    for length in range(len(whole) + 2):
        state = grammars.state(grammar, params)
        assert state.plan(length, follows_jump=False).token_ids == whole[:length]
        assert not state.is_over
    grammars.close()


def test_a_jump_takes_the_blocks_that_are_free_and_preempts_nobody():
    ledger = KVLedger(8, 16, True)
    scheduler = Scheduler(ledger, StepLimits(8, 256, 256, 512), admission_ratio=0.0)
    requests = [make_request(str(index), [index] * 30, index) for index in range(3)]
    for request in requests:
        scheduler.add(request)
    assert len(scheduler.schedule().scheduled) == 3 and ledger.num_available == 2
    first, second, _ = requests
    assert scheduler.grow_up_to(first, 40) == 40 and ledger.num_available == 1
    assert scheduler.grow_up_to(second, 100) == 48 and ledger.num_available == 0
    assert scheduler.grow_up_to(first, 100) == 48
    assert scheduler.running() == requests


def test_a_jump_lifts_pins_only_where_its_sequence_is_alone():
    ledger = KVLedger(8, 16, True, pin_budget=1.0)
    scheduler = Scheduler(ledger, StepLimits(8, 256, 256, 512), admission_ratio=0.0)
    pinned, first, second = (make_request(str(index), [index] * (48 - 16 * (index > 0)), index) for index in range(3))
    scheduler.add(pinned)
    scheduler.on_step_completed(scheduler.schedule(), {"0": pinned})
    ledger.pins.pin([ledger.hash_of_block(pinned, 2)])
    scheduler.remove(pinned)
    for request in (first, second):
        scheduler.add(request)
    assert len(scheduler.schedule().scheduled) == 2 and ledger.usage.num_pinned == 3
    assert scheduler.grow_up_to(first, 100) == 48 and len(ledger.pins) == 1
    scheduler.remove(second)
    assert scheduler.grow_up_to(first, 80) == 80 and len(ledger.pins) == 1  # enough without
    assert scheduler.grow_up_to(first, 128) == 128 and not len(ledger.pins)
    ledger.check()


@pytest.fixture(scope="module")
def text(bpe_tokenizer):
    return TokenText(bpe_tokenizer, len(bpe_tokenizer))


@pytest.mark.parametrize("context", ["", "the name: ", "日"])
def test_text_goes_on_where_tokens_are_replaced(bpe_tokenizer, text, context):
    prompt = list(text.encode(context.encode())) if context else [1]
    wanted = '{"città": "日本語 name", "ключ": 12}'
    pieces = [text.pieces.index(bytes([byte])) for byte in wanted.encode()]
    for end in range(1, len(pieces)):
        canonical = text.encode(wanted.encode())
        for num_replaced in (1, 3, 10):
            start = end - min(num_replaced, end)
            head = text.spell(pieces[:start])
            tail = text.encode(wanted.encode()[start:])
            if tail is None or b"".join((head, text.spell(tail))) != wanted.encode():
                continue
            grown = IncrementalDetokenizer(bpe_tokenizer, prompt, SamplingParams())
            grown.append(pieces[:end])
            seen = grown.streamable_text
            grown.append(tail, end - start)
            assert grown.streamable_text == grown.text == wanted and wanted.startswith(seen)
    whole = IncrementalDetokenizer(bpe_tokenizer, prompt, SamplingParams())
    whole.append(canonical)
    assert whole.text == wanted


def test_a_stop_in_replaced_tokens_is_found_where_it_ends(bpe_tokenizer, text):
    grown = IncrementalDetokenizer(bpe_tokenizer, [1], SamplingParams(stop="value"))
    grown.append(text.encode(b'{"name": "va'))
    num_before = len(text.encode(b'{"name": "va'))
    last = text.spell(text.encode(b'{"name": "va')[-1:])
    tail = [text.pieces.index(bytes([byte])) for byte in last + b"lued"]
    match = grown.append(tail, 1)
    assert match is not None and match.num_tokens == num_before - 1 + len(last) + 3
    assert grown.text == '{"name": "'


def test_a_step_that_fails_after_a_jump_began_undoes_it(bpe_tokenizer):
    config = transformers.Qwen3Config(
        vocab_size=1024, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=512, bos_token_id=None, eos_token_id=0,
        pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(4)
    model = transformers.Qwen3ForCausalLM(config).eval()
    schema = {"type": "object", "properties": {"name": {"enum": ["Paris", "Parma"]}, "value": {"type": "boolean"}},
              "required": ["name", "value"]}  # fmt: skip
    for mode in ("text", "exact"):
        params = SamplingParams(json_schema=schema, jump_forward=mode, sampling_seed=2, max_new_tokens=40)
        engine = Engine(model, EngineConfig(kv_cache="64 blocks"), tokenizer=bpe_tokenizer)
        wanted = engine.generate(["q"], params)[0]
        for failing in range(1, 5):
            run, calls = engine.parts.runner._run, iter(range(1, 1000))

            def fail_once(output, batch, run=run, calls=calls, failing=failing):
                if next(calls) == failing:
                    raise RuntimeError("the device is on fire")
                return run(output, batch)

            engine.parts.runner._run = fail_once
            engine.add("q", params, rid="r")
            found = []
            with engine.model.rollout_phase():
                while engine.has_work:
                    try:
                        found += engine.step()
                    except RuntimeError:
                        request = engine.parts.sequences.request("r")
                        assert request.sequence.output_ids == request.sequence.settled_output()
                        assert len(request.record.logprobs) == request.sequence.num_output_tokens
            engine.parts.runner._run = run
            assert [(a.token_ids, a.logprobs, a.text) for a in found] == [
                (wanted.token_ids, wanted.logprobs, wanted.text)
            ]
        engine.parts.ledger.check()
        engine.close()
