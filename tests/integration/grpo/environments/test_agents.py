"""Agents of episodes: programs with a base URL, whose conversations are trained on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import textwrap
import urllib.error
import urllib.request
from dataclasses import replace
from functools import partial

import pytest

from lockstep.integration.grpo.engines.answers import Answer
from lockstep.integration.grpo.environments.player import EpisodePlayer
from lockstep.integration.grpo.rewards.score import Score
from lockstep.integration.grpo.rewards.user_calls import UserCalls
from lockstep.integration.grpo.settings.config import JobConfig
from lockstep.integration.grpo.settings.sampling import RolloutSettings
from lockstep.integration.grpo.settings.sections import RunSettings
from lockstep.integration.grpo.tasks.problems import Problem
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.tests.rollout.engine.callers import trainer_logprobs
from lockstep.tests.support.callers import held_steps, wait_until, while_it_steps
from lockstep.tests.support.chat.tokenizer import byte_tokenizer, chat_template

TOKENIZER = byte_tokenizer(chat_template("hermes"))
ROWS = [{"prompt": f"question {n}", "answer": str(n)} for n in (1, 2)]
PROBLEMS = [Problem(row["prompt"], row["answer"], f"rows.jsonl:{at + 1}", row) for at, row in enumerate(ROWS)]
PARAMS = [SamplingParams(n=2, max_new_tokens=12, sampling_seed=seed, temperature=0.7) for seed in range(2)]


def post(url, body, timeout=60):
    """Send JSON, and return the status and the answer."""
    data = json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def chat(url, messages, **fields):
    """Return the message with which the model answers."""
    status, answer = post(f"{url}/chat/completions", {"model": "any", "messages": messages, **fields})
    assert status == 200, answer
    return answer["choices"][0]["message"]


def asks(url, prompt):
    """Behave as an agent does: a side request, three turns with the whole history, and the same state twice."""
    chat(url, [{"role": "system", "content": "Name it."}, {"role": "user", "content": prompt}], temperature=0, seed=1)
    history = [{"role": "user", "content": prompt}]
    for number in range(3):
        history.append(chat(url, history, max_tokens=4 + number, temperature=0, top_p=0.1, seed=5))
        history.append({"role": "user", "content": f"and {number}"})
    return [chat(url, history)["content"], chat(url, history)["content"]]


async def asked(row, session):
    """Play an agent of this process."""
    async with session.served() as model:
        said = await asyncio.to_thread(asks, model.openai_url, row["prompt"])
    assert len(model.turns) == 6
    return session.episode({"length": sum(map(len, said)), "success": said[0] != said[1]})


async def mixed(row, session):
    """Ask a turn besides, and serve two agents."""
    first = await session.turn(row["prompt"])
    for text in ("one", "two"):
        async with session.served() as model:
            await asyncio.to_thread(chat, model.openai_url, [{"role": "user", "content": text}])
    return session.episode(float(len(first.text)))


def config(tmp_path, name, **options):
    environment = name if name == "agent" else f"{__name__}:{name}"
    return JobConfig(
        RunSettings("x", str(tmp_path)), environment=environment, environment_options=options,
        rollout=RolloutSettings(prompts_per_step=2, group_size=2, max_new_tokens=12, temperature=0.7),
    )  # fmt: skip


def play(service, config):
    return EpisodePlayer(config, service, TOKENIZER).play(PROBLEMS, PARAMS)


def check_one_forward(service, conversation):
    """Assert that the log-probabilities are those of one forward over the conversation."""
    ids = [*conversation.prompt_ids, *conversation.token_ids]
    found = trainer_logprobs(service.engine, ids, temperature=0.7)[len(conversation.prompt_ids) - 1 :]
    drawn = [logprob for logprob, sampled in zip(found, conversation.sampled, strict=True) if sampled]
    assert drawn == list(conversation.logprobs)


def test_the_conversations_of_an_agent_are_samples_whose_logprobs_are_the_trainers(service, tmp_path):
    episodes = play(service, config(tmp_path, "asked"))
    for row, group in zip(ROWS, episodes, strict=True):
        for one in group:
            assert [part.num_turns for part in one.conversations] in ([4, 1, 1], [1, 4, 1]), "the same state twice"
            texts = [TOKENIZER.decode(part.prompt_ids) for part in one.conversations]
            assert sum("Name it." in text for text in texts) == 1 and all(row["prompt"] in text for text in texts)
            for part in one.conversations:
                check_one_forward(service, part)
                assert part.sampled[0] and part.sampled[-1] and len(part.drawn_ids) == len(part.logprobs)
            done = one.as_completion(1)
            assert len(done.token_ids) == len(done.logprobs) == sum(len(part.logprobs) for part in one.conversations)
            assert [(span.start, span.end) for span in done.weight_versions] == [(0, len(done.token_ids))]
            samples = list(Answer(done, Score(1.0), one).samples(0, 0.5, counts=True))
            assert [len(sample.logprobs) for sample in samples] == [len(part.logprobs) for part in one.conversations]
            assert {sample.size for sample in samples} == {len(done.token_ids)} and samples[0].is_first
            assert not any(sample.is_first for sample in samples[1:]), "the episode counts as one sample"
            assert one.kept()["conversations"][1]["runs"] == one.others[1].runs
    assert len({one.token_ids for group in episodes for one in group}) == 4, "episodes of a row differ"


def test_an_agents_run_is_the_same_again_and_its_own_settings_change_nothing(service, tmp_path):
    first, second = (play(service, config(tmp_path, "asked")) for _ in range(2))
    drawn = [
        [
            [(part.prompt_ids, part.token_ids, part.logprobs) for part in one.conversations]
            for group in run
            for one in group
        ]
        for run in (first, second)
    ]
    assert drawn[0] == drawn[1]
    lengths = [len(part.drawn_ids) for group in first for one in group for part in one.conversations]
    assert max(lengths) > 12 and all(one.value["success"] for group in first for one in group), "not greedy"


def test_turns_and_agents_are_conversations_of_one_episode(service, tmp_path):
    for group in play(service, config(tmp_path, "mixed")):
        for one in group:
            assert [part.num_turns for part in one.conversations] == [1, 1, 1]
            for part, text in zip(one.conversations, ("question", "one", "two"), strict=True):
                assert text in TOKENIZER.decode(part.prompt_ids)
                check_one_forward(service, part)


def test_an_agent_reaches_nothing_but_its_session(service, tmp_path):
    found = {}

    async def attacks(row, session):
        async with session.served() as model:
            root = model.url[: model.url.index("/sessions/")]
            body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
            for name, url, more in (
                ("pause", f"{root}/pause_generation", {}),
                ("abort", f"{root}/abort_request", {"abort_all": True}),
                ("chat", f"{root}/v1/chat/completions", body),
                ("open", f"{root}/open_session", {}),
                ("info", f"{root}/sessions/x/session_info", {}),
                ("other", f"{root}/sessions/another/v1/chat/completions", body),
                ("opens", f"{root}/sessions/another/v1/chat/completions",
                 {**body, "session_params": {"open": True}}),
                ("replace", f"{model.openai_url}/chat/completions", {**body, "session_params": {"replace": True}}),
                ("own", f"{model.openai_url}/chat/completions", body),
            ):  # fmt: skip
                found[name] = (await asyncio.to_thread(post, url, more))[0]
        found["over"] = (await asyncio.to_thread(post, f"{model.openai_url}/chat/completions", body))[0]
        return session.episode(1.0)

    player = EpisodePlayer(config(tmp_path, "asked"), service, TOKENIZER)
    player._environment = attacks
    player.play(PROBLEMS[:1], [SamplingParams(n=1, max_new_tokens=4, sampling_seed=1)])
    assert found == {
        **dict.fromkeys(("pause", "abort", "chat", "open", "info", "other", "opens", "over"), 404),
        "replace": 400, "own": 200,
    }  # fmt: skip


async def failing(row, session):
    """Play an agent that fails after its first answer, which the environment catches."""
    with contextlib.suppress(TimeoutError):
        async with session.served() as model:
            await asyncio.to_thread(chat, model.openai_url, [{"role": "user", "content": row["prompt"]}])
            raise TimeoutError
    return session.episode(0.0)


def test_what_an_agent_has_said_counts_also_where_it_failed(service, tmp_path):
    assert [one.num_turns for group in play(service, config(tmp_path, "failing")) for one in group] == [1] * 4


async def aborted(row, session):
    """Play an agent whose answer an operator aborts."""
    async with session.served() as model:
        asked = asyncio.to_thread(
            chat, model.openai_url, [{"role": "user", "content": "x"}], ignore_eos=True, rid=row["answer"]
        )
        asking = asyncio.ensure_future(asked)
        with held_steps(ENGINES[0]) as allowed:
            allowed.release(3)
            await asyncio.to_thread(wait_until, lambda: ENGINES[0].num_running)
            abort = partial(ENGINES[0].abort_request, row["answer"])
            await asyncio.to_thread(while_it_steps, allowed, abort)
        await asking
    return session.episode(1.0)


ENGINES = []


def test_nothing_is_learned_from_an_agents_turn_that_was_aborted(service, tmp_path):
    ENGINES[:] = [service.engine]
    player = EpisodePlayer(config(tmp_path, "aborted"), service, TOKENIZER)
    with pytest.raises(RuntimeError, match="a turn of the agent was not finished"):
        player.play(PROBLEMS[:1], [SamplingParams(n=1, max_new_tokens=200, sampling_seed=1)])


def test_a_pause_of_another_servers_client_keeps_its_lease(service, tmp_path):
    cancelled = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(service.pause_lease, "cancel", lambda: cancelled.append(1))
        play(service, config(tmp_path, "mixed"))
    assert not cancelled


# -- commands ----------------------------------------------------------------------------------------------------------

PROGRAM = """
import json, os, pathlib, subprocess, sys, urllib.request

def ask(text):
    body = json.dumps({"messages": [{"role": "user", "content": text}], "max_tokens": 6}).encode()
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, body, {"content-type": "application/json"})) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]

mode, prompt = sys.argv[1:]
if mode == "silent":
    sys.exit("I know it all")
ask(prompt)
pathlib.Path("done.txt").write_text(prompt)
print(sorted(name for name in os.environ if name not in ("LC_CTYPE", "PATH")), flush=True)
if mode == "hangs":
    subprocess.Popen(["sleep", "1000"])
    sys.stdin.read()  # at its end
    subprocess.run(["sleep", "1000"])
if mode == "floods":
    print("x" * 5_000_000 + "end")
"""


def reward(row, done):
    """Return what a test wants to know, as components."""
    if done.returncode == 0:
        assert (done.folder / "done.txt").read_text() == row["prompt"]
    return {"code": -1.0 if done.returncode is None else float(done.returncode), "printed": float(len(done.stdout)),
            "turns": float(len(done.turns))}  # fmt: skip


async def looks(row, done):
    """Tell what the command saw."""
    seen = set(eval(done.stdout.splitlines()[0]))
    assert "OPENAI_BASE_URL" in seen and "MINE" in seen and "HOME" in seen
    assert not seen & {"RANK", "LOCKSTEP_ADMIN_KEY", "WANDB_API_KEY"}
    return {"files": float((done.folder / "given.txt").is_file())}


@pytest.fixture
def command(tmp_path):
    program = tmp_path / "agent.py"
    program.write_text(textwrap.dedent(PROGRAM))
    return lambda mode, **options: config(
        tmp_path, "agent", command=[sys.executable, str(program), mode], **{"reward": f"{__name__}:reward", **options}
    )


def test_a_command_is_an_agent_and_its_reward_sees_what_it_did(service, command, tmp_path, monkeypatch):
    for name in ("RANK", "LOCKSTEP_ADMIN_KEY", "WANDB_API_KEY"):
        monkeypatch.setenv(name, "1")
    files = tmp_path / "files"
    files.mkdir()
    (files / "given.txt").write_text("x")
    made = command("works", reward=f"{__name__}:looks", files=str(files), env={"MINE": "1"}, at_a_time=2)
    for group in play(service, made):
        for one in group:
            assert one.value == {"files": 1.0} and one.num_turns == 1
            check_one_forward(service, one)


def test_a_command_that_hangs_is_killed_with_what_it_started(service, command):
    values = [one.value for group in play(service, command("hangs", timeout_s=4.0)) for one in group]
    assert [(one["code"], one["turns"]) for one in values] == [(-1.0, 1.0)] * 4
    left = subprocess.run(["pgrep", "-fx", "sleep 1000"], stdout=subprocess.PIPE).stdout.split()
    assert not left


def test_a_command_is_work_that_the_other_ranks_need_not_fear_for(service, command):
    calls, seen = UserCalls(), []
    player = EpisodePlayer(command("works"), service, TOKENIZER, calls)
    wait = asyncio.subprocess.Process.wait

    async def noted(process):
        seen.append(calls.progress)
        return await wait(process)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio.subprocess.Process, "wait", noted)
        player.play(PROBLEMS[:1], [SamplingParams(n=1, max_new_tokens=4, sampling_seed=1)])
    assert seen[0] > 0 and calls.progress == 1
    calls.close()


def test_the_end_of_a_long_output_is_kept(service, command):
    values = [one.value for group in play(service, command("floods")) for one in group]
    assert [one["printed"] for one in values] == [float(1 << 20)] * 4


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"mode": "silent"}, "ended with 1 and had asked the model nothing: I know it all"),
        ({"command": ["/no/such/agent"]}, "the agent '/no/such/agent' cannot be run"),
        ({"command": ""}, "needs a command"),
        ({"reward": ""}, "needs a reward"),
        ({"reward": "no_module:f"}, "the reward of an agent 'no_module:f': cannot import"),
        ({"files": "/no/folder"}, "files='/no/folder' is no folder"),
        ({"at_a_time": 0}, "at_a_time of at least 1, not 0"),
        ({"prompt_field": "task"}, "a text in the row's 'task', not None"),
    ],
)
def test_what_is_wrong_with_an_agent_is_said(service, command, options, why):
    given = dict(options)
    made = command(given.pop("mode", "works"))
    made.environment_options.update(given)
    with pytest.raises(ValueError, match=why) as failed:
        play(service, made)
    assert "in environment 'agent', episode" in failed.value.__notes__[0]


def test_agents_are_refused_where_a_job_plays_ahead(service, tmp_path, monkeypatch):
    monkeypatch.setattr(asked, "is_repeatable", True, raising=False)
    made = replace(config(tmp_path, "asked"), rollout=RolloutSettings(2, 2, 12, 0.7, ahead=1))
    with pytest.raises(ValueError, match=r"agents need rollout\.ahead=0"):
        play(service, made)


def test_agents_are_refused_where_a_job_sets_what_their_requests_set(service, tmp_path):
    player = EpisodePlayer(config(tmp_path, "asked"), service, TOKENIZER)
    with pytest.raises(ValueError, match=r"rollout\.sampling\.stop is not for agents"):
        player.play(PROBLEMS[:1], [SamplingParams(n=1, max_new_tokens=4, sampling_seed=1, stop="x")])
