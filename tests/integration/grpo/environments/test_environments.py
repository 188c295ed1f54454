"""Episodes of several turns: their tokens, their rewards, and log-probabilities that are those of one forward."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import pytest
import torch

from lockstep.integration.grpo.backends.ddp import DdpBackend
from lockstep.integration.grpo.engines.answers import Answer, StepSamples
from lockstep.integration.grpo.engines.rollouts import Rollouts
from lockstep.integration.grpo.environments.episode import Episode
from lockstep.integration.grpo.environments.player import EpisodePlayer, Play, job_environment, load_environment
from lockstep.integration.grpo.environments.session import NoRoom
from lockstep.integration.grpo.environments.turns import Turns
from lockstep.integration.grpo.rewards.score import Score
from lockstep.integration.grpo.rewards.scorer import Scorer
from lockstep.integration.grpo.rewards.user_calls import CallTimedOut, UserCalls
from lockstep.integration.grpo.settings.config import JobConfig
from lockstep.integration.grpo.settings.sampling import RolloutSettings
from lockstep.integration.grpo.settings.sections import DataSettings, RunSettings
from lockstep.integration.grpo.settings.training import TrainSettings
from lockstep.integration.grpo.tasks.problems import Problem
from lockstep.integration.grpo.tasks.task import Task
from lockstep.integration.grpo.training.trainer import GrpoTrainer
from lockstep.integration.ranks import Ranks, process_group
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.tests.rollout.engine.callers import trainer_logprobs
from lockstep.tests.support.chat.tokenizer import VOCAB_SIZE, byte_tokenizer, chat_template

RANKS = Ranks(0, 1, torch.device("cpu"))
TOKENIZER = byte_tokenizer(chat_template("hermes"))
ROWS = [{"prompt": f"question {n}", "answer": str(n), "turns": n} for n in (1, 2, 3)]
PROBLEMS = [Problem(row["prompt"], row["answer"], f"rows.jsonl:{at + 1}", row) for at, row in enumerate(ROWS)]
PARAMS = [SamplingParams(n=2, max_new_tokens=12, sampling_seed=seed) for seed in range(3)]


async def talk(row, session, *, ending="?"):
    """Ask as many times as the row says; the reward is the length of all answers."""
    texts = [(await session.turn(row["prompt"])).text]
    while len(texts) < row["turns"]:
        texts.append((await session.turn({"role": "user", "content": f"and {len(texts)}{ending}"})).text)
    return session.episode({"length": sum(map(len, texts)), "success": len(texts) > 1})


async def by_tokens(row, session):
    """Ask with token ids alone."""
    await session.turn([5, 6, 7])
    await session.turn([8, 9], stop_token_ids=[10], max_new_tokens=3)
    return session.episode(1.0)


async def fails(row, session):
    """Fail at the second row's second turn."""
    await session.turn("hello")
    if row["answer"] == "2":
        raise KeyError("no such thing")
    while True:
        await session.turn("again")


LOOPS = set()


async def notes_its_loop(row, session):
    """Keep the event loop, as a client of a service would."""
    LOOPS.add(asyncio.get_running_loop())
    await session.turn("hello")
    return session.episode(1.0)


async def hangs(row, session):
    """Wait for ever at the second row."""
    await session.turn("hello", max_new_tokens=1)
    if row["answer"] == "2":
        await asyncio.Event().wait()
    return session.episode(1.0)


async def gives_a_number(row, session):
    """Return what is no episode."""
    return 1.0


async def no_number(row, session):
    """Return a reward that is no number."""
    await session.turn("hello")
    return session.episode("good")


def config(tmp_path, name="talk", **options):
    return JobConfig(
        RunSettings("x", str(tmp_path)),
        data=DataSettings(**options.pop("data", {})),
        environment=f"{__name__}:{name}",
        rollout=RolloutSettings(prompts_per_step=3, group_size=2, max_new_tokens=12),
        train=TrainSettings(num_warmup_steps=0, microbatch_tokens=100),
        environment_options=options,
    )


def one_forward(service, episode):
    """Return the log-probabilities of an episode's sampled tokens in one forward over all of it."""
    found = trainer_logprobs(service.engine, [*episode.prompt_ids, *episode.token_ids])[len(episode.prompt_ids) - 1 :]
    return [logprob for logprob, sampled in zip(found, episode.sampled, strict=True) if sampled]


def test_the_tokens_of_an_episode_are_those_of_the_template_around_those_that_were_sampled(service, tmp_path):
    episodes = EpisodePlayer(config(tmp_path, ending="!"), service, TOKENIZER).play(PROBLEMS, PARAMS)
    assert [[one.num_turns for one in group] for group in episodes] == [[1, 1], [2, 2], [3, 3]]
    for row, group in zip(ROWS, episodes, strict=True):
        for one in group:
            text = TOKENIZER.decode(one.prompt_ids)
            assert text == f"<|im_start|>user\n{row['prompt']}<|im_end|>\n<|im_start|>assistant\n"
            assert len(one.sampled) == len(one.token_ids) and sum(one.sampled) == len(one.logprobs) and one.sampled[-1]
            written, runs = [], one.kept()["runs"]
            at = 0
            for number, length in enumerate(runs):
                if number % 2:
                    written.append(TOKENIZER.decode(one.token_ids[at : at + length]))
                at += length
            assert at == len(one.token_ids)
            for number, text in enumerate(written, 1):
                end = f"<|im_start|>user\nand {number}!<|im_end|>\n<|im_start|>assistant\n"
                assert text in ("\n" + end, "<|im_end|>\n" + end)  # the answer ended with the token, or was cut off
            done = one.as_completion(1)
            assert (done.index, len(done.token_ids), done.logprobs) == (1, sum(one.sampled), one.logprobs)
            assert [(span.version, span.start, span.end) for span in one.weight_versions] == [
                ("0", 0, len(one.logprobs))
            ]
    assert len({one.token_ids for group in episodes for one in group}) == 6, "samples of a row differ"


def test_episodes_are_the_same_however_many_play(service, tmp_path):
    player = EpisodePlayer(config(tmp_path), service, TOKENIZER)
    together = player.play(PROBLEMS, PARAMS)
    alone = [player.play([problem], [params])[0] for problem, params in zip(PROBLEMS, PARAMS, strict=True)]
    drawn = [[(one.token_ids, one.logprobs) for one in group] for group in together]
    assert drawn == [[(one.token_ids, one.logprobs) for one in group] for group in alone]


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_log_probabilities_are_those_of_one_forward_through_pauses_and_commits_between_turns(service, tmp_path, mode):
    engine, versions = service.engine, iter(range(1, 10_000))

    async def disturbed(row, session):
        for number in range(4):
            await session.turn(f"{row['prompt']} {number}", ignore_eos=True)
            if row["answer"] == "1":  # every episode meets some of these within a turn, and between turns
                engine.pause_generation(mode)
                service.commit_in_place(str(next(versions)), source=engine.model.trained_module.named_parameters())
                engine.flush_cache(retracts=True)
                engine.continue_generation()
        return session.episode(0.0)

    player = EpisodePlayer(config(tmp_path), service, TOKENIZER)
    player._environment = disturbed
    engine.start()
    try:
        episodes = [one for group in player.play(PROBLEMS, PARAMS) for one in group]
    finally:
        engine.stop()
    assert max(len(one.weight_versions) for one in episodes) > 2
    assert sum(one.num_retractions for one in episodes) > 0 or mode == "in_place"
    for one in episodes:
        assert list(one.logprobs) == one_forward(service, one)


def test_a_step_of_episodes_is_trained_on_what_was_sampled_with_a_gap_of_zero(service, tmp_path):
    job = config(tmp_path)
    task = Task(lambda step, num: PROBLEMS[:num], PROBLEMS, PROBLEMS)

    class Local:
        def __init__(self):
            self.service = service

    player = EpisodePlayer(job, service, TOKENIZER)
    rollouts = Rollouts(job, RANKS, Local(), task, Scorer(job.rewards), player)
    with process_group(RANKS, 30):
        backend = DdpBackend(job.train, RANKS)
        trainer = GrpoTrainer(
            service.engine.model, backend, job.train, 1.0, RANKS, announce_step=service.optimizer_step
        )
        noted = StepSamples()
        before = service.engine.model.trained_module.lm_head.weight.detach().clone()
        stats = trainer.update(rollouts.samples(0, noted), 0)
        assert stats.logprob_gap == 0.0 and noted.waited_s > 0
        assert not torch.equal(before, service.engine.model.trained_module.lm_head.weight)
        del trainer, backend
    assert [score.is_success for score in noted.scores] == [False, False, True, True, True, True]
    assert all(score.total == score.components["length"] for score in noted.scores)
    rows = rollouts.rows(noted)
    assert [row["num_turns"] for row in rows] == [1, 1, 2, 2, 3, 3]
    assert all(len(row["token_ids"]) == sum(row["runs"][::2]) for row in rows)
    assert all("and 1?" in row["text"] for row in rows[2:])


def test_a_gap_of_an_episode_is_seen(service, tmp_path):
    """A wrong token among those that the environment wrote changes the log-probabilities behind it."""
    [[episode]] = EpisodePlayer(config(tmp_path), service, TOKENIZER).play(
        [PROBLEMS[1]], [replace(PARAMS[1], n=1)]
    )  # fmt: skip
    written = episode.sampled.index(False)
    other = list(episode.token_ids)
    other[written] = (other[written] + 1) % 256
    changed = replace(episode, token_ids=tuple(other))
    assert list(episode.logprobs) == one_forward(service, episode)
    assert list(episode.logprobs) != one_forward(service, changed)


def test_turns_of_token_ids_stand_as_they_are(service, tmp_path):
    [[one, _]] = EpisodePlayer(config(tmp_path, "by_tokens"), service, TOKENIZER).play(PROBLEMS[:1], PARAMS[:1])
    assert one.prompt_ids == (5, 6, 7) and one.num_turns == 2
    start = one.sampled.index(False)
    assert one.token_ids[start : start + 2] == (8, 9) and one.sampled[start + 2 :] == (True,) * len(
        one.sampled[start + 2 :]
    )
    assert len(one.sampled) - start - 2 <= 3


def test_weights_of_an_environment_are_of_its_reward_or_its_components_and_one_of_neither_is_told(
    service, tmp_path, caplog
):
    def scores(name, *played, **weights):
        player = EpisodePlayer(replace(config(tmp_path, name), reward_weights=weights), service, TOKENIZER)
        return player.scores(PROBLEMS[:1], [played])

    [[episode]] = EpisodePlayer(config(tmp_path, "by_tokens"), service, TOKENIZER).play(
        PROBLEMS[:1], [replace(PARAMS[0], n=1)]
    )
    assert scores("by_tokens", episode, reward=5.0)[0][0].total == 5.0
    name = f"environment '{__name__}:by_tokens'"
    assert scores("by_tokens", digist=5.0) == [[]], "a rank may have no episode of an evaluation"
    parts = replace(episode, value={"digits": 2.0})
    assert scores("by_tokens", parts, digits=3.0, reward=2.0)[0][0].total == 12.0 and not caplog.records
    assert scores("by_tokens", parts, digist=5.0)[0][0].total == 2.0
    scores("by_tokens", episode, digist=5.0)  # it may have components later, as where the first episodes fail
    told = f"reward_weights are of digist, but the rewards are those of {name}, and their components so far"
    assert [record.getMessage() for record in caplog.records] == [f"{told} digits", f"{told} none"]


def test_all_plays_of_a_job_are_in_one_event_loop(service, tmp_path):
    calls = UserCalls()
    player = EpisodePlayer(config(tmp_path, "notes_its_loop"), service, TOKENIZER, calls)
    for _ in range(2):
        player.play(PROBLEMS[:1], PARAMS[:1])
    [loop] = LOOPS
    calls.close()
    assert loop.is_closed()


def test_nothing_is_asked_after_the_play_that_an_environment_has_left_something_of(service, tmp_path):
    go_on, errors = asyncio.Event(), []

    async def late(session):
        await go_on.wait()
        try:
            await session.turn("again")
        except RuntimeError as error:
            errors.append(str(error))

    async def leaves(row, session):
        await session.turn("hello")
        kept.append(asyncio.create_task(late(session)))
        kept.append(asyncio.create_task(session.turn("more", ignore_eos=True, max_new_tokens=400)))
        await asyncio.sleep(0)
        return session.episode(1.0)

    async def goes_on(row, session):
        go_on.set()
        await kept[0]
        await session.turn("hello")
        return session.episode(1.0)

    kept, player = [], EpisodePlayer(config(tmp_path), service, TOKENIZER)
    player._environment = leaves
    player.play(PROBLEMS[:1], [replace(PARAMS[0], n=1)])
    assert kept[1].cancelled() and not service.engine.has_work
    player._environment = goes_on
    player.play(PROBLEMS[:1], [replace(PARAMS[0], n=1)])
    assert errors == ["the episode is over: no turn of it can be asked any more"]


def test_an_episode_that_takes_longer_than_it_may_is_named(service, tmp_path):
    player = EpisodePlayer(config(tmp_path, "hangs"), service, TOKENIZER, UserCalls(1.0))
    wanted = (
        r"hangs' has returned nothing for 1 s, which is .*\nin environment .*episode [01] of rows.jsonl:2, turn [12]$"
    )
    with pytest.raises(CallTimedOut, match=wanted):
        player.play(PROBLEMS[1:2], PARAMS[1:2])
    assert not service.engine.has_work


def test_an_error_of_an_environment_ends_the_others_and_names_the_row(service, tmp_path):
    with pytest.raises(KeyError, match="no such thing") as error:
        EpisodePlayer(config(tmp_path, "fails"), service, TOKENIZER).play(PROBLEMS, PARAMS)
    assert any("of rows.jsonl:2, turn 2" in note for note in error.value.__notes__)
    assert not service.engine.has_work
    with pytest.raises(ValueError, match=r"returned a float for episode 0 of rows.jsonl:1, not an Episode"):
        EpisodePlayer(config(tmp_path, "gives_a_number"), service, TOKENIZER).play(PROBLEMS, PARAMS)
    player = EpisodePlayer(config(tmp_path, "no_number"), service, TOKENIZER)
    [[episode, _]] = player.play(PROBLEMS[:1], PARAMS[:1])
    with pytest.raises(ValueError, match=r"no_number' returned a str of 4, not a number, of rows.jsonl:1"):
        player.scores(PROBLEMS[:1], [[episode]])


def misused(service, tmp_path, use, **data):
    """Play an episode that only makes one mistake."""

    async def environment(row, session):
        await use(session)
        raise AssertionError("the mistake was not seen")

    player = EpisodePlayer(config(tmp_path, data=data), service, TOKENIZER)
    player._environment = environment
    player.play(PROBLEMS[:1], [replace(PARAMS[0], n=1)])


async def _at_a_time(session):
    await asyncio.gather(session.turn("a"), session.turn("b"))


async def _after_tokens(session):
    await session.turn([1, 2])
    await session.turn("text")


@pytest.mark.parametrize(
    ("use", "kind", "words"),
    [
        (lambda s: s.turn("a", temperature=0.5), ValueError, "must not set temperature: it is rollout.temperature"),
        (lambda s: s.turn("a", n=2), ValueError, "must not set n"),
        (lambda s: s.turn("a", no_such=2), TypeError, "no_such"),
        (lambda s: s.turn([]), ValueError, "needs a message"),
        (lambda s: s.turn([1, VOCAB_SIZE + 100]), ValueError, "among its token ids"),
        (lambda s: s.turn([1, "x"]), ValueError, "'x' among its token ids"),
        (lambda s: s.turn([1] * 512), NoRoom, "leaves no room in a context of 512"),
        (_at_a_time, RuntimeError, "under way"),
        (_after_tokens, ValueError, "add token ids again"),
    ],
)
def test_mistakes_of_an_environment_are_named(service, tmp_path, use, kind, words):
    with pytest.raises(kind, match=words):
        misused(service, tmp_path, use)
    assert not service.engine.has_work


def test_an_episode_needs_a_turn(service, tmp_path):
    async def none(session):
        session.episode(1.0)

    with pytest.raises(ValueError, match="needs one turn"):
        misused(service, tmp_path, none)


def test_the_last_turn_gets_what_room_there_is(service, tmp_path):
    async def long(row, session):
        first = await session.turn([1] * 505, ignore_eos=True)
        assert session.room == 0 and first.is_cut_off and len(first.token_ids) == 7
        return session.episode(1.0)

    player = EpisodePlayer(config(tmp_path), service, TOKENIZER)
    player._environment = long
    [[episode]] = player.play(PROBLEMS[:1], [replace(PARAMS[0], n=1)])
    assert isinstance(episode, Episode) and episode.finish_reason.type == "length"


def test_the_jobs_system_prompt_stands_before_a_conversation_that_has_none(service, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("{}")
    player = EpisodePlayer(config(tmp_path, data={"path": str(path), "system_prompt": "be brief"}), service, TOKENIZER)
    [[one, _]] = player.play(PROBLEMS[:1], PARAMS[:1])
    assert TOKENIZER.decode(one.prompt_ids).startswith("<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\n")


def test_environments_that_cannot_be_are_named(tmp_path):
    assert load_environment(f"{__name__}:talk", {"ending": "!"}).keywords == {"ending": "!"}
    for location, options, words in [
        ("nowhere.py:play", None, "environment 'nowhere.py:play': there is no file"),
        (f"{__name__}:config", None, "a coroutine function is needed"),
        (f"{__name__}:talk", {"endings": 1}, "has no option endings"),
    ]:
        with pytest.raises(ValueError, match=words):
            load_environment(location, options)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"reward": "short_enough"}, "reward must not be set with environment"),
        ({"engines": "separate", "sync": "tensor"}, 'engines must be "local" with environment'),
        (
            {"rollout": RolloutSettings(ahead=1, on_commit="keep")},
            'rollout.on_commit must be "verify" with environment',
        ),
        ({"environment": "", "environment_options": {"a": 1}}, "environment_options needs environment"),
    ],
)
def test_settings_that_do_not_go_with_an_environment_are_refused(tmp_path, changes, words):
    with pytest.raises(ValueError, match=words):
        replace(config(tmp_path), **changes)


def test_episodes_play_while_another_thread_asks_the_same_engine(service, tmp_path):
    """An HTTP caller's requests share the engine's steps with a step's episodes."""
    engine, found = service.engine, []
    engine.start()
    other = threading.Thread(
        target=lambda: found.extend(engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=40, ignore_eos=True)))
    )
    try:
        other.start()
        episodes = EpisodePlayer(config(tmp_path), service, TOKENIZER).play(PROBLEMS, PARAMS)
        with service.rollout():
            other.join()
    finally:
        engine.stop()
    assert len(episodes) == 3 and len(found[0].token_ids) == 40


def changed(service, version):
    """Commit other weights: as far from the old ones as a step of training takes them, and further in places."""
    module = service.engine.model.trained_module
    draw = torch.Generator().manual_seed(int(version))
    with service.optimizer_step(), torch.no_grad():
        for tensor in module.parameters():
            tensor += tensor.abs().mean() * 0.02 * torch.randn(tensor.shape, generator=draw)
    service.commit_in_place(version, source=module.named_parameters())


@pytest.mark.parametrize("ahead", [1, 2])
def test_episodes_that_were_begun_before_their_step_are_those_of_the_present_weights(service, tmp_path, ahead):
    plays = [
        Play(PROBLEMS, [replace(its, sampling_seed=10 * step + its.sampling_seed) for its in PARAMS])
        for step in range(4)
    ]
    player, fresh, engine = EpisodePlayer(config(tmp_path), service, TOKENIZER), None, service.engine
    counts = []
    for step, play in enumerate(plays):
        if step:
            changed(service, str(step))
        before = engine.metrics.num_verified_tokens, engine.metrics.num_kept_tokens
        found = player.play(play.problems, play.params, plays[step + 1 : step + 1 + ahead])
        counts.append((engine.metrics.num_verified_tokens - before[0], engine.metrics.num_kept_tokens - before[1]))
        engine.flush_cache()
        fresh = EpisodePlayer(config(tmp_path), service, TOKENIZER).play(play.problems, play.params)
        for mine, its in zip(found, fresh, strict=True):
            assert [(one.token_ids, one.logprobs, one.value) for one in mine] == [
                (one.token_ids, one.logprobs, one.value) for one in its
            ]
            assert all({span.version for span in one.weight_versions} == {str(step)} for one in mine)
        assert not engine.has_work
    assert all(verified > 0 for verified, _ in counts[1:]), "episodes were begun before their step"
    assert any(kept for _, kept in counts[1:]) and any(kept < verified for verified, kept in counts[1:])


def test_an_environment_that_may_be_played_ahead_says_so(tmp_path):
    job = replace(config(tmp_path), rollout=RolloutSettings(ahead=1))
    with pytest.raises(ValueError, match=r"rollout.ahead must be 0 with environment '.*:talk', or .* is_repeatable"):
        job_environment(job)
    talk.is_repeatable = True
    try:
        assert job_environment(job) is talk
        assert job_environment(replace(job, environment_options={"ending": "!"})).is_repeatable
    finally:
        del talk.is_repeatable


def test_an_error_of_a_coming_episode_waits_for_its_turn(service, tmp_path):
    player = EpisodePlayer(config(tmp_path, "fails"), service, TOKENIZER)
    coming = [Play([PROBLEMS[1]], [PARAMS[1]])]

    async def once(row, session):
        await session.turn("hello")
        if row["answer"] == "2":
            raise KeyError("no such thing")
        await session.turn("again")
        return session.episode(1.0)

    player._environment = once
    assert len(player.play([PROBLEMS[0]], [PARAMS[0]], coming)) == 1
    with pytest.raises(KeyError, match="no such thing"):
        player.play(*vars(coming[0]).values())
    assert not service.engine.has_work


def test_turns_have_the_jobs_sampling_settings_where_they_set_none_themselves(service, tmp_path, monkeypatch):
    job = replace(config(tmp_path), rollout=replace(
        config(tmp_path).rollout, sampling={"ignore_eos": True, "min_new_tokens": 3, "regex": "[ab]{4,9}", "top_k": 40}
    ))  # fmt: skip
    player, asked = EpisodePlayer(job, service, TOKENIZER), []

    class Noted(Turns):
        async def __call__(self, prompt_ids, params, images):
            asked.append(params)
            return await super().__call__(prompt_ids, params, images)

    async def two(row, session):
        await session.turn("one")
        await session.turn("two", ebnf='root ::= "c" "d"+', top_k=-1)
        return session.episode(1.0)

    monkeypatch.setattr(f"{EpisodePlayer.__module__}.Turns", Noted)
    player._environment = two
    [[episode]] = player.play(PROBLEMS[:1], [job.rollout.params(5, n=1)])
    first, second = asked
    assert (first.ignore_eos, first.min_new_tokens, first.regex, first.top_k) == (True, 3, "[ab]{4,9}", 40)
    assert (second.ignore_eos, second.min_new_tokens, second.regex, second.top_k) == (True, 3, None, -1)
    assert (first.n, first.max_new_tokens, first.temperature) == (1, 12, 1.0)
    assert set(episode.text[:4]) <= {"a", "b"} and "cd" in episode.text
    assert list(episode.logprobs) == one_forward(service, episode)
    forced = [
        token for token, is_forced in zip(episode.as_completion(0).token_ids, episode.forced, strict=True) if is_forced
    ]
    assert len(episode.forced) == len(episode.logprobs) and TOKENIZER.decode(forced).startswith("cd")
    [noted] = Answer(episode.as_completion(0), Score(1.0), episode).samples(0, 1.0, counts=True)
    assert noted.mask == [not is_forced for is_forced in episode.forced]


def test_a_context_without_room_for_the_least_number_of_tokens_ends_with_no_room(service, tmp_path):
    job = replace(config(tmp_path), rollout=replace(config(tmp_path).rollout, sampling={"min_new_tokens": 12}))
    player = EpisodePlayer(job, service, TOKENIZER)

    async def fill(row, session):
        while True:
            try:
                await session.turn("more and more and more")
            except NoRoom:
                return session.episode(1.0)

    player._environment = fill
    [[episode]] = player.play(PROBLEMS[:1], [job.rollout.params(5, n=1)])
    assert episode.num_turns > 2
