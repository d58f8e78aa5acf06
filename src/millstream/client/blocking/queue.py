"""The synchronous queue: messages to work on, leased ahead, settled together.

The thread that waits for a message reads the connection (turns.py).  A background thread does what must happen while
the user's code runs: it says what has lingered, makes leases longer, gives up those that are over, and takes in what
was leased ahead, which could not be kept alive if nobody knew of it.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Final

from millstream.client.address import Target
from millstream.client.backoff import Backoff
from millstream.client.blocking.bell import Bell
from millstream.client.blocking.connection import Connection
from millstream.client.blocking.knock import Knock
from millstream.client.blocking.limit import Limit
from millstream.client.blocking.transport import Transport
from millstream.client.blocking.turns import Turns
from millstream.client.forks import belongs_to_one_process
from millstream.client.leases import Lease, QueueMessage, delay_ms
from millstream.client.leasing import LEASE_MESSAGES_MAX, LEASE_WAIT_MS, Leasing, QueueStats, Ticket
from millstream.client.queue_requests import open_call, uids_of
from millstream.client.settings import QueueSettings
from millstream.client.settling import raise_refused
from millstream.clock import monotonic_ms
from millstream.durations import Duration, parse_ms
from millstream.errors import ConnectionLost, InvalidArgument, MillstreamError, RequestTimeout
from millstream.wire import calls, queue_calls
from millstream.wire.leases import Settle, Settled

__all__ = ["Queue"]

_log = logging.getLogger("millstream.client")

#: A request is answered within its waiting time; a broker this much later is gone.
_SILENCE_S: Final = LEASE_WAIT_MS / 1000 + 15
#: A consumer that has not read for this long is busy; the background thread reads instead.
_NEGLECT_S: Final = 0.2
#: Nobody has seen for this long whether there still is a connection: before more is asked for, somebody looks.
_UNSEEN_S: Final = 0.01
_CLOSE_S: Final = 5.0
#: How long the end of the program waits for its queues; for one of them at least so long, whatever the others take.
_EXIT_S: Final = 1.0
_EXIT_S_MIN: Final = 0.05

_live: Final[weakref.WeakSet[Queue]] = weakref.WeakSet()


class Queue:
    """The messages of a queue group, each to be settled: `for message in queue`.

    Messages that were leased ahead and not handed out go back when the loop ends.  Messages may be settled in any
    thread; `next` and `lease` may be called in several.
    """

    def __init__(self, target: Target, settings: QueueSettings, call: Callable[[calls.Call, Any], Any]) -> None:
        self.group = settings.group
        self._target = target
        self._settings = settings
        self._call = call
        correlations = itertools.count(1)
        self._leasing = Leasing(
            settings,
            weakref.ref(self),
            QueueMessage,
            next_correlation=lambda: next(correlations) & 0x7FFF_FFFF,
            jitter=random.random,
        )
        #: Guards everything below.
        self._turns = Turns()
        self._transport: Transport | None = None
        self._backoff = Backoff()
        self._retry_at_s = 0.0
        self._heard_s = 0.0
        self._bell = Bell()
        self._failure: MillstreamError | None = None
        self._draining = False
        self._closed = False
        #: The background thread looks often only while there is something to look after.
        self._tended = False
        self._look_at_s = self._say_at_s = 0.0
        self._wake = Knock()

    def open(self) -> None:
        """Connect and open the queue.  Raises the error with which the broker refuses, or ConnectionLost."""
        self._connect(self._target.timeout_s)
        _live.add(self)
        belongs_to_one_process(self)
        name = f"millstream-queue-{self._settings.name}"
        threading.Thread(target=_tend, args=(weakref.ref(self), self._wake), name=name, daemon=True).start()

    def reply_with(self, reply: Callable[..., object]) -> None:
        """Set how messages of this queue are replied to.  `reply` must not keep the client alive."""
        self._leasing.reply = reply

    @property
    def stats(self) -> QueueStats:
        return self._leasing.stats

    # --- taking messages -----------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[QueueMessage]:
        """Messages as they come, until `drain` or `close`, or until none came for `timeout_s`."""
        leasing = self._leasing
        try:
            while True:
                for message in leasing.pending:
                    yield message
                    if leasing.disturbed or time.monotonic() >= leasing.pending_until_s:
                        break
                if not self._advance(self._settings.timeout_s):
                    return
        finally:
            self._give_back()

    def next(self, timeout_s: float | None = None) -> QueueMessage | None:
        """The next message, or None if none comes within `timeout_s` (None waits forever) or the queue is drained."""
        leasing = self._leasing
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            if not leasing.disturbed and time.monotonic() < leasing.pending_until_s:
                message = next(leasing.pending, None)
                if message is not None:
                    return message
            remaining_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
            if not self._advance(remaining_s):
                return None

    def lease(self, max: int = 1, wait: Duration = 0) -> list[QueueMessage]:  # noqa: A002 - the word for it
        """Lease up to `max` messages, as soon as there is one; an empty list if none comes within `wait`."""
        if type(max) is not int or not 1 <= max <= LEASE_MESSAGES_MAX:
            raise InvalidArgument(f"max is a number from 1 to {LEASE_MESSAGES_MAX}, not {max!r}")
        deadline_ms = monotonic_ms() + parse_ms(wait, "wait")
        while True:
            self._name()  # of what was kept because its caller was interrupted before it had a name
            with self._turns, _Whole(self):
                if kept := self._leasing.kept(max, monotonic_ms()):
                    return kept
            wait_ms = min(LEASE_WAIT_MS, deadline_ms - monotonic_ms()) if deadline_ms > monotonic_ms() else 0
            ticket = Ticket()
            try:
                messages: list[QueueMessage] = self._ask_for(ticket, max, wait_ms)
                self._name()
            except BaseException:
                with self._turns, _Whole(self):
                    self._leasing.abandon(ticket)
                    self._say(everything=False)
                raise
            with self._turns, _Whole(self):
                messages = self._leasing.still_held(messages) or self._leasing.kept(max, monotonic_ms())
            if messages or monotonic_ms() >= deadline_ms:
                return messages

    def _ask_for(self, ticket: Ticket, amount: int, wait_ms: int) -> Any:
        self._look()  # if it is lost, it is opened again first
        self._wait_for(lambda: self._transport is not None or self._failure is not None, self._target.timeout_s)
        with self._turns, _Whole(self):
            failure, self._failure = self._failure, None
            if self._closed or failure is not None or self._transport is None:
                raise failure or ConnectionLost("the queue is closed" if self._closed else "the broker is not there")
            frame = self._leasing.ask(amount, wait_ms, monotonic_ms(), ticket)
            if frame is not None:
                self._send(self._transport, frame.data)
        return self._result(ticket, wait_ms / 1000 + self._target.timeout_s)

    def _look(self) -> None:
        """Whether the connection was lost while nobody read: then what came by it is not ours any more."""
        transport = self._transport
        if transport is not None and self._turns.neglected(_UNSEEN_S):
            self._read_meanwhile(transport)

    def _result(self, ticket: Ticket, timeout_s: float) -> Any:
        self._wait_for(lambda: ticket.done, timeout_s)
        if not ticket.done:
            raise RequestTimeout("the broker did not answer in time")
        if ticket.error is not None:
            raise ticket.error
        return ticket.result

    def _advance(self, wait_s: float | None) -> bool:
        """Make sure that there is a message to hand out; False when none came in time."""
        deadline_s = None if wait_s is None else time.monotonic() + wait_s
        leasing = self._leasing
        self._look()
        while True:
            with self._turns, _Whole(self):
                if self._closed or self._draining:
                    return False
                leasing.wanted = True
                if not leasing.unknown and leasing.refill(monotonic_ms()):
                    if self._settings.auto_ack:
                        self._say(everything=False)  # nobody settles, so this is when there is room for more
                    return True
                if self._failure is not None:
                    failure, self._failure = self._failure, None
                    raise failure
            if leasing.unknown:
                self._name()
                continue
            remaining_s = None if deadline_s is None else deadline_s - time.monotonic()
            if not self._wait_for(self._worth_a_look, remaining_s):
                return False

    def _worth_a_look(self) -> bool:
        return self._leasing.ready or self._failure is not None or self._draining

    def _name(self) -> None:
        """Look up what the ids of messages are made of, for topics that are new to us."""
        while unknown := self._leasing.unknown:
            found: dict[str, list[int]] = {}
            with contextlib.suppress(MillstreamError):  # gone already
                found = uids_of(self._call(calls.Metadata(topics=unknown), list[calls.TopicMetadata]))
            with self._turns, _Whole(self):
                self._leasing.learn(unknown, found)
            transport = self._transport
            if transport is not None:  # it may have been lost meanwhile, and then nobody has noticed
                self._read_meanwhile(transport)

    # --- settling ------------------------------------------------------------------------------------------------

    def ack(self, messages: Iterable[QueueMessage]) -> list[Settled]:
        """Ack messages and wait for the broker's answer: one result per message."""
        return self._settle_many(Settle.ACK, messages, 0, "")

    def nack(
        self, messages: Iterable[QueueMessage], reason: str = "", *, retry_after: Duration | None = None
    ) -> list[Settled]:
        value = -1 if retry_after is None else delay_ms("retry_after", retry_after)
        return self._settle_many(Settle.NACK, messages, value, reason)

    def reject(self, messages: Iterable[QueueMessage], reason: str = "") -> list[Settled]:
        return self._settle_many(Settle.REJECT, messages, 0, reason)

    def release(self, messages: Iterable[QueueMessage]) -> list[Settled]:
        return self._settle_many(Settle.RELEASE, messages, 0, "")

    def extend(self, messages: Iterable[QueueMessage], duration: Duration) -> list[Settled]:
        """Keep messages for `duration`, as far as the group's `processing_ms` allows; see their `lease_deadline`."""
        return self._settle_many(Settle.EXTEND, messages, delay_ms("duration", duration), "")

    def flush(self) -> None:
        """Tell the broker now what was settled, without waiting for its answer."""
        with self._turns, _Whole(self):
            self._say(everything=True)

    def _settle_many(self, kind: Settle, messages: Iterable[QueueMessage], value: int, reason: str) -> list[Settled]:
        chosen = self._leasing.checked(kind, messages, reason)
        if not chosen:
            return []
        ticket = Ticket(missing=len(chosen))
        with self._turns, _Whole(self):
            self._leasing.settle(kind, chosen, value, reason, ticket)
            self._say(everything=False)
        results: list[Settled] = self._result(ticket, self._target.timeout_s)
        return results

    def _settle(self, kind: Settle, messages: Iterable[QueueMessage], value: int, reason: str, *, wait: bool) -> Any:
        """See leases.Owner."""
        if wait:
            (message,) = messages
            again = message.source.lease.settled_before(message.offset)
            (result,) = self._settle_many(kind, (message,), value, reason)
            raise_refused(result, again=again)
            return None
        chosen = self._leasing.checked(kind, messages, reason)
        with self._turns, _Whole(self):
            self._leasing.settle(kind, chosen, value, reason, None)
            if kind == Settle.EXTEND or self._leasing.urgent:
                self._say(everything=False)
        return None

    def _due(self, lease: Lease) -> None:
        with self._turns, _Whole(self):
            self._leasing.due(lease)
            if self._leasing.urgent:
                self._say(everything=False)

    def _history(self, message: QueueMessage) -> list[queue_calls.AttemptInfo]:
        call = queue_calls.DescribeMessage(id=message.id, group=self.group)
        found: list[queue_calls.QueuedMessage] = self._call(call, list[queue_calls.QueuedMessage])
        return [attempt for entry in found for attempt in entry.attempts]

    def _say(self, *, everything: bool) -> None:
        """Send what is due.  Whoever reads finds out if the connection is lost."""
        transport = self._transport
        if transport is not None:
            frames = self._leasing.outgoing(monotonic_ms(), everything=everything)
            if frames:
                self._send(transport, *[frame.data for frame in frames])

    def _send(self, transport: Transport, *frames: bytes) -> None:
        self._heard_s = time.monotonic()
        try:
            transport.send(*frames)
        except ConnectionLost as error:
            self._disconnect(transport, error)

    # --- reading -------------------------------------------------------------------------------------------------

    def _wait_for(self, done: Callable[[], bool], wait_s: float | None) -> bool:
        return self._turns.wait_for(done, wait_s, read=self._read, over=lambda: self._closed)

    def _read(self, wait_s: float) -> None:
        """Work on the connection until something arrives, or a moment has passed."""
        transport = self._connected(wait_s)
        if transport is not None:
            self._receiving(transport, partial(self._receive, transport, wait_s))

    def _read_meanwhile(self, transport: Transport) -> None:
        self._turns.read(partial(self._receiving, transport, partial(self._receive_all, transport)))

    def _receiving(self, transport: Transport, receive: Callable[[], None]) -> None:
        """Call `receive`, and note the end of the connection."""
        try:
            receive()
        except ConnectionLost as error:
            with self._turns:
                self._disconnect(transport, error)
        except MillstreamError:
            raise
        except BaseException as problem:
            # An interrupt of the user's: bytes may have been received that nobody knows of.
            with self._turns:
                self._disconnect(transport, ConnectionLost(f"interrupted by {problem!r}"))
            raise

    def _receive(self, transport: Transport, wait_s: float) -> None:
        with self._turns, _Whole(self):
            self._say(everything=True)  # nobody knows how long we wait
            retry_ms = self._leasing.retry_in_ms(monotonic_ms())
        if retry_ms is not None:
            wait_s = min(wait_s, retry_ms / 1000)
        if not transport.receive(0):
            if wait_s <= 0 or not self._bell.beside(transport.wait, wait_s):
                self._check_silence()
                return
            self._bell.clear()
            if not transport.receive(0):
                return
        self._accept(transport)
        if self._leasing.lay_unread:
            self._receive_all(transport)

    def _receive_all(self, transport: Transport) -> None:
        while transport.receive(0):  # what came before the connection was lost hides that it was
            self._accept(transport)
        self._leasing.lay_unread = False

    def _accept(self, transport: Transport) -> None:
        """Take in what has been received."""
        with self._turns, _Whole(self):
            leasing = self._leasing
            now_ms = monotonic_ms()
            self._heard_s = now_s = time.monotonic()
            try:
                for frame in transport.frames():
                    assert frame.correlation is not None
                    self._take_in(frame.correlation, frame.payload, now_ms)
            except BaseException as problem:  # also an interrupt of the user's: the rest of the frames would be lost
                self._disconnect(transport, ConnectionLost(f"interrupted by {problem!r}"))
                raise
            self._say(everything=False)
            if leasing.holds and (not self._tended or self._look_at_s > now_s + leasing.pace_ms / 1000):
                self._tended = True
                self._wake.knock()
        if transport.goaway:
            self.flush()
            raise ConnectionLost("the broker asks its clients to go")

    def _take_in(self, correlation: int, payload: memoryview, now_ms: int) -> None:
        try:
            self._leasing.accept(correlation, payload, now_ms)
        except ConnectionLost:
            raise
        except MillstreamError as error:  # for whoever asks for a message next
            self._failure = self._failure or error

    def _check_silence(self) -> None:
        if self._leasing.waits and time.monotonic() - self._heard_s > _SILENCE_S:
            raise ConnectionLost("the broker has not answered for too long")

    def _look_after(self) -> float:
        """What the background thread does; how long until it should look again."""
        with self._turns, _Whole(self):
            transport, leasing = self._transport, self._leasing
            # Somebody who is busy does not read.  What was sent ahead must be known to be kept, or given back; and what
            # the broker answers must be known before leases are judged.
            patience_s = min(_NEGLECT_S, leasing.pace_ms / 500) if leasing.wanted and not leasing.says else 0.0
            neglected = transport is not None and leasing.waits and self._turns.neglected(patience_s)
        if transport is not None and neglected:
            self._read_meanwhile(transport)
        with self._turns, _Whole(self):
            now_s = time.monotonic()
            leasing.tend(monotonic_ms())
            self._say(everything=now_s >= self._say_at_s)
            if now_s >= self._say_at_s:
                self._say_at_s = now_s + self._settings.ack_linger_ms / 1000
            self._tended = leasing.holds or (leasing.waits and self._turns.neglected(0))
            wait_s = min(_NEGLECT_S, leasing.pace_ms / 1000) if self._tended else 1.0
            self._look_at_s = now_s + wait_s
        return wait_s

    # --- connection ----------------------------------------------------------------------------------------------

    def _connected(self, wait_s: float) -> Transport | None:
        """The connection; opened again, with growing pauses, if it was lost."""
        if self._transport is not None:
            return self._transport
        now_s = time.monotonic()
        if now_s < self._retry_at_s:
            self._bell.wait(min(wait_s, self._retry_at_s - now_s))
            return None
        try:
            self._connect(min(self._target.timeout_s, self._backoff.patience_s(wait_s)))
        except MillstreamError as error:
            self._retry_at_s = time.monotonic() + self._backoff.next_s()
            if not error.retriable:
                self._failure = self._failure or error
            elif self._backoff.attempts == 1:
                _log.warning("queue %s: %s; trying again", self._settings.name, error)
            return None
        return self._transport

    def _connect(self, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        transport = Transport.open(
            self._target, timeout_s=timeout_s, receive_bytes=self._settings.max_bytes + 64 * 1024
        )
        try:
            opened = Connection(transport).call(
                open_call(self._settings), queue_calls.QueueOpened, deadline_s=deadline_s
            )
            with self._turns, _Whole(self):
                if self._closed:  # meanwhile, by another thread: it has closed the connection that it knew of
                    raise ConnectionLost("the queue is closed")
                self._leasing.opened(opened.consumer)
                self._transport = transport
                self._heard_s = time.monotonic()
        except BaseException:
            transport.close()
            raise
        self._backoff.reset()

    def _disconnect(self, transport: Transport, error: ConnectionLost) -> None:
        transport.close()
        if self._transport is transport:
            self._transport = None
            self._leasing.disconnected(error)
            if not self._closed:
                _log.info("queue %s: %s; connecting again", self._settings.name, error)

    def keep_alive(self, now_s: float) -> None:
        transport = self._transport
        if transport is not None:
            with contextlib.suppress(MillstreamError):  # whoever reads finds out
                transport.keep_alive(now_s)

    # --- end -----------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Hand out nothing more, and give back what was leased ahead; what is in hand can still be settled."""
        self._draining = True
        if self._turns.is_mine:
            self._end_soon(self._give_back)
        else:
            self._give_back()
        self._bell.ring()

    def _end_soon(self, end: Callable[[], None]) -> None:
        """Called in the handler of a signal: as soon as the code goes on that it has interrupted."""

        def run() -> None:
            with contextlib.suppress(MillstreamError):
                end()

        threading.Thread(target=run, name=f"millstream-queue-{self._settings.name}-end", daemon=True).start()

    def _give_back(self) -> None:
        with self._turns, _Whole(self):
            if not self._closed:
                self._leasing.give_back()
                self._say(everything=True)

    def close(self) -> None:
        """Tell the broker what was settled, give back everything else, and end the iteration."""
        wait_s = min(_CLOSE_S, self._target.timeout_s)
        if self._turns.is_mine:
            self._draining = True
            self._end_soon(partial(self._close, wait_s))
            self._bell.ring()
        else:
            self._close(wait_s)

    def _close(self, wait_s: float) -> None:
        self._say_goodbye(wait_s)
        # Also when it was closed before: whoever did that may have been interrupted here.
        transport = self._transport
        if transport is not None:
            transport.close()
        self._bell.close()
        self._wake.knock()

    def _say_goodbye(self, wait_s: float) -> None:
        ticket = Ticket()
        with self._turns, _Whole(self):
            if self._closed:
                return
            self._draining = True
            transport = self._transport
            if transport is not None:
                transport.hurry(wait_s)
            self._leasing.give_back()
            self._say(everything=True)
            transport = self._transport
            if transport is not None and wait_s:
                self._send(transport, self._leasing.goodbye(ticket).data)
        if transport is not None and wait_s:
            self._wait_for(lambda: ticket.done or self._transport is None, wait_s)
        with self._turns, _Whole(self):
            self._closed = True
            self._leasing.closed()
            self._turns.notify()

    def _forked(self) -> None:
        """The messages are the parent's; a goodbye from here would take them away from it."""
        self._turns = Turns()
        self._closed = True
        self._bell.destroy()
        self._leasing.closed()

    def __enter__(self) -> Queue:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        # A loop that ends with `break` drops its queue without closing it; nobody else should wait for its messages.
        # This runs in the middle of anything: what the system does not take at once is not sent, and comes again.
        if not getattr(self, "_closed", True):
            with contextlib.suppress(MillstreamError):
                self._close(0)


class _Whole:
    """`with _Whole(queue):` a change of what it holds.

    One that ends halfway, by an interrupt of the user's, costs the connection: with the next one all begins anew.
    """

    __slots__ = ("_queue",)

    def __init__(self, queue: Queue) -> None:
        self._queue = queue

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, problem: BaseException | None, _: object) -> None:
        transport = self._queue._transport
        if kind is not None and not issubclass(kind, MillstreamError) and transport is not None:
            self._queue._disconnect(transport, ConnectionLost(f"interrupted by {problem!r}"))


def _tend(queue_ref: weakref.ref[Queue], wake: Knock) -> None:
    """Runs in the background as long as the queue lives."""
    wait_s = 1.0
    while True:
        wake.wait(wait_s)
        queue = queue_ref()
        if queue is None or queue._closed:
            return
        try:
            wait_s = queue._look_after()
        except MillstreamError as error:
            _log.warning("queue %s: %s", queue._settings.name, error)
        except Exception:  # without this thread nobody extends leases, and those who work on would not know
            _log.exception("queue %s: what is leased could not be looked after", queue._settings.name)
            wait_s = 1.0
        del queue


@atexit.register
def _close_all() -> None:
    """A program that ends says what it has settled, and keeps nobody waiting for the rest."""
    limit = Limit(_EXIT_S)
    for queue in list(_live):
        with contextlib.suppress(Exception):  # whatever one of them meets, the others have something to say
            queue._close(max(_EXIT_S_MIN, limit.left_s))
