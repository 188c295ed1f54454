"""Workers that register side by side, as the engines of a job do when they start."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from lockstep.tests.support.forked_ranks import free_port

NUM = 12


@pytest.mark.parametrize("path", ["/workers", "/add_worker"])
def test_workers_that_come_and_go_side_by_side_wait_for_each_other(make_fleet, path):
    fleet = make_fleet(1)
    urls = [f"http://127.0.0.1:{free_port()}" for _ in range(NUM)]

    def add(url: str) -> int:
        if path == "/workers":
            return fleet.post(path, {"url": url}).status_code
        return fleet.http.post(path, params={"url": url}).status_code

    with ThreadPoolExecutor(NUM) as callers:
        assert set(callers.map(add, urls)) == {202}
        assert set(urls) <= set(fleet.http.get("/list_workers").json()["urls"])
        removed = callers.map(lambda url: fleet.http.post("/remove_worker", params={"url": url}).status_code, urls)
        assert set(removed) == {202}
    assert not set(urls) & set(fleet.http.get("/list_workers").json()["urls"])


@pytest.mark.parametrize("value", ["false", 0, 1, [], {}])
def test_a_flag_of_a_worker_that_is_none_is_refused(make_fleet, value):
    fleet = make_fleet(1)
    answer = fleet.post("/workers", {"url": "http://127.0.0.1:9", "disabled": value})
    assert answer.status_code == 400 and "disabled" in answer.text


def test_probes_may_ask_for_the_head_alone(make_fleet):
    fleet = make_fleet(1)
    for path in ("/health", "/ready", "/ping"):
        assert fleet.http.head(path).status_code == fleet.http.get(path).status_code == 200
