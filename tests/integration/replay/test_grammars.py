"""Proofs of constrained samples, whose jumps are no draws under the mode `text`."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
import transformers

from lockstep.integration.replay.cut_answers import before_jumps
from lockstep.integration.service import RolloutService
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.loop import grammar_time
from lockstep.rollout.proving import own_settings, prover
from lockstep.rollout.receipt import GRAMMAR_SETTINGS, sealed
from lockstep.rollout.request_options import RequestOptions
from lockstep.rollout.sampling_params import SamplingParams

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "città": {"enum": ["Paris", "Parma", "Rome"]},
        "items": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
    },
    "required": ["name", "città", "items"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def make_service(bpe_tokenizer):
    torch.manual_seed(3)
    config = transformers.Qwen3Config(
        vocab_size=1024, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=512, bos_token_id=None, eos_token_id=0,
        pad_token_id=None,
    )  # fmt: skip
    model = transformers.Qwen3ForCausalLM(config).eval()

    def make(**settings: object) -> RolloutService:
        engine = Engine(model, EngineConfig(**{"kv_cache": "256 blocks", **settings}), tokenizer=bpe_tokenizer)
        service = RolloutService(engine)
        service.commit_in_place("1", source=model.named_parameters())
        return service

    return make


def receipts_of(service: RolloutService, mode: str) -> list[dict]:
    params = SamplingParams(json_schema=SCHEMA, jump_forward=mode, max_new_tokens=60, sampling_seed=5, n=2)
    options = RequestOptions(return_receipt=True)
    return [c.receipt for c in service.engine.generate(["a person: ", "{", "x"], params, options=options)]


@pytest.mark.parametrize("mode", ["off", "exact", "text"])
def test_constrained_samples_are_proven_in_every_mode(make_service, mode):
    receipts = receipts_of(make_service(), mode)
    service = make_service(speculation="off")
    report = service.replay(receipts)
    assert report.num("equal") == 6, list(report.lines())
    one = receipts[0]
    other = sealed({**one, "logprobs": [*one["logprobs"][:9], one["logprobs"][9] ^ 1, *one["logprobs"][10:]]})
    [verdict] = service.replay([other]).verdicts
    assert (verdict.status, verdict.what, verdict.position) == ("differs", "logprob", 9)
    foreign = sealed({**one, "output": [*one["output"][:5], (one["output"][5] + 7) % 1024, *one["output"][6:]]})
    [verdict] = service.replay([foreign]).verdicts
    assert (verdict.status, verdict.what, verdict.position) == ("differs", "token", 5)


def test_the_masks_of_a_sample_are_kept_no_longer_than_it_is_drawn(make_service, monkeypatch):
    service = make_service()
    receipts = receipts_of(service, "exact")
    monkeypatch.setattr(prover, "KV_BYTES", 1 << 15)
    kept, run = [], prover._Proof.run

    def watched(proof, batch, switch) -> None:
        run(proof, batch, switch)
        kept.append((len(proof._own._masks), len(proof._own._requests)))

    monkeypatch.setattr(prover._Proof, "run", watched)
    assert service.replay(receipts).num("equal") == 6
    assert len(kept) > 1 and set(kept) == {(0, 0)}


@pytest.mark.parametrize("mode", ["off", "text"])
def test_a_grammar_that_is_none_leaves_the_other_samples_proven(make_service, mode):
    service = make_service()
    one, *others = receipts_of(service, mode)
    settings = {name: value for name, value in one["settings"].items() if name != "json_schema"}
    wrong = [
        sealed({**one, "settings": {**settings, "regex": "("}}),
        sealed({**one, "settings": {**settings, "json_schema": "5"}}),
    ]
    verdicts = service.replay([*wrong, *others]).verdicts
    assert [v.status for v in verdicts] == ["unproven"] * 2 + ["equal"] * 5
    assert "regex: " in verdicts[0].what and "json_schema: " in verdicts[1].what


@pytest.mark.parametrize("mode", ["off", "exact", "text"])
def test_an_output_does_not_end_with_its_grammar_before_the_grammar_does(make_service, mode):
    service = make_service()
    whole = next(receipt for receipt in receipts_of(service, mode) if receipt["finish"]["type"] == "stop")
    by_grammar = {"type": "stop", "matched": None}
    num = 12
    cut = {name: whole[name][:num] for name in ("output", "logprobs")}
    jumps = [jump for jump in whole["grammar"]["jumps"] if jump[0] + len(jump[2]) <= num]
    spans = [{**whole["spans"][0], "end": num}]
    early = sealed(
        {**whole, **cut, "spans": spans, "grammar": {**whole["grammar"], "jumps": jumps}, "finish": by_grammar}
    )
    [verdict] = service.replay([early]).verdicts
    assert (verdict.status, verdict.what, verdict.position) == ("differs", "end", num - 1)


def test_an_output_whose_grammar_leaves_no_token_is_proven_to_its_end(make_service):
    service = make_service()
    for mode in ("off", "exact", "text"):
        params = SamplingParams(
            regex="a[bc]{3}d", jump_forward=mode, max_new_tokens=30, sampling_seed=5, ignore_eos=True
        )
        options = RequestOptions(return_receipt=True)
        [receipt] = [c.receipt for c in service.engine.generate(["x"], params, options=options)]
        assert receipt["finish"] == {"type": "stop", "matched": None}
        assert service.replay([receipt]).num("equal") == 1


@pytest.mark.parametrize(
    "grammar", [{"ebnf": 'root ::= "(" root ")" | "[" root "]" | [a-f]+ root | [a-f]'}, {"regex": "[a-f]{4,9}"}]
)
@pytest.mark.parametrize("mode", ["off", "exact", "text"])
def test_a_grammar_that_takes_too_long_where_it_is_proven_leaves_its_sample_unproven(
    make_service, monkeypatch, grammar, mode
):
    service = make_service()
    params = SamplingParams(**grammar, jump_forward=mode, max_new_tokens=30, sampling_seed=5, n=3)
    options = RequestOptions(return_receipt=True)
    receipts = [c.receipt for c in service.engine.generate(["x"], params, options=options)]
    free = [c.receipt for c in service.engine.generate(["x"], replace(params, ebnf=None, regex=None), options=options)]
    forged = sealed({**receipts[0], **{name: free[0][name] for name in ("output", "logprobs", "spans", "finish")}})
    assert [v.status for v in service.replay([*receipts, forged]).verdicts] == ["equal"] * 3 + ["differs"]
    monkeypatch.setattr(own_settings, "TOKEN_S", -1.0)
    monkeypatch.setattr(grammar_time, "MAX_TOKEN_S", -1.0)
    verdicts = service.replay([*receipts, *free, *([] if mode == "text" else [forged])]).verdicts
    assert [v.status for v in verdicts] == ["unproven"] * 3 + ["equal"] * 3 + ["unproven"] * (mode != "text")
    assert all("its grammar " in v.what and "too ambiguous" in v.what for v in verdicts if v.status == "unproven")


@pytest.mark.parametrize("mode", ["off", "exact", "text"])
def test_the_last_token_of_an_answer_whose_grammar_took_too_long_may_be_drawn_without_it(
    make_service, monkeypatch, mode
):
    service, nests = make_service(), 'root ::= "(" root ")" | "[" root "]" | [a-f]+ root | [a-f]'
    params = SamplingParams(ebnf=nests, jump_forward=mode, max_new_tokens=30, sampling_seed=5)
    options = RequestOptions(return_receipt=True)
    with monkeypatch.context() as patched:
        patched.setattr(grammar_time, "MAX_TOKEN_S", -1.0)
        [slow] = service.engine.generate(["x"], params, options=options)
    assert slow.finish_reason.type == "abort" and len(slow.token_ids) == 1
    stopped = sealed({**slow.receipt, "finish": {"type": "length", "matched": None, "message": "a full pool"}})
    verdicts = service.replay([slow.receipt, stopped]).verdicts
    assert [v.status for v in verdicts] == ["unproven", "differs"]
    assert "its last token was drawn without its grammar, as where that takes too long" in verdicts[0].what


def test_draws_and_jumps_are_in_the_receipt_in_their_order(make_service):
    service = make_service()
    receipts = receipts_of(service, "text")
    jumps = [jump for receipt in receipts for jump in receipt["grammar"]["jumps"]]
    assert sum(len(inserted) for _, _, inserted in jumps) > 20
    assert any(removed for _, removed, _ in jumps), "no draw was replaced"
    one = next(receipt for receipt in receipts if any(jump[1] for jump in receipt["grammar"]["jumps"]))
    other = copy.deepcopy(one)
    index = next(i for i, jump in enumerate(other["grammar"]["jumps"]) if jump[1])
    other["grammar"]["jumps"][index][1][0] ^= 1
    [verdict] = service.replay([sealed(other)]).verdicts
    assert verdict.status == "differs" and f"jumps: number {index}" in verdict.what
    for kept in (0, len(one["grammar"]["jumps"]) - 1):
        short = sealed({**one, "grammar": {**one["grammar"], "jumps": one["grammar"]["jumps"][:kept]}})
        [verdict] = service.replay([short]).verdicts
        assert verdict.status == "differs" and f"jumps: number {kept} is claimed as none" in verdict.what


def test_an_answer_that_is_too_long_for_the_engine_that_replays_it_is_unproven(make_service):
    receipts = receipts_of(make_service(), "text")
    longest = max(receipts, key=lambda receipt: len(receipt["prompt"]) + len(receipt["output"]))
    small = make_service(max_model_len=len(longest["prompt"]) + len(longest["output"]) - 3)
    [verdict] = small.replay([longest]).verdicts
    assert verdict.status == "unproven" and "could be drawn again up to output position" in verdict.what


def test_another_engine_that_follows_grammars_otherwise_says_so(make_service):
    receipts = receipts_of(make_service(), "text")
    report = make_service(jump_forward_max_rollback=3, grammar_any_whitespace=True).replay(receipts)
    assert report.num("unproven") == 6
    assert "grammar_any_whitespace, jump_forward_max_rollback" in report.verdicts[0].what


@pytest.mark.parametrize("mode", ["off", "text"])
def test_a_grammar_is_followed_with_the_end_of_sequence_tokens_of_its_engine_or_not_at_all(make_service, mode):
    service = make_service()
    receipt = receipts_of(service, mode)[0]
    unseen = next(id for id in range(1, 1024) if id not in receipt["output"])
    other = [sealed({**receipt, "eos": [*receipt["eos"], id]}) for id in (unseen, 1024)]
    verdicts = service.replay(other).verdicts
    assert [v.status for v in verdicts] == ["unproven", "equal"]
    assert f"with end-of-sequence tokens [0, {unseen}], and here they are [0]" in verdicts[0].what


def test_each_setting_that_a_receipt_has_of_its_grammar_is_compared(make_service):
    service = make_service()
    receipt = receipts_of(service, "text")[0]
    assert set(receipt["grammar"]) == {"mode", "jumps", *GRAMMAR_SETTINGS}
    other = [sealed({**receipt, "grammar": {**receipt["grammar"], name: 99}}) for name in GRAMMAR_SETTINGS]
    for name, verdict in zip(GRAMMAR_SETTINGS, service.replay(other).verdicts, strict=True):
        assert verdict.status == "unproven" and verdict.what.endswith(f"with other settings: {name}")


def test_answers_aborted_before_a_jump_that_replaces_their_last_draws_are_proven(make_service):
    service = make_service(speculation="off")
    engine = service.engine
    schema = {"type": "array", "items": {"enum": ["value one", "value two", "ключ"]}, "minItems": 2}
    receipts = []
    with engine.model.rollout_phase():
        for seed in range(3):
            params = SamplingParams(json_schema=schema, jump_forward="text", max_new_tokens=45, sampling_seed=seed)
            for num_steps in range(1, 13):
                engine.add([1, 2, 3], params, rid="r", options=RequestOptions(return_receipt=True))
                answers = [answer for _ in range(num_steps) for answer in engine.step()]
                if engine.has_work:
                    engine.abort_request("r")
                    answers += engine.step()
                receipts.append(answers[0].receipt)
        report = service.replay(receipts)
        assert report.num("differs") == 0, list(report.lines())
        assert report.num("equal") == len(receipts), list(report.lines())
        aborted = [one for one in receipts if one["finish"]["type"] == "abort" and len(one["output"]) > 3]
        assert len(aborted) > 10
        for name, by in (("logprobs", 1), ("output", 7)):
            changed = [sealed({**one, name: [*one[name][:-1], one[name][-1] ^ by]}) for one in aborted]
            assert service.replay(changed).num("differs") == len(changed)


def test_the_output_before_jumps_is_that_of_their_draws():
    assert before_jumps([1, 4, 5, 6, 9], [(1, [2, 3], [4, 5]), (3, [7], [6])]) == [1, 2, 3]
    assert before_jumps([1, 2], []) == [1, 2]
