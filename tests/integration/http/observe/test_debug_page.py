"""Tests of the debug page: its file against the app's own paths, and in a headless Chromium if there is one."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from html.parser import HTMLParser

import httpx
import pytest
import torch

from lockstep.integration.http.app import create_app
from lockstep.integration.http.edge.config import HttpConfig
from lockstep.integration.http.observe.debug_page import page
from lockstep.integration.http.server import BackgroundServer, serve_in_background
from lockstep.integration.pages.policy import served_policy
from lockstep.integration.service import RolloutService
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.request_options import RequestOptions
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.rollout.speculation.lengths import WholeDrafts
from lockstep.tests.support.pages.browser import PATIENCE, Browser, needs_chromium, opened
from lockstep.weight_sync.digests.model_digest import model_digest

KEY = "an-admin-key"
NASTY = '<img src=x onerror="document.title=\'pwned\'"><script>document.title="pwned"</script>'


# -- the file ----------------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """A parser that collects tags, ids and attributes in order, and checks that every opened tag is closed."""

    VOID = frozenset({"meta", "input", "link", "br", "img"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attributes]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def ids(self) -> list[str]:
        return [value for _, name, value in self.attributes if name == "id"]


def script() -> str:
    [text] = re.findall(r"<script>(.*?)</script>", page(), re.DOTALL)
    return text


def test_the_page_is_whole_and_loads_nothing_from_elsewhere():
    parsed = Page(page())
    assert parsed.open == []
    assert len(parsed.ids()) == len(set(parsed.ids()))
    assert not [a for a in parsed.attributes if a[1] in ("src", "href", "action", "style") or a[1].startswith("on")]
    assert not re.search(r"https?://|@import|url\(", page())


def test_every_element_that_the_script_names_exists():
    named = set(re.findall(r"\$\(\"([a-z-]+)\"\)", script()))
    for table in ("actions", "askedTwice"):
        [actions] = re.findall(rf"const {table} = \{{(.*?)\n\}};", script(), re.DOTALL)
        named |= set(re.findall(r"^  \"?([a-z-]+)\"?: (?:async|loadTree)", actions, re.MULTILINE))
    assert len(named) > 25
    assert named <= set(Page(page()).ids())


def test_every_path_that_the_script_calls_is_one_of_the_apps(service):
    [table] = re.findall(r"const PATHS = \{(.*?)\};", script(), re.DOTALL)
    paths = set(re.findall(r'"(/[a-z_/]+)"', table))
    assert len(paths) == len(table.strip().splitlines())
    assert paths <= create_app(service, HttpConfig()).state.plain_paths


def test_nothing_is_made_of_markup():
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|new Function|srcdoc", script())


def test_the_page_comes_with_a_policy_for_its_own_script_alone(service):
    with serve_in_background(service, HttpConfig(port=0, api_key="k", admin_api_key=KEY)) as server:
        response = httpx.get(server.url + "/")
    assert response.status_code == 200 and response.text == page()
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    policy = response.headers["content-security-policy"]
    assert policy == served_policy(page())
    assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
    assert served_policy(page().replace("EVERY_MS = 1000", "EVERY_MS = 1001")) != policy


# -- a browser ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def browser(tmp_path) -> Iterator[Browser]:
    with opened(tmp_path / "profile") as browser:
        yield browser


@pytest.fixture
def serve(service) -> Iterator[Callable[..., BackgroundServer]]:
    servers: list[BackgroundServer] = []

    def serve(**settings: object) -> BackgroundServer:
        servers.append(serve_in_background(service, HttpConfig(port=0, **settings)))  # type: ignore[arg-type]
        return servers[-1]

    yield serve
    for server in servers:
        server.close()


@needs_chromium
def test_a_person_generates_pauses_sees_it_paused_and_continues(browser, serve, service, model):
    browser.open(serve().url + "/")
    browser.wait_for_text("status", "idle")
    browser.fill("prompt", ", ".join(map(str, range(40))))
    browser.fill("new-tokens", 6)
    browser.fill("temperature", 0)
    browser.click("send")
    browser.wait_for_text("answer-status", "finished: length")
    expected = model.generate(torch.arange(40)[None], max_new_tokens=6, min_new_tokens=6, do_sample=False)[0, 40:]
    assert browser.text("answer") == " ".join(map(str, expected.tolist()))
    assert "6 tokens, weights default" in browser.text("answer-status")
    browser.wait_for_text("pool-legend", "2 cached")

    browser.click("pause")
    browser.wait_for_text("status", "paused (retract)")
    assert service.engine.pause_mode == "retract"
    browser.click("send")
    browser.wait_for_text("sequences", "waiting")
    assert browser.text("answer-status") == "waiting"
    browser.click("continue")
    browser.wait_for_text("answer-status", "finished")
    browser.wait_for_text("status", "idle")
    assert not service.engine.is_paused

    browser.click("pin-prompt")
    browser.wait_for_text("notice", "pinned: 2")
    browser.click("load-tree")
    browser.wait_for_text("tree", "pinned by debug page")
    hashes = [node.hash for node in service.engine.cache_tree().nodes]
    browser.run("[...document.querySelectorAll('#tree button')].find(b => b.textContent === 'unpin').click()")
    browser.wait_for_text("notice", "unpinned: 1")
    assert service.engine.cache_tree(under=hashes[0]).nodes[0].num_pins == 0
    browser.click("flush")
    browser.wait_for_text("flush", "really?")
    state = service.state()
    assert state["num_free_blocks"] < state["num_blocks"], "one click has flushed"
    browser.click("flush")
    browser.wait_for_text("notice", "flushed")
    assert service.state()["num_cached_blocks"] == 0
    assert browser.errors == []


@needs_chromium
def test_a_dangerous_verb_wants_a_second_click_soon_and_on_the_same_button(browser, serve, service):
    browser.open(serve().url + "/")
    browser.wait_for_text("status", "idle")
    browser.click("abort-all")
    browser.wait_for_text("abort-all", "really?")
    browser.click("pause-abort")  # arms this one, and no longer the other
    browser.wait_for_text("pause-abort", "really?")
    browser.run("armed.until = performance.now() - 1")  # five seconds have passed
    browser.click("pause-abort")
    browser.wait_for_text("pause-abort", "really?")
    assert not service.engine.is_paused
    browser.click("pause-abort")
    browser.wait_for_text("status", "paused (abort)")
    assert browser.text("pause-abort") == "Pause and abort all"
    assert browser.run("[...document.getElementById('pause-mode').options].map(o => o.text)") == ["retract", "in_place"]
    assert browser.errors == []


@needs_chromium
def test_a_session_shows_its_turns_with_reasoning_and_tool_calls(browser, serve):
    server = serve()
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": {"town": NASTY}}}
    answer = {"role": "assistant", "content": None, "reasoning_content": "It asks.", "tool_calls": [call]}
    told = [{"role": "user", "content": NASTY}, answer, {"role": "tool", "tool_call_id": "call_1", "content": "rain"}]
    httpx.post(f"{server.url}/open_session", json={"session_id": "mine"}).raise_for_status()
    for _ in range(2):
        params = {"max_new_tokens": 3, "ignore_eos": True}
        body = {"input_ids": [7, 8], "sampling_params": params, "session_params": {"id": "mine"}}
        httpx.post(f"{server.url}/generate", json=body).raise_for_status()
    browser.open(server.url + "/")
    browser.wait_for_text("sessions-summary", "1 open")
    browser.fill("session-id", "mine")
    browser.click("show-session")
    browser.wait_for_text("session-summary", "2 turns")
    cells = browser.run(
        "[...document.querySelectorAll('#turns tr')].map(r => [2, 3, 4, 5].map(i => r.cells[i].textContent))"
    )
    assert cells == [["0", "2", "5", "default \u00d73"], ["5", "7", "10", "default \u00d73"]]
    browser.wait_for_text("session-messages", "made of token ids: 7 8 ")
    browser.run("document.querySelector('#turns button').click()")
    browser.wait_for("document.querySelectorAll('#turns tr')[1].cells[5].textContent === ''")  # the first turn's tokens
    texts = browser.run(
        f"{json.dumps(told)}.map(messageElement).map(m => [...m.children].map(part => part.textContent))"
    )
    assert texts == [
        ["user", NASTY],
        ["assistant", "It asks.", f"calls weather({json.dumps({'town': NASTY}, separators=(',', ':'))})  call_1"],
        ["tool call_1", "rain"],
    ]
    browser.fill("session-id", "other")
    browser.click("show-session")
    browser.wait_for_text("notice", "other")
    assert browser.run("document.title") == "Lockstep"
    assert len(browser.errors) == 1, "the last call's 404 alone"


@needs_chromium
def test_the_chart_has_axes_with_units_and_its_curve_lies_by_the_clock(browser, serve, service):
    browser.open(serve().url + "/")
    browser.wait_for_text("curve-values", "tok/s")
    values = browser.run("""
        curve = []; lastTokens = { tokens: 0, at: performance.now() - 30000 };
        showCurve([{ num_output_tokens: 3600 }], { metrics: { num_output_tokens: 0 } });
        const told = [...document.querySelectorAll('#curve-values span, #curve-times span')].map(p => p.textContent);
        const points = () => document.getElementById('curve-line').getAttribute('points');
        const first = points();
        curve[0].at -= 60000;
        showCurve([{ num_output_tokens: 3600 }], { metrics: { num_output_tokens: 0 } });
        [told, first, points()]""")
    assert isinstance(values, list)
    told, first, both = values
    assert told == ["200 tok/s", "100 tok/s", "0 tok/s", "120 s", "90 s", "60 s", "30 s", "now"]
    [(x, y)] = [map(float, point.split(",")) for point in first.split()]
    assert 119 < x <= 120 and 39 < y < 41  # 120 of 200
    assert [round(float(point.split(",")[0])) for point in both.split()] == [60, 120]
    assert browser.errors == []


@needs_chromium
def test_running_sequences_show_their_tokens_and_versions_and_can_be_aborted(browser, serve, service):
    service.engine.pause_generation("in_place")
    browser.open(serve().url + "/", scheme="dark")
    service.engine.add([7, 8, 9], SamplingParams(max_new_tokens=400, ignore_eos=True), rid=NASTY)
    browser.wait_for_text("sequences", NASTY)
    assert browser.run("document.title") == "Lockstep"
    assert browser.run("document.querySelectorAll('img').length") == 0
    assert browser.run("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 27)"
    service.engine.continue_generation()
    deadline = time.monotonic() + PATIENCE
    while service.engine.live_sequences()[0].num_output_tokens < 3:
        assert time.monotonic() < deadline
    service.engine.pause_generation("in_place")
    [view] = service.engine.live_sequences(24)
    versions = f"default ×{view.num_output_tokens}"
    browser.wait_for(f"document.querySelector('#sequences td:nth-child(9)').textContent === {versions!r}")
    browser.wait_for(
        f"document.querySelector('#sequences td:nth-child(10)').title === {' '.join(map(str, view.newest_ids))!r}"
    )
    browser.wait_for_text("pool-legend", "held")
    assert browser.run("parseFloat(document.querySelector('#pool-bar .held').style.width)") > 0
    abort = "document.querySelector('#sequences button')"
    browser.run(f"{abort}.click()")
    browser.run("refresh()")  # the line is made anew, and still knows of the first click
    browser.wait_for(f"{abort}.textContent === 'Abort: really?'")
    assert service.state()["num_running"] == 1
    browser.run(f"{abort}.click()")
    browser.wait_for_text("notice", "aborted")
    assert service.state()["num_running"] == 0
    assert browser.errors == []


@needs_chromium
def test_drafts_are_shown_by_source_and_by_the_reason_for_none(browser, serve, service):
    browser.open(serve().url + "/")
    browser.wait_for_text("drafts", "caller")
    greedy = SamplingParams(max_new_tokens=12, temperature=0.0, ignore_eos=True)
    service.engine.parts.speculation.lengths = WholeDrafts()
    [plain] = service.engine.generate([[7, 8, 9]], greedy, options=RequestOptions(speculation=False))
    [drafted] = service.engine.generate([[7, 8, 9]], greedy, options=RequestOptions(draft_token_ids=plain.token_ids))
    assert drafted.num_accepted_tokens > 0
    browser.wait_for_text("drafts-why", "refused 12")
    counts = service.state()["speculation"]["sources"]["caller"]
    shown = f"caller{counts['depth']}{counts['num_drafts']}{counts['num_drafted']}{counts['num_accepted']}"
    browser.wait_for_text("drafts", shown)
    assert browser.errors == []


@needs_chromium
def test_weights_that_differ_from_what_was_published_are_marked(browser, serve, service, model):
    browser.open(serve().url + "/")
    browser.wait_for_text("ranks", "none")
    browser.click("check")
    browser.wait_for_text("ranks", "nothing was published")  # that says nothing of the bytes
    service.begin_weight_update(weight_version=NASTY)
    service.update_weights_from_named_tensors(list(model.named_parameters()))
    service.end_weight_update()
    browser.wait_for_text("ranks", model_digest(model.named_parameters()))
    browser.click("check")
    browser.wait_for_text("ranks", "equal")
    assert browser.run("document.querySelectorAll('tr.differs').length") == 0
    with torch.no_grad():
        next(iter(service.engine.weights.resident_tensors()))[1].add_(1)
    browser.click("check")
    browser.wait_for_text("ranks", "DIFFERS from what was published")
    assert browser.run("document.querySelectorAll('tr.differs').length") == 1
    assert browser.run("document.title") == "Lockstep"
    assert browser.errors == []


@needs_chromium
@pytest.mark.slow
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_the_rank_whose_bytes_differ_is_marked(model, run_world, tmp_path, tp, pp):
    digest, changed = model_digest(model.named_parameters()), "model.layers.1.mlp.gate_proj.weight"

    def rank(rank: int) -> object:
        service = RolloutService(Engine(model, EngineConfig(tp=tp, pp=pp, k_blocks=2, kv_cache="32 blocks")))
        engine = service.engine

        def corrupt() -> None:
            if rank == 1:
                dict(engine.weights.resident_tensors())[changed].data.add_(1)

        engine.ranks.handlers["corrupt"] = corrupt
        service.commit_in_place("one", source=model.named_parameters())
        if rank == 1:
            ended = engine.follow()
            service.close()
            return ended
        browser = Browser(tmp_path / "profile")
        with serve_in_background(service, HttpConfig(port=0)) as server:
            browser.open(server.url + "/")
            browser.wait_for_text("ranks", f"1 (stage {pp - 1}, tp {tp - 1})one{digest}not checked")
            browser.click("check")
            browser.wait_for("[...document.querySelectorAll('#ranks tr')].every(r => r.textContent.endsWith('equal'))")
            marked = [browser.run("document.querySelectorAll('tr.differs').length")]
            engine.between_steps("corrupt", lambda: engine.ranks.run_everywhere("corrupt", {}))
            browser.click("check")
            browser.wait_for_text("ranks", f"DIFFERS from what was published: {changed}")
            marked += browser.run("[...document.querySelectorAll('tr.differs')].map(row => row.textContent[0])")
            service.update_weight_version("two")
            browser.wait_for("[...document.querySelectorAll('#ranks tr')].every(r => r.cells[1].textContent === 'two')")
            marked.append(browser.run("document.querySelectorAll('tr.differs').length"))
        browser.close()
        service.close()
        return marked, browser.errors

    (marked, errors), ended = run_world(2, rank)
    assert (marked, errors, ended) == ([0, "1", 0], [], "closed")


@needs_chromium
def test_with_an_admin_key_the_page_asks_for_it_and_then_obeys(browser, serve, service):
    browser.open(serve(admin_api_key=KEY).url + "/")
    browser.wait_for_text("sequences-none", "with the key only")
    assert not browser.run("document.getElementById('key-dialog').open")  # looking asks for nothing
    browser.click("pause")
    browser.wait_for("document.getElementById('key-dialog').open")
    assert not service.engine.is_paused
    browser.fill("key", KEY)
    browser.run("document.querySelector('#key-form button').click()")
    browser.wait_for("!document.getElementById('key-dialog').open")
    browser.click("pause")
    browser.wait_for_text("status", "paused")
    assert service.engine.is_paused
    browser.wait_for_text("sequences-none", "none")
    assert browser.run("localStorage.length + sessionStorage.length + document.cookie.length") == 0
