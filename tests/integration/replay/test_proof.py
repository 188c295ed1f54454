"""Proofs of receipts by a service: equal samples, and what is named where something was changed."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from transformers import GPTNeoConfig, GPTNeoForCausalLM

from lockstep.integration.service import RolloutService
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.model.steps.pools import TRIAL_ROWS
from lockstep.rollout.proving import prover
from lockstep.rollout.receipt import digest_of, sealed
from lockstep.rollout.request_options import RequestOptions
from lockstep.rollout.sampling_params import SamplingParams

ASKED = RequestOptions(return_receipt=True)
LONG = [(7 * i) % 250 for i in range(70)]
PROMPTS = [[3, 17, 90, 4, 55], LONG, [250], list(range(40, 72))]


@pytest.fixture
def make_service(make_model, restore_threads):
    torch.set_num_threads(1)

    def make(family: str = "qwen3", module=None, **config: object) -> RolloutService:
        settings = {"kv_cache": "64 blocks", "max_num_seqs": 8, "max_num_batched_tokens": 256}
        module = module or make_model(family).train()
        service = RolloutService(Engine(module, EngineConfig(**{**settings, **config})))
        service.commit_in_place("1", source=module.named_parameters())
        return service

    return make


def receipts_of(service: RolloutService, params: SamplingParams | list, prompts=PROMPTS) -> list[dict]:
    return [c.receipt for c in service.engine.generate(prompts, params, options=ASKED)]


SETTINGS = {
    "plain": {},
    "greedy": {"temperature": 0},
    "filters": {"top_k": 20, "top_p": 0.8, "min_p": 0.01, "temperature": 1.3},
    "penalties": {"frequency_penalty": 0.5, "repetition_penalty": 1.2, "presence_penalty": 0.3},
    "bias": {"logit_bias": {7: 2.0, 9: -3.5}, "min_new_tokens": 5},
    "stops": {"stop_token_ids": [3, 99, 140]},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_every_sample_is_proven_from_its_receipt_alone(make_service, settings):
    service = make_service()
    params = SamplingParams(max_new_tokens=20, n=3, sampling_seed=4, **settings)
    receipts = receipts_of(service, params)
    report = make_service(speculation="off", block_size=32).replay(receipts)
    assert [v.status for v in report.verdicts] == ["equal"] * 12, list(report.lines())
    assert sum(v.num_tokens for v in report.verdicts) == sum(len(receipt["output"]) for receipt in receipts)
    assert report.exit_code == 0 and "12 of 12 samples proven equal" in list(report.lines())[-1]


@pytest.mark.parametrize("family", ["gemma2", "llama", "qwen3_moe", "qwen3_next", "gpt_oss", "glm_moe_dsa"])
def test_families_are_proven(make_service, family):
    service = make_service(family)
    receipts = receipts_of(service, SamplingParams(max_new_tokens=9, n=2))
    assert service.replay(receipts).num("equal") == 8


@pytest.mark.parametrize("most_rows", [7, 64])
def test_rows_may_be_divided_into_forwards_of_any_size(make_service, most_rows, monkeypatch):
    service = make_service()
    receipts = receipts_of(service, SamplingParams(max_new_tokens=20, n=3))
    monkeypatch.setattr(prover, "MOST_ROWS", most_rows)
    monkeypatch.setattr(prover.Prover.__init__, "__kwdefaults__", {"most_rows": most_rows})
    monkeypatch.setattr(prover, "KV_BYTES", 1 << 18)
    assert service.replay(receipts).num("equal") == 12


def test_a_prompt_is_read_once_for_all_its_samples(make_service):
    service = make_service()
    params = SamplingParams(max_new_tokens=8, n=4)
    receipts = receipts_of(service, params, [LONG])
    rows = []
    embeddings = service.engine.model.module.get_input_embeddings()
    embeddings.register_forward_pre_hook(lambda _, arguments: rows.append(arguments[0].numel()))
    assert service.replay(receipts).num("equal") == 4
    trial = 2 * TRIAL_ROWS  # of logits in parts, beside the whole
    assert sum(rows) == trial + len(LONG) - 1 + 4 * 8


def test_replay_leaves_live_requests_and_the_cache_alone(make_service):
    service = make_service()
    engine = service.engine
    receipts = receipts_of(service, SamplingParams(max_new_tokens=12))
    [expected] = make_service().engine.generate(LONG, SamplingParams(max_new_tokens=12, sampling_seed=1))
    engine.add(LONG, SamplingParams(max_new_tokens=12, sampling_seed=1))
    for _ in range(4):
        assert engine.step() == []
    assert service.replay(receipts).num("equal") == 4
    while not (done := engine.step()):
        pass
    assert (done[0].token_ids, done[0].logprobs) == (expected.token_ids, expected.logprobs)
    engine.check_integrity()


def changed(receipt: dict, **values: object) -> dict:
    return sealed({**copy.deepcopy(receipt), **values})


def with_item(values: list[int], index: int, value: int) -> list[int]:
    return [*values[:index], value, *values[index + 1 :]]


def test_what_was_changed_is_found_and_named_although_the_hash_was_made_anew(make_service):
    service = make_service()
    receipts = receipts_of(service, SamplingParams(max_new_tokens=20))
    one = receipts[1]
    bits, token = one["logprobs"][7], one["output"][11]
    other = [
        changed(one, logprobs=with_item(one["logprobs"], 7, bits ^ 1)),
        changed(one, output=with_item(one["output"], 11, (token + 1) % 250)),
        changed(one, seed=one["seed"] ^ 1),
        changed(one, prompt=with_item(one["prompt"], 3, 5)),
        changed(one, settings={**one["settings"], "temperature": (1.1).hex()}),
        changed(one, spans=[{**one["spans"][0], "digest": "0" * 64}]),
        {**one, "seed": 5},
        one,
    ]
    verdicts = service.replay(other).verdicts
    assert [v.status for v in verdicts] == ["differs"] * 5 + ["unproven", "differs", "equal"]
    assert [(v.what, v.position) for v in verdicts[:2]] == [("logprob", 7), ("token", 11)]
    assert verdicts[0].claimed.bits == bits ^ 1 and verdicts[0].found.bits == bits
    assert verdicts[1].claimed.token_id == (token + 1) % 250 and verdicts[1].found.token_id == token
    assert "token" in {v.what for v in verdicts[2:4]} and verdicts[4].what in ("logprob", "token")
    assert f"no weights of digest {'0' * 64}" in verdicts[5].what and "hash" in verdicts[6].what


def test_weights_that_differ_by_one_ulp_have_another_digest(make_service, make_model):
    module = make_model("qwen3").train()
    service = make_service(module=module)
    receipts = receipts_of(service, SamplingParams(max_new_tokens=4))
    with torch.no_grad():
        weight = next(module.parameters())
        weight.view(-1)[77:78].copy_(torch.nextafter(weight.view(-1)[77:78], torch.tensor(9.0)))
    with pytest.raises(ValueError, match="they were written since"):
        service.replay(receipts)
    service.commit_in_place("2", source=module.named_parameters())
    report = service.replay(receipts)
    assert [v.status for v in report.verdicts] == ["unproven"] * 4 and report.exit_code == 3
    assert all(receipts[0]["spans"][0]["digest"] in v.what for v in report.verdicts)


def test_another_guarantee_is_named_before_anything_runs(make_service):
    service = make_service()
    receipts = receipts_of(service, SamplingParams(max_new_tokens=4))
    here = receipts[0]["guarantee"]
    there = {**here, "isa": "amx", "versions": {**here["versions"], "torch": "9"}}
    other = [changed(receipt, guarantee=there) for receipt in receipts]
    report = service.replay(other)
    assert report.num("unproven") == 4
    assert service.replay(other[:1]).exit_code == 3
    assert report.guarantee[0].startswith("isa: amx there") and report.versions[0].startswith("versions.torch: 9 there")
    assert service.replay(other, anyway=True).num("equal") == 4
    loose = make_service(invariant=False)
    assert "without invariant mode" in service.replay(receipts_of(loose, SamplingParams())).verdicts[0].what


def test_k_blocks_belong_to_the_guarantee(make_service):
    receipts = receipts_of(make_service(k_blocks=2), SamplingParams(max_new_tokens=4))
    assert "k_blocks: 2 there, 1 here" in make_service().replay(receipts).guarantee
    assert make_service(k_blocks=2).replay(receipts).num("equal") == 4


def test_an_answer_without_tokens_has_a_receipt_and_nothing_to_prove(make_service):
    engine = (service := make_service()).engine
    engine.add([1, 2], SamplingParams(max_new_tokens=4), options=ASKED)
    engine.pause_generation("abort")
    [aborted] = engine.step()
    assert aborted.receipt["output"] == [] == aborted.receipt["spans"]
    assert service.replay([aborted.receipt]).num("equal") == 1


def test_an_ignored_prompt_has_a_receipt_without_output_and_nothing_to_prove(make_service):
    service = make_service(max_model_len=16)
    ignored, answered = receipts_of(service, SamplingParams(max_new_tokens=4), [LONG, [1, 2]])
    assert ignored["finish"]["type"] == "ignored" and ignored["output"] == []
    forged = changed(answered, finish=ignored["finish"])
    assert [(v.status, v.what) for v in service.replay([ignored, answered, forged]).verdicts] == [
        ("equal", ""), ("equal", ""), ("differs", "end"),
    ]  # fmt: skip


@pytest.mark.parametrize("min_new_tokens", [0, 150])
def test_an_aborted_answer_is_drawn_no_further_than_it_went(make_service, min_new_tokens):
    service = make_service("lfm2", speculation="off")  # whose samples are proven by the engine's own steps
    engine = service.engine
    params = SamplingParams(max_new_tokens=200, min_new_tokens=min_new_tokens, ignore_eos=True, sampling_seed=1)
    with engine.model.rollout_phase():
        for prompt in PROMPTS:
            engine.add(prompt, params, options=ASKED)
        for _ in range(9):
            assert engine.step() == []
        engine.abort_request(abort_all=True)
        receipts = [answer.receipt for answer in engine.step()]
    assert {receipt["finish"]["type"] for receipt in receipts} == {"abort"}
    before = engine.metrics.num_steps
    report = service.replay(receipts)
    assert report.num("equal") == 4, list(report.lines())
    assert engine.metrics.num_steps - before < 30
    last = [changed(one, logprobs=[*one["logprobs"][:-1], one["logprobs"][-1] ^ 1]) for one in receipts]
    assert {(v.status, v.what) for v in service.replay(last).verdicts} == {("differs", "logprob")}


@pytest.mark.parametrize("family", ["qwen3", "lfm2", "mamba2"])  # proven by prefills, and by the engine's steps
def test_settings_that_no_request_can_have_leave_the_other_samples_proven(make_service, family):
    service = make_service(family)
    receipts = receipts_of(service, SamplingParams(max_new_tokens=4))
    bias = {"max_new_tokens": 4, "logit_bias": {"9999": "0x1p0"}}
    verdicts = service.replay([changed(receipts[0], settings=bias), *receipts[1:]]).verdicts
    assert [v.status for v in verdicts] == ["unproven", "equal", "equal", "equal"]


def test_a_claim_beyond_the_context_of_the_model_is_unproven_and_the_others_are_proven(make_service):
    config = GPTNeoConfig(
        vocab_size=256, hidden_size=64, num_layers=2, num_heads=2, attention_types=[[["global", "local"], 1]],
        max_position_embeddings=128, attention_dropout=0.0, embed_dropout=0.0, resid_dropout=0.0, bos_token_id=None,
        eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(1)
    service = make_service(module=GPTNeoForCausalLM(config).train())  # its positions have a table of 128 rows
    whole, good = receipts_of(service, SamplingParams(max_new_tokens=8), [[1] * 120, [5, 6, 7]])
    longer = changed(whole, prompt=[1] * 121, max_model_len=10**6)
    beyond = changed(whole, prompt=[1] * 300, max_model_len=10**6)
    verdicts = service.replay([good, longer, whole, beyond]).verdicts
    assert [v.status for v in verdicts] == ["equal", "unproven", "equal", "unproven"]
    assert "its 129 tokens are more than the 128 that this model takes" in verdicts[1].what
    narrow = make_service(max_model_len=64)
    long = receipts_of(make_service(), SamplingParams(max_new_tokens=4), [LONG])
    assert narrow.replay(long).num("equal") == 1, "the engine's own limit is none of its proofs"


@pytest.mark.parametrize("size", [1, 3])
def test_spans_of_equal_weights_are_drawn_in_one_piece(make_service, size):
    service = make_service()
    [receipt] = receipts_of(service, SamplingParams(max_new_tokens=60, ignore_eos=True), [[3, 17, 90]])
    [span] = receipt["spans"]
    divided = changed(receipt, spans=[{**span, "start": at, "end": min(at + size, 60)} for at in range(0, 60, size)])
    wrong = changed(divided, logprobs=with_item(divided["logprobs"], 40, 5))
    service.replay([receipt])  # tries the head
    rows = []
    embeddings = service.engine.model.module.get_input_embeddings()
    embeddings.register_forward_pre_hook(lambda _, arguments: rows.append(arguments[0].numel()))
    [verdict] = service.replay([divided]).verdicts
    assert (verdict.status, verdict.num_tokens) == ("equal", 60)
    assert sum(rows) == 2 * TRIAL_ROWS + 62
    [verdict] = service.replay([wrong]).verdicts
    assert (verdict.status, verdict.position, verdict.num_tokens) == ("differs", 40, 40)


def test_digests_in_the_place_of_tokens_are_not_proven_alone(make_service):
    service = make_service(receipts="digests")
    answers = service.engine.generate(PROMPTS, SamplingParams(max_new_tokens=4))
    report = service.replay([c.receipt for c in answers])
    assert report.num("unproven") == 4 and "give the file that has the sample" in report.verdicts[0].what
    assert answers[0].receipt["prompt"] == digest_of(PROMPTS[0])


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("format", 99, "format is 99"),
        ("output", [1, 2, 9999], "output holds no token ids"),
        ("logprobs", [1], "logprobs holds no 32 bits"),
        ("seed", "5", "seed is no int64"),
        ("spans", [], "spans cover 0 of 4"),
        ("settings", {"tempreature": 1}, "unknown key 'tempreature'"),
        ("finish", None, "finish is no object with a type"),
        ("finish", {}, "finish is no object with a type"),
        ("finish", {"type": "x"}, "finish is no object with a type"),
        ("guarantee", None, "guarantee is no object"),
        ("guarantee", {"versions": 1.5}, "guarantee is no object"),
        ("grammar", 0, "grammar is no object"),
        ("grammar", {"mode": "text", "jumps": 1}, "grammar is no object"),
        ("grammar", {"mode": "text", "jumps": [{"a": 1}]}, "grammar is no object"),
        ("grammar", {"mode": "off", "jumps": [], "block_size": []}, "grammar is no object"),
        ("guarantee", {"dtype": []}, "guarantee is no object"),
        ("guarantee", {"dtype": "float99"}, "guarantee is no object"),
        ("guarantee", {"k_blocks": 0}, "guarantee is no object"),
        ("settings", {"max_new_tokens": 4, "logit_bias": {"9999": "0x1p0"}}, "logit_bias names tokens [9999]"),
        ("eos", ["x"], "eos is no list of token ids"),
        ("number", "x", "number is no number"),
        ("engine", {}, "engine is no text"),
        ("spans", [{"version": "1"}], "spans is no list"),
        ("settings", {"temperature": "0x1p99999"}, "settings"),
    ],
)
def test_a_receipt_that_is_none_is_named(make_service, field, value, named):
    service = make_service()
    [receipt] = receipts_of(service, SamplingParams(max_new_tokens=4), [[1, 2]])
    [verdict] = service.replay([changed(receipt, **{field: value})]).verdicts
    assert verdict.status == "unproven" and named in verdict.what


def test_an_output_goes_on_after_no_stop_and_ends_with_the_one_that_it_names(make_service):
    service = make_service()
    params = SamplingParams(max_new_tokens=30, stop_token_ids=list(range(60)), sampling_seed=2)
    [receipt] = receipts_of(service, params, [[1, 2]])
    assert receipt["finish"]["type"] == "stop" and service.replay([receipt]).num("equal") == 1
    longer = changed(
        receipt,
        output=[*receipt["output"], 100],
        logprobs=[*receipt["logprobs"], 0],
        spans=[{**receipt["spans"][0], "end": len(receipt["output"]) + 1}],
    )
    other = changed(receipt, finish={"type": "stop", "matched": 99})
    assert [(v.what, v.position) for v in service.replay([longer, other]).verdicts] == [
        ("end", len(receipt["output"])),
        ("end", len(receipt["output"]) - 1),
    ]


def test_end_of_sequence_tokens_that_the_model_does_not_have_end_no_output(make_service):
    service = make_service()
    [receipt] = receipts_of(service, SamplingParams(max_new_tokens=8, sampling_seed=2), [[1, 2]])
    last = receipt["output"][-1]
    ended = changed(receipt, eos=[last], finish={"type": "stop", "matched": last})
    unseen = changed(receipt, eos=[next(id for id in range(256) if id not in receipt["output"])])
    verdicts = service.replay([ended, unseen]).verdicts
    assert [v.status for v in verdicts] == ["unproven", "equal"]
    assert f"its output has tokens [{last}], which end a sequence there or here alone" in verdicts[0].what


@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize("family", ["qwen3", "lfm2"])  # proven by prefills, and by the engine's steps
def test_end_of_sequence_tokens_that_were_never_drawn_must_be_known_here(make_service, family, ignore_eos):
    service = make_service(family)
    kept, size = set(range(65, 70)), service.engine.model.vocab_size
    params = SamplingParams(max_new_tokens=12, min_new_tokens=12, ignore_eos=ignore_eos, sampling_seed=7)
    [honest] = receipts_of(service, params, [[1, 2]])
    banned = {id: -float("inf") for id in range(size) if id not in kept}
    [restricted] = receipts_of(service, replace(params, min_new_tokens=0, logit_bias=banned), [[1, 2]])
    forged = changed(
        restricted, settings=honest["settings"], eos=[id for id in range(size) if id not in restricted["output"]]
    )
    unseen = changed(honest, eos=[next(id for id in range(size) if id not in honest["output"])])
    beyond = changed(honest, eos=[*honest["eos"], size, size + 7])
    as_stop = changed(honest, eos=[4], settings={**honest["settings"], "stop_token_ids": [4]})
    verdicts = service.replay([honest, forged, unseen, beyond, as_stop]).verdicts
    assert [v.status for v in verdicts] == ["equal", "unproven", "unproven", "equal", "equal"]
    assert "none is drawn before min_new_tokens" in verdicts[1].what


def cut_to(receipt: dict, num: int, **finish: object) -> dict:
    """Return a receipt whose output was cut to its first tokens, with a hash that was made anew."""
    spans = [{**span, "end": min(span["end"], num)} for span in receipt["spans"] if span["start"] < num]
    lists = {name: receipt[name][:num] for name in ("output", "logprobs")}
    return changed(receipt, **lists, spans=spans, finish=finish)


def test_an_output_that_was_cut_is_not_proven_by_another_end(make_service):
    service = make_service(max_model_len=48)
    receipts = receipts_of(service, SamplingParams(max_new_tokens=20, sampling_seed=3), [PROMPTS[0], PROMPTS[3]])
    assert [len(receipt["output"]) for receipt in receipts] == [20, 16], "the context ends the second one"
    assert service.replay(receipts).num("equal") == 2
    ends = [
        {"type": "length", "matched": None},
        {"type": "length"},
        {"type": "stop", "matched": None},
        {"type": "stop", "matched": "a text"},
    ]
    for receipt in receipts:
        verdicts = service.replay([cut_to(receipt, 3, **end) for end in ends]).verdicts
        assert [v.status for v in verdicts] == ["unproven", "unproven", "differs", "differs"]
        assert f"by its length after 3 of {len(receipt['output'])} tokens" in verdicts[0].what
        assert [(v.what, v.position) for v in verdicts[2:]] == [("end", 2), ("end", 2)]


def test_an_end_that_no_engine_gives_differs(make_service):
    service = make_service()
    params = SamplingParams(max_new_tokens=30, stop_token_ids=list(range(60)), sampling_seed=2)
    [receipt] = receipts_of(service, params, [[1, 2]])
    num, settings = len(receipt["output"]), receipt["settings"]
    assert receipt["finish"]["type"] == "stop" and num < 30
    as_length = {"max_new_tokens": num}
    ends = [
        changed(receipt, finish={"type": "abort", "matched": None}),
        changed(receipt, finish={"type": "length", "matched": None, "message": "the pool is full"}),
        changed(receipt, finish={"type": "length", "matched": None}, settings={**settings, **as_length}),
        cut_to(changed(receipt, settings={**settings, "stop": ["zzz"]}), 3, type="stop", matched="not asked for"),
        cut_to(changed(receipt, settings={**settings, "stop": ["zzz"]}), 0, type="stop", matched="zzz"),
    ]
    assert [(v.what, v.position) for v in service.replay(ends).verdicts] == [("end", num - 1)] * 3 + [
        ("end", 2), ("end", 0),
    ]  # fmt: skip
    said = [
        cut_to(changed(receipt, settings={**settings, "stop": ["zzz"]}), 3, type="stop", matched="zzz"),
        cut_to(changed(receipt, settings={**settings, "stop_regex": ["z+"]}), 3, type="stop", matched="zzz"),
        cut_to(receipt, 3, type="abort", matched=None),
        # whose filters kept more tokens than may be reported, which is looked at before the stop
        changed(receipt, finish={"type": "abort", "matched": None}, settings={**settings, "top_k": 250}),
    ]
    assert [v.what for v in service.replay(said).verdicts][:3] == [""] * 3
    assert service.replay(said).verdicts[3].what != "end"


@pytest.mark.parametrize("family", ["qwen3", "lfm2"])
def test_an_end_by_the_context_is_proven_by_an_engine_of_the_same_one(make_service, family):
    short, service = make_service(family, max_model_len=48), make_service(family)
    whole, ended = receipts_of(short, SamplingParams(max_new_tokens=20, sampling_seed=3), [PROMPTS[0], PROMPTS[3]])
    assert len(ended["output"]) == 16 and short.replay([whole, ended]).num("equal") == 2
    forged = changed(cut_to(whole, 7, type="length", matched=None), max_model_len=len(PROMPTS[0]) + 7)
    verdicts = service.replay([whole, ended, forged]).verdicts
    assert [v.status for v in verdicts] == ["equal", "unproven", "unproven"]
    assert "the context of its engine, 48 tokens (max_model_len)" in verdicts[1].what
    assert short.replay([forged]).num("unproven") == 1


def test_an_output_that_is_longer_than_its_settings_allow_differs_at_its_end(make_service):
    service = make_service()
    [receipt] = receipts_of(service, SamplingParams(max_new_tokens=9, sampling_seed=3), [PROMPTS[0]])
    shorter = changed(receipt, settings={**receipt["settings"], "max_new_tokens": 5})
    narrower = changed(receipt, max_model_len=len(PROMPTS[0]) + 7)
    assert [(v.what, v.position) for v in service.replay([shorter, narrower]).verdicts] == [("end", 5), ("end", 7)]


def test_an_answer_that_a_full_pool_ended_says_so_and_is_proven(make_service):
    service = make_service(kv_cache="4 blocks")
    [receipt] = receipts_of(service, SamplingParams(max_new_tokens=200, sampling_seed=3), [PROMPTS[0]])
    assert receipt["finish"]["type"] == "length" and len(receipt["output"]) < 200
    assert "is full with this sequence alone" in receipt["finish"]["message"]
    older = changed(receipt, finish={"type": "length", "matched": None})
    assert [v.status for v in make_service().replay([receipt, older]).verdicts] == ["equal", "unproven"]
