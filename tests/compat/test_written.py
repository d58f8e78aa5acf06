"""A broker of today opens what an earlier one wrote: everything is there, and everything goes on."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from millstream.cli.main import _run
from millstream.client import Client
from millstream.config import Settings
from millstream.errors import Unauthorized
from millstream.mqtt.packets import Connect, Pubcomp, Publish, Pubrel
from millstream.spark.columns import columns_of
from millstream.spark.decoding import BatchDecoder
from millstream.spark.segments import SegmentDirectory
from millstream.testing.broker import BrokerForTests
from millstream.webhooks.signing import signature
from millstream.wire.stage_calls import stage_address
from tests.compat.seen import look
from tests.compat.world import LATER_S
from tests.compat.write import WAYS, WRITTEN, opened, read_seen, unpack
from tests.e2e.mqtt.support import Address, Wire
from tests.e2e.test_webhooks import Receiver
from tests.native import NativeClient
from tests.waiting import eventually

VERSIONS = sorted(folder.name for folder in WRITTEN.iterdir())
EVERYTHING = columns_of(headers=True, priority=True, ids=True)

every_directory = pytest.mark.parametrize(("version", "way"), [(version, way) for version in VERSIONS for way in WAYS])


class Left:
    """A copy of a directory that an earlier broker left, and what that broker knew of it."""

    def __init__(self, version: str, way: str, data: Path) -> None:
        folder = WRITTEN / version
        seen = read_seen(folder)
        self.seen, self.told = seen[way], seen["told"]
        self.data = unpack(folder / f"{way}.tar.zst", data)

    def messages(self, topic: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.seen["topics"][topic]["messages"]
        return found


@pytest.fixture
def left(version: str, way: str, tmp_path: Path) -> Left:
    return Left(version, way, tmp_path / "data")


@pytest.fixture
def broker(left: Left) -> Iterator[BrokerForTests]:
    with opened(left.data) as running:
        yield running


@pytest.fixture
def client(broker: BrokerForTests) -> Client:
    return broker.connect()


def holds(expected: Any, found: Any, at: str = "") -> None:
    """What was seen is seen again; later versions may say more about it."""
    if isinstance(expected, dict):
        assert isinstance(found, dict), at
        for name, part in expected.items():
            assert name in found, f"{at}/{name}"
            holds(part, found[name], f"{at}/{name}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), at
        for number, part in enumerate(expected):
            holds(part, found[number], f"{at}/{number}")
    else:
        assert found == expected, at


def texts(messages: list[Any]) -> list[str]:
    return [message.text for message in messages]


@every_directory
def test_everything_is_there_as_the_broker_that_wrote_it_saw_it(left: Left, broker: BrokerForTests) -> None:
    """Also after another restart, when today's version has written to it."""
    holds(left.seen, look(broker))
    broker.stop()
    with opened(left.data) as again:
        holds(left.seen, look(again))


@every_directory
def test_files_are_good_and_a_backup_of_them_is_restored(
    left: Left, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(["log", "verify", str(left.data)]) == 0, capsys.readouterr().out
    assert _run(["backup", str(tmp_path / "backup"), "--data", str(left.data)]) == 0
    assert _run(["restore", str(tmp_path / "backup"), "--data", str(tmp_path / "copy")]) == 0
    with opened(tmp_path / "copy") as broker:
        holds(left.seen, look(broker))


@every_directory
def test_spark_reads_the_files(left: Left) -> None:
    directory = SegmentDirectory(left.data)
    for topic in ("plain", "mixed", "newest", "numbered"):
        expected = left.messages(topic)
        for partition in range(directory.partitions(topic)):
            there, uid = directory.offsets(topic, partition), directory.uid(topic, partition)
            decoder = BatchDecoder(EVERYTHING, topic=topic, partition=partition, uid=uid)
            rows: list[dict[str, Any]] = []
            for buffer in directory.read(topic, partition, there.start, there.end):
                for found in decoder.feed(buffer, first=there.start, until=there.end, verify=False):
                    rows += found.to_pylist()
            for found in decoder.finish():
                rows += found.to_pylist()
            assert [(row["id"], row["offset"], row["key"], row["value"]) for row in rows] == [
                (row["id"], row["offset"], _bytes(row["key"]), _bytes(row["value"]))
                for row in expected
                if row["partition"] == partition
            ]


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else base64.b64decode(text)


@every_directory
def test_what_producers_send_again_is_recognised(left: Left, broker: BrokerForTests, client: Client) -> None:
    early, late = left.told["producers"]["early"], left.told["producers"]["late"]
    with NativeClient(broker.address) as wire:
        again = wire.publish("numbered", [b"early " + bytes(500)] * 3, producer=early, sequence=9)
        assert (again.duplicate, again.base_offset) == (True, 9)
        again = wire.publish("numbered", [b"late"] * 2, producer=late, sequence=2)
        assert (again.duplicate, again.base_offset) == (True, 14)
        new = wire.publish("numbered", [b"late"] * 2, producer=late, sequence=4)
        assert (new.duplicate, new.base_offset) == (False, 16)
        assert wire.call("producer.new")["producer_id"] > late
    (first,) = [row for row in left.messages("mixed") if _bytes(row["value"]) == b"once"]
    assert client.publish("mixed", "once", dedup_id="order-17").offset == first["offset"]


@every_directory
def test_stream_groups_go_on_where_they_were(client: Client) -> None:
    with client.stream("plain", group="audit", timeout_s=2) as stream:
        first: dict[int, int] = {}
        while len(first) < 2 and (message := stream.next(10)):
            first.setdefault(message.partition, message.offset)
        assert first == {0: 7, 1: 0}


@every_directory
def test_queues_go_on_where_they_were(left: Left, broker: BrokerForTests, client: Client) -> None:
    with client.queue("jobs", group="work", prefetch=100) as queue:
        ready = {message.text: message for message in queue.lease(100)}
        # Leases ended with the broker that had granted them; nobody got what was settled, waits or died.
        away = {0, 1, 2, 3, 6, 11} | {4, 5} | {8}
        assert set(ready) == {f"job {at}" for at in range(40) if at not in away} | {"dies as well"}
        assert ready["job 7"].delivery_count == 2
        queue.ack(ready.values())
        broker.clock.advance("1h")
        retried = queue.lease(100, wait="5s")
        assert {(it.text, it.delivery_count) for it in retried} == {("job 4", 2), ("job 5", 2)}
        queue.ack(retried)
    assert client.queues.describe("jobs", "work").depth == 0
    client.queues.resume("jobs", "resting")
    with client.queue("jobs", group="resting") as queue:
        assert texts(queue.lease(100)) == ["dies as well"]


@every_directory
def test_dead_letters_know_their_history_and_can_be_sent_again(client: Client) -> None:
    (letter,) = client.dead_letters.list(group="work")
    assert (letter.text, letter.reason, letter.error) == ("job 8", "REJECTED", "no such article")
    assert [(it.kind, it.reason) for it in letter.attempts] == [("reject", "no such article")]
    client.dead_letters.replay([letter.id], target="again").wait(10)
    assert [it.value for it in client.browse("again")][-1] == b"job 8"


@every_directory
def test_schedules_fire_when_they_are_due(broker: BrokerForTests, client: Client) -> None:
    broker.clock.advance(LATER_S)
    fired = client.browse("later", limit=1000)
    due = [it for it in fired if it.value != b"again"]
    assert [it.value for it in due] == [b"due 0", b"due 1", b"due 2", b"moved"]
    assert [(it.key, it.headers[0]) for it in due[:2]] == [(b"k-0", ("n", b"0")), (b"k-1", ("n", b"1"))]
    assert len(fired) - len(due) == 2, "once an hour"


@every_directory
def test_keys_open_what_they_opened(left: Left) -> None:
    with opened(left.data, Settings.model_validate({"access": {"mode": "keys"}})) as broker:
        assert broker.connect(key=left.told["admin"]).topics()
        for name in ("reader", "reader_before"):
            shop = broker.connect(key=left.told[name], namespace="shop")
            message = shop.stream("orders").next(10)
            assert message is not None
            assert message.text == "of another namespace"
        with pytest.raises(Unauthorized):
            broker.connect(key=left.told["admin"][:-1] + "x").topics()


@every_directory
def test_a_webhook_signs_with_the_secret_it_had(left: Left, broker: BrokerForTests, client: Client) -> None:
    receiver = Receiver()
    webhook, secret = left.told["webhook"], left.told["webhook_secret"]
    client.webhooks.update(webhook, url=receiver.url)
    client.webhooks.resume(webhook)
    client.publish("hooked", "news")
    eventually(lambda: client.webhooks.show(webhook).delivered == 1)
    (headers,), (body,) = receiver.headers, receiver.bodies
    time_s = int(headers["Millstream-Signature"].partition(",")[0].removeprefix("t="))
    assert (headers["Millstream-Signature"], headers["X-A"]) == (signature([secret], time_s, body), "b")
    receiver.close()


@every_directory
def test_mqtt_sessions_get_what_they_missed(broker: BrokerForTests) -> None:
    address = Address("127.0.0.1", broker.mqtt_port)
    one, two, sender = Wire(address), Wire(address), Wire(address)
    assert one.connect(Connect(5, "one", False)).session_present
    missed = {(it.topic, it.payload) for it in one.messages(4)}
    assert missed == {
        ("sensors/a", b"missed"),
        ("sensors/b", b"kept"),
        ("sensors/c", b"not released"),
        ("odd name/x", b"is no topic"),
    }
    assert two.connect(Connect(5, "two", False)).session_present
    first = two.receive(Publish)
    assert (first.payload, first.dup) == (b"seen by both", True)
    assert sender.connect(Connect(5, "sender", False)).session_present
    sender.send(Pubrel(77))
    assert sender.receive(Pubcomp).reason == 0
    for wire in (one, two, sender):
        wire.close()


@every_directory
def test_a_stage_is_published_by_whoever_opened_it(left: Left, broker: BrokerForTests, client: Client) -> None:
    with NativeClient(broker.address) as wire:
        wire.publish(stage_address(left.told["stage"], "staged"), [b"more"])
        parts = [{"stage": left.told["stage"], "batches": 2, "messages": 3}]
        assert wire.call("stage.publish", query="q", batch=0, stages=[])["already"]
        assert not wire.call("stage.publish", query="q", batch=1, stages=parts)["already"]
    eventually(lambda: len(client.browse("staged")) == 4)
    assert [it.value for it in client.browse("staged")] == [b"published", b"not", b"yet", b"more"]


@every_directory
def test_compaction_goes_on(client: Client) -> None:
    client.publish("newest", "the newest", key="k-1")
    client.admin.compact("newest", roll=True)
    newest = {it.key: it.value for it in client.browse("newest", limit=1000)}
    assert newest[b"k-1"] == b"the newest"
    assert {key for key, value in newest.items() if value is not None} == {b"k-1", b"k-2", b"k-3"}
