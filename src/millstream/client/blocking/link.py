"""A connection that is there when it is needed: opened again, with growing pauses, whenever it is lost."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from millstream.client.address import Target
from millstream.client.backoff import Backoff
from millstream.client.blocking.connection import Connection
from millstream.client.blocking.knock import Flag
from millstream.client.blocking.ongoing import Ongoing
from millstream.client.blocking.transport import Transport
from millstream.client.forks import belongs_to_one_process
from millstream.client.metadata import is_repeatable
from millstream.errors import ConnectionLost, MillstreamError, ShuttingDown
from millstream.wire.calls import Call
from millstream.wire.frames import Frame

__all__ = ["Link"]


class Link:
    """The requests of one client, over one connection at a time."""

    def __init__(self, target: Target) -> None:
        self._target = target
        #: One thread connects, the others wait for it.
        self._opening = Ongoing()
        #: Why it did not come to it yet.
        self._trouble = ""
        self._wake = Flag()
        self._closed = False
        self._connection: Connection | None = None
        #: Gets what is received without having been asked for.
        self.on_push: Callable[[Connection, Frame], None] | None = None
        #: Called when there is another connection.
        self.on_open: Callable[[], None] | None = None
        belongs_to_one_process(self)

    @property
    def current(self) -> Connection | None:
        return self._connection

    @property
    def closed(self) -> bool:
        return self._closed

    def open(self) -> None:
        """Connect now; raises ConnectionLost at once if that fails."""
        self._connection = self._connect(None)

    def _connect(self, timeout_s: float | None) -> Connection:
        transport = Transport.open(self._target, timeout_s=timeout_s)
        connection = Connection(transport)
        me, it = weakref.ref(self), weakref.ref(connection)  # a client that is dropped without `close` goes at once

        def pushed(frame: Frame) -> None:
            link, receiver = me(), it()
            if link is not None and link.on_push is not None and receiver is not None:
                link.on_push(receiver, frame)

        transport.on_push = pushed
        if self.on_open is not None:
            self.on_open()
        return connection

    def get(self, deadline_s: float) -> Connection:
        """A usable connection.  Tries until the deadline; raises ConnectionLost after it."""
        while True:
            connection = self._connection
            if connection is not None and connection.usable:
                return connection
            ours = self._opening.do(partial(self._open_again, deadline_s), deadline_s)
            if not ours and time.monotonic() >= deadline_s:
                raise ConnectionLost(self._trouble or str(self._target.unreachable(TimeoutError())))

    def _open_again(self, deadline_s: float) -> None:
        backoff = Backoff()
        while True:
            connection = self._connection
            if self._closed:
                if connection is not None:
                    connection.close()  # opened since, perhaps: `close` has closed the one that it knew of
                raise ConnectionLost("the client is closed")
            if connection is not None and connection.usable:
                return
            if connection is not None:
                connection.retire()
            try:
                self._connection = self._connect(max(0.05, deadline_s - time.monotonic()))
                self._trouble = ""
            except (ConnectionLost, ShuttingDown) as error:
                self._trouble = str(error)
                wait_s = backoff.next_s()
                if time.monotonic() + wait_s >= deadline_s:
                    raise ConnectionLost(str(error)) from None
                self._wake.wait(wait_s)

    def call(self, call: Call, kind: Any) -> Any:
        """Make a call; one whose answer is lost is made again if that cannot do harm."""
        deadline_s = time.monotonic() + self._target.timeout_s
        while True:
            connection = self.get(deadline_s)
            try:
                return connection.call(call, kind, deadline_s=deadline_s)
            except (ConnectionLost, ShuttingDown) as error:
                if isinstance(error, ConnectionLost) and not is_repeatable(call):
                    raise ConnectionLost(f"{error}; the request may or may not have been carried out") from None
                connection.retire()
                if time.monotonic() >= deadline_s:
                    raise

    def close(self) -> None:
        self._closed = True
        self._wake.set()
        if self._connection is not None:
            self._connection.close()

    def _forked(self) -> None:
        """The next request connects: nobody here waits for an answer on the parent's connection."""
        self._opening = Ongoing()
        self._connection = None

    def keep_alive(self, now_s: float) -> None:
        """Called now and then by the background thread of the client."""
        connection = self._connection
        if connection is not None and connection.usable:
            try:
                connection.transport.keep_alive(now_s)
                connection.poll()
                connection.transport.check_silence(now_s)
            except MillstreamError:
                pass  # the next request connects again
