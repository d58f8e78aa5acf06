"""Calls that a signal handler ends by an exception (Ctrl-C, a time limit), wherever that is in the code."""

from __future__ import annotations

import _thread
import contextlib
import itertools
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import Any

import pytest
from fake_broker import FakeBroker, Fault
from fake_queues import FakeQueues

import millstream
from millstream.client.backoff import Backoff
from millstream.client.blocking import queue as blocking_queue
from millstream.client.blocking import stream as blocking_stream
from millstream.client.blocking.connection import Connection
from millstream.client.blocking.knock import Flag
from millstream.client.blocking.transport import Transport
from millstream.client.blocking.turns import Turns
from millstream.client.blocking.worker import _stop_signals
from millstream.errors import ConnectionLost, QuotaExceeded, RequestTimeout
from millstream.testing.broker import BrokerForTests
from tests.examples import seeds

_LARGE = b"x" * 20_000


class Interrupted(Exception):
    """Stands for a Ctrl-C: raised by the handler of a signal."""


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    def interrupt(*_: object) -> None:
        raise Interrupted

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGUSR1, signal.SIGUSR2)}
    yield
    for number, former in before.items():
        signal.signal(number, former)


class _Sender:
    """`sender[number]` sends a signal to the main thread.

    Not by a call, after which Python would look for signals in the tracing function already: this way the handler runs
    at the next place of the traced code where Python looks for them, as it does for any signal.
    """

    __getitem__ = _thread.interrupt_main


_sender = _Sender()


def _is_ours(frame: FrameType) -> bool:
    """Also what of Python's own has locks that an interrupt can leave taken."""
    return "/millstream/client/" in frame.f_code.co_filename or frame.f_code.co_filename == threading.__file__


def _interrupted_at(step: int, work: Callable[[], object], number: int = signal.SIGUSR1) -> bool:
    """Do the work with a signal before the given instruction of the client; False when it has fewer of them."""
    left = step

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if not _is_ours(frame):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            left -= 1
            if left < 0:
                sys.settrace(None)  # first: Python would look for signals when it begins to trace what comes next
                _sender[number]
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
        sys.settrace(before)  # the last instructions have no place to look for signals behind them but this one
    except Interrupted:
        pass
    finally:
        sys.settrace(before)
    return left < 0


def _publish_small(client: millstream.Client, value: bytes) -> None:
    client.publish("t", value)


def _publish_large(client: millstream.Client, value: bytes) -> None:
    """One that is sent in pieces and awaited like any other request."""
    client.publish("t", value + _LARGE)


@pytest.mark.parametrize("publish", [_publish_small, _publish_large])
@pytest.mark.parametrize("first", seeds(1, 3))
def test_interrupted_anywhere_the_next_publish_works_and_nothing_is_stored_twice(
    fake: FakeBroker, publish: Callable[[millstream.Client, bytes], None], first: int
) -> None:
    with millstream.connect(fake.address, timeout_s=2) as client:
        publish(client, b"first")
        step = first
        while _interrupted_at(step, partial(publish, client, b"interrupted %d " % step)):
            publish(client, b"next %d " % step)
            step += 3
        assert step > 100, "the client was not traced"
    stored = [value.removesuffix(_LARGE) for value in fake.values("t") if value is not None]
    assert len(stored) == len(set(stored)), "stored twice"
    assert [value for value in stored if value.startswith(b"next")] == [
        b"next %d " % number for number in range(first, step, 3)
    ]


# An exception in the callback of a weak reference goes nowhere.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("first", seeds(1, 4))
def test_interrupted_anywhere_while_it_connects_the_next_publish_works(fake: FakeBroker, first: int) -> None:
    with millstream.connect(fake.address, timeout_s=2) as client:
        client.publish("t", b"first")
        for step in itertools.count(first, 4):
            connection = client._link.current
            assert connection is not None
            connection.close()
            if not _interrupted_at(step, partial(client.publish, "t", b"interrupted %d" % step)):
                break
            client.publish("t", b"next %d" % step)
        assert step > 100, "the client was not traced"
    stored = fake.values("t")
    assert len(stored) == len(set(stored)), "stored twice"


def test_threads_for_whom_an_interrupted_one_was_reading_go_on(
    fake: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    with millstream.connect(fake.address, timeout_s=10) as client:
        client.publish("t", b"first")
        connection = client._link.current
        assert connection is not None
        main, stop_reading = threading.current_thread(), Connection._stop_reading

        def interrupted(self: Connection) -> None:
            if threading.current_thread() is main:
                raise Interrupted  # as a signal would that comes before the lock is let go of
            stop_reading(self)

        monkeypatch.setattr(Connection, "_stop_reading", interrupted)
        fake.hold_answers.clear()

        def publish_another() -> None:
            fake.wait_for(lambda: len(fake.publishes) == 2)
            waiting = threading.Thread(target=client.publish, args=("t", b"other"))
            waiting.start()
            while not connection._slots:  # it has sent, and finds that somebody reads
                waiting.join(0.01)
            fake.hold_answers.set()
            waiting.join()

        other = threading.Thread(target=publish_another)
        other.start()
        with pytest.raises(Interrupted):
            client.publish("t", b"interrupted")
        other.join(5)
        assert not other.is_alive()
        assert sorted(value or b"" for value in fake.values("t")) == [b"first", b"interrupted", b"other"]


def _read_next(stream: millstream.Stream, got: list[Any]) -> None:
    message = stream.next(2)
    assert message is not None
    got += (message,)  # not by a call: the test, too, may be interrupted after any


def _read_on(stream: millstream.Stream, got: list[Any]) -> None:
    for message in stream:
        got += (message,)
        return


def _read_batch(stream: millstream.Stream, got: list[Any]) -> None:
    for messages in stream.batches():
        got += messages
        return


def _send_threes(client: millstream.Client, count: int) -> int:
    with client.producer("t", batch_messages=3) as producer:
        for number in range(count):
            producer.send(b"%d" % number)
    return count


def _interrupt_reading(
    fake: FakeBroker, read: Callable[[millstream.Stream, list[Any]], None], steps: Iterable[int], *, in_hand: int
) -> None:
    """Interrupt a stream that has got three messages at a time, so many of which are handed out already."""
    got: list[Any] = []
    with millstream.connect(fake.address, timeout_s=2) as client:
        sent = _send_threes(client, 300)
        with client.stream("t", start="earliest", max_bytes=1, timeout_s=2) as stream:
            for step in steps:
                if sent - len(got) < 30:
                    sent += _send_threes(client, 300)
                for _ in range(3):  # of a list that was cut short none of the next ones makes up for it
                    if len(got) % 3 != in_hand:
                        read(stream, got)
                if not _interrupted_at(step, partial(read, stream, got)):
                    break
                read(stream, got)
                assert got[-1].offset == len(got) - 1, f"something was skipped at step {step}"
            assert step > 10, "the client was not traced"
    assert [message.offset for message in got] == list(range(len(got)))


@pytest.mark.parametrize("read", [_read_next, _read_on])
def test_interrupted_anywhere_a_stream_does_not_skip_the_next_message(
    fake: FakeBroker, read: Callable[[millstream.Stream, list[Any]], None]
) -> None:
    """One that was taken and not handed out counted as finished."""
    _interrupt_reading(fake, read, itertools.count(), in_hand=1)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("read", [_read_next, _read_on, _read_batch])
@pytest.mark.parametrize("first", seeds(1, 10))
def test_interrupted_anywhere_while_it_fetches_a_stream_skips_nothing(
    fake: FakeBroker, read: Callable[[millstream.Stream, list[Any]], None], first: int
) -> None:
    """All of an answer was lost, or an answer was awaited that had come."""
    _interrupt_reading(fake, read, itertools.count(first, 10), in_hand=0)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("read", [_read_next, _read_on, _read_batch])
@pytest.mark.parametrize("first", seeds(1, 10))
def test_interrupted_anywhere_a_subscription_repeats_nothing_and_says_when_it_missed_something(
    broker: BrokerForTests, read: Callable[[Any, list[Any]], None], first: int
) -> None:
    got: list[Any] = []
    with broker.connect() as client, client.subscribe("t", timeout_s=2) as subscription:
        for step in itertools.count(first, 10):
            sent = client.publish_many("t", [b"1", b"2", b"3"])
            connections, before = subscription.reconnects, len(got)
            interrupted = _interrupted_at(step, partial(read, subscription, got))
            while subscription._transport is None:
                got += filter(None, [subscription.next(0.01)])
            last = client.publish("t", b"last")
            while not got or got[-1].offset < last.offset:
                read(subscription, got)
            offsets = [message.offset for message in got]
            assert offsets == sorted(set(offsets)), f"repeated at step {step}"
            if subscription.reconnects == connections:
                assert offsets[before:] == list(range(sent[0].offset, last.offset + 1)), f"missed at step {step}"
            if not interrupted:
                break
        assert step > 10, "the client was not traced"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("first", seeds(1, 4))
@pytest.mark.parametrize("auto_ack", [False, True])
def test_interrupted_anywhere_a_queue_goes_on(first: int, auto_ack: bool) -> None:
    """Its turn to read was taken for ever, or it waited for messages that it had not asked for, or had forgotten."""

    def work(queue: millstream.Queue) -> None:
        message = queue.next(2)
        assert message is not None, f"nothing came after step {step}"
        message.ack()

    with FakeQueues() as fake, millstream.connect(fake.address, timeout_s=2) as client:
        client.publish_many("t", [b"x"] * 1500)
        with client.queue("t", prefetch=3, auto_ack=auto_ack) as queue:
            for step in itertools.count(first, 4):
                if not _interrupted_at(step, partial(work, queue)):
                    break
                work(queue)
            assert step > 100, "the client was not traced"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("first", seeds(1, 3))
def test_interrupted_anywhere_while_it_looks_for_its_connection_a_queue_loses_nothing_that_came(
    monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    """What was received then and not noted was missing between what came before and after it."""
    monkeypatch.setattr(blocking_queue, "_NEGLECT_S", 60)  # the background thread does not read instead
    with FakeQueues() as fake, millstream.connect(fake.address, timeout_s=2) as client:
        for step in itertools.count(first, 3):
            topic = f"t{step}"
            with client.queue(topic) as queue:
                assert queue.next(0) is None
                client.publish(topic, b"x")
                transport = queue._transport
                assert transport is not None
                assert transport.wait(2)
                queue._turns._read_s = 0
                interrupted = _interrupted_at(step, queue._look)
                message = queue.next(2)
                assert message is not None, f"nothing came after step {step}"
            if not interrupted:
                break
        assert step > 50, "the client was not traced"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("first", seeds(1, 4))
@pytest.mark.parametrize("auto_ack", [False, True])
def test_interrupted_anywhere_what_is_ready_is_handed_out_later(first: int, auto_ack: bool) -> None:
    """It had been taken off the shelf, and was not in the hand yet."""
    with FakeQueues() as fake, millstream.connect(fake.address, timeout_s=2) as client:
        for step in itertools.count(first, 4):
            topic = f"t{step}"
            client.publish_many(topic, [b"first", b"ready", b"later"])
            with client.queue(topic, prefetch=2, auto_ack=auto_ack) as queue:
                done = queue.next(2)
                assert done is not None
                done.ack()
                assert queue._wait_for(lambda: bool(queue._leasing._ready), 2)
                interrupted = _interrupted_at(step, partial(queue._advance, 2))
                values = (message.value for message in iter(partial(queue.next, 2), None))
                assert b"ready" in values, f"it did not come after step {step}"
            if not interrupted:
                break
        assert step > 50, "the client was not traced"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("first", seeds(1, 8))
def test_interrupted_anywhere_the_close_of_a_queue_can_be_repeated_and_leaves_no_thread(first: int) -> None:
    """The lock of the Event that wakes its background thread was taken for ever, and that thread waited for it."""
    with FakeQueues() as fake, millstream.connect(fake.address, timeout_s=2) as client:
        for step in itertools.count(first, 8):
            queue = client.queue("t", prefetch=3)
            (background,) = [thread for thread in threading.enumerate() if thread.name.startswith("millstream-queue-")]
            interrupted = _interrupted_at(step, queue.close)
            queue.close()
            background.join(5)
            assert not background.is_alive(), f"it goes on after step {step}"
            if not interrupted:
                break
        assert step > 100, "the client was not traced"


def test_interrupted_anywhere_who_waits_for_another_reader_leaves_the_guard_to_others() -> None:
    """It was let go of twice, which raised RuntimeError, or not at all."""
    turns, done = Turns(), threading.Event()
    reader = threading.Thread(target=turns.read, args=(lambda: done.wait(60) and None,))
    reader.start()

    def wait() -> None:
        turns.wait_for(lambda: False, 0.001, read=lambda _: None, over=lambda: False)

    def take() -> None:
        if turns.acquire(timeout=5):
            taken.append(step)
            turns.release()

    taken: list[int] = []
    for step in itertools.count():
        interrupted = _interrupted_at(step, wait)
        other = threading.Thread(target=take)
        other.start()
        other.join()
        assert step in taken, f"taken for ever at step {step}"
        if not interrupted:
            break
    assert step > 100, "the client was not traced"
    done.set()
    reader.join()


def test_a_signal_at_whatever_moment_stops_workers() -> None:
    """The handler waited for the lock of an Event that the code it had interrupted held."""
    main = threading.get_ident()

    def wait(stop: Flag) -> None:
        while not stop.wait(0.001):
            pass

    for step in range(200):
        helper = threading.Timer(5, signal.pthread_kill, (main, signal.SIGUSR1))
        helper.start()
        with _stop_signals() as stop:
            _interrupted_at(step, partial(wait, stop), signal.SIGTERM)
        helped = helper.finished.is_set()
        helper.cancel()
        assert not helped, f"it hung at step {step}"


def test_interrupted_anywhere_a_commit_does_not_stop_the_membership(fake: FakeBroker) -> None:
    """It left a lock taken that the thread which sends heartbeats waited for, for ever."""
    with millstream.connect(fake.address, timeout_s=5) as client:
        client.publish("t", b"x")
        fake.grant = [("t", 0)]
        with client.stream("t", group="g", commit="manual") as stream:
            message = stream.next(5)
            assert message is not None
            for step in itertools.count():
                if not _interrupted_at(step, partial(stream.commit, message)):
                    break
                stream.commit(message)
            assert step > 100, "the client was not traced"


@pytest.fixture
def helped() -> Iterator[list[bool]]:
    """Whoever hangs in the main thread is interrupted after a while, and this list is not empty."""
    main = threading.get_ident()
    helped: list[bool] = []

    def help_out() -> None:
        helped.append(True)
        signal.pthread_kill(main, signal.SIGUSR1)

    timer = threading.Timer(20, help_out)
    timer.start()
    yield helped
    timer.cancel()


@pytest.mark.parametrize("end", [millstream.Queue.drain, millstream.Queue.close])
def test_the_handler_of_a_signal_may_end_a_queue_that_is_sending(
    end: Callable[[millstream.Queue], None], helped: list[bool]
) -> None:
    """It waited for a lock that the code it had interrupted held, for ever."""
    with FakeQueues() as fake, millstream.connect(fake.address, timeout_s=2) as client:
        client.publish_many("t", [b"x"] * 2)
        queue = client.queue("t", prefetch=4)
        assert queue.next(5) is not None  # the other one was leased ahead
        signal.signal(signal.SIGUSR2, lambda *_: end(queue))
        assert queue._transport is not None
        with contextlib.suppress(Interrupted), queue._turns, queue._transport._send_lock:
            signal.raise_signal(signal.SIGUSR2)
        assert not helped, "it hung"
        fake.wait_for(lambda: 1 in fake.released)
        queue.close()
        fake.wait_for(lambda: 1 in fake.closed_consumers)


@pytest.mark.parametrize("end", [millstream.Queue.drain, millstream.Queue.close])
@pytest.mark.parametrize("first", seeds(1, 4))
def test_the_handler_of_a_signal_may_end_a_queue_wherever_it_is(
    end: Callable[[millstream.Queue], None], first: int, helped: list[bool]
) -> None:
    """A close waited for an answer that only the code could read which it had interrupted."""
    with FakeQueues() as fake, millstream.connect(fake.address, timeout_s=2) as client:
        client.publish_many("t", [b"x"] * 10)
        for step in range(first * 5, 1200, 20):
            queue = client.queue("t", prefetch=4)

            def on_signal(*_: object, queue: millstream.Queue = queue) -> None:
                end(queue)

            def work(queue: millstream.Queue = queue) -> None:
                while (message := queue.next(2)) is not None:
                    message.release()

            signal.signal(signal.SIGUSR2, on_signal)
            assert _interrupted_at(step, work, signal.SIGUSR2)
            assert not helped, f"it took too long up to step {step}"
            queue.close()
        fake.wait_for(lambda: len(set(fake.closed_consumers)) == len(fake.opened))


@pytest.mark.parametrize("first", seeds(1, 5))
def test_interrupted_anywhere_who_waits_for_a_broker_leaves_the_way_to_it_to_others(
    fake: FakeBroker, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    """The lock of an Event was let go of twice, which raised RuntimeError, or not at all."""
    with millstream.connect(fake.address, timeout_s=5) as client:
        client.publish("t", b"first")
        open_transport = Transport.open
        refusals: list[None] = []

        def open_later(*arguments: Any, **options: Any) -> Transport:
            if refusals:
                refusals.pop()
                raise ConnectionLost("not yet")
            return open_transport(*arguments, **options)

        monkeypatch.setattr(Transport, "open", open_later)
        monkeypatch.setattr(Backoff, "next_s", lambda _: 0.001)
        for step in itertools.count(first, 5):
            connection = client._link.current
            assert connection is not None
            connection.close()
            refusals[:] = [None]
            interrupted = _interrupted_at(step, partial(client._link.get, time.monotonic() + 5))
            other = threading.Thread(target=client.publish, args=("t", b"next"), daemon=True)
            other.start()
            other.join(10)
            assert not other.is_alive(), f"nobody can publish after step {step}"
            if not interrupted:
                break
        assert step > 100, "the client was not traced"


def _flush(producer: millstream.Producer, problems: list[Exception]) -> None:
    try:
        producer.flush()
    except Interrupted:
        raise
    except Exception as problem:
        problems += (problem,)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("first", seeds(1, 4))
def test_interrupted_anywhere_a_flush_says_so_and_the_producer_goes_on(fake: FakeBroker, first: int) -> None:
    """The lock that it lets go of while it waits was let go of twice, or not at all; and half of a frame was sent."""
    problems: list[Exception] = []
    sent = 0
    with millstream.connect(fake.address, timeout_s=2) as client, client.producer("t", linger_ms=60_000) as producer:
        for step in itertools.count(first, 4):
            for _ in range(2):
                producer.send(b"%d" % sent)
                sent += 1
            if not _interrupted_at(step, partial(_flush, producer, problems)):
                break
            assert not problems, f"it raised something else at step {step}"
            assert producer._lock.acquire(timeout=5), f"taken for ever at step {step}"
            producer._lock.release()
            producer.flush(5)
        assert step > 100, "the client was not traced"
    assert fake.values("t") == [b"%d" % number for number in range(sent)]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("first", seeds(1, 4))
def test_interrupted_anywhere_a_flush_of_what_is_refused_is_followed_by_one_that_says_so(
    fake: FakeBroker, first: int
) -> None:
    """The error was in nobody's hands, and the next flush said that everything is stored."""
    problems: list[Exception] = []
    with millstream.connect(fake.address, timeout_s=2) as client, client.producer("t", linger_ms=60_000) as producer:
        for step in range(first, 2000, 4):  # how many there are depends on who takes in the answer
            fake.faults.clear()
            fake.faults += [Fault(error=QuotaExceeded("full"))] * 5
            producer.send(b"x")
            problems.clear()
            _interrupted_at(step, partial(_flush, producer, problems))
            if not problems:
                _flush(producer, problems)
            assert [type(problem) for problem in problems] == [QuotaExceeded], f"nobody was told after step {step}"
        assert fake.values("t") == []


def test_a_flush_that_is_interrupted_while_another_thread_has_the_lock_leaves_it_to_that(fake: FakeBroker) -> None:
    """It had let go of the lock to wait, was interrupted when it took it again, and let go of it once more."""
    main = threading.get_ident()
    came_out = threading.Event()
    mine: list[bool] = []
    with millstream.connect(fake.address, timeout_s=2) as client, client.producer("t") as producer:
        fake.hold_answers.clear()
        producer.send(b"x")

        def interrupt() -> None:
            fake.wait_for(lambda: bool(fake.publishes))
            with producer._lock:
                came_out.wait(0.2)  # it waits for the lock by then
                signal.pthread_kill(main, signal.SIGUSR1)
                came_out.wait(5)
                mine.append(producer._lock._is_owned())

        other = threading.Thread(target=interrupt)
        other.start()
        with pytest.raises(Interrupted):
            producer.flush(10)
        came_out.set()
        other.join(5)
        assert mine == [True]
        fake.hold_answers.set()
    assert fake.values("t") == [b"x"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("first", seeds(1, 4))
def test_interrupted_anywhere_a_send_loses_and_repeats_nothing_of_others(fake: FakeBroker, first: int) -> None:
    """A batch that was on its way from one place to the next was in neither, without a word."""
    with millstream.connect(fake.address, timeout_s=2) as client, client.producer("t", linger_ms=0) as producer:
        for step in itertools.count(first, 4):
            producer.send(b"before %d" % step)
            interrupted = _interrupted_at(step, partial(producer.send, b"interrupted %d" % step))
            producer.send(b"behind %d" % step)
            producer.flush(5)
            if not interrupted:
                break
        assert step > 100, "the client was not traced"
    stored = fake.values("t")
    assert len(stored) == len(set(stored)), "stored twice"
    others = [value for value in stored if value is not None and not value.startswith(b"interrupted")]
    assert others == [
        b"%b %d" % (when, number) for number in range(first, step + 1, 4) for when in (b"before", b"behind")
    ]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("first", seeds(1, 4))
def test_interrupted_anywhere_a_close_that_gives_up_is_followed_by_one_that_says_so(
    fake: FakeBroker, first: int
) -> None:
    """What it gave up was taken out of one place and not yet in the other: nobody was told."""
    with millstream.connect(fake.address, timeout_s=5) as client:
        for step in itertools.count(first, 4):
            said: list[object] = []
            producer = client.producer("t", linger_ms=60_000, on_error=said.append)
            producer._target = replace(producer._target, port=1)
            producer._disconnect()  # so that nothing is sent, and no answer is read
            producer.send(b"x")
            interrupted = _interrupted_at(step, partial(_give_up, producer, said))
            _give_up(producer, said)
            assert said, f"nobody was told after step {step}"
            assert not producer._thread.is_alive(), f"it goes on after step {step}"
            if not interrupted:
                break
        assert step > 100, "the client was not traced"


def _give_up(producer: millstream.Producer, said: list[object]) -> None:
    try:
        producer.close(0)
    except RequestTimeout:
        pass  # the reason for giving up, which says nothing about what was given up
    except ConnectionLost as error:
        said += (error,)


def test_a_stream_that_is_interrupted_before_it_looks_leaves_no_coroutine_behind(
    fake: FakeBroker, client: millstream.Client
) -> None:
    """Where a function begins is where Python looks for signals."""
    fake.topic("t")
    stream = client.stream("t")
    client.publish("t", b"x")

    def interrupt(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code is blocking_stream._complete.__code__:
            sys.settrace(None)
            raise Interrupted

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        before = sys.gettrace()
        try:
            sys.settrace(interrupt)
            with pytest.raises(Interrupted):
                stream.seek("t", 0, "earliest")
        finally:
            sys.settrace(before)
    assert [str(warning.message) for warning in found if warning.category is RuntimeWarning] == []
    message = stream.next(10)
    assert message is not None
    assert message.value == b"x"
