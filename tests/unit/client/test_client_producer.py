"""The producer: batches, back-pressure, errors that surface, and every message once and in order."""

from __future__ import annotations

import contextlib
import threading
import time
from functools import partial

import pytest
from fake_broker import FAULTS, FakeBroker, FakePartition, Fault

import millstream
from millstream.client.blocking.producer import _close_all
from millstream.errors import (
    ConnectionLost,
    InvalidArgument,
    MillstreamError,
    PartitionNotFound,
    PayloadTooLarge,
    QuotaExceeded,
    RequestTimeout,
)
from tests.waiting import eventually


def numbered(count: int, start: int = 0) -> list[bytes]:
    return [b"%05d" % number for number in range(start, start + count)]


def test_messages_sent_together_travel_together(fake: FakeBroker, client: millstream.Client) -> None:
    with client.producer("t", linger_ms=50) as producer:
        for value in numbered(1000):
            producer.send(value)
        producer.flush()
    assert fake.values("t") == numbered(1000)
    assert len(fake.publishes) <= 3
    assert producer.stats.messages_confirmed == 1000


def test_a_batch_is_sealed_by_count(fake: FakeBroker, client: millstream.Client) -> None:
    with client.producer("t", linger_ms=60_000, batch_messages=10) as producer:
        for value in numbered(30):
            producer.send(value)
        fake.wait_for(lambda: len(fake.publishes) == 3)
        assert [count for *_, count in fake.publishes] == [10, 10, 10]


def test_a_batch_is_sealed_by_bytes(fake: FakeBroker, client: millstream.Client) -> None:
    with client.producer("t", linger_ms=60_000, batch_bytes=10_000) as producer:
        for number in range(30):
            producer.send(bytes([number]) * 3000)
        fake.wait_for(lambda: len(fake.publishes) >= 9)
        assert {count for *_, count in fake.publishes} == {3}


def test_a_batch_is_sealed_by_time(fake: FakeBroker, client: millstream.Client) -> None:
    producer = client.producer("t", linger_ms=20)
    for round_number in range(3):
        producer.send(b"%d" % round_number)
        fake.wait_for(lambda: len(fake.publishes) == round_number + 1, 5)  # noqa: B023
    assert fake.values("t") == [b"0", b"1", b"2"]
    producer.close()


def test_without_linger_every_message_leaves_at_once(fake: FakeBroker, client: millstream.Client) -> None:
    with client.producer("t", linger_ms=0) as producer:
        for value in numbered(5):
            producer.send(value)
        fake.wait_for(lambda: len(fake.publishes) == 5)
    assert fake.values("t") == numbered(5)


def test_text_keys_headers_and_the_rest_need_no_closer_look(
    fake: FakeBroker, client: millstream.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    with client.producer("t", linger_ms=1000) as producer:
        producer.send(b"first")
        with monkeypatch.context() as patch:
            patch.setattr(producer, "_send_closely", None)
            producer.send("text")
            producer.send(json=[1], key="k", headers={"h": "v"}, priority="high", ttl=60)
    assert fake.values("t") == [b"first", b"text", b"[1]"]


def test_order_holds_when_kinds_of_messages_are_mixed(fake: FakeBroker, client: millstream.Client) -> None:
    with client.producer("t") as producer:
        for number in range(0, 400, 4):
            producer.send(b"%05d" % number)
            producer.send(b"%05d" % (number + 1), b"key")
            producer.send(f"{number + 2:05d}", headers={"h": "v"})
            producer.send(b"%05d" % (number + 3), "key", priority=1)
    assert fake.values("t") == numbered(400)
    assert fake.topics["t"][0].keys == [None, b"key", None, b"key"] * 100


def test_keys_keep_their_partition_and_values_alone_are_spread() -> None:
    with FakeBroker(partitions=4) as fake, millstream.connect(fake.address) as client:
        with client.producer("t", batch_messages=10, linger_ms=1000) as producer:
            for number in range(400):
                producer.send(b"plain")
                producer.send(b"keyed-%d" % (number % 7), b"key-%d" % (number % 7))
            producer.send(b"asked", partition=2)
            producer.send(json=[1])
        stored = fake.topics["t"]
        assert sum(len(partition.values) for partition in stored) == 802
        assert all(partition.values.count(b"plain") > 0 for partition in stored)
        for key in range(7):
            assert sum(b"key-%d" % key in partition.keys for partition in stored) == 1
        assert b"asked" in stored[2].values


def test_a_producer_can_be_bound_to_a_partition() -> None:
    with FakeBroker(partitions=3) as fake, millstream.connect(fake.address) as client:
        with client.producer("t", partition=1) as producer:
            producer.send(b"a")
            producer.send(b"b", b"some key")
        assert fake.values("t", 1) == [b"a", b"b"]
        with pytest.raises(PartitionNotFound):
            client.producer("t", partition=3)
        with client.producer("t") as producer, pytest.raises(PartitionNotFound):
            producer.send(b"x", partition=9)


def test_compression_is_undone_by_readers(fake: FakeBroker, client: millstream.Client) -> None:
    for codec in ("lz4", "zstd"):
        with client.producer(codec, compression=codec) as producer:  # type: ignore[arg-type]
            for value in numbered(1000):
                producer.send(value * 10)
        assert fake.values(codec) == [value * 10 for value in numbered(1000)]
        assert producer.stats.bytes_sent < 25_000


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
@pytest.mark.parametrize("at", [0, 1, 5])
@pytest.mark.parametrize("window", [1, 8])
def test_no_fault_loses_repeats_or_reorders(
    fake: FakeBroker, client: millstream.Client, fault: Fault, at: int, window: int
) -> None:
    fake.faults.extend([*[Fault() for _ in range(at)], fault])
    with client.producer("t", batch_messages=7, window=window, linger_ms=1) as producer:
        for value in numbered(150):
            producer.send(value)
    assert fake.values("t") == numbered(150)
    assert producer.stats.messages_confirmed == 150


def test_many_faults_in_a_row(fake: FakeBroker, client: millstream.Client) -> None:
    fake.faults.extend([FAULTS["lost after storing"], Fault(), FAULTS["lost before storing"], Fault(), Fault()] * 3)
    with client.producer("t", batch_messages=5, linger_ms=1) as producer:
        for value in numbered(200):
            producer.send(value)
    assert fake.values("t") == numbered(200)


def test_a_broker_that_restarts_is_not_noticed(fake: FakeBroker, client: millstream.Client) -> None:
    with client.producer("t", batch_messages=5, linger_ms=1) as producer:
        for value in numbered(50):
            producer.send(value)
        fake.stop_listening()
        for value in numbered(50, 50):
            producer.send(value)
        fake.listen()
        for value in numbered(50, 100):
            producer.send(value)
    assert fake.values("t") == numbered(150)
    assert producer.stats.connections == 2


def test_goodbye_is_followed_by_a_new_connection(fake: FakeBroker, client: millstream.Client) -> None:
    with client.producer("t", linger_ms=1) as producer:
        producer.send(b"a")
        producer.flush()
        fake.say_goodbye()
        producer.send(b"b")
        producer.flush()
        producer.send(b"c")
    assert fake.values("t") == [b"a", b"b", b"c"]
    assert producer.stats.connections == 2


def test_errors_surface_at_the_next_call_and_the_producer_goes_on(fake: FakeBroker, client: millstream.Client) -> None:
    failures: list[millstream.BatchFailure] = []
    producer = client.producer("t", batch_messages=2, linger_ms=1000, on_error=failures.append)
    fake.faults.append(Fault(error=QuotaExceeded("full")))
    producer.send(b"a")
    producer.send(b"b")
    with pytest.raises(QuotaExceeded):
        producer.flush()
    producer.send(b"c")
    producer.flush()
    producer.close()
    assert fake.values("t") == [b"c"]
    assert [(failure.messages, type(failure.error), failure.in_doubt) for failure in failures] == [
        (2, QuotaExceeded, False)
    ]


def test_who_is_told_of_errors_hears_of_all_of_them_even_if_it_raises(
    fake: FakeBroker, client: millstream.Client
) -> None:
    """What came behind the one that it raised for was forgotten."""
    told: list[int] = []

    def on_error(failure: millstream.BatchFailure) -> None:
        told.append(failure.partition)
        raise ValueError("no")

    fake.partitions_default = 3
    producer = client.producer("t", linger_ms=60_000, on_error=on_error)
    fake.faults += [Fault(error=QuotaExceeded("full"))] * 3
    for partition in range(3):
        producer.send(b"x", partition=partition)
    for _ in range(4):
        with contextlib.suppress(ValueError, MillstreamError):
            producer.flush(5)
    assert sorted(told) == [0, 1, 2]
    with contextlib.suppress(MillstreamError):
        producer.close()


def test_who_is_told_of_an_error_may_send_and_flush_even_if_the_connection_is_lost(
    fake: FakeBroker, client: millstream.Client
) -> None:
    """It is told by the thread that connects again, which waited for itself until the time was up."""
    told: list[object] = []

    def on_error(_: millstream.BatchFailure) -> None:
        fake.drop_all()
        with contextlib.suppress(QuotaExceeded):  # the first call says what is told here
            producer.flush()
        producer.send(b"instead")
        try:
            producer.flush(5)
        except MillstreamError as error:
            told.append(error)
        else:
            told.append(fake.values("t"))

    with client.producer("t", linger_ms=1, on_error=on_error) as producer:
        fake.faults.append(Fault(error=QuotaExceeded("full")))
        producer.send(b"refused")
        eventually(lambda: bool(told))
    assert told == [[b"instead"]]


def test_a_callback_that_raises_at_the_end_of_the_program_keeps_no_other_producer_from_sending(
    fake: FakeBroker, client: millstream.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(millstream.Producer, "_report_quietly", lambda self: None)  # whoever closes comes first

    def on_error(failure: millstream.BatchFailure) -> None:
        raise RuntimeError("my callback")

    producers = [client.producer("t", linger_ms=60_000, on_error=on_error) for _ in range(3)]
    fake.faults.extend(Fault(error=QuotaExceeded("full")) for _ in producers)
    for producer in producers:
        producer.send(b"x")
    _close_all()  # as at the end of a program
    assert len(fake.publishes) == 3
    with pytest.raises(QuotaExceeded):
        client.close()


def test_an_error_surfaces_at_send_and_the_message_is_not_taken(fake: FakeBroker, client: millstream.Client) -> None:
    failed = threading.Event()
    producer = client.producer("t", linger_ms=1, on_error=lambda _: failed.set())
    fake.faults.append(Fault(error=QuotaExceeded("full")))
    producer.send(b"a")
    assert failed.wait(5)
    with pytest.raises(QuotaExceeded):
        producer.send(b"b")
    producer.send(b"c")
    producer.close()
    assert fake.values("t") == [b"c"]


def test_close_raises_what_was_not_raised_before(fake: FakeBroker, client: millstream.Client) -> None:
    fake.faults.append(Fault(error=QuotaExceeded("full")))
    with pytest.raises(QuotaExceeded), client.producer("t") as producer:
        producer.send(b"a")


def test_an_exception_in_the_block_is_not_hidden(fake: FakeBroker, client: millstream.Client) -> None:
    def fail_inside() -> None:
        with client.producer("t") as producer:
            producer.send(b"a")
            raise KeyError("mine")

    fake.faults.append(Fault(error=QuotaExceeded("full")))
    with pytest.raises(KeyError):
        fail_inside()


def test_a_message_that_is_too_large_is_refused_alone(fake: FakeBroker, client: millstream.Client) -> None:
    with client.producer("t") as producer:
        producer.send(b"a")
        with pytest.raises(PayloadTooLarge):
            producer.send(bytes(2 << 20))
        producer.send(b"b")
    assert fake.values("t") == [b"a", b"b"]


def test_small_limits_are_checked_for_every_message() -> None:
    with FakeBroker(max_message_bytes=10) as fake, millstream.connect(fake.address) as client:
        with client.producer("t") as producer:
            producer.send(b"0123456789")
            with pytest.raises(PayloadTooLarge):
                producer.send(b"0123456789!")
            with pytest.raises(PayloadTooLarge):
                producer.send(b"01234567", b"key")
        assert fake.values("t") == [b"0123456789"]


def test_a_full_buffer_blocks_send_and_then_refuses_the_message(fake: FakeBroker, client: millstream.Client) -> None:
    fake.hold_answers.clear()
    producer = client.producer("t", batch_messages=1, linger_ms=1000, buffer_bytes=1000, window=1, send_timeout_s=0.05)
    taken: list[bytes] = []

    def send_many() -> None:
        for value in numbered(100):
            producer.send(value)
            taken.append(value)

    with pytest.raises(RequestTimeout):
        send_many()
    assert 5 < len(taken) < 20
    fake.hold_answers.set()
    producer.close()
    assert fake.values("t") == taken


def test_send_goes_on_as_soon_as_there_is_room(fake: FakeBroker, client: millstream.Client) -> None:
    fake.hold_answers.clear()
    threading.Timer(0.1, fake.hold_answers.set).start()
    with client.producer("t", batch_messages=1, linger_ms=1000, buffer_bytes=1000, window=1) as producer:
        for value in numbered(50):
            producer.send(value)
    assert fake.values("t") == numbered(50)


def test_what_cannot_be_delivered_in_time_fails_with_the_reason(fake: FakeBroker, client: millstream.Client) -> None:
    failures: list[millstream.BatchFailure] = []
    producer = client.producer("t", delivery_timeout_s=0.3, linger_ms=1, on_error=failures.append)
    fake.stop_listening()
    producer.send(b"a")
    with pytest.raises(RequestTimeout, match="nobody listens"):
        producer.flush()
    fake.listen()
    producer.send(b"b")
    producer.close()
    assert fake.values("t") == [b"b"]
    assert len(failures) == 1


def test_an_answer_that_never_comes_fails_as_in_doubt(fake: FakeBroker, client: millstream.Client) -> None:
    failures: list[millstream.BatchFailure] = []
    producer = client.producer("t", delivery_timeout_s=0.3, linger_ms=1, on_error=failures.append)
    fake.faults.extend([Fault(silent=True, store=False)] * 3)
    producer.send(b"a")
    with pytest.raises(RequestTimeout, match="may or may not"):
        producer.flush()
    fake.faults.clear()
    producer.send(b"b")
    producer.close()
    assert fake.values("t") == [b"b"]
    assert [failure.in_doubt for failure in failures] == [True]


def test_acks_none_asks_for_no_answer(fake: FakeBroker, client: millstream.Client) -> None:
    with client.producer("t", acks="none") as producer:
        for value in numbered(100):
            producer.send(value)
    fake.wait_for(lambda: "t" in fake.topics and len(fake.values("t")) == 100)
    assert set(fake.acks_seen) == {0}


def test_without_confirmations_close_waits_until_the_broker_has_taken_everything(
    fake: FakeBroker, client: millstream.Client
) -> None:
    """What the system had taken was lost with the socket, if the broker said anything before it had read it."""
    fake.faults.extend(Fault(delay_s=0.02) for _ in range(20))
    with client.producer("t", acks="none", batch_messages=1) as producer:
        for value in numbered(20):
            producer.send(value)
    assert fake.values("t") == numbered(20)


@pytest.mark.parametrize("loss", [RequestTimeout, ConnectionLost])
def test_without_confirmations_close_says_that_the_broker_has_not_taken_everything(
    fake: FakeBroker, client: millstream.Client, loss: type[MillstreamError]
) -> None:
    producer = client.producer("t", acks="none")
    fake.hold_answers.clear()
    producer.send(b"a")
    producer.flush()
    fake.wait_for(lambda: fake.publishes)
    if loss is ConnectionLost:
        threading.Timer(0.2, fake.drop_all).start()
    with pytest.raises(loss, match="what was sent last may be lost"):
        producer.close(0.2 if loss is RequestTimeout else 20)
    fake.hold_answers.set()


def send_and_be_asked_to_go(fake: FakeBroker, producer: millstream.Producer) -> None:
    """By a broker that says nothing more: whether it has taken the message is asked, and nobody knows."""
    fake.hold_answers.clear()
    producer.send(b"a")
    producer.flush()
    fake.wait_for(lambda: fake.publishes)  # it reads nothing behind this one
    fake.say_goodbye()
    eventually(lambda: producer._goodbye.asked)


def test_without_confirmations_a_broker_that_goes_and_has_not_taken_everything_is_told_of(
    fake: FakeBroker, client: millstream.Client
) -> None:
    producer = client.producer("t", acks="none", linger_ms=1)
    send_and_be_asked_to_go(fake, producer)
    fake.drop_all()
    fake.hold_answers.set()
    eventually(lambda: producer._outbox.delivery.failure is not None)
    with pytest.raises(ConnectionLost, match="what was sent last may be lost"):
        producer.send(b"b")
    producer.send(b"c")
    producer.close()
    assert fake.values("t")[-1] == b"c", "it goes on"


def test_without_confirmations_a_broker_that_goes_and_vanishes_holds_nothing_up() -> None:
    """Whether it had taken everything was asked, and until the system gave up nothing more was sent anywhere."""
    with FakeBroker(heartbeat_ms=50) as fake, millstream.connect(fake.address) as client:
        producer = client.producer("t", acks="none", linger_ms=1)
        send_and_be_asked_to_go(fake, producer)
        fake.vanish()
        fake.hold_answers.set()
        producer.send(b"b")
        eventually(lambda: producer._outbox.delivery.failure is not None)
        with pytest.raises(ConnectionLost, match=r"what was sent last may be lost: .* has been silent"):
            producer.send(b"c")
        producer.close()
        assert fake.values("t")[-1] == b"b", "it goes on"


def test_an_unknown_error_does_not_end_what_delivers(
    fake: FakeBroker, client: millstream.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread ended, and what was sent afterwards waited for it."""
    raised = threading.Event()
    tick = millstream.Producer._tick

    def fail_once(self: millstream.Producer) -> bool:
        if not raised.is_set():
            raised.set()
            raise MemoryError
        return tick(self)

    monkeypatch.setattr(millstream.Producer, "_tick", fail_once)
    with client.producer("t", linger_ms=1) as producer:
        producer.send(b"a")
        assert raised.wait(10)
        fake.wait_for(lambda: "t" in fake.topics and fake.values("t") == [b"a"])
        producer.send(b"b")
        fake.wait_for(lambda: fake.values("t") == [b"a", b"b"])


def test_threads_share_a_producer(fake: FakeBroker, client: millstream.Client) -> None:
    with client.producer("t", batch_messages=50, linger_ms=1) as producer:

        def work(name: int) -> None:
            for number in range(500):
                producer.send(b"%d:%04d" % (name, number), b"k" if number % 3 == 0 else None)

        threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    values = fake.values("t")
    assert len(values) == 2000
    for name in range(4):
        mine = [value for value in values if value and value.startswith(b"%d:" % name)]
        assert mine == sorted(mine)
        assert len(mine) == 500


def test_nobody_takes_away_the_answer_that_a_flush_is_woken_by(fake: FakeBroker, client: millstream.Client) -> None:
    """The thread that delivers was quicker now and then, and the flush found nothing and slept for 50 ms more."""
    late = 0
    with client.producer("t") as producer:
        for _ in range(300):
            producer.send(b"x")
            begun_s = time.monotonic()
            producer.flush()
            late += time.monotonic() - begun_s > 0.045
    assert late < 10


def test_flush_does_not_wait_for_what_others_send_meanwhile(fake: FakeBroker, client: millstream.Client) -> None:
    producer = client.producer("t", linger_ms=1)
    stop = threading.Event()

    def chatter() -> None:
        while not stop.is_set():
            producer.send(b"x")
            time.sleep(0.0001)

    thread = threading.Thread(target=chatter)
    thread.start()
    try:
        for _ in range(5):
            producer.flush(timeout_s=5)
    finally:
        stop.set()
        thread.join()
        producer.close()


def test_messages_are_delivered_while_it_is_looked_for_new_partitions(
    fake: FakeBroker, client: millstream.Client
) -> None:
    answer = threading.Event()
    with client.producer("t", linger_ms=1) as producer:
        producer.send(b"a")
        producer.flush()
        fake.topics["t"].append(FakePartition(uid=101))
        fake.before["Metadata"] = partial(answer.wait, 20)
        producer._outbox.topic.loaded_s -= 61  # a minute later
        for value in (b"b", b"c"):
            producer.send(value)
            eventually(lambda: fake.values("t")[-1] == value, within_s=5)  # noqa: B023
        eventually(lambda: not fake.before, "nobody has asked")
        producer._outbox.topic.loaded_s -= 61  # and another one
        producer.send(b"d")
        eventually(lambda: not producer._outbox.outdated())
        looking = [thread for thread in threading.enumerate() if thread.name == "millstream-producer-partitions"]
        assert len(looking) == 1
        answer.set()
        eventually(lambda: len(producer._outbox.topic.uids) == 2)


def test_an_idle_producer_says_that_it_is_alive() -> None:
    with FakeBroker(heartbeat_ms=300) as fake, millstream.connect(fake.address) as client:
        fake.wait_for(lambda: fake.heartbeat_frames >= 1)
        client.close()
        before = fake.heartbeat_frames
        with millstream.connect(fake.address) as other, other.producer("t"):
            other._closed.set()  # the client's own connection is silent from here on
            fake.wait_for(lambda: fake.heartbeat_frames >= before + 1, 5)


@pytest.mark.parametrize(
    "options",
    [{"acks": "some"}, {"compression": "rar"}, {"window": 17}, {"linger_ms": -1}, {"batch_bytes": 0}, {"fsync": "x"}],
)
def test_settings_are_checked(client: millstream.Client, options: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument):
        client.producer("t", **options)  # type: ignore[arg-type]


def test_a_producer_learns_how_large_messages_may_be(fake: FakeBroker, client: millstream.Client) -> None:
    """It kept to what was true when it was opened."""
    fake.max_message_bytes = 100
    with client.producer("t", linger_ms=1000) as producer:
        with pytest.raises(PayloadTooLarge):
            producer.send(b"x" * 200)
        fake.max_message_bytes = 1000
        producer._look_again()
        producer.send(b"x" * 200)
        producer.send(b"x" * 80)
        fake.max_message_bytes = 50
        producer._look_again()
        for value in (b"x" * 80, "x" * 80):
            with pytest.raises(PayloadTooLarge):
                producer.send(value)
        producer.send(b"x" * 40)
    assert [len(value or b"") for value in fake.values("t")] == [200, 80, 40]
