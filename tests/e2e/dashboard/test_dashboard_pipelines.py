"""Pipelines in a real Chromium: how they are, what went wrong, and the button that stops one."""

from __future__ import annotations

from typing import Any

import httpx

from millstream.testing.broker import BrokerForTests
from millstream.wire.pipeline_calls import PipelineWish, ReportPipeline
from tests.e2e.dashboard.screen import Screen
from tests.e2e.dashboard.world import told


def report(broker: BrokerForTests, name: str, state: Any, **more: Any) -> PipelineWish:
    told = ReportPipeline(name=name, run=f"run-of-{name}", state=state, **more)
    wish: PipelineWish = broker.connect().call(told, PipelineWish)
    return wish


def test_pipelines_are_seen_looked_into_stopped_and_forgotten(screen: Screen, broker: BrokerForTests) -> None:
    page = screen.open("pipelines").page
    screen.see("No pipeline has reported to this broker")
    more = {"sources": ["orders"], "sinks": ["orders.clean", "orders.world"], "rows": 1_234_567, "rows_per_s": 4200.5}
    definition = {"description": "Cleans <b>orders</b>.", "steps": [{"filter": "total > 0"}]}
    report(broker, "clean-orders", "running", **more, lag=42, batch=7, batch_ms=250, definition=definition)
    report(broker, "archive", "failed", restarts=3, error="a row fails in step 2: the value is not JSON")
    screen.open("pipelines")
    row = page.get_by_role("row").filter(has_text="clean-orders")
    for text in ("running", "orders.clean", "4,201/s", "42"):
        row.get_by_text(text).first.wait_for()
    screen.see("a row fails in step 2")
    screen.picture("pipelines-filled")
    assert screen.flaws() == []

    page.get_by_role("button", name="clean-orders").click()
    shown = screen.dialog()
    shown.get_by_text("Cleans <b>orders</b>.").first.wait_for()
    shown.get_by_text("7, took 250 ms").wait_for()
    shown.get_by_text("What it does").click()
    shown.get_by_label("Definition").wait_for()
    screen.picture("pipelines-one")
    screen.press("Close", within=shown)

    screen.press("Stop", within=row)
    screen.press("Stop it", within=screen.dialog())
    screen.told("clean-orders stops after the batch that is under way")
    row.get_by_text("told to stop").wait_for()
    assert report(broker, "clean-orders", "stopping", **more).stop
    screen.press("Forget", within=page.get_by_role("row").filter(has_text="archive"))
    screen.press("Forget it", within=screen.dialog())
    screen.told("archive is forgotten")
    assert page.get_by_role("row").filter(has_text="archive").count() == 0


def test_the_overview_says_what_has_ended_by_itself(screen: Screen, broker: BrokerForTests, http: httpx.Client) -> None:
    report(broker, "nightly", "failed", error="the disk is full")
    report(broker, "hourly", "running")
    broker.clock.advance("10m")
    report(broker, "daily", "running")
    told(http.post("/topics", json={"name": "hooked"}))
    hook = told(http.post("/webhooks", json={"topic": "hooked", "url": "http://127.0.0.1:9/"}))["webhook"]
    gone = {**hook, "state": "paused", "paused_reason": "the receiver is gone (410)"}
    screen.page.route("**/webhooks?*", lambda route: route.fulfill(json=[gone]))
    page = screen.open().page
    attention = page.get_by_role("list", name="What needs attention")
    for text in (
        "Pipeline nightly failed: the disk is full.",
        "Pipeline hourly is lost: it reported last",
        "Webhook to http://127.0.0.1:9/ has paused itself: the receiver is gone (410).",
    ):
        attention.get_by_text(text).wait_for()
    assert "daily" not in attention.inner_text()
