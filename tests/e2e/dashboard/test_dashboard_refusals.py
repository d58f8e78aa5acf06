"""What the broker refuses, or cannot answer for a moment, is said where its answer would be; in a real Chromium."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.e2e.dashboard.screen import Screen
from tests.e2e.dashboard.world import dead, told

_TROUBLE = {"message": "the disk does not answer", "suggestions": ["Look at the disk."]}


def refuse(screen: Screen, address: str, status: int = 503) -> None:
    """From now on."""
    screen.page.route(address, lambda route: route.fulfill(status=status, json=_TROUBLE))


def test_a_search_that_fails_shows_nothing_of_the_one_before(screen: Screen, http: httpx.Client) -> None:
    told(http.post("/topics/found/messages", json={"value": "needle"}))
    page = screen.open("messages?topic=found").page
    screen.see("needle")
    page.get_by_label("Topic", exact=True).fill("nowhere")
    screen.press("Search")
    screen.see("topic 'nowhere' does not exist")
    assert page.get_by_text("needle").count() == 0
    page.get_by_label("Topic", exact=True).fill("found")
    screen.press("Search")
    screen.see("needle")
    assert page.locator("main").get_by_role("alert").count() == 0
    screen.open("messages?topic=nowhere").see("topic 'nowhere' does not exist")
    screen.forgive("404")


def test_traces_that_cannot_be_searched_say_why(screen: Screen) -> None:
    page = screen.open("traces").page
    page.get_by_label("Trace id").fill("not one")
    screen.press("Search")
    page.locator("main").get_by_role("alert").wait_for()
    assert page.get_by_role("table").count() == 0
    page.get_by_label("Trace id").fill("")
    screen.press("Search")
    page.get_by_role("table").wait_for()
    screen.forgive("400")


def test_a_search_of_traces_has_an_address_and_says_when_it_is_not_through(screen: Screen) -> None:
    asked: list[str] = []

    def answer(route: Any) -> None:
        asked.append(route.request.url)
        route.fulfill(json={"events": [], "after": "" if "after=" in route.request.url else "5.0"})

    page = screen.open("traces").page
    page.route("**/traces?*", answer)
    page.get_by_label("Topic", exact=True).fill("orders")
    page.get_by_label("Only failures").check()
    screen.press("Search")
    screen.see("Nothing so far")
    assert page.url.endswith("#/traces?topic=orders&failures_only=true")
    page.reload()
    screen.see("Nothing so far")
    assert "topic=orders&failures_only=true" in asked[-1]
    screen.press("Look further")
    screen.see("Nothing is recorded")


def test_connections_that_cannot_be_read_for_a_moment_come_back(screen: Screen) -> None:
    screen.open("health").see("Nobody is connected")
    refuse(screen, "**/admin/connections?*")
    screen.look_again()
    screen.see(_TROUBLE["message"])
    assert screen.page.get_by_text("Only administrators").count() == 0
    screen.page.unroute("**/admin/connections?*")
    screen.look_again()
    screen.see("Nobody is connected")
    screen.forgive("503")


@pytest.mark.parametrize(("status", "said"), [("aborted", "the target is gone"), ("failed", "")])
def test_a_replay_that_sent_nothing_is_not_said_to_have(
    screen: Screen, http: httpx.Client, status: str, said: str
) -> None:
    topic = f"unsent-{status}"
    letter = dead(http, topic, {"value": "x"})

    def ended(route: Any) -> None:
        replay = route.fetch().json()
        replay |= {"status": status, "replayed": 0, "failed": 0, "failures": [], "reason": said}
        route.fulfill(json=replay)

    screen.open(f"letter/{letter['id']}").page.route("**/dead-letters/replays/*", ended)
    screen.press("Replay")
    screen.told(f"It was not sent: {said or 'the replay is failed'}.")
