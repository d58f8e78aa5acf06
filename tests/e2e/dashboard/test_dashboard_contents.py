"""Messages that are long, deep, binary or odd, in a real Chromium: they are shown, and sent again as they were."""

from __future__ import annotations

from typing import Any

import httpx

from millstream.client import Outgoing
from millstream.testing.broker import BrokerForTests
from tests.e2e.dashboard.screen import Screen
from tests.e2e.dashboard.world import dead, queue, told


def leased_again(http: httpx.Client, topic: str) -> dict[str, Any]:
    [message] = told(http.post(f"/queues/{topic}/worker/lease", json={"encoding": "text"}))
    assert isinstance(message, dict)
    return message


def test_json_of_many_or_deep_brackets_is_shown(screen: Screen, http: httpx.Client) -> None:
    many, deep = "[" + ",".join(["{}"] * 150_000) + "]", "[" * 25_000 + "]" * 25_000
    for text, shown in ((many, "[\n  {},\n  {},"), (deep, "[[[[[[")):
        [receipt] = told(http.post("/topics/brackets/messages", json={"value": text, "encoding": "text"}))
        screen.open(f"message/{receipt['id']}")
        value = screen.page.get_by_label("Value", exact=True)
        assert value.evaluate("one => one.textContent.slice(0, 50)").startswith(shown)


def test_who_reads_in_the_middle_of_a_value_stays_there(screen: Screen, http: httpx.Client) -> None:
    [receipt] = told(http.post("/topics/long/messages", json={"value": list(range(500))}))
    page = screen.open(f"message/{receipt['id']}").page
    value = page.get_by_label("Value", exact=True)
    value.evaluate("one => { one.scrollTop = 1234; document.querySelector('main h1').dataset.old = 'yes'; }")
    screen.look_again()
    page.locator("main h1:not([data-old])").wait_for()
    assert value.evaluate("one => one.scrollTop") == 1234


def test_a_key_that_is_not_text_is_said_to_be_base64(screen: Screen, broker: BrokerForTests) -> None:
    with broker.connect() as client:
        client.publish_many("keys", [Outgoing(value=b"\xff\xfe", key=b"\xff\x00")])
    page = screen.open("messages?topic=keys").page
    screen.see("base64: /wA=")
    screen.see("base64: //4=")
    page.locator("tbody a.mono").click()
    page.get_by_role("heading", name="Passport").wait_for()
    screen.see("base64: /wA=")


def test_a_letter_with_foreign_ends_of_lines_is_sent_again_as_it_was(screen: Screen, http: httpx.Client) -> None:
    letter = dead(http, "faxes", {"value": "one\r\ntwo\rthree\n"})
    screen.open(f"letter/{letter['id']}")
    screen.press("Replay")
    screen.told("was sent again to faxes")
    assert leased_again(http, "faxes")["value"] == "one\r\ntwo\rthree\n"


def test_a_changed_letter_keeps_its_ends_of_lines(screen: Screen, http: httpx.Client) -> None:
    for topic, before, after in (
        ("telex", "one\r\ntwo\r\n", "one\r\n2\r\n"),
        ("mixed", "one\r\ntwo\n", "one\n2\n"),  # which was which, nobody knows any more
    ):
        letter = dead(http, topic, {"value": before})
        page = screen.open(f"letter/{letter['id']}").page
        page.get_by_label("Value").fill("one\n2\n")
        screen.press("Replay with changes")
        screen.told(f"was sent again to {topic}")
        assert leased_again(http, topic)["value"] == after


def test_what_turns_the_direction_of_writing_does_not_turn_what_stands_behind_it(
    screen: Screen, broker: BrokerForTests, http: httpx.Client
) -> None:
    # The end of an isolation leaves the element that isolates, too.
    for number, name in enumerate(("\u202egro.liame", "\u2069\u202egro.liame")):
        topic = f"turned-{number}"
        queue(http, topic, "worker")
        with broker.connect(client_id=name) as client, client.queue(topic, group="worker"):
            page = screen.open(f"queue/{topic}/worker").page
            page.locator("td.name span.soft").first.wait_for()
            # Both at once: the page may be drawn anew between two questions.
            cell, address = page.locator("td.name", has=page.locator("span.soft")).first.evaluate(
                "cell => [cell, cell.querySelector('span.soft')].map(one => one.getBoundingClientRect().x)"
            )
        assert address > cell + 40, "the address stands in front of the name"


def test_what_turns_the_direction_of_writing_does_not_turn_the_sentence_it_is_in(
    screen: Screen, http: httpx.Client
) -> None:
    letter = dead(http, "twisted", {"value": "\u202evalue", "key": "\u202ekey"}, reason="\u202ereversed")
    page = screen.open("letters?topic=twisted").page
    for text in ("\\u202ereversed", "\\u202ekey"):
        screen.see(text)
    assert "\u202e" not in page.locator("main").inner_html()
    screen.open(f"letter/{letter['id']}").see("\\u202ereversed")
    assert page.get_by_label("Value").input_value() == "\u202evalue", "what is sent again is what it was"


def test_a_message_of_several_groups_says_which_of_them_it_waits_for(screen: Screen, http: httpx.Client) -> None:
    for group in ("fast", "slow"):
        queue(http, "read-twice", group)
    told(http.put("/queues/read-twice/slow", json={"paused": True}))
    [sent] = told(http.post("/topics/read-twice/messages", json={"value": "x"}))
    [leased] = told(http.post("/queues/read-twice/fast/lease", json={}))
    told(http.post("/queues/ack", json={"receipts": [leased["receipt"]]}))
    screen.open(f"message/{sent['id']}").see("slow: It is ready, but the group is paused.")


def test_what_nobody_has_to_settle_is_not_unsettled(screen: Screen, http: httpx.Client) -> None:
    told(http.post("/topics/unread/messages", json=[{"value": "x"}, {"value": "y"}]))
    page = screen.open("topic/unread").page
    assert page.locator(".figures", has_text="Messages kept").locator(".figure").inner_text() == "2"
    assert page.locator(".figures", has_text="Unsettled").locator(".figure").inner_text() == "0"


def test_a_long_name_of_a_header_leaves_room_for_its_value(screen: Screen, http: httpx.Client) -> None:
    headers = {"x-a-name-that-goes-on-and-on-until-nothing-is-left-for-anything-else": "a value of some words"}
    [sent] = told(http.post("/topics/labelled/messages", json={"value": "x", "headers": headers}))
    value = screen.open(f"message/{sent['id']}").page.locator("dd", has_text="a value of some words")
    assert screen.width(value) > 150


def test_a_header_that_is_there_twice_stays_so(screen: Screen, http: httpx.Client) -> None:
    letter = dead(http, "tagged", {"value": "x", "headers": {"tag": ["red", "blue"], "from": "a"}})
    page = screen.open(f"letter/{letter['id']}").page
    headers = page.get_by_label("Headers")
    headers.fill("tag: green\ntag: blue\nfrom: a")
    screen.press("Replay with changes")
    screen.told("The header tag is there several times")
    headers.fill("tag: red\ntag: blue\nfrom: b")
    screen.press("Replay with changes")
    screen.told("was sent again to tagged")
    assert leased_again(http, "tagged")["headers"].items() >= {"tag": ["red", "blue"], "from": "b"}.items()

    screen.open("publish")
    page.get_by_label("Topic", exact=True).fill("hand-made")
    page.get_by_label("Headers").fill("tag: red\ntag: blue")
    screen.press("Publish")
    screen.told("Published to hand-made")
    [message] = told(http.get("/topics/hand-made/messages"))["messages"]
    assert message["headers"] == {"tag": ["red", "blue"]}


def test_a_letter_behind_a_short_page_can_be_sent_again(screen: Screen, http: httpx.Client) -> None:
    letter = dead(http, "crowded", {"value": "x"})

    def answer(route: Any) -> None:
        address, after, _ = route.request.url.partition("&after=")
        if after:
            route.continue_(url=address)
        else:
            route.fulfill(json={"letters": [], "after": "further"})

    screen.page.route("**/dead-letters?*", answer)
    screen.open(f"letter/{letter['id']}")
    screen.page.get_by_role("button", name="Replay").wait_for()
