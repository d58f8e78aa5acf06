"""Every page in a real Chromium: what is on it, how it looks, and who can use it."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx
import pytest

from millstream.client import Outgoing
from millstream.testing.broker import BrokerForTests
from tests.e2e.access_world import guarded, key_for
from tests.e2e.dashboard.screen import PAGES, Screen
from tests.e2e.dashboard.world import queue, told


@pytest.mark.parametrize(("theme", "width"), [("light", 1360), ("dark", 390)])
def test_every_page_is_whole_named_and_fits(screen: Screen, shop: dict[str, str], theme: str, width: int) -> None:
    screen.page.emulate_media(color_scheme=theme)
    screen.page.set_viewport_size({"width": width, "height": 860})
    for name, path in PAGES.items():
        screen.open(path.format(**shop))
        assert not screen.page.locator("[role=alert].bad").count(), f"{name} could not be shown"
        assert screen.flaws() == [], name
        screen.picture(f"page-{name}-{theme}", whole=True)


def test_on_a_telephone_what_is_wrong_is_read_without_scrolling_sideways(screen: Screen, shop: dict[str, str]) -> None:
    screen.page.set_viewport_size({"width": 390, "height": 860})
    for path, cells in (
        ("", "[aria-label='Groups furthest behind'] td"),
        ("health", "[aria-label=Components] td.wrap"),
    ):
        screen.open(path)
        right = f"[...document.querySelectorAll({json.dumps(cells)})].map((one) => one.getBoundingClientRect().right)"
        edges = screen.page.evaluate(right)
        assert len(edges) > 3
        assert max(edges) <= 390, path


def test_a_broker_that_is_new_says_where_to_begin(browser: Any) -> None:
    with BrokerForTests(http=True) as broker:
        page = browser.new_page()
        screen = Screen(page, broker.url).open()
        screen.see("nothing is here yet")
        page.get_by_role("link", name="Publish a message").click()
        page.get_by_role("heading", name="Publish").wait_for()
        page.close()
    assert not screen.troubles()


def test_the_theme_follows_the_system_until_somebody_chooses(screen: Screen) -> None:
    def brightness() -> int:
        colour = screen.page.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(int(part) for part in colour[4:-1].split(","))

    screen.page.emulate_media(color_scheme="dark")
    screen.open()
    assert brightness() < 150
    screen.press("Switch between light and dark")
    assert brightness() > 600
    screen.open("topics")
    assert brightness() > 600


def test_a_thousand_topics_are_shown_and_searched_at_once(screen: Screen) -> None:
    row = {"partition_count": 1, "messages": 5, "size_bytes": 999, "depth": 0, "leased": 0, "waiting": 0, "groups": 1}
    rows = [
        {"name": f"shop.{n % 20}.topic-{n:04}", **row, "dead_letters": n if n == 700 else 0, "created_ms": 1}
        for n in range(1000)
    ]
    screen.page.route("**/topics?*", lambda route: route.fulfill(json=rows, headers={"x-total-count": "1000"}))
    took_s: list[float] = []
    while len(took_s) < 3 and min(took_s, default=2) >= 2:  # others may be using this machine
        began_s = time.monotonic()
        screen.open("topics")
        screen.see("1,000 topics")
        took_s.append(time.monotonic() - began_s)
    assert min(took_s) < 2, took_s
    assert screen.page.locator("tbody tr").count() == 100
    screen.press("Dead letters")
    assert "topic-0700" in screen.page.locator("tbody tr").first.inner_text()
    for wanted, found in (("0042", "1 of 1,000"), ("shop.7.*", "50 of 1,000"), ("shop.#", "1,000 of 1,000")):
        screen.page.get_by_label("Filter topics").fill(wanted)
        screen.see(found)


def test_a_list_that_is_longer_than_a_page_bears_says_so(screen: Screen) -> None:
    row = {"partition_count": 1, "messages": 5, "size_bytes": 999, "depth": 0, "leased": 0, "waiting": 0, "groups": 1}
    rows = [{"name": f"topic-{n:04}", **row, "dead_letters": 0, "created_ms": 1} for n in range(1000)]
    screen.page.route("**/topics?*", lambda route: route.fulfill(json=rows, headers={"x-total-count": "31000"}))
    screen.open("topics")
    screen.see("the first 20,000 of 31,000 topics")


def test_a_topic_of_many_partitions_has_pages_of_them(screen: Screen, http: httpx.Client) -> None:
    told(http.post("/topics", json={"name": "wide", "partitions": 250}))
    page = screen.open("topic/wide").page
    partitions = page.get_by_role("table", name="Partitions").locator("tbody tr")
    assert partitions.count() == 100
    screen.see("1 to 100 of 250")
    screen.press("Next")
    screen.press("Next")
    screen.see("201 to 250 of 250")
    assert partitions.count() == 50
    page.locator("main h1").evaluate("one => { document.querySelector('tbody tr').dataset.old = 'yes'; }")
    screen.look_again()
    page.locator("tbody tr[data-old]").wait_for(state="detached")
    screen.see("201 to 250 of 250")


def test_an_id_is_copied_or_marked_to_be_copied(screen: Screen, shop: dict[str, str]) -> None:
    page = screen.open(f"message/{shop['original']}").page
    page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined, configurable: true })")
    screen.press("Copy id")
    screen.told("It is marked")
    assert page.evaluate("String(getSelection())") == shop["original"]
    clipboard = "{ writeText: async (text) => { window.copied = text; } }"
    page.evaluate(f"Object.defineProperty(navigator, 'clipboard', {{ value: {clipboard} }})")
    screen.press("Copy id")
    screen.told("Copied")
    assert page.evaluate("window.copied") == shop["original"]


def test_a_namespace_that_is_made_later_can_be_chosen(screen: Screen, http: httpx.Client) -> None:
    page = screen.open().page
    told(http.post("/namespaces", json={"name": "made-later"}))
    select = page.get_by_label("Namespace")
    select.focus()
    select.locator("option", has_text="made-later").wait_for(state="attached")
    assert select.input_value() == "default"
    with page.expect_response("**/namespaces/made-later/**"):
        select.select_option("made-later")


def test_who_pauses_something_with_the_keyboard_stays_where_they_are(screen: Screen, http: httpx.Client) -> None:
    queue(http, "halted", "worker")
    page = screen.open("queue/halted/worker").page
    page.get_by_role("button", name="Pause", exact=True).focus()
    page.keyboard.press("Enter")
    screen.dialog()
    page.keyboard.press("Enter")
    screen.told("is paused")
    page.locator("button:focus", has_text="Resume").wait_for()
    page.keyboard.press("Enter")
    screen.told("goes on")
    page.locator("button:focus", has_text="Pause").wait_for()


def test_everything_can_be_done_with_the_keyboard(screen: Screen, shop: dict[str, str]) -> None:
    page = screen.open().page
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to content"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    page.keyboard.press("g")
    page.keyboard.press("t")
    screen.see("Filter by a part of the name")
    assert page.evaluate("document.activeElement.tagName") == "H1"
    page.keyboard.press("/")
    page.keyboard.type("orders")
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="orders", exact=True).wait_for()
    page.get_by_role("button", name="Delete").focus()
    page.keyboard.press("Enter")
    assert screen.dialog().get_by_role("textbox").evaluate("one => one === document.activeElement")
    for _ in range(6):
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement === document.body || !!document.activeElement.closest('dialog')")
    page.keyboard.press("Escape")
    page.locator("dialog").wait_for(state="detached")
    assert page.evaluate("document.activeElement.textContent") == "Delete"


def test_on_a_telephone_the_menu_shows_where_one_is(screen: Screen) -> None:
    screen.page.set_viewport_size({"width": 390, "height": 860})
    for path in ("health", "", "mqtt"):
        screen.open(path)
        edges = (
            "(one) => { const { left, right } = one.getBoundingClientRect(); return [left, right].map(Math.round); }"
        )
        left, right = screen.page.locator("#nav [aria-current]").evaluate(edges)
        assert 0 <= left < right <= 390, path


def test_what_a_message_says_is_never_markup(screen: Screen, http: httpx.Client) -> None:
    evil = "<img src=/evil.png onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
    queue(http, "hostile", "billing")
    message = {"value": evil, "key": evil, "headers": {"x-evil": evil}}
    [receipt] = told(http.post("/topics/hostile/messages", json=message))
    [leased] = told(http.post("/queues/hostile/billing/lease", json={}))
    told(http.post("/queues/reject", json={"receipts": [leased["receipt"]], "reason": evil}))
    [letter] = told(http.get("/dead-letters", params={"topic": "hostile"}))["letters"]
    one, all_of_them = (f"message/{receipt['id']}", f"letter/{letter['id']}"), "topic=hostile"
    for path in (*one, f"messages?{all_of_them}", f"letters?{all_of_them}"):
        screen.open(path)
        assert "onerror" in screen.page.locator("main").inner_text()
        assert screen.page.locator("main img, main script").count() == 0
        assert "owned" not in screen.page.title()


def test_a_letter_of_any_time_can_be_shown(screen: Screen, http: httpx.Client, broker: BrokerForTests) -> None:
    queue(http, "odd-times", "billing")
    with broker.connect() as client:
        client.publish_many("odd-times", [Outgoing(value="from afar", timestamp=9.1e12)])
    [leased] = told(http.post("/queues/odd-times/billing/lease", json={}))
    told(http.post("/queues/reject", json={"receipts": [leased["receipt"]], "reason": "no"}))
    [letter] = told(http.get("/dead-letters", params={"topic": "odd-times"}))["letters"]
    screen.open(f"letter/{letter['id']}")
    screen.see("9,100,000,000,000,000 ms")


def test_a_broker_that_is_gone_is_named_and_what_was_seen_stays(screen: Screen, shop: dict[str, str]) -> None:
    screen.open("topics")
    screen.page.route("**/api/**", lambda route: route.abort())
    screen.press("Live")
    screen.press("Stopped")
    screen.page.locator("#mode").filter(has_text="not reachable").wait_for()
    screen.see("orders")
    screen.page.keyboard.press("r")
    screen.see("the broker does not answer")
    screen.page.unroute("**/api/**")
    screen.press("Try again")
    screen.see("orders")
    screen.forgive("ERR_FAILED")


def test_a_broker_with_keys_asks_for_one(browser: Any) -> None:
    with guarded(http=True) as broker:
        key = key_for(broker, "admin")
        page = browser.new_page()
        screen = Screen(page, broker.url)
        page.goto(broker.url)
        screen.dialog().get_by_label("API key").fill(key)
        screen.press("Use this key", within=screen.dialog())
        screen.see("All is well")
        assert key not in json.dumps(page.evaluate("({...localStorage})"))
        page.close()
        screen.forgive("401")
        assert not screen.troubles(), screen.troubles()
