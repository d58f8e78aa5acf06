"""Requests and replies of the synchronous client, over the connection it has anyway.

Whoever waits for a reply reads the socket, as with any answer; see connection.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from millstream.client.blocking.connection import Connection
from millstream.client.blocking.link import Link
from millstream.client.blocking.ongoing import Ongoing
from millstream.client.forks import belongs_to_one_process
from millstream.client.messages import Message, Receipt, TopicPartition, receipt
from millstream.client.requests import Inbox
from millstream.errors import ConnectionLost, RequestTimeout, ShuttingDown, TopicNotFound
from millstream.wire.subscription_calls import OpenInbox, Subscribed

__all__ = ["Requester"]


class Requester:
    """The requests of one client; safe to share between threads."""

    def __init__(self, link: Link, reply: Callable[..., Any]) -> None:
        self._link = link
        self._reply = reply
        self._begin()
        belongs_to_one_process(self)

    def _begin(self) -> None:
        self._inbox = Inbox()
        #: The connection on which the inbox is open.
        self._open_on: Connection | None = None
        self._opening = Ongoing()
        self._replies: dict[int, Message] = {}

    def _forked(self) -> None:
        """With an inbox for two, each would get replies to the other's requests, which have the same numbers."""
        self._begin()

    @property
    def late(self) -> int:
        return self._inbox.late

    def request(
        self,
        send: Callable[[Mapping[str, str | bytes]], object],
        headers: Mapping[str, str | bytes] | None,
        timeout_s: float,
    ) -> Message:
        """Send with headers that ask for a reply, then wait for it.  Raises RequestTimeout."""
        deadline_s = time.monotonic() + timeout_s
        number = self._inbox.next_number()
        sent = False
        try:
            while True:
                connection = self._link.get(deadline_s)
                with connection.expecting(number):
                    try:
                        self._open(connection, deadline_s)
                        if not sent:
                            send(self._inbox.headers(number, headers))
                            sent = True
                        connection.wait(number, deadline_s)
                        return self._replies[number]
                    except ConnectionLost:
                        # A message that could not be sent is not sent again here: publishing has tried long enough.
                        if not sent or time.monotonic() >= deadline_s or self._link.closed:
                            raise
                        connection.retire()
        except RequestTimeout:
            raise RequestTimeout(f"no reply came within {timeout_s:g} s") from None
        finally:
            self._replies.pop(number, None)

    def reply(self, address: str, batch: tuple[bytes, bytes], timeout_s: float) -> Receipt | None:
        """Send a reply to somebody's inbox; None when that is gone."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            connection = self._link.get(deadline_s)
            try:
                result = connection.publish(address.encode(), 0, 0, *batch, deadline_s)
                return receipt(TopicPartition(address, 0), 0, result)
            except TopicNotFound:
                return None
            except (ConnectionLost, ShuttingDown):
                connection.retire()
                if time.monotonic() >= deadline_s:
                    raise

    def _open(self, connection: Connection, deadline_s: float) -> None:
        """Make sure that replies arrive on this connection."""
        opening = partial(self._open_inbox, connection, deadline_s)
        while self._open_on is not connection and not self._opening.do(opening, deadline_s):
            if time.monotonic() >= deadline_s:
                raise RequestTimeout("the broker did not answer in time")

    def _open_inbox(self, connection: Connection, deadline_s: float) -> None:
        if self._open_on is not connection:
            connection.call(OpenInbox(address=self._inbox.address), Subscribed, deadline_s=deadline_s)
            self._open_on = connection

    def take(self, connection: Connection, payload: memoryview) -> None:
        """Hand a DELIVERY to whoever waits for it.  Runs in whichever thread is reading."""
        for number, message in self._inbox.replies(payload, self._reply):
            if connection.awaits(number):
                self._replies[number] = message
                connection.fulfil(number)
            else:
                self._inbox.late += 1
