"""The synchronous producer: messages are batched by whoever sends them, in the caller's own thread.

`send` puts a message on a pile and returns.  The call that fills a batch also encodes and sends it; a background thread
does what no caller does: batches that waited long enough (linger), answers while nobody sends, what a broker does not
take at once, reconnecting, giving up.  Both work on the same state under one lock, which the fast path of `send` does
not take (see accumulator.py), and under which nobody ever waits for the broker.

Of the threads that wait for something, one waits for the connection, for all; the others are woken.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import threading
import time
import weakref
from _thread import RLock, get_ident
from collections.abc import Callable
from typing import Final, Unpack

import mmh3

from millstream.client.address import Target
from millstream.client.backoff import Backoff
from millstream.client.blocking.bell import Bell
from millstream.client.blocking.knock import Knock
from millstream.client.blocking.limit import Limit
from millstream.client.blocking.resting import IDLE_S, woken, work
from millstream.client.blocking.transport import Transport
from millstream.client.delivery import SealedBatch
from millstream.client.forks import belongs_to_one_process
from millstream.client.messages import BatchFailure, ProducerStats
from millstream.client.metadata import Topic
from millstream.client.outbox import Outbox, left_all, may_be_lost
from millstream.client.publishing import Goodbye, encode_goodbye
from millstream.client.settings import ProducerSettings
from millstream.client.values import HeaderItems, Headers, Key, SendOptions, Value, make_entry
from millstream.entries import AnyEntry
from millstream.errors import ConnectionLost, InvalidArgument, MillstreamError

__all__ = ["Producer"]

_log = logging.getLogger("millstream.client")

_hash: Final = mmh3.hash
#: How long callers are trusted to take in answers by themselves.
_BUSY_S: Final = 0.005
#: The shortest that a broker may take nothing before its connection is given up, however little time `send` has.
_WRITE_S_MIN: Final = 1.0
#: Who waits for the connection looks around this often: what it waits for may change without a word of the broker's.
_LOOK_S: Final = 0.05
#: How long the thread of a producer that is closed is waited for at least, and at most: it may be connecting.
_END_S: Final = 0.5
_END_S_MAX: Final = 5.0
#: How long the end of the program waits for what its producers have taken.
_EXIT_S: Final = 5.0
_EXIT_S_MIN: Final = 0.1
#: The number of the question whether everything was taken; those of batches begin with 1.
_GOODBYE: Final = 0

_live: Final[weakref.WeakSet[Producer]] = weakref.WeakSet()


class Producer:
    """A producer for one topic.  It batches messages and sends them in order, each exactly once.

    The next `send`, `flush` or `close` raises the first error; `on_error` is told all of them.  After an error the
    producer continues.  It is safe to share between threads.  A producer that is dropped without `close` ends when it
    has delivered what it has taken.
    """

    def __init__(
        self,
        target: Target,
        topic: Topic,
        settings: ProducerSettings,
        identity: int,
        *,
        new_identity: Callable[[], int],
        look_up: Callable[[str], Topic],
        on_error: Callable[[BatchFailure], None] | None,
    ) -> None:
        self._target = target
        self._new_identity = new_identity
        self._look_up = look_up
        self._on_error = on_error
        self._outbox = Outbox(topic, settings, identity, request_timeout_s=target.timeout_s)
        self._accumulator = self._outbox.accumulator
        self._lock = RLock()
        #: Threads that wait until something is settled, and the one among them that waits for the connection.
        self._waiting: dict[Knock, None] = {}
        self._driver = 0
        self._wake = Knock()
        self._asleep = False
        self._busy = 0
        self._closing = False
        self._ended = False
        self._is_copy = False
        self._goodbye = Goodbye()
        #: Rings beside `_wake`: without confirmations the thread that rests listens to the broker meanwhile.
        self._bell = None if self._outbox.wants_answers else Bell()
        self._connections = 1
        self._looking: threading.Thread | None = None
        self._transport: Transport | None = self._connect(target.timeout_s)
        given = (weakref.ref(self), self._wake, self._bell)
        self._thread = threading.Thread(target=work, args=given, name=f"millstream-producer-{topic.name}", daemon=True)
        self._thread.start()
        belongs_to_one_process(self)
        _live.add(self)

    # --- sending -------------------------------------------------------------------------------------------------

    def send(
        self,
        value: Value = None,
        key: Key = None,
        headers: Headers | HeaderItems | None = None,
        **options: Unpack[SendOptions],
    ) -> None:
        """Buffer a message to be sent.

        Returns at once, unless `buffer_bytes` are waiting already.  Then it blocks until there is room, and raises
        RequestTimeout (the message is not taken) after `send_timeout_s`.

        Headers may also be pairs, as `Message.header_items` has them; then a name may occur several times.
        """
        if type(value) is bytes and headers is None and not options:
            accumulator = self._accumulator
            if key is None:
                pile = accumulator.sticky
                left = pile.left - len(value) - pile.surcharge
                if left > 0:
                    pile.left = left
                    pile.entries.append(value)
                    return
            elif type(key) is bytes:
                piles = accumulator.piles
                pile = piles[_hash(key, 0, False) % len(piles)]
                left = pile.left - len(value) - len(key) - pile.surcharge
                if left > 0:
                    accumulator.special = True
                    pile.left = left
                    pile.entries.append((value, key))
                    return
        entry, partition = make_entry(value, key, headers, **options), options.get("partition")
        if not self._accumulator.take(entry, partition):
            self._send_closely(entry, partition)
        elif self._ended:  # closed in between
            self._report_late()

    def _send_closely(self, entry: AnyEntry, partition: int | None) -> None:
        """The slow path: whatever may be in the way of a message is dealt with here."""
        outbox = self._outbox
        self._check_thread()
        self._accumulator.check_size(entry)
        if not outbox.knows(partition):
            self._look_again()
        with self._lock:
            taken = self._take(entry, partition)
        if not taken:
            limit = Limit(outbox.settings.send_timeout_s)
            self._await(lambda: self._take(entry, partition), limit, "no room in the producer's buffer")
        self._report()

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait until everything sent so far is confirmed.  Raises the first error, or RequestTimeout."""
        self._check_thread()
        self._flush(self._limit(timeout_s))

    def _send_all(self) -> list[SealedBatch]:
        """Have everything on its way; what is not settled yet."""
        with self._lock:
            if self._ended:
                return []
            self._outbox.seal_all()
            self._pump()
            self._wake_up()
            return self._outbox.marks()

    def _flush(self, limit: Limit) -> None:
        outbox, marks = self._outbox, self._send_all()
        left = left_all(marks, lambda: None if outbox.wants_answers else self._transport)
        self._await(left, limit, "messages are not confirmed yet")
        self._report()
        self._raise_failure()

    def close(self, timeout_s: float | None = None) -> None:
        """Flush, then close the connection.  Raises the first error that was not raised before.

        Without confirmations, it waits until the broker has taken everything.  Messages that other threads send from
        now on are refused.  A second close waits for the same messages, for its own time.
        """
        self._check_thread()
        limit = self._limit(timeout_s)
        with self._lock:
            self._closing = True
            # Before the flush: behind it, a message on the fast path would be taken and never sent.
            self._accumulator.close_gate()
        try:
            self._flush(limit)
            while not self._accumulator.empty and not self._ended:  # threads were past the gate when it closed
                self._flush(limit)
            if not self._outbox.wants_answers:
                self._say_goodbye(limit)
        finally:
            with self._lock:
                self._ended = True  # first: a thread that is past the gate even now sees it, or is seen
                self._give_up()
                _live.discard(self)
                self._wake_up()
                self._knock_at_all()
                if self._transport is not None:
                    self._transport.close()  # also wakes the thread if it waits for answers
            self._report()
            if threading.current_thread() is not self._thread:
                self._thread.join(timeout=min(_END_S_MAX, max(_END_S, limit.left_s)))
        self._report_late()

    def _give_up(self) -> None:
        """Fail what was taken and is not sent any more; not in a child, whose copy the parent sends."""
        if not self._is_copy:
            self._outbox.abandon(ConnectionLost("the producer was closed"))

    def _report_late(self) -> None:
        """A message that was past the gate when it closed may have come too late even to be given up."""
        with self._lock:
            self._give_up()
        self._report()
        self._raise_failure()

    def _say_goodbye(self, limit: Limit) -> None:
        """Let the broker take everything that was sent, as nothing is confirmed.

        While the system keeps it for the broker, a socket that is closed loses it with the next thing that the broker
        says.
        """
        with self._lock:
            transport, goodbye = self._transport, self._goodbye
            if transport is None or self._ended:
                return
            goodbye.wanted = True
            self._pump()
        self._await(
            lambda: goodbye.heard or self._transport is not transport,
            limit,
            "what was sent last may be lost: the broker has not taken it",
        )
        if not goodbye.heard:
            self._raise_failure()
            raise may_be_lost(transport.lost)

    def _limit(self, timeout_s: float | None) -> Limit:
        return Limit(self._outbox.settings.delivery_timeout_s + 2 * IDLE_S if timeout_s is None else timeout_s)

    def __enter__(self) -> Producer:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
            return
        with contextlib.suppress(MillstreamError):  # the exception that ended the block says more
            self.close()

    def _forked(self) -> None:
        """What waits here is sent by the parent, whose thread and connection this is."""
        self._lock = RLock()
        self._closing = self._ended = self._is_copy = True
        self._driver = 0  # who waited for the connection is in the parent
        _live.discard(self)
        self._accumulator.close_gate()

    def __del__(self) -> None:
        if not getattr(self, "_ended", True) and not self._accumulator.empty:  # in another thread it slipped through
            woken.add(self)
            self._wake_up()

    @property
    def stats(self) -> ProducerStats:
        self._check_thread()
        with self._lock:
            return self._outbox.stats(self._connections)

    def _check_thread(self) -> None:
        """A signal's handler may have interrupted this thread in the middle of a change: to wait for its end would be
        to wait for itself, and to begin another one would spoil both."""
        if self._lock._is_owned():  # type: ignore[attr-defined]
            raise InvalidArgument(
                "a signal's handler has interrupted the producer and cannot use it: "
                "let the handler set a flag or raise, and close the producer where the program goes on"
            )

    # --- under the lock ------------------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._closing:
            raise InvalidArgument("the producer is closed")
        self._outbox.raise_failure()

    def _take(self, entry: AnyEntry, partition: int | None) -> bool:
        """Take a message, unless there is no room."""
        outbox = self._outbox
        self._check()
        if outbox.full:
            return False
        outbox.add(entry, partition)
        if not outbox.settings.linger_ms:
            outbox.seal_all()
        self._busy += 1
        self._pump()
        if self._asleep:
            woken.add(self)
            self._wake_up()
        return True

    def _wake_up(self) -> None:
        self._wake.knock()
        if self._bell is not None:
            self._bell.ring()

    def _pump(self, *, listen: bool = False) -> None:
        """Take in answers, send what may be sent.  Waits for nothing: what the system does not take goes later.

        `listen`: to what the broker says by itself, too, if no answer is under way.
        """
        transport, outbox = self._transport, self._outbox
        if transport is None:
            return
        try:
            # Another thread that waits for the connection would be woken, and find nothing any more.
            if (listen or self._expects) and self._driver in (0, get_ident()):
                while transport.receive(0):
                    self._take_answers(transport)
            if transport.unsent:
                self._push_on(transport)
            if transport.goaway:
                if not outbox.wants_answers:
                    self._goodbye.wanted = True
                    transport.check_silence(time.monotonic())  # one that has vanished never says so
                elif not self._expects:
                    self._disconnect()
                    return
            # What no answer is awaited for is settled when it is sent: it stays where it counts until there is room.
            while not (transport.unsent or transport.goaway) and (frame := outbox.next_frame()) is not None:
                transport.offer(*frame[1:])
            if self._goodbye.wanted and not self._goodbye.asked:
                self._goodbye.asked = True
                transport.offer(encode_goodbye(_GOODBYE))
            if self._goodbye.heard and transport.goaway:
                self._disconnect()
        except ConnectionLost:
            self._disconnect()
        except BaseException:  # an interrupt of the user's: half of a frame may be sent, or an answer forgotten
            self._disconnect()
            raise

    def _push_on(self, transport: Transport) -> None:
        transport.offer()
        if not transport.unsent:
            self._knock_at_all()

    @property
    def _expects(self) -> bool:
        """Whether an answer is under way."""
        return self._outbox.delivery.flying > 0 or (self._goodbye.asked and not self._goodbye.heard)

    def _take_answers(self, transport: Transport) -> None:
        for frame in transport.frames():
            assert frame.correlation is not None
            if frame.correlation == _GOODBYE and self._goodbye.asked:
                self._goodbye.heard = True
            else:
                self._outbox.answered(frame.correlation, frame.payload)
        self._knock_at_all()

    def _knock_at_all(self) -> None:
        while self._waiting:
            self._waiting.popitem()[0].knock()

    def _disconnect(self) -> None:
        if self._transport is not None:
            self._transport.close()
            goodbye, self._goodbye = self._goodbye, Goodbye()
            if goodbye.asked and not goodbye.heard:
                self._outbox.doubt(self._transport.lost)
            self._transport = None
        self._outbox.delivery.disconnected()
        self._wake_up()
        self._knock_at_all()

    # --- without the lock ----------------------------------------------------------------------------------------

    def _await(self, reached: Callable[[], bool], limit: Limit, what: str) -> None:
        """Wait until something is the case, which is asked under the lock; drive the connection if nobody else does.

        It is waited without the lock, not with the lock let go of and taken again: whatever interrupts us, it is clear
        who has it.
        """
        knock, me, backoff = Knock(), get_ident(), Backoff()
        delivers = me == self._thread.ident
        try:
            while True:
                with self._lock:
                    if reached() or self._ended:
                        return
                    transport = self._transport if self._expects or self._unsent else None
                    drives = transport is not None and self._driver in (0, me) and not delivers
                    if drives:
                        self._driver = me
                    elif not delivers:
                        self._waiting[knock] = None
                left_s = limit.left_s
                if left_s <= 0:
                    raise limit.over(what)
                if delivers:  # `on_error` has called us back: nobody else would
                    if self._deliver(backoff):
                        self._wake.wait(min(left_s, IDLE_S))
                elif transport is not None and drives:
                    transport.wait(min(left_s, _LOOK_S))
                    with self._lock:
                        self._pump()
                else:
                    knock.wait(min(left_s, IDLE_S))
        finally:
            if self._driver == me:
                self._driver = 0  # without a call before it: whatever interrupts us now, others may drive
                with self._lock:
                    self._knock_at_all()
                    self._wake_up()
            if knock in self._waiting:
                with self._lock:
                    self._waiting.pop(knock, None)

    @property
    def _unsent(self) -> bool:
        return self._transport is not None and bool(self._transport.unsent)

    def _report(self) -> None:
        """Tell `on_error`, which may call us back."""
        while self._outbox.delivery.failed:
            with self._lock:
                failure = self._outbox.next_failure()  # one by one: if it raises, the others are still there
            if failure is not None and self._on_error is not None:
                self._on_error(failure)

    def _raise_failure(self) -> None:
        with self._lock:
            self._outbox.raise_failure()

    # --- the background thread -----------------------------------------------------------------------------------

    def _work(self) -> None:
        """Until there is nothing to do, or the producer has ended."""
        backoff = Backoff()
        while not self._ended:
            try:
                if self._deliver(backoff):
                    return
            except Exception:  # no memory, say; without this thread what is sent would wait for ever
                _log.exception("what was sent to %r could not be delivered; trying again", self._outbox.topic.name)
                with self._lock:
                    self._disconnect()
                self._pause(backoff)
        if self._bell is not None:
            with self._lock:  # nobody rings it meanwhile: its descriptor may be another's a moment later
                self._bell.close()

    def _deliver(self, backoff: Backoff) -> bool:
        """Do what is due, then wait for what is next; True when there is nothing to wait for."""
        with self._lock:
            if self._asleep:
                self._rested()
            busy, self._busy = self._busy, 0
            idle = self._tick()
            transport = self._transport
            wants_identity = self._outbox.delivery.wants_identity
            wait_s = max(0.0002, self._outbox.wait_s(IDLE_S))
        self._report_quietly()
        if self._outbox.outdated() and not idle:
            self._look_beside()
        if transport is None and not idle:
            self._reconnect(backoff)
        elif wants_identity:
            if self._renew():
                backoff.reset()
            else:
                self._wake.wait(backoff.next_s())
        elif idle:
            return True
        elif transport is not None and not self._driver and (transport.unsent or (self._expects and not busy)):
            transport.wait(min(wait_s, _LOOK_S))
        elif self._driver:
            self._wake.wait(wait_s)
        else:
            # While callers keep sending they take in the answers themselves; waking for each would slow them down.
            self._wake.wait(min(wait_s, _BUSY_S))
        return False

    def _tick(self) -> bool:
        """Seal what has waited, give up what waited too long, move what can move; True when there is nothing to do."""
        outbox = self._outbox
        outbox.seal_due()
        if outbox.overdue():
            self._disconnect()
        if outbox.expire():
            self._knock_at_all()
        self._pump(listen=True)
        self._asleep = not self._unsent and outbox.come_to_rest()
        return self._asleep

    def _rested(self) -> None:
        self._asleep = False
        woken.discard(self)
        if self._transport is not None:
            try:
                self._transport.keep_alive(time.monotonic())
            except ConnectionLost:
                self._disconnect()

    def _connect(self, timeout_s: float) -> Transport:
        transport = Transport.open(self._target, timeout_s=timeout_s)
        transport.hurry(max(_WRITE_S_MIN, self._outbox.settings.send_timeout_s))
        flow = self._outbox.flow
        flow.forget()
        transport.on_push = flow.hear
        return transport

    def _reconnect(self, backoff: Backoff) -> None:
        try:
            transport = self._connect(min(self._target.timeout_s, 10))
        except MillstreamError as error:
            self._outbox.trouble = str(error)
            self._pause(backoff)
            return
        backoff.reset()
        with self._lock:
            if self._ended:
                transport.close()
                return
            self._outbox.trouble = ""
            self._transport = transport
            self._connections += 1

    def _pause(self, backoff: Backoff) -> None:
        self._wake.forget()
        self._wake.wait(backoff.next_s())

    def _renew(self) -> bool:
        try:
            identity = self._new_identity()
        except MillstreamError:
            return False
        with self._lock:
            self._outbox.delivery.renew(identity)
        return True

    def _look_beside(self) -> None:
        """Look again, and go on with what is to be delivered: the answer may take as long as a call may."""
        self._outbox.topic.loaded_s = time.monotonic()
        if self._looking is not None and self._looking.is_alive():
            return
        looking = threading.Thread(target=self._look_again, name="millstream-producer-partitions", daemon=True)
        with contextlib.suppress(RuntimeError):  # no more threads, or the program ends: then another time
            looking.start()
            self._looking = looking

    def _look_again(self) -> None:
        """More partitions may have been added to the topic."""
        self._outbox.topic.loaded_s = time.monotonic()  # whatever comes of it, not again at once
        with contextlib.suppress(MillstreamError):
            topic = self._look_up(self._outbox.topic.name)
            with self._lock:
                self._outbox.learn(topic)

    def _report_quietly(self) -> None:
        try:
            self._report()
        except Exception as problem:  # a callback of the user's; it must not end the thread that delivers
            with self._lock:
                delivery = self._outbox.delivery
                delivery.failure = delivery.failure or InvalidArgument(f"on_error raised {problem!r}")


@atexit.register
def _close_all() -> None:
    """A program that ends without closing its producers still sends what they have taken."""
    producers, limit = list(_live), Limit(_EXIT_S)
    for producer in producers:  # first of all: one may use up the time of all
        with contextlib.suppress(MillstreamError):
            producer._send_all()
    for producer in producers:
        try:
            producer.close(max(_EXIT_S_MIN, limit.left_s))
        except MillstreamError as error:
            _log.error("a producer was not closed, and messages were lost at the end of the program: %s", error)
        except Exception:  # of a callback of the user's: the others have messages to send
            _log.exception("a producer could not tell what became of its messages at the end of the program")
