"""Environments of other packages: games of TextArena, tasks of reasoning-gym, with answers that a test gives."""

from __future__ import annotations

import asyncio
import builtins
import json
import random
import sys
import threading

import pytest
import reasoning_gym

from lockstep.integration.grpo.environments.chat import EpisodeChat
from lockstep.integration.grpo.environments.player import load_environment
from lockstep.integration.grpo.environments.session import NoRoom, Session
from lockstep.integration.grpo.settings.sections import DataSettings
from lockstep.rollout.completion import Completion, FinishReason, WeightSpan
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.tests.support.chat.tokenizer import byte_tokenizer, chat_template

TOKENIZER = byte_tokenizer(chat_template("hermes"))


def session(answers, max_model_len=10_000):
    """Return a session whose model gives these answers in turn, and the list of the prompts that it was asked."""
    prompts, answers = [], iter(answers)

    async def generate(prompt_ids, params, images):
        prompts.append(TOKENIZER.decode(prompt_ids))
        await asyncio.sleep(0)  # another episode may move
        answer = next(answers)
        text = answer(prompts[-1]) if callable(answer) else answer
        ids = (*TOKENIZER(text, add_special_tokens=False)["input_ids"], TOKENIZER.eos_token_id)
        reason = FinishReason("stop", TOKENIZER.eos_token_id)
        return Completion(
            "x", 0, tuple(prompt_ids), ids, text, (0.0,) * len(ids), reason, 0, 0, "0", None,
            (WeightSpan("0", None, 0, len(ids)),),
        )  # fmt: skip

    chat = EpisodeChat(DataSettings(), TOKENIZER)
    return Session(generate, chat, SamplingParams(max_new_tokens=20), 0, max_model_len), prompts


def played(name, row, answers, max_model_len=10_000, **options):
    its_session, prompts = session(answers, max_model_len)
    return asyncio.run(load_environment(name, options)(row, its_session)), prompts


def guesses(low=1, high=20):
    """Return answers that find a number by halving."""
    bounds = [low, high, None]

    def guess(prompt):
        told = prompt.rpartition("user")[2]
        if bounds[2] is not None:
            bounds[0 if "higher" in told else 1] = bounds[2] + (1 if "higher" in told else -1)
        bounds[2] = sum(bounds[:2]) // 2
        return f"I say [{bounds[2]}]"

    return [guess] * 10


def test_a_game_is_won_by_who_plays_it_well(monkeypatch):
    monkeypatch.setattr(builtins, "print", lambda *_: None)
    state = random.getstate()
    episode, prompts = played("textarena", {"seed": 3}, guesses(), env="GuessTheNumber-v0")
    assert episode.value == {"game": 1.0, "success": 1.0} and 2 < episode.num_turns <= 5
    assert "Guess The Number" in prompts[0] and "I say" not in prompts[0]
    assert prompts[1].startswith(prompts[0]) and prompts[1].count("I say") == 1, "the game repeats nothing"
    assert random.getstate() == state, "the job's random numbers are its own"


def test_games_with_one_seed_are_equal_however_many_are_played_at_a_time():
    name = "GuessTheNumber-v0"
    environment = load_environment("textarena", {"env": name})

    async def together():
        sessions = [session(["[1]", "[20]", "[10]", "[5]", *["[1]"] * 20]) for _ in range(4)]
        rows = [{"seed": seed} for seed in (1, 2, 1, 2)]
        await asyncio.gather(*(environment(row, its) for row, (its, _) in zip(rows, sessions, strict=True)))
        return [prompts for _, prompts in sessions]

    found = asyncio.run(together())
    alone = [played("textarena", {"seed": seed}, ["[1]", "[20]", "[10]", "[5]", *["[1]"] * 20], env=name)[1]
             for seed in (1, 2)]  # fmt: skip
    assert found == [*alone, *alone] and alone[0] != alone[1]


def first_free(told):
    """Play TicTacToe: the first free cell that the board shows."""
    return f"[{min(cell for cell in range(9) if f' {cell} ' in told.rpartition('Board')[2] or f'[{cell}]' in told)}]"


def test_an_opponent_plays_the_other_players(monkeypatch):
    moves = iter(["[3]", "[4]", "[8]"])
    monkeypatch.setattr(f"{__name__}.first_free", lambda told: next(moves))
    episode, prompts = played(
        "textarena", {"seed": 1, "env": "TicTacToe-v0"}, ["[0]", "[1]", "[2]"], num_players=2,
        opponent=f"{__name__}:first_free",
    )  # fmt: skip
    assert episode.value == {"game": 1.0, "success": 1.0} and len(prompts) == 3


def test_a_game_that_is_not_over_counts_nothing():
    episode, _ = played("textarena", {"seed": 3}, ["[1]", "[1]"], env="GuessTheNumber-v0", max_turns=1)
    assert episode.value == {"game": 0.0, "success": 0.0} and episode.num_turns == 1
    low = [f"[{number}]" for number in range(1, 10)]
    whole, _ = played("textarena", {"seed": 3}, low, env="GuessTheNumber-v0", max_turns=4)
    num = len(whole.prompt_ids) + len(whole.token_ids)
    cut, _ = played("textarena", {"seed": 3}, low, num + 5, env="GuessTheNumber-v0")
    assert cut.value == {"game": 0.0, "success": 0.0} and cut.token_ids == whole.token_ids, "the context has ended it"


@pytest.mark.parametrize(
    ("row", "options", "words"),
    [
        ({}, {"env": "GuessTheNumber-v0"}, "rows with seed, a number, not None"),
        ({"seed": 1}, {"env": "NoSuchGame-v0"}, "game 'NoSuchGame-v0': .*not found"),
        ({"seed": 1}, {"env": "TicTacToe-v0", "num_players": 2}, "option opponent"),
        ({"seed": 1}, {"env": "TicTacToe-v0"}, "number of players has to be 2"),
        ({"seed": 1}, {"env": "TicTacToe-v0", "num_players": 2, "opponent": "json:no"}, "opponent 'json:no'"),
    ],
)
def test_games_that_cannot_be_played_are_named(row, options, words):
    with pytest.raises(ValueError, match=words):
        played("textarena", row, ["[1]"], **options)


def entry(name="basic_arithmetic"):
    """Return a row as a file of JSON lines gives it."""
    return json.loads(json.dumps(reasoning_gym.create_dataset(name, size=1, seed=0)[0]))


def test_a_task_is_asked_again_after_a_wrong_answer():
    row = entry()
    right = f"It is <answer>{row['answer']}</answer>"
    episode, prompts = played("reasoning_gym", row, [right])
    assert episode.value == {"score": 1.0, "success": 1.0} and row["question"] in prompts[0]
    episode, prompts = played("reasoning_gym", row, ["<answer>no</answer>", right])
    assert episode.value == {"score": 0.5, "success": 1.0} and "not right" in prompts[1]
    episode, prompts = played("reasoning_gym", row, ["no idea", "<answer>none</answer>", right], attempts=3, decay=0.1)
    assert episode.value["score"] == pytest.approx(0.01) and len(prompts) == 3
    episode, _ = played("reasoning_gym", row, ["no", "no"])
    assert episode.value["success"] == 0.0 and episode.value["score"] < 0.5


def test_a_long_wrong_answer_that_leaves_no_room_ends_the_task_and_keeps_its_turn():
    row = entry()
    whole, _ = played("reasoning_gym", row, ["wrong " * 50], attempts=1)
    num = len(whole.prompt_ids) + len(whole.token_ids)
    cut, _ = played("reasoning_gym", row, ["wrong " * 50], num + 5, attempts=3)
    assert cut.token_ids == whole.token_ids and cut.value == whole.value and cut.num_turns == 1
    with pytest.raises(NoRoom):
        played("reasoning_gym", row, ["wrong"], 10)


def test_answers_are_scored_with_a_limit_beside_other_episodes(monkeypatch):
    asked = []

    def score(row, completion, *, limit_s):
        asked.append((threading.current_thread() is threading.main_thread(), limit_s))
        return 0.0

    monkeypatch.setattr("lockstep.integration.grpo.rewards.ready.reasoning_gym", score)
    episode, _ = played("reasoning_gym", entry(), ["9**9**9"] * 2, limit_s=0.5)
    assert episode.value == {"score": 0.0, "success": 0.0} and asked == [(False, 0.5)] * 2


def test_rows_and_options_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match=r"question, answer and metadata\.source_dataset"):
        played("reasoning_gym", {"prompt": "?"}, [])
    with pytest.raises(ValueError, match="answer and metadata are needed"):
        played("reasoning_gym", {"question": "?"}, ["yes"])
    with pytest.raises(ValueError, match="attempts of at least 1, not 0"):
        played("reasoning_gym", entry(), [], attempts=0)
    with pytest.raises(ValueError, match="has no option attempt"):
        load_environment("reasoning_gym", {"attempt": 1})
    with pytest.raises(ValueError, match="or the name of a ready one: agent, reasoning_gym, textarena, verifiers"):
        load_environment("reasoning-gym")


def test_a_package_that_is_not_there_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(ValueError, match=r"pip install 'lockstep\[verifiers\]'"):
        played("verifiers", {"prompt": []}, [], env="x")
