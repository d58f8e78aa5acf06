"""Answers that come late, or from a broker or a namespace that is not there any more, in a real Chromium."""

from __future__ import annotations

from typing import Any

import httpx

from millstream.testing.broker import BrokerForTests
from tests.e2e.dashboard.screen import Held, Screen
from tests.e2e.dashboard.world import queue, told


def two_worlds(screen: Screen, http: httpx.Client, other: str) -> Any:
    """A queue of one name in two namespaces; the choice between them."""
    told(http.post("/namespaces", json={"name": other}))
    queue(http, "shared", "worker")
    told(http.post(f"/namespaces/{other}/topics", json={"name": "shared"}))
    told(http.put(f"/namespaces/{other}/queues/shared/worker", json={}))
    screen.open("queue/shared/worker")
    return screen.page.get_by_label("Namespace")


def test_an_undo_ends_with_the_namespace_it_is_about(screen: Screen, http: httpx.Client) -> None:
    choice = two_worlds(screen, http, "second")
    screen.press("Pause")
    screen.press("Pause", within=screen.dialog())
    screen.told("shared / worker is paused")
    choice.select_option("second")
    assert screen.page.get_by_role("button", name="Undo").count() == 0, "it would resume the group of the other one"


def test_what_is_left_of_the_namespace_before_cannot_be_pressed(screen: Screen, http: httpx.Client) -> None:
    choice = two_worlds(screen, http, "third")
    screen.page.get_by_role("button", name="Purge").wait_for()
    held = Held(screen.page, "**/namespaces/third/**")
    choice.select_option("third")
    assert screen.page.locator("main").get_by_role("button").count() == 0, "it would be done in the other one"
    held.release()
    screen.page.get_by_role("button", name="Purge").wait_for()


def test_whoever_went_on_is_not_led_back_by_a_late_answer(screen: Screen, http: httpx.Client) -> None:
    told(http.post("/topics", json={"name": "doomed"}))
    page = screen.open("topic/doomed").page
    held = Held(page, "**/topics/doomed?*", "DELETE")
    screen.press("Delete")
    screen.dialog().get_by_role("textbox").fill("doomed")
    screen.press("Delete the topic", within=screen.dialog())
    held.wait()
    screen.open("publish")
    page.get_by_label("Value", exact=True).fill("half a sent")
    held.release()
    screen.told("Topic doomed was deleted")
    assert page.get_by_label("Value", exact=True).input_value() == "half a sent"


def test_an_undo_from_another_page_leaves_this_one_alone(screen: Screen, http: httpx.Client) -> None:
    page = screen.open("topics").page
    screen.press("New topic")
    screen.dialog().get_by_label("Name").fill("too-early")
    screen.press("Create", within=screen.dialog())
    note = screen.told("Topic too-early was created")
    page.get_by_role("link", name="too-early").wait_for()
    screen.open("publish")
    page.get_by_label("Value", exact=True).fill("half a sent")
    screen.press("Undo", within=note)
    screen.told("was deleted again")
    assert page.get_by_label("Value", exact=True).input_value() == "half a sent"
    assert http.get("/topics/too-early").status_code == 404


def test_a_slow_broker_is_not_asked_again_before_it_answered(screen: Screen) -> None:
    page = screen.page
    page.clock.install()
    screen.open("publish")
    held = Held(page, "**/stats/overview?*")
    page.clock.run_for(6000)
    held.wait()
    page.clock.run_for(15_000)
    assert len(held.asked) == 1
    held.release()


def test_a_page_that_a_broker_could_not_answer_comes_with_the_broker(screen: Screen, http: httpx.Client) -> None:
    told(http.post("/topics", json={"name": "patient", "if_missing": True}))
    screen.open("publish")
    screen.page.route("**/api/**", lambda route: route.abort())
    screen.open("topics")
    screen.see("the broker does not answer")
    screen.page.unroute("**/api/**")
    screen.look_again()
    screen.see("patient")
    screen.forgive("ERR_FAILED")


def test_what_is_deleted_meanwhile_is_not_shown_as_if_it_were_there(screen: Screen, http: httpx.Client) -> None:
    told(http.post("/namespaces", json={"name": "passing"}))
    told(http.post("/namespaces/passing/topics", json={"name": "fleeting"}))
    told(http.post("/namespaces/passing/topics", json={"name": "staying"}))
    screen.open("topics").page.get_by_label("Namespace").select_option("passing")
    screen.see("fleeting")
    screen.open("topic/fleeting")
    told(http.delete("/namespaces/passing/topics/fleeting"))
    screen.look_again()
    screen.see("topic 'fleeting' does not exist")
    screen.open("topics")
    screen.see("staying")
    told(http.delete("/namespaces/passing", params={"force": True}))
    screen.look_again()
    screen.see("namespace 'passing' does not exist")
    screen.forgive("404")


def test_a_broker_that_fails_is_not_said_to_refuse(screen: Screen) -> None:
    screen.open("publish")
    screen.page.route("**/stats/overview?*", lambda route: route.fulfill(status=503, json={"message": "too busy"}))
    screen.look_again()
    screen.page.locator("#mode").filter(has_text="cannot answer").wait_for()
    screen.forgive("503")


def test_the_time_span_that_was_chosen_last_is_drawn(screen: Screen, http: httpx.Client) -> None:
    told(http.post("/topics", json={"name": "charted"}))
    page = screen.open("topic/charted").page
    screen.press("Live")  # no more: what is drawn is what was chosen
    held = Held(page, "**/stats/history?*")
    screen.press("30 d")
    held.wait(3)
    held.let_others_pass()
    page.evaluate("document.querySelector('.plots').firstChild.dataset.old = 'yes'")
    screen.press("15 min")
    page.locator(".plots > :first-child:not([data-old])").wait_for()
    page.evaluate("document.querySelector('.plots').firstChild.dataset.last = 'yes'")
    held.answered()
    assert page.locator(".plots > [data-last]").count() == 1


def test_a_time_span_that_cannot_be_read_is_said_so(screen: Screen, http: httpx.Client) -> None:
    told(http.post("/topics", json={"name": "charted", "if_missing": True}))
    page = screen.open("topic/charted").page
    page.route("**/stats/history?*", lambda route: route.abort())
    screen.press("6 h")
    screen.told("the broker does not answer")
    screen.forgive("ERR_FAILED")


def test_a_gap_is_not_measured_and_a_point_alone_is_a_dot(screen: Screen, http: httpx.Client) -> None:
    told(http.post("/topics", json={"name": "charted", "if_missing": True}))
    minutes = [0, 1, 2, 30, 58, 59, 60]
    points = [{"time_ms": 60_000 * (1 + one), "avg": 5.0, "max": 5.0, "min": 5.0} for one in minutes]
    history = {"step_ms": 60_000, "points": points}
    page = screen.page
    page.route("**/stats/history?*", lambda route: route.fulfill(json=history))
    screen.open("topic/charted")
    lines = page.locator(".plot polyline").evaluate_all(
        "all => all.map((one) => one.getAttribute('points').split(' '))"
    )
    assert [len(line) for line in lines[:3]] == [3, 2, 3]
    assert lines[1][0] == lines[1][1]
    area = page.locator(".graph .area").first
    width = screen.width(area)
    area.hover(position={"x": width / 4, "y": 40})
    assert "not measured" in page.locator(".tip").inner_text()
    area.hover(position={"x": width / 2, "y": 40})
    assert "published 5/s" in page.locator(".tip").inner_text()


def test_a_page_of_the_search_before_is_not_added_to_this_one(screen: Screen, http: httpx.Client) -> None:
    told(http.post("/topics/apples/messages", json=[{"value": f"apple {n}"} for n in range(60)]))
    told(http.post("/topics/pears/messages", json={"value": "pear"}))
    page = screen.open("messages?topic=apples").page
    held = Held(page, "**/topics/apples/messages?*")
    screen.press("Look further")
    held.wait()
    held.let_others_pass()
    page.get_by_label("Topic", exact=True).fill("pears")
    screen.press("Search")
    screen.see("pear")
    held.answered()
    assert page.locator("tbody tr").count() == 1


def test_what_is_typed_while_following_is_not_followed(screen: Screen, http: httpx.Client) -> None:
    told(http.post("/topics", json={"name": "tides"}))
    page = screen.open("messages?topic=tides").page
    screen.press("Follow")
    screen.see("Waiting for messages")
    page.get_by_label("Topic", exact=True).fill("tid")
    for n in range(2):
        told(http.post("/topics/tides/messages", json={"value": f"wave {n}"}))
        screen.see(f"wave {n}")


def test_following_that_cannot_go_on_says_so(screen: Screen, http: httpx.Client) -> None:
    told(http.post("/topics", json={"name": "stopped"}))
    page = screen.open("messages?topic=stopped").page
    screen.press("Follow")
    screen.see("Waiting for messages")
    page.route("**/topics/stopped/messages?*", lambda route: route.abort())
    told(http.post("/topics/stopped/messages", json={"value": "the last"}))
    screen.told("Following has ended: the broker does not answer")
    screen.forgive("ERR_FAILED")


def test_a_refresh_under_way_does_not_take_back_what_was_asked_for(screen: Screen, http: httpx.Client) -> None:
    queue(http, "heavy", "worker")
    told(http.post("/topics/heavy/messages", json=[{"value": n} for n in range(60)]))
    leased = told(http.post("/queues/heavy/worker/lease", json={"max": 60}))
    told(http.post("/queues/reject", json={"receipts": [one["receipt"] for one in leased], "reason": "no"}))
    page = screen.open("letters?topic=heavy").page
    letters = page.get_by_role("group", name="Dead letters").locator("tbody tr")
    held = Held(page, "**/dead-letters?*")
    screen.look_again()
    held.wait()
    held.let_others_pass()
    screen.press("Show more")
    letters.nth(59).wait_for()
    held.answered()
    assert letters.count() == 60


def test_a_plan_is_that_of_what_is_chosen_now(screen: Screen, http: httpx.Client, broker: BrokerForTests) -> None:
    told(http.post("/topics/read/messages", json=[{"value": n} for n in range(7)]))
    with broker.connect() as client:
        stream = client.stream("read", group="readers", start="earliest")
        next(iter(stream))
        stream.commit()
        stream.close()
    screen.open("group/readers")
    screen.press("Reset offsets…")
    dialog = screen.dialog()
    to, plan = dialog.locator("select").last, dialog.get_by_role("group", name="What would change")
    to.select_option("latest")
    screen.press("Dry run", within=dialog)
    plan.get_by_role("cell", name="7", exact=True).wait_for()
    to.select_option("earliest")
    plan.wait_for(state="detached")
    held = Held(screen.page, "**/groups/readers/reset", "POST")
    screen.press("Dry run", within=dialog)
    held.wait()
    to.select_option("latest")
    held.answered()
    assert plan.count() == 0


def test_a_plan_of_a_replay_is_that_of_the_last_target(screen: Screen, http: httpx.Client) -> None:
    queue(http, "broken", "worker")
    told(http.post("/topics", json={"name": "first-aid"}))
    told(http.post("/topics", json={"name": "second-aid"}))
    told(http.post("/topics/broken/messages", json={"value": "x"}))
    [leased] = told(http.post("/queues/broken/worker/lease", json={}))
    told(http.post("/queues/reject", json={"receipts": [leased["receipt"]], "reason": "no"}))
    screen.open("letters?topic=broken")
    screen.press("Replay…")
    dialog, target = screen.dialog(), screen.dialog().get_by_label("To topic")
    dialog.get_by_text("1 message, ").wait_for()
    held = Held(screen.page, "**/dead-letters/replays", "POST")
    target.fill("first-aid")
    target.blur()
    held.wait()
    held.let_others_pass()
    target.fill("second-aid")
    target.blur()
    dialog.get_by_text("second-aid").wait_for()
    held.answered()
    dialog.get_by_text("second-aid").wait_for()
    assert dialog.get_by_text("first-aid").count() == 0


def test_a_setting_that_is_emptied_is_not_a_zero(screen: Screen, http: httpx.Client) -> None:
    told(http.post("/topics", json={"name": "kept"}))
    screen.open("topic/kept")
    screen.press("Change settings")
    dialog = screen.dialog()
    dialog.get_by_label("retention_ms", exact=True).fill("")
    screen.press("Save", within=dialog)
    assert dialog.get_by_label("retention_ms", exact=True).evaluate("one => one.validity.valueMissing")
    screen.press("Cancel", within=dialog)
    assert told(http.get("/topics/kept"))["config"]["retention_ms"] > 0


def test_a_broker_whose_machine_vanishes_is_named(screen: Screen) -> None:
    """Nothing closes the connection then, and no request is ever answered."""
    page, mode = screen.page, screen.page.locator("#mode")
    page.clock.install()
    screen.open("publish")
    mode.filter(has_text="running").wait_for()
    held = Held(page, "**/api/**")
    page.clock.run_for(6000)
    held.wait()
    page.clock.run_for(21_000)
    mode.filter(has_text="not reachable").wait_for()
    held.let_others_pass()
    page.clock.run_for(21_000)  # also for whatever was asked in between
    mode.filter(has_text="running").wait_for()


def test_an_answer_that_rightly_takes_long_is_waited_for(screen: Screen, http: httpx.Client) -> None:
    told(http.post("/topics/long/messages", json={"value": "needle"}))
    page = screen.page
    page.clock.install()
    screen.open("messages")
    held = Held(page, "**/topics/long/messages?*")
    page.get_by_label("Topic", exact=True).fill("long")
    screen.press("Search")
    held.wait()
    for _ in range(3):
        with page.expect_response("**/health/live"):
            page.clock.run_for(15_500)
        page.evaluate("fetch('/api/v1/topics').then(() => null)")  # the page has heard of the one before, too
        page.clock.run_for(5000)
    assert page.locator("main").get_by_role("alert").count() == 0
    held.release()
    screen.see("needle")


def test_what_was_asked_of_a_machine_that_vanished_may_have_been_done(screen: Screen) -> None:
    page = screen.page
    page.clock.install()
    screen.open("publish")
    page.locator("#mode").filter(has_text="running").wait_for()
    for method in ("GET", "POST"):
        Held(page, "**/api/**", method)
    page.get_by_label("Topic", exact=True).fill("lost")
    screen.press("Publish")
    page.clock.run_for(21_000)
    screen.told("the broker does not answer; look whether it was done before you do it again")
    assert page.get_by_role("button", name="Publish").is_enabled()


def test_a_page_that_can_no_longer_be_refreshed_says_so(screen: Screen, http: httpx.Client) -> None:
    told(http.post("/topics", json={"name": "frozen"}))
    page, mode = screen.open("topic/frozen").page, screen.page.locator("#mode")
    refused = {"message": "the directory cannot be read now"}
    page.route("**/topics/frozen*", lambda route: route.fulfill(status=503, json=refused))
    screen.look_again()
    mode.filter(has_text="this page is not up to date").wait_for()
    assert mode.get_attribute("title") == refused["message"]
    page.unroute("**/topics/frozen*")
    screen.look_again()
    mode.filter(has_text="running").wait_for()
    screen.forgive("503")


def test_letters_that_are_counted_after_they_are_listed_are_not_said_to_be_none(screen: Screen) -> None:
    """It said "50 of 0 shown", until somebody pressed the button beside it."""
    letter = {"id": "01M7J4GRX25AYNAB8000000000", "original_topic": "orders", "group": "billing", "reason": "REJECTED"}
    letter |= {"error": "no", "deliveries": 1, "dead_ms": 1_795_000_000_000, "key": None, "key_encoding": "text"}
    page = screen.page
    page.route("**/dead-letters?*", lambda route: route.fulfill(json={"letters": [letter], "after": "0:1"}))
    held = Held(page, "**/dead-letters/statistics*")
    with page.expect_event("requestfinished", lambda asked: "/dead-letters?" in asked.url):
        page.goto(f"{screen.url}/#/letters")
    held.wait()
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")  # it is drawn
    for route in held.asked:
        route.fulfill(json={"total": 70, "by_reason": {"REJECTED": 70}, "by_error": {"no": 70}})
    screen.see("1 of 70 shown")
