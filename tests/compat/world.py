"""One of everything that a broker stores, put there through its doors.

Only calls that every version has: `python -m tests.compat.write` may be run by an earlier one, too.
"""

from __future__ import annotations

import time
from typing import Any

from millstream.client import Client, Outgoing
from millstream.mqtt.packets import Connect, Filter, Properties, Publish, Pubrec, Will
from millstream.testing.broker import BrokerForTests
from millstream.testing.skipping import SkippingClock
from millstream.wire.stage_calls import stage_address
from tests.e2e.mqtt.support import Address, Wire
from tests.native import NativeClient
from tests.waiting import eventually

__all__ = ["LATER_S", "NOW_US", "fill", "set_clock"]

#: When it all happens, whatever the machine's clock says: nothing in it grows old before the tests are run.
NOW_US = 1_790_000_000_000_000
#: When something scheduled is due, seconds after that.
LATER_S = 2 * 3600
SMALL = 4096
DAY_MS = 24 * 3600 * 1000


class _ClockThen(SkippingClock):
    """Says that it is another time than it is; how much of it passes is the same."""

    def __init__(self, now_us: int) -> None:
        super().__init__()
        self._ahead_us = now_us - time.time_ns() // 1000

    def now_us(self) -> int:
        return super().now_us() + self._ahead_us


def set_clock(broker: BrokerForTests, now_us: int = NOW_US) -> BrokerForTests:
    """Before it starts: let it live at another time."""
    broker.clock = _ClockThen(now_us)
    return broker


def fill(broker: BrokerForTests) -> dict[str, Any]:
    """Put one of everything into a new broker; what only the writer knows (secrets, receipts), for the reader."""
    client = broker.connect(client_id="writer")
    told: dict[str, Any] = {}
    _messages(client)
    _producers(broker, told)
    _compacted(client)
    _stream_groups(client)
    _queues(client, told)
    _schedules(client)
    _namespaces_and_keys(broker, client, told)
    _mqtt(broker)
    _others(broker, client, told)
    return told


def _topic(client: Client, name: str, partitions: int = 1, **config: Any) -> None:
    client.create_topic(name, partitions, {"retention_ms": 0, **config})


def _messages(client: Client) -> None:
    # Segments as small as can be, so that some are sealed, with an index and a snapshot of producers.
    _topic(client, "plain", 3, segment_bytes=SMALL)
    for partition in range(3):
        for number in range(6):
            texts = [f"{partition}-{number}-{at} " + "x" * 200 for at in range(5)]
            client.publish_many("plain", [Outgoing(value=text, partition=partition) for text in texts])
    _topic(client, "mixed", dedup_window_ms=DAY_MS)
    client.publish_many(
        "mixed",
        [
            Outgoing(value="with a key", key="k-1"),
            Outgoing(value="with headers", headers={"kind": "order", "raw": b"\x00\xff"}),
            Outgoing(value="urgent", priority="critical"),
            Outgoing(value="can wait", key=b"\x80", priority="background"),
            Outgoing(value="made long ago", timestamp=1_000_000_000.5),
            Outgoing(value="good for ten years", ttl="3650d"),
            Outgoing(value="never again", max_retries=0, lease="7m"),
            Outgoing(value=None, key="k-1"),
            Outgoing(value=b""),
            Outgoing(value=bytes(range(256))),
        ],
    )
    client.publish("mixed", "once", dedup_id="order-17")
    client.publish("mixed", b"plain bytes")
    for codec in ("lz4", "zstd"):
        with client.producer("mixed", compression=codec, linger_ms=50) as producer:
            for number in range(40):
                producer.send(f"{codec} {number} " + "packed " * 10, key=f"k-{number % 3}", headers={"codec": codec})
    _topic(client, "in-memory", mode="ephemeral")
    client.publish("in-memory", "gone after a restart")
    _topic(client, "deleted")
    client.publish("deleted", "gone for good")
    client.delete_topic("deleted")


def _producers(broker: BrokerForTests, told: dict[str, Any]) -> None:
    """Two that number their batches: what one has stored is in sealed segments, what the other has in the last."""
    with NativeClient(broker.address) as wire:
        wire.call("topic.create", name="numbered", config={"segment_bytes": SMALL, "retention_ms": 0})
        early, late = (wire.call("producer.new")["producer_id"] for _ in range(2))
        for number in range(4):
            wire.publish("numbered", [b"early " + bytes(500)] * 3, producer=early, sequence=3 * number)
        for number in range(2):
            wire.publish("numbered", [b"late"] * 2, producer=late, sequence=2 * number)
    told["producers"] = {"early": early, "late": late}


def _compacted(client: Client) -> None:
    _topic(client, "newest", cleanup="compact", segment_bytes=SMALL)
    for turn in range(12):
        client.publish_many("newest", [Outgoing(value=f"{turn} " + "y" * 150, key=f"k-{at}") for at in range(4)])
    client.publish("newest", None, key="k-0")
    client.admin.compact("newest", roll=True)
    client.publish("newest", "after compaction", key="k-1")


def _stream_groups(client: Client) -> None:
    client.commit_offsets("audit", {("plain", 0): 7, ("plain", 2): 30})
    client.commit_offsets("resting", {("mixed", 0): 3})
    client.pause_group("resting")
    stream = client.stream("plain", group="live", instance_id="i-1", session_ms=3_600_000, commit="manual")
    for _ in range(5):
        stream.next(10)
    stream.commit()  # and goes on: when the broker is killed it has a member


def _queues(client: Client, told: dict[str, Any]) -> None:
    _topic(client, "jobs", 2, retry="durable")
    client.publish_many("jobs", [Outgoing(value=f"job {at}", key=f"k-{at % 5}", partition=at % 2) for at in range(40)])
    with client.queue("jobs", group="work", prefetch=30, policy={"lease_ms": 3_600_000}) as queue:
        held = {message.text: message for message in queue.lease(30)}
        assert len(held) == 30
        queue.ack([held.pop(f"job {at}") for at in (0, 1, 2, 3, 6, 11)])
        queue.nack([held.pop(f"job {at}") for at in (4, 5)], "out of stock", retry_after="1h")
        queue.nack([held.pop("job 7")], "try again", retry_after=0)
        queue.reject([held.pop("job 8")], "no such article")
        queue.release([held.pop("job 9")])
    # Given back when the queue was closed; now some outlive their consumer, and one a failure.
    told["leased"] = [one.receipt for one in client.queues.lease("jobs", "work", max=3, lease="2h")]
    with client.queue("jobs", group="in-order", ordering="key", prefetch=5) as queue:
        queue.ack(queue.lease(4))
    client.admin.checkpoint()  # what journals say so far is one snapshot, with more facts behind it
    with client.queue("jobs", group="resting", start="latest"):
        pass
    client.queues.pause("jobs", "resting")
    busy = client.queue("jobs", group="busy", auto_extend=False, prefetch=4)
    assert len(busy.lease(4)) == 4  # and holds them: when the broker is killed there are leases
    eventually(lambda: len(client.dead_letters.list()) == 1)
    client.publish("jobs", "dies as well", partition=0)
    with client.queue("jobs", group="once", start="earliest", prefetch=1, retry="standard,max_retries=0") as queue:
        queue.nack(queue.lease(1), "not even once")
    eventually(lambda: len(client.dead_letters.list()) == 2)
    _topic(client, "again")
    client.dead_letters.replay([client.dead_letters.list(group="once")[0].id], target="again").wait(10)


def _schedules(client: Client) -> None:
    _topic(client, "later")
    at_s = NOW_US / 1e6 + LATER_S
    for number in range(3):
        client.publish(
            "later", f"due {number}", key=f"k-{number}", headers={"n": str(number)}, deliver_at=at_s + number
        )
    moved = client.publish("later", "moved", deliver_at=at_s)
    client.schedules.move(moved, deliver_at=at_s + 60)
    client.schedules.cancel(client.publish("later", "cancelled", deliver_at=at_s))
    client.schedules.repeat("hourly", "later", "0 * * * *", "again", key="n", headers={"a": "b"}, priority="high")
    client.schedules.repeat("paused", "later", "* * * * *", "never", paused=True, timezone="Europe/Berlin")


def _namespaces_and_keys(broker: BrokerForTests, client: Client, told: dict[str, Any]) -> None:
    client.create_namespace("shop")
    client.create_namespace("empty")
    client.set_quota("shop", topics=50, storage_bytes=1 << 30)
    shop = broker.connect(namespace="shop")
    _topic(shop, "orders")
    shop.publish("orders", "of another namespace")
    told["admin"] = client.keys.create("admin", name="root").key
    reader = client.keys.create("read", "consume", scopes=["shop:orders"], name="reader")
    told["reader"] = client.keys.rotate(reader.info.id, grace="30d").key
    told["reader_before"] = reader.key
    client.keys.revoke(client.keys.create("produce", name="revoked").info.id)


def _mqtt(broker: BrokerForTests) -> None:
    address = Address("127.0.0.1", broker.mqtt_port)
    years = Properties(session_expiry_s=2**32 - 2)
    sessions = {name: Wire(address) for name in ("one", "two", "sender")}
    one, two, sender = sessions.values()
    one.connect(Connect(5, "one", False, 0, properties=years))
    one.subscribe(Filter("sensors/#", 1), Filter("odd name/+", 1))
    will = Will("wills/two", b"two is lost", 1, properties=Properties(will_delay_s=3600))
    two.connect(Connect(5, "two", False, 0, will=will, properties=years))
    two.subscribe(Filter("sensors/#", 2), Filter("$share/team/sensors/+", 1))
    sender.connect(Connect(5, "sender", False, 0, properties=years))
    sender.publish("sensors/a", b"seen by both", qos=1)
    assert one.message().payload == b"seen by both"
    two.receive(Publish)  # and never confirmed
    one.disconnect()
    two.drop()
    sender.publish("sensors/a", b"missed", qos=1)
    sender.publish("odd name/x", b"is no topic", qos=1)
    sender.publish("sensors/b", b"kept", qos=1, retain=True)
    sender.publish("state/c", b"also kept", qos=0, retain=True)
    sender.publish("state/d", b"cleared", qos=1, retain=True)
    sender.publish("state/d", b"", qos=1, retain=True)
    sender.send(Publish("sensors/c", b"not released", 2, packet_id=77))
    sender.receive(Pubrec)
    sender.drop()
    eventually(lambda: not any(it.connected for it in broker.connect().mqtt.sessions()))


def _others(broker: BrokerForTests, client: Client, told: dict[str, Any]) -> None:
    _topic(client, "hooked")
    hook = client.webhooks.create("hooked", "https://hooks.example.com/in?token=1", headers={"X-A": "b"}, rate=5.0)
    told["webhook"], told["webhook_secret"] = hook.webhook.id, hook.secret
    client.webhooks.pause(hook.webhook.id)
    _topic(client, "staged")
    with NativeClient(broker.address) as wire:
        report = {"sources": ["plain"], "sinks": ["staged"], "batch": 4, "rows": 90, "definition": {"steps": [1]}}
        wire.call("pipeline.report", name="copy", run="r1", state="running", **report)
        wire.call("pipeline.report", name="done", run="r2", state="finished", rows=5)
        stage = wire.call("stage.open", query="q", batch=0)["stage"]
        wire.publish(stage_address(stage, "staged"), [b"published"])
        wire.call("stage.publish", query="q", batch=0, stages=[{"stage": stage, "batches": 1, "messages": 1}])
        told["stage"] = wire.call("stage.open", query="q", batch=1)["stage"]
        wire.publish(stage_address(told["stage"], "staged"), [b"not", b"yet"])
