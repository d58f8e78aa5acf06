"""`publish`: once, in order, whatever happens to the connection."""

from __future__ import annotations

import threading
import time
from datetime import UTC, datetime, timedelta

import pytest
from fake_broker import FAULTS, FakeBroker, FakePartition, Fault, flow_notice

import millstream
from millstream.client import Outgoing, metadata
from millstream.client.blocking import publisher as publisher_module
from millstream.client.messages import TopicPartition, receipt, receipts
from millstream.errors import (
    ConnectionLost,
    InvalidArgument,
    InvalidName,
    OutOfSequence,
    PartitionNotFound,
    PayloadTooLarge,
    QuotaExceeded,
    RequestTimeout,
    Throttled,
)
from millstream.ids import SCHEDULES, parse_message_id, schedule_uid
from millstream.partitioning import key_partition
from millstream.records import Batch, Columns
from millstream.wire import calls
from millstream.wire.frames import FrameType, encode_frame
from millstream.wire.messages import PublishResult, encode_publish_result


def test_a_receipt_says_where_the_message_is(fake: FakeBroker, client: millstream.Client) -> None:
    client.publish("orders", b"zero")
    receipt = client.publish("orders", "eins", key="k", headers={"a": "b"})
    assert (receipt.topic, receipt.partition, receipt.offset, receipt.label) == ("orders", 0, 1, "disk")
    place = parse_message_id(receipt.id)
    assert (place.partition_uid, place.offset) == (100, 1)
    assert abs(receipt.timestamp - datetime.now(UTC)) < timedelta(seconds=10)
    assert fake.values("orders") == [b"zero", b"eins"]
    assert fake.topics["orders"][0].keys == [None, b"k"]


def test_values_may_be_bytes_text_json_or_absent(fake: FakeBroker, client: millstream.Client) -> None:
    client.publish("t", bytearray(b"bytes"))
    client.publish("t", "ü")
    client.publish("t", json={"n": 1})
    client.publish("t", None, key=b"gone")
    assert fake.values("t") == [b"bytes", "ü".encode(), b'{"n":1}', None]


@pytest.mark.parametrize(
    "arguments",
    [
        {"value": 5},
        {"value": None},
        {"value": b"x", "json": {}},
        {"value": b"x", "key": 7},
        {"value": b"x", "priority": 9},
        {"value": b"x", "delay": 1, "deliver_at": datetime.now(UTC)},
        {"value": b"x", "ttl": -1},
        {"value": b"x", "headers": {"a": 1}},
        {"value": b"x", "headers": "text"},
        {"value": b"x", "fsync": "sometimes"},
        {"json": {1, 2, object()}},
    ],
)
def test_bad_arguments_are_refused_in_a_sentence(client: millstream.Client, arguments: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument):
        client.publish("t", **arguments)  # type: ignore[arg-type]


def test_columns_reach_the_batch(fake: FakeBroker, client: millstream.Client) -> None:
    before_us = time.time_ns() // 1000
    client.publish("t", b"x", priority=0, ttl="1m", timestamp=datetime(2020, 1, 1, tzinfo=UTC))
    batch = Batch.parse(fake.topics["t"][0].batches[0])
    assert batch.priorities() == [0]
    assert batch.deliver_at_us() is None
    assert before_us <= (batch.expiry_us() or [0])[0] - 60_000_000 <= time.time_ns() // 1000
    assert batch.timestamps_us() == [1577836800_000_000]


def test_a_delayed_message_goes_to_the_log_of_schedules_of_its_partition() -> None:
    due = datetime(2030, 1, 1, tzinfo=UTC)
    with FakeBroker(partitions=4) as fake, millstream.connect(fake.address) as client:
        ordinary = client.publish("t", b"now", key=b"k")
        first = client.publish("t", b"later", key=b"k", deliver_at=due, ttl=60)
        second = client.publish("t", b"later still", key=b"k", delay="1h")
        partition = fake.topics["t"][ordinary.partition]
        schedules = partition.schedules
        assert schedules is not None
        assert partition.values == [b"now"]
        assert schedules.values == [b"later", b"later still"]
        assert {receipt.partition for receipt in (ordinary, first, second)} == {ordinary.partition}
        assert [receipt.scheduled for receipt in (ordinary, first, second)] == [False, True, True]
        assert (first.offset, second.offset) == (0, 1)
        assert parse_message_id(first.id).partition_uid == schedule_uid(partition.uid)
        batch = Batch.parse(schedules.batches[0])
        assert batch.deliver_at_us() == [round(due.timestamp() * 1_000_000)]
        assert (batch.expiry_us() or [0])[0] < due.timestamp() * 1_000_000, "a lifetime begins with the publish"
        # Each log has numbers of its own, so that a repetition is recognised in either.
        assert [sequence for _, _, sequence, _ in fake.publishes] == [0, 0, 1]


def test_many_messages_are_sorted_into_both_logs() -> None:
    with FakeBroker() as fake, millstream.connect(fake.address) as client:
        items = [Outgoing(value=b"%d" % n, delay=60 if n % 3 == 0 else None) for n in range(10)]
        receipts = client.publish_many("t", items)
        assert [receipt.scheduled for receipt in receipts] == [n % 3 == 0 for n in range(10)]
        schedules = fake.topics["t"][0].schedules
        assert schedules is not None
        assert schedules.values == [b"0", b"3", b"6", b"9"]
        assert [receipt.offset for receipt in receipts if receipt.scheduled] == [0, 1, 2, 3]


def test_a_plain_message_has_no_columns(fake: FakeBroker, client: millstream.Client) -> None:
    client.publish("t", b"x")
    assert Batch.parse(fake.topics["t"][0].batches[0]).header.flags == int(Columns.FIXED_VALUES)


def test_bad_names_and_sizes_are_refused_before_anything_is_sent(client: millstream.Client) -> None:
    with pytest.raises(InvalidName):
        client.publish("no spaces", b"x")
    with pytest.raises(PayloadTooLarge):
        client.publish("t", bytes(2 << 20))
    with pytest.raises(PartitionNotFound):
        client.publish("t", b"x", partition=1)


def test_keys_choose_partitions_as_documented_and_values_alone_take_turns() -> None:
    with FakeBroker(partitions=4) as fake, millstream.connect(fake.address) as client:
        for number in range(40):
            client.publish("t", b"v", key=b"key-%d" % number)
            client.publish("t", b"w")
        assert client.publish("t", b"z", key=b"key-1", partition=3).partition == 3
        for number, partition in enumerate(fake.topics["t"]):
            assert partition.values.count(b"w") == 10
            assert all(key_partition(key, 4) == number for key in partition.keys if key and key != b"key-1")


def test_the_partition_of_a_key_never_changes() -> None:
    """Other languages compute the same: murmur3 x86 32 bit, seed 0, unsigned."""
    assert [key_partition(key, 1000) for key in (b"", b"a", b"c-17", "ü".encode())] == [0, 850, 943, 274]


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
@pytest.mark.parametrize("at", [0, 1, 4])
def test_a_fault_at_any_point_neither_loses_nor_repeats_a_message(
    fake: FakeBroker, client: millstream.Client, fault: Fault, at: int
) -> None:
    fake.faults.extend([*[Fault() for _ in range(at)], fault])
    receipts = [client.publish("t", b"%d" % number) for number in range(6)]
    assert [receipt.offset for receipt in receipts] == list(range(6))
    assert fake.values("t") == [b"%d" % number for number in range(6)]


HEARTBEAT = encode_frame(FrameType.HEARTBEAT, b"")
GOODBYE = encode_frame(FrameType.GOAWAY, b"")
STALE = encode_publish_result(0x7FFF_0000, 3, 999, 0)  # nobody waits for it, or nobody does any more
ARRIVALS = {
    "in two pieces, inside the header": Fault(split_at=5),
    "in two pieces": Fault(split_at=20),
    "behind another frame": Fault(before=HEARTBEAT),
    "behind an answer that nobody waits for": Fault(before=STALE),
    "after an answer that nobody waits for": Fault(before=STALE, split_at=len(STALE)),
    "with part of the answer in one piece with a stale one": Fault(before=STALE, split_at=len(STALE) + 7),
    "in front of another frame": Fault(after=HEARTBEAT),
    "in front of a part of another frame": Fault(after=HEARTBEAT, split_at=36 + 5),
    "with a goodbye": Fault(after=GOODBYE),
}


@pytest.mark.parametrize("arrival", ARRIVALS.values(), ids=ARRIVALS)
def test_an_answer_is_found_however_it_arrives(fake: FakeBroker, client: millstream.Client, arrival: Fault) -> None:
    fake.faults.extend([Fault(), arrival, Fault(), arrival])
    receipts = [client.publish("t", b"%d" % number) for number in range(6)]
    assert [receipt.offset for receipt in receipts] == list(range(6))
    assert fake.values("t") == [b"%d" % number for number in range(6)]


@pytest.mark.parametrize("size", [0, 1, 1000, 16_000, 17_000, 500_000])
def test_values_of_any_size_arrive_whole(fake: FakeBroker, client: millstream.Client, size: int) -> None:
    value = bytes(range(256)) * (size // 256) + bytes(size % 256)
    assert client.publish("t", value).offset == 0
    assert client.publish("t", value, key="k").offset == 1
    assert fake.values("t") == [value, value]


def test_a_timeout_far_below_a_second_is_kept(fake: FakeBroker) -> None:
    with millstream.connect(fake.address, timeout_s=10) as client:
        client.publish("t", b"a")
        client._publisher._timeout_s = 0.05
        took_s = []
        for _ in range(5):  # one of them, at least, meets a machine that has time for it
            fake.faults.append(Fault(store=False, silent=True))
            started = time.monotonic()
            with pytest.raises(RequestTimeout):
                client.publish("t", b"lost")
            took_s.append(time.monotonic() - started)
        assert min(took_s) < 0.9


def test_publishes_that_find_another_one_waiting_are_answered_without_delay(
    fake: FakeBroker, client: millstream.Client
) -> None:
    """The first reads without a slot of its own; the others take theirs, and turns."""
    client.publish("t", b"a")
    took_s = []
    for _ in range(3):  # one of them, at least, meets a machine that has time for it
        fake.hold_answers.clear()
        known = len(fake.publishes)
        threads = [threading.Thread(target=client.publish, args=("t", b"%d" % number)) for number in range(3)]
        for thread in threads:
            thread.start()
        # One connection: the fake does not look further before it answers.
        fake.wait_for(lambda known=known: len(fake.publishes) == known + 1)
        threading.Timer(0.05, fake.hold_answers.set).start()
        started = time.monotonic()
        assert client.publish("t", b"b").label == "disk"
        for thread in threads:
            thread.join()
        took_s.append(time.monotonic() - started)
    assert min(took_s) < 0.9, "nobody slept until the alarm clock rang"
    assert sorted(fake.values("t")) == [b"0", b"0", b"0", b"1", b"1", b"1", b"2", b"2", b"2", b"a", b"b", b"b", b"b"]  # type: ignore[type-var]


def test_a_connection_is_not_closed_under_a_publish_that_waits(fake: FakeBroker, client: millstream.Client) -> None:
    client.publish("t", b"a")
    connection = client._link.current
    assert connection is not None
    fake.hold_answers.clear()
    thread = threading.Thread(target=client.publish, args=("t", b"b"))
    thread.start()
    fake.wait_for(lambda: len(fake.publishes) == 2)
    connection.retire()
    assert connection.transport.lost is None
    fake.hold_answers.set()
    thread.join()
    assert connection.transport.lost is not None, "closed as soon as the answer was in"
    assert len(fake.publishes) == 2, "and nothing had to be sent again"


def test_many_faults_in_a_row_are_survived(fake: FakeBroker, client: millstream.Client) -> None:
    fake.faults.extend([FAULTS["lost before storing"], FAULTS["lost after storing"]] * 2)
    assert client.publish("t", b"x").offset == 0
    assert fake.values("t") == [b"x"]


def test_a_broker_that_forgot_what_it_confirmed_gets_the_next_message_under_a_new_identity(
    fake: FakeBroker, client: millstream.Client
) -> None:
    client.publish("t", b"a")
    fake.faults.append(Fault(error=OutOfSequence("expected 0")))
    client.publish("t", b"b")
    assert fake.values("t") == [b"a", b"b"]
    assert [sequence for *_, sequence, _ in fake.publishes] == [0, 1, 0]


def test_a_refusal_for_good_is_raised_and_the_next_message_goes_through(
    fake: FakeBroker, client: millstream.Client
) -> None:
    fake.faults.append(Fault(error=QuotaExceeded("full")))
    with pytest.raises(QuotaExceeded):
        client.publish("t", b"a")
    client.publish("t", b"b")
    assert fake.values("t") == [b"b"]


@pytest.mark.parametrize("fault", [Fault(drop=True), Fault(cut_at=9)])
def test_a_message_in_doubt_does_not_lend_its_number_to_the_next_one(
    fake: FakeBroker, client: millstream.Client, fault: Fault
) -> None:
    """Stored, the answer lost, then refused for good: the next message must not be taken for a repetition."""
    fake.faults.extend([fault, Fault(error=QuotaExceeded("full"))])
    with pytest.raises(QuotaExceeded):
        client.publish("t", b"a")
    client.publish("t", b"b")
    assert fake.values("t") == [b"a", b"b"]


def test_no_answer_in_time_raises_and_later_messages_are_unharmed(fake: FakeBroker) -> None:
    with millstream.connect(fake.address, timeout_s=1) as client:
        client.publish("t", b"a")
        fake.faults.append(Fault(store=False, silent=True))
        with pytest.raises(RequestTimeout):
            client.publish("t", b"lost")
        client.publish("t", b"b")
    assert fake.values("t") == [b"a", b"b"]


def test_a_broker_that_is_down_is_reported_after_the_timeout(fake: FakeBroker) -> None:
    client = millstream.connect(fake.address, timeout_s=0.5)
    fake.stop_listening()
    with pytest.raises(ConnectionLost, match="nobody listens"):
        client.publish("t", b"a")
    client.close()


def test_a_broker_that_comes_back_in_time_is_not_noticed(fake: FakeBroker, client: millstream.Client) -> None:
    client.publish("t", b"a")
    fake.stop_listening()
    threading.Timer(0.3, fake.listen).start()
    client.publish("t", b"b")
    assert fake.values("t") == [b"a", b"b"]


def test_connecting_to_nobody_says_what_to_do(fake: FakeBroker) -> None:
    fake.stop_listening()
    with pytest.raises(ConnectionLost, match="millstream serve"):
        millstream.connect(fake.address, timeout_s=1)
    with pytest.raises(InvalidArgument):
        millstream.connect("host:port:more")


def test_threads_share_a_client(fake: FakeBroker, client: millstream.Client) -> None:
    """Answers find the thread that waits for them, and each thread's messages keep their order."""
    fake.faults.extend([Fault() for _ in range(40)] + [Fault(drop=True)])

    def work(name: int) -> None:
        for number in range(30):
            client.publish("t", b"%d:%d" % (name, number))

    threads = [threading.Thread(target=work, args=(name,)) for name in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    values = fake.values("t")
    assert len(values) == 180
    for name in range(6):
        mine = [value for value in values if value and value.startswith(b"%d:" % name)]
        assert mine == [b"%d:%d" % (name, number) for number in range(30)]


def test_goodbye_is_followed_by_a_new_connection(fake: FakeBroker, client: millstream.Client) -> None:
    client.publish("t", b"a")
    before = fake.connections
    fake.say_goodbye()
    client.publish("t", b"b")
    client.publish("t", b"c")
    assert fake.values("t") == [b"a", b"b", b"c"]
    assert fake.connections == before + 1


def test_an_unknown_error_does_not_end_what_keeps_a_client_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = [MemoryError()]
    keep_alive = millstream.Client.keep_alive

    def fail_once(self: millstream.Client, now_s: float) -> None:
        if errors:
            raise errors.pop()
        keep_alive(self, now_s)

    monkeypatch.setattr(millstream.Client, "keep_alive", fail_once)
    with FakeBroker(heartbeat_ms=150) as fake, millstream.connect(fake.address):
        fake.wait_for(lambda: fake.heartbeat_frames >= 2)
    assert not errors


def test_an_idle_connection_says_that_it_is_alive() -> None:
    with FakeBroker(heartbeat_ms=150) as fake, millstream.connect(fake.address):
        fake.wait_for(lambda: fake.heartbeat_frames >= 2)


def test_publish_many_keeps_order_and_gives_a_receipt_for_each() -> None:
    with FakeBroker(partitions=3) as fake, millstream.connect(fake.address) as client:
        items = [b"plain-0", millstream.Outgoing(value="keyed", key="k"), b"plain-1", "plain-2"]
        receipts = client.publish_many("t", items)
        places = [(receipt.partition, receipt.offset) for receipt in receipts]
        found = [fake.values("t", partition)[offset] for partition, offset in places]
        assert found == [b"plain-0", b"keyed", b"plain-1", b"plain-2"]
        assert len({partition for partition, _ in (places[0], places[2], places[3])}) == 1
        assert client.publish_many("t", []) == []


def test_a_partition_that_was_added_since_is_looked_for(fake: FakeBroker, client: millstream.Client) -> None:
    client.publish("t", b"a")
    fake.topics["t"].append(FakePartition(uid=101))
    (receipt,) = client.publish_many("t", [Outgoing(value=b"b", partition=1)])
    assert (receipt.partition, fake.values("t", 1)) == (1, [b"b"])
    fake.topics["t"].append(FakePartition(uid=102))
    assert client.publish("t", b"c", partition=2).partition == 2
    with pytest.raises(PartitionNotFound):
        client.publish_many("t", [Outgoing(value=b"d", partition=3)])


def test_publish_many_splits_what_is_too_much_for_one_batch(fake: FakeBroker, client: millstream.Client) -> None:
    values = [bytes([number]) * 300_000 for number in range(10)]
    receipts = client.publish_many("t", values)
    assert [receipt.offset for receipt in receipts] == list(range(10))
    assert fake.values("t") == values
    assert len(fake.publishes) == 4


@pytest.mark.parametrize("end", ["silence", "a lost connection"])
def test_a_refusal_before_the_last_try_is_named_when_that_one_is_not_answered(fake: FakeBroker, end: str) -> None:
    """What was said last is why it took so long; that nothing was said in the end is only how it ended."""
    with millstream.connect(fake.address, timeout_s=0.4) as client:
        client.publish("t", b"warm")
        fake.faults.append(Fault(store=False, error=Throttled("topic 't' is overloaded")))
        fake.faults.extend([Fault(store=False, silent=end == "silence", drop=end != "silence")] * 100_000)
        with pytest.raises((RequestTimeout, ConnectionLost)) as caught:
            client.publish("t", b"a")
        fake.faults.clear()
    assert end != "silence" or isinstance(caught.value, RequestTimeout)
    assert str(caught.value).endswith("before that it was refused: topic 't' is overloaded")
    assert isinstance(caught.value.__cause__, Throttled)


@pytest.mark.parametrize("partition", [3, 3 | SCHEDULES])
def test_every_message_of_a_batch_has_a_receipt_of_its_own(partition: int) -> None:
    place = TopicPartition("orders", partition)
    one, two, three = receipts(place, 9, PublishResult("disk", 7, 1_000, False), 3)
    assert one == receipt(place, 9, PublishResult("disk", 7, 1_000, False))
    assert (one.offset, two.offset, three.offset) == (7, 8, 9)
    assert two == receipt(place, 9, PublishResult("disk", 8, 1_000, False))
    assert one.scheduled is (partition >= SCHEDULES)
    assert one.id < two.id < three.id


@pytest.mark.parametrize("topic", ["t", ""])
def test_nobody_is_slowed_down_by_a_notice_of_a_broker_that_is_gone(
    fake: FakeBroker, client: millstream.Client, topic: str
) -> None:
    """Who asked for it is not there any more to take it back."""
    fake.faults.append(Fault(before=flow_notice(topic, 5000)))
    client.publish("t", b"told")
    assert client._flow.delay_s("t") == 5
    fake.drop_all()
    started_s = time.monotonic()
    client.publish("other", b"x")  # connects again, before it looks how fast it may publish
    client.publish("t", b"quick")
    assert time.monotonic() - started_s < 4


def test_what_found_no_broker_is_known_not_to_be_stored(fake: FakeBroker) -> None:
    """It was said that it may be, as of a message whose answer was lost."""
    with millstream.connect(fake.address, timeout_s=0.5) as client:
        client.publish("t", b"first")
        fake.stop_listening()
        connection = client._link.current
        assert connection is not None
        with pytest.raises(ConnectionLost):
            connection.call(calls.DescribeBroker(), object, deadline_s=time.monotonic() + 5)
        with pytest.raises(ConnectionLost, match="the message was not stored"):
            client.publish("t", b"second")
        fake.listen()
        client.publish("t", b"third")
    assert fake.values("t") == [b"first", b"third"]


def test_a_program_that_publishes_to_ever_new_topics_does_not_remember_all_of_them(
    fake: FakeBroker, client: millstream.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would grow for as long as it runs.  And what it has forgotten is not taken for a repetition later."""
    monkeypatch.setattr(metadata, "_REMEMBERED_MAX", 10)
    monkeypatch.setattr(publisher_module, "PLACES_MAX", 10)
    names = [f"t{number}" for number in range(35)]
    for again in range(2):
        for name in names:
            client.publish(name, f"{again}")
            assert len(client._topics) <= 10
            assert sum(len(identity.sequences) for identity in client._publisher._identities) <= 10
    assert [fake.values(name) for name in names] == [[b"0", b"1"]] * len(names)
