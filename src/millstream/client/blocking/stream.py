"""The synchronous stream: messages of topics, one by one or in lists, read in the thread that iterates.

Each partition has one fetch under way; the next one is sent before the answer to the last is decoded, so the broker
works while we do.  Answers wait in the socket's buffer until they are asked for: nothing is read ahead into memory.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import time
import weakref
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Final, TypeVar

from millstream.client.address import Target
from millstream.client.backoff import Backoff
from millstream.client.blocking.bell import Bell
from millstream.client.blocking.transport import Transport
from millstream.client.commits import Progress
from millstream.client.following import Following
from millstream.client.forks import belongs_to_one_process
from millstream.client.membership import Membership
from millstream.client.messages import Message, TopicPartition
from millstream.client.metadata import FETCH_WAIT_MS, Place
from millstream.client.settings import StreamSettings
from millstream.clock import monotonic_ms
from millstream.errors import ConnectionLost, MillstreamError
from millstream.wire import calls
from millstream.wire.frames import Frame
from millstream.wire.messages import encode_fetch

__all__ = ["Stream"]

_log = logging.getLogger("millstream.client")

#: A fetch is answered within its waiting time; a broker this much later is gone.
_SILENCE_S: Final = FETCH_WAIT_MS / 1000 + 15
#: However long a message is waited for, the stream looks around this often.
_LOOK_S: Final = 1.0
_T = TypeVar("_T")


class Stream(Following):
    """An endless sequence of messages: `for message in stream`.

    With a group and commit="auto", all messages before the one in hand are committed every few seconds, when partitions
    move, and at `close`.  The message in hand counts as done when the next one is asked for.  Whatever happens in
    between, it is delivered again rather than lost.

    Use a stream in one thread at a time; `close` may be called from any.
    """

    def __init__(self, target: Target, settings: StreamSettings, call: Callable[[calls.Call, Any], Any]) -> None:
        self._bell = Bell()  # first: there may be no descriptor left, and nothing to close then
        super().__init__(target, settings)
        self._call = call
        self._transport: Transport | None = None
        self._frames: Iterator[Frame] | None = None
        self._backoff = Backoff()
        self._retry_at_s = 0.0
        self._heard_s = 0.0
        belongs_to_one_process(self)

    def _forked(self) -> None:
        """The member of the group is the parent."""
        self._closed = self._attention = True
        self._bell.destroy()

    def open(self) -> None:
        """Find the topics and join the group.  Raises TopicNotFound, or the error with which the group refuses."""
        if self._settings.group is not None:
            _complete(self._find_topics)
            self._join()
            return
        try:
            # Connected first: whatever becomes of the broker after it was asked, it costs us this connection.
            self._connected(self._target.timeout_s)
            _complete(self._find_topics)
        except BaseException:
            self.close()
            raise
        if self._transport is None:
            self._disconnected()

    def _join(self) -> None:
        me = weakref.ref(self)

        def on_change() -> None:
            stream = me()
            if stream is not None:
                stream._attention = True
                stream._bell.ring()

        def progress() -> Progress | None:
            stream = me()
            return None if stream is None else stream._progress()

        self._membership = Membership(self._target, self._settings, on_change=on_change, progress=progress)
        self._membership.start()
        try:
            self._membership.wait_joined(self._target.timeout_s)
        except BaseException:
            self.close()
            raise

    # --- reading -------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Message]:
        """Messages as they come, until `close`, or until none came for `timeout_s`."""
        while True:
            for message in self._pending:
                self._last = message
                yield message
                if self._attention:
                    break
            if not self._advance(self._settings.timeout_s):
                return

    def next(self, timeout_s: float | None = None) -> Message | None:
        """The next message, or None if none comes within `timeout_s` (None waits forever) or the stream is closed."""
        ready = not self._attention and operator.length_hint(self._pending)
        if not ready and not self._advance(timeout_s):
            return None
        for message in self._pending:  # a call of `next` could be interrupted with the message in nobody's hands
            self._last = message
            return message
        raise AssertionError("there is one")

    def batches(self) -> Iterator[list[Message]]:
        """Iterate over lists of messages, each from one partition, which is less work per message.

        A whole list is in hand at a time.
        """
        while True:
            if not self._attention and (messages := [*self._pending]):  # not by a call: see `next`
                self._last = None
                yield messages
            if not self._advance(self._settings.timeout_s):
                return

    def _advance(self, wait_s: float | None) -> bool:
        """Make sure that there is a message to hand out; False when none came in time."""
        self._finish()
        deadline_s = None if wait_s is None else time.monotonic() + wait_s
        while not self._closed:
            if not self._attention_in_s() and not _complete(self._attended):
                return False
            if operator.length_hint(self._pending):
                return True
            if self._ready:
                handout = self._begin()
                if handout.damage is not None:
                    raise handout.damage
                if not handout.messages:
                    self._finish()
                continue
            remaining_s = _LOOK_S if deadline_s is None else deadline_s - time.monotonic()
            self._fetch(max(0.0, min(remaining_s, self._attention_in_s(), _LOOK_S)))
            if remaining_s <= 0 and not self._ready:
                return False
        return False

    def _fetch(self, wait_s: float) -> None:
        """Work on the connection until there is something to hand out, or a moment has passed."""
        transport = self._connected(wait_s)
        if transport is None:
            return
        if not self._look_up_in_s():
            _complete(self._look_up_again)
        try:
            self._request(transport)
            if self._frames is None:
                if not self._receive(transport, self._patience_s(wait_s)):
                    if self._positions.fetching and time.monotonic() - self._heard_s > _SILENCE_S:
                        raise ConnectionLost("the broker has not answered for too long")
                    return
                self._heard_s = time.monotonic()
                self._frames = transport.frames()
            if not self._next_handout(transport, self._frames):
                self._frames = None
            if transport.goaway:
                raise ConnectionLost("the broker asks its clients to go")
        except ConnectionLost as error:
            self._disconnect(error)
        except MillstreamError:
            raise
        except BaseException as problem:  # of a signal's handler: an answer may be lost that was counted as taken
            self._disconnect(ConnectionLost(f"interrupted by {problem!r}"))
            for position in self._positions:
                self._give_back(position)
            raise
        if gone := self._out_of_range():
            _complete(lambda: self._restart(gone))

    def _receive(self, transport: Transport, wait_s: float) -> bool:
        """Wait for bytes, or for the bell."""
        if transport.receive(0):
            return True
        if wait_s <= 0 or not self._bell.beside(transport.wait, wait_s):
            return False
        if transport.receive(0):
            return True
        self._bell.clear()  # it was the bell, then
        return False

    def _request(self, transport: Transport) -> None:
        requests = self._requests()
        if requests:
            self._heard_s = time.monotonic()
            transport.send(*[encode_fetch(request, correlation) for correlation, request in requests])

    def _next_handout(self, transport: Transport, frames: Iterator[Frame]) -> bool:
        """Take in answers up to the first that has messages; False when the frames are exhausted."""
        for frame in frames:
            assert frame.correlation is not None
            fetched = self._positions.accept(frame.correlation, frame.payload, monotonic_ms())
            if fetched is not None:
                try:
                    if not fetched.is_the_latest:
                        self._request(transport)  # which travels while this answer is decoded and handled
                finally:
                    # The position is behind these messages already: they are kept even if the connection breaks now.
                    self._ready.append(self._positions.decode(fetched))
                return True
        return False

    def _patience_s(self, wait_s: float) -> float:
        wait_s = min(wait_s, self._look_up_in_s())
        retry_ms = self._positions.next_retry_ms(monotonic_ms())
        return wait_s if retry_ms is None else min(wait_s, max(0.001, retry_ms / 1000))

    # --- connection ----------------------------------------------------------------------------------------------

    def _connected(self, wait_s: float) -> Transport | None:
        if self._transport is not None:
            return self._transport
        now_s = time.monotonic()
        if now_s < self._retry_at_s:
            self._bell.wait(min(wait_s, self._retry_at_s - now_s))
            return None
        try:
            receive_bytes = self._settings.max_bytes + 64 * 1024
            timeout_s = min(self._target.timeout_s, self._backoff.patience_s(wait_s))
            self._transport = Transport.open(self._target, timeout_s=timeout_s, receive_bytes=receive_bytes)
        except MillstreamError as error:
            if not error.retriable:
                raise
            self._retry_at_s = time.monotonic() + self._backoff.next_s()
            if self._backoff.attempts == 1:
                _log.warning("stream: %s; trying again", error)
            return None
        if self._closed:  # meanwhile, by another thread: it has closed the connection that it knew of
            self._disconnect()
            return None
        self._backoff.reset()
        self._heard_s = time.monotonic()
        self._reached(self._transport.welcome.epoch)
        return self._transport

    def _disconnect(self, error: MillstreamError | None = None) -> None:
        transport, self._transport, self._frames = self._transport, None, None
        if transport is not None:
            transport.close()
        self._disconnected()
        if error is not None and not self._closed:
            _log.info("stream: %s; connecting again", error)

    def keep_alive(self, now_s: float) -> None:
        transport = self._transport
        if transport is not None:
            with contextlib.suppress(MillstreamError):  # the reading thread finds out
                transport.keep_alive(now_s)

    # --- how to wait (see following.py) ------------------------------------------------------------------------------

    async def _ask(self, call: calls.Call, kind: Any) -> Any:
        return self._call(call, kind)

    async def _commit(self, offsets: dict[TopicPartition, int], epoch: int | None, timeout_s: float) -> None:
        assert self._membership is not None
        self._membership.commit(offsets, self._holdings(offsets), epoch).wait(timeout_s)

    async def _tell(self, callback: Callable[..., Any] | None, *arguments: object) -> None:
        if callback is not None:
            callback(*arguments)

    # --- what users do -------------------------------------------------------------------------------------------

    def commit(self, message: Message | None = None) -> None:
        """Commit everything handed out, or `message` and everything before it in its partition.

        Waits for the broker.  Raises StaleGeneration or UnknownMember if the partition has moved to another member,
        even if it has come back since the message was read.
        """
        offsets = self._to_commit(message)
        if offsets:
            self._note_commit(offsets)  # first: an automatic commit may follow before this thread runs again
            _complete(lambda: self._commit(offsets, self._epoch_of(message), self._target.timeout_s))

    def seek(self, topic: str, partition: int, to: Place) -> None:
        """Continue from another place: an offset, a datetime, "earliest" or "latest"."""
        _complete(lambda: self._seek(TopicPartition(topic, partition), to))

    def close(self) -> None:
        """Commit what is finished (commit="auto"), leave the group, and end the iteration."""
        if self._closed or self._closing:  # by another one, or by whom we tell that its partitions go
            return
        self._closing = True
        try:
            _complete(self._let_go)
        finally:
            self._closed = self._attention = True  # what is left of the handout is for others
            if self._membership is not None:
                self._membership.stop()
            transport = self._transport
            if transport is not None:
                transport.close()
            self._bell.close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        # A loop that ends with `break` drops its stream without closing it; the group must not wait for it.
        if getattr(self, "_closed", True):
            return
        self._closed = True
        if self._membership is not None:
            if self._settings.commits_itself:
                epoch, finished = self._progress()
                self._membership.commit(finished, self._holdings(finished), epoch)
            self._membership.stop(wait_s=0)
        if self._transport is not None:
            self._transport.close()
        self._bell.close()


def _complete(begin: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
    """Run what both kinds of stream share.  Here its primitives block instead of waiting, so it ends at once.

    It is made here: a signal's handler may raise as this is called, and nobody would have run what was made before.
    """
    try:
        begin().send(None)
    except StopIteration as end:
        result: _T = end.value
        return result
    raise AssertionError("a synchronous stream has waited for an event loop")
