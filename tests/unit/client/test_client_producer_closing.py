"""A producer is closed: what was sent is flushed, what comes later is refused, and nothing is lost between."""

from __future__ import annotations

import contextlib
import resource
import socket
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Literal

import pytest
from fake_broker import FakeBroker, Fault

import millstream
from millstream.client.accumulator import Accumulator
from millstream.client.blocking import producer as producers
from millstream.errors import (
    ConnectionLost,
    InvalidArgument,
    MillstreamError,
    RequestTimeout,
)
from tests.waiting import eventually


class _Stuck:
    """A broker that takes nothing any more, and a thread that goes on sending to it until it is told that it cannot."""

    def __init__(self, fake: FakeBroker, producer: millstream.Producer) -> None:
        self._producer = producer
        self.told: list[MillstreamError] = []
        fake.hold_answers.clear()
        self.thread = threading.Thread(target=self._send, daemon=True)
        self.thread.start()
        written = -1
        while written != (written := producer._outbox._stats.messages_sent) or not written:
            time.sleep(0.2)

    def _send(self) -> None:
        try:
            while True:
                self._producer.send(b"x" * 500_000)
        except MillstreamError as error:
            self.told.append(error)

    def end(self) -> None:
        for _ in range(2):  # the first raises what it has waited for, the second what became of the messages
            with contextlib.suppress(MillstreamError):
                self._producer.close(0)
        self.thread.join(10)


def test_a_closed_producer_takes_nothing(client: millstream.Client) -> None:
    producer = client.producer("t")
    producer.close()
    producer.close()
    with pytest.raises(InvalidArgument):
        producer.send(b"x")


def test_what_is_sent_while_the_producer_closes_is_refused(fake: FakeBroker, client: millstream.Client) -> None:
    producer = client.producer("t", linger_ms=60_000)
    producer.send(b"a")
    fake.hold_answers.clear()
    closing = threading.Thread(target=producer.close)
    closing.start()
    fake.wait_for(lambda: fake.publishes)  # the flush is under way
    with pytest.raises(InvalidArgument):
        producer.send(b"b")
    fake.hold_answers.set()
    closing.join(10)
    assert fake.values("t") == [b"a"]


def test_what_slips_in_behind_the_flush_of_a_close_is_sent_as_well(fake: FakeBroker, client: millstream.Client) -> None:
    """A thread may have passed the gate before it closed, and put its message down only now."""
    producer = client.producer("t", linger_ms=60_000)
    producer.send(b"a")
    pile = producer._accumulator.sticky
    fake.hold_answers.clear()

    def slip_in() -> None:
        fake.wait_for(lambda: fake.publishes)
        pile.entries.append(b"b")
        fake.hold_answers.set()

    late = threading.Thread(target=slip_in)
    late.start()
    producer.close()
    late.join(10)
    assert fake.values("t") == [b"a", b"b"]


def test_closing_while_others_send_leaves_no_message_unaccounted_for(
    fake: FakeBroker, client: millstream.Client
) -> None:
    for number in range(8):
        failures: list[millstream.BatchFailure] = []
        producer = client.producer(f"t{number}", linger_ms=1, on_error=failures.append)
        sent = [0, 0]

        def work(name: int, sent: list[int] = sent, producer: millstream.Producer = producer) -> None:
            with contextlib.suppress(millstream.MillstreamError):
                while True:
                    producer.send(b"x")
                    sent[name] += 1

        threads = [threading.Thread(target=work, args=(name,)) for name in range(2)]
        for thread in threads:
            thread.start()
        time.sleep(0.01)
        with contextlib.suppress(ConnectionLost):
            producer.close()
        for thread in threads:
            thread.join(10)
        assert sum(sent) == len(fake.values(f"t{number}")) + sum(failure.messages for failure in failures)


def test_closing_the_client_flushes_its_producers(fake: FakeBroker) -> None:
    client = millstream.connect(fake.address)
    producer = client.producer("t", linger_ms=60_000)
    producer.send(b"a")
    client.close()
    assert fake.values("t") == [b"a"]


@pytest.mark.parametrize("close_again", [millstream.Producer.close, None], ids=["producer", "client"])
def test_a_second_close_waits_for_the_first_and_gives_nothing_up(
    fake: FakeBroker, close_again: Callable[[millstream.Producer], None] | None
) -> None:
    failures: list[millstream.BatchFailure] = []
    client = millstream.connect(fake.address, timeout_s=10)
    producer = client.producer("t", linger_ms=60_000, on_error=failures.append)
    producer.send(b"a")
    fake.hold_answers.clear()
    first = threading.Thread(target=producer.close)
    first.start()
    fake.wait_for(lambda: fake.publishes)
    second = threading.Thread(target=client.close if close_again is None else partial(close_again, producer))
    second.start()
    second.join(0.1)
    assert second.is_alive(), "it did not wait"
    fake.hold_answers.set()
    first.join(10)
    second.join(10)
    client.close()
    assert not failures
    assert producer.stats.messages_confirmed == 1


def test_who_has_a_time_limit_does_not_wait_for_another_thread_that_writes(
    fake: FakeBroker, client: millstream.Client
) -> None:
    """It wrote for half a minute to a broker that took nothing, and everybody else waited for it."""
    producer = client.producer("t", acks="none", linger_ms=0)
    stuck = _Stuck(fake, producer)
    begun_s = time.monotonic()
    with pytest.raises(RequestTimeout, match=r"not confirmed yet after 0.2 s"):
        producer.flush(0.2)
    try:
        producer.close(0.2)
    except MillstreamError as error:
        stuck.told.append(error)
    assert time.monotonic() - begun_s < 8
    stuck.end()
    assert not stuck.thread.is_alive()
    assert stuck.told, "whoever is the first to ask hears that something may be lost"


@pytest.mark.parametrize("acks", ["leader", "none"])
@pytest.mark.parametrize("end", [millstream.Producer.flush, millstream.Producer.close])
def test_a_time_limit_holds_for_all_that_is_waited_for_together(
    fake: FakeBroker, client: millstream.Client, end: Callable[[millstream.Producer, float], None], acks: str
) -> None:
    """Close waited once for who wrote and once more for its own flush, and then for the thread that delivers."""
    producer = client.producer("t", acks=acks, linger_ms=0)  # type: ignore[arg-type]
    stuck = _Stuck(fake, producer)
    begun_s = time.monotonic()
    with pytest.raises(RequestTimeout, match=r"not confirmed yet after 2 s"):
        end(producer, 2)
    assert time.monotonic() - begun_s < 3.5
    stuck.end()
    assert stuck.told


def test_who_waits_while_a_broker_takes_nothing_sleeps_until_he_is_woken(
    fake: FakeBroker, client: millstream.Client
) -> None:
    """A hundred times in a second it looked whether another thread still wrote."""
    producer = client.producer("t", acks="none", linger_ms=0, send_timeout_s=30, buffer_bytes=1_000_000)
    stuck = _Stuck(fake, producer)
    naps = -resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
    with pytest.raises(RequestTimeout):
        producer.flush(2)
    naps += resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
    stuck.end()
    assert naps < 100


def test_a_message_that_is_taken_in_pieces_arrives_whole_and_in_order(
    fake: FakeBroker, client: millstream.Client
) -> None:
    """What the system does not take at once is sent when it takes more, by whoever is there."""
    sent = [b"%03d" % number + b"x" * 400_000 for number in range(40)]
    with client.producer("t", linger_ms=0) as producer:
        transport = producer._transport
        assert transport is not None
        transport._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16_384)  # type: ignore[arg-type]
        for value in sent:
            producer.send(value)
        producer.flush(20)
    assert fake.values("t") == sent
    assert transport.drains, "the link was never full"
    assert producer.stats.connections == 1


class _InOrder(list[millstream.Producer]):
    def discard(self, producer: millstream.Producer) -> None:
        with contextlib.suppress(ValueError):
            self.remove(producer)


def test_at_the_end_of_the_program_one_producer_does_not_use_up_the_time_of_the_others(
    fake: FakeBroker, client: millstream.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were flushed one after the other, and behind one whose broker is away there was no time left."""
    monkeypatch.setattr(producers, "_EXIT_S", 1.0)
    with FakeBroker() as away:
        stuck = millstream.connect(away.address).producer("t", linger_ms=60_000)
        away.hold_answers.clear()
        others = [client.producer(f"t{number}", linger_ms=60_000) for number in range(3)]
        monkeypatch.setattr(producers, "_live", _InOrder([stuck, *others]))
        fake.faults.extend(Fault(delay_s=0.2) for _ in others)
        for producer in (stuck, *others):
            producer.send(b"x")
        producers._close_all()
        assert [producer.stats.messages_confirmed for producer in others] == [1, 1, 1]
        away.hold_answers.set()
        with contextlib.suppress(MillstreamError):
            stuck.close()


def test_a_copy_in_a_child_does_not_wait_for_who_waits_in_its_parent(client: millstream.Client) -> None:
    producer = client.producer("t")
    with producer._lock:
        producer._driver = -1  # a thread that is not here
        producer._forked()
        begun_s = time.monotonic()
        producer.close(5)
        assert time.monotonic() - begun_s < 2


# --- messages that are past the gate when the producer is closed ----------------------------------------------------


def _pile(producer: millstream.Producer) -> list[bytes]:
    return producer._accumulator._open_piles[0].entries  # type: ignore[return-value]


def test_what_is_added_after_a_producer_was_closed_is_reported_to_who_sends_it(
    client: millstream.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was lost without a word."""
    failures: list[millstream.BatchFailure] = []
    producer = client.producer("t", linger_ms=1000, on_error=failures.append)
    producer.send(b"first")
    put = Accumulator.put

    def close_before(*arguments: object) -> bool:
        monkeypatch.undo()
        producer.close()
        return put(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Accumulator, "put", close_before)
    with pytest.raises(ConnectionLost, match="the producer was closed"):
        producer.send("too late")
    assert [failure.messages for failure in failures] == [1]


def test_what_is_added_at_the_very_end_is_reported_to_who_closes_the_producer(
    client: millstream.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer = client.producer("t", linger_ms=1000)
    producer.send(b"first")
    monkeypatch.setattr(producer._thread, "join", lambda timeout: _pile(producer).append(b"too late"))
    with pytest.raises(ConnectionLost, match="the producer was closed"):
        producer.close()


@pytest.mark.parametrize("acks", ["leader", "none"])
def test_a_producer_that_is_dropped_delivers_what_it_has_taken_and_is_gone(
    fake: FakeBroker, client: millstream.Client, acks: Literal["leader", "none"]
) -> None:
    """Its thread and its connection would stay for as long as the program runs."""
    client.producer("t", acks=acks).send(b"at once")
    fake.wait_for(lambda: fake.values("t") == [b"at once"])
    producer = client.producer("t", acks=acks)
    eventually(partial(getattr, producer, "_asleep"), "it rests")
    producer.send(b"woken")
    found = weakref.ref(producer)
    del producer
    fake.wait_for(lambda: fake.values("t") == [b"at once", b"woken"])
    eventually(lambda: found() is None, "nobody has it")
    eventually(lambda: "millstream-producer-t" not in {thread.name for thread in threading.enumerate()}, "no thread")


def test_what_slips_in_while_a_producer_comes_to_rest_is_not_dropped_with_it(
    fake: FakeBroker, client: millstream.Client
) -> None:
    producer = client.producer("t")
    eventually(partial(getattr, producer, "_asleep"), "it rests")
    producer._accumulator._open_piles[0].entries.append(b"slipped in")
    del producer
    fake.wait_for(lambda: fake.values("t") == [b"slipped in"])
