"""Topics and partitions that appear while a stream reads, or while nobody does: read from their first message.

Each scenario runs with both kinds of stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import millstream
from millstream.client import following
from millstream.testing.broker import BrokerForTests
from tests.either import EitherClient

OUTGOING = millstream.Outgoing


@pytest.fixture(autouse=True)
def _look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "_TOPICS_AGE_S", 0.05)
    monkeypatch.setattr(following, "_LOOKING_SHARE", 1)


class Readers(EitherClient):
    """Opens streams of one kind."""

    def stream(self, topics: str | list[str], **options: object) -> Any:
        return self.do(self.client.stream(topics, **options))

    def close(self, *streams: Any) -> None:
        for stream in streams:
            self.do(stream.close())


@pytest.fixture(params=["blocking", "asynchronous"])
def readers(request: pytest.FixtureRequest, broker: BrokerForTests) -> Iterator[Readers]:
    made = Readers(broker.address, asynchronous=request.param == "asynchronous")
    yield made
    made.end()


@pytest.fixture
def client(broker: BrokerForTests) -> Iterator[millstream.Client]:
    with millstream.connect(broker.address) as connected:
        yield connected


@pytest.mark.parametrize("start", ["earliest", "latest", 0, datetime(2026, 1, 1, tzinfo=UTC)])
def test_a_topic_made_later_comes_to_a_stream_of_its_pattern(
    readers: Readers, client: millstream.Client, start: Any
) -> None:
    stream = readers.stream("logs.#", start=start)
    client.publish("logs.a", b"1")
    client.publish("logs.a", b"2")
    assert readers.values(stream, 2) == [b"1", b"2"]
    readers.close(stream)


@pytest.mark.parametrize("start", ["latest", 1, {0: 1}])
def test_added_partitions_are_read_from_their_first_message(
    readers: Readers, client: millstream.Client, start: Any
) -> None:
    client.publish("t", b"old")
    stream = readers.stream("t", start=start)
    client.alter_topic("t", partitions=3)
    with millstream.connect(str(client._target.address)) as other:  # one that knows of them
        other.publish_many("t", [OUTGOING(value=b"%d" % number, partition=number) for number in range(3)])
    assert readers.values(stream, 3) == [b"0", b"1", b"2"]
    readers.close(stream)


def test_a_topic_that_is_deleted_leaves_its_pattern_and_comes_back_as_another(
    readers: Readers, client: millstream.Client
) -> None:
    client.publish_many("logs.a", [b"old", b"older"])
    client.create_topic("logs.b")
    stream = readers.stream("logs.*", start="latest")
    client.delete_topic("logs.a", force=True)
    client.publish("logs.b", b"other")
    assert readers.values(stream, 1) == [b"other"]
    client.publish_many("logs.a", [b"1", b"2", b"3"])
    assert readers.values(stream, 3) == [b"1", b"2", b"3"]
    readers.close(stream)


def test_a_pattern_of_many_topics_is_read_to_the_end_of_the_list(
    readers: Readers, client: millstream.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "_PAGE", 2)
    for number in range(5):
        client.publish(f"logs.{number}", b"%d" % number)
    stream = readers.stream("logs.#")
    assert readers.values(stream, 5) == [b"0", b"1", b"2", b"3", b"4"]
    readers.close(stream)


@pytest.mark.parametrize("polled", [True, False])
def test_a_group_that_begins_at_the_end_reads_what_appears_later_from_its_first_message(
    readers: Readers, client: millstream.Client, polled: bool
) -> None:
    client.publish("logs.a", b"old")
    stream = readers.stream("logs.#", group="g", start="latest")
    if polled:
        assert readers.next(stream, 0.1) is None
    client.publish("logs.a", b"1")
    client.alter_topic("logs.a", partitions=2)
    with millstream.connect(str(client._target.address)) as other:
        other.publish("logs.a", b"2", partition=1)
        other.publish("logs.b", b"3")
    assert readers.values(stream, 3) == [b"1", b"2", b"3"]
    readers.close(stream)


def test_a_group_without_members_misses_nothing(readers: Readers, client: millstream.Client) -> None:
    client.publish("logs.a", b"old")
    readers.close(readers.stream("logs.#", group="g", start="latest", commit="manual"))
    client.publish("logs.a", b"1")
    client.alter_topic("logs.a", partitions=2)
    with millstream.connect(str(client._target.address)) as other:
        other.publish("logs.a", b"2", partition=1)
        other.publish("logs.b", b"3")
    stream = readers.stream("logs.#", group="g", start="latest", commit="manual")
    assert readers.values(stream, 3) == [b"1", b"2", b"3"]
    readers.close(stream)


def test_a_group_begins_at_the_end_of_an_old_topic_that_is_new_to_it(
    readers: Readers, client: millstream.Client
) -> None:
    client.publish("a", b"old")
    client.publish("b", b"old")
    readers.close(readers.stream("a", group="g", start="latest"))
    client.publish("a", b"1")
    client.publish("b", b"old too")
    stream = readers.stream(["a", "b"], group="g", start="latest")
    client.publish("b", b"2")
    assert readers.values(stream, 2) == [b"1", b"2"]
    readers.close(stream)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["blocking", "asynchronous"])
@pytest.mark.parametrize(
    ("topics", "start", "new"), [("mem.a", "earliest", 3), ("mem.a", "latest", 3), ("mem.*", "earliest", 8)]
)
def test_a_topic_in_memory_is_read_once_and_from_its_first_message_after_a_restart_of_the_broker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, topics: str, start: str, new: int, asynchronous: bool
) -> None:
    """It is another topic of its name then: what was read of the old one says nothing about it."""
    monkeypatch.setattr(following, "_TOPICS_AGE_S", 60)
    broker = BrokerForTests(tmp_path).start()
    readers = Readers(broker.address, asynchronous=asynchronous)
    readers.do(readers.client.create_topic("mem.a", config={"mode": "ephemeral"}))
    stream = readers.stream(topics, start=start)
    readers.do(readers.client.publish_many("mem.a", [b"old"] * 5))
    assert readers.values(stream, 5) == [b"old"] * 5
    broker.stop()
    with BrokerForTests(tmp_path, port=int(broker.address.rpartition(":")[2])) as again:
        with again.connect() as client:
            published = client.publish_many("mem.a", [b"%d" % number for number in range(new)])
            found = [readers.next(stream) for _ in range(new)]
            assert [message and message.value for message in found] == [b"%d" % number for number in range(new)]
            assert [message and message.id for message in found] == [receipt.id for receipt in published]
            stream._look_up_s = 0.0  # it looks now and then whether there is more to read
            client.publish("mem.a", b"one more")
            assert readers.values(stream, 1) == [b"one more"]
        readers.close(stream)
        readers.end()


@pytest.mark.parametrize("asynchronous", [False, True], ids=["blocking", "asynchronous"])
@pytest.mark.parametrize("topics", ["mem.a", "mem.*"])
def test_a_topic_in_memory_that_is_first_read_after_a_restart_of_the_broker_is_read_from_its_first_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, topics: str, asynchronous: bool
) -> None:
    """No connection was lost, as there was none yet: the stream went on where the log of the old topic had ended."""
    monkeypatch.setattr(following, "_TOPICS_AGE_S", 60)
    broker = BrokerForTests(tmp_path).start()
    readers = Readers(broker.address, asynchronous=asynchronous)
    readers.do(readers.client.create_topic("mem.a", config={"mode": "ephemeral"}))
    readers.do(readers.client.publish_many("mem.a", [b"old"] * 5))
    stream = readers.stream(topics, start="latest")
    broker.stop()
    with BrokerForTests(tmp_path, port=int(broker.address.rpartition(":")[2])) as again:
        with again.connect() as client:
            client.publish_many("mem.a", [b"%d" % number for number in range(8)])
        assert readers.values(stream, 8) == [b"%d" % number for number in range(8)]
        readers.close(stream)
        readers.end()
