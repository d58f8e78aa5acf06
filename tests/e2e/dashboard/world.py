"""A broker in which something of everything has happened."""

from __future__ import annotations

from typing import Any

import httpx

from millstream.client import Client
from millstream.mqtt.packets import V4, V5, Will
from tests.e2e.mqtt.support import Wires

__all__ = ["connect_things", "dead", "fill", "queue", "told"]

_ERROR = "ValueError: unknown currency 'XXX'\n  File \"billing.py\", line 41, in charge"


def told(answer: httpx.Response) -> Any:
    """What the broker answered, which must have been a success."""
    assert answer.is_success, answer.text
    return answer.json() if answer.content else None


def queue(http: httpx.Client, topic: str, group: str) -> None:
    """A topic and a queue group on it."""
    told(http.post("/topics", json={"name": topic, "if_missing": True}))
    told(http.put(f"/queues/{topic}/{group}", json={}))


def dead(http: httpx.Client, topic: str, message: dict[str, Any], reason: str = "no") -> dict[str, Any]:
    """A dead letter made of the message."""
    queue(http, topic, "worker")
    told(http.post(f"/topics/{topic}/messages", json={"encoding": "text", **message}))
    [leased] = told(http.post(f"/queues/{topic}/worker/lease", json={}))
    told(http.post("/queues/reject", json={"receipts": [leased["receipt"]], "reason": reason}))
    [letter] = told(http.get("/dead-letters", params={"topic": topic}))["letters"]
    assert isinstance(letter, dict)
    return letter


def connect_things(mqtt: Wires) -> None:
    """A sensor that is there, one that is away and has something to catch up, and what both have said last."""
    here = mqtt.connect(V5, "sensor-8", keep_alive_s=60, will=Will("sensors/8/state", b"lost"))
    here.subscribe("commands/8", "commands/all", qos=1)
    away = mqtt.durable(V4, "sensor-7")
    away.subscribe("commands/+", qos=1)
    for name in ("temperature", "humidity", "state"):
        away.publish(f"sensors/7/{name}", b'{"value": 21.5}', 1, retain=True)
    away.disconnect()
    for number in range(12):
        here.publish("commands/7", f"measure {number}".encode(), 1)


def fill(http: httpx.Client, client: Client) -> dict[str, str]:
    told(http.post("/topics", json={"name": "orders", "partitions": 3}))
    told(http.post("/topics", json={"name": "shop.eu-central-1.a-name-that-goes-on.and-on.and-on.until-it-ends"}))
    told(http.put("/queues/orders/billing", json={}))
    told(http.put("/queues/orders/printer", json={"paused": True}))
    orders = [
        {"value": {"order": n, "total": 12.5 * n}, "key": f"c-{n % 4}", "headers": {"shop": "eu"}, "priority": n % 5}
        for n in range(20)
    ]
    told(http.post("/topics/orders/messages", json=orders))
    leased = told(http.post("/queues/orders/billing/lease", json={"max": 9}))
    receipts = [message["receipt"] for message in leased]
    told(http.post("/queues/reject", json={"receipts": receipts[:2], "reason": _ERROR}))
    told(http.post("/queues/nack", json={"receipts": receipts[2:4], "reason": "timed out", "delay_ms": 3_600_000}))
    told(http.post("/queues/ack", json={"receipts": receipts[4:8]}))
    stream = iter(client.stream("orders", group="audit", start="earliest"))
    next(stream)
    later = [{"value": f"reminder {n}", "delay_ms": 60_000 * (n + 5) ** 2} for n in range(12)]
    told(http.post("/topics/reminders/messages", json=later))
    recurring = {"topic": "reports", "cron": "0 3 * * *", "timezone": "Europe/Berlin", "value": {"run": "all"}}
    told(http.put("/recurring/nightly-report", json=recurring))
    hook = {"topic": "orders", "group": "partner", "url": "http://127.0.0.1:9/hook", "start": "latest"}
    told(http.post("/webhooks", json=hook))
    [letter, *_] = told(http.get("/dead-letters"))["letters"]
    return {"letter": letter["id"], "original": letter["original_id"]}
