"""The drafts of an engine as its user sees them: options, counts, reasons, added sources, and the saved history."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.rollout.completion import Completion, DraftCounts
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.request_options import RequestOptions
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.rollout.sequences.request import Request
from lockstep.rollout.speculation.lengths import WholeDrafts
from lockstep.rollout.speculation.proposer import NO_PROPOSAL, Proposal

PROMPT = [3, 17, 90, 4, 55]
OTHER = [250, 8, 9]
PARAMS = SamplingParams(max_new_tokens=12, sampling_seed=5, ignore_eos=True)


@pytest.fixture(autouse=True)
def _one_thread(restore_threads):
    torch.set_num_threads(1)


@pytest.fixture
def make_engine(make_model) -> Callable[..., Engine]:
    """Make engines that take every proposal, whatever it costs."""

    def make(**config: object) -> Engine:
        settings: dict[str, Any] = {"kv_cache": 64, "max_num_seqs": 8, "max_num_batched_tokens": 256, **config}
        engine = Engine(make_model("qwen3"), EngineConfig(**settings))
        if engine.parts.speculation is not None:
            engine.parts.speculation.lengths = WholeDrafts()
        return engine

    return make


def of_drafts(engine: Engine) -> dict[str, Any]:
    return engine.state()["speculation"]  # type: ignore[return-value]


class Says:
    """A proposer that continues known outputs."""

    def __init__(self, outputs: Sequence[Sequence[int]] = (), name: str = "tests") -> None:
        self.name, self.outputs = name, outputs
        self.ended: list[str] = []

    def propose(self, request: Request, most: int) -> Proposal:
        num = request.sequence.num_output_tokens
        for output in self.outputs:
            if list(output[:num]) == list(request.sequence.token_ids[request.sequence.num_prompt_tokens :]):
                return Proposal(output[num : num + most])
        return NO_PROPOSAL

    def on_tokens(self, request: Request, num_cut: int) -> None: ...

    def on_end(self, request: Request) -> None:
        self.ended.append(request.id)


# -- what a request says and is told ----------------------------------------------------------------------------------


def test_a_request_counts_its_drafts_by_source_and_metrics_state_and_answer_agree(make_engine):
    engine = make_engine(speculation={"caller": 4, "past": 2})
    [plain] = engine.generate([PROMPT], PARAMS, options=RequestOptions(speculation=False))
    assert (plain.drafts, plain.num_draft_steps, plain.num_accepted_tokens) == ((), 0, 0)
    steps = engine.metrics.num_steps
    [again] = engine.generate([PROMPT], PARAMS, options=RequestOptions(draft_token_ids=plain.token_ids))
    assert again.token_ids == plain.token_ids
    assert again.logprobs == plain.logprobs
    assert again.drafts == (
        DraftCounts("caller", 3, 9, 9),
    )  # 1 token of the prompt's step, 5 + 5 + 2: the last one draws
    assert (again.num_draft_steps, again.num_drafted_tokens, again.num_accepted_tokens) == (3, 9, 9)
    assert engine.metrics.num_steps - steps == 12 - 9
    counts = of_drafts(engine)["sources"]["caller"]
    assert (counts["num_drafts"], counts["num_drafted"], counts["num_accepted"]) == (3, 9, 9)
    assert (engine.metrics.num_drafted_tokens, engine.metrics.num_accepted_tokens) == (9, 9)


def test_options_may_be_one_for_each_prompt(make_engine):
    engine = make_engine(speculation={"caller": 4})
    plain = engine.generate([PROMPT, OTHER], PARAMS)
    drafts = [RequestOptions(draft_token_ids=plain[0].token_ids), RequestOptions()]
    again = engine.generate([PROMPT, OTHER], PARAMS, options=drafts)
    assert [c.token_ids for c in again] == [c.token_ids for c in plain]
    assert again[0].num_accepted_tokens > 0
    assert again[1].num_drafted_tokens == 0
    with pytest.raises(ValueError, match="2 prompts, but 1 options"):
        engine.generate([PROMPT, OTHER], PARAMS, options=drafts[:1])


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([1, -1], r"draft_token_ids must be token ids, not \[-1\]"),
        ([1.5, True], r"draft_token_ids must be token ids, not \[1.5, True\]"),
        ("12", "draft_token_ids must be a sequence"),
        (None, "draft_token_ids must be a sequence"),
    ],
    ids=str,
)
def test_options_that_are_no_drafts_are_named(given, says):
    with pytest.raises(ValueError, match=says):
        RequestOptions(draft_token_ids=given)
    with pytest.raises(ValueError, match="speculation must be true or false, not 1"):
        RequestOptions(speculation=1)  # type: ignore[arg-type]


def test_drafts_outside_the_vocabulary_or_longer_than_the_context_queue_nothing(make_engine):
    engine = make_engine()
    too_long = [1] * (engine.max_model_len + 1)
    for ids, says in (
        ([7, 256], r"draft_token_ids names \[256\]"),
        (too_long, "draft_token_ids has .* the context has"),
    ):
        with pytest.raises(ValueError, match=says):
            engine.generate([PROMPT], PARAMS, options=RequestOptions(draft_token_ids=tuple(ids)))
    assert not engine.has_work


# -- why there is none ------------------------------------------------------------------------------------------------


def test_the_state_of_an_engine_without_speculation_says_so_and_offers_nothing(make_engine):
    engine = make_engine(speculation="off")
    engine.generate([PROMPT], PARAMS)
    assert of_drafts(engine)["why_not"] == 'EngineConfig.speculation is "off"'
    assert of_drafts(engine)["sources"] == {}
    for refused in (
        lambda: engine.drafts.add_source(Says()),
        lambda: engine.drafts.save_history("nowhere"),
        lambda: engine.drafts.load_history("nowhere"),
    ):
        with pytest.raises(ValueError, match='is "off"'):
            refused()


def test_an_empty_table_asks_nobody(make_engine):
    engine = make_engine(speculation={})
    assert "no source is asked" in of_drafts(engine)["why_not"]
    with pytest.raises(ValueError, match="keeps no history"):
        engine.drafts.save_history("nowhere")


def test_the_state_counts_why_sequences_had_no_draft(make_engine):
    engine = make_engine(speculation={"caller": 4}, chunked_prefill_size=2)
    engine.generate([PROMPT], PARAMS, options=RequestOptions(speculation=False))
    without = of_drafts(engine)["num_without"]
    assert without["prefill"] == 2  # 2 + 2 + 1 tokens
    assert without["refused"] == 12
    engine.generate([OTHER], SamplingParams(max_new_tokens=1))
    assert of_drafts(engine)["num_without"]["last_token"] == 1
    engine.generate([OTHER], PARAMS)
    assert of_drafts(engine)["num_without"]["no_proposal"] > 0


def test_a_live_request_shows_its_drafts_and_why_its_newest_step_had_none(make_engine):
    engine = make_engine(speculation={"caller": 2})
    [plain] = engine.generate([PROMPT], PARAMS)
    engine.add(PROMPT, PARAMS, rid="drafted", options=RequestOptions(draft_token_ids=plain.token_ids))
    engine.add(PROMPT, PARAMS, rid="plain", options=RequestOptions(speculation=False))
    with engine.model.rollout_phase():
        engine.step()
        engine.step()
        views = {view.id: view for view in engine.live_sequences()}
        assert (views["drafted"].num_drafted_tokens, views["drafted"].num_accepted_tokens) != (0, 0)
        assert views["drafted"].why_no_draft is None
        assert (views["plain"].num_drafted_tokens, views["plain"].why_no_draft) == (0, "refused")
        engine.abort_request(abort_all=True)


def test_a_rest_says_how_long_it_is_and_why(make_engine):
    engine = make_engine(speculation={"caller": 4})
    engine.generate([PROMPT] * 16, SamplingParams(max_new_tokens=20, ignore_eos=True))
    assert "nothing was proposed" in of_drafts(engine)["why_not"]
    assert of_drafts(engine)["is_resting"]
    assert of_drafts(engine)["num_without"]["resting"] > 0


def test_the_trace_has_the_drafts_of_each_step(make_engine, tmp_path):
    engine = make_engine(speculation={"caller": 4}, trace=str(tmp_path / "trace.json"))
    [plain] = engine.generate([PROMPT], PARAMS)
    engine.generate([PROMPT], PARAMS, options=RequestOptions(draft_token_ids=plain.token_ids))
    engine.parts.reports.trace.close()
    events = json.loads((tmp_path / "trace.json").read_text())
    drafts = [event["args"] for event in events if event.get("name") == "drafts"]
    sources = of_drafts(engine)["sources"]["caller"]
    assert sources["num_drafts"] == len(drafts) > 1
    assert sum(args["sources"]["caller"][0] for args in drafts) == sources["num_drafted"]
    assert sum(args["sources"]["caller"][1] for args in drafts) == sources["num_accepted"] > 0
    assert all(args["step"] > 0 for args in drafts)


# -- added sources ----------------------------------------------------------------------------------------------------


def test_an_added_source_is_asked_and_counted_and_changes_no_bit(make_engine):
    engine = make_engine(speculation={})
    [plain] = engine.generate([PROMPT], PARAMS)
    says = Says([plain.token_ids])
    engine.drafts.add_source(says, 3)
    [again] = engine.generate([PROMPT], PARAMS)
    assert (again.token_ids, again.logprobs) == (plain.token_ids, plain.logprobs)
    assert again.drafts[0].source == "tests"
    assert again.num_accepted_tokens == again.num_drafted_tokens > 0
    assert of_drafts(engine)["sources"]["tests"]["failure"] is None
    assert says.ended == [again.id]
    with pytest.raises(ValueError, match="'tests' is there already"):
        engine.drafts.add_source(Says())
    with pytest.raises(ValueError, match="from 1 to 64, not 65"):
        engine.drafts.add_source(Says(name="deep"), 65)
    with pytest.raises(ValueError, match="must be a printable text, not ''"):
        engine.drafts.add_source(Says(name=""))


class Answers(Says):
    """A proposer with one answer."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.answer = answer

    def propose(self, request: Request, most: int) -> Proposal:
        return self.answer


class Raises(Says):
    """A proposer that raises in one of its methods."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def _raise(self, where: str) -> None:
        if where == self.where:
            raise LookupError("no such thing")

    def propose(self, request: Request, most: int) -> Proposal:
        self._raise("propose")
        return Proposal([7])

    def on_end(self, request: Request) -> None:
        self._raise("on_end")


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (Raises("propose"), "propose raised LookupError: no such thing"),
        (Raises("on_end"), "on_end raised LookupError: no such thing"),
        (Answers(None), "propose raised TypeError"),
        (Answers(Proposal([7], "sure")), "the confidence must be an integer, not 'sure'"),  # type: ignore[arg-type]
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_source_that_fails_is_asked_no_more_and_ends_no_request(make_engine, source, says):
    engine = make_engine(speculation={})
    [plain] = engine.generate([PROMPT], PARAMS)
    engine.drafts.add_source(source)
    [again] = engine.generate([PROMPT], PARAMS)
    assert (again.token_ids, again.logprobs) == (plain.token_ids, plain.logprobs)
    assert again.finish_reason == plain.finish_reason
    assert says in of_drafts(engine)["sources"]["tests"]["failure"]


@pytest.mark.parametrize("bad", [256, -1, 1.5, "7"])
def test_proposed_tokens_that_are_none_are_counted(make_engine, bad):
    engine = make_engine(speculation={})
    [plain] = engine.generate([PROMPT], PARAMS)
    engine.drafts.add_source(Answers(Proposal([bad])))
    [again] = engine.generate([PROMPT], PARAMS)
    assert (again.token_ids, again.logprobs, again.drafts) == (plain.token_ids, plain.logprobs, ())
    assert of_drafts(engine)["sources"]["tests"]["num_refused"] > 0


# -- the history of samples -------------------------------------------------------------------------------------------


def test_saved_history_serves_another_engine(make_engine, tmp_path):
    path = tmp_path / "history.json"
    first = make_engine(speculation={"history": 4})
    plain = first.generate([PROMPT, OTHER], PARAMS)
    assert first.drafts.keeps_history
    assert first.drafts.save_history(path) == 2
    second = make_engine(speculation={"history": 4})
    assert second.drafts.load_history(str(path)) == 2
    again = second.generate([PROMPT, OTHER], PARAMS)
    assert [c.token_ids for c in again] == [c.token_ids for c in plain]
    assert all(c.num_accepted_tokens > 0 and c.drafts[0].source == "history" for c in again)
    assert [file.name for file in tmp_path.iterdir()] == ["history.json"]


def test_loaded_history_keeps_to_the_memory_for_it(make_engine, tmp_path):
    engine = make_engine(speculation={"history": 4})
    engine.generate([[i, i + 1] for i in range(20)], PARAMS)
    engine.drafts.save_history(tmp_path / "history.json")
    small = make_engine(speculation={"history": 4})
    assert small.parts.speculation is not None
    small.parts.speculation.samples.max_bytes = of_drafts(engine)["history_bytes"] // 4  # of five of them
    assert small.drafts.load_history(tmp_path / "history.json") == 20
    assert of_drafts(small)["num_prompts_kept"] == 5
    assert of_drafts(small)["history_bytes"] == of_drafts(engine)["history_bytes"] // 4


def test_a_file_that_is_no_history_is_refused_by_name_and_adds_nothing(make_engine, tmp_path):
    engine = make_engine(speculation={"history": 4})
    (tmp_path / "history.json").write_text("[]")
    with pytest.raises(ValueError, match=r"history.json is no saved history of samples"):
        engine.drafts.load_history(tmp_path / "history.json")
    with pytest.raises(FileNotFoundError):
        engine.drafts.load_history(tmp_path / "nowhere.json")
    assert of_drafts(engine)["num_prompts_kept"] == 0


def test_a_history_that_cannot_be_written_leaves_nothing(make_engine, tmp_path):
    engine = make_engine(speculation={"history": 4})
    engine.generate([PROMPT], PARAMS)
    with pytest.raises(FileNotFoundError):
        engine.drafts.save_history(tmp_path / "nowhere" / "history.json")
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError, match="taken"):
        engine.drafts.save_history(tmp_path / "taken")
    assert [file.name for file in tmp_path.iterdir()] == ["taken"]
    assert Path(tmp_path / "taken").is_dir()


def test_the_history_of_a_prompt_serves_the_key_it_was_sampled_under(make_engine):
    engine = make_engine(speculation={"history": 4})
    mine, others = RequestOptions(extra_key="mine"), RequestOptions(extra_key="others")

    def accepted(options: RequestOptions) -> int:
        completion: Completion = engine.generate([PROMPT], PARAMS, options=options)[0]
        return completion.num_accepted_tokens

    assert [accepted(mine), accepted(others)] == [0, 0]
    assert accepted(mine) > 0
