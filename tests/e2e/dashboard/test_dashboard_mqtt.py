"""MQTT in a real Chromium: who is there, what waits, what is retained, and what can be done about it."""

from __future__ import annotations

import httpx

from millstream.mqtt.packets import V5
from tests.e2e.dashboard.screen import Held, Screen
from tests.e2e.mqtt.support import Wires


def test_a_session_is_found_looked_at_disconnected_and_forgotten(
    screen: Screen, http: httpx.Client, mqtt: Wires
) -> None:
    wire = mqtt.durable(V5, "floor 1/lamp")
    wire.subscribe("lamps/+/set", qos=1)
    mqtt.connect(V5, "other")
    page = screen.open("mqtt").page
    assert page.get_by_role("link", name="other").count() == 1
    page.get_by_label("Client id begins with").fill("floor")
    page.get_by_role("button", name="Filter").first.click()
    page.get_by_role("link", name="other").wait_for(state="detached")
    page.get_by_role("link", name="floor 1/lamp").click()
    page.get_by_role("heading", name="floor 1/lamp").wait_for()
    screen.see("lamps/+/set")
    screen.press("Disconnect")
    screen.press("Disconnect", within=screen.dialog())
    screen.told("floor 1/lamp was disconnected")
    wire.end()
    screen.see("away")
    mqtt.connect(V5).publish("lamps/1/set", b"on", 1)
    page.keyboard.press("r")
    page.get_by_role("link", name="lamps.1.set").wait_for()
    screen.press("Forget")
    question = screen.dialog()
    sure = question.get_by_role("button", name="Forget the session")
    assert sure.is_disabled()
    question.get_by_role("textbox").fill("floor 1/lamp")
    sure.click()
    screen.told("The session of floor 1/lamp is forgotten")
    assert http.get("/mqtt/sessions", params={"prefix": "floor"}).json()["sessions"] == []


def test_a_session_without_a_future_leads_back_to_the_list(screen: Screen, mqtt: Wires) -> None:
    mqtt.connect(V5, "passing")
    screen.open("mqtt-session/passing")
    screen.press("Disconnect")
    screen.press("Disconnect", within=screen.dialog())
    screen.told("passing was disconnected")
    screen.page.get_by_role("heading", name="MQTT", exact=True).wait_for()


def test_retained_messages_are_browsed_looked_into_and_cleared(screen: Screen, http: httpx.Client, mqtt: Wires) -> None:
    wire = mqtt.connect(V5)
    for number in range(60):
        wire.publish(f"rooms/{number:02}/climate", b'{"t": <b>21</b>}', 1, retain=True)
    wire.publish("doors/1", b"open", 1, retain=True)
    page = screen.open("mqtt").page
    page.get_by_label("Topic filter").fill("rooms/#")
    page.get_by_role("button", name="Filter").last.click()
    screen.see("rooms/49/climate")
    assert page.get_by_text("doors/1").count() == 0
    assert page.get_by_text("rooms/50/climate").count() == 0
    screen.press("Show more")
    screen.see("rooms/59/climate")
    row = page.get_by_role("row").filter(has_text="rooms/07/climate")
    screen.press("Show", within=row)
    screen.dialog().get_by_text("<b>21</b>").wait_for()
    screen.press("Close", within=screen.dialog())
    screen.press("Clear", within=row)
    screen.press("Clear", within=screen.dialog())
    screen.told("Nothing is retained for rooms/07/climate any more")
    screen.press("Clear…")
    question = screen.dialog()
    question.get_by_role("textbox").fill("59")
    screen.press("Clear 59", within=question)
    screen.told("59 retained messages were cleared")
    screen.see("Nothing is retained")
    assert [one["topic"] for one in http.get("/mqtt/retained").json()["messages"]] == ["doors/1"]


def test_a_refresh_under_way_does_not_take_back_what_was_asked_for(screen: Screen, mqtt: Wires) -> None:
    wire = mqtt.connect(V5)
    for number in range(60):
        wire.publish(f"shelves/{number:02}", b"full", 1, retain=True)
    page = screen.open("mqtt?filter=shelves/%23").page
    held = Held(page, "**/mqtt/retained?*")
    screen.look_again()
    held.wait()
    held.let_others_pass()
    screen.press("Show more")
    screen.see("shelves/59")
    held.answered()
    assert page.get_by_text("shelves/59").count() == 1
