"""The pictures of docs/guide/pipelines.md, from what the ready pipelines make of three days in a small shop.

Usage: python -m tests.spark.ready.pictures [docs/images]        needs Spark, Java and a Chromium
"""

from __future__ import annotations

import json
import random
import shutil
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from millstream.client import Client, Outgoing
from millstream.config import Settings
from millstream.spark import session
from millstream.spark.pipelines.ready.queries import ReadyQuery
from millstream.spark.pipelines.ready.work import Work
from millstream.testing.broker import BrokerForTests
from tests.spark.ready.running import Ready

HOURS = 60
WIDTH, HEIGHT = 1160, 760


def fill(broker: BrokerForTests, client: Client) -> None:
    """Hours go by as fast as messages can be sent."""
    dice = random.Random(6)
    for topic in ("orders", "payments"):
        client.create_topic(topic, 4, config={"retry": "simple,max_retries=1"})
    client.create_namespace("metering")
    meters = broker.connect(namespace="metering")
    meters.create_topic("readings", 2)
    queues = {topic: client.queue(topic, group=group, timeout_s=5) for topic, group in GROUPS.items()}
    with queues["orders"] as orders, queues["payments"] as payments:
        for hour in range(HOURS):
            busy = 20 + round(15 * abs((hour % 24) - 4) / 12)
            now_s = broker.clock.now_us() / 1e6
            time = datetime.fromtimestamp(now_s, UTC)
            for topic, queue in (("orders", orders), ("payments", payments)):
                client.publish_many(topic, [order(dice, time) for _ in range(busy)])
                broker.clock.advance(f"{dice.randint(200, 900)}ms")
                work(broker, queue, busy, dice, topic, hour)
            meters.publish_many(
                "readings", [Outgoing(value=b"x" * 40, key=f"m{n}", timestamp=time) for n in range(busy)]
            )
            broker.clock.advance("1h")


GROUPS = {"orders": "billing", "payments": "charging"}


def order(dice: random.Random, time: datetime) -> Outgoing:
    customer = "c-7" if dice.random() < 0.25 else f"c-{dice.randint(1, 400)}"
    document = json.dumps({"customer": customer, "amount": dice.randint(1, 900)})
    return Outgoing(value=document, key=customer, timestamp=time)


def work(broker: BrokerForTests, queue: Any, count: int, dice: random.Random, topic: str, hour: int) -> None:
    done = 0
    while done < count:
        messages = queue.lease(count - done, wait="5s")
        done += len(messages)
        for number, message in enumerate(messages):
            if number % 4 == 0:
                queue.flush()
                slow = 8 if 30 < hour < 36 or dice.random() < 0.02 else 1
                broker.clock.advance(f"{dice.randint(10, 80) * slow}ms")
            problem = trouble(dice, topic, hour)
            message.ack() if problem is None else message.reject(problem)
    queue.flush()


def trouble(dice: random.Random, topic: str, hour: int) -> str | None:
    if topic == "payments" and 30 < hour < 36 and dice.random() < 0.5:
        return f"timeout after {dice.randint(3000, 3100)} ms: bank at 10.1.{dice.randint(0, 9)}.4:8443"
    if topic == "payments" and dice.random() < 0.02:
        return f"card declined (case {dice.getrandbits(64):016x})"
    if topic == "orders" and hour > 52 and dice.random() < 0.15:
        return "KeyError: 'salutation' in template order-confirmation"
    if topic == "orders" and dice.random() < 0.03:
        return f"order {dice.randint(10_000, 99_999)}: the amount -1 makes no sense"
    return None


def reports(ready: Ready) -> None:
    ready.run("dlq-report", report="dlq-report.html")
    ready.run("audit", report="audit.html")
    ready.run("latency", report="latency.html", sample=1.0, topics=["orders", "payments"])
    ready.run("key-skew", report="key-skew.html", topics=["orders", "payments"])
    ready.run("usage", report="usage.html")
    ready.run("archive", topics=["orders", "payments"], to="archive", report="archive.html", checkpoint="checkpoint")
    ready.run("replay", archive="archive", to="orders.again", rate=400, report="replay.html", checkpoint="replay")


def photograph(directory: Path, images: Path) -> None:
    """As a browser shows them, the upper part."""
    from playwright.sync_api import sync_playwright

    from tests.e2e.dashboard.conftest import FLAGS, chromium

    images.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=list(FLAGS))
        for report in sorted(directory.glob("*.html")):
            page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
            page.goto(report.as_uri())
            page.screenshot(path=images / f"pipeline-{report.stem}.png")
            shutil.copy(report, Path(tempfile.gettempdir()) / f"millstream-{report.name}")
        browser.close()


def main(images: Path) -> None:
    settings = Settings.model_validate(
        {"server": {"heartbeat_ms": 3_600_000, "heartbeat_misses": 100}, "traces": {"sample": 1.0}}
    )
    with tempfile.TemporaryDirectory() as scratch, BrokerForTests(settings=settings) as broker:
        fill(broker, broker.connect())
        spark = session("pictures", master="local[2]")
        directory = Path(scratch)
        # It is as late as the broker believes.
        ReadyQuery._work = lambda self: Work(  # type: ignore[method-assign]
            self._spark, self._checked, datetime.fromtimestamp(broker.clock.now_us() / 1e6, UTC)
        )
        reports(Ready(spark, broker.address, directory, "orders"))
        spark.stop()
        photograph(directory, images)
    print(f"look at {images}, and at the whole pages in {tempfile.gettempdir()}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("docs/images"))
