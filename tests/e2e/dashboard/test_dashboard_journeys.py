"""What the person on call does, from the first look to the last click, in a real Chromium."""

from __future__ import annotations

import httpx

from millstream.testing.broker import BrokerForTests
from tests.e2e.dashboard.screen import Screen
from tests.e2e.dashboard.world import queue, told


def test_a_message_is_published_seen_fails_is_mended_replayed_and_settled(screen: Screen, http: httpx.Client) -> None:
    queue(http, "payments", "ledger")
    page = screen.open("publish").page
    page.get_by_label("Topic", exact=True).fill("payments")
    page.get_by_label("Key", exact=True).fill("c-17")
    page.get_by_label("Value", exact=True).fill('{"amount":12345678901234567890,"currency":"XXX"}')
    screen.press("Publish")
    screen.told("Published to payments")

    page.locator(".notice a.mono").click()
    screen.see("stored")
    screen.see("c-17")
    original = page.url.rpartition("/")[2]

    [leased] = told(http.post("/queues/payments/ledger/lease", json={}))
    told(http.post("/queues/reject", json={"receipts": [leased["receipt"]], "reason": "unknown currency XXX"}))
    screen.open("letters")
    screen.see("unknown currency XXX")
    page.get_by_role("link", name="Open dead letter").click()
    page.get_by_role("heading", name="unknown currency XXX").wait_for()
    value = page.get_by_label("Value", exact=True)
    assert '"amount": 12345678901234567890' in value.input_value(), "long numbers must stay what they are"
    value.fill(value.input_value().replace("XXX", "EUR"))
    screen.see("what is sent is different")
    screen.press("Dry run")
    screen.see("1 message, ")
    screen.press("Replay with changes")
    screen.told("was sent again to payments")
    screen.see("This letter was replayed or purged")

    [mended] = told(http.post("/queues/payments/ledger/lease", json={"encoding": "json"}))
    assert mended["value"] == {"amount": 12345678901234567890, "currency": "EUR"}
    told(http.post("/queues/ack", json={"receipts": [mended["receipt"]]}))

    screen.open(f"message/{original}")
    for stamp in ("stored", "rejected", "dead letter", "replayed"):
        page.locator(".passport .what").get_by_text(stamp, exact=True).first.wait_for()
    assert "unknown currency XXX" in page.locator(".passport").inner_text()
    page.locator(".passport").get_by_role("link", name=mended["id"]).click()
    page.locator(".passport .what").get_by_text("settled", exact=True).wait_for()
    screen.open("letters?topic=payments")
    screen.see("No dead letter matches")


def test_many_letters_are_chosen_by_reason_and_error_and_replayed_or_purged(screen: Screen, http: httpx.Client) -> None:
    queue(http, "mails", "sender")
    told(http.post("/topics/mails/messages", json=[{"value": f"mail {n}"} for n in range(30)]))
    leased = told(http.post("/queues/mails/sender/lease", json={"max": 30}))
    for n, error in ((0, "no such mailbox"), (1, "connection reset")):
        receipts = [message["receipt"] for message in leased[n::2]]
        told(http.post("/queues/reject", json={"receipts": receipts, "reason": error}))
    page = screen.open("letters?topic=mails").page
    screen.see("all 30 that match")
    page.get_by_role("group", name="Errors").get_by_role("button", name="no such mailbox").click()
    screen.see("all 15 that match")
    screen.press("Replay…")
    plan = screen.dialog()
    plan.get_by_text("15 messages, ").wait_for()
    plan.get_by_label("Messages per second").fill("1")
    screen.press("Replay", within=plan)
    screen.told("Replay of 15 messages has begun")
    screen.press("Abort")
    screen.press("Abort the replay", within=screen.dialog())
    screen.told("The replay was aborted")
    screen.see("aborted")

    screen.open("letters?topic=mails&error=connection+reset")
    screen.press("Purge…")
    question = screen.dialog()
    question.get_by_text("Purge 15 dead letters?").wait_for()
    assert question.get_by_role("button", name="Purge 15").is_disabled(), "many letters ask for their number"
    question.get_by_role("textbox").fill("15")
    screen.press("Purge 15", within=question)
    screen.told("15 dead letters were purged")
    screen.see("No dead letter matches")


def test_a_topic_is_made_and_is_only_deleted_by_somebody_who_means_it(screen: Screen, http: httpx.Client) -> None:
    page = screen.open("topics").page
    screen.press("New topic")
    dialog = screen.dialog()
    dialog.get_by_label("Name").fill("not a name")
    screen.press("Create", within=dialog)
    dialog.get_by_role("alert").wait_for()
    dialog.get_by_label("Name").fill("short-lived")
    screen.press("Create", within=dialog)
    screen.told("Topic short-lived was created")
    page.get_by_role("link", name="short-lived").click()

    screen.press("Delete")
    screen.press("Cancel", within=screen.dialog())
    assert http.get("/topics/short-lived").status_code == 200
    screen.press("Delete")
    dialog = screen.dialog()
    sure = dialog.get_by_role("button", name="Delete the topic")
    dialog.get_by_role("textbox").fill("short")
    assert sure.is_disabled()
    dialog.get_by_role("textbox").fill("short-lived")
    sure.click()
    screen.told("Topic short-lived was deleted")
    assert http.get("/topics/short-lived").status_code == 404
    screen.forgive("400")


def test_a_pause_and_a_move_can_be_undone(screen: Screen, http: httpx.Client) -> None:
    queue(http, "jobs", "worker")
    [receipt] = told(http.post("/topics/jobs/messages", json={"value": "later", "delay_ms": 3_600_000}))
    screen.open("queue/jobs/worker")
    screen.press("Pause")
    screen.press("Pause", within=screen.dialog())
    note = screen.told("jobs / worker is paused")
    assert told(http.get("/queues/jobs/worker"))["policy"]["paused"] is True
    screen.press("Undo", within=note)
    screen.told("jobs / worker goes on")
    assert told(http.get("/queues/jobs/worker"))["policy"]["paused"] is False

    due_ms = told(http.get(f"/schedules/{receipt['id']}"))["due_ms"]
    screen.open("schedules?topic=jobs")
    screen.press("Move")
    screen.dialog().get_by_label("Deliver at").fill("2030-01-01T08:00:00")
    screen.press("Move", within=screen.dialog())
    note = screen.told("is due on 2030-01-01")
    assert told(http.get(f"/schedules/{receipt['id']}"))["due_ms"] != due_ms
    screen.press("Undo", within=note)
    screen.told("due when it was before")
    assert told(http.get(f"/schedules/{receipt['id']}"))["due_ms"] == due_ms


def test_new_messages_are_followed_as_they_come(screen: Screen, http: httpx.Client) -> None:
    told(http.post("/topics/news/messages", json={"value": "old"}))
    screen.open("messages?topic=news")
    screen.see("old")
    screen.press("Follow")
    screen.see("Waiting for messages")
    told(http.post("/topics/news/messages", json={"value": "fresh from the press"}))
    screen.see("fresh from the press")
    assert screen.page.locator("tbody tr").count() == 1


def test_a_message_says_what_it_is_to_each_queue_group(screen: Screen, http: httpx.Client) -> None:
    for group in ("packing", "billing"):
        queue(http, "parcels", group)
    [receipt] = told(http.post("/topics/parcels/messages", json={"value": "one"}))
    [leased] = told(http.post("/queues/parcels/billing/lease", json={}))
    told(http.post("/queues/nack", json={"receipts": [leased["receipt"]], "reason": "no stamps", "delay_ms": 60_000}))
    page = screen.open(f"message/{receipt['id']}").page
    groups = page.get_by_role("table", name="What the message is to each queue group")
    groups.get_by_role("row").filter(has_text="packing").get_by_text("ready").wait_for()
    failed = groups.get_by_role("row").filter(has_text="billing")
    for text in ("waiting", "no stamps"):
        failed.get_by_text(text).wait_for()
    assert screen.flaws() == []


def test_who_is_turned_away_can_be_told_why(screen: Screen, http: httpx.Client, broker: BrokerForTests) -> None:
    with broker.connect(client_id="guest") as guest:
        guest.ping()
        page = screen.open("health").page
        screen.press("Disconnect", within=page.get_by_role("row").filter(has_text="guest"))
        screen.dialog().get_by_label("Reason").fill("holds messages for hours")
        with page.expect_request(lambda request: request.method == "DELETE") as asked:
            screen.press("Disconnect", within=screen.dialog())
        assert asked.value.url.endswith("?reason=holds+messages+for+hours")
        screen.told("guest was disconnected")
    screen.press("Begin maintenance")
    screen.dialog().get_by_label("Reason").fill("a new disk")
    screen.press("Begin maintenance", within=screen.dialog())
    screen.told("Maintenance has begun")
    screen.see("a new disk")
    assert told(http.get("/admin/mode")) == {"mode": "maintenance", "reason": "a new disk"}
    screen.press("End maintenance")
    screen.told("Maintenance is over")
    assert told(http.get("/admin/mode")) == {"mode": "normal", "reason": ""}


def test_a_webhook_is_of_the_group_that_other_doors_would_take(screen: Screen) -> None:
    screen.open("webhooks")
    screen.press("New webhook")
    assert screen.dialog().get_by_label("Group").input_value() == "default"
