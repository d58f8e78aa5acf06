"""A broker that asks for keys, in a real Chromium: keys that are wrong, revoked, or allow little."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from millstream.testing.broker import BrokerForTests
from tests.e2e.access_world import guarded, key_for, new_key
from tests.e2e.dashboard.screen import Held, Screen
from tests.e2e.dashboard.world import queue, told


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerForTests]:
    with guarded(http=True) as running:
        yield running


@pytest.fixture(scope="module")
def http(broker: BrokerForTests) -> Iterator[httpx.Client]:
    """An administrator, in whose shop a letter has died."""
    headers = {"Authorization": f"Bearer {key_for(broker, 'admin')}"}
    with httpx.Client(base_url=f"{broker.url}/api/v1", timeout=10, headers=headers) as client:
        queue(client, "orders", "billing")
        told(client.post("/topics/orders/messages", json={"value": "x"}))
        [leased] = told(client.post("/queues/orders/billing/lease", json={}))
        told(client.post("/queues/reject", json={"receipts": [leased["receipt"]], "reason": "too heavy"}))
        yield client


@pytest.fixture
def visitor(screen: Screen, http: httpx.Client) -> Iterator[Screen]:
    """A tab of somebody who has given no key yet."""
    screen.page.goto(screen.url)
    yield screen
    screen.page.evaluate("sessionStorage.clear()")
    screen.forgive("401", "403")


def give(screen: Screen, key: str) -> Any:
    dialog = screen.dialog()
    dialog.get_by_label("API key").fill(key)
    screen.press("Use this key", within=dialog)
    return dialog


def asked_once_more(screen: Screen) -> None:
    """What happens every few seconds has happened, and the answer was seen."""
    screen.page.evaluate("document.getElementById('mode').textContent = '?'")
    screen.look_again()
    screen.page.locator("#mode").filter(has_text="key needed").wait_for()


def test_a_key_that_is_no_good_is_said_to_be(visitor: Screen, broker: BrokerForTests) -> None:
    dialog = give(visitor, "clé\u200b")
    assert dialog.get_by_label("API key").evaluate("one => one.validity.patternMismatch"), "no header can carry it"
    give(visitor, "nonsense")
    visitor.dialog().get_by_role("alert").wait_for()
    give(visitor, f" {key_for(broker, 'read')} ")
    visitor.see("Over time")


def test_who_waves_the_question_aside_is_left_alone_on_that_page(visitor: Screen) -> None:
    visitor.dialog()
    visitor.page.keyboard.press("Escape")
    visitor.page.locator("dialog").wait_for(state="detached")
    asked_once_more(visitor)
    assert visitor.page.locator("dialog").count() == 0
    visitor.page.evaluate("location.hash = '#/topics'")
    visitor.dialog()


def test_a_key_that_is_revoked_meanwhile_is_asked_for_again(
    visitor: Screen, http: httpx.Client, broker: BrokerForTests
) -> None:
    made = new_key(broker, "read")
    give(visitor, made.key)
    visitor.open("topics").see("orders")
    told(http.delete(f"/keys/{made.info.id}"))
    asked_once_more(visitor)
    visitor.dialog().get_by_role("alert").wait_for()
    visitor.see("orders")
    give(visitor, key_for(broker, "read"))
    visitor.page.locator("#mode").filter(has_text="running").wait_for()


def test_a_late_refusal_says_nothing_about_the_key_that_was_given_since(
    screen: Screen, http: httpx.Client, broker: BrokerForTests
) -> None:
    held = Held(screen.page, "**/stats/overview?*")
    screen.page.goto(screen.url)
    screen.dialog()
    held.wait()
    held.let_others_pass()
    give(screen, key_for(broker, "read"))
    screen.see("Over time")
    held.answered()
    assert screen.page.locator("dialog").count() == 0
    screen.forgive("401")


def test_who_may_read_one_topic_can_use_what_concerns_it(visitor: Screen, broker: BrokerForTests) -> None:
    give(visitor, key_for(broker, "read", scopes=["default:orders"]))
    page = visitor.page
    visitor.see("Over time")
    visitor.open("letters").see("Filter by a topic that it covers")
    page.get_by_label("Topic", exact=True).fill("orders")
    visitor.press("Filter")
    visitor.see("too heavy")
    visitor.open("traces")
    page.get_by_label("Topic", exact=True).fill("orders")
    visitor.press("Search")
    visitor.see("too heavy")
    visitor.open("health").see("Only administrators of the broker see who is connected")
    visitor.open("queue/orders/billing")
    visitor.press("Pause")
    visitor.press("Pause", within=visitor.dialog())
    visitor.told("lacks 'admin'")


def test_who_may_not_look_can_use_another_key(visitor: Screen, broker: BrokerForTests) -> None:
    give(visitor, key_for(broker, "produce"))
    visitor.see("lacks 'read'")
    visitor.press("Use another key")
    give(visitor, key_for(broker, "read"))
    visitor.see("Over time")
