"""The page of rollouts: its data, its file, and a headless Chromium that shows it, if there is one."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest

from lockstep.integration.cli import main as cli
from lockstep.integration.grpo.results.samples import SampleFiles, packed
from lockstep.integration.grpo.results.samples_page import samples_data
from lockstep.integration.http.edge.config import HttpConfig
from lockstep.integration.http.server import BackgroundServer, serve_in_background
from lockstep.integration.pages.policy import own_sources, served_policy
from lockstep.integration.pages.rollouts import page_data, static_page, template, token_texts
from lockstep.tests.support.pages.browser import Browser, needs_chromium, opened

NASTY = (
    '</script><script>document.title="pwned"</script>', "<!--", "<img src=x onerror=\"document.title='pwned'\">",
    "&amp;&lt;b&gt;", "\u2028\u202e\x1b[2J\x00", "]]> ${1} `", "<style>*{display:none}</style>",
)  # fmt: skip


class Letters:
    """A tokenizer whose token `i` is `texts[i]`."""

    def __init__(self, texts: list[str]) -> None:
        self.texts = texts

    def decode(self, token_ids: list[int], **_: bool) -> str:
        return "".join(self.texts[id] for id in token_ids)


def row(prompt: str, number: int, reward: float, ids: list[int], **more: object) -> dict[str, object]:
    return {
        "source": None, "prompt": prompt, "answer": "4", "sample": number, "text": "", "reward": reward,
        "advantage": reward - 0.5, "finish_reason": "length" if number % 2 else "stop", "prompt_ids": [1, 2],
        "token_ids": ids, "logprobs": [-0.25 * index for index in range(len(ids))],
        "weight_versions": [["3", 0, len(ids)]], **more,
    }  # fmt: skip


# -- the data and the file ---------------------------------------------------------------------------------------------


def data_of(rows: list[dict[str, object]], tokenizer: Letters | None = None) -> dict[str, object]:
    return page_data(rows, title="run", step=3, steps=[2, 3], tokenizer=tokenizer)


def test_samples_of_a_prompt_are_a_group_and_one_that_comes_again_is_another():
    rows = [row("a", n, 0.5, [1]) for n in (0, 1)] + [row("b", n, 0.5, [1]) for n in (0, 1)]
    rows += [row("b", n, 0.5, [1]) for n in (0, 1)] + [row("a", 0, 0.5, [1])]
    data = data_of(rows)
    assert [sample["group"] for sample in data["samples"]] == [0, 0, 1, 1, 2, 2, 3]
    assert [group["prompt"] for group in data["groups"]] == ["a", "b", "b", "a"]


def test_texts_of_tokens_together_are_the_text_of_all(bpe_tokenizer):
    text = "naïve 12+30=42 \U0001f600 ok ✓\n\n<b>"
    ids = bpe_tokenizer(text)["input_ids"]
    texts = token_texts(ids, [5, 6], bpe_tokenizer)
    assert len(texts) == len(ids)
    assert "".join(texts) == bpe_tokenizer.decode(ids)
    assert "" in texts  # a token within a character
    half = ids[: texts.index("") + 1]
    assert "".join(token_texts(half, [], bpe_tokenizer)) == bpe_tokenizer.decode(half)


def test_tokens_of_an_environment_are_shown_without_log_probabilities():
    episode = row("a", 0, 1.0, [7, 8, 9], episode_ids=[7, 8, 1, 2, 9], runs=[2, 2, 1], num_turns=2)
    forced = row("a", 1, 1.0, [7, 8], forced=[False, True])
    first, second = data_of([episode, forced])["samples"]
    assert first["ids"] == [7, 8, 1, 2, 9]
    assert first["logprobs"] == [0.0, -0.25, None, None, -0.5]
    assert second["forced"] == [1]


def test_the_further_conversations_of_an_agent_are_shown_behind_with_their_prompts():
    side = {"prompt_ids": [3, 4], "episode_ids": [8, 5, 9], "runs": [1, 1, 1], "num_turns": 2}
    episode = row("a", 0, 1.0, [7, 8, 9], episode_ids=[7], runs=[1], num_turns=1, conversations=[side])
    [sample] = data_of([episode])["samples"]
    assert sample["ids"] == [7, 3, 4, 8, 5, 9]
    assert sample["logprobs"] == [0.0, None, None, -0.25, None, -0.5]


def test_the_file_holds_the_data_and_no_markup_of_a_sample():
    texts = [*NASTY]
    data = data_of([row(NASTY[0], 0, 1.0, list(range(len(texts))))], Letters(texts))
    text = static_page(data)
    [kept] = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert json.loads(kept) == data
    assert not re.search(r"[<>&]", kept)
    assert text.count("<script") == template().count("<script")
    assert not re.search(r"https?://|@import|url\(|innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", text)
    assert f'content="{own_sources(template())}"' in text
    assert "connect-src" not in text and "unsafe" not in text


def test_a_step_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match="has no samples"):
        samples_data(tmp_path, None, None)
    SampleFiles(tmp_path, 0, 0).write(2, [packed([row("a", 0, 1.0, [1])])])
    with pytest.raises(ValueError, match="no samples of step 5: it has steps 2 to 2"):
        samples_data(tmp_path, 5, None)
    assert samples_data(tmp_path, None, None)["step"] == 2


def test_the_command_writes_the_page_with_the_runs_own_tokenizer(tmp_path, capsys, bpe_tokenizer):
    files = SampleFiles(tmp_path, 0, 0)
    ids = bpe_tokenizer("2+2=4")["input_ids"]
    files.write(2, [packed([row("a", 0, 1.0, ids)])])
    assert cli.main(["rollouts", str(tmp_path), "--html", str(tmp_path / "page.html")]) == 0
    assert "1 samples of step 2 in" in (said := capsys.readouterr().out) and "shown by their ids" in said
    files.write_tokenizer(bpe_tokenizer.save_pretrained)
    assert cli.main(["rollouts", str(tmp_path), "--html", str(tmp_path / "page.html")]) == 0
    assert "shown by their ids" not in capsys.readouterr().out
    [kept] = re.findall(r'id="data">(.*?)</script>', (tmp_path / "page.html").read_text(), re.DOTALL)
    assert "".join(json.loads(kept)["samples"][0]["texts"]) == "2+2=4"
    assert cli.main(["rollouts", str(tmp_path), "--html", "x", "--tokenizer", str(tmp_path)]) == 2
    assert "no tokenizer is there" in capsys.readouterr().err
    assert cli.main(["rollouts", str(tmp_path), "--html", str(tmp_path / "none" / "x")]) == 1


# -- a browser ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def browser(tmp_path) -> Iterator[Browser]:
    with opened(tmp_path / "profile") as browser:
        yield browser


def shown(browser: Browser, path: Path, data: dict[str, object]) -> None:
    path.write_text(static_page(data), encoding="utf-8")
    browser.open(path.as_uri())
    browser.wait_for("data && document.querySelector('.tokens').children.length")  # the ones that can be seen


VISIBLE = "[...document.querySelectorAll('article')].filter(a => !a.hidden && !a.closest('section').hidden)"


@needs_chromium
def test_markup_in_a_sample_is_shown_and_not_run(browser, tmp_path):
    texts = [*NASTY, "ok\n", "<b>bold</b>", ""]
    rows = [row("".join(NASTY), n, 1.0, list(range(len(texts))), components={NASTY[2]: 1.0}) for n in range(2)]
    shown(browser, tmp_path / "page.html", data_of(rows, Letters(texts)))
    found = browser.run("[...document.querySelectorAll('.tokens')].map(t => [...t.children].map(s => s.textContent))")
    expected = [
        *(NASTY[i] for i in range(4)), "⟨2028⟩⟨202e⟩⟨001b⟩[2J⟨0000⟩", *NASTY[5:], "ok↵\n", "<b>bold</b>", "·",
    ]  # fmt: skip
    assert found == [expected, expected]  # not one token is lost or joined
    assert browser.run("document.title") == "run, step 3"
    assert browser.run("document.querySelectorAll('#groups script, #groups img, #groups b:not(.about b)').length") == 0
    assert NASTY[0] in browser.run("document.querySelector('.prompt').textContent")
    assert browser.errors == []


@needs_chromium
def test_tokens_are_coloured_by_log_probability_and_by_advantage(browser, tmp_path):
    episode = row("a", 2, 0.5, [0, 1], episode_ids=[0, 2, 1], runs=[1, 1, 1])
    rows = [row("a", 0, 1.0, [0] * 30), row("a", 1, 0.0, [1, 2]), episode]
    shown(browser, tmp_path / "page.html", data_of(rows, Letters(["x", "y", "z"])))
    colours = "[...document.querySelectorAll('.tokens')].map(t => [...t.children].map(s => s.style.backgroundColor))"
    first, second, third = browser.run(colours)
    alphas = [float(re.split(r"[,/] *", colour.rstrip(")"))[-1]) for colour in first]
    assert alphas == sorted(alphas) and alphas[0] == 0.0 and alphas[12] < alphas[24] == alphas[29] == 0.85
    assert third[1] == "transparent"  # an environment wrote it
    browser.run("document.getElementById('colour').value = 'advantage'")
    browser.run("document.getElementById('colour').dispatchEvent(new Event('input'))")
    first, second, third = browser.run(colours)
    assert len(set(first)) == len(set(second)) == 1
    assert first[0].startswith("rgba(40, 150, 90") and second[0].startswith("rgba(206, 62, 62")
    assert browser.run("document.querySelector('.tokens span').title") == (
        "token 0, id 0, log p 0, p 100 %, advantage 0.5"
    )
    assert browser.errors == []


@pytest.mark.slow
@needs_chromium
def test_a_thousand_samples_can_be_read_and_filtered(browser, tmp_path):
    numbers, texts = random.Random(1), ["<i>", "word ", "a", "\n", "&", "é"]
    rows = []
    for group in range(125):
        for number in range(8):
            ids = [numbers.randrange(len(texts)) for _ in range(100)]
            rows.append(row(f"prompt {group}", number, numbers.choice([0.0, 0.25, 1.0]), ids))
    rows[777]["token_ids"][:2] = [5, 5]
    shown(browser, tmp_path / "page.html", data_of(rows, Letters(texts)))
    assert browser.text("count") == "1000 of 1000 samples in 125 of 125 groups"
    # Groups stand side by side: eight samples in one line.
    tops = browser.run("[...document.querySelector('.samples').children].map(a => a.getBoundingClientRect().top)")
    lefts = browser.run("[...document.querySelector('.samples').children].map(a => a.getBoundingClientRect().left)")
    assert len(set(tops)) == 1 and lefts == sorted(set(lefts)) and len(lefts) == 8
    # What is far away is filled when it comes near.
    assert browser.run("cards.filter(c => c.isFilled).length") < 500
    browser.run("document.querySelector('section:last-child').scrollIntoView()")
    browser.wait_for("document.querySelector('section:last-child article .tokens').children.length === 100")
    browser.run("cards.forEach(fill)")
    found = browser.run("cards.map(c => [...c.tokens.children].map(s => s.textContent.replace('↵', '')).join(''))")
    assert found == ["".join(texts[id] for id in its["token_ids"]) for its in rows]

    def choose(id: str, value: object) -> None:
        browser.fill(id, value)
        browser.run(f"document.getElementById({id!r}).dispatchEvent(new Event('input'))")

    choose("reward-from", 0.5)
    num_high = sum(its["reward"] == 1.0 for its in rows)
    assert browser.text("count").startswith(f"{num_high} of 1000 samples")
    assert browser.run(f"{VISIBLE}.length") == num_high
    choose("reward-to", 0.75)
    assert browser.text("count") == "0 of 1000 samples in 0 of 125 groups"
    browser.click("clear")
    choose("end", "stop")
    assert browser.text("count") == "500 of 1000 samples in 125 of 125 groups"
    choose("text", "prompt 12")
    assert browser.text("count") == "24 of 1000 samples in 6 of 125 groups"  # 12 and 120 to 124
    browser.click("clear")
    choose("order", "high")
    means = browser.run("[...document.querySelectorAll('section')].map(s => sections.find(o => o.section === s).mean)")
    assert means == sorted(means, reverse=True) and len(means) == 125
    assert browser.errors == []


# -- a server ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def run_server(service, tmp_path) -> Iterator[BackgroundServer]:
    """Serve the engine of a run that has kept samples of steps 2 and 3."""
    files = SampleFiles(tmp_path / "mine", 0, 0)
    (tmp_path / "mine").mkdir()
    files.write(2, [packed([row("two", 0, 1.0, [0, 1])])])
    files.write(3, [packed([row(NASTY[0], n, 0.5, [0, 2]) for n in range(2)])])
    samples = partial(samples_data, tmp_path / "mine", tokenizer=Letters(["x", "y", NASTY[0]]))
    with serve_in_background(service, HttpConfig(port=0, admin_api_key="k"), samples) as server:
        yield server


def test_samples_are_served_with_a_key_and_their_page_without(run_server):
    page = httpx.get(run_server.url + "/lockstep/rollouts")
    assert page.status_code == 200 and page.text == template()
    assert page.headers["content-security-policy"] == served_policy(template())
    data = run_server.url + "/lockstep/rollouts/data"
    assert httpx.get(data).status_code == 401
    key = {"Authorization": "Bearer k"}
    assert httpx.get(data, headers=key).json()["step"] == 3
    found = httpx.get(data, params={"step": 2}, headers=key).json()
    assert found["steps"] == [2, 3] and found["samples"][0]["texts"] == ["x", "y"]
    missing = httpx.get(data, params={"step": 9}, headers=key)
    assert missing.status_code == 404 and "no samples of step 9" in missing.json()["error"]["message"]
    assert httpx.get(run_server.url + "/state").json()["rollouts"] is True


def test_an_engine_of_no_run_says_so(client):
    for path in ("/lockstep/rollouts", "/lockstep/rollouts/data"):
        answer = client.get(path)
        assert answer.status_code == 404 and "of no run" in answer.json()["error"]["message"]
    assert client.get("/state").json()["rollouts"] is False


@needs_chromium
def test_the_debug_page_leads_to_the_samples_of_its_run(browser, run_server):
    browser.open(run_server.url + "/")
    browser.wait_for("!document.getElementById('rollouts-button').hidden")
    browser.click_through("rollouts-button", "/lockstep/rollouts")
    browser.wait_for("location.pathname === '/lockstep/rollouts' && !document.getElementById('key-form').hidden")
    browser.fill("key", "k")
    browser.run("document.getElementById('key-form').requestSubmit()")
    browser.wait_for_text("title", "mine, step 3")
    browser.wait_for(f"{VISIBLE}.length === 2 && document.querySelectorAll('.tokens span').length === 4")
    assert browser.run("document.querySelectorAll('.tokens span')[1].textContent") == NASTY[0]
    browser.fill("step", "2")
    browser.run("document.getElementById('step').dispatchEvent(new Event('input'))")
    browser.wait_for_text("title", "mine, step 2")
    browser.wait_for_text("groups", "xy")
    refused = [error for error in browser.errors if "401" not in error]
    assert refused == []


@needs_chromium
def test_the_debug_page_of_another_engine_has_no_such_link(browser, server):
    browser.open(server.url + "/")
    browser.wait_for_text("status", "idle")
    assert browser.run("getComputedStyle(document.getElementById('rollouts-button')).display") == "none"
