"""Threads that publish through one client: their messages travel together, and nobody waits for one who has gone."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from fake_broker import FakeBroker

import millstream
from millstream.client.blocking.company import Company, _Traveller
from millstream.client.metadata import Topic
from millstream.client.values import make_entry
from millstream.entries import AnyEntry
from millstream.errors import ConnectionLost, QuotaExceeded, RequestTimeout
from millstream.wire import calls
from millstream.wire.messages import PublishResult

TOPIC = Topic(calls.TopicMetadata(name="t", partition_uids=[1, 2], max_message_bytes=1 << 20), 0.0)


class Road:
    """Publishes for a company: whatever goes out waits until it may arrive."""

    def __init__(self) -> None:
        self.sent: list[list[AnyEntry]] = []
        self.may_arrive = threading.Semaphore(0)
        self.departed = threading.Semaphore(0)
        self.error: Exception | None = None
        self._offset = 0

    def publish(
        self, _topic: Topic, _partition: int, entries: Sequence[AnyEntry], _fsync: int, _deadline_s: float
    ) -> PublishResult:
        self.sent.append(list(entries))
        self.departed.release()
        self.may_arrive.acquire()
        if self.error is not None:
            raise self.error
        base, self._offset = self._offset, self._offset + len(entries)
        return PublishResult(base_offset=base, append_time_us=1, label="disk", duplicate=False)


@pytest.fixture
def road() -> Road:
    return Road()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as pool:
        yield pool


def depart(
    threads: ThreadPoolExecutor, company: Company, *entries: AnyEntry, partition: int = 0
) -> list[Future[tuple[PublishResult, int]]]:
    """Have each published by a thread of its own, one after the other; all but the first wait for it."""
    under_way = []
    for entry in entries:
        before = waiting(company)
        under_way.append(threads.submit(company.publish, TOPIC, partition, entry, 0))
        eventually(lambda before=before, last=under_way[-1]: waiting(company) > before or last.done())
    return under_way


def waiting(company: Company) -> int:
    """Ways on which something is under way, and those who wait."""
    with company._lock:
        return len(company._waiting) + sum(map(len, company._waiting.values()))


def eventually(condition: Callable[[], object]) -> None:
    for _ in range(10_000):
        if condition():
            return
        threading.Event().wait(0.001)
    pytest.fail("it never came")


def places(under_way: Sequence[Future[tuple[PublishResult, int]]]) -> list[int]:
    return [result.base_offset + index for result, index in (each.result(10) for each in under_way)]


def test_who_waits_for_another_travels_with_all_who_wait(road: Road, threads: ThreadPoolExecutor) -> None:
    company = Company(road.publish, 10)
    under_way = depart(threads, company, b"0", b"1", (b"2", b"key"), b"3")
    road.may_arrive.release(2)
    assert places(under_way) == [0, 1, 2, 3]
    assert road.sent == [[b"0"], [b"1", (b"2", b"key"), b"3"]]
    assert waiting(company) == 0


def test_other_partitions_have_a_way_of_their_own(road: Road, threads: ThreadPoolExecutor) -> None:
    company = Company(road.publish, 10)
    depart(threads, company, b"0")
    depart(threads, company, b"1", partition=1)
    eventually(lambda: len(road.sent) == 2)
    road.may_arrive.release(2)


def test_a_party_is_not_larger_than_a_batch_may_be(road: Road, threads: ThreadPoolExecutor) -> None:
    company = Company(road.publish, 10)
    large = bytes(100_000)
    under_way = depart(threads, company, b"0", large, large, large, b"4")
    road.may_arrive.release(3)
    assert places(under_way) == [0, 1, 2, 3, 4]
    assert [len(party) for party in road.sent] == [1, 2, 2]


def test_a_message_with_a_dedup_id_travels_alone(road: Road, threads: ThreadPoolExecutor) -> None:
    company = Company(road.publish, 10)
    special = make_entry(b"1", dedup_id="order-17")
    depart(threads, company, b"0")
    other = threads.submit(company.publish, TOPIC, 0, special, 0)
    eventually(lambda: len(road.sent) == 2)
    road.may_arrive.release(2)
    assert other.result(10)[1] == 0
    assert road.sent[1] == [special]


def test_an_error_is_told_to_everybody_who_travelled_and_to_nobody_else(
    road: Road, threads: ThreadPoolExecutor
) -> None:
    company = Company(road.publish, 10)
    under_way = depart(threads, company, b"0", b"1", b"2")
    road.may_arrive.release()
    assert under_way[0].result(10)[0].base_offset == 0
    road.departed.acquire()
    road.departed.acquire()  # the second has departed
    road.error = QuotaExceeded("full")
    road.may_arrive.release()
    for each in under_way[1:]:
        with pytest.raises(QuotaExceeded, match="full"):
            each.result(10)
    road.error = None
    road.may_arrive.release()
    assert company.publish(TOPIC, 0, b"3", 0)[0].base_offset == 1


def test_who_waited_in_vain_did_not_publish_and_the_others_go_on(road: Road, threads: ThreadPoolExecutor) -> None:
    company = Company(road.publish, 0.05)
    [first, second] = depart(threads, company, b"0", b"1")
    with pytest.raises(RequestTimeout, match="was not stored"):
        second.result(10)
    [third] = depart(threads, company, b"2")
    road.may_arrive.release(2)
    assert places([first]) == [0]
    if third.exception(10) is None:  # it may have waited in vain, too
        assert road.sent == [[b"0"], [b"2"]]
    assert waiting(company) == 0


class Interrupted(Exception):
    pass


@pytest.fixture
def interrupt() -> Iterator[Callable[[], None]]:
    """Interrupts the main thread, in which tests run, as Ctrl-C would."""

    def handle(*_: Any) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGUSR1, handle)
    yield lambda: signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.skipif(threading.current_thread() is not threading.main_thread(), reason="only it gets signals")
def test_a_thread_that_is_interrupted_while_it_waits_is_not_waited_for(
    road: Road, threads: ThreadPoolExecutor, interrupt: Callable[[], None]
) -> None:
    company = Company(road.publish, 10)
    [first] = depart(threads, company, b"0")

    def later() -> Future[tuple[PublishResult, int]]:
        eventually(lambda: waiting(company) == 2)
        [third] = depart(threads, company, b"2")
        interrupt()
        return third

    scene = threads.submit(later)
    with pytest.raises(Interrupted):
        company.publish(TOPIC, 0, b"1", 0)
    third = scene.result(10)
    road.may_arrive.release(2)
    assert places([first, third]) == [0, 1]
    assert road.sent == [[b"0"], [b"2"]]


@pytest.mark.skipif(threading.current_thread() is not threading.main_thread(), reason="only it gets signals")
def test_those_who_travel_with_a_thread_that_is_interrupted_are_told(
    road: Road, threads: ThreadPoolExecutor, interrupt: Callable[[], None]
) -> None:
    company = Company(road.publish, 10)
    [first] = depart(threads, company, b"0")

    def later() -> Future[tuple[PublishResult, int]]:
        eventually(lambda: waiting(company) == 2)
        [third] = depart(threads, company, b"2")
        road.may_arrive.release()
        eventually(lambda: len(road.sent) == 2)
        interrupt()
        return third

    scene = threads.submit(later)
    with pytest.raises(Interrupted):
        company.publish(TOPIC, 0, b"1", 0)
    with pytest.raises(ConnectionLost, match="may or may not be stored"):
        scene.result(10).result(10)
    assert places([first]) == [0]
    assert waiting(company) == 0


class BellOfTheDoomed:
    """Interrupts whoever hears it."""

    def __init__(self) -> None:
        self._bell = threading.Lock()
        self._bell.acquire()
        self.release = self._bell.release

    def acquire(self, timeout: float) -> bool:
        self._bell.acquire(timeout=timeout)
        raise Interrupted


def test_a_thread_that_is_interrupted_when_it_is_called_hands_over(
    road: Road, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    company = Company(road.publish, 10)
    [first] = depart(threads, company, b"0")
    with monkeypatch.context() as patch:
        patch.setattr(_Traveller, "__init__", doomed(_Traveller.__init__))
        [second] = depart(threads, company, b"1")
    [third, fourth] = depart(threads, company, b"2", b"3")
    road.may_arrive.release(2)
    with pytest.raises(Interrupted):
        second.result(10)
    assert places([first, third, fourth]) == [0, 1, 2]
    assert road.sent == [[b"0"], [b"2", b"3"]]


def doomed(make: Callable[..., None]) -> Callable[..., None]:
    def make_doomed(traveller: Any, *arguments: Any) -> None:
        make(traveller, *arguments)
        traveller.bell = BellOfTheDoomed()

    return make_doomed


def test_many_threads_with_one_client_store_everything_once_and_in_order(
    fake: FakeBroker, client: millstream.Client
) -> None:
    def work(name: int) -> list[int]:
        return [client.publish("t", b"%d %03d" % (name, number)).offset for number in range(200)]

    with ThreadPoolExecutor(8) as pool:
        offsets = list(pool.map(work, range(8)))
    stored = fake.values("t")
    assert len(stored) == 1600
    for name, own in enumerate(offsets):
        assert [stored[offset] for offset in own] == [b"%d %03d" % (name, number) for number in range(200)]
    assert len(fake.publishes) < 1600, "some travelled together"
